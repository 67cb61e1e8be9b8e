"""A shared prompt's cache: what the prompts of a batch have in common is computed once, before
generate().

Measured on one core: 32 tokens after 8 copies of a prompt of 2,048 take 0.75 s instead of 1.82
(docs/speed.md). Prompts are computed CHUNK columns at a time: in one piece, the activations of a
layer would take three times the memory of a 7B's cache.

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

A sliding window (Gemma, Mistral 0.1) would count that padding, so its models share no prefix, but
only the copies of a prompt: part 1 is left out.
"""

import inspect
import os

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from fast.trees import OTHERS
from models.local import left_padded

# Prompt tokens that sharing must save, since it costs two more calls of the model
SAVED_TOKENS = 64
CHUNK = 256  # columns of prompts that are computed at a time
KEPT = DynamicLayer, DynamicSlidingWindowLayer  # layers' caches that can be copied by rows


@torch.no_grad()
def prefill(
    model, prompts: list[list[int]], pad: int
) -> tuple[torch.Tensor, torch.Tensor, DynamicCache | None]:
    """(ids, mask, cache): the padded prompts (N, P), and the cache of what has been computed.

    generate() computes what is not in the cache: of each row at least the last token. cache None:
    the prompts share little and are short, or the model's cache cannot be copied by rows.
    """
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    distinct = list(number)
    N, D, P = len(prompts), len(distinct), max(map(len, prompts))
    config = model.config.get_text_config()
    cache = DynamicCache(config=config)
    prefix = os.path.commonprefix([prompt[:-1] for prompt in distinct])  # works on any sequences
    # A window, of which GPT-Neo's cache does not know, would count the padding after the prefix.
    windows = any(cache.is_sliding) or any(getattr(config, name, None) for name in OTHERS)
    L = 0 if windows else len(prefix)
    shared = N * P - L - D * (P - L) >= SAVED_TOKENS
    if not (shared or P > CHUNK) or not in_parts(model):
        return *left_padded(prompts, pad, model.device), None
    decoder = model.get_decoder()  # the model without its head: no logits of prompts
    ids, mask = left_padded(distinct, pad, model.device, shared=L)

    def compute(rows, start, end):
        positions = (mask[rows].cumsum(1) - 1).clamp(min=0)
        for at in range(start, end, CHUNK):
            columns = slice(at, min(at + CHUNK, end))
            where = {"position_ids": positions[:, columns], "past_key_values": cache}
            where["attention_mask"] = mask[rows, : columns.stop]
            decoder(ids[rows, columns], **where, use_cache=True)

    if L:
        compute(slice(1), 0, L)
        cache.batch_select_indices(torch.zeros(D, dtype=torch.long, device=ids.device))
    if D < N or P - L > CHUNK:
        compute(slice(D), L, P - 1)
    if D < N:
        copies = torch.tensor([number[tuple(prompt)] for prompt in prompts], device=ids.device)
        cache.batch_select_indices(copies)
        ids, mask = ids[copies], mask[copies]
    return ids, mask, cache


def in_parts(model) -> bool:
    """Can the model's cache be cut and copied by rows? Only if each layer keeps keys and values,
    and a token's position comes from position_ids.

    Not so: linear attention and state space models (Qwen3.5, Mamba); ALiBi (Bloom, MPT), which
    counts columns."""
    config = model.config.get_text_config()
    kept = all(type(layer) in KEPT for layer in DynamicCache(config=config).layers)
    placed = "position_ids" in inspect.signature(model.get_decoder().forward).parameters
    return kept and placed and not getattr(config, "alibi", False)
