"""experiments/flows.py makes the page of a run; curves.py draws runs."""

import csv
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import solve
from benchmarks.questions import Question
from experiments import curves, flows
from memory import Memory, Step
from record.folder import append
from record.rollouts import record_of

TAGS = "html head meta title style body h1 h2 h3 h4 p details summary b div pre".split()
HOSTILE = [
    "</pre></details><script>document.title = 'hacked'</script>",
    '" onclick="alert(1)"><img src=x onerror=alert(1)>',
    "]]>--><!-- &lt;b&gt; <style>* {}</style>",
    "\x1b[31m\x00\u202eright to left \ud800 half a pair",
]


class Reader(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""
        self.feed(page)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        self.text += data


def rollout(text="q?", reward=1.0, failed="", tool="python_coder"):
    """A finished rollout of one turn in which every text is this one."""
    rollout = solve.Rollout(Question(text, text), Memory(text, text), answer=text, failed=failed)
    rollout.right, rollout.reward = reward > 0, reward
    rollout.memory.steps = [Step(1, tool, text, text, text, error=True, verdict="STOP")]
    modules = ["analysis", "planner", "executor", "python_coder", "verifier", "generator"]
    for turn, module in enumerate(modules if tool else modules[:2]):
        rollout.add_output(min(turn, 1), module, text, 3, 0.5)
    return rollout


def write(path, rollouts, **more):
    path.parent.mkdir(exist_ok=True)
    append(path, [more | record_of(one) for one in rollouts])


def run_of(tmp_path, *steps):
    """A training run with groups of two, and these rollouts in its steps 1, 2, ..."""
    (tmp_path / "args.json").write_text('{"group_size": 2}')
    for step, rollouts in enumerate(steps, 1):
        write(tmp_path / "rollouts.jsonl", rollouts, step=step)
    return tmp_path


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_rollout_becomes_html(text, tmp_path):
    rollouts = [rollout(text), rollout(text, 0.0, failed=text, tool="")]
    rollouts[0].outputs[1]["turn"] = text  # a number, in our own folders
    folder = run_of(tmp_path, rollouts)
    page = flows.page(text, flows.sections_of([folder]))
    found = Reader(page)
    assert found.tags == {*TAGS} and not found.attributes - {
        *"lang charset http-equiv content name class".split()
    }
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert not any(c in page for c in "\x1b\x00\u202e\ud800")
    page.encode()


def test_the_page_of_a_run_shows_each_groups_rewards_advantages_and_errors(tmp_path):
    first = [rollout("a?"), rollout("a?", 0.0), rollout("b?"), rollout("b?", failed="no server")]
    folder = run_of(tmp_path, first, [rollout("c?")] * 2, [rollout("d?", 0.0, tool="")] * 2)
    text = Reader(flows.page("", flows.sections_of([folder]))).text
    assert "right python_coder · “a?” · reward 1 · A +0.71" in text
    assert "wrong python_coder · “a?” · reward 0 · A -0.71" in text
    assert text.count("A +0.00") == 5  # a lonely rollout, and two flat groups
    assert "no server" in text and "no outcome" in text and "unreadable plan" in text
    only = flows.sections_of([folder], {2})
    assert [title for title, _ in only] == ["Step 2"]


def test_a_group_or_a_line_that_is_not_finished_is_left_out(tmp_path):
    folder = run_of(tmp_path, [rollout("a?"), rollout("a?"), rollout("b?")])
    with open(folder / "rollouts.jsonl", "a") as file:
        file.write('{"step": 1, "id"')
    [(_, groups)] = flows.sections_of([folder])
    assert [[record["question"] for _, record, _ in group] for group in groups] == [["a?"] * 2]


@pytest.mark.exhaustive
def test_two_folders_of_solve_py_are_shown_question_by_question_with_a_title_and_notes(tmp_path):
    for name, reward in (("before", 0.0), ("after", 1.0)):
        answers = [rollout("a?", reward), rollout("b?")]
        for trial in (0, 1):
            write(tmp_path / name / f"questions-{trial}.jsonl", answers)
    (tmp_path / "notes.txt").write_text("2: It reads: twice.\n\n")
    command = [sys.executable, flows.__file__, tmp_path / "before", tmp_path / "after", "--title"]
    command += ["Two <questions>", "--notes", tmp_path / "notes.txt", "--out"]
    subprocess.run([*command, tmp_path / "page.html"], check=True)
    page = (tmp_path / "page.html").read_text()
    assert "<title>Two &lt;questions&gt;</title>" in page and 'href="#2"' in page
    text = Reader(page).text
    assert "Look at question 2." in text and "1. a?Answer: a? wrong before" in text
    assert "2. b?Answer: b? Look at this: It reads: twice. right before" in text
    assert text.index("wrong before") < text.index("right after")
    assert text.count("wrong before") == 2 and text.count("right after") == 4
    (tmp_path / "notes.txt").write_text("3: of no question")
    done = subprocess.run([*command, tmp_path / "page.html"], capture_output=True, text=True)
    assert done.returncode == 2 and "a note is on question 3, but the page has 2" in done.stderr


@pytest.mark.parametrize(
    "script, name",
    [
        (flows, "flows.html"),
        pytest.param(curves, "curves.svg", marks=pytest.mark.extras("matplotlib")),
    ],
)
def test_no_page_and_no_picture_is_written_through_a_link(script, name, tmp_path, monkeypatch):
    folder, ours = logged(tmp_path / "run", [1], errors=0), tmp_path / "ours"
    run_of(folder, [rollout(), rollout()])
    ours.write_text("ours")
    (folder / name).symlink_to(ours)
    words = [name, str(folder)] + ["--columns", "reward"] * (script is curves)
    monkeypatch.setattr(sys, "argv", words)
    script.main()
    assert ours.read_text() == "ours" and len((folder / name).read_text()) > 1000


@pytest.mark.parametrize("text", HOSTILE)
def test_no_note_becomes_html(text, tmp_path):
    page = flows.page("", flows.sections_of([run_of(tmp_path, [rollout(), rollout()])]), {1: text})
    assert Reader(page).tags == {*TAGS, "h2", "a"} and text not in page


@pytest.mark.exhaustive
def test_a_folder_without_rollouts_is_one_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, flows.__file__, tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 2 and "has no rollouts" in done.stderr


# ------------------------------------------------------------------------------------------- curves
def logged(folder, rewards, accuracies=(), **args):
    """A training run with these rows and settings."""
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(args))
    log = [{"step": n, "reward": reward} for n, reward in enumerate(rewards, 1)]
    evals = [
        {"step": n, "questions": "test", "accuracy": share} for n, share in enumerate(accuracies)
    ]
    for name, rows in (("log.csv", log), ("evals.csv", evals)):
        with open(folder / name, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0] if rows else ["step"])
            writer.writeheader()
            writer.writerows(rows)
    return folder


