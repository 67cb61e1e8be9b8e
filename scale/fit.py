"""Will it fit? The peak of a training run in bytes, part by part, from the model's configuration alone, before anything is loaded.

    python fit.py --model Qwen/Qwen2.5-7B-Instruct --gpu 80     # how train.py would train it on such a card

    config = llm.config_of("Qwen/Qwen2.5-7B-Instruct")
    fit = predict(config, dtype=torch.bfloat16, token_budget=16384, max_new_tokens=1024, gradient_checkpointing=True)
    fit.gpu, fit.host                     # 147e9, 15e9
    plan(config, 80e9, 128e9, ...)        # {"optimizer_device": "cpu", ...}, "56 of 80 GB on the GPU, ..."

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
import argparse
import os
import re
import resource
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from models.loading import config_of
from models.local import HF
from scale.batches import CHUNK

CONTEXT = 1 << 30             # CUDA's context and the libraries' workspaces
BUDGETS = 16384, 8192         # tokens of a micro-batch that plan() tries before that of a single turn


@dataclass
class Fit:
    parts: dict               # name -> bytes of each part, whenever it is there
    gpu: int                  # the peak of the largest phase
    host: int                 # the same in the host's memory, for all ranks of one machine
    phases: dict = field(default_factory=dict)     # "generate", "update", "step" -> bytes on the GPU


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
            beta=0.001, prompt=4096, generate_budget=None, context=CONTEXT, others=0):
    """A Fit for training `config` (or what shapes() says of it) in `dtype`.

    token_budget: of a micro-batch (train.py --token-budget). generate_budget: of generate(), which halves it by itself
    (llm.HF); None is 4 x token_budget, as the defaults are. prompt, max_new_tokens: of the longest turn. lora: the
    adapters' rank, None trains everything. optimizer_device "cpu": masters and moments in the host's memory. ranks: GPUs
    that share out masters and moments; each holds all the rest. others: parameters of other models (--judge, ...).
    """
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
        "other models": others * s,
        "gradients": trained * 4 if lora else P * s,
        "optimizer": 0 if optimizer_device else state // ranks,
        "activations of layers": layers, "activations at the logits": max(head, scoring), "gradient of the embedding": embedding,
        "cache of generate": cache, "prompts of generate": prompts,
        "step, float32 copies": wide * (2 if s >= 4 else 3), "context": context,
        "host: optimizer": state if optimizer_device else 0,
        "host: checkpoint": P * s + (state if ranks > 1 else 0)}                # safetensors' copy; rank 0 gathers all state
    stays = sum(parts[name] for name in ("weights", "frozen copy", "other models", "optimizer", "context"))
    phases = {"generate": stays + cache + prompts,
              "update": stays + parts["gradients"] + max(layers, parts["activations at the logits"], embedding),
              "step": stays + parts["gradients"] + parts["step, float32 copies"]}
    parts = {name: int(size) for name, size in parts.items()}
    return Fit(parts, int(max(phases.values())), parts["host: optimizer"] + parts["host: checkpoint"], phases)


def plan(config, gpu, host, given=(), token_budget=None, prompt=4096, **settings):
    """How to train within the memory that is there: (settings of train.py to change, the text of a "memory" line).

    gpu: free bytes of the card; 0 for none, and then everything is in the host's memory. host: free bytes there.
    given: names of settings that the user chose, which stay. settings: the others of predict().

    The ways, in the order of what they cost: all weights; the optimizer on the host (without a GPU: gradient
    checkpointing); adapters; each with large micro-batches first. A tenth of the memory should stay free. Where
    nothing is that lean, up to 1.15 times the memory is tried, since predict() has been off by so much. ValueError
    if nothing fits.
    """
    shape, turn = shapes(config), prompt + settings["max_new_tokens"]
    second = {"optimizer_device": "cpu"} if gpu else {"gradient_checkpointing": True}
    third = {"lora": 32} if gpu else second | {"lora": 32}
    parts = {"lora", "optimizer_device"}                        # one of them given: what is trained where is chosen
    fixed = set(given) | (parts if parts & set(given) else set())
    ways = [way for way in ({}, second, third) if not fixed & way.keys()]
    budgets = [token_budget] if token_budget else [b for b in BUDGETS if b > turn] + [turn]
    settings |= {"prompt": prompt, "generate_budget": 1, "context": CONTEXT if gpu else 0}
    tried = [(way | {"token_budget": budget}, predict(shape, **settings | way | {"token_budget": budget}))
             for way in ways for budget in budgets]
    for share in (0.9, 1.15):
        for changes, need in tried:
            if (need.gpu <= share * gpu and need.host <= share * host) if gpu else need.gpu <= share * host:
                return changes, in_words(changes, need, gpu, host, share, full=tried[0][1].gpu)
    place, there = (" on the GPU", gpu) if gpu else ("", host)
    lean = min(tried, key=lambda way: way[1].gpu)
    on_host = f" and {lean[1].host / 1e9:.0f} of the host's, where {host / 1e9:.0f} are free"
    raise ValueError(f"it needs {lean[1].gpu / 1e9:.0f} GB of memory{place} even with {flags(lean[0])}, and "
                     f"{there / 1e9:.0f} are free{on_host if gpu >= lean[1].gpu else ''}: use a smaller model, a shorter "
                     "--max-new-tokens, or a larger machine")


def flags(changes):
    """{"lora": 32, "gradient_checkpointing": True} -> "--lora 32 --gradient-checkpointing" """
    shown = ((name.replace("_", "-"), "" if value is True else f" {value}") for name, value in changes.items())
    return " ".join(f"--{name}{value}" for name, value in shown)


def in_words(changes, need, gpu, host, share, full):
    """'56 of 80 GB on the GPU, 107 of 128 GB on the host, with --optimizer-device cpu (without: 147 GB)'"""
    changes = {name: value for name, value in changes.items() if value != BUDGETS[0]}
    text = f"{need.gpu / 1e9:.1f} of {(gpu or host) / 1e9:.0f} GB"
    text += f" on the GPU, {need.host / 1e9:.0f} of {host / 1e9:.0f} GB on the host" if gpu else ""
    text += f", with {flags(changes)} (without: {full / 1e9:.0f} GB)" if need.gpu != full else ""
    return text + ("; that may not suffice, since a tenth should stay free" if share > 1 else "")


def context(config, max_new_tokens=None):
    """The model's context in tokens; ValueError if plans of max_new_tokens leave no room in it for a prompt."""
    tokens = getattr(config.get_text_config(), "max_position_embeddings", None) or 10**9
    most = tokens - min(1000, tokens // 2)  # the shortest prompts of the flow have some hundred tokens
    if max_new_tokens and max_new_tokens > most:
        raise ValueError(f"--max-new-tokens {max_new_tokens} leaves too little room for prompts in the {tokens} "
                         f"tokens of this model's context: use at most {most}")
    return tokens


# ------------------------------------------------------------------------------------ the memory that is there
def host_memory():
    """Bytes of the host's memory that are free, in a container those that it may still take."""
    try:
        free = 1024 * int(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())[1])
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        if limit.exists() and limit.read_text().strip() != "max":
            free = min(free, int(limit.read_text()) - int(used.read_text()))
        return free
    except OSError:                                                             # no Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bound_host_memory():
    """Let an allocation fail that the machine cannot hold: then a batch is halved, or a sentence says what to do.
    Without a bound Linux grants it, and later kills the process without a word."""
    status = Path("/proc/self/status")
    if status.exists():
        used = 1024 * int(re.search(r"VmData:\s*(\d+)", status.read_text())[1])
        bound, most = int(0.97 * host_memory()) + used, resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (bound if most < 0 else min(bound, most), most))


