"""Will it fit? The peak of a training run in bytes, part by part, from the model's configuration alone, before anything is loaded.

    config = AutoConfig.from_pretrained("Qwen/Qwen2.5-7B-Instruct")
    fit = predict(config, dtype=torch.bfloat16, token_budget=16384, max_new_tokens=1024, gradient_checkpointing=True)
    fit.gpu, fit.host                     # 147e9, 15e9
    advise(fit, 80e9)     # "It needs 147 GB of GPU memory and there are 80: with --optimizer-device cpu it needs 56."

A step of Flow-GRPO has three phases, and the peak is the largest of them, not their sum: the cache of generate() is gone when
the update begins, and the activations of the update when the optimiser steps. What stays through all three is the policy, the
frozen copy (π_ref and all fixed modules) and the optimiser's state.

    generate    weights, frozen copy, state, and: cache, prompts
    update      weights, frozen copy, state, gradients, and: activations (of layers or logits, whichever is more)
    step        weights, frozen copy, state, gradients, and: float32 copies of the largest weight

Letters: n tokens of a micro-batch, K of them actions, d hidden, f intermediate, q and k the widths of queries and of keys, V the
vocabulary, s bytes of the dtype. The formulas count what autograd keeps of transformers' decoder layer (RMSNorm in float32,
sdpa, gated MLP), read off with saved_tensors_hooks. bench/memory.py compares them with measured peaks, and with FakeTensor
runs of a real 7B. Other architectures (experts, layer norms, plain MLPs) are nearer to an upper bound.

Not counted: fragmentation (leave a tenth of a card), the tools, tokenizers, NCCL's buffers. CONTEXT is assumed, not measured.
"""
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM

from flow_grpo import CHUNK

CONTEXT = 1 << 30             # CUDA's context and the libraries' workspaces


@dataclass
class Fit:
    parts: dict               # name -> bytes of each part, whenever it is there
    gpu: int                  # the peak of the largest phase
    host: int                 # the same in the host's memory, for all ranks of one machine
    phases: dict = field(default_factory=dict)     # "generate", "update", "step" -> bytes on the GPU
    settings: dict = field(default_factory=dict)   # the arguments of predict(), so that advise() can try others


