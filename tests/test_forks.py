"""The forks (experiments/forks/*.diff): each fits the code, and does what it says, which the code does not.

A fork has a check: a number that holds for it. The check runs twice, in the copy that the diff has changed,
and in the code as it is, where it must fail. .ci/run also trains two steps of the toy in each copy.
"""

import csv
import json
import math
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_flow_grpo import Recorder, T, one_by_one, rollouts, same_gradients, tiny
from test_house import ORDER, ROOMS

from experiments import runs

FORKS = sorted(path.stem for path in (runs.ROOT / "experiments" / "forks").glob("*.diff"))
TRAIN = [
    "train.py",
    "--steps",
    "2",
    "--questions",
    "2",
    "--group-size",
    "4",
    "--max-turns",
    "2",
    "--valid",
    "none",
    "--test",
    "none",
    "--out",
    "run",
]
MISSING = (
    AssertionError,
    AttributeError,
    ImportError,
    OSError,
    ValueError,
)  # no such name, module or file


@contextmanager
def modules_of(folder):
    """Inside, `import train` and the like give the modules of this copy of the code."""

    def ours():
        return [name for name in sys.modules if name.split(".")[0] in ORDER + ROOMS + ["toy"]]

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
    """fork(name) -> the folder of a copy of the code with this diff."""
    return lambda name: runs.edited(tmp_path, (f"forks/{name}",))


# ---- what is the same for all ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORKS)
def test_a_fork_changes_at_most_15_lines_of_our_files_and_says_what_came_of_it(name):
    head, changes = runs.head_and_changes(f"forks/{name}")
    assert all(runs.note(f"forks/{name}", key) for key in ("source", "result"))
    assert head.splitlines()[0] and max(map(len, (head + changes).splitlines())) <= 111
    lines, added, ours = 0, [], True
    for line in changes.splitlines():
        if line.startswith("--- "):
            ours = line != "--- /dev/null"
        elif line.startswith("+++ "):
            added += [] if ours else [Path(line).suffix]
        elif line.startswith(("+", "-")):
            lines += ours
    assert lines <= 15
    modules = {
        "gigpo": [".py"],
        "sql": [".py"],
        "tracker": [".py"],
        "dataset": [".jsonl"],
        "critic": [".py"],
    }
    assert added == modules.get(name, [])


@pytest.mark.parametrize("name", FORKS)
def test_the_check_of_a_fork_holds_in_it_and_not_in_the_code_as_it_is(name, fork):
    check = globals()[f"check_{name.replace('-', '_')}"]
    with modules_of(fork(name)):
        check()
    with modules_of(runs.ROOT), pytest.raises(MISSING):
        check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORKS)
def test_the_toy_trains_in_each_fork(name, fork):
    folder, settings = fork(name), {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "text": True}
    if name == "sql":
        subprocess.run([sys.executable, "-m", "world.sql"], cwd=folder, check=True, **settings)
    command = [sys.executable, *TRAIN, *runs.note(f"forks/{name}", "flags").split()]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, **settings)
    rows = list(csv.DictReader(open(folder / "run" / "log.csv", newline="")))
    assert len(rows) == 2 and all(math.isfinite(float(row["loss"])) for row in rows)
    records = [json.loads(line) for line in (folder / "run" / "rollouts.jsonl").open()]
    seen = {
        "entropy": lambda: (
            float(rows[-1]["loss"]) > 0.01
        ),  # without the bonus 0 but for rounding, clip, KL
        "turn-cost": lambda: (
            {round(one["reward"] + 0.1 * one["turns"], 6) for one in records} <= {0, 1}
        ),
        "asymmetric": lambda: min(one["reward"] for one in records) == -1,
        "tracker": lambda: (
            len((folder / "run" / "scalars.jsonl").open().readlines()) == 2 * len(rows[0])
        ),
        "dataset": lambda: {one["gold"] for one in records} <= {"42", "Fe", "Paris"},
        "log-ratios": lambda: any("log_ratios" in text for one in records for text in one["words"]),
        "sql": lambda: all("product(name TEXT" in one["question"] for one in records),
    }
    assert seen.get(name, lambda: True)()


