"""How many threads torch computes with on a CPU, where OMP_NUM_THREADS does not say; and in which dtype.

Left alone, torch takes every core. Where other programs compute, that is a trap: the threads of a product
wait for each other, and on two busy cores two threads were 20 times as slow as one. For a small model they do
not pay on a quiet machine either. So one thread is the default, and all cores are taken if they are clearly
faster now, in matrix products of the model's size. This takes a fifth of a second.

bfloat16 is another trap: a CPU that has instructions for it takes half the time of float32, one that has not
takes up to 27 times as long; fast/upcast.py mends most of that. Here, too, a product decides, and not the
name of the CPU.
"""
import os
import statistics
import time

import torch

from fast import upcast
from models.local import HF

TOKENS = 128  # of a product: about one decoding step of a training's rollouts; fewer for a large model
FASTER = 1.3  # all cores, or bfloat16, must be so many times as fast: a little is not worth their price
REPEATS, SECONDS = 5, 0.2  # of a measurement, at most; one repeat may be longer


def choose(engine, number=None):
    """Set torch's number of threads; return the line "threads ...", or "" on a GPU and for a server.

    number: of the run that is resumed. Another number could change the last bits of its results. It counts
    only if the user has not chosen, and if there are so many cores here. A model in half precision gets a
    second line, "dtype ...": the user, the memory or the run that is resumed has chosen that.
    """
    if not isinstance(engine, HF) or engine.model.device.type != "cpu":
        return ""
    model, cores = engine.model, torch.get_num_threads()
    size = model.config.get_text_config().hidden_size
    if {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ):
        number, why = cores, "by OMP_NUM_THREADS or MKL_NUM_THREADS"
    elif number and number <= cores:
        why = "as when the run began"
    else:
        number, why = faster(cores, lambda threads: products(threads, size, model.dtype))
    torch.set_num_threads(number)
    line = f"threads {number} of {cores}: {why}"
    if model.dtype.itemsize < 4:
        line += f"\ndtype   {slowness(model.dtype, number, size)[1]}"
        line += ", so linear layers compute in float32" * upcast.in_float32(model)
    return line


def pick_cpu_dtype(threads, size):
    """("bfloat16" or "float32", why): bfloat16 if it is clearly faster on this CPU."""
    slower, why = slowness(torch.bfloat16, threads, size)
    return "bfloat16" if 1 / slower >= FASTER else "float32", why


def slowness(dtype, threads, size):
    """(how many times as long as float32 this dtype takes for a product, the same as a sentence)."""
    one, other = medians(lambda kind: products(threads, size, kind, 1), (torch.float32, dtype))
    name = str(dtype).removeprefix("torch.")
    return other / one, f"{name} takes {other / one:.1f} times as long as float32 here"


def faster(cores, seconds_of):
    """(1 or cores, why). seconds_of(threads) measures once."""
    if cores == 1:
        return 1, "there is one core"
    one, all_cores = medians(seconds_of, (1, cores))
    why = f"{cores} compute {one / all_cores:.2f} times as fast as 1 now (OMP_NUM_THREADS chooses)"
    return cores if one / all_cores >= FASTER else 1, why


def medians(seconds_of, choices):
    """The median of seconds_of(choice) for each choice; they take turns, and so meet the same load."""
    times, start = [], time.perf_counter()
    while not times or len(times) < REPEATS and time.perf_counter() - start < SECONDS:
        times.append([seconds_of(choice) for choice in choices])
    return [statistics.median(column) for column in zip(*times)]


@torch.no_grad()
def products(threads, size, dtype, mlps=4):
    """The seconds of a few MLPs: two products each. They draw no random number."""
    torch.set_num_threads(threads)
    tokens = max(1, min(TOKENS, 2**24 // size**2))
    x, up = torch.ones(tokens, size, dtype=dtype), torch.ones(size, 4 * size, dtype=dtype)
    start = time.perf_counter()
    for _ in range(mlps):
        torch.nn.functional.silu(x @ up) @ up.T
    return time.perf_counter() - start
