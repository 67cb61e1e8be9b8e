"""docs/ladder.md shows what docs/ladder.py prints after each edit, and the answers of its exercises
and of docs/tour.md's are right. (The tour's session has some of them: tests/test_docs.py.)"""

import contextlib
import doctest
import io
import math
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_house import ROOT

from flow_grpo import Action, advantages, loss

LADDER, FLOW = "docs/ladder.py", "flow_grpo.py"
PAGE = (ROOT / "docs/ladder.md").read_text("utf-8")
TOUR = (ROOT / "docs/tour.md").read_text("utf-8")
RUNG = re.compile(r"```(python|diff)\n([^`]*)```\n```\n([^`]*)```")  # an edit, what it prints
DIFF = re.compile(r"```diff\n([^`]*)```")


def sources():
    return {name: (ROOT / name).read_text("utf-8") for name in (LADDER, FLOW)}


def edited(lines):
    """The sources, with each of these lines in place of the one that begins like it."""
    code = sources()
    for line in lines:
        start = re.match(r"[^=(]*[=(]", line)[0]
        old = re.compile(rf"^( *){re.escape(start)}.*$", re.M)
        name = LADDER if old.search(code[LADDER]) else FLOW
        code[name], found = old.subn(rf"\g<1>{line}", code[name])
        assert found == 1, line
    return code


def patched(diff, folder):
    """{file: its text} after `git apply` of a diff of the page."""
    names = re.findall(r"^--- a/(.*)$", diff, re.M)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=folder, check=True)
    return {name: (folder / name).read_text("utf-8") for name in names}


def module_of(source, name, monkeypatch):
    """Run a source as the module of this name."""
    module = ModuleType(name)
    module.__file__ = str(ROOT / LADDER)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def printed(code, monkeypatch):
    """What ladder.py prints."""
    with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(sys, "path", [*sys.path])
        if code.get(FLOW, sources()[FLOW]) != sources()[FLOW]:
            module_of(code[FLOW], "flow_grpo", patch)
        module_of(code[LADDER], "__main__", patch)
    return output.getvalue()


def test_the_page_shows_what_the_original_prints_and_which_edits_change_nothing(monkeypatch):
    output = printed(sources(), monkeypatch)
    assert f"python docs/ladder.py\n\n```\n{output}```" in PAGE
    first = ladder(monkeypatch).train(0, steps=10)
    for line in (
        "CLIP, BETA = (1e9, 1e9), 0",
        "R = [10 + float(right) for turns, right in rollouts]",
    ):
        assert ladder(monkeypatch, line).train(0, steps=10) == first


@pytest.mark.exhaustive
def test_the_page_shows_what_each_rung_and_each_fork_prints(monkeypatch, tmp_path):
    lines, rungs = [], RUNG.findall(PAGE)
    assert len(rungs) == 13
    for kind, edit, shown in rungs:
        if kind == "diff":
            code = patched(edit, tmp_path)
        else:
            new = edit.splitlines()
            lines = lines + new[1:] if new[0] == "..." else new  # ...: with the edits before
            code = edited(lines)
        output = printed(code, monkeypatch)
        last = "...\n" + output.splitlines(keepends=True)[-1]
        assert shown in (output, last), (edit, output)


# ---------------------------------------------------------------- what the page says in words
def ladder(monkeypatch, *lines):
    return module_of(edited(lines)[LADDER], "ladder", monkeypatch)


def first_batch(module, seed):
    """The actions of this seed's first step."""
    actions = []

    def note(*values, **more):
        actions.append(Action(*values, **more))
        return actions[-1]

    module.Action = note
    module.train(seed, steps=1)
    return actions


def test_what_the_page_says_of_untrained_tables_is_so(monkeypatch):
    hits = [math.comb(5, k) * 0.25**k * 0.75 ** (5 - k) for k in range(6)]
    assert round(sum(hits[3:]), 2) == 0.10  # three of five random turns
    assert round(1 - 0.75**4 - 4 * 0.25 * 0.75**3, 2) == 0.26  # exercise 4
    module = ladder(monkeypatch)
    actions = [action for seed in range(5) for action in first_batch(module, seed)]
    for tools, mean in (([0], 0.07), ([1, 2, 3], -0.16)):  # exercise 3
        A = [a.A for a in actions if a.prompt_ids == [0] and a.ids[0] in tools]
        assert round(sum(A) / len(A), 2) == mean
    lucky = [a for a in first_batch(ladder(monkeypatch, "QUESTIONS, GROUP = 4, 8"), 1) if a.A > 0]
    assert len({a.rollout for a in lucky}) == 1  # rung 3: a single success
    assert [(a.prompt_ids[0], a.ids[0]) for a in lucky] == [(0, 3), (0, 3), (0, 0), (1, 1), (2, 2)]
    lucky = [
        a for a in first_batch(ladder(monkeypatch, "STATES, TOOLS, TURNS = 4, 4, 5"), 2) if a.A > 0
    ]
    assert len({a.rollout for a in lucky}) == 4  # rung 4
    assert sorted(a.ids[0] for a in lucky if a.ids != a.prompt_ids) == [2, 2, 3, 3]


