"""Will a training fit into memory? Its peak is predicted from the model's configuration alone.

    python -m scale.fit --model Qwen/Qwen2.5-7B-Instruct --gpu 80     # what train.py would choose

    of = shapes(config_of("Qwen/Qwen2.5-7B-Instruct"))
    fit = predict(of, dtype=torch.bfloat16, token_budget=16384, max_new_tokens=1024,
                  gradient_checkpointing=True)
    fit.gpu, fit.host                     # bytes: 147e9, 15e9
    plan(config, 80e9, 128e9, ...)        # {"optimizer_device": "cpu", ...}, "56 of 80 GB on the GPU, ..."

The policy, the frozen copy (π_ref and all fixed modules) and the optimizer's state are always in memory. The
peak is reached in one of two phases: generate() also has a cache, which is freed before the update; the
update also has gradients and activations.

Letters: n tokens of a micro-batch, K of them actions, d hidden size, f intermediate size, q and k widths of
queries and of keys, V vocabulary, s bytes of a number in the dtype. The formulas count what autograd saves in
a decoder layer of transformers (RMSNorm in float32, sdpa, gated MLP); other layers mostly need less, but
a recurrent layer without its CUDA kernels (Mamba) needs much more.

A prompt that several turns share is computed once, as a tree (scale/trees.py). A micro-batch of trees has no
more tokens than any other, but an attention mask, which is counted. With shared prompts more of its tokens
are actions; that is not counted, and takes tens of MB. Logits exist in chunks where the head is plain
(scale/head.py).

All peaks that bench/memory.py measures are predicted within 15 %. Small terms are dropped: what generate()
needs beside its cache, the gradient of the embeddings before it is added, the float32 copies in the
optimizer's step. Fragmentation, tools and NCCL's buffers are not counted: a tenth should stay free.
"""
import argparse
import math
import os
import re
import resource
from collections import namedtuple
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from models.completion import NEW_TOKENS
from models.loading import config_of
from models.local import HF
from scale.head import CHUNK

CONTEXT = 1 << 30         # bytes of CUDA's context and of the libraries' workspaces: assumed, not measured
CHANGED_LOGITS = "final_logit_softcapping", "logits_scaling", "logit_scale"     # the head is not plain
BUDGETS = 16384, 8192     # tokens of a micro-batch that plan() tries before the length of one turn

# All in bytes. gpu: the larger of phases["generate"] and phases["update"]; host: of all ranks of one machine.
Fit = namedtuple("Fit", "gpu host parts phases")


def shapes(config):
    """The sizes that the formulas need. On the meta device tensors have no bytes, so no weights are made.

    ValueError if config.json describes no model."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ArithmeticError, LookupError, TypeError, AttributeError, RuntimeError) as why:
        raise ValueError(f"{config.name_or_path!r}: config.json describes no model that could be made "
                         f"({type(why).__name__}: {why})") from why
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    text = config.get_text_config()
    d, heads = text.hidden_size, getattr(text, "num_attention_heads", 0)  # 0: Mamba, RWKV have no attention
    width = getattr(text, "head_dim", None) or d // max(1, heads)
    return dict(
        parameters=model.num_parameters(), layers=text.num_hidden_layers, d=d, V=text.vocab_size,
        q=heads * width, k=(getattr(text, "num_key_value_heads", None) or heads) * width,
        f=getattr(text, "intermediate_size", None) or 4 * d,
        plain=not any(getattr(text, name, None) for name in CHANGED_LOGITS),
        adapter=sum(m.in_features + m.out_features for m in linears))       # LoRA weights of rank 1


def layer(d, f, q, k, s, lora):
    """Bytes a token in one layer: (kept for the backward pass, needed for a moment in the backward pass)."""
    wide = 4 if lora else s                                     # peft copies the inputs of linears to float32
    norms, attention = 2 * 4 * d, s * 2 * (q + k)               # float32 inputs; q, output, k, v
    mlp, inputs = s * 3 * f, wide * (4 * d + f)                 # gate, silu(gate), up; inputs of the linears
    return norms + attention + mlp + inputs, wide * 3 * f       # gradients of the MLP's three


def activations(of, n, K, s, gradient_checkpointing, lora):
    """Bytes of activations at the two moments that may be the peak: (in a layer, at the logits)."""
    kept, passing = layer(of["d"], of["f"], of["q"], of["k"], s, lora)
    inputs = n * of["layers"] * (s * of["d"] if gradient_checkpointing else kept)
    logits, head = K * of["V"], of["V"] * of["d"]
    if logits <= CHUNK:
        at_logits = 12 * logits                                 # three float32 copies in the log-softmax
    elif of["plain"]:                                           # one copy of CHUNK logits at a time
        at_logits = (4 + s % 4) * CHUNK + 2 * s * K * of["d"] + s * head * (not lora)
    else:                                                       # all logits with their gradient
        at_logits = 2 * s * logits + 12 * CHUNK
    return inputs + n * (kept * gradient_checkpointing + passing), inputs + at_logits


def state_bytes(of, s, lora=None, optimizer_device=None):
    """Bytes of the optimizer's state: moments, and masters unless the weights are float32 themselves."""
    if lora:
        return 8 * of["adapter"] * lora
    return of["parameters"] * (8 if s >= 4 and not optimizer_device else 12)


