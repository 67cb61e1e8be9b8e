"""The objective against flow_grpo.objective(), three nested loops written from eq. 5: one sequence at a time,
no padding, no mask, and log-probs from the full logits of each.

The last test changes the formula on purpose, in one place at a time (mutants.py): the loops must notice it.
"""
import ast
import contextlib
import copy
import inspect
import math
import re
import statistics
import sys
import threading
import types
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from mutants import mutants
from test_house import imported
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, OPTConfig, OPTForCausalLM, Qwen2ForCausalLM

import flow_grpo
from cli.flags import FOR_PAPER, train_parser
from fast import head, logps, trees
from flow_grpo import Action, token_logps
from models import batches
from models.state import ready_to_update
from scale import fit, ranks
from scale.passes import TOKENS as TOKEN_BUDGET
from scale.lockstep import RankPasses, make_passes
from scale.passes import Passes
from scale.report import Report

SOURCE = Path(flow_grpo.__file__).read_text(encoding="utf-8")
STOP, T = 63, 0.7                                # the stop token of these tests, and the sampling temperature
SIZE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64)
GPT2_SIZE = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=64)


def tiny(seed=0, kind=Qwen2ForCausalLM, **changes):
    torch.manual_seed(seed)
    size = GPT2_SIZE if kind is GPT2LMHeadModel else SIZE
    model = kind(kind.config_class(**size, **changes)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)      # far from uniform, so that a wrong token or temperature shows
    return model


def rollouts(seed=0):
    """7 rollouts of 3 questions, one of them flat: 1-4 turns, 1-6 tokens, prompts that grow, in shuffled
    order."""
    r = torch.Generator().manual_seed(seed)
    number = lambda low, high: torch.randint(low, high, (1,), generator=r).item()
    ids = lambda low, high: torch.randint(0, 63, (number(low, high),), generator=r).tolist()
    actions = [Action(ids(2, 6) + [1] * 3 * t, ids(0, 6) + [STOP], rollout)
               for rollout, turns in enumerate([1, 3, 2, 4, 1, 3, 2]) for t in range(turns)]
    actions[1].ids = [7, 8, 9]                      # a plan cut at the token limit: no stop token
    actions = [actions[i] for i in torch.randperm(len(actions), generator=r)]
    return actions, [1, 0, 0, 1, 0, 1, 1], [0, 0, 0, 1, 1, 2, 2]


def family():
    """9 rollouts of 3 groups, the last one flat, with copies of prompts, completions that begin or are alike,
    and second turns whose prompts go on where the first ones and their plans end."""
    first, second, third = [5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 20, 21], [30, 31, 32]
    plans = [[1, 2, STOP], [1, 2, STOP], [1, 3, 4, STOP], [2], [1, 2, 9, STOP], [1, 2, 9, STOP], [4, STOP],
             [4, STOP], [4, 5, STOP]]
    prompts = [first] * 4 + [second] * 3 + [third] * 2
    actions = [Action(prompt, plan, rollout) for rollout, (prompt, plan) in enumerate(zip(prompts, plans))]
    actions += [Action(first + plans[i][:2] + [40], [3, 1 + i % 2, STOP], i) for i in range(4)]
    actions += [Action(second[:5], [21, 1, STOP], 4)]           # it predicts what is prompt for others
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


def same_gradients(one, other):
    return all((x - y).abs().max() < 1e-6 for x, y in zip(one.gradients, other.gradients, strict=True))


def gradient(model):
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([g.flatten() for g in gradients])


def one_by_one(model, action, temperature=T):
    """log π of each token of one action, in float64, from the full logits of one unpadded sequence."""
    logits = model(torch.tensor([action.prompt_ids + action.ids])).logits[0] / temperature
    first = len(action.prompt_ids)
    return [logits[first + j - 1].log_softmax(-1)[token] for j, token in enumerate(action.ids)]


def oracle_advantages(rewards, groups):
    members = lambda g: [r for r, other in zip(rewards, groups) if other == g]
    flat = lambda g: len(set(members(g))) == 1
    return [0.0 if flat(g) else (r - statistics.mean(members(g))) / (statistics.stdev(members(g)) + 1e-6)
            for r, g in zip(rewards, groups)]


def oracle(actions, A, logps, clip, beta, token_mean=False, **more):
    """The loss by the loops of eq. 5 (with gradient), and (ρ, A, -log π, KL, weight) of each token.
    logps(action): its log-probs under the policy, the old policy and the reference."""
    rollouts = {rollout: [] for rollout in sorted({a.rollout for a in actions})}
    for action in actions:
        rollouts[action.rollout].append(list(zip(*logps(action))))
    seen = []
    for rollout, turns in rollouts.items():
        for new, was, ref, share in [(*token, 1 / len(rollouts) / len(turns) / len(turn))
                                     for turn in turns for token in turn]:
            kl = torch.exp(ref - new) - (ref - new) - 1
            seen.append([torch.exp(new - was).item(), A[rollout], -new.item(), kl.item(), share])
    rollouts, A = list(rollouts.values()), [A[rollout] for rollout in rollouts]
    if token_mean:  # as if each token were a rollout
        A = [a for a, turns in zip(A, rollouts) for turn in turns for _ in turn]
        rollouts = [[[token]] for turns in rollouts for turn in turns for token in turn]
        seen = [[*row[:-1], 1 / len(seen)] for row in seen]
    return -flow_grpo.objective(rollouts, A, clip, beta, **more), seen


def size(action):
    return len(action.prompt_ids) + len(action.ids)


