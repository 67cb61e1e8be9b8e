"""AdamW that keeps what bfloat16 cannot hold.

A bfloat16 number has 8 significant bits. Around 0.02, where the weights of a language model live, two neighbours are 1.2e-4
apart; an AdamW step at the paper's learning rate is 1e-6. Added to the weight that is less than half the gap, so it is
rounded away, this time and every time: the gradient points somewhere, and the model stays where it was. Each weight therefore
has a float32 master. The step moves the master, and the weight that the model computes with is the master, rounded:

    g       = gradient in float32
    m, v    = AdamW's two moments, float32
    master -= lr * ( m̂ / (√v̂ + ε) + weight_decay * master )         what is lost by one step is there for the next
    weight  = round(master)

bench/precision.py measures what that is worth beside what others do (bfloat16 alone, stochastic rounding, Kahan summation).

    MasterAdamW(model.parameters(), lr=1e-6)                                                      state beside the weights
    MasterAdamW(model.parameters(), lr=1e-6, device="cpu")                                        state in the host's memory
    ZeroRedundancyOptimizer(model.parameters(), optimizer_class=MasterAdamW, lr=1e-6)             state shared out over GPUs

Bytes for each weight, without activations:        weight   gradient   state        a 7B (7.6e9 weights)
    float32 weights                                4        4           8           122 GB
    bfloat16 weights                               2        2          12           122 GB
    bfloat16 weights, device="cpu"                 2        2          12 (host)     30 GB + 91 GB on the host
    bfloat16 weights, shared out over 8 GPUs       2        2          12 / 8        42 GB each

A float32 weight is its own master, and is then trained by torch.optim.AdamW's own function, bit for bit.

Dropped, on purpose: AMSGrad, maximize, the closure (nothing here computes a loss twice), sparse gradients, and a loss scale:
a float16 gradient that underflows is lost before it comes here.
"""
import torch
from torch.optim.adamw import adamw


class MasterAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW on float32 masters of the weights.

    params: the model's own weights, of any floating dtype, or torch's list of groups. device: where masters and moments
    live: None, beside the weight, or "cpu", in the host's memory. From its first gradient on, as in torch, a weight has

        optimizer.state[weight] = {"step", "exp_avg", "exp_avg_sq", and "master" unless the weight is its own}

    all of it float32 (float64 for a float64 weight) and all of it in state_dict(). The master rules: who writes to the
    weights by another way must clear optimizer.state, or the next step takes that back.

    ZeroRedundancyOptimizer needs nothing more; parallel.py gathers and spreads what it holds.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, device=None):
        self.device = None if device is None else torch.device(device)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        """One weight after the other: all gradients of a 7B in float32 would be 30 GB at once."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.move(weight, group)

    def move(self, weight, group):
        """AdamW on the master of one weight; then the weight is the master, rounded.

        Beside the weight, torch chooses the kernel as torch.optim.AdamW would. For state on the host there are no older
        numbers to agree with, so it gets the fused kernel: three times as fast there, and equal but for a last bit.
        """
        state, apart = self.ready(weight), self.apart(weight)
        master = state.get("master", weight)
        gradient = on_host(weight.grad, weight.grad.dtype, weight) if apart else weight.grad
        adamw(
            [master], [gradient.to(master.dtype)], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            weight_decay=group["weight_decay"], amsgrad=False, maximize=False, fused=True if apart else None,
        )
        if master is not weight:
            weight.copy_(on_host(master, weight.dtype, weight) if apart else master)

    def apart(self, weight):
        """Does its state live elsewhere than the weight?"""
        return self.device is not None and self.device.type != weight.device.type

    def ready(self, weight):
        """The state of one weight: made if it is new, and put where it belongs.

        ZeroRedundancyOptimizer's own load_state_dict() goes past ours and puts all beside the weights, so this looks each time;
        what is in its place stays the same tensor. A checkpoint may come from a run with other settings: a master that it
        lacks (plain AdamW's) is made from the weight, one too many (a float32 weight's, from the host) is dropped.
        """
        state, apart = self.state[weight], self.apart(weight)
        place, wide = self.device if apart else weight.device, torch.promote_types(weight.dtype, torch.float32)
        if not state:
            state["step"] = torch.tensor(0.0)                 # on the host always, as torch.optim.AdamW's
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
        """As torch's, without the rounding: torch casts all state to its weight's dtype, and a bfloat16 master is no master.

        So torch loads the settings and we the tensors, in torch's order. What already is where it belongs is taken and not
        copied, as torch does. Hooks see the settings alone.
        """
        super().load_state_dict(state_dict | {"state": {}})
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for place, weight in zip(places, weights, strict=True):
            if place in state_dict["state"]:
                self.state[weight] = dict(state_dict["state"][place])
                self.ready(weight)


def on_host(tensor, dtype, weight):
    """A copy in the host's memory, on its way to or from a weight's GPU; pinned, since a GPU reads and writes that faster.

    Only the gradient and the rounded weight travel, 2 bytes a weight each way, and only the copy of one tensor at a time is
    pinned. Masters and moments never leave the host, and are not: torch rounds pinned memory up to powers of two, and the
    91 GB of a 7B would take 174. The copies wait for the arithmetic and it for them; hiding them behind it would save the
    smaller part. For a 7B, 15 GB each way take about a second (estimated), the arithmetic 45 s of one core (6 ns a weight,
    measured on bench/precision.py's machine), divided by the cores until the memory's speed is the limit.
    """
    return torch.empty(tensor.shape, dtype=dtype, pin_memory=weight.is_cuda).copy_(tensor)
