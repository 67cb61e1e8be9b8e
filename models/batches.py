"""Batches that fit into memory: sorted by length, bounded in tokens, halved when memory is short.

    budget = TokenBudget(65_536)
    for batch, attempt in budget.batches(items, length=len):
        with attempt:
            ...

If memory is short inside `with attempt`, the items of this batch come again in smaller batches. generate(),
the update and the log-ratios all run this loop. How the items are split into batches changes no result beyond
rounding. (Except what is sampled with --plain: there all rows draw from one stream of random numbers.)
"""
import warnings
from contextlib import contextmanager

import torch

# What errors without a class of their own say: the CPU's allocator; oneDNN, which multiplies
# bfloat16 matrices on a CPU; CUDA's libraries near a full card; Apple's
MESSAGES = ("can't allocate memory", "could not create a primitive", "CUDA error: out of memory",
            "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "MPS backend out of memory")


class Elsewhere(MemoryError):
    """Another process that shares the work has run out of memory."""


def is_short_of_memory(error):
    """Is this a lack of memory? That of torch's CUDA allocator has a class of its own."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES):
        return True
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))


@contextmanager
def memory_errors(what):
    """Turn torch's RuntimeError for a lack of memory into a MemoryError that names what did not fit."""
    try:
        yield
    except RuntimeError as why:
        if not is_short_of_memory(why):
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


class Attempt:
    """with attempt: ... catches a lack of memory; any other error passes.

    failed: was memory short, here or in another process? cause: the error, if it was short here.
    Processes in lock-step exchange one number here: has any of them failed? One that has failed sends it in
    place of its next ranks.check(), wherever the others are."""

    def __init__(self, agree):
        self.agree, self.failed, self.cause = agree, False, None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is None:
            self.failed = bool(self.agree(False))
        elif isinstance(error, Elsewhere):
            self.failed = True
        elif is_short_of_memory(error):
            self.agree(True)
            self.failed, self.cause = True, error.with_traceback(None)  # its frames hold tensors
        return self.failed


class TokenBudget:
    """How many tokens a batch may have. tokens: the limit; halved: how often memory was short."""

    def __init__(self, tokens):
        self.tokens, self.halved = tokens, 0

    def batches(self, items, length, extra=0, batches_of=None, undo=None, filler=None, agree=int):
        """Yield (batch, attempt) until all items have been in a batch that did fit; see above. MemoryError if
        one item alone does not fit, at the second try: the first may fail because torch's cache is full of
        small pieces.

        length(item): its tokens. extra: tokens that each row needs beyond them.
        batches_of(items, tokens) -> [(batch, its tokens)]: by_length(), unless given. The largest batch
        should come first, so that running out shows at once.

        After a failure the remaining items are batched again, with half the tokens. What is sampled does not
        depend on failures: the random state goes back to what it was before the failed batch.

        undo(): for work that leaves something half-done. A failed backward pass, for example, has added an
        unknown part of its gradient. undo() is called after a failure, and then all items come again.

        agree(number): with several processes in lock-step, the largest of the numbers that they give
        (scale/ranks.py). A process that has no batch left takes filler() until all are done; if memory is
        short in one, all halve their budgets.
        """
        batches_of = batches_of or (lambda items, tokens: by_length(items, tokens, length, extra))
        waiting, alone = batches_of(items, self.tokens), 0  # how often a single row did not fit
        while agree(len(waiting)):
            batch, tokens = waiting[0] if waiting else (filler(), 0)
            states, attempt = random_states(), Attempt(agree)
            yield batch, attempt
            if not attempt.failed:
                waiting = waiting[1:]
                continue
            if undo:
                undo()
            torch.cuda.empty_cache()  # does nothing without a GPU
            mine = attempt.cause is not None  # and not another process's
            single = mine and len(batch) == 1
            alone += single
            if agree(alone) > 1:
                row = f"one row of {length(batch[0])} tokens" + (f" and {extra} new ones" if extra else "")
                row = row if mine else "a row of another process"
                raise MemoryError(f"{row} does not fit into memory") from attempt.cause
            smaller = tokens // 2 if mine and not single else self.tokens
            self.tokens, self.halved = -agree(-smaller), self.halved + 1
            warnings.warn(f"Out of memory: from here on batches of at most {self.tokens} tokens.")
            left = items if undo else [item for batch, _ in waiting for item in batch]
            waiting = batches_of(left, self.tokens)
            torch.set_rng_state(states[0])
            torch.cuda.set_rng_state_all(states[1])


def random_states():
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