def small_memory(model, rows, broken=None):
    """`model` on a device where more than `rows` sequences are too many: out of memory in the middle of the
    backward pass, when the upper layer has its gradient already; where none is asked for, at once. broken
    counts the failures."""
    def too_many(*_):
        broken is not None and broken.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. (a test)")

    def watch(module, args, out):
        hidden = out[0] if isinstance(out, tuple) else out                      # (B, L, d)
        if len(hidden) > rows:
            hidden.register_hook(too_many) if hidden.requires_grad else too_many()
    next(m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")).register_forward_hook(watch)
    return model


def fast(model, reference=None):
    """How log-probs are computed without --plain: arguments of Passes."""
    return logps.scoring(flow_grpo.log_probs, model, reference)


def plain(model, reference=None):
    return (flow_grpo.token_logps,)


TERMS = {}  # {name: weight} of terms of your own: arguments of update() and of objective()
WAYS = pytest.mark.parametrize("way", [plain, fast])


def compare_with_the_oracle(
        module, token_mean=False, budget=40, rows=None, batch=None, change=None, seed=1, way=fast, beta=0.2):
    """Two optimiser steps of `module` on the same rollouts as the oracle; AssertionError at the first
    difference. rows: how many sequences fit into memory, see small_memory(); batch: other rollouts();
    change(model): is applied to the policy and the reference."""
    actions, rewards, groups = batch or rollouts()
    terms = dict(clip=(0.05, 0.2), beta=beta) | TERMS
    low, high = terms["clip"]
    start, reference = tiny(0), tiny(1)
    model = copy.deepcopy(start)
    for changed in (model, reference) if change else ():
        change(changed)
    optimizer = Recorder(small_memory(model, rows) if rows else model)
    A, flat = module.advantages(rewards, groups)
    expected_A = oracle_advantages(rewards, groups)
    assert flat == 1 and A.tolist() == pytest.approx(expected_A, abs=1e-5)
    copies = [module.Action(a.prompt_ids, a.ids, a.rollout, A[a.rollout].item()) for a in actions]
    passes = Passes(model, reference, *way(model, reference), token_budget=budget)
    got = module.update(passes, optimizer, copies, groups, temperature=T, **terms,
                        minibatches=2, max_grad_norm=1e9, token_mean=token_mean, seed=seed)
    parts = module.split_rollouts(groups, 2, seed)
    assert sorted(i for part in parts for i in part) == list(range(len(rewards)))
    losses, seen, norms = [], [], []
    assert len(optimizer.gradients) == len(parts)
    for part, weights, found in zip(parts, optimizer.weights, optimizer.gradients):
        now = copy.deepcopy(start)
        now.load_state_dict(weights)
        logps = lambda action: [one_by_one(policy, action) for policy in (now, start, reference)]
        learned = [a for a in actions if a.rollout in part]
        value, tokens = oracle(learned, expected_A, logps, token_mean=token_mean, **terms)
        value.backward()
        assert (gradient(now) - found).abs().max() < 1e-6 * max(1, found.norm())
        losses, seen = losses + [value.item()], seen + tokens
        norms.append(gradient(now).norm().item())
    if not beta:  # the report then leaves out what was not computed
        return
    up, down = ([a for r, a, *_ in seen if r > 1 + high], [a for r, a, *_ in seen if r < 1 - low])
    both = min(up) < 0 < max(up) and min(down) < 0 < max(down)
    assert both or batch                                            # the batch has both sides of both clips
    clipped, ratios = sum(a > 0 for a in up) + sum(a < 0 for a in down), [r for r, a, *_ in seen if a]
    mean = statistics.mean
    want = dict(loss=mean(losses), kl=sum(kl * share for *_, kl, share in seen) / 2, clip=clipped / len(seen),
                entropy=mean(h for _, _, h, *_ in seen), ratio_min=min(ratios), ratio_max=max(ratios),
                sampling_gap=0, grad_norm=mean(norms), skipped=0, steps=2, tokens=len(seen))
    assert (got.pop("halved") > 0) == bool(rows) and (got.pop("token_budget") < budget) == bool(rows)
    assert got == pytest.approx(want, abs=1e-5, rel=1e-5)


def compare_with_loops(module):
    """The formula alone, on log-probs drawn by chance, with both means, with and without KL; no model."""
    actions, rewards, groups = rollouts()
    (A, flat), expected = module.advantages(rewards, groups), oracle_advantages(rewards, groups)
    assert flat == 1 and A.tolist() == pytest.approx(expected, abs=1e-6)
    lonely, flat = module.advantages([1, 0.1, 0.1, 0.1], [1, 0, 0, 0])
    assert flat == 2 and lonely.tolist() == [0] * 4                 # exactly
    actions = sorted(actions, key=lambda a: a.rollout)                 # in the oracle's order
    new, old, ref = torch.rand(3, TOKENS, generator=torch.Generator().manual_seed(0)) - 2
    turns, clip, beta = Counter(a.rollout for a in actions), (0.1, 0.2), 0.2
    adv = module.per_token(actions, [A[a.rollout] for a in actions])
    for anchor, total in ((ref, None), (ref, TOKENS), (None, None)):
        weights = [module.token_weight(a, turns[a.rollout], 7, total) for a in actions]
        weight = module.per_token(actions, weights)
        logp, loops = new.clone().requires_grad_(), new.clone().requires_grad_()
        rows = zip(loops, old, new if anchor is None else ref)
        logps = lambda action: zip(*[next(rows) for _ in action.ids])
        want, seen = oracle(actions, expected, logps, clip, beta, token_mean=total)
        value, ratio, kl = module.loss(logp, old, anchor, adv, weight, clip, beta)
        want.backward(), value.backward()
        assert value.item() == pytest.approx(want.item(), abs=1e-6)
        assert (logp.grad - loops.grad).abs().max() < 1e-6
        assert kl.tolist() == pytest.approx([row[3] for row in seen], abs=1e-6)
        assert ratio.tolist() == pytest.approx((new - old).exp().tolist())
        assert not kl.requires_grad and not ratio.requires_grad
    parts = old.split([len(a.ids) for a in actions])    # as if every second action had been scored
    for n, (action, part) in enumerate(zip(actions, parts)):
        action.logp_old = part if n % 2 else None
    found = module.old_or_current(actions, new.clone().requires_grad_())
    assert not found.requires_grad
    found, now = found.split([len(part) for part in parts]), new.split([len(part) for part in parts])
    assert all(torch.equal(one, parts[n] if n % 2 else now[n]) for n, one in enumerate(found))


def learn(model, actions, A, reference=None, lr=0.1, way=None, token_budget=TOKEN_BUDGET, groups=None,
          **settings):
    """One update: (its report, the optimizer). way: arguments of make_passes(); fast(), unless given. groups:
    if not given, each rollout is one of its own."""
    optimizer = Recorder(model, lr)
    how = fast(model, reference) if way is None else way
    passes = make_passes(model, reference, *how, token_budget=token_budget)
    settings = dict(temperature=T, max_grad_norm=1e9) | settings
    actions, groups = with_advantages(actions, A), range(len(A)) if groups is None else groups
    return flow_grpo.update(passes, optimizer, actions, groups, **settings), optimizer


def compare_with_update(simple_update, minibatches):
    """AssertionError if an update takes other steps than this function does."""
    settings = dict(temperature=T, clip=(0.05, 0.1), beta=0.2, minibatches=minibatches, max_grad_norm=0.5,
                    seed=1)
    (actions, A), model, reference = lesson(), tiny(), tiny(1)
    optimizer = Recorder(model, lr=1.0)
    simple_update(model, reference, optimizer, with_advantages(actions, A), range(len(A)), **settings)
    for way in (plain(model), None):
        report, other = learn(tiny(), actions, A, reference, lr=1.0, way=way, token_budget=40, **settings)
        assert report["steps"] == minibatches and same_gradients(optimizer, other)
        assert minibatches == 1 or report["clip"] > 0 and report["ratio_max"] > 1.1


@pytest.mark.parametrize("minibatches", [1, 3])
def test_an_update_takes_the_steps_of_the_plain_one(minibatches):
    compare_with_update(flow_grpo.simple_update, minibatches)


# ---- the formula -------------------------------------------------------------------------------------------

@WAYS
@pytest.mark.parametrize("token_mean", [False, True], ids=["eq. 5", "the mean of the released code"])
def test_the_loss_is_the_formula_and_so_is_its_gradient(token_mean, way):
    compare_with_the_oracle(flow_grpo, token_mean=token_mean, way=way)


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.filterwarnings("ignore:Out of memory")
def test_the_plain_way_is_the_formula_where_prompts_are_shared_and_memory_is_small(rows):
    compare_with_the_oracle(flow_grpo, batch=family(), rows=rows, way=plain, budget=60)


@WAYS
def test_without_a_kl_the_update_is_the_formula_too(way):
    compare_with_the_oracle(flow_grpo, beta=0, way=way)


def test_the_loss_alone_is_the_formula_on_log_probs_drawn_by_chance():
    compare_with_loops(flow_grpo)


@pytest.mark.parametrize("rows, chunk", [(None, 1), (2, None), (1, 7 * 64)])
@pytest.mark.filterwarnings("ignore:Out of memory")
def test_neither_chunks_nor_a_small_memory_change_the_formula(rows, chunk, monkeypatch):
    monkeypatch.setattr(head, "CHUNK", chunk or head.CHUNK)
    compare_with_the_oracle(flow_grpo, rows=rows)


def test_the_clip_stops_a_good_token_above_and_a_bad_token_below_and_nothing_else():
    logp = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0]).log().requires_grad_()
    A = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    value, *_ = flow_grpo.loss(logp, torch.zeros(5), None, A, torch.ones(5), (0.2, 0.3), beta=0)
    value.backward()
    assert logp.grad.tolist() == pytest.approx([0, 1.5, -0.5, 0, -1], abs=1e-5)        # -ρ A where it lives
    assert value.item() == pytest.approx(-(1.3 - 1.5 + 0.5 - 0.8 + 1.0), abs=1e-5)


