"""How many threads torch computes with on a CPU, where OMP_NUM_THREADS does not say.

Left alone, torch takes every core. Where other programs compute, that is a trap: the threads of a product
wait for each other, and on two busy cores two threads were 20 times as slow as one. For a small model they do
not pay on a quiet machine either. So one thread is the default, and all cores are taken if they are clearly
faster now, in matrix products of the model's size. This takes a fifth of a second.
"""
import os
import statistics
import time

import torch

from models.local import HF

TOKENS = 128  # of a product: about one decoding step of a training's rollouts; fewer for a large model
FASTER = 1.3  # all cores must be so many times as fast as one: a little faster is not worth their time
REPEATS, SECONDS = 5, 0.2  # of a measurement, at most; one repeat may be longer


def choose(engine, number=None):
    """Set torch's number of threads; return the line "threads ...", or "" on a GPU and for a server.

    number: of the run that is resumed. Another number could change the last bits of its results. It counts
    only if the user has not chosen, and if there are so many cores here.
    """
    if not isinstance(engine, HF) or engine.model.device.type != "cpu":
        return ""
    model, cores = engine.model, torch.get_num_threads()
    if {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ):
        number, why = cores, "by OMP_NUM_THREADS or MKL_NUM_THREADS"
    elif number and number <= cores:
        why = "as when the run began"
    else:
        size = model.config.get_text_config().hidden_size
        number, why = faster(cores, lambda threads: products(threads, size, model.dtype))
    torch.set_num_threads(number)
    return f"threads {number} of {cores}: {why}"


def faster(cores, seconds_of):
    """(1 or cores, why). seconds_of(threads) measures once; they take turns, and so meet the same load."""
    times, start = [], time.perf_counter()
    while len(times) < REPEATS and time.perf_counter() - start < SECONDS and cores > 1:
        times.append((seconds_of(1), seconds_of(cores)))
    if not times:
        return 1, "there is one core"
    one, all_cores = (statistics.median(column) for column in zip(*times))
    why = f"{cores} compute {one / all_cores:.2f} times as fast as 1 now (OMP_NUM_THREADS chooses)"
    return cores if one / all_cores >= FASTER else 1, why


@torch.no_grad()
def products(threads, size, dtype):
    """The seconds of a few MLPs: two products each. They draw no random number."""
    torch.set_num_threads(threads)
    tokens = max(1, min(TOKENS, 2**24 // size**2))
    x, up = torch.ones(tokens, size, dtype=dtype), torch.ones(size, 4 * size, dtype=dtype)
    start = time.perf_counter()
    for _ in range(4):
        torch.nn.functional.silu(x @ up) @ up.T
    return time.perf_counter() - start
