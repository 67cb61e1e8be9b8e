"""The rules of the house: what is where and who imports whom. (Lines and syntax: ruff, in .ci/run.)

    python -m tests.test_house      prints the picture of the imports that CONTRIBUTING.md shows
"""

import ast
import functools

from bench import pitfalls
from experiments.runs import ROOT

ORDER = ["memory", "planner", "executor", "verifier", "generator", "tools", "solve", "flow_grpo", "train"]
ROOMS = ["world", "fast", "models", "rewards", "benchmarks", "scale", "logbook", "cli"]  # from the ground up
OTHERS = ["toy", "experiments", "bench", "tests"]  # these may import the nine
PATHS = [*ROOT.glob("*.py"), *(path for room in ROOMS + OTHERS for path in ROOT.glob(f"{room}/**/*.py"))]
SOURCES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PATHS}


@functools.cache
def imported(source):
    """The first names of the modules that a source imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        found.update(name.split(".")[0] for name in names)
    return found


def picture():
    """Which room imports which, as a Mermaid flowchart in which the nine scripts are one box.

    `a --> b & c`: a imports b and c. experiments/, bench/ and tests/ may import everything, so their own
    arrows are left out; an arrow to one of them would be drawn."""
    boxes = ["toy", "nine", *OTHERS[1:], *reversed(ROOMS)]
    arrows = set()
    for file, source in SOURCES.items():
        start = file.split("/")[0].removesuffix(".py")
        ends = {"nine" if name in ORDER else name for name in imported(source)}
        if start not in OTHERS[1:]:
            arrows |= {("nine" if start in ORDER else start, end) for end in ends}
    lines = ["flowchart TD"]
    for start in boxes:
        ends = [end for end in boxes if end != start and (start, end) in arrows]
        lines += [f"    {start} --> {' & '.join(ends)}"] if ends else []
    return "\n".join(lines)


def test_the_nine_scripts_are_all_that_is_at_the_top():
    assert sorted(path.stem for path in ROOT.glob("*.py")) == sorted(ORDER)
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {*ROOMS, "toy"}


def test_imports_go_down_and_no_room_imports_a_script():
    for file in (file for file in SOURCES if file.split("/")[0] not in OTHERS):
        script = file.removesuffix(".py")
        above = ORDER[ORDER.index(script) :] if script in ORDER else ORDER
        agent = ORDER[:-2] if script == "flow_grpo" else []  # the objective knows no agent
        assert not imported(SOURCES[file]) & {*above, *agent, *OTHERS}, file


def test_a_room_imports_no_room_above_it():
    for file in (file for file in SOURCES if file.split("/")[0] in ROOMS):
        assert not imported(SOURCES[file]) & {*ROOMS[ROOMS.index(file.split("/")[0]) + 1 :]}, file


def test_contributing_shows_the_imports_as_they_are():
    shown = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("```mermaid\n")[1].split("\n```")[0]
    assert shown == picture(), "write what `python -m tests.test_house` prints into CONTRIBUTING.md"


def test_ci_runs_the_readmes_test_command_to_the_letter():
    install = "python3 -m venv .venv && . .venv/bin/activate && pip install -q -r requirements.txt"
    for file in ("README.md", "CONTRIBUTING.md", ".ci/run", ".github/workflows/tests.yml"):
        assert f"{install} && python -m pytest -q" in (ROOT / file).read_text(encoding="utf-8")


def test_every_fault_that_bench_pitfalls_tries_is_found_in_the_code():
    lost = [fault[:2] for fault in pitfalls.FAULTS if len(pitfalls.files_with(fault[2])) != 1]
    assert not lost, "the code of these faults has changed: bench/pitfalls.py must quote it as it is"


if __name__ == "__main__":
    print(picture())
