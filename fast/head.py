"""flow_grpo.log_probs(head(states), y, temperature), chunk by chunk, forward and backward: the matrix of all
logits never exists.

Measured on one core (hidden size 128, a vocabulary of 152k, 16 x 64 action tokens): an update takes 987 MiB
instead of 2256, and a tenth more time.

    with without_head(model, definition) as head:                     # None if the head is not plain
        states = model(x, logits_to_keep=keep).logits                 # (K, d): what the head would have read
    logps = log_probs(definition, states, y, temperature, head)       # definition(head(states), ...): (K,)

A vocabulary of 152k makes the logits of 1000 tokens 600 MB in float32, and their log-softmax and gradient as
much again. Here at most CHUNK logits exist at a time, and the backward pass computes them again.

A head is plain if the model's logits are states @ weight.T + bias to the last bit, and if the definition,
flow_grpo.log_probs(), is a log-softmax, each row by itself: a fork may change it. Some models bound or scale
their logits behind the head (Gemma 2). Others replace the head's forward() on the instance: accelerate brings
the weight from the host there, tensor parallelism gathers its shards. This file reads the weight itself and
would pass over that. For all these the model's own logits are taken, all of them.
"""
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch.utils.checkpoint import checkpoint

from fast.upcast import input_gradient, linear

CHUNK = 2**25  # logits in float32 at a time: 128 MiB, 220 action tokens of a vocabulary of 152k
PLAIN = WeakKeyDictionary()  # {model: {definition: is the head plain?}}


@contextmanager
def without_head(model, definition):
    """The model returns hidden states instead of logits; yields its head, or None if the head must stay.

    Not for two threads at once: what is changed is the model itself."""
    if is_plain(model, definition):
        with removed(model.get_output_embeddings()) as head:
            yield head
    else:
        yield None


@contextmanager
def removed(head):
    """Inside, the head returns what it reads. Afterwards its forward() is the one that was there before."""
    own = {name: value for name, value in vars(head).items() if name == "forward"}  # set on the instance
    head.forward = lambda states: states
    try:
        yield head
    finally:
        del head.forward
        vars(head).update(own)


def is_plain(model, definition):
    """Values are compared once for each model and definition; forward() may be replaced at any time."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or "forward" in vars(head):
        return False
    found = PLAIN.setdefault(model, {})
    if definition not in found:
        found[definition] = is_linear(model, definition, head)
    return found[definition]


@torch.no_grad()
def is_linear(model, definition, head):
    """Are log-probs what this file computes from the head's weight? Tried with four tokens."""
    tokens = torch.arange(1, 5, device=model.device)
    logits = model(tokens[None], use_cache=False).logits[0]
    with removed(head):
        states = model(tokens[None], use_cache=False).logits[0]
    if states.shape[-1] != head.in_features or states.dtype != head.weight.dtype:
        return False
    return torch.equal(linear(states, head.weight, head.bias), logits) and is_log_softmax(definition, logits)


def is_log_softmax(definition, like):
    """Is the definition log softmax(logits / temperature) at y, in value and in the gradient of each logit?

    Tried with random logits (4, V), like those of the model in all else, small and large, at two
    temperatures: a fork may mask any id, or bound a number."""
    return all(is_log_softmax_at(definition, like, scale, temperature)
               for scale, temperature in ((4, 0.7), (40, 0.2)))


def is_log_softmax_at(definition, like, scale, temperature):
    numbers, V = torch.Generator().manual_seed(0), like.shape[-1]
    logits = (scale * torch.randn(4, V, generator=numbers)).to(like).requires_grad_()
    y = torch.randint(V, (4,), generator=numbers).to(like.device)
    with torch.enable_grad():
        logps = definition(logits, y, temperature)
        if logps.shape != y.shape:  # it returns more than log-probs
            return False
        found, = torch.autograd.grad(logps.sum(), logits)
    log_softmax = (logits.detach().float() / temperature).log_softmax(-1)
    gradient = -log_softmax.exp() / temperature
    gradient[range(4), y] += 1 / temperature
    return (torch.allclose(logps, log_softmax[range(4), y], atol=1e-5)
            and torch.allclose(found.float(), gradient, rtol=1e-2, atol=torch.finfo(like.dtype).tiny))


def log_probs(definition, states, y, temperature, head):
    """(K, d), (K,) -> (K,). head None: the states are the logits, (K, V)."""
    size = chunk(head.out_features if head else states.shape[-1])
    if len(y) <= size:
        return definition(head(states) if head else states, y, temperature)
    if head:
        return ChunkedLogProbs.apply(states, y, temperature, head.weight, head.bias)
    settings = dict(use_reentrant=False, preserve_rng_state=False)  # nothing in the definition is random
    return torch.cat([checkpoint(definition, logits, ids, temperature, **settings)
                      for logits, ids in zip(states.split(size), y.split(size))])


def chunk(vocabulary):
    return max(1, CHUNK // vocabulary)


class ChunkedLogProbs(torch.autograd.Function):
    """log softmax(head(states) / temperature) at y, with its gradient: (one-hot(y) - softmax) / temperature.

    All chunks add to one gradient of the head. With a torch.utils.checkpoint for each, several would exist at
    a time, 1.1 GB each for a 7B."""

    @staticmethod
    def forward(ctx, states, y, temperature, weight, bias):
        chosen, totals = [], []
        for part, ids in in_chunks(weight, states, y):
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
        for part, ids, d, log_sum, d_part in in_chunks(weight, states, y, d_logps, total, d_states):
            softmax = linear(part, weight, bias).float().div_(ctx.temperature).sub_(log_sum).exp_()  # (k, V)
            d_logits = softmax.mul_(-d).scatter_add_(-1, ids[:, None], d).to(weight.dtype)
            d_part.copy_(input_gradient(d_logits, weight))
            if d_weight is not None:
                d_weight.addmm_(d_logits.t(), part)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_states, None, None, d_weight, d_bias


def in_chunks(weight, *tensors):
    return zip(*(tensor.split(chunk(len(weight))) for tensor in tensors))
