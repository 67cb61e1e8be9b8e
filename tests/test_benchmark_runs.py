"""solve.py --benchmark from end to end: the toy model or a server as engine, a killed run, several trials."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import solve
from bench import faults
from cli.flags import TOY

ROOT = Path(solve.__file__).parent
GAMES = [[1, 2, 3, 4], [4, 6, 1, 1], [2, 3, 4, 6], [8, 3, 1, 1],
         [5, 5, 5, 1], [3, 3, 8, 8], [1, 1, 1, 8], [12, 2, 1, 1]]


@pytest.fixture
def folder(tmp_path):
    """Game of 24 in the format of its file, with eight items."""
    rows = [{"pid": str(i), "question": numbers, "answer": ["(1+2+3)×4"], "image": None,
             "query": f"Using the numbers {numbers}, create an expression that equals 24."}
            for i, numbers in enumerate(GAMES)]
    (tmp_path / "gameof24.json").write_text(json.dumps(rows))
    return tmp_path


def arguments(folder, out, *more):
    return ["solve.py", "--benchmark", "gameof24", "--benchmark-dir", str(folder), "--out", str(folder / out),
            "--batch", "2", "--max-turns", "2", "--max-new-tokens", "40", *more]


@pytest.fixture
def command(monkeypatch, capsys):
    """solve.py with this command line, in this process: (exit code, stdout, stderr)."""
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
        code, out, err = command(*arguments(folder, out, *more))
        assert code == 0, err
        return out
    return solved


def saved(folder, out):
    """The rollouts of a run, without their times."""
    rows = [json.loads(line) for line in (folder / out / "gameof24-0.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("seconds")
        for timed in row["words"] + row["memory"]["steps"]:
            timed.pop("seconds")
    return rows


def table_of(folder, out):
    """The benchmark's row of the table, without the seconds."""
    lines = (folder / out / "table.md").read_text().splitlines()
    head, _, row = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: cell for name, cell in zip(head, row) if name != "s a rollout"}


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_and_ends_with_the_same_table(folder, solved):
    solved("whole")
    run = subprocess.Popen(
        [sys.executable, *arguments(folder, "killed")], cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())})
    file, deadline = folder / "killed" / "gameof24-0.jsonl", time.monotonic() + 200
    while not (file.exists() and file.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.005)
    run.send_signal(signal.SIGKILL)
    run.wait()
    lines = file.read_bytes().splitlines(keepends=True)
    assert 2 <= len(lines) <= 8
    file.write_bytes(b"".join(lines[:2]) + b'{"id": "half a li')  # as if killed while writing
    solved("killed")
    assert saved(folder, "killed") == saved(folder, "whole")
    assert table_of(folder, "killed") == table_of(folder, "whole")


def stopped_in(number, monkeypatch):
    """Ctrl-C in the batch of this number, when its generator is due."""
    batches, real = [], solve.roll_out

    def rollout(*args, watch, **settings):
        batches.append(1)

        def then(rollouts, turn, module):
            watch(rollouts, turn, module)
            if len(batches) == number and module == "generator":
                raise KeyboardInterrupt
        return real(*args, watch=then, **settings)
    monkeypatch.setattr(solve, "roll_out", rollout)


def test_an_unfinished_batch_can_be_read_and_is_run_again_whole(folder, solved, command, monkeypatch):
    short = "--limit", "4", "--max-turns", "1"
    solved("whole", *short)
    unfinished = folder / "run" / "unfinished-gameof24-0.jsonl"
    with monkeypatch.context() as patch:
        stopped_in(2, patch)
        code, out, err = command(*arguments(folder, "run", *short))
    rows = [json.loads(line) for line in unfinished.read_text().splitlines()]
    assert [row["answer"] for row in rows] == ["", ""] and all(row["words"] for row in rows)
    assert "partial, 2 of 4 rollouts: accuracy " in out and " of 2 | turns" in out
    assert code == 130 and "the same command goes on" in err
    assert saved(folder, "run") == saved(folder, "whole")[:2]
    solved("run", *short)
    assert saved(folder, "run") == saved(folder, "whole") and not unfinished.exists()


def test_a_run_that_is_stopped_in_its_first_batch_shows_no_numbers(folder, command, monkeypatch):
    stopped_in(1, monkeypatch)
    code, out, err = command(*arguments(folder, "run", "--limit", "2", "--max-turns", "1"))
    assert code == 130 and "partial" not in out and "solve.py: stopped" in err


