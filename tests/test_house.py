"""The rules of the house: what is where, and who imports whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = "memory planner executor verifier generator tools flow_grpo solve train".split()
LEVELS = [["world"], ["models"], ["fast", "rewards"], ["scale"], ["record"], ["benchmarks"]]  # up
ROOMS = [room for level in LEVELS for room in level]
OTHERS = ["toy", "experiments", "bench", "tests"]  # these may import the nine


def imported(file):
    """The first names of the modules that a file imports, also inside its functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


def forbidden(name):
    """What a script or a room must not import."""
    if name == "flow_grpo":  # the objective knows no agent
        return {*ORDER, *OTHERS}
    if name in ORDER:
        return {*ORDER[ORDER.index(name) :], *OTHERS}
    level = next(n for n, rooms in enumerate(LEVELS) if name in rooms)
    beside_or_above = {room for rooms in LEVELS[level:] for room in rooms}
    return {*ORDER, *OTHERS, *beside_or_above} - {name}


def test_the_nine_scripts_are_all_that_is_at_the_top():
    assert sorted(path.stem for path in ROOT.glob("*.py")) == sorted(ORDER)
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {*ROOMS, "toy"}


@pytest.mark.parametrize("name", [*ORDER, *ROOMS])
def test_imports_go_down_and_no_room_imports_a_script(name):
    files = [ROOT / f"{name}.py"] if name in ORDER else list(ROOT.glob(f"{name}/**/*.py"))
    for file in files:
        assert not imported(file) & forbidden(name), file