def test_a_step_makes_the_good_rollout_likelier_and_the_bad_one_less_likely():
    good, bad = Action([1, 2, 3], [4, 5, STOP], 0), Action([1, 2, 3], [6, 7, STOP], 1)
    model = tiny()
    before = [sum(one_by_one(model, a)) for a in (good, bad)]
    learn(model, [good, bad], [1.0, -1.0], lr=0.01)
    after = [sum(one_by_one(model, a)) for a in (good, bad)]
    assert after[0] > before[0] and after[1] < before[1]


def test_an_empty_plan_has_no_tokens_but_is_a_turn():
    full, empty = Action([1, 2, 3], [4, STOP], 0), Action([1, 2, 3, 9], [], 0)
    alone, with_empty = (learn(tiny(), turns, [1.0])[1].gradients[0] for turns in ([full], [full, empty]))
    assert (alone / 2 - with_empty).abs().max() < 1e-6


# ---- advantages --------------------------------------------------------------------------------------------

def test_group_statistics_are_over_rollouts_and_not_over_turns():
    A, _ = flow_grpo.advantages([1] + [0] * 7, [0] * 8)   # over the turns of one short and seven long: 4.477
    assert A[0].item() == pytest.approx(2.4749, abs=1e-3)


def test_two_equal_questions_are_two_groups_and_groups_may_differ_in_size():
    A, flat = flow_grpo.advantages([1, 1, 0, 0, 1, 0, 0], [9, 4, 9, 4, 9, 4, 9])  # in any order
    wanted = [0.866, 1.1547, -0.866, -0.57735, 0.866, -0.57735, -0.866]
    assert A.tolist() == pytest.approx(wanted, abs=1e-4) and flat == 0