# ---- objectives: the gradient of the second mini-batch, in plain loops -------------------------------------


def check_gradient(objective, **settings):
    """Is the gradient of update() that of objective(logp, logp_old, A, T_i), the part of J of one turn?

    In the second mini-batch, where π_θ is no longer π_θold, and in micro-batches of all sizes."""
    import flow_grpo
    from scale.passes import Passes

    turns_of, rewards, groups = rollouts()
    A = flow_grpo.advantages(rewards, groups)[0].double()
    actions = [
        flow_grpo.Action(a.prompt_ids, a.ids, a.rollout, A[a.rollout].item()) for a in turns_of
    ]
    recorders = []
    for budget in (1, 40, 10_000):
        model = tiny()
        recorders.append(Recorder(model, lr=0.3))
        passes = Passes(model, None, flow_grpo.token_logps, token_budget=budget)
        flow_grpo.update(
            passes,
            recorders[-1],
            actions,
            groups,
            temperature=T,
            minibatches=2,
            max_grad_norm=1e6,
            **settings,
        )
    assert all(same_gradients(one, recorders[0]) for one in recorders)

    old, model = tiny(), tiny()
    model.load_state_dict(recorders[0].weights[1])
    part = flow_grpo.split_rollouts(groups, 2, 0)[1]
    J = 0
    for a in actions:
        if a.rollout in part:
            logp, logp_old = (
                torch.stack(one_by_one(model, a)),
                torch.stack(one_by_one(old, a)).detach(),
            )
            count = sum(other.rollout == a.rollout for other in actions)
            J = J + objective(logp, logp_old, A[a.rollout], count) / len(part)
    (-J).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(recorders[0].gradients[1], expected, rtol=1e-4, atol=1e-6)


def clipped(ratio, A, low, high):
    return torch.min(ratio * A, ratio.clamp(1 - low, 1 + high) * A)


def check_dr_grpo():
    import flow_grpo

    assert flow_grpo.advantages([1, 0, 0, 0], [0] * 4)[0].tolist() == [0.75, -0.25, -0.25, -0.25]
    length = flow_grpo.LENGTH
    check_gradient(lambda new, old, A, T_i: clipped((new - old).exp(), A, 0.2, 0.3).sum() / length)


def check_full_entropy():
    import flow_grpo
    from fast import logps
    from scale.passes import Passes

    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    logp, H = flow_grpo.log_probs(logits, torch.tensor([0, 4, 2]), T).unbind(-1)
    torch.testing.assert_close(H, torch.distributions.Categorical(logits=logits / T).entropy())
    minus_J, *_ = flow_grpo.loss(logp, logp, None, torch.zeros(3), torch.ones(3), (0.2, 0.3), 0, H)
    torch.testing.assert_close(minus_J, -0.01 * H.sum())

    turns_of, rewards, groups = rollouts()  # the plain way and the fast one, with two columns
    A = flow_grpo.advantages(rewards, groups)[0]
    actions = [
        flow_grpo.Action(a.prompt_ids, a.ids, a.rollout, A[a.rollout].item()) for a in turns_of
    ]
    recorders = []
    for scoring in (
        lambda model: (flow_grpo.token_logps,),
        lambda model: logps.scoring(flow_grpo.log_probs, model),
    ):
        model = tiny()
        recorders.append(Recorder(model, lr=0.3))
        passes = Passes(model, None, *scoring(model), token_budget=40)
        flow_grpo.update(
            passes, recorders[-1], actions, groups, temperature=T, minibatches=2, max_grad_norm=1e6
        )
    assert same_gradients(*recorders)


