"""models/local.py's sample() in parts: what prompts share is computed once, and finished rows leave.

Measured on one core: 8 copies of a prompt of 2048 tokens take 0.52 s instead of 1.21; 64 rows of 31 tokens on
average and 128 at most take half the time if the finished ones leave.

    [(ids, log-probs)] = sample(model, token_lists, stops, temperature, max_new_tokens, draws)

The greedy tokens are those of the plain way. Above temperature 0, both sample the same distribution, and here
each row has random numbers of its own (draws): how prompts are batched changes nothing but rounding. In half
precision, rounding can decide between two tokens of nearly equal probability.

transformers' generate() computes every row from its first token on, and all rows until the last has finished.
For rollouts most of that is waste: their prompts begin with the same instructions and tools, the copies of a
question are equal in their first turn, and completions differ in length. So sample() has three parts:

    1  the longest prefix of all prompts    computed as one row; its cache is copied to the distinct prompts
    2  the rest of each distinct prompt     computed; the cache is copied to all rows
    3  generate(), from the last token on   whenever enough rows have finished, it returns, their part of the
                                            cache is dropped, and it is called again for the others

This is right because keys and values of a token depend on the tokens before it and on no other row. Prompts
differ in length, so padding separates the prefix from the rest:

    prefix prefix prefix  pad  rest rest     the mask hides the padding, and positions do not count it
    prefix prefix prefix rest  rest rest

Memory: the cache grows to rows x (longest prompt + max_new_tokens + ROOM) tokens at most. While it is copied,
each layer in turn exists twice.
"""

import inspect
import os

import torch
from transformers import DynamicCache, GenerationConfig, StoppingCriteria
from transformers.cache_utils import DynamicLayer

SAVED_TOKENS = 64  # prompt tokens that sharing must save, since it costs one or two more calls of the model
LEAVING = 4, 0.25  # finished rows leave once they are at least 4 and a quarter of the batch
ROOM = 64  # tokens by which a cache grows


def sample(model, token_lists, stops, temperature, max_new_tokens, draws):
    """Complete prompts: [(ids, log π of each)], as models/local.py's sample() does.

    draws: of each row, max_new_tokens random numbers in [0, 1), which decide what is sampled (see Sampler).
    """
    pad = stops[0] if stops else 0  # any id will do: it is masked in prompts and cut off from completions
    ids, mask, cache = prefill(model, token_lists, pad)
    N, P = ids.shape
    settings = GenerationConfig(
        do_sample=False, num_beams=1, repetition_penalty=1.0, use_cache=True, max_length=P + max_new_tokens,
        eos_token_id=stops or None, pad_token_id=pad)
    wide = torch.float32 if ids.device.type == "mps" else torch.float64  # mps has no float64
    sampler = Sampler(temperature, torch.stack(draws).to(ids.device, wide), P)
    leave = FinishedLeave(stops, ids.device)
    rows, completions = torch.arange(N, device=ids.device), [([], [])] * N  # rows: those still in the batch
    while len(rows):
        sampler.rows = rows
        ids = model.generate(
            ids, attention_mask=mask, past_key_values=cache, generation_config=settings,
            logits_processor=[sampler] if temperature != 0 else [],
            stopping_criteria=[leave] if cache is not None else [],
            synced_gpus=False)  # sharded weights are gathered now: each rank generates on its own
        live = ~leave.finished(ids) & (ids.shape[1] < P + max_new_tokens)
        for row, tokens in zip(rows[~live].tolist(), ids[~live, P:].tolist()):
            completion = upto_stop(tokens, stops)
            completions[row] = completion, sampler.logps[row, : len(completion)].tolist()
        ids, mask, rows = ids[live], mask[live], rows[live]
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        if len(rows):
            cache.batch_select_indices(live)
    if sampler.logps.isnan().any():
        raise ValueError("The model computes nan: its weights are damaged, or too large for its dtype.")
    return completions


@torch.no_grad()  # not inference_mode(), see state.sampling_mode()
def prefill(model, prompts, pad):
    """(ids, mask, cache): the padded prompts, and the cache of the tokens that rows share; perhaps empty.

    generate() computes what is not in the cache: of each row at least the last token.
    """
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    distinct = list(number)
    prefix = os.path.commonprefix([prompt[:-1] for prompt in distinct])  # works on any sequences
    N, D, L, P = len(prompts), len(distinct), len(prefix), max(map(len, prompts))
    cache = DynamicCache(config=model.config) if in_parts(model) else None
    if cache is not None:
        cache.layers = [RoomyLayer() for _ in cache.layers]
    if cache is None or N * P - L - D * (P - L) < SAVED_TOKENS:
        return *padded(prompts, 0, pad, model.device), cache
    decoder = model.get_decoder()  # the model without its head: no logits of prompts
    ids, mask = padded(distinct, L, pad, model.device)

    def compute(rows, start, end):
        positions = (mask[rows, :end].cumsum(1) - 1).clamp(min=0)[:, start:]
        decoder(ids[rows, start:end], attention_mask=mask[rows, :end], position_ids=positions,
                past_key_values=cache, use_cache=True)

    if L:
        compute(slice(1), 0, L)
        cache.batch_select_indices(torch.zeros(D, dtype=torch.long, device=ids.device))
    if D < N:
        if L < P - 1:
            compute(slice(D), L, P - 1)
        copies = torch.tensor([number[tuple(prompt)] for prompt in prompts], device=ids.device)
        cache.batch_select_indices(copies)
        ids, mask = ids[copies], mask[copies]
    return ids, mask, cache