@pytest.mark.parametrize("rewards, groups", [
    ([1, 1, 1], [0, 0, 0]), ([0, 0], [3, 3]), ([0.1] * 3, [0] * 3), ([1], [0])])
def test_a_flat_group_and_a_lonely_rollout_have_zero_advantage_and_are_counted(rewards, groups):
    A, flat = flow_grpo.advantages(rewards, groups)
    assert A.tolist() == [0] * len(rewards) and flat == 1


# ---- log-probs ---------------------------------------------------------------------------------------------

@WAYS
def test_the_scored_policy_is_the_one_generate_samples_from(way):
    model = tiny().float()
    prompts = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    out = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=T, top_k=0, top_p=1.0,
        max_new_tokens=12, pad_token_id=0, return_dict_in_generate=True, output_scores=True)
    new = out.sequences[:, 4:]
    sampled = torch.stack(out.scores, 1).log_softmax(-1).gather(-1, new[..., None]).flatten()
    actions = [Action(p.tolist(), a.tolist(), 0) for p, a in zip(prompts, new)]
    scored = way(model)[0](model, actions, T)
    assert (sampled - scored).abs().max() < 1e-4


def whole_and_in_chunks(score, monkeypatch):
    """What score() gives with all logits at once, and with those of five tokens at a time."""
    for chunk in (2**26, 5 * 64):
        monkeypatch.setattr(head, "CHUNK", chunk)
        yield score()


CONFIGS = dict(Qwen2={}, Llama={}, GPT2={}, Bloom={}, Phi3={}, Granite=dict(logits_scaling=3.0),
               Gemma2=dict(final_logit_softcapping=5.0, head_dim=8), Cohere=dict(logit_scale=0.3))


FEW = "Qwen2", "GPT2", "Gemma2", "Cohere"  # Linear and Conv1D; what changes the logits behind the head


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in FEW else pytest.mark.exhaustive) for name in CONFIGS])
def test_log_probs_are_those_of_any_architectures_full_logits_divided_by_the_temperature(name, monkeypatch):
    torch.manual_seed(0)
    size = SIZE | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.3)
    config = getattr(transformers, f"{name}Config")(**size, **CONFIGS[name])
    model, (actions, _, _) = AutoModelForCausalLM.from_config(config).double().eval(), rollouts()
    expected = torch.stack([x for a in actions for x in one_by_one(model, a)])
    score = fast(model)[0]
    found = [flow_grpo.token_logps(model, actions, T),
             *whole_and_in_chunks(lambda: score(model, actions, T), monkeypatch)]
    assert all((expected - logp).abs().max() < 1e-5 for logp in found)
    weights = list(model.parameters())
    wanted, *others = (torch.autograd.grad(x.sum(), weights, allow_unused=True) for x in found)
    near = lambda x, y: x is y is None or (x - y).abs().max() <= 1e-5 * x.abs().max()
    assert all(near(x, y) for other in others for x, y in zip(wanted, other))


@pytest.mark.parametrize("name", ["Qwen2", "Gemma2"])                # with shared prompts, and without
def test_an_update_in_the_fast_way_reports_what_the_plain_one_does(name):
    torch.manual_seed(0)
    size = SIZE | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.3)
    config = getattr(transformers, f"{name}Config")(**size, **CONFIGS[name])
    model, reference = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    actions, rewards, groups = family()
    A, _ = flow_grpo.advantages(rewards, groups)
    reports = [learn(copy.deepcopy(model), actions, A, reference, groups=groups, minibatches=3, beta=0.1,
                     max_grad_norm=1.0, lr=0.01, way=way(model, reference))[0] for way in (fast, plain)]
    assert reports[0] == pytest.approx(reports[1], rel=1e-4, abs=1e-4) and reports[0]["kl"] > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_log_probs_and_gradient_by_rounding_only(dtype, monkeypatch):
    def score():
        model = tiny().to(dtype)
        logp = fast(model)[0](model, rollouts()[0], T)
        logp.sum().backward()
        return logp, gradient(model)
    (whole, g), (chunked, h) = whole_and_in_chunks(score, monkeypatch)
    assert (whole - chunked).abs().max() < 1e-4 and whole.dtype == chunked.dtype == torch.float32
    assert (g - h).norm() <= 8 * torch.finfo(dtype).eps * g.norm()


@pytest.mark.parametrize("chunk, rows, times", [
    (10 * 64, 10, 2), (1, 1, 2), (64 * TOKENS - 1, TOKENS - 1, 2), (64 * TOKENS, TOKENS, 1)])
def test_the_whole_vocabulary_is_in_float32_for_one_chunk_at_a_time(chunk, rows, times, monkeypatch):
    model, seen = tiny(), []
    score = fast(model)[0]                          # the model's head is found to be plain
    for module, name in ((head, "linear"), (torch.nn.functional, "linear")):
        def linear(states, weight, bias=None, original=getattr(module, name)):
            seen.extend([len(states)] * (len(weight) == 64 and states.dim() == 2))
            return original(states, weight, bias)
        monkeypatch.setattr(module, name, linear)
    monkeypatch.setattr(head, "CHUNK", chunk)
    score(model, rollouts()[0], T).sum().backward()
    assert max(seen) == rows and sum(seen) == times * TOKENS    # chunks are computed twice


def test_half_precision_logits_are_divided_by_the_temperature_in_float32():
    logits = 30 * torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.arange(50)
    expected = (logits.double() / T).log_softmax(-1).gather(-1, y[:, None])[:, 0]
    assert (flow_grpo.log_probs(logits, y, T) - expected).abs().max() < 1e-4


