"""How many threads torch computes with on a CPU.

OMP_NUM_THREADS decides, if it is set. A resumed run takes as many as it began with, because another number
could change the last bits of its results. Otherwise a small model gets one thread, and a larger one gets all
cores, which is torch's default.

The threads of a product wait for each other. For the toy this hardly pays on an idle machine, and on a busy
one it is a trap: two threads on two busy cores were 5 times as slow as one (docs/speed.md). The rule measures
nothing, so the same command on the same machine always gives the same numbers.
"""
import os

import torch

from fast import upcast
from models.local import HF

SMALL = 512  # hidden sizes below this one


def choose(engine, number=None):
    """Set torch's number of threads; return the line "threads ...", or "" on a GPU and for a server.

    number: of the run that is resumed; it counts only if there are so many cores here. A bfloat16 model gets
    a second line if this CPU is slow in bfloat16.
    """
    if not isinstance(engine, HF) or engine.model.device.type != "cpu":
        return ""
    cores, size = torch.get_num_threads(), engine.model.config.get_text_config().hidden_size
    if {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ):
        number, why = cores, "by OMP_NUM_THREADS or MKL_NUM_THREADS"
    elif number and number <= cores:
        why = "as when the run began"
    else:
        number, why = (1, "the model is small") if size < SMALL else (cores, "all cores")
        why += " (OMP_NUM_THREADS chooses)"
    torch.set_num_threads(number)
    line = f"threads {number} of {cores}: {why}"
    if upcast.in_float32(engine.model):
        line += "\ndtype   bfloat16; this CPU is slow in it, so linear layers compute in float32"
    return line
