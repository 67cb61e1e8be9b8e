"""solve.py --benchmark from end to end: the toy model and a server as engines, a run that is killed, several trials."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import solve
from bench import faults
from scale import command_line

ROOT = Path(solve.__file__).parent
GAMES = [[1, 2, 3, 4], [4, 6, 1, 1], [2, 3, 4, 6], [8, 3, 1, 1], [5, 5, 5, 1], [3, 3, 8, 8], [1, 1, 1, 8], [12, 2, 1, 1]]


@pytest.fixture
def folder(tmp_path):
    """Game of 24 in the format of its file, with eight items."""
    rows = [{"pid": str(i), "question": numbers, "answer": ["(1+2+3)×4"], "image": None,
             "query": f"Using the numbers {numbers}, create an expression that equals 24."} for i, numbers in enumerate(GAMES)]
    (tmp_path / "gameof24.json").write_text(json.dumps(rows))
    return tmp_path


def words(folder, out, *more):
    return ["solve.py", "--benchmark", "gameof24", "--benchmark-dir", str(folder), "--out", str(folder / out), "--batch", "2",
            "--max-turns", "2", "--max-new-tokens", "40", *more]


@pytest.fixture
def command(monkeypatch, capsys):
    """solve.py with this command line, in this process: (its exit code, what it printed, what it complained of)."""
    def command(*argv):
        monkeypatch.setattr(sys, "argv", list(argv))
        capsys.readouterr()
        try:
            code = solve.main() or 0
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()
    return command


@pytest.fixture
def solved(command, folder):
    def solved(out, *more):
        code, said, complaint = command(*words(folder, out, *more))
        assert code == 0, complaint
        return said
    return solved


def kept(folder, out):
    """The flows of a run, without their times."""
    rows = [json.loads(line) for line in (folder / out / "gameof24-0.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("seconds")
        for timed in row["words"] + row["memory"]["steps"]:
            timed.pop("seconds")
    return rows


def table_of(folder, out):
    """The benchmark's row of the table, without the seconds."""
    head, _, row = [[cell.strip() for cell in line.strip("|").split("|")] for line in (folder / out / "table.md").read_text().splitlines()]
    return {name: cell for name, cell in zip(head, row) if name != "s a flow"}


def test_a_killed_run_goes_on_and_ends_with_the_same_table(folder, solved):
    solved("whole")
    run = subprocess.Popen([sys.executable, *words(folder, "killed")], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())})
    file, deadline = folder / "killed" / "gameof24-0.jsonl", time.monotonic() + 200
    while not (file.exists() and file.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.005)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = file.read_bytes()
    assert 2 <= before.count(b"\n") <= 8
    file.write_bytes(before.splitlines(keepends=True)[0] + before.splitlines(keepends=True)[1] + b'{"id": "half a li')   # as if killed while writing
    solved("killed")
    assert kept(folder, "killed") == kept(folder, "whole") and table_of(folder, "killed") == table_of(folder, "whole")


def stopped_in(number, monkeypatch):
    """Ctrl-C in the batch of this number, when its generator is due."""
    batches, real = [], solve.rollout

    def rollout(*args, watch, **settings):
        batches.append(1)

        def then(flows, turn, module):
            watch(flows, turn, module)
            if len(batches) == number and module == "generator":
                raise KeyboardInterrupt
        return real(*args, watch=then, **settings)
    monkeypatch.setattr(solve, "rollout", rollout)


def test_an_unfinished_batch_can_be_read_and_is_run_again_whole(folder, solved, command, monkeypatch):
    solved("whole")
    unfinished = folder / "run" / "unfinished-gameof24-0.jsonl"
    with monkeypatch.context() as patch:
        stopped_in(2, patch)
        code, out, complaint = command(*words(folder, "run"))
    rows = [json.loads(line) for line in unfinished.read_text().splitlines()]
    assert code == 130 and [row["answer"] for row in rows] == ["", ""] and all(row["words"] for row in rows)
    assert "partial, 2 of 8 rollouts: accuracy " in out and " of 2 | turns" in out
    assert "the same command goes on" in complaint
    assert kept(folder, "run") == kept(folder, "whole")[:2]
    solved("run")
    assert kept(folder, "run") == kept(folder, "whole") and not unfinished.exists()


