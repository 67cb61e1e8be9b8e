"""README.md and docs/ agree with the code: their links, names, commands and flags are checked.

So are the excerpts of docs/tour.md, what it types into Python, and the numbers of its tables."""

import ast
import doctest
import functools
import re
import textwrap
from pathlib import Path

from test_house import ORDER, OTHERS, ROOMS, SOURCES

from cli.flags import FOR_HOPS, FOR_PAPER, FOR_TOY, solve_parser, train_parser
from flow_grpo import advantages

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = [README, *sorted((ROOT / "docs").glob("*.md"))]
TOUR = ROOT / "docs" / "tour.md"
PAGES = [*DOCS, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "experiments").glob("*.md"))]
REFERENCE = re.compile(r"\[`([\w/]+\.py):\s+([\w,\s]+)`\]\(([^)]+)\)")  # [`flow_grpo.py: loss`](flow_grpo.py)
MENTION = re.compile(rf"(?<![\w/.:-])(?:{'|'.join([*ROOMS, *OTHERS, 'docs'])})/[\w/-]+\.(?:py|md|diff|svg)\b")
EXCERPT = re.compile(r"^\[`([\w/]+\.py): (\w+)`\]\(\S+\)\n```python\n(.*?)```$", re.M | re.S)
COMMAND = re.compile(r"(?:python3?|torchrun --\S+ \d+) (-m (?!venv|pytest))?([\w/.]+)((?: (?!&&)\S+)*)")
PARSERS = {"solve.py": solve_parser(), "train.py": train_parser()}
FLAGS = {file: set(parser._option_string_actions) for file, parser in PARSERS.items()}


@functools.cache
def defined(path):
    """All names that a Python file defines: functions, classes, constants, fields."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def commands(text):
    """(file, flags) of each Python command in the code blocks and code spans of a page."""
    text = text.replace(" \\\n", " ")
    for code in re.findall(r"^(?:    |\$ )(.*)$", text, re.M) + re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
        for module, name, rest in COMMAND.findall(" ".join(code.split("#")[0].split())):
            file = f"{name.replace('.', '/')}.py" if module else name
            yield file, re.findall(r"(?<=\s)--[\w-]+", rest)


def test_no_line_is_longer_than_110_characters():
    lines = [line for page in DOCS for line in page.read_text(encoding="utf-8").splitlines()]
    assert not [line for line in lines if len(line) > 110]


def test_every_relative_link_leads_to_a_file():
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8"))]
    assert [(page.name, link) for page, link in links
            if "://" not in link and not (page.parent / link).exists()] == []


def test_every_named_function_is_defined_in_its_file():
    for page in PAGES:
        for file, names, link in REFERENCE.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / link).resolve() == ROOT / file
            assert set(re.findall(r"\w+", names)) <= defined(ROOT / file), (page.name, file)


def test_every_file_of_a_room_that_a_page_or_a_source_mentions_exists():
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    texts |= {file: source for file, source in SOURCES.items() if not file.startswith("tests/")}
    missing = [(name, path) for name, text in texts.items() for path in MENTION.findall(text)
               if not (ROOT / path).exists()]
    assert missing == []


def test_every_shown_command_and_flag_exists():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for file, flags in commands(text):
            known = FLAGS.get(file) or (ROOT / file).read_text(encoding="utf-8")
            assert not [flag for flag in flags if flag not in known], (page.name, file)
        assert set(re.findall(r"`(--[\w-]+)", text)) <= set().union(*FLAGS.values()), page.name


# ---- docs/tour.md ------------------------------------------------------------------------------------------

def lines_of(file, name):
    """The source lines of one function or class of a file."""
    source = (ROOT / file).read_text(encoding="utf-8")
    [node] = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", None) == name]
    return source.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]


def test_each_excerpt_of_the_tour_is_in_the_function_that_it_names():
    text = TOUR.read_text(encoding="utf-8")
    excerpts = EXCERPT.findall(text)
    assert len(excerpts) == text.count("```python") > 3
    for file, name, excerpt in excerpts:
        lines, length = lines_of(file, name), excerpt.count("\n")
        assert 3 <= length <= 12
        windows = ("".join(lines[start : start + length]) for start in range(len(lines)))
        assert excerpt in map(textwrap.dedent, windows), f"{file}: {name}"


def test_the_tour_visits_all_nine_scripts():
    headings = re.findall("^## .*", TOUR.read_text(encoding="utf-8"), re.M)
    assert {name for heading in headings for name in re.findall(r"(\w+)\.py", heading)} == set(ORDER)


def test_what_the_tour_types_into_python_prints_what_it_shows(monkeypatch):
    monkeypatch.chdir(ROOT)
    failed, tried = doctest.testfile(str(TOUR), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert tried > 40 and not failed


def test_the_tours_table_of_settings_says_what_train_py_chooses():
    table = dict(re.findall(r"(?m)^\| (`--.*?) \| (.*) \|$", TOUR.read_text(encoding="utf-8")))
    fixed = vars(train_parser().parse_args([]))
    large = FOR_PAPER | {"lr": 1e-6}  # None in FOR_PAPER: cli/setup.py sets it
    chosen = [fixed | own for own in (FOR_TOY, FOR_HOPS, large)]
    assert len(table) == 9
    for row, shown in table.items():
        names = [name.replace("-", "_") for name in re.findall("--([a-z-]+)", row)]
        values = [", ".join(str(settings[name]) for name in names) for settings in chosen]
        assert shown.split(" | ") == values, row


def test_the_advantages_in_the_tours_table_are_those_of_its_rewards():
    text = TOUR.read_text(encoding="utf-8").replace("**", "")
    rows = re.findall(r"^\| \d .* (\d) \| (\S+) \|$", text, re.M)
    A, _ = advantages([float(reward) for reward, _ in rows], [0] * len(rows))
    assert [f"{a:.3f}" for a in A.tolist()] == [a for _, a in rows] and len(rows) == 8
