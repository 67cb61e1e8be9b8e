"""Training on several GPUs or machines, through torchrun and torch.distributed.

    torchrun --nproc-per-node 8 train.py --model Qwen/Qwen2.5-7B-Instruct ...

Each process (rank) holds the whole policy and rolls out its share of a step's questions; a group never
spans ranks. flow_grpo.update() sums counts and gradients over the ranks, so the objective is that of the
joint batch. The optimizer's float32 state, the largest part of the memory, is sharded
(ZeroRedundancyOptimizer). With one process all of this does nothing, and torch.distributed is not started.

The run's folder must be one that all machines see. Saving gathers the optimizer's state on the host of rank
0. torchrun kills 30 seconds after a SIGTERM: a step that takes longer is not saved, and is repeated.

Why not torch's fully_shard (FSDP2)? bench/sharding.py compares the two on two CPU processes, with 14 million
weights (medians of two runs on busy cores). fully_shard holds less, 115 MB a process where ranks.py holds
144, and its code is ten lines shorter. But generate() gathers each layer for each token: 3.5 and 4.7 s, where
ranks.py takes 2.2; and all ranks must generate in lock-step, although their rollouts end at different times.
If all layers are gathered before generate(), it takes 2.6 and 3.0 s, and the weights are whole, as they are
in ranks.py. Rollouts are most of a step, so ranks.py stays. One process would need MasterAdamW even with
fully_shard: two optimizers, and a checkpoint format for each. fully_shard is right for a model whose weights
one GPU cannot hold.
"""
import datetime
import os
import sys

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them
HOSTS = None  # a gloo group of all ranks for tensors on the host; None: the default group, which is gloo


def start(device=None, minutes=60):
    """Join the other ranks and return this rank's device ("cuda:3"); with one process, `device` unchanged.

    If a rank dies, the next sum fails on the others, or torchrun ends them. A rank waits for the others at
    most `minutes`, which must be longer than the slowest rollouts of a step take."""
    global HOSTS
    if WORLD == 1:
        return device
    timeout, local = datetime.timedelta(minutes=minutes), int(os.environ["LOCAL_RANK"])
    if device == "cpu" or not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return "cpu"
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", timeout=timeout)
    HOSTS = dist.new_group(backend="gloo", timeout=timeout)
    return f"cuda:{local}"


def stop():
    """Leave the group and, with several processes, end this one at once: threads of the group that are still
    alive when Python shuts down have been seen, once, to abort a finished rank."""
    if WORLD > 1 and dist.is_initialized():
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def add_up(tensor):
    """The sum over the ranks, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor)


def add_up_gradients(weights):
    """Sum all gradients over the ranks. A weight without a gradient on this rank may have one elsewhere."""
    for weight in weights if WORLD > 1 else ():
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        add_up(weight.grad)


def share(items):
    """This rank's part of a list; together() joins the parts again."""
    return items[RANK::WORLD]


def together(part, number):
    """The whole list of `number` items, on all ranks; each rank gives its share() as `part`."""
    if WORLD == 1:
        return part
    parts, whole = [None] * WORLD, [None] * number
    dist.all_gather_object(parts, part)
    for rank, items in enumerate(parts):
        whole[rank::WORLD] = items
    return whole


def any_rank(flag):
    """Is the flag set on any rank? For decisions that all ranks must make alike, or they would hang."""
    return any(together([bool(flag)], WORLD))


def sharded(optimizer, params, **settings):
    """optimizer(params, **settings), its state sharded over the ranks."""
    if WORLD == 1:
        return optimizer(params, **settings)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # this import takes a second
    return ZeroRedundancyOptimizer(list(params), optimizer_class=optimizer, **settings)


def state_of(optimizer):
    """The optimizer's whole state on the host of rank 0, as one process has it; None on the other ranks.

    ZeroRedundancyOptimizer.consolidate_state_dict() would send the state through the GPUs, which have no room
    for it (91 GB for a 7B). Here it goes from host to host, tensor by tensor."""
    if WORLD == 1:
        return optimizer.state_dict()
    weights, part, whole = optimizer.param_groups[0]["params"], optimizer.optim.state, {}
    local = [(i, name, value.shape, value.dtype)
             for i, weight in enumerate(weights) for name, value in part.get(weight, {}).items()]
    for rank, tensors in enumerate(together([local], WORLD)):
        for i, name, shape, dtype in tensors if RANK in (0, rank) else ():
            value = part[weights[i]][name].cpu() if rank == RANK else torch.empty(shape, dtype=dtype)
            if rank != 0:
                dist.send(value, 0, group=HOSTS) if rank == RANK else dist.recv(value, rank, group=HOSTS)
            if RANK == 0:
                whole.setdefault(i, {})[name] = value
    groups = [optimizer.optim.param_groups[0] | {"params": list(range(len(weights)))}]
    return {"state": whole, "param_groups": groups} if RANK == 0 else None


def load(optimizer, state):
    """Load what state_of() returned, at any number of ranks: each takes the state of its weights."""
    if WORLD == 1:
        return optimizer.load_state_dict(state)
    number_of = {weight: i for i, weight in enumerate(optimizer.param_groups[0]["params"])}
    numbers = [number_of[weight] for weight in optimizer.optim.param_groups[0]["params"]]  # of this rank's
    part = {k: state["state"][i] for k, i in enumerate(numbers) if i in state["state"]}
    settings = state["param_groups"][0] | {"params": list(range(len(numbers)))}
    optimizer.optim.load_state_dict({"state": part, "param_groups": [settings]})
    optimizer.param_groups[0].update({name: value for name, value in settings.items() if name != "params"})


def wait():
    """Wait for all ranks: nobody goes on before rank 0 has saved."""
    if WORLD > 1:
        dist.barrier()