def test_a_model_that_keeps_a_cache_is_refused_by_the_update():
    model = tiny()
    score, forward = fast(model)[0], model.forward
    model.forward = lambda *args, use_cache, **more: forward(*args, use_cache=True, **more)
    with pytest.raises(AssertionError, match="cache"):
        score(model, [Action([1, 2], [3], 0)], T)


@WAYS
def test_the_stop_token_is_an_action_and_a_cut_plan_has_none(way):
    model = tiny()
    score = way(model)[0]
    ended, cut = Action([1, 2, 3], [4, 5, STOP], 0), Action([1, 2, 3], [4, 5], 0)
    logp = score(model, [ended], T)
    assert len(logp) == 3 and len(score(model, [cut], T)) == 2
    assert logp[-1].item() == pytest.approx(one_by_one(model, ended)[-1].item(), abs=1e-5)
    logp[-1].backward()
    assert gradient(model).norm() > 0.1


def test_a_greedy_planner_and_an_action_without_prompt_are_refused():
    with pytest.raises(ValueError, match="temperature"):
        learn(tiny(), [Action([1], [2], 0)], [1.0], temperature=0)
    with pytest.raises(ValueError, match="prompt"):
        learn(tiny(), [Action([], [2], 0), Action([1], [2], 0)], [1.0])
    for rollout in (-1, 2):
        with pytest.raises(ValueError, match="renumber the rollouts that are left"):
            passes = Passes(tiny(), None, token_logps)
            actions = [Action([1], [2], 0), Action([1], [2], rollout)]
            flow_grpo.update(passes, Recorder(passes.model), actions, [0, 1], temperature=T)


def test_ids_come_in_and_text_never_does():
    names = {getattr(node, "id", getattr(node, "attr", "")).lower() for node in ast.walk(ast.parse(SOURCE))}
    assert not [name for name in names if "tokenizer" in name or "encode" in name or "decode" in name]
    modules = {"math", "collections", "dataclasses", "torch"}
    assert imported(SOURCE) == modules


# ---- the update --------------------------------------------------------------------------------------------

def test_the_ratio_is_exactly_one_on_the_first_mini_batch_and_leaves_one_later():
    one, _ = learn(tiny(), *lesson())
    three, _ = learn(tiny(), *lesson(), tiny(1), minibatches=3, token_budget=30)
    assert one["ratio_min"] == one["ratio_max"] == 1
    none, _ = learn(tiny(), *lesson(), clip=(0, 0))  # a ratio on the edge is not clipped
    assert one["clip"] == none["clip"] == 0 and three["steps"] == 3
    assert three["ratio_min"] < 0.99 and three["ratio_max"] > 1.01


@pytest.mark.parametrize("budget", [1, 25, 10_000])
def test_cutting_into_micro_batches_does_not_change_the_gradient(budget):
    compare_with_the_oracle(flow_grpo, budget=budget)


@pytest.mark.parametrize("rollouts, parts", [(7, 1), (7, 2), (8, 4), (3, 3), (2, 4)])
def test_mini_batches_hold_every_rollout_once_and_divide_none(rollouts, parts):
    deal = lambda seed: flow_grpo.split_rollouts(range(rollouts), parts, seed)
    assert len(deal(5)) == parts and sorted(i for part in deal(5) for i in part) == list(range(rollouts))
    assert max(map(len, deal(5))) - min(map(len, deal(5))) <= 1 and deal(5) == deal(5)
    assert parts == 1 or any(deal(seed) != deal(5) for seed in range(5))


def test_an_update_changes_none_of_its_inputs_and_repeats_exactly():
    (actions, A), reference = lesson(), tiny(1)
    before = copy.deepcopy(actions), A.tolist()
    first, a = learn(tiny(), actions, A, reference, minibatches=2)
    second, b = learn(tiny(), actions, A, reference, minibatches=2)
    assert first == second and all(torch.equal(x, y) for x, y in zip(a.gradients, b.gradients))
    assert (actions, A.tolist()) == before and unchanged(reference, seed=1)
    assert not any(p.grad is not None for p in reference.parameters())


def test_an_update_leaves_no_gradient_behind_and_adds_none_that_was_there():
    dirty = tiny()
    for p in dirty.parameters():
        p.grad = torch.ones_like(p)
    (_, clean), (_, other) = learn(tiny(), *lesson()), learn(dirty, *lesson())
    assert torch.equal(clean.gradients[0], other.gradients[0])
    assert all(p.grad is None for p in dirty.parameters())  # 15 GB of a 7B, through the whole next rollout


def test_what_a_micro_batch_leaves_behind_holds_no_graph(monkeypatch):
    scored, measured = [], []

    def end_mini_batch(report, original=Report.end_mini_batch):
        measured.extend(report.measured)
        return original(report)

    def policy_logps(passes, batch, temperature, original=Passes.policy_logps):
        scored.extend([] if torch.is_grad_enabled() else batch)
        return original(passes, batch, temperature)
    monkeypatch.setattr(Report, "end_mini_batch", end_mini_batch)
    monkeypatch.setattr(Passes, "policy_logps", policy_logps)
    learn(tiny(), rollouts()[0], [1.0] * 7, tiny(1), minibatches=2)
    tensors = [a.logp_old for a in scored] + [x for value, sums, *_ in measured for x in (value, sums)]
    assert scored and measured and not any(x.requires_grad for x in tensors)


@pytest.mark.parametrize("minibatches, forward", [(1, 1), (3, 1 + 2 * 2)])
def test_the_first_mini_batch_is_scored_while_it_is_learned_and_only_later_ones_before(minibatches, forward):
    for way in (plain, fast):
        model, calls = tiny(), []
        scoring = way(model)  # what must be found out once about a model is known
        model.register_forward_pre_hook(lambda *_: calls.append(1))
        flow_grpo.update(Passes(model, None, *scoring), Recorder(model),
                         with_advantages(rollouts()[0], [1.0] * 7), range(7),
                         temperature=T, minibatches=minibatches)
        assert len(calls) == forward


