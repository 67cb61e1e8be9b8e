"""Adapters: train a few million weights beside the frozen ones (LoRA, arXiv 2106.09685), through the package peft.

    policy, frozen = adapted(llm.load("Qwen/Qwen2.5-7B-Instruct"), rank=32)
    policy = load("runs/Qwen2.5-7B-Instruct-seed0/best")

W x + B A x: A and B, of rank r, are trained, W is not. So one copy of a 7B is everything at once: with its adapters the policy, without
them π_ref and all fixed modules. A checkpoint is the merged model, W + B A, which needs no peft to be read,
but is rounded to W's dtype; and, in adapters/ and in peft's format, A and B in float32. With the base model
these are exactly the policy that was trained and marked on --valid, and load() prefers them.
"""
import json
import os
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError

from models.loading import fingerprint, load_engine
from models.local import HF, sampling_mode
from world import services


class Policy(HF):
    """The model with its adapters."""

    def save(self, folder):
        """The merged weights, tensor by tensor in the host's memory (merging in place and back would round
        the frozen ones), the adapters, and the fingerprint of the base model that they belong to."""
        base, merged, dice = self.model.get_base_model(), {}, torch.Generator(self.model.device).manual_seed(0)
        adapted = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
        for name, weight in base.state_dict().items():
            if "lora_" not in name:
                module = adapted.get(name.removesuffix(".base_layer.weight"))
                if module:
                    weight = dithered(weight.float() + module.get_delta_weight("default").float(), weight.dtype, dice)
                merged[name.replace(".base_layer.", ".")] = weight.cpu()
        with sampling_mode(base):
            base.save_pretrained(folder, state_dict=merged)
        base.generation_config.to_json_file(f"{folder}/generation_config.json")
        self.tokenizer.save_pretrained(folder)
        self.model.save_pretrained(f"{folder}/adapters", save_embedding_layers=False)
        weights = fingerprint(self.model.peft_config["default"].base_model_name_or_path)
        Path(folder, "adapters", "base.sha256").write_text(weights)


def dithered(weight, dtype, dice=None):
    """To bfloat16, up or down by chance, so that it is right in the mean. W is a bfloat16 number already, and what adapters learn is
    mostly less than half the way to the next one: rounded to the nearest, W + B A would be W again."""
    if dtype != torch.bfloat16:
        return weight.to(dtype)
    below = torch.randint(1 << 16, weight.shape, generator=dice, device=weight.device, dtype=torch.int32)  # the 16 bits that bfloat16 has not
    return (weight.view(torch.int32) + below & -(1 << 16)).view(torch.float32).to(dtype)


class Frozen(HF):
    """The same model as it was before training."""

    def generate(self, *prompts_and_settings):
        with self.model.disable_adapter():
            return super().generate(*prompts_and_settings)


def peft():
    """The package, which is optional."""
    try:
        import peft
    except ImportError as why:
        raise ValueError("--lora needs the package peft, which is not installed: pip install peft") from why
    return peft


def adapted(engine, rank, checkpoint=None):
    """(policy, frozen): the engine's model with new adapters on all linear layers but the head, or with those
    of a checkpoint."""
    if checkpoint:
        model = with_saved(engine.model, Path(checkpoint))
    else:
        settings = peft().LoraConfig(
            r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft().get_peft_model(engine.model, settings)
    return tuple(kind(model, engine.tokenizer, think=engine.think) for kind in (Policy, Frozen))


def with_saved(model, checkpoint):
    """The model with a checkpoint's adapters, to be trained on; ValueError if they belong to another."""
    base = model.config.name_or_path
    try:
        weights = (checkpoint / "adapters" / "base.sha256").read_text()
        model = peft().PeftModel.from_pretrained(
            model, checkpoint / "adapters", is_trainable=True, torch_device=str(model.device))
    except (OSError, SafetensorError) as why:
        sentence = f"{checkpoint} is damaged: remove it, then --resume goes on from the one before"
        raise ValueError(sentence) from why
    if weights != fingerprint(base):
        raise ValueError(f"{base} is not the model that {checkpoint} was trained on, or has changed since")
    return model


def load(name, device=None, dtype=None, think=False):
    """llm.load(), but a checkpoint with adapters becomes its base model with these, not the merged model.
    Where the base model or peft is missing, it is the merged model, and a sentence says so."""
    config = Path(os.path.expanduser(name)) / "adapters" / "adapter_config.json"
    if not config.exists():
        return load_engine(name, device, dtype, think)
    try:
        peft()  # asked before the base model is loaded
        name_of_base = json.loads(config.read_text())["base_model_name_or_path"]
        if services.is_server(name_of_base):  # a downloaded folder must not choose who gets our key
            raise ValueError(f"its base model is said to be a server, {name_of_base}")
        base = load_engine(name_of_base, device, dtype)
        policy = Policy(with_saved(base.model, config.parents[1]), base.tokenizer, think=think)
    except ValueError as why:
        print(f"{name}: loaded without its adapters, as merged and rounded weights. {why}", file=sys.stderr)
        return load_engine(name, device, dtype, think)
    policy.model.config.name_or_path = str(name)
    return policy
