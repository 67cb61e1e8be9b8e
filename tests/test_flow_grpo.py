"""The objective against flow_grpo.objective(), three nested loops written from eq. 5: one sequence
at a time, no padding, no mask, and log-probs from the full logits of each.

The last tests change the code on purpose, in one place at a time: the oracle must notice."""

import contextlib
import copy
import functools
import statistics
import sys
import types
from collections import Counter
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch
import transformers
from conftest import spy
from transformers import (
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    Qwen2ForCausalLM,
)

import flow_grpo
from fast import trees
from flow_grpo import Action
from models.local import ready_to_update

SOURCE = Path(flow_grpo.__file__).read_text(encoding="utf-8")
STOP, T = 63, 0.7  # the stop token of these tests, and the sampling temperature
SIZE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
SIZE |= dict(num_key_value_heads=2, vocab_size=64)
GPT2_SIZE = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=64)
ROWS = pytest.mark.parametrize("rows", [flow_grpo.padded, trees.rows], ids=["padded", "trees"])


def tiny(seed=0, kind=Qwen2ForCausalLM, **changes):
    torch.manual_seed(seed)
    size = GPT2_SIZE if kind is GPT2LMHeadModel else SIZE
    model = kind(kind.config_class(**size, **changes)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)  # far from uniform: errors show
    return model


def rollouts(seed=0):
    """7 rollouts of 3 questions, one of them flat: 1-4 turns, 1-6 tokens, prompts that grow, in
    shuffled order."""
    r = torch.Generator().manual_seed(seed)
    number = lambda low, high: torch.randint(low, high, (1,), generator=r).item()
    ids = lambda low, high: torch.randint(0, 63, (number(low, high),), generator=r).tolist()
    actions = [
        Action(ids(2, 6) + [1] * 3 * t, ids(0, 6) + [STOP], rollout)
        for rollout, turns in enumerate([1, 3, 2, 4, 1, 3, 2])
        for t in range(turns)
    ]
    actions[1].ids = [7, 8, 9]  # a plan cut at the token limit: no stop token
    actions = [actions[i] for i in torch.randperm(len(actions), generator=r)]
    return actions, [1, 0, 0, 1, 0, 1, 1], [0, 0, 0, 1, 1, 2, 2]


def family():
    """9 rollouts of 3 groups, the last one flat, with copies of prompts, completions that begin or
    are alike, and second turns whose prompts go on where the first ones and their plans end."""
    first, second, third = [5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 20, 21], [30, 31, 32]
    plans = [[1, 2, STOP], [1, 2, STOP], [1, 3, 4, STOP], [2]]
    plans += [[1, 2, 9, STOP]] * 2 + [[4, STOP]] * 2 + [[4, 5, STOP]]
    prompts = [first] * 4 + [second] * 3 + [third] * 2
    actions = [
        Action(prompt, plan, rollout) for rollout, (prompt, plan) in enumerate(zip(prompts, plans))
    ]
    actions += [Action(first + plans[i][:2] + [40], [3, 1 + i % 2, STOP], i) for i in range(4)]
    actions += [Action(second[:5], [21, 1, STOP], 4)]  # it predicts what is prompt for others
    actions = [actions[i] for i in torch.randperm(14, generator=torch.Generator().manual_seed(0))]
    return actions, [1, 0, 0, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 2, 2]


def with_advantages(actions, A):
    """Copies of the actions that carry the advantages of their rollouts."""
    return [replace(a, A=float(A[a.rollout])) for a in actions]


def lesson():
    """Those actions, and the advantages of their rollouts."""
    actions, rewards, groups = rollouts()
    return actions, flow_grpo.advantages(rewards, groups)[0]


TOKENS = sum(len(a.ids) for a in rollouts()[0])


class Recorder(torch.optim.SGD):
    """Remembers the weights before each step and the gradient it got."""

    def __init__(self, model, lr=0.1):
        super().__init__(model.parameters(), lr=lr)
        self.model, self.weights, self.gradients = model, [], []

    def step(self):
        self.weights.append(copy.deepcopy(self.model.state_dict()))
        self.gradients.append(gradient(self.model))
        super().step()


def unchanged(model, seed=0):
    """Has the model still the weights of tiny(seed)?"""
    before = tiny(seed).state_dict()
    return all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def gradient(model):
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([g.flatten() for g in gradients])


def one_by_one(model, action, temperature=T):
    """log π of each token of one action, from the full logits of one unpadded sequence."""
    logits = model(torch.tensor([action.prompt_ids + action.ids])).logits[0] / temperature
    first = len(action.prompt_ids)
    return [logits[first + j - 1].log_softmax(-1)[token] for j, token in enumerate(action.ids)]