def main():
    parser = argparse.ArgumentParser(description="Will it fit? What train.py would choose on such a machine.")
    parser.add_argument("--model", required=True, help="folder or hub name; only its configuration is read")
    parser.add_argument("--gpu", type=float, required=True, help="GB (10^9 bytes) free on the card; 0: no GPU")
    parser.add_argument("--host", type=float, default=128, help="GB free in the host's memory")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="of a plan")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.gpu else torch.float32
    try:
        print("memory ", plan(config_of(args.model), 1e9 * args.gpu, 1e9 * args.host, dtype=dtype,
                              max_new_tokens=args.max_new_tokens, gradient_checkpointing=args.gpu > 0)[1])
    except ValueError as why:
        parser.exit(1, f"fit.py: {why}\n")


if __name__ == "__main__":
    main()




# --------------------------------------------------------------------------------------------------- a run of many questions
def batch_size(engines):
    """Questions in lock-step: 64; on a CPU a billion over the parameters (7 for a 135M), at least 2. A batch
    is kept when it ends: with 64, after hours. There 8 at once are only 3 % slower per question than 32."""
    models = [engine.model for engine in engines if isinstance(engine, HF)]
    largest = max([model.num_parameters() for model in models if model.device.type == "cpu"], default=1)
    return max(2, min(64, round(1e9 / largest)))
