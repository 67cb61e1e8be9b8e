"""train.py on several processes of a CPU (gloo): a run is that of one process, or ends for all.

The gradient, memory that is short, and tensors: test_sharding.py."""
import csv
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_models import CHATML, write
from test_sharding import fork_ranks
from test_train import command, jsonl, words, wordy

import memory
import solve
import train
from cli import progress
from models.completion import Completion
from scale import ranks

TESTS = Path(__file__).parent
SCRIPT = f'''
import sys
sys.path[:0] = [{str(TESTS.parent)!r}, {str(TESTS)!r}]
import solve, test_ranks, train
solve.roll_out = test_ranks.roll_out
train.main()
'''


# A run of train.py

def roll_out(questions, policy, fixed, tools, bar=None, **settings):
    """The question and how often it came before decide the plans, on whatever rank. So no question may come
    twice in a step: its two groups could be on two ranks, and each would count from 0."""
    rollouts, copies = [], {}
    for question in questions:
        copies[question.question] = copy = copies.get(question.question, -1) + 1
        dice = random.Random(f"{question.question} {copy}")
        rollout = solve.Rollout(question, memory.Memory(question.question))
        for _ in range(dice.randrange(1, 3)):
            ids = [dice.randrange(3, 250) for _ in range(dice.randrange(2, 9))]
            rollout.plans.append(Completion("", policy.chat.encode(question.question), ids))
        rollout.answer = "even" if sum(rollout.plans[0].ids) % 2 == 0 else "odd"
        rollouts.append(rollout)
    if os.environ.get("DIES") == str(ranks.RANK) and Path("lost/step-2").exists():
        os.kill(os.getpid(), signal.SIGKILL)  # in the third step, or in the evaluation before it
    return rollouts


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and questions; tests run inside it."""
    folder = tmp_path_factory.mktemp("parallel")
    write(folder / "model", wordy(CHATML), max_position_embeddings=4096)
    jsonl(folder / "data.jsonl", *[f"question {n}?" for n in range(9)])  # three steps of three, no epoch ends
    jsonl(folder / "valid.jsonl", "one?", "two?", "three?", "four?")
    (folder / "run.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "roll_out", roll_out)
        patch.chdir(folder)
        yield folder


def torchrun(number, *argv, **env):
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {number} run.py".split()
    return subprocess.run([sys.executable, *torchrun, *argv[1:]], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1"} | env)


def forked(rank, world, port, argv):
    """What torchrun does for a rank: its place in the group is in its environment, and train.py runs."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks.RANK, ranks.WORLD, progress.RANK = rank, world, str(rank)  # as they are read from the environment
    for stream, name in (1, "stdout"), (2, "stderr"):
        os.dup2(os.open(f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    solve.roll_out, sys.argv = roll_out, list(argv)
    train.main()


def processes(number, *argv):
    """train.py with this command line as so many ranks: what they have printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fork_ranks(forked, number, port, argv)
    return "".join(Path(f"stdout-{rank}").read_text() for rank in range(number))


@pytest.fixture(scope="module")
def output(place):
    """What two processes print; their shares of three questions are not equal. One process runs the same."""
    settings = dict(questions=3, minibatches=2, steps=3, every=1, lr=1e-4, keep=3)
    assert command(*words("one", **settings)) == 0
    return processes(2, *words("two", **settings))


def resumed(run, number, name):
    """The last step of a run, by another number of processes."""
    shutil.copytree(run, name, ignore=shutil.ignore_patterns("step-3"))
    if number == 1:
        assert command("train.py", "--resume", name) == 0
    else:
        processes(number, "train.py", "--resume", name)
    return f"{name}/step-3"


def apart(one, two):
    """The largest difference between the weights of two checkpoints."""
    one, two = (load_file(f"{folder}/model.safetensors") for folder in (one, two))
    return max((one[name] - two[name]).abs().max().item() for name in one)


def test_two_processes_give_the_weights_of_one_though_the_questions_do_not_divide(output):
    # Gradients near 1e-3 round by 1e-10. Beside Adam's eps of 1e-8 this moves a weight by lr / 100 a step.
    assert apart("one/step-3", "two/step-3") < 1e-5 and apart("one/step-3", "model") > 1e-4


def test_two_processes_give_the_log_of_one(output):
    logs = [list(csv.DictReader(open(f"{run}/log.csv"))) for run in ("one", "two")]
    assert len(logs[0]) == len(logs[1]) == 3
    for one, two in zip(*logs):
        for name in one.keys() - {"ratio_min", "ratio_max"}:
            assert float(one[name]) == pytest.approx(float(two[name]), abs=1e-4)
    assert Path("one/evals.csv").read_text() == Path("two/evals.csv").read_text()


def test_every_rollout_is_logged_once_in_the_order_of_its_questions(output):
    one, two = ([line.split('"question"')[1][:30] for line in open(f"{run}/rollouts.jsonl")]
                for run in ("one", "two"))
    assert one == two and len(one) == 3 * 3 * 4


def test_one_of_the_processes_prints_for_all(output):
    assert "flat groups" in output and all(output.count(f"step   {step}/3") == 1 for step in (1, 2, 3))


@pytest.mark.parametrize("run, number", [
    ("two", 1), pytest.param("one", 2, marks=pytest.mark.exhaustive),
    pytest.param("two", 3, marks=pytest.mark.exhaustive)])
def test_a_run_can_be_resumed_by_another_number_of_processes(output, run, number):
    assert apart(resumed(run, number, f"{run}-{number}"), "one/step-3") < 1e-5


@pytest.mark.exhaustive
def test_if_a_process_is_killed_the_others_end_within_a_minute_and_torchrun_names_it(output):
    shutil.copytree("two", "lost", ignore=shutil.ignore_patterns("step-3"))
    start = time.monotonic()
    result = torchrun(2, "train.py", "--resume", "lost", DIES="1")
    assert result.returncode != 0 and time.monotonic() - start < 60
    assert re.search(r"rank\s*: 1 .*\n\s*exitcode\s*: -9", result.stderr)
    assert sorted(path.name for path in Path("lost").glob("step-*")) == ["step-1", "step-2"]


@pytest.mark.extras("peft")
def test_two_processes_train_adapters_as_one_does(place):
    settings = dict(questions=3, minibatches=1, steps=2, every=1, lr=1e-3, lora=4, valid="none", test="none")
    assert command(*words("lora-one", **settings)) == 0
    processes(2, *words("lora-two", **settings))
    name = "step-2/adapters/adapter_model.safetensors"
    one, two = (load_file(f"lora-{run}/{name}") for run in ("one", "two"))
    assert max((one[key] - two[key]).abs().max() for key in one) < 3e-4  # as above, at ten times the rate
    assert min(tensor.abs().max() for tensor in one.values()) > 1e-3
