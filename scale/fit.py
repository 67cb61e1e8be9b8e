"""Whether training fits into memory: its peak is predicted from the model's configuration alone.

    python -m scale.fit --model Qwen/Qwen2.5-7B-Instruct --gpu 80            what train.py would choose there
    python -m scale.fit --model Qwen/Qwen2.5-7B-Instruct --gpu 80 --ranks 8
    python -m scale.fit --table                                         Qwen2.5, on 1 to 8 cards of five sizes

    of = shapes(config_of("Qwen/Qwen2.5-7B-Instruct"))
    fit = predict(of, dtype=torch.bfloat16, token_budget=16384, max_new_tokens=1024,
                  gradient_checkpointing=True, optimizer_device="cpu")
    fit.gpu, fit.host                     # bytes: 56e9, 107e9
    plan(config, 80e9, 128e9, ...)        # {"optimizer_device": "cpu", ...}, "56 of 80 GB on the GPU, ..."

Bytes on each of N cards. P weights of s bytes in the dtype that computes (2 in bfloat16); A of adapters:

                         always                           rollouts       update
                         weights        moments  copy     gathered       gradients     on the host
    all weights          4 P/N          8 P/N    s P      s P            4 P/N         -
    optimizer on host    s P/N          -        s P      s P            s P/N         12 P of all cards
    adapters             s P + 4 A      8 A      -        -              4 A           -

"Copy" is the frozen copy, which plays the fixed modules and is π_ref; s P/N if it is π_ref alone.
Generating needs the policy whole; on one card it is not gathered if its weights are not float32 shards. The
peak is reached in one of two phases: generate() also has a cache, which is freed before the update; the
update also has gradients, activations, and the buffers of fully_shard.

Letters: n tokens of a micro-batch, K of them actions, d hidden size, f intermediate size, q and k widths of
queries and of keys, V vocabulary. The formulas count what autograd saves in a decoder layer of transformers
(RMSNorm in float32, sdpa, gated MLP); other layers mostly need less, but a recurrent layer without its CUDA
kernels (Mamba) needs much more.

A prompt that several turns share is computed once, as a tree (fast/trees.py). A micro-batch of trees has no
more tokens than any other, but an attention mask, which is counted. With shared prompts more of its tokens
are actions; that is not counted, and takes tens of MB. Logits exist in chunks where the head is plain
(fast/head.py).

bench/memory.py compares this with measured peaks (docs/scale.md: within 15 %). Small terms are dropped:
what generate() needs beside its cache, the buffers that gather the weights for it, copies of a weight in the
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
from transformers import AutoModelForCausalLM, Qwen2Config

from fast.head import CHUNK
from models.completion import NEW_TOKENS
from models.loading import config_of
from models.local import HF
from rewards.metrics import markdown

CONTEXT = 1 << 30         # bytes of CUDA's context and of the libraries' workspaces: assumed, not measured
CHANGED_LOGITS = "final_logit_softcapping", "logits_scaling", "logit_scale"     # the head is not plain
BUDGETS = 16384, 8192     # tokens of a micro-batch that plan() tries before the length of one turn
ON_GPU = dict(dtype=torch.bfloat16, max_new_tokens=NEW_TOKENS, gradient_checkpointing=True)
# {GB in a card's name: its bytes}; how many cards a machine has
CARDS, MACHINES = {24: 25.7e9, 40: 42.5e9, 48: 48.3e9, 80: 85.5e9, 141: 149e9}, (1, 2, 4, 8)
# Qwen2.5 as published: hidden, intermediate, layers, heads, key-value heads, vocabulary, tied embeddings
QWEN = {
    "0.5b": (896, 4864, 24, 14, 2, 151936, True), "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True), "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False), "32b": (5120, 27648, 64, 40, 8, 152064, False)}

# All in bytes. gpu: of each card, the larger of phases["generate"] and phases["update"]; host: of all ranks
# of one machine.
Fit = namedtuple("Fit", "gpu host parts phases")


def qwen(d, f, layers, heads, kv, vocabulary, tied):
    """The configuration of a model of Qwen2.5's kind."""
    return Qwen2Config(
        hidden_size=d, intermediate_size=f, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocabulary, tie_word_embeddings=tied, eos_token_id=None,
        max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


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
    ends = {module.weight for module in (model.get_input_embeddings(), head) if module is not None}
    return dict(
        parameters=model.num_parameters(), layers=text.num_hidden_layers, d=d, V=text.vocab_size,
        root=sum(weight.numel() for weight in ends),                        # embeddings and head; tied: once
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


def buffers(of, s, N, frozen):
    """Bytes that fully_shard holds beside the shards, at the moments of the update that may be the peak: (in
    a layer, at the logits, at the embeddings). Embeddings and head are one group, the root."""
    root, one_layer = of["root"], (of["parameters"] - of["root"]) // of["layers"]
    gathered = s * root                                         # the root, from the first layer to the last
    others = s * root * (0 < frozen < 1)                        # a sharded π_ref's root stays gathered, too
    head = s * of["V"] * of["d"]                                # its gradient waits for the embeddings'
    # Of a layer there are also its gradient, and the float32 copy of it that is summed over the ranks.
    in_layer = gathered + head + (3 * s + 4) * one_layer
    # The root: its gradient, the float32 copy, the sum. Tied: gathered, both gradients, and the two added up.
    at_embeddings = max((4 + max(s, 4 / N)) * root, 4 * s * root * (root == of["V"] * of["d"]))
    return in_layer + others, gathered + others, int(at_embeddings) + others


def state_bytes(of, lora=None):
    """Bytes of trainer/ in a checkpoint: the trained weights and their two moments, in float32."""
    return 12 * (of["adapter"] * lora if lora else of["parameters"])


def predict(of, *, dtype, token_budget, max_new_tokens, gradient_checkpointing, optimizer_device=None,
            lora=None, ranks=1, prompt=4096, generate_budget=None, context=CONTEXT, others=0, frozen=1):
    """The Fit of a training. of: shapes() of the model.

    token_budget: of a micro-batch. generate_budget: of generate(); None is 4 x token_budget, as in train.py.
    prompt, max_new_tokens: tokens of the longest turn. lora: rank of the adapters; None trains all weights.
    optimizer_device "cpu": float32 weights and moments are on the host. ranks: cards that share the weights.
    others: parameters of other models (--judge, ...). frozen: how much of a frozen copy each card holds: 1 if
    it plays modules, 1/ranks if it is π_ref alone, or 0.
    """
    s, N, P, A = dtype.itemsize, ranks, of["parameters"], of["adapter"] * (lora or 0)
    on_host, copy = bool(optimizer_device and not lora), 0 if lora else int(s * P * frozen)
    sharded = not lora and (N > 1 or not (on_host or s >= 4))   # else fully_shard has nothing to do
    turn = prompt + max_new_tokens
    n = max(token_budget, turn)                                 # a turn above the budget goes alone
    K = min(n, max(1, token_budget // turn) * max_new_tokens)
    tree = min(n, prompt + math.isqrt(prompt * (prompt + 6 * of["d"])))      # nodes of a row: fast/trees.py
    cached = max(turn, (generate_budget or 4 * token_budget) // turn * turn)
    in_layer, at_logits = activations(of, n, K, s, gradient_checkpointing, lora)
    beside = buffers(of, s, N, frozen) if sharded else (0, 0, 0)
    trained, moments = (4 * A, 8 * A) if lora else (s * P // N, 0) if on_host else (4 * P // N, 8 * P // N)
    parts = {
        "weights": trained + (s * P if lora else 0), "moments": moments,
        "frozen copy": copy, "other models": s * others, "gathered": s * P if sharded else 0,
        "cache of generate": cached * of["layers"] * 2 * of["k"] * s,       # keys and values
        "gradients": trained, "masks": s * n * tree,
        "activations, buffers": max(in_layer + beside[0], at_logits + beside[1], beside[2]),
        "host: optimizer": 12 * P if on_host else 0,
        "host: checkpoint": s * P}                              # rank 0 gathers the weights that it saves
    total = lambda *names: sum(parts[name] for name in names)
    always = context + total("weights", "moments", "frozen copy", "other models")
    phases = {"generate": always + total("gathered", "cache of generate"),
              "update": always + total("gradients", "activations, buffers", "masks")}
    return Fit(max(phases.values()), total("host: optimizer", "host: checkpoint"), parts, phases)


def plan(config, gpu, host, given=(), token_budget=None, prompt=4096, **settings):
    """How to train in the free memory: (settings of train.py to change, the text of its "memory" line).

    gpu, host: free bytes of each card, and of the host; gpu 0: there is no GPU, and all ranks share the
    host's memory. given: names of settings that the user chose, which stay. settings: the others of
    predict().

    The first of ways_to_train() that leaves a tenth of the memory free is taken. If none does, the one
    that needs least is taken if it fits into 1.15 times the memory, since predict() can be wrong by 15 %.
    If it does not, a ValueError says what is missing.
    """
    of, ranks = shapes(config), settings.get("ranks", 1)
    settings |= {"prompt": prompt, "context": CONTEXT if gpu else 0}
    ways = ways_to_train(gpu, given, token_budget, prompt + settings["max_new_tokens"])
    tried = fits(of, ways, settings)
    if not gpu:
        tried = [(way, fit._replace(gpu=ranks * fit.gpu + fit.parts["host: optimizer"], host=0))
                 for way, fit in tried]
    for share, order in ((0.9, tried), (1.15, sorted(tried, key=lambda each: each[1].gpu))):
        if found := first(order, share * (gpu or host), share * host):
            return found[0], memory_line(*found, gpu, host, share, without=tried[0][1].gpu, ranks=ranks)
    raise ValueError(refusal(tried, gpu, host))


def ways_to_train(gpu, given, token_budget, turn):
    """The changes of settings to try, in this order: all weights; the optimizer on the host (without a GPU:
    gradient checkpointing); adapters. Each with large micro-batches first. What was given stays."""
    ways = [{}, {"optimizer_device": "cpu"}, {"lora": 32}]
    if not gpu:
        ways = [{}, {"gradient_checkpointing": True}, {"gradient_checkpointing": True, "lora": 32}]
    chosen = {"lora", "optimizer_device"}                       # with one of them the user has chosen the way
    fixed = {*given, *(chosen if chosen & {*given} else ())}
    ways = [way for way in ways if not fixed & way.keys()]
    budgets = [token_budget] if token_budget else [b for b in BUDGETS if b > turn] + [turn]
    return [way | {"token_budget": budget} for way in ways for budget in budgets]


def fits(of, ways, settings):
    """[(way, its Fit)]. generate() halves its batches down to a single row if it must: generate_budget 1."""
    return [(way, predict(of, **settings | {"generate_budget": 1} | way)) for way in ways]


def first(tried, gpu, host=math.inf):
    """The first (way, Fit) that needs no more; None if all do."""
    return next((each for each in tried if each[1].gpu <= gpu and each[1].host <= host), None)


def refusal(tried, gpu, host):
    """Why nothing fits."""
    changes, least = min(tried, key=lambda each: each[1].gpu)
    needs, free = f"{least.gpu / 1e9:.0f} GB of memory", f"{(gpu or host) / 1e9:.0f}"
    needs += " on the GPU" if gpu else ""
    if gpu >= least.gpu:                                        # it is the host's memory that is short
        needs, free = f"{needs} and {least.host / 1e9:.0f} on the host", f"{free} and {host / 1e9:.0f}"
    return (f"it needs {needs} even with {flags(changes)}, and {free} are free: use a smaller model, a "
            "shorter --max-new-tokens, or a larger machine (python -m scale.fit --table)")


def flags(changes):
    """{"lora": 32, "gradient_checkpointing": True} -> "--lora 32 --gradient-checkpointing" """
    shown = [f"--{name} {'' if value is True else value}".strip() for name, value in changes.items() if value]
    return " ".join(shown).replace("_", "-")


def memory_line(changes, need, gpu, host, share, without, ranks=1):
    """'56 of 80 GB on the GPU, 107 of 128 GB on the host, with --optimizer-device cpu (without: 153 GB)'"""
    changes = {name: value for name, value in changes.items() if value != BUDGETS[0]}
    text = f"{need.gpu / 1e9:.1f} of {(gpu or host) / 1e9:.0f} GB"
    text += f" on {f'each of {ranks} GPUs' if ranks > 1 else 'the GPU'}" if gpu else ""
    text += f", {need.host / 1e9:.0f} of {host / 1e9:.0f} GB on the host" if gpu else ""
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


def table(host):
    """Markdown: the way that plan() chooses for Qwen2.5 on each machine, with `host` GB of memory a card."""
    rows = [["model", "cards", *(f"{box} GB" for box in CARDS)]]
    for name, sizes in QWEN.items():
        of = shapes(qwen(*sizes))
        rows += [[name.upper(), str(cards), *(cell(of, cards, size, 1e9 * host) for size in CARDS.values())]
                 for cards in MACHINES]
    return markdown(rows)


def cell(of, cards, size, host):
    """"lora / host": with a frozen copy of the model / without one, if that makes a difference."""
    ways, words = ways_to_train(size, (), None, 4096 + NEW_TOKENS), []
    for frozen in (1, 0):
        tried = fits(of, ways, ON_GPU | {"ranks": cards, "frozen": frozen})
        changes, _ = first(tried, 0.9 * size, 0.9 * host * cards) or (None, None)
        words.append("-" if changes is None else "lora" if "lora" in changes else
                     "host" if "optimizer_device" in changes else "all")
    return " / ".join(dict.fromkeys(words))


def main():
    parser = argparse.ArgumentParser(prog="python -m scale.fit", description="What train.py would choose.")
    parser.add_argument("--model", help="folder or hub name; only its configuration is read")
    parser.add_argument("--gpu", type=float, help="GB of each card: 24, 40, 48, 80 or 141 as on its box, "
                        "else the GB (1e9 bytes) that are free; 0: no GPU")
    parser.add_argument("--host", type=float, default=128, help="GB free in the host's memory; in the table, "
                        "for each card (default: 128)")
    parser.add_argument("--ranks", type=int, default=1, help="number of cards")
    parser.add_argument("--table", action="store_true", help="Qwen2.5 from 0.5B to 32B on many machines")
    args = parser.parse_args()
    if args.table:
        return print(table(args.host))
    if not args.model or args.gpu is None:
        parser.error("give --model and --gpu, or --table")
    settings = ON_GPU if args.gpu else ON_GPU | {"dtype": torch.float32, "gradient_checkpointing": False}
    try:
        print("memory ", plan(config_of(args.model), CARDS.get(args.gpu, 1e9 * args.gpu), 1e9 * args.host,
                              ranks=args.ranks, **settings)[1])
    except ValueError as why:
        parser.exit(2, f"fit: {why}\n")


if __name__ == "__main__":
    main()
