"""Batches that fit into memory: sorted by length, bounded in tokens, halved when memory is short.

    results, budget, halved = in_memory(work, items, len, budget)       # work(batch) for each batch of items

generate() and the update both call in_memory(). How the items are split into batches changes no result.
"""
import warnings
from contextlib import contextmanager
from functools import partial

import torch

# torch's allocator; oneDNN, which multiplies bfloat16 matrices on a CPU
CPU_ERRORS = "can't allocate memory", "could not create a primitive"


class Elsewhere(MemoryError):
    """Another process that shares the work has run out of memory."""


@contextmanager
def memory_errors(what):
    """Turn torch's RuntimeError for a lack of memory into a MemoryError that names what did not fit."""
    try:
        yield
    except RuntimeError as why:  # CUDA's has a class of its own, the CPU's only a message
        if not isinstance(why, torch.OutOfMemoryError) and not any(text in str(why) for text in CPU_ERRORS):
            raise
        raise MemoryError(f"{what} does not fit into memory") from why


def by_length(items, budget, length, extra=0):
    """[(batch, its tokens)]. A batch holds the longest items that are left, as many as fit: rows x (longest +
    extra) <= budget, or one row alone. Sorting leaves little padding."""
    left, batches = sorted(items, key=length, reverse=True), []
    while left:
        longest = length(left[0]) + extra
        batch = left[: max(1, budget // longest)]
        batches.append((batch, len(batch) * longest))
        left = left[len(batch) :]
    return batches


def in_memory(work, items, length, budget, extra=0, restart=None, batches_of=None, recover=None, filler=None,
              agree=int):
    """Call work(batch) for batches of the items; return (results in batch order, last budget, halvings).

    length(item): its tokens. extra: tokens that each row needs beyond them. Out of memory: the budget is
    halved, and the items that are left are batched anew. What is sampled does not depend on failures: the
    random state goes back to what it was before the failed batch.

    restart(): for work that leaves something half-done. A failed backward pass, for example, has added an
    unknown part of its gradient. It is called first, and after each failure, when all items begin again.

    batches_of(items, budget) -> [(batch, its tokens)]: by_length(), unless given. The largest batch should
    come first, so that a lack of memory shows at once.

    recover(): called after a failure. agree(number): with several processes in lock-step, the largest of the
    numbers that they give (scale/ranks.py). A process that has no batch left takes the filler, which teaches
    nothing, until all are done; if memory is short in one, all halve their budgets.

    MemoryError if one item alone does not fit.
    """
    batches_of = batches_of or partial(by_length, length=length, extra=extra)
    results, waiting, halved = [], batches_of(items, budget), 0
    if restart:
        restart()
    while agree(len(waiting)):
        (batch, tokens), states = waiting[0] if waiting else (filler, 0), random_states()
        row = f"one row of {length(batch[0])} tokens" + (f" and {extra} new ones" if extra else "")
        alone, wanted, why = False, budget, "a row of another process does not fit into memory"
        try:
            with memory_errors(row):
                result = work(batch)
            if agree(0):
                raise Elsewhere
            results += [result] if waiting else []
            waiting = waiting[1:]
            continue
        except Elsewhere:
            cause = None
        except MemoryError as error:
            agree(1)  # the others are in their agree(0), or come to the one before their next collective
            alone, wanted, why = len(batch) == 1, tokens // 2, str(error)
            cause = error.__cause__ and error.__cause__.with_traceback(None)
        # Not inside `except`: while the exception lives, its traceback holds the failed attempt's tensors.
        if recover:
            recover()
        torch.cuda.empty_cache()  # does nothing without a GPU
        if agree(alone):
            raise MemoryError(why) from cause
        budget, halved = -agree(-wanted), halved + 1
        warnings.warn(f"Out of memory: from here on batches of at most {budget} tokens.")
        if restart:
            results, waiting = [], batches_of(items, budget)
            restart()
        else:
            waiting = batches_of([item for batch, _ in waiting for item in batch], budget)
            torch.set_rng_state(states[0])
            torch.cuda.set_rng_state_all(states[1])
    return results, budget, halved


def random_states():
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
