"""What fits: how to train in the free memory, chosen from the model's configuration alone.

    python -m scale.fit Qwen/Qwen2.5-7B-Instruct --gpu 80 --host 128

says what train.py would choose on a machine with a card of 80 GiB.

Bytes a weight on each of N cards, where the model computes in bfloat16. P weights; A of adapters.
(In float32: twice as much for weights, gradients and copies, and no masters.)

                         weights  gradients  masters, moments   frozen copy   on the host
    all weights           2/N       2/N          12/N               2              2
    optimizer on host     2/N       2/N           -                 2             12 + 2
    adapters              2 + 2 A/P 2 A/P        12 A/P             -              2

"Frozen copy": the model that plays the other modules and is π_ref. With adapters it is the policy
with its adapters off. "On the host": also the weights while they are saved. To this comes the
larger of two: in an update, the activations of a micro-batch; while sampling, the cache, and with
several cards 2 bytes a weight, because each card then holds all weights.

This is an estimate; a fifth of the card is left free. If a batch does not fit all the same,
flow_grpo.update() and models/local.Engine halve it.
"""

import argparse
import os
import re
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fast import prefix
from models import local
from models.completion import is_server
from scale import adapters
from world.mistakes import Mistake

CARD, HOST = 0.8, 0.95  # the shares of the free memory that are used
BUDGETS = 16_384, 8_192, 4_096  # tokens of a micro-batch that are tried
FIXED = 1e9  # bytes on a card: CUDA's context, and a chunk of logits in flow_grpo.token_logps()


class Sizes(NamedTuple):
    """Of a model: made without memory, on the meta device. Counts of numbers, but for in_parts."""

    weights: int
    ends: int  # weights of the embeddings and the head, which fully_shard keeps whole in an update
    adapters: int  # weights of adapters
    checkpointed: int  # activations of a token in an update, with gradient checkpointing
    kept: int  # the same without
    cache: int  # keys and values of a token
    prefill: int  # of a token that is read while sampling, in one layer
    in_parts: bool  # are prompts read in chunks? (fast/prefix.py)
    vocabulary: int


def sizes(name, rank=32):
    try:
        config = AutoConfig.from_pretrained(local.base_of(name) or name, trust_remote_code=False)
    except (OSError, ValueError) as why:
        raise Mistake(f"there is no model {name!r}: {local.headline(why)}") from why
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    depth, d = text.num_hidden_layers, text.hidden_size
    wide = getattr(text, "intermediate_size", None) or 4 * d
    heads = getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "head_dim", None) or d // heads
    queries, keys = width * heads, width * (getattr(text, "num_key_value_heads", None) or heads)
    normed = any("q_norm" in name for name, _ in model.named_modules())  # Qwen3
    # numbers that autograd keeps of a token in a layer, as a test measures them
    layer = 9 * d + 4 * wide + (5 if normed else 2) * (queries + keys)
    passing = 2 * d + 3 * wide  # its gradients in the layer whose turn it is
    ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return Sizes(
        weights=model.num_parameters(),
        ends=sum(weight.numel() for weight in {*ends}),  # one, if they are tied
        adapters=adapters.count(model, rank),
        checkpointed=depth * d + layer + passing,
        kept=depth * layer + passing,
        cache=2 * depth * keys,
        prefill=6 * d + 4 * wide,
        in_parts=prefix.in_parts(model),
        vocabulary=text.vocab_size,
    )


class Need(NamedTuple):
    """Bytes on each card in an update, and while sampling without the cache; bytes on the host."""

    update: float
    sampling: float
    host: float


def needed(of, way, ranks, itemsize, others=0, frozen=True):
    """The Need of training in this way. others: the weights of other models on the card. frozen: is
    there a frozen copy?"""
    weights = on_host = itemsize * of.weights
    activations = of.checkpointed if way["gradient_checkpointing"] else of.kept
    activations *= way["token_budget"] * itemsize
    fixed, whole = FIXED + itemsize * others, 0
    if way.get("lora"):
        fixed += weights + 16 * of.adapters
    else:
        masters = (12 if itemsize < 4 else 8) * of.weights  # and moments; float32 needs no masters
        if way.get("optimizer_device"):
            masters, on_host = 0, weights + 12 * of.weights
        fixed += (2 * weights + masters) / ranks + weights * frozen
        if ranks > 1:
            whole, activations = weights, activations + itemsize * of.ends
    return Need(fixed + activations, fixed + whole, on_host)


def ways(given, gpu, adapters_first):
    """The ways to train, in the order in which they are tried: {flag: value}, with those given."""
    whole = [{}] + [{"optimizer_device": "cpu"}] * (gpu > 0)
    lora = [{"lora": 32}] * adapters.installed()
    kinds = lora + whole if adapters_first and gpu else whole + lora
    if given.get("lora") or given.get("optimizer_device"):
        kinds = [{}]
    for kind in kinds:
        for checkpointing in [True] if gpu else [False, True]:  # on a card it is always worth it
            for budget in BUDGETS:
                way = {"gradient_checkpointing": checkpointing, "token_budget": budget}
                yield kind | way | given


