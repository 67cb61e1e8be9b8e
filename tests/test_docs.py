"""README.md and docs/ agree with the code: commands, links, names, and their examples run."""

import ast
import doctest
import functools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import record.flags
import solve
import tools
import train
from benchmarks.questions import Question, parse
from rewards.rules import decide
from world.search import rows_of

ROOT = Path(__file__).resolve().parents[1]
USE, TOUR = ROOT / "docs/use.md", ROOT / "docs/tour.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]
COMMAND = re.compile(
    r"(?:python3?|torchrun(?: --\S+ \d+)+) (?!-m venv|-m pytest)((?:-m )?\S+)([^|&`]*)"
)
FILE = re.compile(r"([\w./-]+\.(?:py|md|diff|jsonl|csv|svg))(?:: ([\w, ]+))?")  # and its functions
MADE_BY_RUNS = re.compile(r"runs/|(questions|rollouts|log|evals|table)\.")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def commands(page):
    """(file, words) of each Python command in the code blocks and code spans of a page."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    for name, value in re.findall(r'\b(\w+)="(.*?)"', text):  # of the shell
        text = text.replace(f"${name}", value)
    shown = re.findall(r"^(?:    |\$ )(.*)$", text, re.M)
    shown += [" ".join(span.split()) for span in re.findall(r"(?<!`)`(python\s[^`]+)`", text)]
    for name, words in (found for line in shown for found in COMMAND.findall(line)):
        file = f"{name[3:].replace('.', '/')}.py" if name.startswith("-m ") else name
        words = [word for word in shlex.split(words, comments=True) if word != "..."]
        yield file, ["1" if word == "N" else word for word in words]


@functools.cache
def names_in(path):
    """All names that a Python file defines: functions, classes, constants, fields."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    stored = (n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return {*stored, *(n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef)))}


def anchors(page):
    """What links call the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@each_page
def test_every_shown_command_parses(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the reader has no runs/ yet
    monkeypatch.setattr(record.flags, "TOY", str(ROOT / "toy"))
    for file, words in commands(page):
        if flags := {"train.py": train.given, "solve.py": solve.flags}.get(file):
            try:
                flags(words)
            except SystemExit:
                pytest.fail(f"{file} {shlex.join(words)}")  # argparse has printed why
        else:
            source = (ROOT / file).read_text("utf-8")
            assert all(f'"{word}"' in source for word in words if word.startswith("--")), words


@each_page
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = page.read_text("utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"^\[\w+\]: (\S+)", text, re.M)
    for link in (link for link in links if "://" not in link):
        target, _, anchor = link.partition("#")
        target = (page.parent / target).resolve() if target else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_page
def test_every_file_and_function_in_backticks_exists(page):
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", page.read_text("utf-8")):
        span = " ".join(span.split())
        if (found := FILE.fullmatch(span)) and not MADE_BY_RUNS.match(span):
            assert (ROOT / found[1]).exists(), span
            assert {*(found[2] or "").split(", ")} <= {*names_in(ROOT / found[1]), ""}, span
        if found := re.fullmatch(r"(?:\w+\.)?(\w+)\(\)", span):
            assert any(found[1] in names_in(file) for file in SCRIPTS), span


def test_the_examples_of_use_md_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tools, "TOOLS", {**tools.TOOLS})  # the example adds a tool
    text = USE.read_text("utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(code, {})
    assert re.search(r"Result: 3\n.*True", capsys.readouterr().out, re.S)
    questions, passages = re.findall(r"```json\n(.*?)```", text, re.S)
    for line in questions.splitlines():
        assert decide(parse(line), str(json.loads(line)["answer"]))
    (tmp_path / "passages.jsonl").write_text(passages)
    assert len(list(rows_of(tmp_path / "passages.jsonl"))) == 2


def test_the_concept_of_a_script_ends_where_the_readme_says():
    found = re.findall(r"\]\((\w+\.py)\): .*, up to line (\d+)", PAGES[0].read_text("utf-8"))
    assert len(found) == 2
    for file, line in found:
        after = (ROOT / file).read_text("utf-8").splitlines()[int(line) :]
        assert [after[:2], after[2][:6]] == [["", ""], "# ----"], file


def test_the_session_of_tour_md_runs():
    assert not doctest.testfile(str(TOUR), module_relative=False).failed


def test_the_dollars_of_gpu_md_are_those_that_cost_py_computes():
    command = [sys.executable, ROOT / "bench" / "cost.py"]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert table.count("\n") == 5 and table in (ROOT / "docs" / "gpu.md").read_text("utf-8")


def test_the_rules_decide_as_the_table_of_use_md_says():
    rows = re.findall(r"^\| `(.+?)` \|(.*)\|(.*)\|(.*)\|$", USE.read_text("utf-8"), re.M)
    assert len(rows) > 4
    for gold, *cells in rows:
        for verdict, cell in zip((True, False, None), cells):
            for answer in re.findall("`(.+?)`", cell):
                assert decide(Question("?", gold), answer) is verdict, (gold, answer)
