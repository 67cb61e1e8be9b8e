"""Adapters (LoRA, arXiv 2106.09685): few weights are trained beside the frozen ones, 81 million for
a 7B at rank 32. Needs peft.

A layer computes W x + B A x. A and B, of rank r, are trained; W is not. So one copy of a 7B plays
every part: with its adapters it is the policy, without them it is π_ref and all frozen modules.

Adapters are on the linear layers, with three exceptions:

  * the head;
  * a mixture's experts, and what has the name of an expert's layer: peft would add B A to the
    weights of all experts at every token that is sampled, though a token needs only a few of them;
  * layers whose weights Mamba's kernels read past the layer: its adapters would do nothing there.

A checkpoint is a folder as peft saves it, with A, B and the name of the base model.
"""

import importlib.util
from copy import copy

import torch

from models import local

EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}  # as peft names them
MAMBA = {"x_proj", "dt_proj", "out_proj"}


def installed():
    """Is peft there? Its import takes two seconds, so it is imported only where it is used."""
    return importlib.util.find_spec("peft") is not None


def add(model, rank):
    """The model with new adapters, in the model's own dtype. If that is bfloat16, the optimiser
    keeps float32 masters of them (masters.py)."""
    peft = local.peft()
    names = sorted({name.rpartition(".")[2] for name in layers(model)})
    settings = dict(lora_alpha=2 * rank, target_modules=names, task_type="CAUSAL_LM")
    config = peft.LoraConfig(r=rank, **settings)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def layers(model):
    """{name: linear layer} of those that get adapters."""
    head, weights = model.get_output_embeddings(), dict(model.named_parameters())
    left_out = set()
    if any(weight.ndim == 3 and "expert" in name for name, weight in weights.items()):
        left_out |= EXPERTS
    if any(name.endswith("A_log") for name in weights):
        left_out |= MAMBA
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and module is not head
        and name.rpartition(".")[2] not in left_out
    }


def count(model, rank):
    """How many weights add() would train."""
    return sum(rank * (m.in_features + m.out_features) for m in layers(model).values())


def without(engine):
    """The same model with its adapters off: π_ref and the frozen modules, in no more memory."""
    frozen = copy(engine)
    frozen.adapters, frozen.name = False, engine.model.config.name_or_path
    frozen.fingerprint = local.fingerprint(frozen.name)
    return frozen


@torch.no_grad()
def moved(policy, frozen):
    """How far training has moved the weights: the largest and the mean change, and the share of
    them that changed in the model's dtype. With adapters: of W + B A, as a merge would round it."""
    if policy.model is frozen.model:
        layers = [m for m in policy.model.modules() if hasattr(m, "get_delta_weight")]
        pairs = ((m.base_layer.weight, m.get_delta_weight("default")) for m in layers)
        pairs = ((weight, (weight.float() + delta).to(weight.dtype)) for weight, delta in pairs)
    else:
        # --fixed may be adapters on the model that is trained: without them, they are that model
        weights = (w for name, w in frozen.model.named_parameters() if "lora_" not in name)
        pairs = zip(weights, policy.model.parameters(), strict=True)
    largest = total = changed = number = 0
    for before, after in pairs:
        change = (after - before).abs()
        largest = max(largest, change.max().item())
        total += change.sum(dtype=torch.float32).item()
        changed += change.count_nonzero().item()
        number += change.numel()
    return {"moved_max": largest, "moved_mean": total / number, "moved_share": changed / number}
