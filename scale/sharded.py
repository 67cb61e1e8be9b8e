"""Several GPUs: torchrun starts the processes (ranks), torch.distributed connects them.

    torchrun --nproc-per-node 8 train.py --model Qwen/Qwen2.5-7B-Instruct ...

Each rank has a GPU. It rolls out its share of a step's questions, and then gets the rollouts of
all. flow_grpo.update(ranks=sharded) divides each mini-batch among the ranks and sums their
gradients, so the objective is that of the joint batch.

torch's fully_shard (FSDP2) spreads the policy's weights, gradients and optimizer over the ranks.
They are whole during the rollouts, because ranks finish at different times and generate() must run
on each alone:

    gather(model)     whole weights, for the rollouts of a step
    release(model)    parts again, gathered a layer at a time, for the update

The ranks go through an update in lock-step, because every layer of every micro-batch is gathered
from all of them: so all have the same number of micro-batches, and those of a rank that has nothing
left are filled up with an action of weight 0. What must be whole in the rollouts anyway is not
sharded: the frozen copy; with adapters, all weights.

All machines must see the run's folder. If a rank ends, torchrun ends the others, and names the
rank. After Ctrl-C it waits 30 seconds while the ranks finish their step and save: a step of a real
model takes longer, so give torchrun `--shutdown-timeout 3600`.
"""

import atexit
import datetime
import itertools
import os
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from fast import trees
from models.local import MicroBatch, without_head

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # of torchrun


def start(device=None):
    """Join the other ranks and return this rank's device ("cuda:3"); alone, `device` unchanged."""
    if WORLD == 1:
        return device
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        backend, device = "cpu:gloo,cuda:nccl", f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(torch.device(device))
    # how long a rank waits for the others: longer than the slowest rollouts of a step take
    timeout = datetime.timedelta(hours=1)
    store, *_ = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(os.environ.get("GROUP", "first"), store)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=RANK, world_size=WORLD)
    # a thread of gloo's that drops the last call's tensors while Python ends aborts the process
    atexit.register(time.sleep, 1)
    return device if backend != "gloo" else "cpu"


def stop():
    """Leave the group at the end of a run.

    train.py --rehearse lets another process take this one's place. It must not read the addresses
    that are left in torchrun's store."""
    if WORLD > 1:
        dist.destroy_process_group()
        os.environ["GROUP"] = "second"


def wait():
    """Wait for all ranks: none goes on before rank 0 has saved."""
    exchanged(None)


def any_rank(flag):
    """Is the flag set on any rank? For decisions on which all must agree, else they hang."""
    return max(exchanged(bool(flag)))


def exchanged(item):
    """[the item of each rank]"""
    if WORLD == 1:
        return [item]
    items = [None] * WORLD
    dist.all_gather_object(items, item)
    return items


def own(items):
    """This rank's part of a list."""
    return items[RANK::WORLD]


def together(results, copies):
    """The results of all ranks, in the order of the items that own() has divided, on all ranks.

    results: of this rank's part, `copies` for each item, one after the other."""
    parts = exchanged(results)
    groups = [[part[i : i + copies] for i in range(0, len(part), copies)] for part in parts]
    in_order = itertools.zip_longest(*groups, fillvalue=[])
    return [result for some in in_order for group in some for result in group]


# ------------------------------------------------------------------------------ sharded weights
def shard(model):
    """Spread the model's weights over the ranks."""
    trees.are_right(model)  # tried and remembered: a sharded model computes with all ranks only
    with without_head(model):
        pass
    mesh = init_device_mesh(model.device.type, (WORLD,))
    precise = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    for module in [*layers, model]:  # the model itself: what is in no layer, such as the embeddings
        fully_shard(module, mesh=mesh, mp_policy=precise)
        module.set_gradient_divide_factor(1.0)  # summed: token_weight() has all means
        module.set_force_sum_reduction_for_comms(True)
    with torch.no_grad():  # the first call finds the root
        model(torch.zeros(1, 1, dtype=torch.long, device=model.device))
    release(model)


def gather(model):
    """Whole weights from here on; model(...) no longer communicates."""
    for module in shards(model):
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()


def release(model):
    """This rank's parts from here on; model(...) gathers a layer at a time, on all ranks."""
    for module in shards(model):
        # The root stays gathered after its forward pass: token_logps() calls the head behind it.
        module.set_reshard_after_forward(module is not model, recurse=False)
        module.reshard()


def shards(model):
    """The parts that are gathered one at a time; none if the weights are whole on all ranks."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def divided(states, weights):
    """This rank's optimiser state, from the states that another number of ranks has saved.

    A rank has some rows of a sharded weight, of its moments and of its master."""

    def own_rows(name, key):
        parts, weight = [state[name][key] for state in states], weights.get(name)
        if weight is None or not parts[0].ndim:  # another model's; the number of steps
            return parts[0]
        whole = parts[0] if parts[0].shape == weight.shape else torch.cat(parts)
        if not isinstance(weight, DTensor):  # each rank has all of it
            return whole
        rows = -(-len(whole) // WORLD)
        return whole[RANK * rows :][:rows].clone()

    return {name: {key: own_rows(name, key) for key in states[0][name]} for name in states[0]}


# ------------------------------------------------------------------- what flow_grpo.update() needs
def own_actions(actions):
    """This rank's part of a mini-batch: whole rollouts, neighbours, because they share prompts."""
    rollouts = list(dict.fromkeys(action.rollout for action in actions))
    n = len(rollouts)
    some = {*rollouts[n * RANK // WORLD : n * (RANK + 1) // WORLD]}
    return [action for action in actions if action.rollout in some]


def even(batches):
    """As many micro-batches as the rank with the most: the others are filled up, with weight 0.

    The filler is a copy of an action that some rank has sampled. Under an edited distribution()
    any other may be impossible, and log 0 makes every gradient nan, even with weight 0."""
    last = batches[-1].actions[-1] if batches else None  # one of the shortest
    item = len(batches), last and replace(last, A=0.0, weight=0.0, logp_old=None)
    counts, sampled = zip(*exchanged(item), strict=True)
    missing = max(counts) - len(batches)
    if not missing:
        return batches
    nothing = next(filter(None, sampled))
    nothing.logp_old = torch.zeros(len(nothing.ids))
    x = torch.tensor([nothing.prompt_ids + nothing.ids[:-1]])
    place = torch.arange(len(nothing.prompt_ids) - 1, x.shape[1])
    return batches + [MicroBatch([nothing], x, place, {})] * missing


def sum_gradients(model, sums):
    """Sum the gradients over the ranks, and the sums for the log. fully_shard has summed those of
    sharded weights. A weight without a gradient here may have one elsewhere."""
    for weight in [] if shards(model) else model.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad)
    for value in sums.values():
        dist.all_reduce(value)