def test_seeds_are_one_line_and_neither_a_sweep_nor_another_clone_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = "a/bonus-0.2-seed0 a/bonus-0.2-seed1 a/bonus-0.5-seed0 a/bonus-0.5 b/bonus-0.5".split()
    runs = [logged(Path(name), [n]) for n, name in enumerate(names)]
    lines = curves.lines_of(runs)
    numbers = {"a/bonus-0.2": 2, "a/bonus-0.5": 2, "b/bonus-0.5": 1}
    assert {name: len(some) for name, some in lines.items()} == numbers
    assert curves.points(lines["a/bonus-0.2"], "reward") == [(1, 0, 0.5, 1)]


def test_runs_of_a_line_that_differ_in_more_than_their_seed_are_named(tmp_path):
    same = dict(beta=0, tools=["a"])
    one = logged(tmp_path / "a-seed0", [1], lr=0.1, seed=0, **same)
    other = logged(tmp_path / "a-seed1", [1], lr=0.2, seed=1, **same)
    third = logged(tmp_path / "b-seed1", [1], lr=0.3, seed=1, **same)
    assert curves.mixed([one, other, third]) == [(str(tmp_path / "a"), "lr")]


def test_a_line_has_the_steps_that_all_seeds_have_of_any_column(tmp_path):
    one = logged(tmp_path / "a-seed0", ["0.5", "nan", 0.75], [0, 1])
    other = logged(tmp_path / "a-seed1", ["0.25", 1, 0.5, 1], [0.5])
    [runs] = curves.lines_of([one, other]).values()
    assert curves.points(runs, "reward") == [(1, 0.25, 0.375, 0.5), (3, 0.5, 0.625, 0.75)]
    assert curves.points(runs, "test.accuracy") == [(0, 0, 0.25, 0.5)]


@pytest.mark.parametrize(
    "run, column, why",
    [("a", "rewards", "no column rewards"), ("b", "kl", "b is not the folder of a training run")],
)
def test_a_missing_package_column_or_folder_is_one_sentence(run, column, why, tmp_path):
    logged(tmp_path / "a", [1])
    command = [sys.executable, curves.__file__, tmp_path / run, "--columns", column]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and ("matplotlib" in done.stderr or why in done.stderr)


@pytest.mark.extras("matplotlib")
def test_a_line_keeps_its_colour_and_its_name_in_a_panel_where_another_has_no_number(tmp_path):
    import matplotlib.pyplot as plt

    logged(tmp_path / "a-seed0", [1, 1])
    logged(tmp_path / "b-seed0", [1, 1], [0, 1])
    lines = curves.lines_of([tmp_path / "a-seed0", tmp_path / "b-seed0"])
    figure = curves.draw(plt, lines, ["test.accuracy", "reward"])
    colours = [
        [line.get_color() for line in axes.lines if len(line.get_xdata())] for axes in figure.axes
    ]
    assert colours == [["C1"], ["C0", "C1"]]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.extras("matplotlib")
def test_the_picture_has_a_line_for_each_name(tmp_path):
    run = logged(tmp_path / "a", [0, 1], [0, 1])
    command = [sys.executable, curves.__file__, run, "--columns", "reward", "test.accuracy"]
    subprocess.run([*command, "--out", tmp_path / "picture.svg"], check=True)
    assert "<svg" in (tmp_path / "picture.svg").read_text()