@pytest.mark.parametrize("world", [1, 2])
def test_only_several_processes_need_every_gradient_and_frozen_weights_never_get_one(world, monkeypatch):
    monkeypatch.setattr(ranks, "WORLD", world)
    monkeypatch.setattr(ranks, "add_up", lambda tensor: None)
    model, seen = tiny(), []
    model.unused = torch.nn.Parameter(torch.ones(3))
    frozen = model.get_input_embeddings().weight.requires_grad_(False)

    class Look(Recorder):
        def step(self):
            seen.append((frozen.grad is None, model.unused.grad is None))
    passes = make_passes(model, None, *plain(model))
    actions = with_advantages(rollouts()[0], [1.0] * 7)
    flow_grpo.update(passes, Look(model), actions, range(7), temperature=T)
    assert seen == [(True, world == 1)]


def test_the_defaults_of_update_are_those_of_train_py():
    flags = vars(train_parser().parse_args([]))
    flags |= {"minibatches": FOR_PAPER["minibatches"], "max_grad_norm": 1.0}
    flags["clip"] = flags["clip_low"], flags["clip_high"]
    parameters = inspect.signature(flow_grpo.update).parameters.items()
    defaults = {name: p.default for name, p in parameters if p.default is not p.empty}
    assert defaults == {name: flags[name] for name in defaults} and TOKEN_BUDGET == fit.BUDGETS[0]


def test_a_single_token_has_its_own_entropy_and_every_number_is_a_float():
    model, action = tiny(), Action([1, 2, 3], [4], 0)
    surprise = -one_by_one(model, action)[0].item()
    got, _ = learn(model, [action], [1.0], clip=(0.2, -0.1))              # so that a ratio of 1 is clipped
    assert got["clip"] == got["tokens"] == 1 and got["entropy"] == pytest.approx(surprise, rel=1e-5)
    assert {type(x) for x in got.values()} == {float}


def test_rollouts_without_advantage_are_not_computed_when_beta_is_zero_but_they_count():
    skipping, a = learn(tiny(), *lesson(), tiny(1), beta=0)
    everything, b = learn(tiny(), *lesson(), tiny(1), beta=1e-30)
    assert skipping["tokens"] < everything["tokens"] and skipping["kl"] == 0
    assert (a.gradients[0] - b.gradients[0]).abs().max() < 1e-6


def test_a_batch_without_any_lesson_takes_no_step():
    model = tiny()
    got, _ = learn(model, rollouts()[0], [0.0] * 7)
    zero = "steps", "skipped", "tokens", "clip", "entropy", "sampling_gap"
    assert not any(got[name] for name in zero)
    assert got["ratio_min"] == got["ratio_max"] == 1 and unchanged(model)


# ---- memory ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("checkpointing, minibatches, beta", [
    (False, 1, 0), (True, 2, 0.001)])                                   # first short in backward; in forward
def test_out_of_memory_halves_the_micro_batches_and_the_result_is_the_same(checkpointing, minibatches, beta):
    whole, a = learn(tiny(), *lesson(), tiny(1), minibatches=minibatches, beta=beta)
    model, broken = tiny(), []
    if checkpointing:
        model.activation_checkpointing_enable()
    with pytest.warns(UserWarning, match="Out of memory: from here on batches of at most") as warned:
        cut, b = learn(small_memory(model, 3, broken), *lesson(), tiny(1), minibatches=minibatches,
                       beta=beta)
    assert whole.pop("halved") == 0 and cut.pop("halved") == len(broken) == len(warned) > 0
    assert cut.pop("token_budget") < whole.pop("token_budget") == 16384
    assert cut == pytest.approx(whole, abs=1e-5) and same_gradients(a, b)


@pytest.mark.filterwarnings("ignore:Out of memory")
def test_what_was_enough_is_returned_and_is_enough_the_next_time():
    model = small_memory(tiny(), 3)
    first, _ = learn(model, *lesson())
    second, _ = learn(model, *lesson(), token_budget=int(first["token_budget"]))
    assert first["halved"] > 0 == second["halved"] and second["token_budget"] == first["token_budget"]


def test_a_turn_that_does_not_fit_alone_says_what_to_change_and_takes_no_step():
    model, longest = tiny(), max(rollouts()[0], key=size)
    scoring = fast(model)
    small_memory(model, 0)
    with pytest.raises(MemoryError, match=f"^one row of {size(longest)} tokens does not fit into") as why:
        learn(model, [longest], [1.0] * 7, way=scoring)
    assert isinstance(why.value.__cause__, torch.OutOfMemoryError) and unchanged(model)


def in_memory(work, items, length, tokens, extra=0, cut=None):
    """work(batch) for all batches of the items -> (results, last budget, halvings)."""
    budget = batches.TokenBudget(tokens)
    results = budget.retry(lambda: [work(batch) for batch in budget.batches(items, length, extra, cut)])
    return results, budget.tokens, budget.halved


def test_a_row_alone_is_tried_once_more_with_an_empty_cache():
    tries = []

    def work(batch):
        tries.append(batch)
        if len(tries) == 1:
            raise MemoryError("in small pieces")
        return len(batch)

    assert in_memory(work, ["abc"], len, 8) == ([1], 8, 0)
    assert tries == [["abc"], ["abc"]]


@pytest.mark.parametrize("text, memory", [
    ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", True),
    ("could not create a primitive", True),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
    ("CUDA error: an illegal address", False)])
