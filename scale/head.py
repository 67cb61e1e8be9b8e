"""Log-probs without the matrix of all logits: the output layer, chunk by chunk, forward and backward.

    with off(model, definition) as head:                              # None if the head is not plain
        states = model(x, logits_to_keep=keep).logits                 # (K, d): what the head would have read
    logps = log_probs(definition, states, y, temperature, head)       # definition(head(states), ...): (K,)

A vocabulary of 152k makes the logits of 1000 tokens 600 MB in float32, and their log-softmax and gradient as
much again. Here at most CHUNK logits exist at a time, and the backward pass computes them again.

A head is plain if the model's logits are head(states) to the last bit, and their log-probs those of the
definition, flow_grpo.log_probs(). Gemma 2, Granite and Cohere scale or bound their logits behind the head,
so for them the model's own logits are taken, all of them.
"""
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

CHUNK = 2**25  # logits in float32 at a time: 128 MiB, 220 action tokens of a vocabulary of 152k
PLAIN = WeakKeyDictionary()  # {model: is its head plain?}


@contextmanager
def off(model, definition):
    """The model returns hidden states instead of logits; yields its head, or None if the head must stay."""
    if is_plain(model, definition):
        with removed(model.get_output_embeddings()) as head:
            yield head
    else:
        yield None


@contextmanager
def removed(head):
    head.forward = lambda states: states
    try:
        yield head
    finally:
        del head.forward


@torch.no_grad()
def is_plain(model, definition):
    """Found out once for each model, with four tokens."""
    if model not in PLAIN:
        head, y = model.get_output_embeddings(), torch.arange(1, 5, device=model.device)
        PLAIN[model] = False
        if isinstance(head, torch.nn.Linear):
            logits = model(y[None], use_cache=False).logits[0]
            with removed(head):
                states = model(y[None], use_cache=False).logits[0]
            if states.shape[-1] == head.in_features and torch.equal(head(states), logits):
                lean = Lean.apply(states, y, 0.7, head.weight, head.bias)
                PLAIN[model] = torch.allclose(lean, definition(logits, y, 0.7))
    return PLAIN[model]


def log_probs(definition, states, y, temperature, head):
    """(K, d), (K,) -> (K,). head None: the states are the logits, (K, V)."""
    size = chunk(head.out_features if head else states.shape[-1])
    if len(y) <= size:
        return definition(head(states) if head else states, y, temperature)
    if head:
        return Lean.apply(states, y, temperature, head.weight, head.bias)
    settings = dict(use_reentrant=False, preserve_rng_state=False)  # nothing in the definition is random
    return torch.cat([checkpoint(definition, logits, ids, temperature, **settings)
                      for logits, ids in zip(states.split(size), y.split(size))])


def chunk(vocabulary):
    return max(1, CHUNK // vocabulary)


class Lean(torch.autograd.Function):
    """log softmax(head(states) / temperature) at y, with its gradient: (one-hot(y) - softmax) / temperature.

    All chunks add to one gradient of the head. With a torch.utils.checkpoint for each, several would exist at
    a time, 1.1 GB each for a 7B."""

    @staticmethod
    def forward(ctx, states, y, temperature, weight, bias):
        chosen, totals = [], []
        for part, ids in split(weight, states, y):
            logits = linear(part, weight, bias).float().div_(temperature)  # (k, V), the only such tensor
            most = logits.amax(-1, keepdim=True)
            chosen.append(logits.gather(-1, ids[:, None]))
            totals.append(logits.sub_(most).exp_().sum(-1, keepdim=True).log_() + most)  # log Σ exp
        ctx.temperature, total = temperature, torch.cat(totals)  # (K, 1)
        ctx.save_for_backward(states, y, total, weight, bias)
        return (torch.cat(chosen) - total).squeeze(-1)

    @staticmethod
    def backward(ctx, d_logps):
        states, y, total, weight, bias = ctx.saved_tensors
        d_states = torch.empty_like(states)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[3] else None
        d_bias = torch.zeros_like(bias) if ctx.needs_input_grad[4] else None
        d_logps = d_logps[:, None] / ctx.temperature
        for part, ids, d, log_sum, d_part in split(weight, states, y, d_logps, total, d_states):
            softmax = linear(part, weight, bias).float().div_(ctx.temperature).sub_(log_sum).exp_()  # (k, V)
            d_logits = softmax.mul_(-d).scatter_add_(-1, ids[:, None], d).to(weight.dtype)
            torch.mm(d_logits, weight, out=d_part)
            if d_weight is not None:
                d_weight.addmm_(d_logits.t(), part)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_states, None, None, d_weight, d_bias


def split(weight, *tensors):
    return zip(*(tensor.split(chunk(len(weight))) for tensor in tensors))
