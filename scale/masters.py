"""AdamW whose float32 masters and moments are in the host's memory: train.py --optimizer-device cpu.

For a card without room for the optimizer's 12 bytes a weight. The card has the weights and gradients in
bfloat16, 4 bytes a weight; the host has

    g       = gradient in float32
    m, v    = AdamW's two moments, float32
    master -= lr * ( m̂ / (√v̂ + ε) + weight_decay * master )
    weight  = round(master)                                     on the card

one weight at a time, because all gradients of a 7B in float32 would take 30 GB. Why masters: sharding.py.

Why not fully_shard's CPUOffloadPolicy? It keeps the gradients in float32 on the host, too: 16 bytes a weight,
122 GB for a 7B, where this takes 91. And it sends the weights to the card in every forward and backward pass
of every micro-batch, 30 GB each time for a 7B; here they stay on the card, and 15 GB go each way once a step.
"""
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw


class HostAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW on float32 masters of the weights, or of this rank's parts of them.

    After its first gradient a weight has optimizer.state[weight] = {"step", "exp_avg", "exp_avg_sq",
    "master"}, all in float32 (float64 for a float64 weight). If you change the weights yourself, clear
    optimizer.state: the next step would overwrite each weight from its master.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.move(weight, group)

    def move(self, weight, group):
        """AdamW on the master of one weight, then round the master into the weight."""
        state = self.state[weight] or self.begin(weight)
        master, m, v = (local(state[name]) for name in ("master", "exp_avg", "exp_avg_sq"))
        gradient = on_host(local(weight.grad), weight.grad.dtype)
        adamw(  # fused: three times as fast on a host, and equal except for the last bit
            [master], [gradient.to(master.dtype)], [m], [v], [], [state["step"]], lr=group["lr"],
            beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            weight_decay=group["weight_decay"], amsgrad=False, maximize=False, fused=True)
        local(weight).copy_(on_host(master, weight.dtype, local(weight).is_cuda))

    def begin(self, weight):
        """The state of a weight before its first step."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        master = local(weight).detach().to("cpu", wide, copy=True)
        self.state[weight] = {
            "step": torch.tensor(0.0), "master": sharded_like(weight, master),
            "exp_avg": sharded_like(weight, torch.zeros_like(master)),
            "exp_avg_sq": sharded_like(weight, torch.zeros_like(master))}
        return self.state[weight]


def local(tensor):
    """This rank's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(weight, part):
    """The part on the host as a sharded tensor, if the weight is one: so a checkpoint knows its place."""
    if not isinstance(weight, DTensor):
        return part
    hosts = init_device_mesh("cpu", weight.device_mesh.shape)
    return DTensor.from_local(part, hosts, weight.placements, run_check=False, shape=weight.shape,
                              stride=weight.stride())


def on_host(tensor, dtype, pinned=None):
    """A copy in the host's memory, on its way from or to a GPU. It is pinned, which makes copying faster.

    Only gradients and rounded weights are copied, 2 bytes a weight each way, one tensor at a time. Masters
    and moments stay on the host, not pinned: torch rounds pinned memory up to powers of two, so the 91 GB of
    a 7B would take 174. Copies and arithmetic take turns. For a 7B, 15 GB each way take about a second
    (estimated), and the arithmetic 45 s on one core (6 ns a weight, measured), less on several cores.
    """
    pinned = tensor.is_cuda if pinned is None else pinned
    return torch.empty(tensor.shape, dtype=dtype, pin_memory=pinned).copy_(tensor)