def shapes(config):
    """What the formulas need: the parameters are counted on the meta device, where tensors have shapes and no bytes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    text = config.get_text_config()
    heads, d = text.num_attention_heads, text.hidden_size
    width = getattr(text, "head_dim", None) or d // heads
    return dict(
        parameters=sum(p.numel() for p in model.parameters()), largest=max(p.numel() for p in model.parameters()),
        adapter=sum(m.in_features + m.out_features for m in linears),      # LoRA weights of rank 1
        tied=head.weight is model.get_input_embeddings().weight, layers=text.num_hidden_layers, d=d,
        f=getattr(text, "intermediate_size", None) or 4 * d, q=heads * width,
        k=(getattr(text, "num_key_value_heads", None) or heads) * width, V=text.vocab_size)


def layer(d, f, q, k, s, lora):
    """Bytes a token that one layer keeps for its backward pass, and those that pass by in the pass itself."""
    norm = 4 * d + (2 * s * d if not lora else 0)               # RMSNorm: float32 input; normalised, and output = a linear's input
    attention = s * (2 * q + 2 * k)                             # sdpa: queries, keys, values, output
    mlp = s * 3 * f + (s * f if not lora else 0)                # silu's input, its output, up; their product = down's input
    inputs = 5 * d + q + f if s < 4 else 2 * d + q + f          # peft: a float32 copy of the input of each of the 7 linears
    adapters = 4 * inputs if lora else 0                        # ... where it is not float32, and so shared, already
    passing = 3 * s * f + (4 * f if lora and s < 4 else 0)      # gradients of product, silu and up; an adapter's in float32
    return 2 * norm + attention + mlp + adapters, passing


def activations(of, n, K, s, gradient_checkpointing, lora):
    """(layers, head, embedding): bytes of forward and backward, beside weights and gradients, at the three places that can
    be the peak. n, K: tokens and action tokens of the largest micro-batch."""
    d, V, matrix = of["d"], of["V"], 0 if lora else of["V"] * of["d"] * s       # (V, d), the head's gradient before it is added
    kept, passing = layer(d, of["f"], of["q"], of["k"], s, lora)
    inputs = n * of["layers"] * (s * d if gradient_checkpointing else kept)     # checkpointing keeps a layer's input alone
    # A tied matrix is used at both ends: autograd holds the head's gradient until the embedding's has come.
    layers = inputs + n * (kept * gradient_checkpointing + passing) + (matrix if of["tied"] else 0)
    # flow_grpo.CHUNK: up to it 3 float32 copies at a time; above, the gradient grows beside the logits, chunk by chunk.
    logits = 12 * K * V if K * V <= CHUNK else 2 * s * K * V + 12 * CHUNK
    head = inputs + n * (4 + 2 * s) * d + max(logits, K * V * s + matrix)       # the last norm; the logits, then their matrix
    return layers, head, matrix * (3 if of["tied"] else 1)


def generation(of, tokens, new, prompt, s, lora):
    """(cache, prompts): bytes of generate() on `tokens` tokens, of which each row has `new` new ones."""
    rows = max(1, tokens // (prompt + new))
    cache = rows * (prompt + new) * of["layers"] * 2 * of["k"] * s              # keys and values of every layer
    mlp, attention = 3 * s * of["f"] + (4 * of["f"] if lora else 0), s * (5 * of["q"] + 2 * of["d"])
    reading = rows * prompt * (max(mlp, attention) + 2 * s * of["d"])           # one layer without gradient, the residual stream
    reading += rows * prompt**2                                                 # the mask of left padding
    sampling = rows * of["V"] * (s + 12)                                        # logits, in float32, / temperature, softmax
    return cache, max(reading, sampling)


def predict(config, *, dtype, token_budget, max_new_tokens, gradient_checkpointing, optimizer_device=None, lora=None, ranks=1,
            beta=0.001, prompt=4096, generate_budget=None, context=CONTEXT):
    """A Fit for training `config` (or what shapes() says of it) in `dtype`. token_budget: of a micro-batch (train.py --token-budget); generate_budget: of
    generate(), where None is 4 x token_budget, as the defaults of both are; if memory is short it halves itself (llm.HF).
    prompt, max_new_tokens: the longest of a planner's turn. lora: the adapters' rank, None trains everything. optimizer_device
    "cpu": masters and moments in host memory. ranks: GPUs that share out masters and moments; each holds all the rest.
    """
    settings = dict(locals())
    s, of = dtype.itemsize, config if isinstance(config, dict) else shapes(config)
    P, trained = of["parameters"], of["adapter"] * (lora or 0)
    n = max(token_budget, prompt + max_new_tokens)                              # one longer turn goes alone
    K = min(n, max(1, token_budget // (prompt + max_new_tokens)) * max_new_tokens)
    state = 8 * trained if lora else (8 if s >= 4 and not optimizer_device else 12) * P    # two moments, and a master below float32
    wide = 0 if lora or optimizer_device else of["largest"] * 4                 # the step goes weight by weight (optimizer.py)
    layers, head, embedding = activations(of, n, K, s, gradient_checkpointing, lora)
    cache, prompts = generation(of, generate_budget or 4 * token_budget, max_new_tokens, prompt, s, lora)
    scoring = K * of["V"] * s + 8 * min(K * of["V"], CHUNK) if beta else 0      # the reference, before the policy's graph is there
    parts = {
        "weights": P * s + trained * 4, "frozen copy": 0 if lora else P * s,    # with adapters off the policy is the frozen copy
        "gradients": trained * 4 if lora else P * s,
        "optimizer": 0 if optimizer_device else state // ranks,
        "activations of layers": layers, "activations at the logits": max(head, scoring), "gradient of the embedding": embedding,
        "cache of generate": cache, "prompts of generate": prompts,
        "step, float32 copies": wide * (2 if s >= 4 else 3), "context": context,
        "host: optimizer": state if optimizer_device else 0,
        "host: checkpoint": P * s + (state if ranks > 1 else 0)}                # safetensors' copy; rank 0 gathers all state
    stays = sum(parts[name] for name in ("weights", "frozen copy", "optimizer", "context"))
    phases = {"generate": stays + cache + prompts,
              "update": stays + parts["gradients"] + max(layers, parts["activations at the logits"], embedding),
              "step": stays + parts["gradients"] + parts["step, float32 copies"]}
    parts = {name: int(size) for name, size in parts.items()}
    return Fit(parts, int(max(phases.values())), parts["host: optimizer"] + parts["host: checkpoint"], phases, settings | {"config": of})


def advise(fit, available_bytes):
    """"" if it fits; else one sentence with the first change that is enough, the one that costs least before the others:
    the optimiser on the host (time), adapters (fewer weights learn), shorter micro-batches, shorter plans, more GPUs."""
    if fit.gpu <= available_bytes:
        return ""
    start, sentence = fit.settings, f"It needs {fit.gpu / 1e9:.0f} GB of GPU memory and there are {available_bytes / 1e9:.0f}"
    for change in changes(start):
        needed = predict(**start | change).gpu
        if needed <= available_bytes:
            return f"{sentence}: with {said(change)} it needs {needed / 1e9:.0f}."
    return f"{sentence}: a smaller model, or larger GPUs, are needed; nothing that train.py can change is enough."


def changes(start):
    """What advise() tries, in this order, each change alone and then with those before it that cost less."""
    host = [] if start["optimizer_device"] or start["lora"] else [{"optimizer_device": "cpu"}]
    lora = [] if start["lora"] else [{"lora": 32, "optimizer_device": None}]
    turn = start["prompt"] + start["max_new_tokens"]
    budgets = [start["token_budget"] >> i for i in range(1, 8) if start["token_budget"] >> i > turn]
    budgets += [turn] if turn < start["token_budget"] else []                   # less than a turn cannot be cut off
    yield from host + lora
    for least in [{}] + host + lora:
        yield from (least | {"token_budget": budget} for budget in budgets)
    for least in [{}] + host + lora:
        for new in (start["max_new_tokens"] // 2, start["max_new_tokens"] // 4):
            yield least | {"max_new_tokens": max(1, new), "token_budget": min(start["token_budget"], start["prompt"] + max(1, new))}
    for ranks in (2, 4, 8, 16):
        if ranks > start["ranks"] and not start["lora"]:
            yield from ({"ranks": ranks}, {"ranks": ranks, "token_budget": min(start["token_budget"], turn)})


def said(change):
    words = {"optimizer_device": "--optimizer-device {}", "lora": "--lora {}", "token_budget": "--token-budget {}",
             "max_new_tokens": "--max-new-tokens {}", "ranks": "{} GPUs (torchrun)"}
    return " and ".join(words[name].format(value) for name, value in change.items() if value is not None)
