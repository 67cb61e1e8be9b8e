"""Float32 masters: any optimiser of torch, for weights in bfloat16.

They may be in the host's memory (train.py --optimizer-device cpu).

Why masters? A bfloat16 number has 8 significant bits. Around 0.02, the size of a language model's
weights, neighbouring numbers are 1.2e-4 apart, but an AdamW step at the paper's learning rate is
1e-6: the sum would be rounded back to the old weight at every step. So the step moves a float32
master, and the model computes with its rounding:

    g       = gradient in float32
    m, v    = AdamW's two moments, float32
    master -= lr * m̂ / (√v̂ + ε)
    weight  = round(master)

That is 12 bytes a weight beside 4 for the bfloat16 weight and its gradient. Where the card has no
room for them, they are on the host; then one weight at a time crosses, 2 bytes each way.
(fully_shard's CPUOffloadPolicy would keep the gradients in float32 on the host, too: 122 GB for a
7B, where this takes 91.) A float32 weight on its own device is its own master.

Each weight has an optimiser of its own, so only one gradient at a time is in float32.
"""

from math import prod

import torch
from torch.distributed.tensor import DTensor


class Masters:
    """An optimiser for {name: weight}, or for this rank's parts of them (scale/sharded.py).

        adamw = partial(torch.optim.AdamW, lr=1e-6, weight_decay=0.0, fused=True)
        optimizer = Masters(dict(model.named_parameters()), adamw)

    make([master]) returns an optimiser of torch for one master. With several ranks it sees only its
    part of a weight, as a matrix of fewer rows: right for AdamW, SGD and Lion, not for optimisers
    that factor matrices (Adafactor, Muon). device: where masters and moments are; None: beside the
    weights. If you change weights yourself, copy them into `masters`, too: the next step overwrites
    each bfloat16 weight from its master."""

    @torch.no_grad()
    def __init__(self, weights, make, device=None):
        self.weights, self.make = weights, make
        self.masters, self.optimizers = {}, {}
        for name, weight in weights.items():
            part = on_this_rank(weight)
            wide = torch.promote_types(part.dtype, torch.float32)
            self.masters[name] = part.detach().to(device or part.device, wide)
            self.optimizers[name] = make([self.masters[name]])
        self.buffers = {}  # {(dtype, device): as long as the largest weight}

    @property
    def param_groups(self):
        """The settings of all optimisers, as [{"lr": ...}]: for learning-rate schedules."""
        return [group for each in self.optimizers.values() for group in each.param_groups]

    @torch.no_grad()
    def step(self):
        for name, weight in self.weights.items():
            if weight.grad is None:
                continue
            master, part, gradient = self.masters[name], *map(on_this_rank, (weight, weight.grad))
            crosses = self.crosses(name)
            if crosses:
                gradient = self.buffer(part, master.device).copy_(gradient)
            if gradient.dtype != master.dtype:
                gradient = self.buffer(master, master.device).copy_(gradient)
            master.grad = gradient
            self.optimizers[name].step()
            master.grad = None
            if crosses:
                master = self.buffer(part, master.device).copy_(master)
            if not self.is_own(name):
                part.copy_(master)

    def buffer(self, like, device):
        """A tensor of this shape and dtype: the same memory again in each step."""
        key = like.dtype, device
        if key not in self.buffers:
            pinned = device.type == "cpu" and torch.cuda.is_available()
            longest = max(map(torch.numel, self.masters.values()))
            settings = dict(dtype=like.dtype, device=device, pin_memory=pinned)
            self.buffers[key] = torch.empty(longest, **settings)
        return self.buffers[key][: like.numel()].view_as(like)

    # ------------------------------------------------------------------------- for checkpoints
    def state_dict(self):
        """{name: {"step": ..., "exp_avg": ..., "master": ...}}; {} if it has had no gradient. (A
        float32 weight on its own device has no master but itself.)"""
        found = {}
        for name, master in self.masters.items():
            found[name] = self.optimizers[name].state.get(master, {})
            # a weight without a gradient has no state yet; plain SGD never has any
            if not self.is_own(name) and (found[name] or self.kinds_of(name).keys() == {"master"}):
                found[name] = found[name] | {"master": master}
        return found

    def size(self):
        """The bytes of state_dict() after a step."""
        kinds = [kind for name in self.masters for kind in self.kinds_of(name).values()]
        return sum(prod(shape) * dtype.itemsize for dtype, shape in kinds)

    def load_state_dict(self, saved):
        """Take masters and moments back, exactly, out of `saved`, which may be as large as memory.
        ValueError if they are another model's: a fused step would write beyond a moment that is
        too short."""
        if other := saved.keys() ^ self.weights.keys():
            raise ValueError(f"only one of both has the weight {min(other)}")
        for name in self.weights:
            state = saved.pop(name)
            if not state:
                continue
            master, wanted = self.masters[name], self.kinds_of(name)
            kinds = {key: (value.dtype, value.shape) for key, value in state.items()}
            if kinds != wanted:
                raise ValueError(f"the moments of {name} are {kinds}, not {wanted}")
            master.copy_(state.get("master", master))
            self.optimizers[name].state[master] = {
                # contiguous: the elements of a foreign tensor may share their memory. A copy: they
                # may be in a file
                key: value.contiguous().to(master.device, copy=True)
                for key, value in state.items()
                if key != "master"
            }

    def kinds_of(self, name):
        """{"exp_avg": (dtype, shape), ...}: a weight's state as a first step would make it. It is
        tried on a smaller tensor."""
        master = self.masters[name]
        tiny = torch.zeros([2] * master.ndim, dtype=master.dtype, device=master.device)
        tiny.grad = torch.zeros_like(tiny)
        optimizer = self.make([tiny])
        optimizer.step()

        def shape(value):  # where it is as long as the smaller tensor, it is as long as the weight
            if value.ndim < master.ndim:
                return value.shape
            pairs = zip(value.shape, master.shape, strict=True)
            return torch.Size(whole if n == 2 else n for n, whole in pairs)

        state = optimizer.state[tiny]
        kinds = {key: (value.dtype, shape(value)) for key, value in state.items()}
        return kinds | ({} if self.is_own(name) else {"master": (master.dtype, master.shape)})

    def crosses(self, name):
        """Is this weight's master on another device?"""
        return self.masters[name].device != on_this_rank(self.weights[name]).device

    def is_own(self, name):
        """Is this weight its own master? (Their addresses would not say: parts of a sharded weight
        may be empty.)"""
        return not self.crosses(name) and self.masters[name].dtype == self.weights[name].dtype


def on_this_rank(tensor):
    """This rank's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