def test_only_an_error_of_memory_is_taken_for_one(text, memory):
    class Failing:
        def step(self):
            raise RuntimeError(text)

    def work(batch):
        if len(batch) > 1:
            raise RuntimeError(text)
    actions = with_advantages(*lesson())
    sentence = "^the optimiser's state does not fit into memory$"
    model = tiny()
    passes = Passes(model, None, *plain(model))
    with pytest.raises(MemoryError if memory else RuntimeError, match=sentence if memory else text):
        with passes.around_update():
            flow_grpo.update(passes, Failing(), actions, range(7), temperature=T)
    with pytest.warns(UserWarning) if memory else pytest.raises(RuntimeError, match=text):
        in_memory(work, actions, size, 10_000)


def test_the_sampling_gap_is_the_mean_distance_of_the_first_micro_batchs_log_probs_as_sampled_and_as_scored():
    actions, model, A = rollouts()[0], tiny(), [1.0] * 7
    for n, a in enumerate(actions):
        a.logps = [logp.item() + (0.5 if n % 2 else -0.25 * n) for logp in one_by_one(model, a)]
    part = flow_grpo.split_rollouts(range(7), 2, 0)[0]
    first, _ = trees.micro_batches(model, [a for a in actions if a.rollout in part], 40)[0]
    gaps = [abs(was - now.item()) for a in first for was, now in zip(a.logps, one_by_one(model, a))]
    got, _ = learn(model, actions, A, minibatches=2, token_budget=40)
    mean = statistics.mean(gaps)
    assert got["sampling_gap"] == pytest.approx(mean, abs=1e-5) and mean > 0.1
    first[0].logps = []                                     # some are not known: then there is no gap to tell
    assert learn(tiny(), actions, A, minibatches=2, token_budget=40)[0]["sampling_gap"] == 0


def test_what_failed_is_freed_before_the_next_one():
    actions, alive, counts = rollouts()[0], [], []

    def work(batch):
        held = torch.zeros(3)
        alive.append(weakref.ref(held))
        counts.append(sum(ref() is not None for ref in alive))
        if len(batch) > 1:
            raise torch.OutOfMemoryError("a test says so")
        return len(batch)
    with pytest.warns(UserWarning):
        done, _, halved = in_memory(work, actions, size, 10_000)
    assert sum(done) == len(actions) and halved > 1 and max(counts) == 1


def test_an_update_frees_the_graph_of_one_attempt_before_the_next_one():
    class Token:
        pass

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            counts.append(sum(ref() is not None for ref in alive))
            ctx.token = Token()                             # lives as long as the graph
            alive.append(weakref.ref(ctx.token))
            return x.view_as(x)

        @staticmethod
        def backward(ctx, d):
            return d

    (actions, A), alive, counts, broken, model = lesson(), [], [], [], tiny()
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: Held.apply(out))
    with pytest.warns(UserWarning, match="Out of memory"):
        learn(small_memory(model, 2, broken), actions, A, way=plain(model), token_budget=60)
    assert broken and len(counts) > len(broken) + 1 and max(counts) == 0


def test_the_next_attempt_has_half_the_largest_batch_that_can_be_cut_and_the_cache_is_emptied(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))

    def work(batch):
        if len(batch) > 1 and size(batch[0]) == 6:
            raise torch.OutOfMemoryError("a test says so")
    # one alone, beyond the budget; then 2 x 6 and 2 x 2
    sized = [Action([1] * (n - 1), [2], 0) for n in (30, 6, 2, 2, 2)]
    with pytest.warns(UserWarning, match="batches of at most 6 tokens"):
        done, tokens, halved = in_memory(work, sized, size, 12)
    assert (len(done), tokens, halved) == (3, 6, 1) and emptied == [1]


def test_a_gradient_that_explodes_is_skipped_and_counted():
    model = tiny()
    got, _ = learn(model, *lesson(), max_grad_norm=1e-9)              # any gradient is a thousand times that
    assert got["skipped"] == 1 and got["steps"] == 0 and got["grad_norm"] > 1e-6
    assert unchanged(model)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_loss_is_skipped_and_counted_and_the_other_steps_are_taken(poison):
    actions, alone, both = rollouts()[0], tiny(), tiny()
    got, _ = learn(alone, actions, [poison] + [1.0] * 6)
    assert got["skipped"] == 1 and got["steps"] == 0 and not math.isfinite(got["grad_norm"])
    assert unchanged(alone)
    for part in flow_grpo.split_rollouts(range(7), 2, seed=0):  # poison in the first part, then in the second
        A = [poison if rollout == part[0] else 1.0 for rollout in range(7)]
        got, _ = learn(both, actions, A, minibatches=2)
        assert got["skipped"] == got["steps"] == 1 and all(p.isfinite().all() for p in both.parameters())


def test_a_mini_batch_without_a_lesson_takes_no_step_whatever_the_other_does():
    for part in flow_grpo.split_rollouts(range(7), 2, seed=0):
        got, _ = learn(tiny(), rollouts()[0], [float(rollout in part) for rollout in range(7)], minibatches=2)
        assert got["steps"] == 1 and got["skipped"] == 0


def test_an_infinite_loss_is_skipped_though_its_gradient_is_finite(monkeypatch):
    original, calls = Passes.reference_logps, []

    def reference_logps(*args):  # the second time, no token can be written by the reference
        calls.append(1)
        return original(*args) - (math.inf if len(calls) == 2 else 0)
    monkeypatch.setattr(Passes, "reference_logps", reference_logps)
    got, _ = learn(tiny(), rollouts()[0], [1.0] * 7, tiny(1), minibatches=2)
    assert got["skipped"] == got["steps"] == 1 and got["loss"] == math.inf and math.isfinite(got["grad_norm"])


def test_the_gradient_norm_is_reported_as_it_was_and_clipped_as_asked():
    got, optimizer = learn(tiny(), *lesson(), max_grad_norm=0.01)
    assert got["grad_norm"] > 0.1 and optimizer.gradients[0].norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("kind", [Qwen2ForCausalLM, GPT2LMHeadModel])