def in_parts(model):
    """Can the model's cache be cut and copied by rows? Only if each layer keeps all keys and values, and a
    token's position comes from position_ids.

    Not so: sliding windows (Gemma, Mistral), which would count the padding; linear attention and state space
    models (Qwen3.5, Mamba); ALiBi (Bloom, MPT), which counts columns; longrope (Phi-3), where the longest row
    changes the positions of all.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    return (all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
            and "position_ids" in inspect.signature(model.get_decoder().forward).parameters
            and not getattr(config, "alibi", False) and rope.get("rope_type") != "longrope")


def padded(prompts, shared, pad, device):
    """(ids, mask) of the prompts, (N, P). They have `shared` first tokens in common; the padding follows."""
    P = max(map(len, prompts))
    gaps = [P - len(prompt) for prompt in prompts]
    ids = [[*s[:shared], *[pad] * gap, *s[shared:]] for s, gap in zip(prompts, gaps)]
    mask = [[1] * shared + [0] * gap + [1] * (P - shared - gap) for gap in gaps]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def upto_stop(ids, stops):
    """The sampled tokens: all up to and including the first stop token. The rest is padding.

    >>> upto_stop([5, 6, 2, 2, 2], stops=[2])
    [5, 6, 2]
    """
    end = next((j + 1 for j, i in enumerate(ids) if i in stops), len(ids))
    return ids[:end]


class RoomyLayer(DynamicLayer):
    """A layer of the cache with room for more tokens. DynamicLayer copies all keys and values for each new
    token: of 64 rows with 512 tokens, a quarter of the time."""

    buffers = None  # (N, heads, tokens and room, width): keys and values are the beginnings of these two

    def update(self, keys, values, *_, **__):
        start, end = self.get_seq_length(), self.get_seq_length() + keys.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.keys, self.values = keys[:, :, :0], values[:, :, :0]
        if self.buffers is None or end > self.buffers[0].shape[2]:
            self.buffers = [torch.cat([old, new, torch.empty_like(new[:, :, :1]).expand(-1, -1, ROOM, -1)], 2)
                            for old, new in ((self.keys, keys), (self.values, values))]
        else:
            for buffer, new in zip(self.buffers, (keys, values)):
                buffer[:, :, start:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices):
        super().batch_select_indices(indices)
        self.buffers = None  # keys and values are copies now


class FinishedLeave(StoppingCriteria):
    """Make generate() return as soon as enough rows have finished for the others to go on without them."""

    def __init__(self, stops, device):
        self.stops = torch.tensor(stops, dtype=torch.long, device=device)

    def finished(self, ids):
        return torch.isin(ids[:, -1], self.stops)  # a finished row goes on with pad, a stop token, too

    def __call__(self, ids, scores, **_):
        finished = self.finished(ids)
        return finished | (finished.sum() >= max(LEAVING[0], LEAVING[1] * len(ids)))


class Sampler:
    """A logits processor that samples a token for each row, and records its log-prob.

    The token is where the cumulated probabilities first exceed the row's random number. generate() itself
    would draw a number for each row and each token of the vocabulary, which takes longer than a small model,
    and the log-softmax would be computed twice. Here each row has its own random numbers: what it samples
    does not depend on which other rows are in the batch.
    """

    def __init__(self, temperature, draws, start):
        # a draw below 1 can round to 1.0 in float32 (on mps), and the sum exceeds 1.0 at no token
        self.draws = draws.clamp(max=1 - torch.finfo(draws.dtype).eps)
        self.temperature, self.start, self.rows = temperature, start, None
        self.logps = torch.zeros_like(draws, dtype=torch.float32)

    def __call__(self, ids, logits):  # (n, tokens so far), (n, V)
        t = ids.shape[1] - self.start
        logps = (logits / self.temperature).log_softmax(-1)
        upto = logps.exp().cumsum(-1, dtype=self.draws.dtype)  # (n, V)
        numbers = self.draws[self.rows, t, None] * upto[:, -1:]  # the sum is 1 but for rounding
        tokens = torch.searchsorted(upto, numbers, right=True).clamp_(max=logits.shape[1] - 1)  # (n, 1)
        self.logps[self.rows, t] = logps.gather(1, tokens)[:, 0]
        return torch.full_like(logits, -torch.inf).scatter_(1, tokens, 0.0)  # generate() takes the largest
