"""Batches that fit into memory: sorted by length, bounded in tokens, halved when the memory is short.

    batches([3, 9, 4], budget=10)                # [[1], [2, 0]]: indices; rows x longest row <= budget
    done, budget, halved = in_memory(work, items, len, budget)      # work(batch) for each batch of items

generate() and the update both call in_memory(). The results do not depend on how the items are cut.
"""
import warnings
from contextlib import contextmanager

import torch

CHUNK = 2**26  # logits that exist in float32 at a time: 256 MiB, 441 action tokens of a vocabulary of 152k


def batches(lengths, budget, extra=0):
    """Indices in batches of similar length, the longest first: rows x (longest + extra) <= budget.

    >>> batches([3, 9, 4], budget=10, extra=1)
    [[1], [2, 0]]

    A row longer than the budget goes alone. Sorting leaves few slots to padding. The largest batch comes
    first, so a memory that is too small shows at once.
    """
    groups = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (len(groups[-1]) + 1) * (lengths[groups[-1][0]] + extra) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def short_of_memory(error):
    """Does this RuntimeError come from a lack of memory? CUDA's has its own class, the CPU's only a text."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def memory_errors(what):
    """A MemoryError that names what did not fit, in place of torch's RuntimeErrors of memory."""
    try:
        yield
    except RuntimeError as why:
        if not short_of_memory(why):
            raise
        raise MemoryError(f"{what} does not fit into memory") from why


def in_memory(work, items, length, budget, extra=0, restart=None):
    """work(batch) for each batch of items: (the results in batch order, the last budget, how often it was
    halved).

    length(item): its tokens; extra: tokens that each row needs beyond that. Out of memory: the budget is
    halved, and the failed batch is cut anew. restart(): everything begins again after this call, for work
    that leaves something half-done behind: a failed backward pass has added an unknown part of its
    gradient. Otherwise the random state goes back to what it was before the failed batch, so what is
    sampled does not depend on the failure. MemoryError if one item alone does not fit.
    """
    longest_first = sorted(items, key=length, reverse=True)
    results, waiting, halved = [], longest_first, 0
    if restart:
        restart()
    while waiting:
        n = len(batches([length(item) for item in waiting], budget, extra)[0])
        batch, states = waiting[:n], random_states()
        try:
            results.append(work(batch))
            waiting = waiting[n:]
            continue
        except RuntimeError as why:
            if not short_of_memory(why):
                raise
            if len(batch) == 1:
                row = f"one row of {length(batch[0])} tokens" + (f" and {extra} new ones" if extra else "")
                raise MemoryError(f"{row} does not fit into memory") from why
        # Not inside `except`: while the exception lives, its traceback holds the failed attempt's tensors.
        torch.cuda.empty_cache()  # does nothing without a GPU
        budget, halved = len(batch) * (length(batch[0]) + extra) // 2, halved + 1
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