def check_rloo():
    from flow_grpo import advantages

    _, rewards, groups = rollouts()
    for i, A in enumerate(advantages(rewards, groups)[0].tolist()):
        others = [rewards[k] for k in range(len(rewards)) if k != i and groups[k] == groups[i]]
        assert A == pytest.approx(rewards[i] - sum(others) / len(others))
    assert (
        advantages([0, 1, 0, 1, 1], [0, 1, 0, 1, 2])[0].tolist() == [0] * 5
    )  # the last one has no others
    check_gradient(
        lambda new, old, A, T_i: sum(A * logp for logp in new)
    )  # no mean, no ratio, no clip


def check_successes():
    import flow_grpo

    assert flow_grpo.advantages([1, 0, 0, 1, 1], [0, 0, 0, 1, 1])[0].tolist() == [1, 0, 0, 1, 1]
    check_gradient(lambda new, old, A, T_i: clipped((new - old).exp(), A, 0.2, 0.3).mean() / T_i)


def check_gspo():
    ratio = lambda new, old: (new - old).mean().exp()  # one for the turn
    low, high = 0.03, 0.04
    check_gradient(
        lambda new, old, A, T_i: clipped(ratio(new, old), A, low, high) / T_i, clip=(low, high)
    )


def check_cispo():
    weight = lambda new, old: (new - old).exp().clamp(max=1.3).detach()
    check_gradient(
        lambda new, old, A, T_i: (weight(new, old) * A * new).mean() / T_i, clip=(1.0, 0.3)
    )


def check_tis():
    import flow_grpo
    from scale.passes import Passes

    turns_of, rewards, groups = rollouts()
    A = flow_grpo.advantages(rewards, groups)[0].tolist()

    def trained(gap, factor):
        """The gradient if sampling gave log-probs that are lower by `gap`, with `factor` times A."""
        model = tiny()
        sampled = [[logp.item() - gap for logp in one_by_one(model, a)] for a in turns_of]
        actions = [
            flow_grpo.Action(a.prompt_ids, a.ids, a.rollout, factor * A[a.rollout], logps)
            for a, logps in zip(turns_of, sampled)
        ]
        recorder = Recorder(model, lr=0.3)
        flow_grpo.update(
            Passes(model, tiny(1), flow_grpo.token_logps),
            recorder,
            actions,
            groups,
            temperature=T,
            minibatches=2,
            beta=0.1,
            max_grad_norm=1e6,
        )
        return recorder

    for gap, factor in ((0.3, math.exp(0.3)), (-0.3, math.exp(-0.3)), (5, 2)):
        for found, expected in zip(
            trained(gap, 1).gradients, trained(0, factor).gradients, strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def check_entropy():
    import flow_grpo

    # Each token of a vocabulary of five, as often as π_old samples it: the gradient of the entropy of π_θ.
    logits, old = (
        torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).double().log_softmax(-1)
    )
    logits.requires_grad_()
    minus_J, *_ = flow_grpo.loss(
        logits.log_softmax(-1), old, None, torch.zeros(5), old.exp(), (0.2, 0.3), 0
    )
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
    found, expected = (torch.autograd.grad(value, logits)[0] for value in (-minus_J, 0.1 * entropy))
    torch.testing.assert_close(found, expected)

    bonus = lambda new, old: 0.1 * ((new - old).exp() * new).detach() * new
    gain = lambda new, old, A: clipped((new - old).exp(), A, 0.2, 0.3) - bonus(new, old)
    check_gradient(lambda new, old, A, T_i: gain(new, old, A).mean() / T_i)


def check_gigpo():
    from rewards.states import GAMMA, returns, states

    from flow_grpo import Action, advantages

    # Two rollouts of a group, in two turns and in one; a third, of another group, has the same first prompt.
    actions = [
        Action([5], [1], 0),
        Action([5, 6], [1], 0),
        Action([5], [2], 1),
        Action([5], [1], 2),
    ]
    assert returns(actions, [1, 0, 1]) == [GAMMA, 1, 0, 1]
    numbers = states(actions, groups=[3, 3, 4])
    assert numbers == [0, 1, 0, 2]
    assert [round(x, 3) for x in advantages([GAMMA, 1, 0, 1], numbers)[0].tolist()] == [
        0.707,
        0,
        -0.707,
        0,
    ]


