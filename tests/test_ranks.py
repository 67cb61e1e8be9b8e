"""scale/ranks.py with two processes on the CPU (gloo): a run is that of one process, or ends for both."""
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
import torch.distributed as dist
from safetensors.torch import load_file
from test_masters import small
from test_models import CHATML, write
from test_train import command, jsonl, words, wordy

import memory
import solve
from models.completion import Completion
from scale import ranks
from scale.masters import MasterAdamW

TESTS = Path(__file__).parent
DTYPES = [torch.float32, torch.bfloat16]
SCRIPT = f'''
import sys
sys.path[:0] = [{str(TESTS.parent)!r}, {str(TESTS)!r}]
import solve, test_ranks, train
solve.rollout = test_ranks.rollout
train.main()
'''


# A run of train.py

def rollout(questions, policy, fixed, tools, bar=None, **settings):
    """The question and how often it came before decide the plans, on whatever rank."""
    flows, copies = [], {}
    for question in questions:
        copies[question.question] = copy = copies.get(question.question, -1) + 1
        dice = random.Random(f"{question.question} {copy}")
        flow = solve.Flow(question, memory.Memory(question.question))
        for _ in range(dice.randrange(1, 3)):
            ids = [dice.randrange(3, 250) for _ in range(dice.randrange(2, 9))]
            flow.actions.append(Completion("", policy.encode(question.question), ids))
        flow.answer = "even" if sum(flow.actions[0].ids) % 2 == 0 else "odd"
        flows.append(flow)
        fourth_step = Path("half-two/step-3").exists() and len(questions) > 2
        if os.environ.get("DIES") == str(ranks.RANK) and fourth_step:
            os._exit(3)
    return flows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and questions; tests run inside it."""
    folder = tmp_path_factory.mktemp("parallel")
    write(folder / "model", wordy(CHATML), max_position_embeddings=4096)
    jsonl(folder / "data.jsonl", *[f"question {n}?" for n in range(8)])
    jsonl(folder / "valid.jsonl", "one?", "two?", "three?", "four?")
    (folder / "run.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "rollout", rollout)
        patch.chdir(folder)
        yield folder


def two_processes(*argv, **env):
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 run.py".split()
    return subprocess.run([sys.executable, *torchrun, *argv[1:]], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1"} | env)


@pytest.fixture(scope="module")
def output(place):
    """What two processes print; their shares of three questions are not equal. One process runs the same."""
    settings = dict(questions=3, minibatches=1, steps=3, every=1, lr=1e-4)
    assert command(*words("one", **settings)) == 0
    result = two_processes(*words("two", **settings))
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def resumed(output):
    """The run of two resumes from its second step in "half-two"; one process dies in the fourth step."""
    shutil.copytree("two", "half-two", ignore=shutil.ignore_patterns("step-3"))
    return two_processes("train.py", "--resume", "half-two", "--steps", "5", DIES="1")


def apart(one, two):
    """The largest difference between the weights of two checkpoints."""
    one, two = (load_file(f"{folder}/model.safetensors") for folder in (one, two))
    return max((one[name] - two[name]).abs().max().item() for name in one)


def test_two_processes_give_the_weights_of_one_though_the_questions_do_not_divide(output):
    # Gradients near 1e-3 round by 1e-10. Beside Adam's eps of 1e-8 this moves a weight by lr / 100 a step.
    assert apart("one/step-3", "two/step-3") < 3e-5 and apart("one/step-3", "model") > 1e-4


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


@pytest.mark.exhaustive
def test_a_checkpoint_of_two_processes_serves_one_and_two(resumed):
    states = [torch.load(f"{run}/step-3/trainer.pt")["optimizer"]["state"] for run in ("one", "two")]
    moments = [[entry["exp_avg"] for _, entry in sorted(state.items())] for state in states]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*moments, strict=True))
    assert apart("half-two/step-3", "two/step-3") < 1e-6
    shutil.copytree("two", "half-one", ignore=shutil.ignore_patterns("step-3"))
    assert command("train.py", "--resume", "half-one") == 0 and apart("half-one/step-3", "two/step-3") < 3e-5


@pytest.mark.exhaustive
def test_a_process_that_dies_ends_the_others(resumed):
    assert resumed.returncode != 0 and re.search(r"exitcode *: 3 ", resumed.stderr)
    assert sorted(path.name for path in Path("half-two").glob("step-*")) == ["step-2", "step-3"]  # --keep 2


# The optimizer's state

def learn(model, optimizer, steps):
    """Train on this rank's share of each batch; the gradients are summed as in flow_grpo.update()."""
    for step in steps:
        numbers = torch.randint(0, 20, (2, 8, 5), generator=torch.Generator().manual_seed(step))
        x, y = map(ranks.share, numbers)
        model.zero_grad()
        logits = model(x).flatten(0, 1).float()
        (torch.nn.functional.cross_entropy(logits, y.flatten(), reduction="sum") / 40).backward()
        ranks.add_up_gradients(model.parameters())
        optimizer.step()
    return model


def process(rank, folder):
    """One of two: five steps, a checkpoint, three more; then the three again, from the checkpoint alone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ranks.RANK, ranks.WORLD = rank, 2
    for dtype in DTYPES:
        model, again = small(dtype), small(dtype)
        optimizer = ranks.sharded(MasterAdamW, model.parameters(), lr=1e-3)
        learn(model, optimizer, range(5))
        state = ranks.state_of(optimizer)
        if rank == 0:
            torch.save([model.state_dict(), state], f"{folder}/{dtype}.checkpoint")
        dist.barrier()
        weights, state = torch.load(f"{folder}/{dtype}.checkpoint", weights_only=True)
        again.load_state_dict(weights)
        fresh = ranks.sharded(MasterAdamW, again.parameters(), lr=5.0)
        ranks.load(fresh, state)
        learn(model, optimizer, range(5, 8))
        learn(again, fresh, range(5, 8))
        numbers = sum(t.numel() for entry in optimizer.optim.state.values() for t in entry.values())
        ends = model.state_dict(), again.state_dict(), numbers, ranks.state_of(fresh)
        torch.save(ends, f"{folder}/{dtype}.{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.spawn(process, (str(folder),), nprocs=2)
    return lambda dtype: [torch.load(folder / f"{dtype}.{end}") for end in ("checkpoint", 0, 1)]


def alike(one, two, within=0.0):
    return all(torch.allclose(one[name], two[name], rtol=0, atol=within) for name in one)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_process_has_about_half_of_the_state_and_resumes_exactly(two, dtype):
    _, (straight, resumed, first, _), (straight_1, resumed_1, second, _) = two(dtype)
    assert alike(straight, resumed) and alike(straight_1, resumed_1)
    numbers = 2 if dtype == torch.float32 else 3
    whole = numbers * sum(weight.numel() for weight in small().parameters()) + 7          # and 7 counters
    assert first + second == whole and max(first, second) < 0.65 * whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_checkpoint_of_two_processes_is_whole_float32_and_good_for_one(two, dtype):
    (weights, state), (end, _, _, late), _ = two(dtype)
    entries = [*state["state"].values(), *late["state"].values()]
    assert {tensor.dtype for entry in entries for tensor in entry.values()} == {torch.float32}
    assert len(state["state"]) == len(late["state"]) == 7
    model = small(dtype)
    model.load_state_dict(weights)
    optimizer = MasterAdamW(model.parameters())
    optimizer.load_state_dict(state)
    learn(model, optimizer, range(5, 8))
    assert alike(end, model.state_dict(), within=1e-6 if dtype == torch.float32 else 2e-3)
