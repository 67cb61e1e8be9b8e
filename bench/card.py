"""The update and the decoding of a real shape, as shares of what the card itself reached in the same run.

    python bench/card.py --model-size 7b                        one GPU: random weights of the 7B's shape
    python bench/card.py --device cpu --model-size deep --prompt 64 --new 8     shows that it runs; no GPU

    update    operations that the update needs, divided by its seconds, beside one large matrix product
    decode    bytes that a step of generate() must read, divided by its seconds, beside one large copy

The arithmetic is printed. A token costs 2 operations a weight forward and 4 backward, and attention; what
checkpointing computes again counts once. The prompt of G rows counts once in "needed", because one
computation of it is enough, and G times in "as rows", the number that others report. A step of decoding reads
all weights but the table of embeddings, and the keys and values of all rows; the steps are what a longer
generate() takes beyond a shorter one, so the prompt does not count. The optimizer's step is left out.
"""
import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from bench.memory import SIZES, config
from bench.peers import engine_of
from flow_grpo import Action, update
from rewards.metrics import markdown
from scale import fit


def seconds(device, work):
    """Of one repetition, on the device."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def limits(device, dtype, repetitions):
    """(operations a second of a matrix product, bytes a second of a copy), medians."""
    n, size = (8192, 2**31) if device.type == "cuda" else (512, 2**24)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in "ab")
    x, y = (torch.zeros(size, device=device, dtype=torch.uint8) for _ in "xy")
    times = {name: statistics.median(seconds(device, work) for _ in range(5 + repetitions))
             for name, work in (("product", lambda: a @ b), ("copy", lambda: y.copy_(x)))}
    return 2 * n**3 / times["product"], 2 * size / times["copy"]        # a copy reads and writes


def operations(of, tied, rows, prompt, new, prompts):
    """That an update of `rows` completions needs, if the prompt is computed `prompts` times."""
    head = of["V"] * of["d"]
    inner = of["parameters"] - head * (1 if tied else 2)        # to look an embedding up costs nothing
    tokens = prompts * prompt + rows * new
    pairs = prompts * prompt**2 / 2 + rows * new * (prompt + new / 2)       # a token and one that it looks at
    return 6 * (tokens * inner + rows * new * head) + 3 * 4 * of["layers"] * of["q"] * pairs


def bytes_of_a_step(of, tied, itemsize, rows, context):
    """(weights, cache): what one step of decoding reads."""
    weights = of["parameters"] - (0 if tied else of["V"] * of["d"])
    return itemsize * weights, itemsize * rows * context * 2 * of["layers"] * of["k"]


def measure(args):
    """{"update", "decode", "product", "copy": numbers of this run}"""
    torch.manual_seed(0)
    device = torch.device(args.device)
    with device:
        dtype = getattr(torch, args.dtype)
        model = AutoModelForCausalLM.from_config(config(args.model_size), dtype=dtype).eval()
    if args.checkpointing:
        model.activation_checkpointing_enable()
    engine = engine_of(model)
    draw = lambda number: random.choices(range(10, SIZES[args.model_size][5]), k=number)
    prompt, nothing = draw(args.prompt), SimpleNamespace(step=lambda: None)
    actions = [Action(prompt, draw(args.new), row) for row in range(args.group)]
    A = [(-1.0) ** row for row in range(args.group)]

    def learn():
        update(model, None, nothing, actions, A, temperature=1.0, beta=0, token_budget=args.token_budget)

    def sample(new):
        return lambda: engine([tuple(prompt)] * args.group, 1.0, new)

    short, long = args.new // 4, args.new
    for name, work in (("update", learn), ("generate", sample(long))):
        print(f"    {name}, warm-up: {seconds(device, work):.1f} s", flush=True)
    times = {"update": [], "short": [], "long": []}
    for _ in range(args.repetitions):
        for name, work in (("update", learn), ("short", sample(short)), ("long", sample(long))):
            times[name].append(seconds(device, work))
            print(f"    {name}: {times[name][-1]:.2f} s", flush=True)
    middle = {name: statistics.median(values) for name, values in times.items()}
    product, copy = limits(device, model.dtype, args.repetitions)
    return {"update": middle["update"], "decode": (middle["long"] - middle["short"]) / (long - short),
            "product": product, "copy": copy, "itemsize": model.dtype.itemsize, "times": times}


def lines_of(args, measured):
    """The table, with its arithmetic."""
    of, tied = fit.shapes(config(args.model_size)), SIZES[args.model_size][6]
    lines, rate = [["what", "arithmetic", "reached", "limit", "share"]], measured["product"] / 1e12
    for name, prompts in (("update, needed", 1), ("update, as rows", args.group)):
        needed = operations(of, tied, args.group, args.prompt, args.new, prompts) / 1e12
        reached = needed / measured["update"]
        lines.append([name, f"{needed:.4g} T operations / {measured['update']:.3f} s", f"{reached:.4g} T/s",
                      f"{rate:.4g} T/s", f"{reached / rate:.0%}"])
    context = args.prompt + (args.new + args.new // 4) // 2             # on average, of the steps that count
    weights, cache = bytes_of_a_step(of, tied, measured["itemsize"], args.group, context)
    reached, limit = (weights + cache) / measured["decode"] / 1e9, measured["copy"] / 1e9
    arithmetic = f"({weights / 1e9:.4g} + {cache / 1e9:.4g}) GB / {1000 * measured['decode']:.2f} ms"
    return lines + [["decode, weights + cache", arithmetic, f"{reached:.4g} GB/s", f"{limit:.4g} GB/s",
                     f"{reached / limit:.0%}"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model-size", choices=SIZES, default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", help="default: bfloat16 on cuda, float32 elsewhere")
    parser.add_argument("--group", type=int, default=8, help="rows, which share one prompt")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--token-budget", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", help="JSON file of all numbers")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("there is no GPU: --device cpu --model-size deep --prompt 64 --new 8 shows that it runs")
    if args.new < 4:
        parser.error("--new must be at least 4: decoding is timed between a quarter of it and all of it")
    logging.disable_progress_bar()
    on_gpu = args.device.startswith("cuda")
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    name = torch.cuda.get_device_name() if on_gpu else "a CPU: THIS IS NOT A GPU MEASUREMENT"
    print(f"{name} | {args.model_size} {SIZES[args.model_size]}, {args.dtype}, random weights | "
          f"{args.group} x ({args.prompt} + {args.new})", flush=True)
    measured = measure(args)
    print(f"\n{markdown(lines_of(args, measured))}")
    if args.out:
        Path(args.out).write_text(json.dumps({"device": name, **vars(args), **measured}, indent=1))


if __name__ == "__main__":
    main()
