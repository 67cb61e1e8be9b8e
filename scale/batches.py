"""Batches that fit into memory: sorted by length, bounded in tokens, halved when memory is short.

    results, budget, halved = in_memory(work, items, len, budget)       # work(batch) for each batch of items

generate() and the update both call in_memory(). How the items are split into batches changes no result.
"""
import warnings
from contextlib import contextmanager

import torch

CHUNK = 2**26  # logits that exist in float32 at a time: 256 MiB, 441 action tokens of a vocabulary of 152k


@contextmanager
def memory_errors(what):
    """Turn torch's RuntimeError for a lack of memory into a MemoryError that names what did not fit."""
    try:
        yield
    except RuntimeError as why:  # CUDA's has a class of its own, the CPU's only a message
        if not isinstance(why, torch.OutOfMemoryError) and "can't allocate memory" not in str(why):
            raise
        raise MemoryError(f"{what} does not fit into memory") from why


def in_memory(work, items, length, budget, extra=0, restart=None):
    """Call work(batch) for batches of the items; return (results in batch order, last budget, halvings).

    A batch holds the longest items that are left: rows x (longest + extra) <= budget, or one row alone.
    Sorting leaves little padding. The largest batch comes first, so a lack of memory shows at once.

    length(item): its tokens. extra: tokens that each row needs beyond them. Out of memory: the budget is
    halved, and the items of the failed batch are batched anew. What is sampled does not depend on failures:
    the random state goes back to what it was before the failed batch.

    restart(): for work that leaves something half-done. A failed backward pass, for example, has added an
    unknown part of its gradient. It is called first, and after each failure, when all items begin again.

    MemoryError if one item alone does not fit.
    """
    longest_first = sorted(items, key=length, reverse=True)
    results, waiting, halved = [], longest_first, 0
    if restart:
        restart()
    while waiting:
        longest = length(waiting[0]) + extra
        batch, states = waiting[: max(1, budget // longest)], random_states()
        row = f"one row of {longest - extra} tokens" + (f" and {extra} new ones" if extra else "")
        try:
            with memory_errors(row):
                results.append(work(batch))
            waiting = waiting[len(batch) :]
            continue
        except MemoryError:
            if len(batch) == 1:
                raise
        # Not inside `except`: while the exception lives, its traceback holds the failed attempt's tensors.
        torch.cuda.empty_cache()  # does nothing without a GPU
        budget, halved = len(batch) * longest // 2, halved + 1
        warnings.warn(f"Out of memory: from here on batches of at most {budget} tokens.")
        if restart:
            results, waiting = [], longest_first
            restart()
        else:
            torch.set_rng_state(states[0])
            torch.cuda.set_rng_state_all(states[1])
    return results, budget, halved


def random_states():
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
