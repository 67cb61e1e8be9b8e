"""The forks (experiments/forks/*.diff): each fits the code, and does what its first lines say.

A fork has a check, which runs twice: in a copy of the code that the diff has changed, where it must
hold, and in the code as it is, where it must fail."""

import csv
import importlib
import math
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_flow_grpo import tiny
from test_house import ORDER, ROOMS, ROOT

DIFFS = ROOT / "experiments" / "forks"
FORKS = "turn-cost cispo gspo rloo gigpo dr-grpo exact-kl epochs dapo prompt sql critic verifier"
FORKS = FORKS.split()
DIFFERS = AssertionError, AttributeError, ImportError, OSError, TypeError
FLAGS = {"cispo": ["--clip-low", "1", "--beta", "0"], "rloo": ["--minibatches", "1"]}


@contextmanager
def code_of(folder):
    """Inside, `import train` and the like give the modules of this copy of the code."""

    def ours():
        return [name for name in sys.modules if name.split(".")[0] in [*ORDER, *ROOMS, "critic"]]

    before = {name: sys.modules.pop(name) for name in ours()}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


@pytest.fixture
def fork(tmp_path):
    """fork(name) -> the folder of a copy of the code that this diff has changed."""

    def make(name):
        for script in ORDER:
            shutil.copy(ROOT / f"{script}.py", tmp_path)
        for room in ROOMS:
            shutil.copytree(ROOT / room, tmp_path / room)
        (tmp_path / "toy").symlink_to(ROOT / "toy")
        for how in (["--check"], []):
            command = ["git", "apply", *how, str(DIFFS / f"{name}.diff")]
            subprocess.run(command, cwd=tmp_path, check=True)
        return tmp_path

    return make


def test_every_diff_is_a_fork_with_a_check_and_says_what_it_does():
    assert sorted(path.stem for path in DIFFS.iterdir()) == sorted(FORKS)
    for name in FORKS:
        assert (DIFFS / f"{name}.diff").read_text().startswith(f"{name}: ")


@pytest.mark.parametrize("name", FORKS)
def test_a_fork_does_what_it_says_and_the_code_as_it_is_does_not(name, fork):
    check = globals()[f"check_{name.replace('-', '_')}"]
    with code_of(fork(name)):
        check()
    with code_of(ROOT), pytest.raises(DIFFERS):
        check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", "critic dapo epochs exact-kl gigpo gspo prompt verifier".split())
def test_the_toy_trains_in_each_fork(name, fork):
    folder = fork(name)
    command = "train.py --steps 2 --questions 2 --group-size 4 --valid none --test none --out run"
    subprocess.run(
        [sys.executable, *command.split(), *FLAGS.get(name, [])],
        cwd=folder,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    rows = list(csv.DictReader(open(folder / "run" / "log.csv", newline="")))
    assert len(rows) == 2 and all(math.isfinite(float(row["loss"])) for row in rows)


# ---------------------------------------------------------------- advantages and the objective
def slopes(clip):
    """dJ / d log π of four tokens: ρ = 0.5 and 1.5, with A = 1 and A = -1."""
    from flow_grpo import loss

    logp = torch.tensor([0.5, 1.5, 0.5, 1.5]).log().requires_grad_()
    A = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss(logp, torch.zeros(4), None, A, torch.ones(4), clip=clip, beta=0)[0].backward()
    return (-logp.grad).tolist()


def check_gspo():
    from flow_grpo import loss

    logp = torch.tensor([0.5, 2.0, 8.0, 3.0]).log().requires_grad_()
    zeros, ones = torch.zeros(4), torch.ones(4)
    how = dict(clip=(0.2, 0.3), beta=0)
    value, ratio, _ = loss(logp, zeros, None, ones, ones, lengths=[2, 1, 1], **how)
    assert ratio.tolist() == pytest.approx([1, 1, 8, 3])  # √(0.5 · 2) for the first plan
    value.backward()
    assert logp.grad.tolist() == pytest.approx([-1, -1, 0, 0])


def check_epochs():
    from flow_grpo import Action, update
    from test_flow_grpo import tiny

    steps = []
    optimizer = SimpleNamespace(step=lambda: steps.append(1))
    actions = [Action([1, 2], [3, 4], n, A=1.0 - 2 * n) for n in (0, 1)]
    how = dict(temperature=1.0, clip=(0.2, 0.3), beta=0, minibatches=1)
    update(tiny(), None, optimizer, actions, [0, 0], **how)
    assert len(steps) == 2


def weight(tokens, turns):
    """The weight of each token of a plan, in a rollout of so many turns, of four rollouts."""
    from flow_grpo import Action, token_weight

    return token_weight(Action([1], [2] * tokens, 0), turns, 4)


def check_cispo():
    assert slopes((1, 0.3)) == pytest.approx([0.5, 1.3, -0.5, -1.3])  # clip(ρ) A


def check_rloo():
    from flow_grpo import advantages

    assert slopes((0.2, 0.3)) == pytest.approx([1, 1, -1, -1])  # A
    A, flat = advantages([1, 0, 0, 1, 0, 1], [0, 0, 0, 0, 1, 2])
    assert A.tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, 0]) and flat == 2
    assert advantages([0.9] * 4, [0] * 4)[0].tolist() == [0] * 4
    assert weight(5, turns=1) == weight(2, turns=3) == 1 / 4


