"""docs/ladder.md shows what docs/ladder.py prints after each edit; the answers of the exercises."""

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
        (folder / name).write_text((ROOT / name).read_text("utf-8"))
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
    for line in (
        "CLIP, BETA = (1e9, 1e9), 0",
        "R = [10 + float(right) for turns, right in rollouts]",
    ):
        assert printed(edited([line]), monkeypatch) == output


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


def first_batches(module, seeds):
    """[(Action, ...)] of the first step of each of these seeds."""
    batches = []
    for seed in seeds:
        batches.append([])

        def note(*values, **more):
            batches[-1].append(Action(*values, **more))
            return batches[-1][-1]

        module.Action = note
        module.train(seed, steps=1)
    return batches


def test_what_the_page_says_of_untrained_tables_is_so(monkeypatch):
    hits = [math.comb(5, k) * 0.25**k * 0.75 ** (5 - k) for k in range(6)]
    assert round(sum(hits[3:]), 2) == 0.10  # three of five random turns
    assert round(1 - 0.75**4 - 4 * 0.25 * 0.75**3, 2) == 0.26  # exercise 4
    actions = sum(first_batches(ladder(monkeypatch), range(5)), [])
    A = [[a.A for a in actions if (a.prompt_ids, a.ids) == ([0], [tool])] for tool in range(4)]
    assert round(sum(A[0]) / len(A[0]), 2) == 0.07  # exercise 3
    assert round(sum(A[1] + A[2] + A[3]) / len(A[1] + A[2] + A[3]), 2) == -0.16
    small = ladder(monkeypatch, "QUESTIONS, GROUP = 4, 8")
    [batch] = first_batches(small, [1])
    assert len({a.rollout for a in batch if a.A > 0}) == 1  # rung 3
    assert [(*a.prompt_ids, *a.ids) for a in batch if a.A > 0][0] == (0, 3)


def test_a_larger_beta_costs_as_the_page_says(monkeypatch):
    for beta, low, high in ((0.1, 0.84, 0.95), (1, 0, 0.2)):
        lines = "STATES, TOOLS, TURNS = 4, 4, 5", "SHARED = 8", f"CLIP, BETA = (0.2, 0.3), {beta}"
        module = ladder(monkeypatch, *lines)
        assert all(low < module.train(seed, steps=60)[-1] < high for seed in range(3)), beta


def test_the_numbers_in_the_answers_are_those_of_the_objective():
    assert [round(a, 3) for a in advantages([1, 1, 0, 0], [0] * 4)[0].tolist()] == [
        *(0.866, 0.866, -0.866, -0.866)  # exercise 1
    ]
    A, _ = advantages([1, 0, 0, 0], [0] * 4)  # exercise 5
    logp, how = torch.zeros(4, requires_grad=True), dict(clip=(0.2, 0.3))
    value, _, _ = loss(logp, logp.detach(), None, A, torch.ones(4) / 4, beta=0, **how)
    value.backward()
    assert A.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert value.item() == pytest.approx(0, abs=1e-6)
    assert logp.grad.tolist() == pytest.approx((-A / 4).tolist())
    logp, reference = torch.tensor([0.01, 0.25]).log(), torch.tensor([0.25, 0.25]).log()
    _, _, kl = loss(logp, logp, reference, torch.ones(2), torch.ones(2), beta=1, **how)
    assert [round(k, 1) for k in kl.tolist()] == [20.8, 0]  # exercise 6
    ratio = torch.tensor([0.5, 1.0, 1.5]).log().requires_grad_()  # exercise 7 of the tour
    loss(ratio, torch.zeros(3), None, torch.full((3,), -0.54), torch.ones(3), beta=0, **how)[
        0
    ].backward()
    assert ratio.grad.tolist() == pytest.approx([0, 0.54, 0.81])


# ---------------------------------------------------------------- forks of the real files
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
    assert output.splitlines()[-1] == "step 30: 1.00 0.94 0.98 0.95 0.97"
    free = printed(edited(lines), monkeypatch)  # giving up costs nothing
    assert all(float(share) > 0.9 for share in free.splitlines()[-1].split()[2:])
    assert "ends at 1.00, 0.94, 0.98, 0.95 and 0.97" in " ".join(PAGE.split())

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
