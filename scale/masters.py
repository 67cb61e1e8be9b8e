"""AdamW for weights in bfloat16: it moves float32 masters, which may be in the host's memory
(train.py --optimizer-device cpu).

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
"""

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw


class MasterAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW without weight decay, on float32 masters of the weights, or of this rank's
    parts of them (scale/sharded.py).

    device: where masters and moments are; None: beside the weights. After its first gradient a
    weight has optimizer.state[weight] = {"step", "exp_avg", "exp_avg_sq", "master"}. If you change
    the weights yourself, clear optimizer.state: the next step would overwrite each weight from its
    master."""

    def __init__(self, params, lr, device=None, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
        self.device = device

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.move(weight, group)

    def move(self, weight, group):
        part, gradient, state = local(weight), local(weight.grad), self.state[weight]
        if not state:
            wide = torch.promote_types(part.dtype, torch.float32)
            master = part.to(self.device or part.device, wide)
            state["step"] = torch.tensor(0.0, device=master.device)
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros_like(master),
                torch.zeros_like(master),
            )
            if master is not part:
                state["master"] = master
        master = state.get("master", part)
        adamw(
            [master],
            [gradient.to(master.device).to(master.dtype)],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=0.0,
            amsgrad=False,
            maximize=False,
            fused=True,  # five times as fast on a host, and equal but for the last bit
        )
        if master is not part:
            part.copy_(master.to(part.dtype))


def local(tensor):
    """This rank's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
