"""A trial: a cache of fixed size and address, so that a token's kernels are launched as one graph.

A token of a 7B takes 1,157 kernels, 2,042 with adapters, and the CPU launches each. A CUDA graph
launches all at once, but only if their addresses stay. models/local.sample() stays as it is:

    begin = Static(columns=2_304)                           # the longest prompt and completion
    attention(model, "grouped")
    sample(..., prefill=begin)                              # in the place of fast.prefix.prefill
    with sampling_mode(model), compiled(model, "cudagraphs"):
        sample(..., prefill=begin)

bench/card.py measures it (part `static`). On a CPU it shows that the tokens are equal.
"""

from contextlib import contextmanager

from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, CompileConfig, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from fast.prefix import prefill


class Static:
    """fast.prefix.prefill(), with the cache's contents in a StaticCache.

    Batches of as many rows get the same cache again: another address would need another graph."""

    def __init__(self, columns):
        self.columns, self.caches = columns, {}  # {rows: StaticCache}

    def __call__(self, model, prompts, pad):
        ids, mask, cache = prefill(model, prompts, pad)
        empty = StaticCache(config=model.config, max_cache_len=self.columns)
        static = self.caches.setdefault(len(prompts), empty)
        static.reset()
        for old, new in zip(cache.layers if cache else (), static.layers, strict=False):
            if not new.is_initialized:
                new.lazy_initialization(old.keys, old.values)
            filled = old.keys.shape[2]
            new.keys[:, :, :filled].copy_(old.keys)
            new.values[:, :, :filled].copy_(old.values)
            new.cumulative_length.fill_(filled)
        return ids, mask, static


def grouped(module, query, key, value, attention_mask, scaling=None, **settings):
    """transformers' sdpa, where one query's heads that share a key become queries of that key.

    Under dynamo, transformers repeats keys and values for all heads instead: 59 GB written a token
    of 64 rows of a 7B."""
    rows, heads, queries, width = query.shape
    if queries > 1:
        how = settings | dict(scaling=scaling)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **how)
    query = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    out = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, width), None


AttentionInterface.register("grouped", grouped)
AttentionMaskInterface.register("grouped", sdpa_mask)


def attention(model, name):
    """Choose the attention: "sdpa" or "grouped"."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_attn_implementation(name)


@contextmanager
def compiled(model, backend):
    """In sampling_mode(): generate() compiles the model for a StaticCache; None: it does not."""
    modules = (module for module in model.modules() if "generation_config" in vars(module))
    config = next(modules).generation_config  # one object for all of them
    config.disable_compile = backend is None
    if backend:
        mode = "reduce-overhead" if backend == "inductor" else None
        config.compile_config = CompileConfig(backend=backend, mode=mode)
        config.compile_config._compile_all_devices = True
    yield