def oracle_advantages(rewards, groups):
    members = lambda g: [r for r, other in zip(rewards, groups) if other == g]
    flat = lambda g: len(set(members(g))) == 1
    return [
        0.0
        if flat(g)
        else (r - statistics.mean(members(g))) / (statistics.stdev(members(g)) + 1e-6)
        for r, g in zip(rewards, groups)
    ]


def oracle(actions, A, logps, clip, beta, token_mean=False, **more):
    """The loss by the loops of eq. 5 (with gradient), and (ρ, A, -log π, KL, weight) of each token.
    logps(action): its log-probs under the policy, the old policy and the reference."""
    rollouts = {rollout: [] for rollout in sorted({a.rollout for a in actions})}
    for action in actions:
        rollouts[action.rollout].append(list(zip(*logps(action))))
    seen = []
    for rollout, turns in rollouts.items():
        for new, was, ref, share in [
            (*token, 1 / len(rollouts) / len(turns) / len(turn)) for turn in turns for token in turn
        ]:
            likelier = ref - new  # than under the policy, in nats
            r = torch.exp(likelier) if likelier < log(11) else 11 + 11 * (likelier - log(11))
            kl = r - likelier - 1
            seen.append([torch.exp(new - was).item(), A[rollout], -new.item(), kl.item(), share])
    rollouts, A = list(rollouts.values()), [A[rollout] for rollout in rollouts]
    if token_mean:  # as if each token were a rollout
        A = [a for a, turns in zip(A, rollouts) for turn in turns for _ in turn]
        rollouts = [[[token]] for turns in rollouts for turn in turns for token in turn]
        seen = [[*row[:-1], 1 / len(seen)] for row in seen]
    return -flow_grpo.objective(rollouts, A, clip, beta, **more), seen


def score(model, actions, rows=flow_grpo.padded, temperature=T, module=flow_grpo):
    """log π of all tokens of these actions, in their order, by token_logps()."""
    found = {}
    for batch in rows(model, actions, 10**6):
        logps = module.token_logps(model, batch, temperature)
        found |= {
            id(a): logp for a, logp in zip(batch[0], logps.split([len(a.ids) for a in batch[0]]))
        }
    return torch.cat([found[id(a)] for a in actions])


def learn(model, actions, A, reference=None, lr=0.1, groups=None, **settings):
    """One update: (its metrics, the optimizer). Without groups, each rollout is one of its own."""
    optimizer = Recorder(model, lr)
    settings = dict(temperature=T, max_grad_norm=1e9, rows=trees.rows) | settings
    settings = dict(clip=(0.2, 0.3), beta=0.001, minibatches=1) | settings
    actions, groups = with_advantages(actions, A), range(len(A)) if groups is None else groups
    return flow_grpo.update(model, reference, optimizer, actions, groups, **settings), optimizer


def small_memory(model, most, broken):
    """`model` on a device where more than `most` sequences are too many: out of memory in the
    middle of the backward pass, when the upper layer has its gradient already."""

    def too_many(*_):
        broken.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. (a test)")

    def watch(module, args, out):
        hidden = out[0] if isinstance(out, tuple) else out  # (B, L, d)
        if len(hidden) > most:
            hidden.register_hook(too_many) if hidden.requires_grad else too_many()

    model.model.layers[0].register_forward_hook(watch)
    return model


