"""scale.batches"""

import warnings

import torch


def batches(lengths, max_new_tokens, budget):
    """Indices in sub-batches of similar length, the longest first: rows x (longest prompt + max_new_tokens) <= budget.

    >>> batches([3, 9, 4], max_new_tokens=1, budget=10)
    [[1], [2, 0]]

    A row longer than the budget goes alone. The largest comes first, so memory that does not suffice is known at once.
    """
    groups = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (len(groups[-1]) + 1) * (lengths[groups[-1][0]] + max_new_tokens) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
CHUNK = 2**26       # logits that exist in float32 at a time: 256 MiB, 441 action tokens of a vocabulary of 152k
TO_FIT = "--gradient-checkpointing, --optimizer-device cpu, --lora 32 or a smaller --max-new-tokens"


def size(action):
    return len(action.prompt_ids) + len(action.ids)


def micro_batches(actions, token_budget):
    """Actions sorted by length and cut so that rows x longest row <= token_budget (one longer action goes alone).

    Sorting leaves about 5 % of the slots to padding; the budget bounds the memory whatever the data. The longest come first:
    if memory is short, that shows at once.
    """
    batches = []
    for a in sorted(actions, key=size, reverse=True):
        if batches and (len(batches[-1]) + 1) * size(batches[-1][0]) <= token_budget:
            batches[-1].append(a)
        else:
            batches.append([a])
    return batches


def short_of_memory(error):
    """Is this RuntimeError one of memory? A GPU's has a class of its own, a CPU's (fit.bound_host_memory) a text."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def in_memory(work, actions, token_budget, begin=lambda: None):
    """begin(), then work(batch) for each micro-batch: the results, the budget that was enough, and how often it was halved.

    Out of memory: all of it again, in micro-batches of half the size. A backward pass that failed half-way has added a part of
    its gradient to what was there, and nobody knows which part; from zero, the sum is exact. No other process notices, since
    nothing is summed up in here. What fails with one action alone cannot be cut: MemoryError says what to change.
    """
    halved = 0
    while True:
        begin()
        batches, done = micro_batches(actions, token_budget), []
        try:
            for batch in batches:
                done.append(work(batch))
            return done, token_budget, halved
        except RuntimeError as why:
            if not short_of_memory(why):
                raise
            if len(batch) == 1:
                raise MemoryError(f"One turn of {len(batch[0].prompt_ids)} + {len(batch[0].ids)} tokens does not fit into memory: "
                                  f"give {TO_FIT}") from why
        # Here, and not above: as long as the exception lives, its traceback holds the tensors of the failed attempt.
        torch.cuda.empty_cache()                                            # nothing happens without a GPU
        token_budget, halved = max(len(b) * size(b[0]) for b in batches if len(b) > 1) // 2, halved + 1
        warnings.warn(f"Out of memory in the update: it goes on with micro-batches of {token_budget} tokens. Next time: "
                      f"--token-budget {token_budget}.")
