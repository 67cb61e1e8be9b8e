"""How many threads torch computes with on a CPU: one for a small model, else all cores (torch's default).

OMP_NUM_THREADS decides, if it is set. The threads of a product wait for each other. For the toy this hardly
pays on an idle machine, and on a busy one it is a trap: two threads on two busy cores were 5 times as slow as
one (docs/speed.md). The rule measures nothing, so the same command on the same machine always gives the same
numbers.
"""
import os

import torch

from models.local import HF

SMALL = 512  # hidden sizes below this one


def choose(engine):
    """Set torch's number of threads; return the line "threads ...", or "" if it stays as it is."""
    if not isinstance(engine, HF) or engine.model.device.type != "cpu":
        return ""
    chosen = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ)
    if chosen or engine.model.config.get_text_config().hidden_size >= SMALL:
        return ""
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    return f"threads 1 of {cores}: the model is small (OMP_NUM_THREADS chooses)"
