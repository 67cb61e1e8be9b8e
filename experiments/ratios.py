"""How far an update moves the planner's tokens: their log-ratios, for one group of rollouts in each step.

    git apply experiments/forks/log-ratios.diff     # then train; this is what it adds to train.py:

    with log_ratios(policy, rollouts, groups, A, temperature, passes):
        update(passes, ...)

The group is the first one on rank 0 that is not flat. Its turns are scored before and after the update. Then
rollouts.jsonl holds, for each token of its plans, the token's text and log π_new - log π_old at the sampling
temperature. This is what the whole update did, all mini-batches together, while the ρ of eq. 6 is seen by one
mini-batch on the way. experiments/flows.py colours the plans by these numbers.

The log-probs that were recorded while sampling would save the first of the two passes. But generate()
computes them in other batches, and in bfloat16 their rounding could hide a small step. Scoring consumes no
random numbers, and changes neither the update nor what is sampled. On the toy it takes 1 % of a step.
"""
from contextlib import contextmanager

import torch

from models.batches import TokenBudget
from scale import ranks
from scale.passes import length


@contextmanager
def log_ratios(policy, rollouts, groups, A, temperature, passes):
    """Score the sample before and after the update that is made inside, and add the log-ratios to its plans.

    policy: the planner's engine. groups, A: of each rollout, of all ranks. passes: scale.passes.Passes."""
    sample = first_group(rollouts, groups, A)
    turns = [turn for rollout in sample for turn in rollout.plans if turn.ids]
    before = scored(turns, temperature, passes)
    yield
    after = scored(turns, temperature, passes)
    for rollout in sample:
        plans = [output for output in rollout.outputs if output["module"] == "planner"]
        for turn, output in zip(rollout.plans, plans):
            if turn.ids:
                ratios = (after[id(turn)] - before[id(turn)]).tolist()
                rounded = [float(f"{ratio:.3g}") for ratio in ratios]
                output["log_ratios"] = list(zip(pieces(policy.tokenizer, turn.ids), rounded))


@torch.no_grad()
def scored(turns, temperature, passes):
    """{id of a turn: log π of its tokens, (|a|,)}. This rank alone computes, with gathered weights."""
    budget = TokenBudget(passes.budget.tokens)

    def score():
        logps = {}
        for batch in budget.batches(turns, length, cut=passes.cut):
            parts = passes.token_logps(passes.model, batch, temperature)
            logps.update(zip(map(id, batch), parts.split([len(turn.ids) for turn in batch])))
        return logps
    return budget.retry(score)


def first_group(rollouts, groups, A):
    """The rollouts of the first group that is not flat, on rank 0; none on the other ranks."""
    if ranks.RANK:
        return []
    mixed = [group for group, a in zip(groups, A.tolist(), strict=True) if a]
    return [rollout for rollout, group in zip(rollouts, groups) if group in mixed[:1]]


def pieces(tokenizer, ids):
    """The text of each token. A character that several tokens share belongs to the last of them.

    Each token is decoded behind the one before it, since some tokenizers drop the space of the first."""
    decode = lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    texts, start, done = [], 0, 0  # ids[:done] have their texts; ids[start:done] are decoded once more
    for end in range(1, len(ids) + 1):
        before, text = decode(ids[start:done]), decode(ids[start:end])
        whole = not text.endswith("\ufffd") or end == len(ids)
        texts.append(text[len(before):] if whole else "")
        if whole:
            start, done = done, end
    return texts
