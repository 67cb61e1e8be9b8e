"""docs/troubleshooting.md and docs/log.md quote what the code prints today: lines, sentences, columns."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import NO_UPDATE

from logbook import log

ROOT = Path(__file__).parent.parent
PRINTERS = "planner.py train.py logbook/advice.py models/batches.py scale/fit.py logbook/run.py".split()
ROLLOUT = SimpleNamespace(  # without a turn: all that a row of log.csv needs
    memory=SimpleNamespace(steps=[]), outputs=[], plans=[], right=True, reward=1.0, failed="",
    undecided=False)
TOOLS = ["base_generator", "python_coder", "wikipedia_search"]
ROW = log.step_row(1, [ROLLOUT], [ROLLOUT], [0], 0, NO_UPDATE, TOOLS)


def page(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def shape(text):
    """Its words, with the decimals of each number: 'kl 12.3456' -> 'kl 0.0000'"""
    zeros = re.sub(r"\d+(\.\d+)?", lambda match: "0" + re.sub(r"\d", "0", match[1] or ""), text)
    return " ".join(zeros.split())


def sentences(path):
    """All constant pieces of the texts in a Python file, without its docstrings."""
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))))
    docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
    return [" ".join(node.value.split()) for node in nodes if isinstance(node, ast.Constant)
            and isinstance(node.value, str) and node not in docstrings]


@pytest.mark.parametrize("name", ["troubleshooting.md", "log.md"])
def test_each_quoted_line_of_a_step_has_the_form_that_the_code_prints(name):
    row = ROW | {"failed": 1, "undecided": 1, "skipped": 1.0}
    printed = [shape(cell) for cell in log.step_line(row, 60, 1.0, 1.0).split("|")]
    quoted = [line for line in page(name).splitlines() if re.match(r"step +\d", line)]
    for line in quoted:
        cells = [shape(cell) for cell in line.split("|") if cell.strip() != "..."]
        assert cells == [cell for cell in printed if cell in cells], line
    assert len(quoted) >= 3


def test_each_quoted_sentence_is_in_the_words_that_the_code_prints():
    known = "\n".join(text for path in PRINTERS for text in sentences(path))
    blocks = re.findall(r"^```\n(.*?)^```", page("troubleshooting.md"), re.M | re.S)
    lines = [line.split() for block in blocks for line in block.splitlines() if not line.startswith("step ")]
    trios = {" ".join(words[i : i + 3]) for words in lines for i in range(len(words) - 2)}
    fixed = [trio for trio in trios if not re.search(r"[\d/']|\.\.\.|^x ", trio)]  # the other words vary
    assert len(fixed) > 40 and not [trio for trio in fixed if trio not in known]


def test_every_column_that_troubleshooting_names_is_in_log_csv():
    text = page("troubleshooting.md")
    heads = [cell for head in re.findall(r"^\| step \|(.*)\|$", text, re.M) for cell in head.split("|")]
    named = re.findall(r"(?<!\*)\*([a-z_]+)\*(?!\*)", text) + [cell.strip() for cell in heads]
    assert len(named) > 10 and set(named) <= set(ROW)
