"""Adapters (LoRA, arXiv 2106.09685): train a few million weights beside the frozen ones. Needs peft.

    policy, frozen = adapted(load_engine("Qwen/Qwen2.5-7B-Instruct"), rank=32)
    policy = load("runs/Qwen2.5-7B-Instruct-seed0/best")

A layer computes W x + B A x. A and B, of rank r, are trained; W is not. So one copy of a 7B plays
every part: with its adapters it is the policy, without them it is π_ref and all fixed modules.

A checkpoint holds the policy twice. The folder itself is the merged model, W + B A rounded to W's dtype: it
needs neither peft nor the base model. adapters/ holds A and B in float32, in peft's format: with the base
model they are exactly the policy that was trained and evaluated on --valid, so load() prefers them.
"""
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from models.loading import fingerprint, load_engine
from models.local import HF
from models.state import save, weights_of
from world.files import read_object, reading
from world.places import located, missing, portable
from world.services import is_server
from world.text import printable

DAMAGED = "{} is damaged: remove it, then --resume continues from the one before"  # a checkpoint


class Policy(HF):
    """The policy: the model with its adapters on."""

    def save(self, folder):
        """Write the merged model, the adapters, and the fingerprint of the base model that they belong to."""
        with tempfile.TemporaryDirectory(dir=folder) as files:
            save(self.model.get_base_model(), self.tokenizer, folder, self.merged(files))
        self.model.save_pretrained(f"{folder}/adapters", state_dict=weights_of(self.model),
                                   save_embedding_layers=False)
        base, saved = self.model.peft_config["default"].base_model_name_or_path, Path(folder, "adapters")
        (saved / "base.sha256").write_text(fingerprint(base))
        (saved / "README.md").unlink(missing_ok=True)  # peft's: a form to fill in, with the path of the base
        config = json.loads((saved / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = portable(base, folder)
        (saved / "adapter_config.json").write_text(json.dumps(config, indent=2))

    def merged(self, files):
        """{name: W + B A}, each in a file of the folder `files`, mapped into memory, since beside the frozen
        weights there may be no room. Merging in place, as peft does, would round the frozen weights."""
        base, dice = self.model.get_base_model(), torch.Generator(self.model.device).manual_seed(0)
        weights = {name.replace(".base_layer.", "."): weight.cpu()
                   for name, weight in weights_of(base).items() if "lora_" not in name}
        for name, layer in base.named_modules():
            if hasattr(layer, "get_delta_weight"):
                weight, delta = layer.base_layer.weight, layer.get_delta_weight("default").float()
                merged = dithered(weight.float() + delta, weight.dtype, dice).cpu()
                weights[f"{name}.weight"] = in_file(merged, f"{files}/{name}")
        return weights


def in_file(tensor, path):
    """The tensor, written to a file and mapped into memory. On a full disk: OSError here, no SIGBUS later."""
    tensor.view(torch.uint8).numpy().tofile(path)
    return torch.from_file(path, True, tensor.numel(), dtype=tensor.dtype).view(tensor.shape)


def dithered(weight, dtype, dice=None):
    """Round to bfloat16, up or down by chance, so that the mean is right. W is a bfloat16 number, and B A is
    mostly smaller than half the gap to the next one: rounded to the nearest, W + B A would be W again."""
    if dtype != torch.bfloat16:
        return weight.to(dtype)
    # bfloat16 is float32 without its last 16 bits: add 16 random bits, then cut 16 bits off.
    below = torch.randint(1 << 16, weight.shape, generator=dice, device=weight.device, dtype=torch.int32)
    return (weight.view(torch.int32) + below & -(1 << 16)).view(torch.float32).to(dtype)


class Frozen(HF):
    """π_ref and the fixed modules: the same model with its adapters off."""

    def sample_all(self, *prompts_and_settings):
        with self.model.disable_adapter():
            return super().sample_all(*prompts_and_settings)


def peft():
    """The optional package peft; ValueError if it is not installed."""
    try:
        import peft
    except ImportError as why:
        raise ValueError("--lora needs the package peft, which is not installed: pip install peft") from why
    # peft 0.21 reads an attribute that transformers 5.23 has renamed; nobody who trains can change that
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
    return peft


def adapted(engine, rank, checkpoint=None):
    """(policy, frozen): the engine's model with the adapters of a checkpoint, or with new adapters on all
    linear layers but the head."""
    if checkpoint:
        model = with_saved(engine.model, checkpoint)
    else:
        settings = peft().LoraConfig(
            r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft().get_peft_model(engine.model, settings)
    ways = {"think": engine.think, "plain": engine.plain}
    return tuple(kind(model, engine.tokenizer, **ways) for kind in (Policy, Frozen))


def with_saved(model, checkpoint):
    """The model with a checkpoint's adapters, ready to train; ValueError if they belong to another model."""
    base, saved = model.config.name_or_path, checkpoint / "adapters"
    with reading(saved, DAMAGED.format(checkpoint)):
        weights = (saved / "base.sha256").read_text()
        config = read_object(saved / "adapter_config.json")
        # Only these: others of peft's settings name modules to import.
        config = {name: config[name] for name in ("r", "lora_alpha", "target_modules")}
        model = peft().PeftModel.from_pretrained(
            model, saved, config=peft().LoraConfig(**config, lora_dropout=0.0, task_type="CAUSAL_LM"),
            is_trainable=True, torch_device=str(model.device))
    if weights != fingerprint(base):
        raise ValueError(f"{base} is not the model that {checkpoint} was trained on, or has changed since")
    return model


def load(name, device=None, dtype=None, think=False, plain=False):
    """load_engine(), but a checkpoint with adapters is loaded as its base model with these adapters. Without
    the base model or without peft, the merged model is loaded, with a warning."""
    config = Path(os.path.expanduser(name)) / "adapters" / "adapter_config.json"
    if not config.exists():
        return load_engine(name, device, dtype, think, plain)
    try:
        peft()  # ValueError if it is missing, before the base model is loaded
        with reading(config, "take another checkpoint"):
            name_of_base = located(read_object(config)["base_model_name_or_path"], config.parents[1])
            if not isinstance(name_of_base, str):
                raise ValueError("its base model has no name")
        if is_server(name_of_base):  # a downloaded folder must not choose who gets our key
            raise ValueError(f"its base model is said to be a server, {name_of_base}")
        if missing(name_of_base):
            raise ValueError(f"There is no folder {name_of_base!r}, its base model: put it there, or write "
                             f"its new place into {config}")
        base = load_engine(name_of_base, device, dtype, plain=plain)
        model = with_saved(base.model, config.parents[1])
        policy = Policy(model, base.tokenizer, think=think, plain=plain)
    except ValueError as why:
        print(printable(f"{name}: loaded without its adapters, as merged and rounded weights. {why}"),
              file=sys.stderr)
        return load_engine(name, device, dtype, think, plain)
    policy.model.config.name_or_path = str(name)
    return policy
