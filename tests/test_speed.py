"""bench/speed.py and its parts: both sides do the same work, in turn, and the numbers are what they say.

TRL is not needed; the sides are tiny models in this process, or scripts that only answer.
"""
import csv
import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from bench import card, meter, peers, speed

CASE = dict(vocabulary=50, groups=2, group=3, prompt=7, new=4)
SIDE = """#!/bin/sh
while :; do
    echo "$2" >> {folder}/order
    echo '{{"wall": 1, "cpu": 2, "peak": 3145728, "tokens": 5}}'
    read line || exit
done
"""


@pytest.fixture
def side(tmp_path):
    """The Python of a peer that only answers, and writes its name to a file each time."""
    path = tmp_path / "python"
    path.write_text(SIDE.format(folder=tmp_path))
    path.chmod(0o755)
    return path


def test_the_gradient_that_the_sides_compare_is_that_of_the_plain_objective():
    prompts, completions, A = peers.batch_of(CASE)
    model = peers.model_of(CASE)
    ids = torch.tensor([prompt + new for prompt, new in zip(prompts, completions)])
    logps = model(ids[:, :-1]).logits.log_softmax(-1)[:, CASE["prompt"] - 1 :]
    chosen = logps.gather(-1, torch.tensor(completions)[..., None]).squeeze(-1)
    (-(chosen.mean(1) * torch.tensor(A)).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    done = peers.ours_update(CASE | {"work": "update"})()
    assert done["tokens"] == 24
    assert done["gradient"] == pytest.approx(peers.projections(model), rel=1e-4, abs=1e-5)


def test_a_step_samples_all_tokens_of_all_rows():
    assert peers.ours_step(CASE)()["tokens"] == peers.ours_generate(CASE)()["tokens"] == 24


def test_the_sides_work_in_turn_after_their_warm_up(side, tmp_path):
    make = lambda name: lambda case, malloc=None: speed.Peer(name, str(side), tmp_path, case, malloc)
    sides = {name: make(name) for name in ("ours", "b")}
    results = speed.measure({}, sides, 1, lambda text: None)
    order = (tmp_path / "order").read_text().split()
    assert order == ["ours", "b"] * 6        # short work is repeated five times
    assert results["ours"]["cpu"] == 2 and len(results["b"]["laps"]) == 5


def test_a_side_that_cannot_run_is_left_out_and_named(side, tmp_path):
    command = speed.Command(tmp_path, {"work": "start", "command": ["missing.py"]})
    sides = {"ours": lambda case, malloc=None: speed.Peer("a", str(side), tmp_path, case, malloc),
             "TRL": lambda case, malloc=None: speed.Peer("b", "false", tmp_path, case, malloc),
             "before": lambda case: command}
    lines = []
    results = speed.measure({}, sides, 1, lines.append, memory=True)
    assert list(results) == ["ours"] and results["ours"]["peak"] == 3145728
    assert lines[0] == "TRL is left out: ended without a word"
    assert lines[1].startswith("before is left out: ") and "missing.py" in lines[1]


@pytest.mark.parametrize("key, value, problem", [
    ("tokens", 6, "the numbers of tokens differ: [5, 6]"),
    ("gradient", [1.0, 2.01], "the gradients differ by 5.0e-03"), ("gradient", [1.0, 2.0], None)])
def test_work_that_is_not_the_same_is_noticed(key, value, problem):
    lap = {"tokens": 5, "gradient": [1.0, 2.0]}
    results = {"ours": {"laps": [lap]}, "TRL": {"laps": [lap | {key: value}]}}
    assert speed.check({"work": "step"}, results) == [problem] * (problem is not None)


def test_a_command_is_run_in_both_checkouts_and_its_table_has_a_line(tmp_path, monkeypatch, capsys):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(f"print('test after step 2: accuracy 0.{len(name)}00 of')")
    monkeypatch.setattr(speed, "REPO", tmp_path / "new")
    monkeypatch.setattr(speed, "SHORT", 0)
    monkeypatch.setattr(speed, "adopt_orphans", lambda: None)
    monkeypatch.setattr(speed.os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(sys, "argv", ["speed.py", "toy", "--against", str(tmp_path / "old"), "--steps", "2",
                                      "--repetitions", "1", "--out", str(tmp_path / "speed.csv")])
    speed.main()
    head, _, line = capsys.readouterr().out.strip().splitlines()[-3:]
    assert "| beside |" in head and line.startswith("| train.py --steps 2 | before |")
    assert "| accuracy 0.3 / 0.3 |" in line and line.endswith("speed.py toy --case 1 --against FOLDER |")
    [row] = csv.DictReader((tmp_path / "speed.csv").open(newline=""))
    assert (row["row"], row["case"], row["beside"]) == ("toy", "1", "before")
    assert float(row["our_seconds"]) > 0 and float(row["its_cpu_seconds"]) > 0


def test_cpu_seconds_count_a_grandchild_that_still_runs():
    child = subprocess.Popen(["sh", "-c", "sh -c 'while :; do :; done' & echo; wait"], start_new_session=True,
                             stdout=subprocess.PIPE)
    try:
        before, end = meter.cpu_seconds(), time.monotonic() + 10
        own = time.process_time()
        while meter.cpu_seconds() - before < time.process_time() - own + 0.05 and time.monotonic() < end:
            time.sleep(0.02)
        assert time.monotonic() < end
    finally:
        subprocess.run(["kill", "--", f"-{child.pid}"])
        child.wait()


def test_the_shares_of_a_card_are_operations_and_bytes_that_are_needed(monkeypatch):
    monkeypatch.setitem(card.SIZES, "tiny", (32, 64, 2, 2, 1, 128, False))
    case = SimpleNamespace(size="tiny", device="cpu", group=2, prompt=6, new=4, repetitions=1)
    measured = {"update": 1.0, "decode": 0.001, "product": 1e9, "copy": 1e9, "itemsize": 4, "halved": 0}
    of = card.fit.shapes(card.config("tiny"))
    inner = of["parameters"] - 2 * 32 * 128
    once = 6 * ((6 + 8) * inner + 8 * 32 * 128) + 12 * 2 * 32 * (18 + 8 * 8)
    assert card.operations(of, False, 2, 6, 4, 1) == once
    assert card.speed_lines(case, measured)[0][-1] == f"{once / 1e12:.4g} T operations / 1.000 s"
    assert card.bytes_of_a_step(of, False, 4, 2, 10) == (4 * (inner + 32 * 128), 4 * 2 * 10 * 2 * 2 * 16)
    monkeypatch.setattr(card, "limits", lambda *_: (1e9, 1e9))
    row = card.speed_row(case)
    assert row["update"] > 0 and [line[0].split(": ")[1] for line in row["lines"]] == [
        "update, needed", "update, as rows", "decode, weights + cache"]


@pytest.mark.exhaustive
def test_a_row_of_the_card_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    done = {"lines": [["a", "1", "2", "2.00", ""]]}
    commands = {
        "speed": f"print('progress'); print({json.dumps(json.dumps(done))})",
        "memory-7b": "raise MemoryError('CUDA out of memory')", "sharded": "import time; time.sleep(60)",
        "trl": "print('never')"}
    monkeypatch.setattr(card, "command_of", lambda row, case: [sys.executable, "-c", commands[row]])
    out = tmp_path / "new" / "card.json"
    monkeypatch.setattr(sys, "argv", ["card.py", *commands, "--device", "cpu", "--quick", "--minutes", "0.03",
                                      "--out", str(out)])
    card.main()
    lines = capsys.readouterr().out.splitlines()
    assert "THIS IS NOT A GPU MEASUREMENT" in lines[0] and "speed | a | 1 | 2 | 2.00" in lines
    assert "memory-7b | not measured | MemoryError: CUDA out of memory" in lines
    assert any(re.fullmatch(r"sharded \| not measured \| stopped after [0-3] s", line) for line in lines)
    assert "trl | not measured | the time was over" in lines
    saved = json.loads(out.read_text())
    assert list(saved["rows"]) == list(commands) and "NOT A GPU" in saved["device"]


def test_what_was_measured_before_the_card_script_was_killed_is_in_its_file(tmp_path, monkeypatch):
    def killed(command, *_):
        if "trl" in command:
            raise KeyboardInterrupt
        return {"failed": "no memory"}

    out = tmp_path / "card.json"
    monkeypatch.setattr(card, "run", killed)
    monkeypatch.setattr(sys, "argv", f"card.py speed trl --device cpu --quick --out {out}".split())
    with pytest.raises(KeyboardInterrupt):
        card.main()
    assert json.loads(out.read_text())["rows"]["speed"]["lines"][0][-1] == "no memory"


def test_the_memory_row_sets_predicted_and_measured_peaks_side_by_side():
    case = card.CASES["memory-0.5b"] | card.QUICK["memory-0.5b"]
    fitted = card.fit.predict(
        card.fit.shapes(card.config("deep")), dtype=torch.bfloat16, token_budget=272, generate_budget=272,
        max_new_tokens=8, prompt=128, context=0, gradient_checkpointing=True)
    measured = {phase: 2 * size for phase, size in fitted.phases.items()} | {"step": 4 * fitted.gpu}
    lines = card.memory_lines(case, measured, on_gpu=True)
    assert [line[3] for line in lines] == ["2.00", "2.00", "4.00"]
    assert lines[0][1] == f"{fitted.phases['generate'] / 1e9:.2f} GB" and "all weights" in lines[0][0]


@pytest.mark.exhaustive
def test_every_row_of_the_card_runs_on_the_cpu_with_tiny_models(tmp_path):
    command = [sys.executable, "bench/card.py", "--device", "cpu", "--quick"]
    command += ["--out", str(tmp_path / "card.json")]
    result = subprocess.run(command, cwd=card.REPO, capture_output=True, text=True)
    assert result.returncode == 0 and "THIS IS NOT A GPU MEASUREMENT" in result.stdout
    for row in json.loads((tmp_path / "card.json").read_text())["rows"].values():
        reason = row["result"].get("failed", "")
        assert not reason or re.search("No module named '(trl|datasets)'|needs the package peft", reason)


def test_without_a_gpu_the_card_script_says_what_to_type(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["card.py"])
    with pytest.raises(SystemExit):
        card.main()
    assert "there is no GPU: --device cpu --quick" in capsys.readouterr().err
