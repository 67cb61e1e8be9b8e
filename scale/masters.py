"""AdamW on float32 masters, because bfloat16 weights round small steps away.

A bfloat16 number has 8 significant bits. Around 0.02, the size of a language model's weights, neighbouring
numbers are 1.2e-4 apart, but an AdamW step at the paper's learning rate is 1e-6. That is less than half the
gap: the sum is rounded back to the old weight, at every step, and the model never moves. So each weight has a
float32 master. The step moves the master, and the model computes with the rounded master:

    g       = gradient in float32
    m, v    = AdamW's two moments, float32
    master -= lr * ( m̂ / (√v̂ + ε) + weight_decay * master )         small steps add up here
    weight  = round(master)

bench/precision.py compares this with bfloat16 alone, stochastic rounding and Kahan summation.

    MasterAdamW(model.parameters(), lr=1e-6)                            state beside the weights
    MasterAdamW(model.parameters(), lr=1e-6, device="cpu")              state in the host's memory
    ranks.sharded(MasterAdamW, model.parameters(), lr=1e-6)             state sharded over GPUs

Bytes of each weight, without activations:     weight   gradient   state        a 7B (7.6e9 weights)
    float32 weights                            4        4           8           122 GB
    bfloat16 weights                           2        2          12           122 GB
    bfloat16 weights, device="cpu"             2        2          12 (host)     30 GB + 91 GB on the host
    bfloat16 weights, sharded over 8 GPUs      2        2          12 / 8        42 GB each

A float32 weight is its own master, and torch.optim.AdamW's own function trains it, bit for bit.

Dropped: AMSGrad, maximize, closures, sparse gradients, and a loss scale: a float16 gradient that underflows
is lost before it comes here.
"""
import torch
from torch.optim.adamw import adamw


class MasterAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW on float32 masters of the weights.

    params: the model's weights, of any floating dtype, or torch's list of groups. device: of masters and
    moments; None keeps them on the weight's device, "cpu" in the host's memory. After its first gradient a
    weight has

        optimizer.state[weight] = {"step", "exp_avg", "exp_avg_sq", "master"}    no master if it is its own

    all in float32 (float64 for a float64 weight) and all in state_dict(). If you change the weights yourself,
    clear optimizer.state: the next step would overwrite each weight from its master.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, device=None):
        self.device = None if device is None else torch.device(device)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        """One weight at a time, because all gradients of a 7B in float32 would take 30 GB."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.move(weight, group)

    def move(self, weight, group):
        """AdamW on the master of one weight, then round the master into the weight.

        Beside the weight torch chooses the kernel, as in torch.optim.AdamW. On the host it is the fused one,
        which is three times as fast there and equal but for a last bit.
        """
        state, apart = self.ready(weight), self.apart(weight)
        master = state.get("master", weight)
        gradient = on_host(weight.grad, weight.grad.dtype, weight) if apart else weight.grad
        adamw(
            [master], [gradient.to(master.dtype)], [state["exp_avg"]], [state["exp_avg_sq"]], [],
            [state["step"]], lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
            eps=group["eps"], weight_decay=group["weight_decay"], amsgrad=False, maximize=False,
            fused=True if apart else None)
        if master is not weight:
            weight.copy_(on_host(master, weight.dtype, weight) if apart else master)

    def apart(self, weight):
        """Is the weight's state on another device than the weight?"""
        return self.device is not None and self.device.type != weight.device.type

    def ready(self, weight):
        """The state of one weight, with the device and dtype that it must have. Made at the first step.

        Every step checks this, because ZeroRedundancyOptimizer's load_state_dict() bypasses ours and moves
        all state to the weights. A tensor that is right already is not copied. A checkpoint may come from a
        run with other settings: a missing master (from plain AdamW) is made from the weight; the master of a
        float32 weight, needed only on the host, is dropped if the state is beside the weight.
        """
        state, apart = self.state[weight], self.apart(weight)
        place = self.device if apart else weight.device
        wide = torch.promote_types(weight.dtype, torch.float32)
        if not state:
            state["step"] = torch.tensor(0.0)                 # always on the host, as in torch.optim.AdamW
            state["exp_avg"] = torch.zeros_like(weight, dtype=wide, device=place)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=wide, device=place)
        if weight.dtype == wide and not apart:
            state.pop("master", None)
        elif "master" not in state:
            state["master"] = weight.detach().to(place, wide, copy=True)
        state["step"] = state["step"].cpu()
        for name in state.keys() - {"step"}:
            state[name] = state[name].to(place, wide)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """torch's load_state_dict(), which would round the masters to the weights' dtype, loads the settings
        alone. The tensors are loaded here, in torch's order; one that is right already is not copied.
        """
        super().load_state_dict(state_dict | {"state": {}})
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for place, weight in zip(places, weights, strict=True):
            if place in state_dict["state"]:
                self.state[weight] = dict(state_dict["state"][place])
                self.ready(weight)


def on_host(tensor, dtype, weight):
    """A copy in the host's memory, on its way from or to a weight's GPU. It is pinned: that copies faster.

    Only gradients and rounded weights are copied, 2 bytes a weight each way, one tensor at a time. Masters
    and moments stay on the host, not pinned: torch rounds pinned memory up to powers of two, so the 91 GB of
    a 7B would take 174. Copies and arithmetic take turns. For a 7B, 15 GB each way take about a second
    (estimated), and the arithmetic 45 s on one core (6 ns a weight, measured), less on several cores.
    """
    return torch.empty(tensor.shape, dtype=dtype, pin_memory=weight.is_cuda).copy_(tensor)
