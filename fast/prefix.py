"""A shared prompt's cache: what the prompts of a batch have in common is computed once, before
generate().

Measured on one core: 8 copies of a prompt of 2048 tokens take 0.52 s instead of 1.21.

    ids, mask, cache = prefill(model, token_lists, pad)
    model.generate(ids, attention_mask=mask, past_key_values=cache, ...)

The prompts of a step begin with the same instructions and tools, and the copies of a question are
equal in their first turn. So the prompts are computed in two parts, and generate() does the rest:

    1  the longest prefix of all prompts    as one row; its cache is copied to the distinct prompts
    2  the rest of each distinct prompt     its cache is copied to all rows
    3  generate()                           from the last token of the prompts on

This is right because keys and values of a token depend on the tokens before it and on no other row.
Prompts differ in length, so padding separates the prefix from the rest:

    prefix prefix prefix  pad  rest rest     the mask hides the padding, positions do not count it
    prefix prefix prefix rest  rest rest
"""

import inspect
import os

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Prompt tokens that sharing must save, since it costs two more calls of the model
SAVED_TOKENS = 64


@torch.no_grad()
def prefill(model, prompts, pad):
    """(ids, mask, cache): the padded prompts (N, P), and the cache of the tokens that rows share.

    generate() computes what is not in the cache: of each row at least the last token. cache None:
    nothing is shared, or the model's cache cannot be copied by rows.
    """
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    distinct = list(number)
    prefix = os.path.commonprefix([prompt[:-1] for prompt in distinct])  # works on any sequences
    N, D, L, P = len(prompts), len(distinct), len(prefix), max(map(len, prompts))
    if N * P - L - D * (P - L) < SAVED_TOKENS or not in_parts(model):
        return *padded(prompts, 0, pad, model.device), None
    cache = DynamicCache(config=model.config)
    decoder = model.get_decoder()  # the model without its head: no logits of prompts
    ids, mask = padded(distinct, L, pad, model.device)

    def compute(rows, start, end):
        positions = (mask[rows, :end].cumsum(1) - 1).clamp(min=0)[:, start:]
        decoder(
            ids[rows, start:end],
            attention_mask=mask[rows, :end],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )

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
    """Can the model's cache be cut and copied by rows? Only if each layer keeps all keys and
    values, and a token's position comes from position_ids.

    Not so: sliding windows (Gemma, Mistral), which would count the padding; linear attention and
    state space models (Qwen3.5, Mamba); ALiBi (Bloom, MPT), which counts columns; longrope (Phi-3),
    where the longest row changes the positions of all.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
        and "position_ids" in inspect.signature(model.get_decoder().forward).parameters
        and not getattr(config, "alibi", False)
        and rope.get("rope_type") != "longrope"
    )


def padded(prompts, shared, pad, device):
    """(ids, mask) of the prompts, (N, P). They share their `shared` first tokens."""
    P = max(map(len, prompts))
    gaps = [P - len(prompt) for prompt in prompts]
    ids = [[*s[:shared], *[pad] * gap, *s[shared:]] for s, gap in zip(prompts, gaps)]
    mask = [[1] * shared + [0] * gap + [1] * (P - shared - gap) for gap in gaps]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
