"""The state of a model: how it samples, how it is updated, and what is saved of it."""

import os
from contextlib import contextmanager

from transformers import GenerationConfig


@contextmanager
def sampling_mode(model):
    """Make generate() sample from the model's softmax and nothing else; restore all settings afterwards.

    generation_config: generate() takes each setting that it is not given from the checkpoint (for
    Qwen2.5-Instruct: top_k 20, top_p 0.8, a repetition penalty of 1.05). Some have no neutral value that
    could be passed (sequence_bias), so the model gets an empty one.
    training, gradient_checkpointing: if both are on, transformers drops the cache, and every token after the
    first is sampled without its context. Each module gets its own values back, because a model in training
    may have parts in eval. (vars(): only what the module itself has set, and not its class.)

    Not in torch.inference_mode(): its tensors could stay in the model's buffers (dynamic rotary embeddings)
    and break the update. generate() itself uses no_grad().
    """
    neutral = {"training": False, "gradient_checkpointing": False, "generation_config": GenerationConfig()}
    before = [(m, name, vars(m)[name]) for m in model.modules() for name in neutral if name in vars(m)]
    try:
        for module, name, _ in before:
            setattr(module, name, neutral[name])
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def ready_to_update(model, reference=None):
    """Dropout off, because the model that is scored must be the one that sampled; gradient checkpointing on.

    transformers checkpoints a layer only if the layer's own `training` flag is set, but model.train() would
    also turn on dropout. So all modules are in eval mode, and only the layers to checkpoint get the flag.
    Layers of some families (OPT) call dropout themselves while it is set: their own rates become 0.
    """
    if reference is not None:
        reference.eval()
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


def weights_of(model):
    """{name: tensor}: model.state_dict() itself would free weights gathered from other GPUs (sharding.py)."""
    buffers = {f"{prefix}.{name}".removeprefix("."): buffer for prefix, module in model.named_modules()
               for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set}
    return dict(model.named_parameters(remove_duplicate=False)) | buffers


def save(model, tokenizer, folder, weights=None):
    """Write a model as a folder that transformers can read, with its generation_config as it came. weights:
    {name: tensor}, instead of the model's own."""
    with sampling_mode(model):  # transformers refuses to save some published generation_configs
        model.save_pretrained(folder, state_dict=weights or weights_of(model))
    model.generation_config.to_json_file(os.path.join(folder, "generation_config.json"))
    tokenizer.save_pretrained(folder)
