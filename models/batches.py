"""Batches that fit into memory: sorted by length, bounded in tokens, made smaller if memory runs out.

    budget = TokenBudget(65_536)

    def work(items):
        for batch in budget.batches(items, length=len):
            ...

    budget.retry(work, items)

If memory runs out inside work(), all of it is done again, in smaller batches. Sampling (local.py), the
update (scale/passes.py) and experiments/ratios.py all run this loop. How the items are split into batches
changes no result beyond rounding, which rarely decides which token is sampled. (With --plain, batches change
what is sampled: there all rows draw from one stream of random numbers.)
"""
import warnings
from contextlib import contextmanager
from typing import NamedTuple

import torch

# Messages of out-of-memory errors that are plain RuntimeErrors: of the CPU's allocator; of oneDNN, which
# multiplies bfloat16 matrices on a CPU; of CUDA's libraries near a full card; of Apple's mps
MESSAGES = ("can't allocate memory", "could not create a primitive", "CUDA error: out of memory",
            "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "MPS backend out of memory")


def is_short_of_memory(error):
    """Has memory run out? The error of torch's CUDA allocator has a class of its own."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES):
        return True
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))


@contextmanager
def memory_errors(what):
    """If memory runs out, turn torch's RuntimeError into a MemoryError that names what did not fit."""
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


class InWork(NamedTuple):
    """The batch that is being computed, in case it does not fit."""

    items: int
    tokens: int
    name: str  # for the error


class TokenBudget:
    """The most tokens that a batch may hold. tokens: this limit; halved: how often it was lowered.

    batches() hands out batches, and retry() must know which one failed: so batches() notes it in `in_work`.
    If work() runs out of memory, half of that batch's tokens become the limit, and retry() begins again.
    """

    def __init__(self, tokens):
        self.tokens, self.halved = tokens, 0
        # of the present retry():
        self.single_failures = 0  # how often a batch of one item did not fit; the second time ends it
        self.in_work = InWork(1, tokens, "the work")  # what was being computed when memory ran out

    def batches(self, items, length, extra=0, cut=None):
        """Yield all items, in batches that fit.

        length(item): its tokens. extra: tokens that each row needs beyond them.
        cut(items, tokens) -> [(batch, its tokens)]: another way to split than by_length(). It should put the
        largest batch first, so that running out shows at once.
        """
        parts = cut(items, self.tokens) if cut else by_length(items, self.tokens, length, extra)
        for batch, tokens in parts:
            name = f"one row of {length(batch[0])} tokens" + (f" and {extra} new ones" if extra else "")
            self.in_work = InWork(len(batch), tokens, name)
            yield batch

    def retry(self, work, *arguments):
        """work(*arguments). If memory runs out: again, with half the tokens of the batch that failed. A
        batch of one item cannot be halved: it is tried once more, because torch's cache may have been
        fragmented. A second such failure, of this or another item, is a MemoryError.

        work() begins from nothing each time, and with the random state of the first time (but for mps).
        """
        self.single_failures = 0
        states = random_states()
        while True:
            # before the first batch, nothing can be halved: this counts as a single item
            self.in_work = InWork(1, self.tokens, "the work")
            try:
                return work(*arguments)
            except (RuntimeError, MemoryError) as error:
                if not is_short_of_memory(error):
                    raise
                why = error.with_traceback(None)  # its frames hold tensors
            before = self.tokens
            self.shrink(why)
            torch.cuda.empty_cache()  # does nothing without a GPU
            if self.tokens < before:
                self.halved += 1
                warnings.warn(f"Out of memory: from here on batches of at most {self.tokens} tokens.")
            torch.set_rng_state(states[0])
            torch.cuda.set_rng_state_all(states[1])

    def shrink(self, why):
        """Set the budget for the next attempt, or raise MemoryError. (Overridden in scale/lockstep.py, where
        several processes agree on one.)"""
        self.note_failure()
        if self.single_failures > 1:
            raise MemoryError(f"{self.in_work.name} does not fit into memory") from why

    def note_failure(self):
        """The batch in work did not fit: the budget is now half of its tokens. But a single item cannot be
        halved: the budget stays, and one more of `single_failures` is counted."""
        if self.in_work.items > 1:
            self.tokens = self.in_work.tokens // 2
        else:
            self.single_failures += 1


def random_states():
    """The random states of the CPU and of all GPUs."""
    return torch.get_rng_state(), (torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])
