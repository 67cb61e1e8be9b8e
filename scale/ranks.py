"""Parallel: the same training on several GPUs or machines, through torchrun and torch.distributed.

    torchrun --nproc-per-node 8 train.py --model Qwen/Qwen2.5-7B-Instruct ...

Each process (rank) holds the whole policy, so that generate() stays local and simple, and rolls out its share of a step's questions.
A group never spans ranks. flow_grpo.update() sums counts and gradients over the ranks, so the
objective is that of the joint batch, and the optimiser's float32 state, the largest part of the memory, is divided between them
(ZeroRedundancyOptimizer). With one process nothing here does anything, and nothing of torch.distributed is started.

What to know: the run's folder must be one that all machines see. Saving gathers the optimiser's state in the memory of rank 0's machine.
torchrun gives a SIGTERM 30 seconds, then kills: a longer step is not saved, and is done again.
"""
import datetime
import os

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them
HOSTS = None  # the ranks again, for what travels between the hosts' memories; None: as everything else (gloo)


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
    if cuda:
        global HOSTS
        HOSTS = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=minutes))
    return f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"


def stop():
    if WORLD > 1 and dist.is_initialized():
        dist.destroy_process_group()


def add_up(tensor):
    """The sum over the ranks, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor)


def add_up_gradients(weights):
    """The sums of all gradients over the ranks. A weight without a gradient on this rank may have one elsewhere."""
    for weight in weights if WORLD > 1 else ():
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        add_up(weight.grad)


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
    """The whole state of the optimiser, as one process would have it, in the host's memory of rank 0; None on the others.

    ZeroRedundancyOptimizer's own consolidate_state_dict() sends each rank's part through the GPUs of all, twice: of a 7B on two
    GPUs 91 GB, where there is no room. Here it goes from host to host, tensor by tensor."""
    if WORLD == 1:
        return optimizer.state_dict()
    weights, part = every_weight(optimizer), optimizer.optim.state
    mine = [(i, name, value.shape, value.dtype) for i, weight in enumerate(weights) for name, value in part.get(weight, {}).items()]
    found, whole = together([mine], WORLD), {}
    for rank, tensors in enumerate(found):
        for i, name, shape, dtype in tensors if RANK in (0, rank) else ():
            value = part[weights[i]][name].cpu() if rank == RANK else torch.empty(shape, dtype=dtype)
            if rank != 0:
                dist.send(value, 0, group=HOSTS) if rank == RANK else dist.recv(value, rank, group=HOSTS)
            if RANK == 0:
                whole.setdefault(i, {})[name] = value
    groups = [optimizer.optim.param_groups[0] | {"params": list(range(len(weights)))}]
    return {"state": whole, "param_groups": groups} if RANK == 0 else None


def load(optimizer, state):
    """Go on from state_of(); each rank takes its part, wherever its optimiser keeps it."""
    if WORLD == 1:
        return optimizer.load_state_dict(state)
    place = {weight: i for i, weight in enumerate(every_weight(optimizer))}
    mine = [place[weight] for weight in optimizer.optim.param_groups[0]["params"]]
    part = {k: state["state"][i] for k, i in enumerate(mine) if i in state["state"]}
    settings = state["param_groups"][0] | {"params": list(range(len(mine)))}
    optimizer.optim.load_state_dict({"state": part, "param_groups": [settings]})
    optimizer.param_groups[0].update({name: value for name, value in settings.items() if name != "params"})


def every_weight(optimizer):
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def wait():
    """Until all are here: the others go on when rank 0 has saved."""
    if WORLD > 1:
        dist.barrier()