def choose(
    name, gpu, host, given=(), ranks=1, itemsize=2, others=(), frozen=True, adapters_first=False
):
    """(how to train: {flag: value}, lines that say so): the first way that fits, or Mistake.

    gpu, host: free bytes of each card, and of the host; gpu 0: there is no GPU. given: {flag:
    value} of those that the user has chosen. others: names of other models; those that are served
    take no memory here. frozen: see needed(). adapters_first: on a GPU, prefer adapters to all
    weights, if peft is installed."""
    given, tried = dict(given), []
    others = sum(sizes(other).weights for other in others if not is_server(other))
    if not gpu:
        given.pop("optimizer_device", None)  # everything is in the host's memory
    if base := local.base_of(name):
        raise Mistake(f"{name} holds adapters: go on with --resume, or train its base, {base}")
    if given.get("lora"):
        local.peft()  # or one sentence
    of = sizes(name, given.get("lora") or 32)

    def need_of(way):  # (bytes on each card, on the host)
        need = needed(of, way, ranks, itemsize, others, frozen)
        card = max(need.update, need.sampling)
        return (card, need.host) if gpu else (0, ranks * (card - FIXED))

    def lacking(one):  # bytes
        _, card, on_host = one
        return max(0, card - CARD * gpu) + max(0, on_host - (HOST if gpu else CARD) * host)

    for way in ways(given, gpu, adapters_first):
        card, on_host = need_of(way)
        tried.append((way, card, on_host))
        if not lacking(tried[-1]):
            break
    else:
        way, *least = min(tried, key=lacking)
        needs = f"{name} needs {gigabytes(*least)} even with {shown(way)}"
        cure = "use a smaller model or a larger machine"
        cure += ", or give --lora 32" * (given.get("lora") == 0)
        cure += "" if adapters.installed() or "lora" in given else ", or install peft"
        raise Mistake(f"{needs}, and {gigabytes(gpu, host)} are free: {cure}")
    lines = [
        f"memory  {gigabytes(gpu, host)} are free",
        f"        {gigabytes(card, on_host)} are needed for {shown(way)}",
    ]
    kinds = {}  # of all that was tried, the first way of each kind
    for one in tried[:-1]:
        kinds.setdefault(kind_of(one[0]), one)
    for kind, (first, *more) in kinds.items():
        if kind != kind_of(way):
            lines.append(f"        {gigabytes(*more)} would be needed for {shown(first)}")
    if gpu and not adapters.installed() and "lora" not in given:
        less = gigabytes(*need_of(way | {"lora": 32, "optimizer_device": None}))
        lines.append(f"        {less} would be needed for --lora 32: pip install peft")
    if gpu:  # what is left while sampling
        need = needed(of, way, ranks, itemsize, others, frozen)
        way["sampling_bytes"] = int(CARD * gpu - need.sampling)
    return way, lines


def give_room(engine, free, plain=False):
    """Let the batches of a local model take so many bytes while it samples.

    A token needs its cache. A row needs what is computed at a time: a chunk of its prompt in one
    layer, and its logits, of which generate() and distribution() make four copies in float32. Where
    prompts cannot be read in chunks, each of their tokens counts."""
    of, itemsize = sizes(engine.name), engine.model.dtype.itemsize
    token, row = itemsize * of.cache, 18 * of.vocabulary
    if of.in_parts and not plain:
        row += itemsize * prefix.CHUNK * of.prefill
    else:
        token += itemsize * of.prefill
    engine.sampling_tokens, engine.row_tokens = max(1, free // token), row // token


def kind_of(way):
    return way.get("lora"), way.get("optimizer_device")


def gigabytes(card, on_host):
    """'56.3 GiB on each GPU and 107 GiB on the host'"""
    on_gpu = f"{card / 2**30:.1f} GiB on each GPU and " if card else ""
    return f"{on_gpu}{on_host / 2**30:.1f} GiB on the host"


def shown(way):
    """{"lora": 32, "gradient_checkpointing": True} -> "--lora 32 --gradient-checkpointing" """
    given = {name.replace("_", "-"): value for name, value in way.items() if value}
    words = [f"--{name}" + f" {value}" * (value is not True) for name, value in given.items()]
    return "all weights, " * (not way.get("lora")) + " ".join(words)


def free_memory(device):
    """(bytes free on the GPU, or 0; bytes free on the host, or what a container may still take)."""
    gpu = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    if not Path("/proc/meminfo").exists():  # not Linux
        return gpu, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host = 1024 * int(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())[1])
    names = "max", "current", "stat"
    limit, used, stat = (Path(f"/sys/fs/cgroup/memory.{name}") for name in names)
    if limit.exists() and limit.read_text().strip() != "max":
        # a cache of files is given back on demand
        cached = re.search(r"^inactive_file (\d+)", stat.read_text(), re.M)[1]
        host = min(host, int(limit.read_text()) - int(used.read_text()) + int(cached))
    return gpu, host


if __name__ == "__main__":
    about = "What train.py would choose."
    parser = argparse.ArgumentParser(prog="python -m scale.fit", description=about)
    parser.add_argument("model", help="folder or hub name; only its configuration is read")
    parser.add_argument("--gpu", type=float, default=80, help="GiB free on each card; 0: none")
    parser.add_argument("--host", type=float, default=128, help="GiB free on the host")
    parser.add_argument("--ranks", type=int, default=1, help="number of cards")
    parser.add_argument("--paper", action="store_true", help="as train.py --paper: all weights")
    args = parser.parse_args()
    settings = dict(ranks=args.ranks, itemsize=2 if args.gpu else 4)
    settings["adapters_first"] = args.ranks == 1
    settings["given"] = {"lora": 0} if args.paper else {}
    try:
        _, LINES = choose(args.model, args.gpu * 2**30, args.host * 2**30, **settings)
    except Mistake as why:
        parser.error(str(why))
    print(*LINES, sep="\n")