def compare_with_the_oracle(
    module=flow_grpo, batch=None, memory=None, passes=1, reference=None, older=None, **changed
):
    """An update of `module` on the same rollouts as the oracle; AssertionError at the first
    difference. batch: other rollouts(). memory: how many sequences fit into it. passes: over the
    mini-batches. older: the policy that sampled every other action. changed: settings of the
    update."""
    actions, rewards, groups = batch or rollouts()
    settings = dict(temperature=T, clip=(0.05, 0.2), beta=0.2, minibatches=2, max_grad_norm=1e9)
    settings |= dict(token_mean=False, seed=1, token_budget=40, rows=module.padded) | changed
    clip, beta, token_mean = (settings[name] for name in ("clip", "beta", "token_mean"))
    (low, high), broken = clip, []
    start, reference = tiny(0), reference or tiny(1)
    model = copy.deepcopy(start)
    watched = small_memory(model, memory, broken) if memory else model
    optimizer = Recorder(watched, lr=0.1 / passes**2)
    A, flat = module.advantages(rewards, groups)
    expected_A = oracle_advantages(rewards, groups)
    assert flat == 1 and A.tolist() == pytest.approx(expected_A, abs=1e-5)
    copies = [module.Action(a.prompt_ids, a.ids, a.rollout, A[a.rollout].item()) for a in actions]
    olds = [older if older and n % 2 else start for n in range(len(actions))]
    with torch.no_grad():
        for a, old in zip(copies, olds):
            a.logp_old = torch.stack(one_by_one(old, a)) if old is older else None
    got = module.update(model, reference, optimizer, copies, groups, **settings)
    parts = module.split_rollouts(groups, settings["minibatches"], settings["seed"])
    assert sorted(i for part in parts for i in part) == list(range(len(rewards)))
    parts = parts * passes
    losses, seen, norms = [], [], []
    with torch.no_grad():
        fixed = {
            id(a): [one_by_one(policy, a) for policy in (old, reference)]
            for a, old in zip(actions, olds)
        }
    assert len(optimizer.gradients) == len(parts)
    for part, weights, found in zip(parts, optimizer.weights, optimizer.gradients):
        now = copy.deepcopy(start)
        now.load_state_dict(weights)
        logps = lambda action: [one_by_one(now, action), *fixed[id(action)]]
        learned = [a for a in actions if a.rollout in part]
        value, tokens = oracle(learned, expected_A, logps, clip, beta, token_mean=token_mean)
        value.backward()
        assert (gradient(now) - found).abs().max() < 1e-6 * max(1, found.norm())
        losses, seen = losses + [value.item()], seen + tokens
        norms.append(gradient(now).norm().item())
    assert bool(broken) == bool(memory) == (got.pop("token_budget") < settings["token_budget"])
    assert not any(p.grad is not None for p in model.parameters())
    if not beta:  # the metrics then leave out what was not computed
        return
    up, down = [a for r, a, *_ in seen if r > 1 + high], [a for r, a, *_ in seen if r < 1 - low]
    # the batch has both sides of both clips
    assert batch or min(up) < 0 < max(up) and min(down) < 0 < max(down)
    clipped, mean = sum(a > 0 for a in up) + sum(a < 0 for a in down), statistics.mean
    want = dict(loss=mean(losses), grad_norm=mean(norms), skipped=0, clip=clipped / len(seen))
    want |= dict(
        kl=sum(kl * share for *_, kl, share in seen) / len(parts),
        entropy=mean(h for _, _, h, *_ in seen),
    )
    assert got == pytest.approx(want, abs=1e-5, rel=1e-5)


# ------------------------------------------------------------------------------------- the formula
@ROWS
@pytest.mark.parametrize("token_mean", [False, True], ids=["eq. 5", "the released code's mean"])
def test_the_loss_is_the_formula_and_so_is_its_gradient(token_mean, rows):
    compare_with_the_oracle(token_mean=token_mean, rows=rows)


@ROWS
def test_it_is_the_formula_where_prompts_are_shared(rows):
    compare_with_the_oracle(batch=family(), rows=rows, token_budget=60)


@ROWS
def test_without_a_kl_it_is_the_formula_too(rows):
    compare_with_the_oracle(beta=0, rows=rows)


@functools.cache
def distant():
    """A reference that has learned the plans of rollouts(): it finds most tokens far likelier."""
    model, (actions, rewards, _) = tiny(1), rollouts()
    learn(model, actions, [1.0] * len(rewards), lr=0.3, beta=0)
    return model


@ROWS
def test_far_from_the_reference_the_kl_goes_on_in_a_straight_line(rows):
    reference = distant()
    start = tiny()
    logps = [[*map(one_by_one, (reference, start), (a, a))] for a in rollouts()[0]]
    beyond = [ref - new > log(11) for refs, news in logps for ref, new in zip(refs, news)]
    assert 0 < sum(beyond) < len(beyond)
    compare_with_the_oracle(reference=reference, rows=rows)


KL_EDITS = [
    ("log_r.clamp(max=bend).exp() + R_MAX * (log_r - bend).relu()", "log_r.exp()"),
    ("R_MAX * (log_r - bend).relu()", "0"),
    ("R_MAX * (log_r - bend).relu()", "(log_r - bend).relu()"),
    ("log_r.clamp(max=bend).exp()", "log_r.clamp(max=bend).exp().detach()"),
    ("kl  = r - log_r - 1", "kl  = r - log_r.clamp(max=bend) - 1"),
    ("R_MAX = 11", "R_MAX = 12"),
]


@pytest.mark.parametrize("before, after", KL_EDITS)
def test_no_edit_of_the_straight_line_passes_for_the_formula(before, after, monkeypatch):
    with pytest.raises(AssertionError):
        compare_with_the_oracle(edited(monkeypatch, (before, after)), reference=distant())


