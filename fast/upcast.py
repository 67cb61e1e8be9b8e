"""torch's linear() for bfloat16 weights, computed in float32: for a CPU without instructions for bfloat16.

Measured on such a CPU: torch multiplies bfloat16 matrices 5 to 70 times slower than float32 ones.

    upcast(model)        # if this CPU is slow in bfloat16, each Linear computes in float32

The float32 weights of a 7B (30 GB) may not fit into the memory. So the weights stay bfloat16, and a product
converts BLOCK of them at a time. Its result, rounded to bfloat16, differs from torch's only by that rounding.
State dict, checkpoints and adapters see an ordinary Linear.
"""

import functools
import time

import torch
from torch.nn.functional import linear as torch_linear

BLOCK = 2**20  # weights that exist in float32 at a time: 4 MB, so they stay in the CPU's cache
FEW = 2  # rows: up to here torch's own forward pass is as fast, because reading the weights takes longest
SLOW = 2  # times the seconds of float32


def upcast(model):
    """The same model. Nothing changes where bfloat16 is fast, nor in a model of another dtype."""
    for module in model.modules() if in_float32(model) else ():
        if type(module) is torch.nn.Linear:
            module.__class__ = Upcast
    return model


@functools.cache
def slow():
    """Does bfloat16 take more than SLOW times as long as float32 on this CPU? Measured once, in 0.2 s."""
    def seconds(dtype):
        x, weight = torch.ones(64, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        start = time.perf_counter()
        torch_linear(x, weight)
        return time.perf_counter() - start

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other, in both types, if others use the CPU, too
    try:
        times = [(seconds(torch.float32), seconds(torch.bfloat16)) for _ in range(5)]
    finally:
        torch.set_num_threads(threads)
    wide, half = map(min, zip(*times))  # the least is what the CPU can do
    return half > SLOW * wide


class Upcast(torch.nn.Linear):
    def forward(self, x):
        return linear(x, self.weight, self.bias)


def linear(x, weight, bias=None):
    """torch's linear(); in float32 if the weight is bfloat16 and this CPU slow in it: (..., i) -> (..., o)"""
    few = x.numel() <= FEW * x.shape[-1] and not (torch.is_grad_enabled() and x.requires_grad)
    if few or not in_float32(weight):
        return torch_linear(x, weight, bias)
    return Product.apply(x, weight, bias)


def input_gradient(d_out, weight):
    """d_out @ weight, in float32 like linear(): (n, o), (o, i) -> (n, i)"""
    if not in_float32(weight):
        return d_out @ weight
    d_x = torch.zeros(len(d_out), weight.shape[1])  # float32, because it is a sum over the blocks
    for rows in blocks(weight):
        d_x.addmm_(d_out[:, rows].float(), weight[rows].float())
    return d_x.to(weight.dtype)


def in_float32(weight):
    """Do products with this weight, or with those of this model, compute in float32?"""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and slow()


def blocks(weight):
    """Slices of the weight's rows."""
    size = max(1, BLOCK // weight.shape[1])
    return [slice(start, start + size) for start in range(0, len(weight), size)]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # a frozen weight needs no x
        out = x.new_empty(x[..., 0].numel(), len(weight))
        wide = x.reshape(len(out), -1).float()
        for rows in blocks(weight):
            offset = None if bias is None else bias[rows].float()
            out[:, rows] = torch_linear(wide, weight[rows].float(), offset)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        (x, weight), shape, d_x, d_weight, d_bias = ctx.saved_tensors, d_out.shape[:-1], None, None, None
        d_out = d_out.reshape(-1, len(weight))
        if ctx.needs_input_grad[0]:
            d_x = input_gradient(d_out, weight).view(*shape, -1)
        if ctx.needs_input_grad[1]:
            d_weight, wide = torch.empty_like(weight), x.reshape(len(d_out), -1).float()
            for rows in blocks(weight):
                d_weight[rows] = (d_out[:, rows].float().t() @ wide).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            d_bias = d_out.float().sum(0).to(d_out.dtype)
        return d_x, d_weight, d_bias
