"""flow_grpo.token_logps(), with shared prefixes and a chunked output layer; and its micro-batches.

Measured on one core (hidden size 128, 2 groups of 8 x (512 + 64) tokens, a vocabulary of 1k): an update is
3.2 times as fast as the plain one, and needs a quarter of its memory (docs/speed.md).

    Passes(model, reference, *logps.scoring(log_probs, model, reference))      # log_probs: flow_grpo's

A prefix that sequences of a micro-batch share, such as the prompt of a group, is computed once (trees.py).
Logits are computed only where an action token is predicted, and a chunk at a time, so that no (K, V) matrix
exists (head.py).
"""
from functools import partial
from types import SimpleNamespace

import torch

from fast import head, trees


@torch.no_grad()
def scoring(log_probs, model, reference=None, plain=None):
    """(token_logps, cut), as arguments of scale.passes.Passes. cut() keeps equal prompts together.

    In a dry run on a few tokens, trees.py and head.py find out, once for each model, which of their methods
    give the right numbers. Call it before the first update: while weights are sharded, no rank can run a
    forward pass alone. plain: flow_grpo.token_logps; if its numbers differ (it has been edited), SystemExit.
    """
    made = dict(rollout=0, A=1.0, weight=1.0, logp_old=None)
    actions = [SimpleNamespace(prompt_ids=[0, 1], ids=[1, 0], logps=[0.0, 0.0], **made),
               SimpleNamespace(prompt_ids=[1], ids=[1], logps=[0.0], **made)]
    for each in filter(None, (model, reference)):
        logps = torch.cat([token_logps(each, batch, 0.7, log_probs)  # one action a batch, in their order
                           for action in actions for batch, _ in micro_batches(each, [action], 1)])
        # atol, rtol: far above rounding (float32, bfloat16), far below most edits
        atol, rtol = (1e-3, 1e-3) if each.dtype == torch.float32 else (0.5, 0.05)
        if plain and logps.ndim == 1 and not torch.allclose(plain(each, actions, 0.7), logps, rtol, atol):
            raise SystemExit("flow_grpo.py: token_logps() computes other numbers than fast/logps.py, which "
                             "would be used instead: give --plain, or edit log_probs()")
    return partial(token_logps, log_probs=log_probs), partial(micro_batches, model)


def micro_batches(model, actions, budget):
    """[(MicroBatch, its slots)]: a row may hold several actions, as a tree in which a shared beginning is
    there once. Its slots are rows x longest row: at most `budget`, unless one action alone has more.

    Actions with A = 0 get micro-batches of their own. score_old() leaves them out, but with a KL the update
    includes them. Mixed in, they would change how the others are batched, and so how their log-probs round:
    that would be noise in ρ."""
    return trees.micro_batches(model, actions, budget, apart=lambda a: getattr(a, "A", None) == 0)


def token_logps(model, actions, temperature, log_probs):
    """log π(a_j | s, a_<j) of every action token: (K,) float32, one action after the other, K = Σ |a|."""
    # x (B, L)     the tokens that the model reads; a prefix that actions share is there once
    # keep (B, L)  True at the M places whose next token is an action token
    # A *prediction* is such a place and the token after it. There are P: where plans part, it has several.
    # node (P,)    the place of each prediction, 0 .. M-1; None if no row branches (then P = M, in order)
    # y (P,)       the token of each prediction
    # pair (K,)    the prediction of each action token
    # settings     positions, and a mask that hides the branches from each other; {} if no row branches
    # Example: two actions with the prompt A and the plans [B C] and [B D]. x is A B (the last token of a
    # sequence predicts nothing), keep is True at both. There are P = 3 predictions: B after A, C after B, D
    # after B. So node is 0 1 1, y is B C D, and the four action tokens B C B D have the pairs 0 1 0 2.
    x, keep, node, y, pair, settings = trees.layout(actions, model)
    with head.without_head(model, log_probs) as lm_head:
        out = model(x, logits_to_keep=keep, use_cache=False, **settings)    # (M, d), before the head
    assert getattr(out, "past_key_values", None) is None, \
        "no cache here: with gradient checkpointing, the prompt's part of the gradient would be lost silently"
    states = out.logits if node is None else out.logits[node]               # (P, d)
    return head.log_probs(log_probs, states, y, temperature, lm_head)[pair]     # (P,) -> (K,)