@pytest.mark.exhaustive
def test_what_the_page_says_of_other_edits_is_so(monkeypatch):
    def ends(*lines):
        return [float(share) for share in printed(edited(lines), monkeypatch).split()[-5:]]

    bonus = "R = [10 + float(right) for turns, right in rollouts]", "A, _ = torch.tensor(R), 0"
    assert max(ends(*bonus, "weight.append(token_weight(actions[-1], 1, N))")) < 0.25
    giving_up = "STATES, TOOLS, TURNS = 4, 5, 5", "GUESS, LUCK = 4, 0", "state = STATES + 1"
    cost = "R = [right - 0.1 * len(turns) for turns, right in rollouts]"
    assert max(ends(*giving_up, cost, "A[group] = r - mean")) < 0.05
    habits = "STATES, TOOLS, TURNS = 4, 4, 5", "SHARED = 8", "RATE, PASSES = 0.2, 1"
    for beta, low, high in ((0.2, 0.75, 0.95), (1, 0.05, 0.35)):  # untrained: 0.016
        module = ladder(monkeypatch, *habits, f"CLIP, BETA = (0.2, 0.3), {beta}")
        assert all(low < module.train(seed)[-1] < high for seed in range(3)), beta
    for beta, stuck in ((0, 2), (0.03, 0)):
        module = ladder(monkeypatch, *habits, f"CLIP, BETA = (0.2, 0.3), {beta}")
        assert sum(module.train(seed)[-1] < 0.5 for seed in range(5, 15)) == stuck


def test_the_numbers_in_the_answers_are_those_of_the_objective():
    def loss_of(logp, logp_old, logp_ref, A):
        """The loss, its gradient and the KL of these tokens."""
        logp, weight = logp.requires_grad_(), torch.full_like(logp, 1 / len(logp))
        beta = 0 if logp_ref is None else 1
        value, _, kl = loss(logp, logp_old, logp_ref, A, weight, clip=(0.2, 0.3), beta=beta)
        value.backward()
        return value.item(), logp.grad.tolist(), kl.tolist()

    half = advantages([1, 1, 0, 0], [0] * 4)[0].tolist()  # exercise 1
    assert [round(a, 3) for a in half] == [0.866, 0.866, -0.866, -0.866]
    A, _ = advantages([1, 0, 0, 0], [0] * 4)  # exercise 5
    assert A.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    value, gradient, _ = loss_of(torch.zeros(4), torch.zeros(4), None, A)
    assert value == pytest.approx(0, abs=1e-6) and gradient == pytest.approx((-A / 4).tolist())
    logp, reference = torch.tensor([0.025, 0.25]).log(), torch.tensor([0.25, 0.25]).log()
    _, _, kl = loss_of(logp, logp.clone(), reference, torch.ones(2))
    assert [round(k, 1) for k in kl] == [6.7, 0]  # exercise 6
    ratio = torch.tensor([0.5, 1.0, 1.5])  # exercise 7 of the tour
    _, gradient, _ = loss_of(ratio.log(), torch.zeros(3), None, torch.full((3,), -0.54))
    assert gradient == pytest.approx([0, 0.54 / 3, 0.81 / 3])


# ---------------------------------------------------------------- forks of the real files
@pytest.mark.exhaustive
def test_the_forks_of_the_reward_do_what_their_exercises_ask(monkeypatch, tmp_path):
    def rewards_of(diff, *rollouts):
        source = patched(diff, tmp_path)["rewards/grade.py"]
        reward = module_of(source, "a_grade", monkeypatch).reward
        return [reward(SimpleNamespace(**rollout)) for rollout in rollouts]

    [short] = [diff for diff in DIFF.findall(PAGE) if "rewards/grade.py" in diff]
    rollouts = [dict(right=right, plans=[0] * n) for right in (True, False) for n in (1, 3)]
    assert rewards_of(short, *rollouts) == pytest.approx([0.99, 0.97, 0, 0])
    lines = "STATES, TOOLS, TURNS = 4, 5, 5", "GUESS, LUCK = 4, 0", "state = STATES + 1"
    quoted = " ".join(re.search(r"`(R = \[right[^`]*)`", PAGE)[1].split())
    output = printed(edited([*lines, quoted]), monkeypatch)
    assert output.splitlines()[-1] == "step 30: 1.00 0.97 0.98 0.95 0.98"
    free = printed(edited(lines), monkeypatch)  # giving up costs nothing
    assert all(float(share) > 0.9 for share in free.splitlines()[-1].split()[2:])
    assert "ends at 1.00, 0.97, 0.98, 0.95 and 0.98" in " ".join(PAGE.split())

    [unknown] = [diff for diff in DIFF.findall(TOUR) if "rewards/grade.py" in diff]
    rollouts = [dict(right=False, answer="unknown"), dict(right=False, answer="602")]
    rollouts.append(dict(right=True, answer="353"))
    assert rewards_of(unknown, *rollouts) == [0, -1, 1]


def test_the_fork_of_distribution_forbids_all_but_the_two_likeliest_tokens(monkeypatch, tmp_path):
    [diff] = [diff for diff in DIFF.findall(TOUR) if "a/flow_grpo.py" in diff]
    fork = module_of(patched(diff, tmp_path)["flow_grpo.py"], "a_flow_grpo", monkeypatch)
    pi = fork.distribution(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), 0.7).exp()
    assert pi[0, [0, 3]].max() == 0 and pi[0].sum().item() == pytest.approx(1)


def test_the_arithmetic_of_ladder_md_runs():
    assert not doctest.testfile(str(ROOT / "docs/ladder.md"), module_relative=False).failed
