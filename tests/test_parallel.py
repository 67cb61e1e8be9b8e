"""train.py under torchrun, with two processes on the CPU (gloo): the same run as with one, or an end for all."""
import csv
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_models import CHATML, tokenizer, write
from test_train import command, jsonl, words

import generator
import memory
import planner
import solve
from models.completion import Completion
from scale import ranks
from tools import TOOLS

TESTS = Path(__file__).parent
SCRIPT = f'''
import sys
sys.path[:0] = [{str(TESTS.parent)!r}, {str(TESTS)!r}]
import solve, test_parallel, train
solve.rollout = test_parallel.rollout
train.main()
'''


def rollout(questions, policy, fixed, tools, bar=None, **settings):
    """What the planner says is decided by the question and by how often it was asked before, whoever asks."""
    flows, seen = [], dict()
    for question in questions:
        seen[question.question] = copy = seen.get(question.question, -1) + 1
        dice = random.Random(f"{question.question} {copy}")
        one = solve.Flow(question, memory.Memory(question.question))
        for turn in range(dice.randrange(1, 3)):
            ids = [dice.randrange(3, 250) for _ in range(dice.randrange(2, 9))]
            one.actions.append(Completion("", policy.encode(question.question), ids))
        one.answer = "even" if sum(one.actions[0].ids) % 2 == 0 else "odd"
        flows.append(one)
        if os.environ.get("DIES") == str(ranks.RANK) and Path("half-two/step-3").exists() and len(questions) > 2:      # in the fourth step
            os._exit(3)
    return flows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and questions; tests run inside it."""
    folder = tmp_path_factory.mktemp("parallel")
    tok = tokenizer().train_new_from_iterator([planner.prompt("", TOOLS, "", ""), planner.analysis_prompt("", TOOLS), generator.PROMPT] * 2, 1000)
    tok.chat_template = CHATML
    write(folder / "model", tok, max_position_embeddings=4096)
    jsonl(folder / "data.jsonl", *[f"question {n}?" for n in range(8)])
    jsonl(folder / "valid.jsonl", "one?", "two?", "three?", "four?")
    (folder / "run.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "rollout", rollout)
        patch.chdir(folder)
        yield folder


def two_processes(*argv, **env):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "run.py"]
    return subprocess.run([*torchrun, *argv[1:]], capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"} | env)


@pytest.fixture(scope="module")
def said(place):
    """A run with one process and the same with two, whose shares of three questions are not equal: what the two said."""
    settings = dict(questions=3, minibatches=1, steps=3, every=1, lr=1e-4)
    assert command(*words("one", **settings)) == 0
    done = two_processes(*words("two", **settings))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def resumed(said):
    """The run of two as it stood after its second step goes on in "half-two", until one of the two processes dies in the fourth."""
    shutil.copytree("two", "half-two", ignore=shutil.ignore_patterns("step-3"))
    return two_processes("train.py", "--resume", "half-two", "--steps", "5", DIES="1")


def apart(one, two):
    """The largest difference between the weights of two checkpoints."""
    one, two = (load_file(f"{folder}/model.safetensors") for folder in (one, two))
    return max((one[name] - two[name]).abs().max().item() for name in one)


def test_two_processes_give_the_weights_of_one_though_the_questions_do_not_divide(said):
    assert apart("one/step-3", "two/step-3") < 1e-5 and apart("one/step-3", "model") > 1e-4       # something was learnt


def test_two_processes_give_the_log_of_one(said):
    logs = [list(csv.DictReader(open(f"{run}/log.csv"))) for run in ("one", "two")]
    assert len(logs[0]) == len(logs[1]) == 3
    for one, two in zip(*logs):
        assert all(float(one[name]) == pytest.approx(float(two[name]), abs=1e-4) for name in one if name not in ("ratio_min", "ratio_max"))
    assert Path("one/evals.csv").read_text() == Path("two/evals.csv").read_text()


def test_every_flow_is_kept_once_in_the_order_of_its_questions(said):
    one, two = ([line.split('"question"')[1][:30] for line in open(f"{run}/rollouts.jsonl")] for run in ("one", "two"))
    assert one == two and len(one) == 3 * 3 * 4


def test_one_of_the_processes_speaks_for_all(said):
    assert "flat groups" in said and all(said.count(f"step   {step}/3") == 1 for step in (1, 2, 3))


@pytest.mark.exhaustive
def test_a_checkpoint_of_two_processes_serves_one_and_two(resumed):
    states = [torch.load(f"{run}/step-3/trainer.pt") for run in ("one", "two")]
    moments = [[entry["exp_avg"] for _, entry in sorted(state["optimizer"]["state"].items())] for state in states]
    assert len(moments[0]) == len(moments[1]) and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*moments))
    assert apart("half-two/step-3", "two/step-3") < 1e-6
    shutil.copytree("two", "half-one", ignore=shutil.ignore_patterns("step-3"))
    assert command("train.py", "--resume", "half-one") == 0 and apart("half-one/step-3", "two/step-3") < 1e-5


@pytest.mark.exhaustive
def test_a_process_that_dies_ends_the_others(resumed):
    assert resumed.returncode != 0 and re.search(r"exitcode *: 3 ", resumed.stderr)
    assert sorted(path.name for path in Path("half-two").glob("step-*")) == ["step-1", "step-2", "step-3"]
