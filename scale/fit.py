"""What fits: how to train in the free memory, chosen from the model's configuration alone.

    python -m scale.fit Qwen/Qwen2.5-7B-Instruct --gpu 80 --host 128

says what train.py would choose on a machine with a card of 80 GB.

Bytes a weight on each of N cards, where the model computes in bfloat16. P weights; A of adapters.
(In float32: twice as much for weights, gradients and copies, and no masters.)

                         weights  gradients  masters, moments   gathered   frozen copy   on the host
    all weights           2/N       2/N          12/N           2 if N > 1     2              2
    optimizer on host     2/N       2/N           -             2 if N > 1     2             12 + 2
    adapters              2         4 A/P        12 A/P         -              -              2

"Frozen copy": the model that plays the other modules and is π_ref. With adapters it is the policy
with its adapters off. "On the host": also the weights while they are saved. To these come the
activations of a micro-batch. Sampling has the same memory for its cache.

This is an estimate; a fifth of the card is left free. If a micro-batch does not fit all the same,
flow_grpo.update() halves it.
"""

import argparse
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models import local
from scale import adapters
from world.mistakes import Mistake

CARD, HOST = 0.8, 0.95  # the shares of the free memory that are used
BUDGETS = 16_384, 8_192, 4_096  # tokens of a micro-batch that are tried
FIXED = 1e9  # bytes on a card: CUDA's context, and a chunk of logits in flow_grpo.token_logps()


class Sizes(NamedTuple):
    """Of a model: made without memory, on the meta device. Bytes are those of bfloat16."""

    weights: int
    adapters: Callable  # () -> weights of adapters
    checkpointed: int  # bytes of activations a token in an update, with gradient checkpointing
    kept: int  # the same without
    sampling: int  # bytes a token while sampling: its cache, and its prompt in one layer


def sizes(name, rank=32):
    try:
        config = AutoConfig.from_pretrained(local.base_of(name) or name)
    except OSError as why:
        raise Mistake(f"there is no model {name!r}: {str(why).splitlines()[0]}") from why
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    trained = cache(lambda: adapters.count(model, rank))
    text = config.get_text_config()
    depth, d = text.num_hidden_layers, text.hidden_size
    wide = getattr(text, "intermediate_size", None) or 4 * d
    heads = getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "head_dim", None) or d // heads
    keys = 2 * depth * width * (getattr(text, "num_key_value_heads", None) or heads)
    layer = 12 * d + 4 * wide  # numbers that autograd keeps of a token in a layer
    passing = 2 * d + 3 * wide  # its gradients in the layer whose turn it is
    checkpointed = depth * d + layer + passing
    kept = depth * layer + passing
    return Sizes(model.num_parameters(), trained, 2 * checkpointed, 2 * kept, 2 * (keys + 4 * wide))


def needed(of, how, ranks, itemsize, others):
    """(bytes on each card, of which activations, bytes on the host) of training in this way."""
    weights = on_host = itemsize * of.weights
    if how.get("lora"):
        card = weights + 16 * of.adapters()
    else:
        masters = (12 if itemsize < 4 else 8) * of.weights  # and moments; float32 needs no masters
        if how.get("optimizer_device"):
            masters, on_host = 0, weights + 12 * of.weights
        card = (2 * weights + masters) / ranks + weights * (ranks > 1) + weights
    activations = of.checkpointed if how["gradient_checkpointing"] else of.kept
    activations *= how["token_budget"] * itemsize / 2
    return card + itemsize * others + activations + FIXED, activations, on_host


def ways(given, gpu):
    """The ways to train, in the order in which they are tried: {flag: value}, with those given."""
    kinds = [{}] + [{"optimizer_device": "cpu"}] * (gpu > 0) + [{"lora": 32}] * adapters.installed()
    if given.get("lora") or given.get("optimizer_device"):
        kinds = [{}]
    for kind in kinds:
        for checkpointing in [True] if gpu else [False, True]:  # on a card it is always worth it
            for budget in BUDGETS:
                how = {"gradient_checkpointing": checkpointing, "token_budget": budget}
                yield kind | how | given


