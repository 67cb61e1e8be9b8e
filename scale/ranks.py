"""Several processes that train one model: torchrun starts them, torch.distributed connects them.

    torchrun --nproc-per-node 8 train.py --model Qwen/Qwen2.5-7B-Instruct ...

Each process (rank) has a GPU. It rolls out its share of a step's questions, and then gets the rollouts of
all. flow_grpo.update() divides each mini-batch among the ranks and sums their gradients, so the objective is
that of the joint batch. How the weights are spread over the ranks: sharding.py. With one process all
functions here do nothing.

All machines must see the run's folder. If a rank ends, torchrun ends the others, and names the rank.
torchrun kills 30 seconds after a SIGTERM: a step that takes longer is not saved, and is repeated.
"""
import datetime
import os
import sys

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them
SHORT = 2  # what a rank that has run out of memory tells the others


class Elsewhere(MemoryError):
    """Another rank has run out of memory."""


def start(device=None, minutes=60):
    """Join the other ranks and return this rank's device ("cuda:3"); with one process, `device` unchanged.

    A rank waits for the others at most `minutes`, which must be longer than the slowest rollouts of a step
    take."""
    if WORLD == 1:
        return device
    timeout = datetime.timedelta(minutes=minutes)
    if device == "cpu" or not torch.cuda.is_available():
        device = "cpu"
        dist.init_process_group("gloo", timeout=timeout)
    else:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(torch.device(device))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
    return device


def stop():
    """Leave the group and, with several processes, end this one at once: once, threads of the group that were
    still alive when Python shut down have aborted a finished rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if WORLD > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def add_up(tensor):
    """The sum over the ranks, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor)


def largest(number):
    """The largest of the ranks' integers. It goes from host to host: no GPU waits for it."""
    if WORLD == 1:
        return number
    numbers = torch.tensor([int(number)])
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.item()


def any_rank(flag):
    """True if the flag is set on any rank. For decisions on which all ranks must agree, else they hang."""
    return bool(largest(bool(flag)))


def any_left(left):
    """Has any rank a micro-batch left? Elsewhere if one has run out of memory: it gives SHORT in place of its
    own next answer, wherever the others are (lockstep.py)."""
    state = largest(left)
    if state == SHORT:
        raise Elsewhere("another process ran out of memory")
    return bool(state)


def check():
    """Elsewhere if a rank has run out of memory since the last collective."""
    any_left(False)


def wait():
    """Wait for all ranks: none continues before rank 0 has saved."""
    largest(0)


def share(items):
    """This rank's part of a list; together() joins the parts again."""
    return items[RANK::WORLD]


def joined(results, copies, number):
    """The results of all ranks, in the order of the items that share() has divided.

    results: of this rank's share, `copies` for each item, one after the other. number: of all items."""
    by_item = [results[i : i + copies] for i in range(0, len(results), copies)]
    return [result for part in together(by_item, number) for result in part]


def together(part, number):
    """The whole list of `number` items, on all ranks; each rank gives its share() as `part`."""
    if WORLD == 1:
        return part
    parts, whole = [None] * WORLD, [None] * number
    dist.all_gather_object(parts, part)
    for rank, items in enumerate(parts):
        whole[rank::WORLD] = items
    return whole
