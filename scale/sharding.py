"""Models that outgrow a GPU: torch's fully_shard (FSDP2) spreads a model's weights over the ranks.

    shard(model)                    each rank keeps its part of every weight; trained ones as float32 masters
    optimizer = adamw(model, lr)    torch's AdamW on this rank's parts
    gather(model)                   whole weights in the model's dtype: for the rollouts of a step
    with released(model): ...       parts again, gathered a layer at a time: for the update

Why float32 masters? A bfloat16 number has 8 significant bits. Around 0.02, the size of a language model's
weights, neighbouring numbers are 1.2e-4 apart, but an AdamW step at the paper's learning rate is 1e-6: the
sum would be rounded back to the old weight at every step. So the step moves a float32 weight, and the model
computes with its rounding. With one process and float32 weights (a CPU, or adapters on any base) there is
nothing to spread and nothing to round: the model is not sharded. In all other cases, one GPU included, it
is. Whole weights exist only while they are gathered, so that generate() runs on each rank alone: ranks
finish their rollouts at different times.

The ranks must go through an update in lock-step, because every layer of every micro-batch is gathered from
all of them. A rank that has no micro-batch left computes one of weight 0 (lockstep.py). And if one
rank runs out of memory, wherever that happens, no other may wait for it in a collective: each collective
begins with a word between the hosts, check(), whether a rank has failed since the last one.

What must be whole in the rollouts anyway is not sharded, because the shard would need memory on top. So with
adapters the base and the adapters are whole on each rank, and add_up_gradients() sums the gradients. A frozen
copy that plays modules is whole, too; one that is only π_ref is sharded.
"""
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from scale import ranks
from scale.masters import HostAdamW


def shard(model, host=False):
    """Shard the model's weights, unless there is nothing to gain from it. host: the optimizer will keep the
    masters in the host's memory, so the parts stay in the model's dtype."""
    trained = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    alone = ranks.WORLD == 1 and (host or trained <= {torch.float32, torch.float64})
    if alone or hasattr(model, "peft_config"):
        return
    dtype = model.dtype
    model.computes_in = dtype
    policy = MixedPrecisionPolicy(dtype, torch.promote_types(dtype, torch.float32))
    if not dist.is_initialized():  # a single process needs a group, too
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)  # where the mesh puts the parts
    mesh = init_device_mesh(model.device.type, (ranks.WORLD,))
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in [*layers, model]:  # the model itself: what is in no layer, such as the embeddings
        for weight in module.parameters():
            if weight.requires_grad and not host:  # a layer at a time: the whole model twice might not fit
                weight.data = weight.data.to(policy.reduce_dtype)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        if ranks.WORLD > 1:
            module.set_gradient_divide_factor(1.0)  # gradients are summed; token_weight() has all means
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(AllGather())
            module.set_custom_reduce_scatter(ReduceScatter())
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long, device=model.device))  # the first call finds the root
    release(model)


def adamw(model, lr, host=False):
    """AdamW without weight decay for the trained weights of a model that shard() has seen."""
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if host:
        return HostAdamW(trained, lr=lr)
    # On a GPU torch would otherwise choose a loop that needs 4 bytes more for each weight.
    fused = trained[0][1].device.type == "cuda" or None
    return torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=fused)


def parts(model):
    """The modules that shard() has sharded."""
    modules = [] if model is None else model.modules()
    return [module for module in modules if isinstance(module, FSDPModule)]


def gather(*models):
    """Whole weights from here on; model(...) no longer communicates."""
    for module in [module for model in models for module in parts(model)]:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()


def release(*models):
    """This rank's parts from here on; model(...) gathers a layer at a time, on all ranks together."""
    for model in models:
        for module in parts(model):
            # fast/head.py reads the output layer's weight after the forward pass, so the root stays gathered.
            module.set_reshard_after_forward(module is not model, recurse=False)
            module.reshard()


@contextmanager
def released(*models):
    """release(), and gather() again. Not after an error: the other ranks may be elsewhere."""
    release(*models)
    yield
    gather(*models)


def add_up_gradients(weights):
    """Sum the gradients of whole weights over the ranks; fully_shard has summed those of sharded ones. A
    weight without a gradient on this rank may have one elsewhere."""
    for weight in weights if ranks.WORLD > 1 else ():
        if not isinstance(weight, DTensor):
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            ranks.add_up(weight.grad)


# ------------------------------------- collectives that begin only if no rank has run out of memory
class AllGather(DefaultAllGather):
    def __call__(self, *args, **settings):
        ranks.check()
        return super().__call__(*args, **settings)


class ReduceScatter(DefaultReduceScatter):
    def __call__(self, *args, **settings):
        ranks.check()
        return super().__call__(*args, **settings)


def recover(*models):
    """After an error in a forward or backward pass: sharded models are ready for the next one."""
    for model in models:
        if isinstance(model, FSDPModule):
            model.zero_grad()  # of the weights that were gathered when it failed
            model.reset_iter_state()