def choose(name, gpu, host, given=(), ranks=1, itemsize=2, others=0):
    """(how to train: {flag: value}, lines that say so): the first way that fits, or Mistake.

    gpu, host: free bytes of each card, and of the host; gpu 0: there is no GPU. given: {flag:
    value} of those that the user has chosen. others: the weights of other models on the card."""
    given, tried = dict(given), []
    if not gpu:
        given.pop("optimizer_device", None)  # everything is in the host's memory
    if base := local.base_of(name):
        raise Mistake(f"{name} holds adapters: go on with --resume, or train its base, {base}")
    if given.get("lora"):
        local.peft()  # or one sentence
    of = sizes(name, given.get("lora") or 32)
    for how in ways(given, gpu):
        card, activations, on_host = needed(of, how, ranks, itemsize, others)
        if not gpu:
            card, on_host = 0, ranks * (card - FIXED)
        tried.append((how, card, on_host))
        if card <= CARD * gpu and on_host <= (HOST if gpu else CARD) * host:
            break
    else:
        how, *least = min(tried, key=lambda way: sum(way[1:]))
        needs = f"{name} needs {gigabytes(*least)} even with {shown(how)}"
        cure = "use a smaller model or a larger machine"
        cure += "" if adapters.installed() else ", or install peft"
        raise Mistake(f"{needs}, and {gigabytes(gpu, host)} are free: {cure}")
    if gpu:  # what is left while sampling, when there are no activations
        spare = CARD * gpu - card + activations
        how["sampling_tokens"] = int(spare / of.sampling * 2 / itemsize)
    lines = [
        f"memory  {gigabytes(gpu, host)} are free",
        f"        {gigabytes(card, on_host)} are needed for {shown(how)}",
    ]
    kinds = {}  # of all that was tried, the first way of each kind
    for way in tried[:-1]:
        kinds.setdefault(kind_of(way[0]), way)
    for kind, (first, *more) in kinds.items():
        if kind != kind_of(how):
            lines.append(f"        {gigabytes(*more)} would be needed for {shown(first)}")
    return how, lines


def kind_of(how):
    return how.get("lora"), how.get("optimizer_device")


def gigabytes(card, on_host):
    """'56.3 GB on each GPU and 107 GB on the host'"""
    on_gpu = f"{card / 1e9:.1f} GB on each GPU and " if card else ""
    return f"{on_gpu}{on_host / 1e9:.1f} GB on the host"


def shown(how):
    """{"lora": 32, "gradient_checkpointing": True} -> "--lora 32 --gradient-checkpointing" """
    words = [
        f"--{name.replace('_', '-')}" + f" {value}" * (value is not True)
        for name, value in how.items()
        if value and name != "sampling_tokens"
    ]
    return "all weights, " * (not how.get("lora")) + " ".join(words)


def sampling_tokens(name, device):
    """How many tokens of a sampling batch fit into what is free now, once all models are loaded."""
    return int(CARD * free_memory(device)[0] / sizes(name).sampling)


def free_memory(device):
    """(bytes free on the GPU, or 0; bytes free on the host, or what a container may still take)."""
    gpu = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    if not Path("/proc/meminfo").exists():  # not Linux
        return gpu, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host = 1024 * int(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())[1])
    limit, used, stat = (
        Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current", "stat")
    )
    if limit.exists() and limit.read_text().strip() != "max":
        # a cache of files is given back on demand
        cached = re.search(r"^inactive_file (\d+)", stat.read_text(), re.M)[1]
        host = min(host, int(limit.read_text()) - int(used.read_text()) + int(cached))
    return gpu, host


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m scale.fit", description="What train.py would choose."
    )
    parser.add_argument("model", help="folder or hub name; only its configuration is read")
    parser.add_argument("--gpu", type=float, default=80, help="GB free on each card; 0: none")
    parser.add_argument("--host", type=float, default=128, help="GB free on the host")
    parser.add_argument("--ranks", type=int, default=1, help="number of cards")
    args = parser.parse_args()
    free = args.gpu * 2**30, args.host * 2**30
    print(*choose(args.model, *free, ranks=args.ranks, itemsize=2 if args.gpu else 4)[1], sep="\n")
