"""Adapters: train a few million weights beside the frozen ones (LoRA, arXiv 2106.09685), through the package peft.

    policy, frozen = adapted(llm.load("Qwen/Qwen2.5-7B-Instruct"), rank=32)

W x + B A x: A and B, of rank r, are trained, W is not. So one copy of a 7B is everything at once: with its adapters the policy, without
them π_ref and all fixed modules. A checkpoint is the merged model, W + B A, which needs no peft to be read.
"""
import torch

import llm

MISSING = "--lora needs the package peft, which is not installed: pip install peft, or leave --lora out"


class Policy(llm.HF):
    """The model with its adapters."""

    def save(self, folder):
        """The merged weights, tensor by tensor in the host's memory: merging in place and back would round the frozen ones."""
        base, merged, dice = self.model.get_base_model(), {}, torch.Generator(self.model.device).manual_seed(0)
        adapted = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
        for name, weight in base.state_dict().items():
            if "lora_" not in name:
                module = adapted.get(name.removesuffix(".base_layer.weight"))
                if module:
                    weight = dithered(weight.float() + module.get_delta_weight("default").float(), weight.dtype, dice)
                merged[name.replace(".base_layer.", ".")] = weight.cpu()
        with llm.sampling_mode(base):
            base.save_pretrained(folder, state_dict=merged)
        base.generation_config.to_json_file(f"{folder}/generation_config.json")
        self.tokenizer.save_pretrained(folder)


def dithered(weight, dtype, dice=None):
    """To bfloat16, up or down by chance, so that it is right in the mean. W is a bfloat16 number already, and what adapters learn is
    mostly less than half the way to the next one: rounded to the nearest, W + B A would be W again."""
    if dtype != torch.bfloat16:
        return weight.to(dtype)
    below = torch.randint(1 << 16, weight.shape, generator=dice, device=weight.device, dtype=torch.int32)  # the 16 bits that bfloat16 has not
    return (weight.view(torch.int32) + below & -(1 << 16)).view(torch.float32).to(dtype)


class Frozen(llm.HF):
    """The same model as it was before training."""

    def generate(self, *prompts_and_settings):
        with self.model.disable_adapter():
            return super().generate(*prompts_and_settings)


def adapted(engine, rank, adapters=None):
    """(policy, frozen): the engine's model with new adapters on all linear layers but the head, or with those of a checkpoint."""
    try:
        import peft
    except ImportError as why:
        raise ValueError(MISSING) from why
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(engine.model, settings)
    if adapters:
        model.load_state_dict(adapters, strict=False)
    return tuple(kind(model, engine.tokenizer, think=engine.think) for kind in (Policy, Frozen))
