"""train.py under torchrun, with two processes on the CPU (gloo): the same run as with one, or an end for all."""
import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import generator
import planner
from test_llm import CHATML, tokenizer, write
from test_train import jsonl, words
from tools import TOOLS

ROOT = Path(__file__).parents[1]
SCRIPT = '''
import os, random, sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
import flow, llm, memory, parallel, solve, train

def rollout(questions, policy, fixed, tools, bar=None, **settings):
    """What the planner says is decided by the question and by how often it was asked before, whoever asks."""
    flows, seen = [], dict()
    for question in questions:
        seen[question.question] = copy = seen.get(question.question, -1) + 1
        dice = random.Random(f"{{question.question}} {{copy}}")
        one = flow.Flow(question, memory.Memory(question.question))
        for turn in range(dice.randrange(1, 3)):
            ids = [dice.randrange(3, 250) for _ in range(dice.randrange(2, 9))]
            one.actions.append(llm.Completion("", policy.encode(question.question), ids))
        one.answer = "even" if sum(one.actions[0].ids) % 2 == 0 else "odd"
        flows.append(one)
        if os.environ.get("DIES") == str(parallel.RANK) and "step" in os.environ.get("WHEN", "") and len(questions) > 2:
            os._exit(3)
    return flows

solve.rollout = rollout
train.main()
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    tok = tokenizer().train_new_from_iterator([planner.prompt("", TOOLS, "", ""), planner.analysis_prompt("", TOOLS), generator.PROMPT] * 2, 1000)
    tok.chat_template = CHATML
    write(folder / "model", tok, max_position_embeddings=4096)
    jsonl(folder / "data.jsonl", *[f"question {n}?" for n in range(8)])
    jsonl(folder / "valid.jsonl", "one?", "two?", "three?")
    (folder / "run.py").write_text(SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests")))
    return folder


def trained(place, processes, out, env=None, **changed):
    """The same command line under one process or several."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    changed = dict(questions=4, minibatches=1, steps=3, every=3, lr=1e-4) | changed
    return subprocess.run([sys.executable, *torchrun, "run.py", *words(out, **changed)[1:]], cwd=place, capture_output=True, text=True, timeout=150,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})})


@pytest.fixture(scope="module")
def both(place):
    for processes in (1, 2):
        done = trained(place, processes, f"run{processes}")
        assert done.returncode == 0, done.stderr[-3000:]
    return place / "run1", place / "run2"


def test_two_processes_give_the_weights_of_one(both):
    one, two = (load_file(run / "step-3" / "model.safetensors") for run in both)
    start = load_file(both[0].parent / "model" / "model.safetensors")
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-5
    assert max((one[name] - start[name]).abs().max().item() for name in one) > 1e-4       # something was learnt


def test_two_processes_give_the_log_of_one(both):
    logs = [list(csv.DictReader(open(run / "log.csv"))) for run in both]
    assert len(logs[0]) == len(logs[1]) == 3
    for one, two in zip(*logs):
        assert all(float(one[name]) == pytest.approx(float(two[name]), abs=1e-4) for name in one if name not in ("ratio_min", "ratio_max"))
    assert (both[0] / "evals.csv").read_text() == (both[1] / "evals.csv").read_text()


def test_every_flow_is_kept_once_in_the_order_of_its_questions(both):
    one, two = ([line.split('"question"')[1][:30] for line in open(run / "rollouts.jsonl")] for run in both)
    assert one == two and len(one) == 3 * 4 * 4


def test_a_checkpoint_of_two_processes_serves_one_and_two(both, place):
    states = [torch.load(run / "step-3" / "trainer.pt") for run in both]
    moments = [[entry["exp_avg"] for _, entry in sorted(state["optimizer"]["state"].items())] for state in states]
    assert len(moments[0]) == len(moments[1]) and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*moments))
    half = trained(place, 2, "half", steps=2, every=1)
    assert half.returncode == 0, half.stderr[-2000:]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([sys.executable, *torchrun, "run.py", "--resume", "half", "--steps", "3"], cwd=place, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = load_file(place / "half" / "step-3" / "model.safetensors"), load_file(both[1] / "step-3" / "model.safetensors")
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-6


def test_a_process_that_dies_ends_the_others(place):
    start = time.monotonic()
    done = trained(place, 2, "dies", {"DIES": "1", "WHEN": "step"})
    assert done.returncode != 0 and time.monotonic() - start < 90 and "exitcode" in done.stderr and "3" in done.stderr


def test_questions_that_do_not_divide_are_shared_as_far_as_they_go(place):
    done = trained(place, 2, "odd", questions=3, steps=1, every=1)
    assert done.returncode == 0 and "flat groups" in done.stdout and done.stdout.count("step   1/1") == 1, done.stderr[-2000:]