def test_a_run_that_is_stopped_in_its_first_batch_shows_no_numbers(folder, command, monkeypatch):
    stopped_in(1, monkeypatch)
    code, out, complaint = command(*words(folder, "run"))
    assert code == 130 and "partial" not in out and "solve.py: stopped" in complaint


def test_the_table_stands_beside_the_papers_numbers_and_every_item_counts(folder, solved):
    said = solved("run", "--trials", "2", "--limit", "4")
    row = table_of(folder, "run")
    assert (row["items"], row["paper: alone"], row["paper: frozen"], row["paper: trained"]) == ("4", "33.0", "31.0", "53.0")
    assert re.fullmatch(r"2 \(\d+\.\d\)", row["trials (sd)"]) and "8 flows" in said and "| gameof24" in said
    assert "%" in row["tools"] and row["failed"] == "0" and row["undecided"] == "0" and "[turn" not in said
    assert [path.name for path in sorted((folder / "run").glob("*.jsonl"))] == ["gameof24-0.jsonl", "gameof24-1.jsonl"]


def test_a_run_with_other_settings_does_not_go_on_in_the_same_folder(folder, solved, command):
    solved("run", "--limit", "2")
    code, _, complaint = command(*words(folder, "run", "--limit", "2", "--temperature", "0.1"))
    assert code == 2 and "holds a run with another --temperature (0.7): give another --out" in complaint


def test_a_checkpoint_that_was_trained_on_under_its_old_name_is_another_model(folder, solved, command):
    toy, mine = Path(command_line.TOY), folder / "planner"
    mine.mkdir()
    for file in toy.glob("*"):
        if file.suffix in (".json", ".jinja", ".safetensors"):
            (mine / file.name).write_bytes(file.read_bytes())
    argv = words(folder, "run", "--limit", "2", "--model", str(mine), "--tools", "python_coder")
    assert command(*argv)[0] == 0
    weights = bytearray((mine / "model.safetensors").read_bytes())
    weights[-1_000_000:] = bytes(b ^ 1 for b in weights[-1_000_000:])
    (mine / "model.safetensors").write_bytes(weights)
    code, _, complaint = command(*argv)
    assert code == 2 and "holds a run with another set of weights: give another --out" in complaint


def test_a_trial_that_was_cut_off_is_not_in_the_table(folder, solved):
    solved("run", "--limit", "4", "--trials", "2")
    half = folder / "run" / "gameof24-1.jsonl"
    half.write_bytes(b"".join(half.read_bytes().splitlines(keepends=True)[:2]))
    solved("run", "--limit", "4")
    assert table_of(folder, "run")["trials (sd)"] == "1"


def plays(prompt):
    """A model that solves the first game, and says something else for the others."""
    if prompt.startswith("You are the planner"):
        return "Sub-goal: find an expression\nTool: base_generator"
    if "Call:" in prompt:
        return 'base_generator(query="24?")'
    return "<answer>(1+2+3)*4</answer>" if prompt.startswith("You write the final answer") else "Conclusion: STOP"


def test_a_server_is_marked_through_the_same_run(folder, solved, server):
    server.reply = lambda handler, body, turn: handler.send(faults.answer(plays(body["messages"][0]["content"])))
    solved("run", "--model", server.url, "--tools", "base_generator")
    row = table_of(folder, "run")
    assert row["accuracy %"] == "12.5" and row["errors %"] == "0.0" and row["tools"] == "base_generator 100%" and row["tokens"] == "60"


def test_a_server_that_dies_ends_the_run_with_a_sentence_and_loses_nothing(folder, solved, command, server):
    def reply(handler, body, turn):
        handler.send(faults.answer(plays(body["messages"][0]["content"])), 200 if turn <= 13 else 503)
    good = "--model", server.url, "--tools", "base_generator"
    server.reply = reply
    code, _, complaint = command(*words(folder, "run", *good))
    assert code == 1 and "did not come to an end" in complaint and "then the same command goes on" in complaint
    rows = len(kept(folder, "run"))
    server.reply = lambda handler, body, turn: handler.send(faults.answer(plays(body["messages"][0]["content"])))
    solved("run", *good)
    assert rows % 2 == 0 and 2 <= rows < 8 and len(kept(folder, "run")) == 8


def test_a_missing_benchmark_is_told_in_a_sentence(folder, command):
    code, _, complaint = command("solve.py", "--benchmark", "medqa", "--benchmark-dir", str(folder))
    assert code == 2 and "has no medqa; put its file at one of" in complaint and complaint.count("\n") == 1