def test_gradient_checkpointing_changes_memory_and_not_the_gradient(kind):
    plain, a = learn(tiny(kind=kind), *lesson(), tiny(1, kind), minibatches=2)
    model, calls = tiny(kind=kind), []
    model.activation_checkpointing_enable()
    mlp = next(m for m in model.modules() if type(m).__name__.endswith("MLP"))
    mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    saved, b = learn(model, *lesson(), tiny(1, kind), minibatches=2)
    assert sum(calls) == 2 * 2 * 2  # two mini-batches, in each the flat rollouts apart, each layer twice
    assert same_gradients(a, b) and saved == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("kind, dropout, checkpointing", [
    (Qwen2ForCausalLM, dict(attention_dropout=0.5), True), (GPT2LMHeadModel, dict(resid_pdrop=0.5), False)])
def test_no_dropout_in_the_update_and_the_model_comes_back_ready_to_sample(kind, dropout, checkpointing):
    _, clean = learn(tiny(kind=kind), *lesson())
    model = tiny(kind=kind, **dropout).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    _, noisy = learn(model, *lesson())
    same, _ = learn(tiny(kind=kind), *lesson(), tiny(1, kind, **dropout).train())      # nor in the reference
    assert same["kl"] == learn(tiny(kind=kind), *lesson(), tiny(1, kind))[0]["kl"]
    assert (clean.gradients[0] - noisy.gradients[0]).abs().max() < 1e-9
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_that_call_dropout_themselves_score_without_it_under_checkpointing(checkpointing):
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        word_embed_proj_dim=16, max_position_embeddings=128, dropout=0.5)).double()
    if checkpointing:
        model.activation_checkpointing_enable()
    ready_to_update(model)
    one, other = (token_logps(model, rollouts()[0], T).tolist() for _ in range(2))
    assert one == other


def test_with_adapters_the_reference_is_the_model_with_its_adapters_off():
    class Adapted(Qwen2ForCausalLM):     # peft in miniature: inside disable_adapter() it has other weights
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


@pytest.mark.parametrize("with_reference", [True, False])
def test_two_processes_with_uneven_shares_learn_the_same_as_one(with_reference, monkeypatch):
    actions, A = lesson()
    reference = tiny(1) if with_reference else None
    models = [tiny(), tiny()]
    barrier, box, results = threading.Barrier(2), {}, {}

    def add_up(tensor):                          # what torch.distributed.all_reduce does, between two threads
        rank = int(threading.current_thread().name)
        box[rank] = tensor.clone()
        barrier.wait(timeout=20)
        tensor.copy_(box[0] + box[1])
        barrier.wait(timeout=20)

    def process(rank):
        results[rank] = learn(models[rank], actions, A, copy.deepcopy(reference), token_budget=30)

    alone, single = learn(tiny(), actions, A, reference, token_budget=30)  # before there are two ranks
    monkeypatch.setattr(ranks, "WORLD", 2)
    monkeypatch.setattr(ranks, "add_up", add_up)

    def share(passes, mini):
        rank, first = threading.current_thread(), {*list(dict.fromkeys(a.rollout for a in mini))[:2]}
        return [action for action in mini if (action.rollout in first) == (rank.name == "0")]

    monkeypatch.setattr(RankPasses, "share", share)
    threads = [threading.Thread(target=process, args=(rank,), name=str(rank)) for rank in (0, 1)]
    [t.start() for t in threads], [t.join() for t in threads]
    for got, optimizer in (results[0], results[1]):
        assert got == pytest.approx(alone, abs=1e-5)
        assert (optimizer.gradients[0] - single.gradients[0]).abs().max() < 1e-6


# ---- change the code in one place: the oracle must notice --------------------------------------------------

@pytest.mark.exhaustive
def test_no_mutant_of_the_loops_agrees_with_the_formula(monkeypatch):
    survivors = []
    for _, change, source in mutants(SOURCE, ["objective"]):
        module = types.ModuleType("mutant")
        monkeypatch.setitem(sys.modules, "mutant", module)
        exec(compile(source, "mutant", "exec"), module.__dict__)
        monkeypatch.setattr(flow_grpo, "objective", module.objective)
        with contextlib.suppress(Exception):
            compare_with_loops(flow_grpo)
            survivors.append(change)
    assert not survivors


@pytest.mark.exhaustive
def test_no_line_of_the_simple_update_can_be_left_out(monkeypatch):
    text = inspect.getsource(flow_grpo.simple_update)
    lines = re.findall(r"^ +((?:model|minus_J|torch|optimizer)\..*)$", text, re.M)
    assert len(lines) == 4  # zero_grad, backward, clip_grad_norm_, step
    for line in lines:
        module = types.ModuleType("mutant")
        monkeypatch.setitem(sys.modules, "mutant", module)
        source = SOURCE.replace(text, text.replace(line, "pass"))
        exec(compile(source, "mutant", "exec"), module.__dict__)
        with pytest.raises((AssertionError, ValueError, RuntimeError)):
            compare_with_update(module.simple_update, 3)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:std")
def test_no_mutant_of_the_formula_survives_loops_without_a_model(monkeypatch):
    survivors = []
    formula = ["advantages", "token_weight", "per_token", "old_or_current", "loss"]
    for function, change, source in mutants(SOURCE, formula):
        module = types.ModuleType("mutant")
        monkeypatch.setitem(sys.modules, "mutant", module)          # dataclasses look their module up
        exec(compile(source, "mutant", "exec"), module.__dict__)
        try:
            compare_with_loops(module)
            survivors.append((function, change))
        except Exception:  # a difference, or code that no longer runs
            pass
    assert not survivors