# ---- rollouts and rewards ----------------------------------------------------------------------------------


def finished(*rewards):
    return [SimpleNamespace(reward=reward, failed="", undecided=False) for reward in rewards]


def check_dapo():
    from train import without_flat_groups

    asked = []

    def sample(n, again):
        asked.append((n, again))
        return finished(*[0, 1] * n)

    rollouts = without_flat_groups(finished(1, 1, 0, 1, 0, 0), 2, sample)
    assert [one.reward for one in rollouts] == [0, 1, 0, 1, 0, 1] and asked == [
        (2, 1),
        (0, 2),
        (0, 3),
    ]
    never = without_flat_groups(finished(1, 1, 0, 1), 2, lambda n, again: finished(*[0] * 2 * n))
    assert [one.reward for one in never] == [0, 1, 0, 0]  # after three times


def check_last_turn():
    from train import actions_of

    turn = lambda number: SimpleNamespace(prompt_ids=[1] * number, ids=[number], logps=[])
    usable = [SimpleNamespace(plans=[turn(1), turn(2), turn(3)]), SimpleNamespace(plans=[turn(4)])]
    actions = actions_of(usable, torch.ones(2))
    assert [(action.rollout, action.ids) for action in actions] == [(0, [3]), (1, [4])]


def check_turn_cost():
    from rewards.grade import reward

    rewards = [reward(SimpleNamespace(plans=[0] * turns, right=True)) for turns in (2, 9, 40)]
    assert rewards == pytest.approx(
        [0.8, 0.1, 0.1]
    )  # a right answer earns something, after many turns, too
    assert reward(SimpleNamespace(plans=[0] * 2, right=False)) == -0.2


def check_asymmetric():
    from rewards.grade import reward

    answers = [("6", True), (" Unknown", False), ("7", False)]
    assert [reward(SimpleNamespace(answer=text, right=right)) for text, right in answers] == [
        1,
        0,
        -1,
    ]


# ---- a module, a tracker, a prompt, questions, a tool ------------------------------------------------------


def asked(module, turns=3, **texts):
    """(the prompts of a module, the rollout), of a rollout in which the modules write these texts. The
    verifier never stops it, unless its text says so."""
    import solve
    from models.completion import Completion
    from rewards.questions import Question
    from tools import TOOLS
    from world.toolbox import choose

    texts = {
        "planner": "Sub-goal: s\nTool: python_coder",
        "verifier": "CONTINUE",
        "executor": 'python_coder(code="print(6 * 7)")',
    } | texts
    openings = {name: getattr(solve, name).PROMPT[:40] for name in texts}
    seen = []

    def engine(prompts, **settings):
        name = next((name for name in texts if prompts[0].startswith(openings[name])), "")
        seen.extend(prompts if name == module else [])
        return [Completion(texts.get(name, "text"), [], []) for _ in prompts]

    (rollout,) = solve.roll_out(
        [Question("q?", "42")], engine, engine, choose(TOOLS, ["python_coder"]), turns
    )
    return seen, rollout


def check_critic():
    seen, rollout = asked("critic", critic="not 43", verifier="STOP")
    assert rollout.memory.steps[0].remark == "not 43" and rollout.stopped and not rollout.failed
    assert "\nResult: 42\nRemark: not 43\nVerdict: STOP" in rollout.memory.render()
    assert len(seen) == 1 and "\nMemory:\nStep 1\n" in seen[0] and "Result: 42\n" in seen[0]


