"""How far an update moves the planner's tokens: their log-ratios, for one group of rollouts in each step.

    add_log_ratios = score_sample(policy, rollouts, groups, A, temperature, token_budget, **scoring)
    update(..., **scoring)
    add_log_ratios()

The group is the first one on rank 0 that is not flat. Its turns are scored before and after the update. Then
rollouts.jsonl holds, for each token of its plans, the token's text and log π_new - log π_old at the sampling
temperature. This is what the whole update did, all mini-batches together, while the ρ of eq. 6 is seen by one
mini-batch on the way. experiments/flows.py colours the plans by these numbers.

The log-probs that were recorded while sampling would save the first of the two passes. But generate()
computes them in other batches, and in bfloat16 their rounding could hide a small step. It costs no random
number, and neither the update nor what is sampled depends on it. On the toy it takes 1 % of a step.
"""
import torch

from models.batches import in_memory
from scale import ranks


def score_sample(policy, rollouts, groups, A, temperature, token_budget, token_logps, micro_batches):
    """Score the sample as the policy is now. What is returned scores it again, and adds the log-ratios.

    policy: the planner's engine. groups, A: of each rollout, of all ranks. token_logps, micro_batches: as for
    flow_grpo.update()."""
    sample = first_group(rollouts, groups, A)
    turns = [turn for rollout in sample for turn in rollout.actions if turn.ids]
    length = lambda turn: len(turn.prompt_ids) + len(turn.ids)

    @torch.no_grad()
    def score(batch):
        logps = token_logps(policy.model, batch, temperature)
        return dict(zip(map(id, batch), logps.split([len(turn.ids) for turn in batch])))

    def scored():
        """{id of a turn: log π of its tokens, (|a|,)}."""
        parts = in_memory(score, turns, length, token_budget, batches_of=micro_batches)[0]
        return {turn: logps for part in parts for turn, logps in part.items()}

    before = scored()

    def add_log_ratios():
        after = scored()
        for rollout in sample:
            plans = [output for output in rollout.outputs if output["module"] == "planner"]
            for turn, output in zip(rollout.actions, plans):
                if turn.ids:
                    ratios = (after[id(turn)] - before[id(turn)]).tolist()
                    rounded = [float(f"{ratio:.3g}") for ratio in ratios]
                    output["log_ratios"] = list(zip(pieces(policy.tokenizer, turn.ids), rounded))

    return add_log_ratios


def first_group(rollouts, groups, A):
    """The rollouts of the first group on rank 0 that is not flat; none on the other ranks."""
    if ranks.RANK:
        return []
    mixed = [group for group, a in zip(groups, A.tolist()) if a and group % ranks.WORLD == 0]
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
