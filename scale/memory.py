"""What fits: how to train in the free memory, chosen from the model's configuration alone.

    python -m scale.memory Qwen/Qwen2.5-7B-Instruct --gpu 80 --host 128      what train.py would choose

Bytes a weight on each of N cards, where the model computes in bfloat16. P weights; A of adapters.
(In float32: twice as much for weights, gradients and copy, and no masters.)

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
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scale import adapters

CARD, HOST = 0.8, 0.95  # the shares of the free memory that are used
BUDGETS = 16_384, 8_192, 4_096  # tokens of a micro-batch that are tried
FIXED = 1e9  # bytes of CUDA's context, and of the chunk of logits in flow_grpo.token_logps()


class Sizes(NamedTuple):
    """Of a model: made without memory, on the meta device. Bytes are those of bfloat16."""

    weights: int
    adapters: int | None  # weights of adapters of rank 32; None without peft
    checkpointed: int  # bytes of activations a token in an update, with gradient checkpointing
    kept: int  # the same without
    sampling: int  # bytes a token while sampling: its cache, and its prompt in one layer


def sizes(name, rank=32):
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as why:
        raise ValueError(f"there is no model {name!r}: {str(why).splitlines()[0]}") from why
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        weights = model.num_parameters()
        trained = adapters.count(model, rank)
    text = config.get_text_config()
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    layer = 2 * (14 * text.hidden_size + 7 * wide)  # what autograd keeps of a layer, in bfloat16
    inputs = 2 * text.hidden_size * text.num_hidden_layers
    heads = getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    cached = (
        2 * 2 * text.num_hidden_layers * width * (getattr(text, "num_key_value_heads", 0) or heads)
    )
    layers = layer * text.num_hidden_layers
    return Sizes(weights, trained, inputs + layer, layers, cached + 2 * 4 * wide)


def needed(of, how, itemsize=2, ranks=1, copy=1, others=0):
    """(bytes on each card, of which activations, bytes on the host) of training in this way."""
    P, A = of.weights, of.adapters
    on_host = itemsize * P
    if how.get("lora"):
        card = itemsize * P + 16 * A
    else:
        masters = 12 if itemsize < 4 else 8  # float32 weights need no masters beside them
        if how.get("optimizer_device") == "cpu":
            masters, on_host = 0, on_host + masters * P
        card = P * ((2 * itemsize + masters) / ranks + itemsize * (ranks > 1) + itemsize * copy)
    activations = how["token_budget"] * itemsize / 2
    activations *= of.checkpointed if how["gradient_checkpointing"] else of.kept
    return card + itemsize * others + FIXED + activations, activations, on_host


def ways(given, gpu):
    """The ways to train, in the order in which they are tried: {flag: value}. What is given stays."""
    if given.get("lora") or given.get("optimizer_device"):
        kinds = [{}]
    else:
        kinds = [{}, {"optimizer_device": "cpu"}, {"lora": 32}] if gpu else [{}, {"lora": 32}]
    for kind in kinds:
        for checkpointing in [True] if gpu else [False, True]:  # on a card it is always worth it
            for budget in BUDGETS:
                yield (
                    kind | {"gradient_checkpointing": checkpointing, "token_budget": budget} | given
                )


def plan(name, gpu, host, given=(), ranks=1, **settings):
    """(how to train: {flag: value}, lines that say so): the first way that fits; SystemExit if none
    does.

    gpu, host: free bytes of each card, and of the host; gpu 0: there is no GPU. given: {flag:
    value} of those that the user has chosen. settings: of needed(); copy: 0 if no frozen copy is
    needed; others: the weights of other models."""
    of, tried = sizes(name), []
    for how in ways(dict(given), gpu):
        card, activations, on_host = needed(of, how, ranks=ranks, **settings)
        if not gpu:
            card, on_host = 0, ranks * card + on_host
        tried.append((how, card, on_host))
        if card <= CARD * gpu and on_host <= HOST * host:
            break
    else:
        how, card, on_host = min(tried, key=lambda each: each[1] + each[2])
        sentence = f"{name} needs {gigabytes(card, gpu, on_host, host)} even with {shown(how)}"
        raise SystemExit(f"{sentence}: use a smaller model, or a larger machine")
    if gpu:  # what is left while sampling, when there are no activations
        spare = CARD * gpu - card + activations
        how["sampling_tokens"] = int(spare / of.sampling * 2 / settings.get("itemsize", 2))
    lines = [f"memory  {gigabytes(card, gpu, on_host, host)}, with {shown(how)}"]
    if len(tried) > 1:
        first, card, on_host = tried[0]
        lines.append(f"        ({shown(first)} would need {gigabytes(card, gpu, on_host, host)})")
    return how, lines


def gigabytes(card, gpu, on_host, host):
    """'56 of 85 GB on the GPU, 107 of 128 GB on the host'"""
    on_gpu = f"{card / 1e9:.1f} of {gpu / 1e9:.0f} GB on the GPU, " if gpu else ""
    return f"{on_gpu}{on_host / 1e9:.1f} of {host / 1e9:.0f} GB on the host"


def shown(how):
    """{"lora": 32, "gradient_checkpointing": True} -> "--lora 32 --gradient-checkpointing" """
    words = [
        f"--{name.replace('_', '-')}" + f" {value}" * (value is not True)
        for name, value in how.items()
        if value and name != "sampling_tokens"
    ]
    return " ".join(words) if how.get("lora") else " ".join(["all weights", *words])


def free_memory(device):
    """(bytes free on the GPU, or 0; bytes free on the host: in a container, what it may still take)."""
    gpu = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    if not Path("/proc/meminfo").exists():  # not Linux
        return gpu, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host = 1024 * int(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())[1])
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit.exists() and limit.read_text().strip() != "max":
        host = min(host, int(limit.read_text()) - int(used.read_text()))
    return gpu, host


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m scale.memory", description="What train.py would choose."
    )
    parser.add_argument("model", help="folder or hub name; only its configuration is read")
    parser.add_argument("--gpu", type=float, default=80, help="GB free on each card; 0: none")
    parser.add_argument("--host", type=float, default=128, help="GB free on the host")
    parser.add_argument("--ranks", type=int, default=1, help="number of cards")
    args = parser.parse_args()
    itemsize = 2 if args.gpu else 4
    print(
        *plan(args.model, args.gpu * 2**30, args.host * 2**30, ranks=args.ranks, itemsize=itemsize)[
            1
        ],
        sep="\n",
    )