def check_verifier():
    import solve
    import train
    from models.completion import Completion
    from rewards.questions import Question
    from tools import TOOLS
    from world.toolbox import choose

    policy_asked, texts = (
        [],
        {solve.executor: 'python_coder(code="print(6 * 7)")', solve.verifier: "STOP"},
    )

    def fixed(prompts, **settings):
        module = next((one for one in texts if prompts[0].startswith(one.PROMPT[:40])), None)
        return [
            Completion(texts.get(module, "Sub-goal: s\nTool: python_coder"), [1], [2])
            for _ in prompts
        ]

    def policy(prompts, temperature, **settings):
        policy_asked.append((prompts[0].split("\n")[0], temperature))
        return fixed(prompts)

    (rollout,) = solve.roll_out(
        [Question("q?", "42")], policy, fixed, choose(TOOLS, ["python_coder"])
    )
    firsts = [module.PROMPT.split("\n")[0] for module in (solve.planner, solve.verifier)]
    assert policy_asked == [(first, 0.7) for first in firsts] and rollout.stopped
    actions = train.actions_of([rollout], torch.ones(1))
    assert len(actions) == 2 and len(rollout.plans) == len(rollout.memory.steps) == 1


def test_use_md_shows_all_that_a_new_module_changes_in_the_code():
    changes = runs.head_and_changes("forks/critic")[1]
    shown, new = changes.split("diff --git ")
    assert f"```diff\n{shown}```\n" in (runs.ROOT / "docs" / "fork.md").read_text(encoding="utf-8")
    assert new.count("+++ ") == 1 and "+++ b/critic.py" in new and "--- /dev/null" in new


def check_turns_left():
    seen, _ = asked("planner", turns=3)
    assert [prompt.count(f"\n\nTurns left: {3 - n}\n") for n, prompt in enumerate(seen)] == [
        1,
        1,
        1,
    ]


def check_late_check():
    seen, rollout = asked("verifier", turns=3)
    assert len(seen) == 2 and "Step 2" in seen[0] and "Step 3" in seen[1]
    assert [step.verdict for step in rollout.memory.steps] == ["CONTINUE"] * 3


def check_log_ratios():
    from train import log_ratios

    assert log_ratios.__module__ == "experiments.ratios"


def check_tracker():
    from logbook.log import Log

    with tempfile.TemporaryDirectory() as folder:
        log = Log(folder, 0)
        log.add_row("log.csv", {"step": 7, "reward": 0.5})
        log.add_row("evals.csv", {"step": 7, "questions": "test", "accuracy": 0.25})
        lines = [json.loads(line) for line in (Path(folder) / "scalars.jsonl").open()]
    assert {"tag": "train/reward", "value": 0.5, "step": 7} in lines and len(lines) == 4
    assert {"tag": "test/accuracy", "value": 0.25, "step": 7} in lines


def check_prompt():
    import planner

    assert planner.PROMPT.startswith("You are the careful planner")


def check_dataset():
    import memory
    from rewards.questions import read_questions

    path = Path(memory.__file__).with_name("my_questions.jsonl")
    assert [one.answer for one in read_questions(path)] == ["42", "Fe", "Paris"]


def check_sql():
    from world.sql import FILE
    from world.toolbox import choose

    import tools
    from rewards.questions import read_questions

    subprocess.run([sys.executable, "-m", "world.sql"], cwd=FILE.parent, check=True)
    before, chosen = FILE.read_bytes(), choose(tools.TOOLS, ["sql_query"])
    run = lambda query: tools.run_tool(chosen, "sql_query", {"query": query})
    questions = read_questions(FILE.with_suffix(".jsonl"))
    assert len({one.question for one in questions}) == 40 and questions[0].answer == "3"
    assert run("SELECT kind, count(*) FROM product GROUP BY kind").text.startswith(
        "fruit | 3\nkitchen | 2"
    )
    for query in (
        "DROP TABLE sale",
        "INSERT INTO sale VALUES ('saw', 2025, 1)",
        "PRAGMA query_only = 0",
        f"ATTACH '{FILE}2' AS other",
        "SELECT hex(zeroblob(900000000))",
        "SELECT 1; SELECT 2",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
        "SELECT count(*) FROM sale a, sale b, sale c, sale d, sale e",
        "SELECT no FROM sale",
    ):
        assert run(query).error, query
    assert FILE.read_bytes() == before and not Path(f"{FILE}2").exists()