def test_no_token_pulls_back_more_than_ten_times_as_hard_as_one_that_is_pushed_away():
    log_r = torch.tensor([-1e4, -90, -5, 0, 1, 2.39, 2.4, 7.5, 90, 1e4], dtype=torch.float64)
    logp, ones = torch.zeros_like(log_r, requires_grad=True), torch.ones_like(log_r)
    how = dict(A=0 * ones, weight=ones, clip=(0.2, 0.3), beta=1.0)
    minus_J, _, kl = flow_grpo.loss(logp, logp.detach(), log_r, **how)
    minus_J.backward()
    line = [11 * (1 + x - log(11)) - x - 1 for x in log_r[6:].tolist()]
    assert kl.tolist() == pytest.approx([*(log_r.exp() - log_r - 1)[:6].tolist(), *line])
    assert logp.grad.tolist() == pytest.approx([*(1 - log_r.exp())[:6].tolist(), *4 * [-10]])


@ROWS
@pytest.mark.parametrize("budget, chunk", [(1, None), (25, 7 * 64), (10_000, 1)])
def test_neither_micro_batches_nor_chunks_change_the_formula(budget, chunk, rows, monkeypatch):
    monkeypatch.setattr(flow_grpo, "CHUNK", chunk or flow_grpo.CHUNK)
    compare_with_the_oracle(token_budget=budget, rows=rows)


@pytest.mark.parametrize("budget", [200, 250])  # with 250, smaller parts cross the larger ones
def test_if_memory_runs_out_the_mini_batch_is_repeated_in_smaller_parts(budget):
    compare_with_the_oracle(memory=2, token_budget=budget)


@pytest.mark.parametrize(
    "rows", [flow_grpo.padded, lambda *some: flow_grpo.padded(*some[:2], 9**9)]
)
def test_a_row_that_does_not_fit_alone_is_an_error(rows):  # nor do rows that ignore the budget
    model = small_memory(tiny(), 0, [])
    with pytest.raises(torch.OutOfMemoryError):
        learn(model, *lesson(), rows=rows)


def test_on_several_gpus_no_rank_tries_again_alone():
    """It would compute more micro-batches than the others, which wait for it for ever."""
    same = lambda given: given
    ranks = dict(release=same, gather=same, own_actions=same, even=same)
    ranks = types.SimpleNamespace(**ranks, sum_gradients=lambda *given: None)
    learn(small_memory(tiny(), 2, []), *lesson())
    with pytest.raises(torch.OutOfMemoryError):
        learn(small_memory(tiny(), 2, []), *lesson(), ranks=ranks)


def test_a_step_makes_the_good_rollout_likelier_and_the_bad_one_less_likely():
    good, bad = Action([1, 2, 3], [4, 5, STOP], 0), Action([1, 2, 3], [6, 7, STOP], 1)
    model = tiny()
    before = [sum(one_by_one(model, a)) for a in (good, bad)]
    learn(model, [good, bad], [1.0, -1.0], lr=0.01)
    after = [sum(one_by_one(model, a)) for a in (good, bad)]
    assert after[0] > before[0] and after[1] < before[1]


def test_an_empty_plan_has_no_tokens_but_is_a_turn():
    full, empty = Action([1, 2, 3], [4, STOP], 0), Action([1, 2, 3, 9], [], 0)
    alone, with_empty = (
        learn(tiny(), turns, [1.0])[1].gradients[0] for turns in ([full], [full, empty])
    )
    assert (alone / 2 - with_empty).abs().max() < 1e-6


def test_two_equal_questions_are_two_groups_and_groups_may_differ_in_size():
    A, flat = flow_grpo.advantages([1, 1, 0, 0, 1, 0, 0], [9, 4, 9, 4, 9, 4, 9])  # in any order
    wanted = [0.866, 1.1547, -0.866, -0.57735, 0.866, -0.57735, -0.866]
    assert A.tolist() == pytest.approx(wanted, abs=1e-4) and flat == 0


@pytest.mark.parametrize(
    "rewards, groups", [([1, 1, 1], [0, 0, 0]), ([0, 0], [3, 3]), ([0.1] * 3, [0] * 3), ([1], [0])]
)
def test_a_flat_group_and_a_lonely_rollout_have_zero_advantage_and_are_counted(rewards, groups):
    A, flat = flow_grpo.advantages(rewards, groups)
    assert A.tolist() == [0] * len(rewards) and flat == 1


# --------------------------------------------------------------------------------------- log-probs
CONFIGS = dict(Qwen2={}, Llama={}, GPT2={}, Bloom={}, Granite=dict(logits_scaling=3.0))
CONFIGS |= dict(Gemma2=dict(final_logit_softcapping=5.0, head_dim=8), Cohere=dict(logit_scale=0.3))