def predict(of, *, dtype, token_budget, max_new_tokens, gradient_checkpointing, optimizer_device=None,
            lora=None, ranks=1, prompt=4096, generate_budget=None, context=CONTEXT, others=0):
    """The Fit of a training. of: shapes() of the model.

    token_budget: of a micro-batch. generate_budget: of generate(); None is 4 x token_budget, as in train.py.
    prompt, max_new_tokens: tokens of the longest turn. lora: rank of the adapters; None trains all weights.
    optimizer_device "cpu": masters and moments are on the host. ranks: GPUs that share masters and moments.
    others: parameters of other models (--judge, ...).
    """
    s, P, trained = dtype.itemsize, of["parameters"], of["adapter"] * (lora or 0)
    turn = prompt + max_new_tokens
    n = max(token_budget, turn)                                 # a turn above the budget goes alone
    K = min(n, max(1, token_budget // turn) * max_new_tokens)
    tree = min(n, prompt + math.isqrt(prompt * (prompt + 6 * of["d"])))      # nodes of a row: scale/trees.py
    state = state_bytes(of, s, lora, optimizer_device)
    cached = max(turn, (generate_budget or 4 * token_budget) // turn * turn)
    parts = {
        "weights": P * s + trained * 4, "frozen copy": 0 if lora else P * s, "other models": others * s,
        "optimizer": 0 if optimizer_device else state // ranks, "gradients": trained * 4 if lora else P * s,
        "activations": max(activations(of, n, K, s, gradient_checkpointing, lora)),
        "masks": s * n * tree,
        "cache of generate": cached * of["layers"] * 2 * of["k"] * s,       # keys and values
        "host: optimizer": state if optimizer_device else 0,
        "host: checkpoint": P * s + (state if ranks > 1 else 0)}            # rank 0 gathers all state
    always = context + sum(parts[name] for name in ("weights", "frozen copy", "other models", "optimizer"))
    phases = {"generate": always + parts["cache of generate"],
              "update": always + sum(parts[name] for name in ("gradients", "activations", "masks"))}
    return Fit(max(phases.values()), parts["host: optimizer"] + parts["host: checkpoint"], parts, phases)


def plan(config, gpu, host, given=(), token_budget=None, prompt=4096, **settings):
    """How to train in the free memory: (settings of train.py to change, the text of its "memory" line).

    gpu, host: free bytes; gpu 0: there is no GPU, and everything is in the host's memory. given: names of
    settings that the user chose, which stay. settings: the others of predict().

    Three ways are tried, each with large micro-batches first, and the first that fits is taken: all weights;
    the optimizer on the host (without a GPU: gradient checkpointing); adapters. A tenth of the memory stays
    free. If nothing fits so, up to 1.15 times the memory is tried, since predict() can be wrong by 15 %.
    ValueError if nothing fits then, either.
    """
    ways = [{}, {"optimizer_device": "cpu"}, {"lora": 32}]
    if not gpu:
        ways = [{}, {"gradient_checkpointing": True}, {"gradient_checkpointing": True, "lora": 32}]
    fixed = set(given)
    if fixed & {"lora", "optimizer_device"}:                    # with one of them the user has chosen the way
        fixed |= {"lora", "optimizer_device"}
    ways = [way for way in ways if not fixed & way.keys()]
    turn, of = prompt + settings["max_new_tokens"], shapes(config)
    budgets = [token_budget] if token_budget else [b for b in BUDGETS if b > turn] + [turn]
    # generate_budget 1: generate() halves its batches down to a single row if it must.
    settings |= {"prompt": prompt, "generate_budget": 1, "context": CONTEXT if gpu else 0}
    tried = [way | {"token_budget": budget} for way in ways for budget in budgets]
    tried = [(changes, predict(of, **settings | changes)) for changes in tried]
    for share in (0.9, 1.15):
        for changes, need in tried:
            if need.gpu <= share * (gpu or host) and (need.host <= share * host or not gpu):
                return changes, memory_line(changes, need, gpu, host, share, without=tried[0][1].gpu)
    changes, need = min(tried, key=lambda way: way[1].gpu)
    on_host = f" and {need.host / 1e9:.0f} of the host's, where {host / 1e9:.0f} are free"
    raise ValueError(
        f"it needs {need.gpu / 1e9:.0f} GB of memory{' on the GPU' if gpu else ''} even with "
        f"{flags(changes)}, and {(gpu or host) / 1e9:.0f} are free{on_host if gpu >= need.gpu else ''}: "
        "use a smaller model, a shorter --max-new-tokens, or a larger machine")


def flags(changes):
    """{"lora": 32, "gradient_checkpointing": True} -> "--lora 32 --gradient-checkpointing" """
    shown = [f"--{name} {'' if value is True else value}".strip() for name, value in changes.items()]
    return " ".join(shown).replace("_", "-")


def memory_line(changes, need, gpu, host, share, without):
    """'56 of 80 GB on the GPU, 107 of 128 GB on the host, with --optimizer-device cpu (without: 147 GB)'"""
    changes = {name: value for name, value in changes.items() if value != BUDGETS[0]}
    text = f"{need.gpu / 1e9:.1f} of {(gpu or host) / 1e9:.0f} GB"
    text += f" on the GPU, {need.host / 1e9:.0f} of {host / 1e9:.0f} GB on the host" if gpu else ""
    text += f", with {flags(changes)} (without: {without / 1e9:.0f} GB)" if need.gpu != without else ""
    return text + ("; that may not suffice, since a tenth should stay free" if share > 1 else "")


def context(config, max_new_tokens=None):
    """The model's context in tokens; ValueError if max_new_tokens leaves no room in it for prompts."""
    tokens = getattr(config.get_text_config(), "max_position_embeddings", None) or 10**9
    most = tokens - min(1000, tokens // 2)  # the shortest prompts have some hundred tokens
    if max_new_tokens and max_new_tokens > most:
        raise ValueError(f"--max-new-tokens {max_new_tokens} leaves too little room for prompts in the "
                         f"{tokens} tokens of this model's context: use at most {most}")
    return tokens


def host_memory():
    """Free bytes of the host's memory; in a container, at most the bytes that it may still take."""
    try:
        free = 1024 * int(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())[1])
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        if limit.exists() and limit.read_text().strip() != "max":
            free = min(free, int(limit.read_text()) - int(used.read_text()))
        return free
    except OSError:                                             # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bound_host_memory():
    """Let allocations beyond the machine's memory fail: then a batch is halved, or an error says what to do.
    Without this bound, Linux grants such an allocation and later kills the process without an error."""
    status = Path("/proc/self/status")
    if status.exists():
        used = 1024 * int(re.search(r"VmData:\s*(\d+)", status.read_text())[1])
        bound, most = int(0.97 * host_memory()) + used, resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (bound if most < 0 else min(bound, most), most))


def batch_size(engines):
    """How many questions run in lock-step: 64; on a CPU 1e9 / parameters (7 for a 135M model), at least 2.

    Results are written when a batch ends, and on a CPU a batch of 64 takes hours. Small batches cost little
    there: 8 questions take only 3 % longer per question than 32."""
    models = [engine.model for engine in engines if isinstance(engine, HF)]
    largest = max([model.num_parameters() for model in models if model.device.type == "cpu"], default=1)
    return max(2, min(64, round(1e9 / largest)))


def main():
    parser = argparse.ArgumentParser(prog="python -m scale.fit", description="What train.py would choose.")
    parser.add_argument("--model", required=True, help="folder or hub name; only its configuration is read")
    parser.add_argument("--gpu", type=float, required=True, help="GB (1e9 bytes) free on the card; 0: no GPU")
    parser.add_argument("--host", type=float, default=128, help="GB free in the host's memory")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.gpu else torch.float32
    try:
        print("memory ", plan(config_of(args.model), 1e9 * args.gpu, 1e9 * args.host, dtype=dtype,
                              max_new_tokens=NEW_TOKENS, gradient_checkpointing=args.gpu > 0)[1])
    except ValueError as why:
        parser.exit(1, f"fit: {why}\n")


if __name__ == "__main__":
    main()
