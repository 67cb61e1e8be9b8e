"""Adapters (LoRA, arXiv 2106.09685): train a few million weights beside the frozen ones. Needs
peft.

A layer computes W x + B A x. A and B, of rank r, are trained; W is not. So one copy of a 7B plays
every part: with its adapters it is the policy, without them it is π_ref and all frozen modules.

A checkpoint is a folder as peft saves it, with A and B in float32 and the name of the base model.
"""

import importlib.util
import json
import warnings
from pathlib import Path

import torch

from models import local
from models.local import Engine
from world.services import is_server

# Layers that peft refuses: Mamba's own kernels read their weights
REFUSED = ["out_proj", "conv1d"]


def peft():
    """The optional package peft."""
    try:
        import peft
    except ImportError as why:
        raise SystemExit("--lora needs the package peft: pip install peft") from why
    # peft 0.21 reads an attribute that transformers 5.23 has renamed
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
    return peft


def config_for(model, rank):
    """LoRA on all linear layers but the head."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    mamba = any("mamba" in kind for kind in [model.config.model_type, *kinds])
    return peft().LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        exclude_modules=REFUSED if mamba else None,
        task_type="CAUSAL_LM",
    )


def add(model, rank):
    """The model with new adapters."""
    return peft().get_peft_model(model, config_for(model, rank))


def count(model, rank):
    """How many weights add() would train: as peft counts, since it also wraps fused experts. None
    if peft is not installed. model: on the meta device; it is changed."""
    if not importlib.util.find_spec("peft"):
        return None
    with torch.device("meta"):
        return sum(p.numel() for p in add(model, rank).parameters() if p.requires_grad)


def base_of(name):
    """The base model of a checkpoint with adapters; None for any other model."""
    config = Path(name) / "adapter_config.json"
    if not config.exists():
        return None
    base = json.loads(config.read_text())["base_model_name_or_path"]
    if is_server(base):  # a folder must not choose who gets our key
        raise SystemExit(f"{name}: its base model is said to be a server, {base}")
    return base


def load(name, distribution, *settings, trainable=False):
    """load(), but a checkpoint with adapters is loaded as its base model with these adapters."""
    base = base_of(name)
    if base is None:
        return local.load(name, distribution, *settings)
    engine = local.load(base, distribution, *settings)
    model = peft().PeftModel.from_pretrained(engine.model, name, is_trainable=trainable)
    engine = Engine(model, engine.tokenizer, distribution, think=engine.think, plain=engine.plain)
    engine.name = str(name)
    return engine


def without(engine):
    """The same model with its adapters off: π_ref and the frozen modules, in no more memory."""
    return Engine(
        engine.model,
        engine.tokenizer,
        engine.distribution,
        think=engine.think,
        plain=engine.plain,
        adapters=False,
    )


@torch.no_grad()
def moved(policy, frozen):
    """How far training has moved the weights: the largest and the mean change, and the share of
    them that changed in the model's dtype. With adapters: of W + B A, as a merge would round it."""
    if policy.model is frozen.model:
        layers = [m for m in policy.model.modules() if hasattr(m, "get_delta_weight")]
        pairs = ((m.base_layer.weight, m.get_delta_weight("default")) for m in layers)
        pairs = ((weight, (weight.float() + delta).to(weight.dtype)) for weight, delta in pairs)
    else:
        pairs = zip(frozen.model.parameters(), policy.model.parameters())
    largest = total = changed = number = 0
    for before, after in pairs:
        change = (after.float() - before.float()).abs()
        largest, total = max(largest, change.max().item()), total + change.sum().item()
        changed, number = changed + (change > 0).sum().item(), number + change.numel()
    return {
        "moved_max": largest,
        "moved_mean": total / number,
        "moved_share": changed / number,
    }
