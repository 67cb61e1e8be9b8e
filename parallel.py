"""Parallel: the same training on several GPUs or machines, through torchrun and torch.distributed.

    torchrun --nproc-per-node 8 train.py --model Qwen/Qwen2.5-7B-Instruct ...

Each process (rank) holds the whole policy, so that generate() stays local and simple, and rolls out its share of a step's questions.
A group never spans ranks. flow_grpo.update() sums counts and gradients over the ranks, so the
objective is that of the joint batch, and the optimiser's float32 state, the largest part of the memory, is divided between them
(ZeroRedundancyOptimizer). With one process nothing here does anything, and nothing of torch.distributed is started.

What to know: the run's folder must be one that all machines see. Saving gathers the optimiser's state on rank 0, through the GPUs, which
for a moment need twice a rank's share of it. torchrun gives a SIGTERM 30 seconds, then kills: a longer step is not saved, and is done again.
"""
import datetime
import os

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them


def start(device=None, minutes=60):
    """Join the other processes, and return this one's device ("cuda:3"); where there is but one process, the device as it was asked for.

    A rank that dies takes the others with it: their next sum fails, or torchrun ends them; none waits longer than `minutes`, which is
    more than the slowest rollout of a step may take."""
    if WORLD == 1:
        return device
    cuda = torch.cuda.is_available() and device != "cpu"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(minutes=minutes))
    return f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"


def stop():
    if WORLD > 1 and dist.is_initialized():
        dist.destroy_process_group()


def add_up(tensor):
    """The sum over the ranks, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor)


def share(items):
    """This rank's part of a list; together() of the parts is the list again."""
    return items[RANK::WORLD]


def together(part, number):
    """The list of `number` items whose share() each rank brings, on all ranks."""
    if WORLD == 1:
        return part
    parts = [None] * WORLD
    dist.all_gather_object(parts, part)
    whole = [None] * number
    for rank, items in enumerate(parts):
        whole[rank::WORLD] = items
    return whole


def any_rank(flag):
    """Has this been asked for on any rank? All must do the same, or one would wait for the others for ever."""
    votes = together([bool(flag)], WORLD)
    return any(votes)


def sharded(optimizer, params, **settings):
    """optimizer(params, **settings), its state divided between the ranks."""
    if WORLD == 1:
        return optimizer(params, **settings)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here: its import takes a second
    return ZeroRedundancyOptimizer(list(params), optimizer_class=optimizer, **settings)


def state_of(optimizer):
    """The whole state of the optimiser, on rank 0; None on the others."""
    if WORLD > 1:
        optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if RANK == 0 else None


def load(optimizer, state):
    """Go on from state_of(); each rank takes its part."""
    optimizer.load_state_dict(state)
    if WORLD > 1:
        optimizer.state.clear()  # a second copy of all that was loaded, which nothing reads


def wait():
    """Until all are here: the others go on when rank 0 has saved."""
    if WORLD > 1:
        dist.barrier()