@ROWS
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_are_those_of_any_architectures_full_logits(name, rows, monkeypatch):
    """Also of those that share no rows, and that change the logits behind the head."""
    torch.manual_seed(0)
    size = SIZE | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.3)
    config = getattr(transformers, f"{name}Config")(**size, **CONFIGS[name])
    model, (actions, *_) = AutoModelForCausalLM.from_config(config).double().eval(), family()
    expected = torch.stack([x for a in actions for x in one_by_one(model, a)])
    found = [score(model, actions, rows)]
    monkeypatch.setattr(flow_grpo, "CHUNK", 5 * 64)
    found.append(score(model, actions, rows))
    weights = list(model.parameters())
    wanted = torch.autograd.grad(expected.sum(), weights, allow_unused=True)
    for logp in found:
        assert (expected - logp).abs().max() < 1e-5
        got = torch.autograd.grad(logp.sum(), weights, allow_unused=True)
        near = lambda x, y: x is y is None or (x - y).abs().max() <= 1e-5 * x.abs().max()
        assert all(near(x, y) for x, y in zip(wanted, got))


@pytest.mark.parametrize(
    "dtype, off, branched",
    [
        (torch.float32, 1e-5, True),
        (torch.float32, 1e-2, False),
        (torch.bfloat16, 1e-2, True),
        (torch.bfloat16, 1.0, False),
    ],
)
def test_rows_are_trees_if_what_their_mask_changes_is_rounding(dtype, off, branched, monkeypatch):
    model = tiny().to(dtype)
    forward = model.forward

    def larger_with_a_mask(*args, **settings):
        out = forward(*args, **settings)
        out.logits *= 1 + off if "attention_mask" in settings else 1
        return out

    monkeypatch.setattr(model, "forward", larger_with_a_mask)
    assert trees.are_right(model) == branched


def test_half_precision_logits_are_divided_by_the_temperature_in_float32():
    logits = 30 * torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = (logits.double() / T).log_softmax(-1)
    assert (flow_grpo.distribution(logits, T) - expected).abs().max() < 1e-4


def test_a_greedy_planner_and_an_action_without_prompt_are_refused():
    with pytest.raises(ValueError, match="temperature"):
        learn(tiny(), [Action([1], [2], 0)], [1.0], temperature=0)
    with pytest.raises(ValueError, match="prompt"):
        learn(tiny(), [Action([], [2], 0), Action([1], [2], 0)], [1.0])
    for rollout in (-1, 2):
        actions = [Action([1], [2], 0), Action([1], [2], rollout)]
        with pytest.raises(ValueError, match="renumber the rollouts that are left"):
            how = dict(temperature=T, clip=(0.2, 0.3), beta=0, minibatches=1)
            flow_grpo.update(tiny(), None, None, actions, [0, 1], **how)


# -------------------------------------------------------------------------------------- the update
def test_the_ratio_is_exactly_one_on_the_first_mini_batch_and_leaves_one_later(monkeypatch):
    ratios = []
    for minibatches in (1, 3):
        calls = spy(monkeypatch, flow_grpo, "loss")
        learn(tiny(), *lesson(), tiny(1), minibatches=minibatches, token_budget=30)
        ratios.append(torch.cat([ratio for *_, (_, ratio, _) in calls]))
    one, three = ratios
    assert (one == 1).all() and three.min() < 0.99 and three.max() > 1.01


def test_a_micro_batch_is_as_large_as_the_token_budget_allows():
    actions = [Action([1] * n, [2] * (n % 5 + 1), n) for n in range(1, 40)]
    for budget in (10, 60, 500):
        batches = list(flow_grpo.padded(None, actions, budget))
        assert sum(len(batch.actions) for batch in batches) == len(actions)
        for batch, after in zip(batches, [*batches[1:], None]):
            B, L = batch.x.shape
            assert B * L <= budget or B == 1
            assert not after or (B + 1) * L > budget  # one more row would be too much


def test_a_chunk_of_logits_has_128_mib_at_most(monkeypatch):
    calls = spy(monkeypatch, flow_grpo, "distribution")
    config = Qwen2ForCausalLM.config_class(**SIZE | {"vocab_size": 2**17, "hidden_size": 8})
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        score(model, [Action([1], [n % 7 + 1 for n in range(300)], 0)])
    shapes = [logits.shape for (logits, _), *_ in calls]
    assert shapes == [(256, 2**17), (44, 2**17)]  # 256 x 2^17 numbers of 4 bytes