def test_the_table_shows_the_papers_numbers_and_every_item_counts(folder, solved):
    out = solved("run", "--trials", "2", "--limit", "2", "--max-turns", "1")
    row = table_of(folder, "run")
    paper = {"paper: alone": "33.0", "paper: frozen": "31.0", "paper: trained": "53.0"}
    assert row | paper | {"items": "2", "failed": "0", "undecided": "0"} == row and "%" in row["tools"]
    assert re.fullmatch(r"2 \(\d+\.\d\)", row["trials (sd)"])
    assert "4 rollouts" in out and "| gameof24" in out and "[turn" not in out
    names = sorted(path.name for path in (folder / "run").glob("*.jsonl"))
    assert names == ["gameof24-0.jsonl", "gameof24-1.jsonl"]


def test_a_run_with_other_settings_does_not_go_on_in_the_same_folder(folder, solved, command):
    short = "--limit", "2", "--max-turns", "1"
    solved("run", *short)
    code, _, err = command(*arguments(folder, "run", *short, "--temperature", "0.1"))
    assert code == 2 and "holds a run with another --temperature (0.7): give another --out" in err


@pytest.mark.exhaustive
def test_a_checkpoint_that_was_trained_on_under_its_old_name_is_another_model(folder, solved, command):
    model = folder / "planner"
    shutil.copytree(TOY, model, ignore=shutil.ignore_patterns("*.py", "*.jsonl", "__pycache__"))
    argv = arguments(folder, "run", "--limit", "2", "--max-turns", "1", "--model", str(model))
    assert command(*argv)[0] == 0
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1_000_000:] = bytes(b ^ 1 for b in weights[-1_000_000:])
    (model / "model.safetensors").write_bytes(weights)
    code, _, err = command(*argv)
    assert code == 2 and "holds a run with another set of weights: give another --out" in err


@pytest.mark.exhaustive
def test_a_trial_that_was_cut_off_is_not_in_the_table(folder, solved):
    solved("run", "--limit", "4", "--trials", "2")
    half = folder / "run" / "gameof24-1.jsonl"
    half.write_bytes(b"".join(half.read_bytes().splitlines(keepends=True)[:2]))
    solved("run", "--limit", "4")
    assert table_of(folder, "run")["trials (sd)"] == "1"


def play(prompt):
    """The completion of a model that gives the solution of the first game to every game."""
    if prompt.startswith("You are the planner"):
        return "Sub-goal: find an expression\nTool: base_generator"
    if "Call:" in prompt:
        return 'base_generator(query="24?")'
    final = prompt.startswith("You write the final answer")
    return "<answer>(1+2+3)*4</answer>" if final else "Conclusion: STOP"


def reply(handler, body, status=200):
    handler.send(faults.answer(play(body["messages"][0]["content"])), status)


def test_a_server_is_graded_through_the_same_run(folder, solved, server):
    server.reply = lambda handler, body, turn: reply(handler, body)
    solved("run", "--model", server.url, "--tools", "base_generator")
    row = table_of(folder, "run")
    assert row["accuracy %"] == "12.5" and row["errors %"] == "0.0"
    assert row["tools"] == "base_generator 100%" and row["tokens"] == "60"


def test_a_server_that_dies_ends_the_run_with_a_sentence_and_loses_nothing(folder, solved, command, server):
    engine = "--model", server.url, "--tools", "base_generator"
    server.reply = lambda handler, body, turn: reply(handler, body, 200 if turn <= 13 else 503)
    code, _, err = command(*arguments(folder, "run", *engine))
    assert code == 1 and "did not come to an end" in err and "then the same command goes on" in err
    rows = len(saved(folder, "run"))
    server.reply = lambda handler, body, turn: reply(handler, body)
    solved("run", *engine)
    assert rows % 2 == 0 and 2 <= rows < 8 and len(saved(folder, "run")) == 8


def test_the_error_for_a_missing_benchmark_is_one_sentence(folder, command):
    code, _, err = command("solve.py", "--benchmark", "medqa", "--benchmark-dir", str(folder))
    assert code == 2 and "has no medqa; put its file at one of" in err and err.count("\n") == 1