def check_dr_grpo():
    from flow_grpo import advantages

    assert advantages([1, 0, 0, 0], [0] * 4)[0].tolist() == [0.75, -0.25, -0.25, -0.25]
    assert weight(5, turns=1) == weight(2, turns=3)
    assert slopes((0.2, 0.3)) == pytest.approx([0.5, 0, 0, -1.5])  # as it was


def check_exact_kl():
    from flow_grpo import Action, distribution, padded, token_logps

    policy, reference = tiny(0), tiny(1)
    [batch] = padded(policy, [Action([5, 6, 7], [8, 9, 3], 0)], 100)
    logp, kl = token_logps(policy, batch, 0.7, reference)
    ids, head = torch.tensor([[5, 6, 7, 8, 9]]), policy.get_output_embeddings()
    states = policy.model(ids).last_hidden_state[0, 2:].detach()
    log_pi = distribution(head(states), 0.7).detach()
    log_ref = distribution(reference(ids).logits[0, 2:], 0.7).detach()
    wanted = torch.nn.functional.kl_div(log_pi, log_ref, reduction="none", log_target=True).sum(-1)
    assert kl.tolist() == pytest.approx(wanted.tolist(), abs=1e-5) and wanted.min() > 0.1
    assert logp.tolist() == pytest.approx(log_pi[range(3), [8, 9, 3]].tolist(), abs=1e-5)
    found = torch.autograd.grad(kl.sum(), head.weight)[0]
    pull = (log_pi.exp() - log_ref.exp()) / 0.7  # on each logit: none is above 1 / temperature
    assert torch.allclose(found, pull.to(states).T @ states, atol=1e-5)


def check_gigpo():
    from flow_grpo import Action
    from train import add_step_advantages

    # Two rollouts of a group, the second of two turns, and one of another group.
    actions = [Action([5], [1], 0, 1.0), Action([5], [2], 1, -1.0), Action([5, 6], [3], 1, -1.0)]
    actions += [Action([5], [1], 2, 0.5)]
    add_step_advantages(actions, [1.0, 0.0, 1.0], [0, 0, 1])
    assert [a.A for a in actions] == pytest.approx([1.707, -1.707, -1, 0.5], abs=1e-3)
    later = [Action([5], [1], 0), Action([6], [1], 0), Action([5], [2], 1)]
    add_step_advantages(later, [1.0, 1.0], [0, 0])  # of two successes the quicker one is better
    assert [a.A for a in later] == pytest.approx([-0.707, 0, 0.707], abs=1e-3)


# ---------------------------------------------------------------- rewards and the questions
def check_turn_cost():
    from rewards.grade import reward

    def of(turns, right):
        return reward(SimpleNamespace(plans=[0] * turns, right=right))

    assert [of(2, True), of(2, False), of(40, True)] == pytest.approx([0.8, -0.2, 0.1])


def check_dapo():
    from train import without_flat_groups

    rewards = [1, 1, 0, 1, 0, 0]
    rollouts = [
        SimpleNamespace(reward=r, failed="", undecided=False, question=n // 2)
        for n, r in enumerate(rewards)
    ]
    assert without_flat_groups(rollouts, 2) == rollouts[2:4]
    rollouts[2].failed = "the server is down"  # one is left, and a group of one is flat
    assert without_flat_groups(rollouts, 2) == []


# ---------------------------------------------------------------- a prompt, a tool, two modules
def check_prompt():
    import planner

    assert planner.PROMPT.startswith("You are the careful planner")


def check_sql():
    from world.sql import FILE

    import tools
    from benchmarks.questions import read_questions

    subprocess.run([sys.executable, "-m", "world.sql"], cwd=FILE.parent, check=True)
    assert read_questions(FILE.with_suffix(".jsonl"))[2].answer == "57"
    chosen, before = tools.choose(["sql_query"]), FILE.read_bytes()

    def run(query):
        return tools.run_tool(chosen["sql_query"].run, "sql_query", {"query": query})

    assert run("SELECT kind, count(*) FROM product GROUP BY kind").text.startswith("fruit | 2\n")
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT count(*) FROM n"
    for query in ("DROP TABLE product", f"ATTACH '{FILE}2' AS other", numbers, "SELECT no"):
        assert run(query).error, query
    assert FILE.read_bytes() == before and not Path(f"{FILE}2").exists()


def rollout_with(turns, **texts):
    """A rollout in which each module writes these texts."""
    import solve
    from benchmarks.questions import Question
    from models.completion import Completion

    texts = {
        "planner": "Sub-goal: multiply\nTool: python_coder",
        "executor": 'python_coder(code="print(6 * 7)")',
        "verifier": "CONTINUE",
    } | texts
    openings = {importlib.import_module(name).PROMPT[:40]: text for name, text in texts.items()}

    def engine(prompts, **settings):
        return [Completion(openings.get(prompt[:40], "a text"), [], []) for prompt in prompts]

    tools = solve.choose(["python_coder"])
    return solve.roll_out([Question("q?", "42")], engine, engine, tools, max_turns=turns)[0]


def check_critic():
    rollout = rollout_with(2, critic="It is not 43.")
    assert "\nResult: 42\nRemark: It is not 43.\nVerdict: CONTINUE" in rollout.memory.render()
    assert [output["module"] for output in rollout.outputs].count("critic") == 2


def check_verifier():
    rollout = rollout_with(5)
    assert rollout.stopped and len(rollout.memory.steps) == 2
    assert rollout.memory.steps[-1].verdict == "STOP"
    rollout = rollout_with(3, executor="I would first multiply.")  # no call, so none is repeated
    assert not rollout.stopped and len(rollout.memory.steps) == 3