@pytest.mark.parametrize("rollouts, parts", [(7, 1), (7, 2), (8, 4), (3, 3), (2, 4)])
def test_mini_batches_hold_every_rollout_once_and_divide_none(rollouts, parts):
    deal = lambda seed: flow_grpo.split_rollouts(range(rollouts), parts, seed)
    assert len(deal(5)) == min(parts, rollouts) and sorted(sum(deal(5), [])) == [*range(rollouts)]
    assert max(map(len, deal(5))) - min(map(len, deal(5))) <= 1 and deal(5) == deal(5)
    assert parts == 1 or any(deal(seed) != deal(5) for seed in range(5))
    eights = [i // 8 for i in range(32 * parts)]  # no group of eight is divided
    for part in flow_grpo.split_rollouts(eights, parts, seed=1):
        assert set(Counter(eights[i] for i in part).values()) == {8} and len(part) == 32


def test_an_update_changes_none_of_its_inputs_and_repeats_exactly():
    (actions, A), reference = lesson(), tiny(1)
    before = copy.deepcopy(actions), A.tolist()
    first, a = learn(tiny(), actions, A, reference, minibatches=2)
    second, b = learn(tiny(), actions, A, reference, minibatches=2)
    assert first == second and all(torch.equal(x, y) for x, y in zip(a.gradients, b.gradients))
    assert (actions, A.tolist()) == before and unchanged(reference, seed=1)
    assert not any(p.grad is not None for p in reference.parameters())


def test_a_gradient_that_explodes_is_skipped_and_counted():
    model = tiny()
    got, _ = learn(model, *lesson(), max_grad_norm=1e-9)  # any gradient is a thousand times that
    assert got["skipped"] == 1 and got["grad_norm"] > 1e-6 and unchanged(model)
    norm = got["grad_norm"]
    for times, skipped in (999, 0), (1001, 1):
        assert learn(tiny(), *lesson(), max_grad_norm=norm / times)[0]["skipped"] == skipped


def test_the_norm_in_the_log_is_a_mean_over_the_mini_batches_that_have_a_gradient():
    actions, A = lesson()
    last = flow_grpo.split_rollouts(range(len(A)), len(A), seed=0)[-1]
    flat = torch.zeros_like(A).index_fill(0, torch.tensor(last), 1.0)  # all others are flat
    settings = dict(beta=0, lr=0.0)
    one, _ = learn(tiny(), actions, flat, minibatches=len(A), **settings)
    whole, _ = learn(tiny(), actions, flat, **settings)
    assert one["grad_norm"] == pytest.approx(len(A) * whole["grad_norm"], rel=1e-4)
    assert whole["grad_norm"] > 0


def test_with_more_mini_batches_than_rollouts_the_empty_ones_do_not_count():
    (actions, A), reference = lesson(), tiny(1)
    settings = dict(reference=reference, beta=0.2)
    each, _ = learn(tiny(), actions, A, minibatches=len(A), **settings)
    more, _ = learn(tiny(), actions, A, minibatches=3 * len(A), **settings)
    assert each == more and each["kl"] > 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_loss_is_skipped_and_counted_and_the_other_steps_are_taken(poison):
    for part in flow_grpo.split_rollouts(
        range(7), 2, seed=0
    ):  # in the first part, then in the second
        A = [poison if rollout == part[0] else 1.0 for rollout in range(7)]
        model = tiny()
        got, optimizer = learn(model, rollouts()[0], A, minibatches=2)
        assert got["skipped"] == len(optimizer.gradients) == 1
        assert all(p.isfinite().all() for p in model.parameters()) and not unchanged(model)


def test_a_mini_batch_without_a_lesson_takes_no_step_whatever_the_other_does():
    for part in flow_grpo.split_rollouts(range(7), 2, seed=0):
        A = [float(rollout in part) for rollout in range(7)]
        got, optimizer = learn(tiny(), rollouts()[0], A, minibatches=2)
        assert len(optimizer.gradients) == 1 and got["skipped"] == 0
    model = tiny()
    got, _ = learn(model, rollouts()[0], [0.0] * 7, minibatches=2)
    assert not any(got[name] for name in ("skipped", "clip", "entropy", "grad_norm"))
    assert unchanged(model)


def test_the_gradient_norm_is_reported_as_it_was_and_clipped_as_asked():
    got, optimizer = learn(tiny(), *lesson(), max_grad_norm=0.01)
    norm = optimizer.gradients[0].norm().item()
    assert got["grad_norm"] > 0.1 and norm == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("kind", [Qwen2ForCausalLM, GPT2LMHeadModel])
def test_gradient_checkpointing_changes_memory_and_not_the_gradient(kind):
    plain, a = learn(tiny(kind=kind), *lesson(), tiny(1, kind), minibatches=2)
    model, calls = tiny(kind=kind), []
    model.activation_checkpointing_enable()
    ready_to_update(model)
    mlp = next(m for m in model.modules() if type(m).__name__.endswith("MLP"))
    mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    saved, b = learn(model, *lesson(), tiny(1, kind), minibatches=2)
    assert sum(calls) == 2 * 2  # two mini-batches, in each the layer twice
    assert all((x - y).abs().max() < 1e-6 for x, y in zip(a.gradients, b.gradients, strict=True))
    assert saved == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_dropout_in_the_update_also_in_layers_that_call_it_themselves(checkpointing):
    torch.manual_seed(0)
    size = dict(vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=2, dropout=0.5)
    size |= dict(num_attention_heads=2, word_embed_proj_dim=16, max_position_embeddings=128)
    model = OPTForCausalLM(OPTConfig(**size)).double().train()
    if checkpointing:
        model.activation_checkpointing_enable()
    ready_to_update(model)
    one, other = (score(model, rollouts()[0]).tolist() for _ in range(2))
    assert one == other


def test_with_adapters_the_reference_is_the_model_with_its_adapters_off():
    class Adapted(
        Qwen2ForCausalLM
    ):  # peft in miniature: inside disable_adapter() it has other weights
        @contextlib.contextmanager
        def disable_adapter(self):
            adapted = copy.deepcopy(self.state_dict())
            self.load_state_dict(base)
            yield
            self.load_state_dict(adapted)

    base, model = tiny(1).state_dict(), tiny(0)
    model.__class__ = Adapted
    with_adapter, _ = learn(model, *lesson(), reference=model, lr=0.0)
    with_copy, _ = learn(tiny(0), *lesson(), reference=tiny(1), lr=0.0)
    assert with_adapter == pytest.approx(with_copy) and with_copy["kl"] > 0.01


# ------------------------------------------------------- edits that people make: they act
def edited(monkeypatch, *edits):
    """flow_grpo.py with these edits, each as (from, to), and its public names."""
    source = SOURCE
    for before, after in edits:
        assert source.count(before) == 1, f"flow_grpo.py no longer has: {before}"
        source = source.replace(before, after)
    module = types.ModuleType("edited")
    monkeypatch.setitem(sys.modules, "edited", module)  # dataclasses look their module up
    exec(compile(source, "edited", "exec"), module.__dict__)
    return module


COPIES = "minis + [[replace(a) for a in mini] for mini in minis]"  # as another shuffle makes them


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("steps", ["minis * 2", COPIES])
def test_in_a_second_pass_over_a_batch_the_old_policy_is_still_the_one_that_sampled(
    steps, minibatches, monkeypatch
):
    module = edited(monkeypatch, ("steps = minis  # minis * 2", f"steps = {steps}  # minis * 2"))
    compare_with_the_oracle(module, passes=2, minibatches=minibatches)


@pytest.mark.parametrize("A", [1.0, -1.0])
def test_a_token_that_was_forbidden_when_it_was_sampled_leaves_the_others_their_gradient(A):
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    minus_J, ratio, _ = flow_grpo.loss(
        logp, torch.tensor([-1e4, -2.0]), None, torch.full((2,), A), torch.ones(2),
        clip=(0.2, 0.3), beta=0,
    )  # fmt: skip
    minus_J.backward()
    assert minus_J.isfinite() and ratio.isfinite().all() and logp.grad.tolist() == [0, -A]


@ROWS
def test_a_plan_of_an_older_policy_is_compared_with_that_policy(rows):
    compare_with_the_oracle(older=tiny(2), rows=rows)


def test_another_baseline_acts_in_flat_groups_too_and_they_are_counted(monkeypatch):
    line = "A[group] = (r - mean) / (std + 1e-6)"
    module = edited(monkeypatch, (line, "A[group] = r - 0.5"))
    A, flat = module.advantages([1, 0, 1, 1, 0], [0, 0, 1, 1, 2])
    assert A.tolist() == pytest.approx([0.5, -0.5, 0.5, 0.5, -0.5]) and flat == 2


SCALED = """    actions = [a for a in actions if a.rollout in rollouts]
    largest = max(abs(a.A) for a in actions)
    actions = [replace(a, A=a.A / largest) for a in actions]
"""


def test_statistics_of_a_mini_batch_do_not_depend_on_the_token_budget(monkeypatch):
    plain = learn(tiny(), *lesson())[1].gradients[0]
    module = edited(monkeypatch, (SCALED.splitlines(keepends=True)[0], SCALED))
    monkeypatch.setattr(flow_grpo, "update", module.update)
    found = [learn(tiny(), *lesson(), token_budget=budget)[1].gradients[0] for budget in (9, 999)]
    assert (found[0] - found[1]).abs().max() < 1e-6
    assert (found[0] - plain).abs().max() > 1e-3


def test_a_term_with_a_setting_of_its_own_gets_it_by_name(monkeypatch):
    edits = [
        ("*, clip: tuple[float, float], beta: float,\n)", "*, clip, beta, bonus=0.0)"),
        ("terms   = gain - beta * kl ", "terms   = gain - beta * kl - bonus * logp "),
    ]
    plain = learn(tiny(), *lesson())[0]["loss"]
    module = edited(monkeypatch, *edits)
    monkeypatch.setattr(flow_grpo, "update", module.update)
    found = [learn(tiny(), *lesson(), **more)[0]["loss"] for more in ({}, {"bonus": 0.5})]
    assert found[0] == pytest.approx(plain) != found[1]
    actions, A = lesson()  # without a KL and with no group that is not flat, the term acts alone
    flat = [learn(tiny(), actions, 0 * A, beta=0, **more)[0] for more in ({}, {"bonus": 0.5})]
    assert flat[0]["loss"] == 0 == flat[0]["grad_norm"] and flat[1]["grad_norm"] > 0.01
    with pytest.raises(TypeError, match="unexpected keyword argument 'bonsu'"):
        learn(tiny(), *lesson(), bonsu=0.5)


@pytest.mark.parametrize("beta", [0, 0.1])
def test_a_sampled_token_of_probability_0_is_refused_and_a_very_unlikely_one_is_not(
    beta, monkeypatch
):
    for value in ("-math.inf", "-1e4"):
        forbid = f"logits.clone().index_fill(-1, torch.tensor([STOP]), {value})"
        edit = "return (logits.float()", f"return ({forbid}.float()"
        module = edited(monkeypatch, edit)
        module.STOP = STOP
        monkeypatch.setattr(flow_grpo, "update", module.update)
        if value == "-1e4":
            assert learn(tiny(), *lesson(), tiny(1), beta=beta)[0]["skipped"] == 0
        else:
            with pytest.raises(ValueError, match="give forbidden tokens a logit of -1e4"):
                learn(tiny(), *lesson(), tiny(1), beta=beta)


@pytest.mark.parametrize("beta", [0, 0.1])
def test_what_either_policy_forbids_has_a_finite_kl(beta, monkeypatch):
    """π_θ and π_ref forbid all tokens but their own likeliest ones."""
    old = "return (logits.float() / temperature)"
    new = "low = logits < logits.topk(30).values[..., -1:]\n    " + old.replace(
        "logits.float()", "logits.float().masked_fill(low, -1e4)"
    )
    monkeypatch.setattr(flow_grpo, "update", edited(monkeypatch, (old, new)).update)
    metrics, optimizer = learn(tiny(), *lesson(), tiny(1), beta=beta)
    assert metrics["skipped"] == 0 and len(optimizer.gradients) == 1
    assert not beta or 1000 < metrics["kl"] < 1e6


# ------------------------------- change the code in one place: the oracle must notice


EDITS = [  # of what lies between the formula and the optimiser's step
    ("logits.float() / temperature", "logits.float()"),
    ("len(a.prompt_ids) - 1 for row", "len(a.prompt_ids) for row"),
    ("y = torch.tensor([token for a in batch.actions for token in a.ids])", "y = batch.place % 63"),
    ("hidden = hidden[which]", "pass"),
    ("torch.cat(logps)[copy]", "torch.cat(logps)"),
    ("turns[a.rollout], len(rollouts)", "1, len(rollouts)"),
    ("turns[a.rollout], len(rollouts)", "turns[a.rollout], len(actions)"),
    ("torch.cat([a.logp_old for a in actions])", "logp.detach()"),
    ("keep_old(actions, logp.detach())", "keep_old(actions, logp)"),
    ("        if a.logp_old is None:\n            a", "        if True:\n            a"),
    ("if mini is not steps[0]:", "if mini is not steps[-1]:"),
    ("steps = minis  #", "steps = minis[1:]  #"),
    ("token_logps(reference, batch", "token_logps(model, batch"),
    ("minus_J.backward()", "(minus_J / len(batches)).backward()"),
    ("minus_J.backward()", "pass"),
    ("optimizer.step()", "pass"),
    ("    model.zero_grad()\n    names", "    names"),
]


@pytest.mark.parametrize("before, after", EDITS)
def test_no_edit_of_the_update_passes_for_the_formula(before, after, monkeypatch):
    module = edited(monkeypatch, (before, after))
    with pytest.raises((AssertionError, RuntimeError, IndexError, TypeError, ValueError)):
        compare_with_the_oracle(module)
        compare_with_the_oracle(module, batch=family(), rows=trees.rows)
        compare_with_the_oracle(module, older=tiny(2))
