"""How the cost grows with the work: flows, turns, lengths of prompts. A table with an exponent for each step.

    python bench/cost.py                            about 10 minutes
    python bench/cost.py turns --repetitions 1      one part of the table

    flows       8 to 512 questions of the toy at once, two turns at most; here memory matters, too
    turns       16 questions with a verifier that never stops, 1 to 10 turns
    generate    8 completions of 32 tokens of one prompt of 128 to 4096 tokens
    update      an update of these 8 rows, with 64 tokens each

The exponent is that of the CPU seconds since the line above: 1 is linear, 2 is quadratic. A turn reads all
that memory holds of the turns before it, so its prompt grows, and the tokens grow faster than the turns: the
column for 1000 tokens shows whether a token has become dearer. Only attention may do that, because each token
looks at all that are before it. The bytes are the peak beyond what the process held before.
"""
import argparse
import json
import math
import os
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
from bench.meter import adopt_orphans
from bench.speed import Peer, machine, measure
from rewards.metrics import markdown

LENGTHS = 128, 256, 512, 1024, 2048, 4096
TOY = dict(work="flows", temperature=0.7)
MODEL = dict(vocabulary=1024, groups=1, group=8)
CASES = {       # part: [(size, case)]
    "flows": [(n, TOY | dict(flows=n, turns=2)) for n in (8, 32, 128, 512)],
    "turns": [(n, TOY | dict(flows=16, turns=n, never_stops=True)) for n in (1, 2, 4, 7, 10)],
    "generate": [(n, MODEL | dict(work="generate", prompt=n, new=32)) for n in LENGTHS],
    "update": [(n, MODEL | dict(work="update", prompt=n, new=64)) for n in LENGTHS]}
HEAD = ["work", "size", "s", "CPU s", "exponent", "tokens", "CPU ms per 1000 tokens", "MiB"]


def tokens_of(case, lap):
    """All that the work reads and writes: what a rollout has counted, or the tokens of all rows."""
    rows = case["group"] * (case["prompt"] + case["new"]) if "prompt" in case else 0
    return rows or lap["tokens"]


def lines_of(part, measured):
    """measured: [(size, case, result)]. The lines of one part of the table."""
    lines, before = [], None
    for size, case, result in measured:
        tokens, cpu = tokens_of(case, result["laps"][-1]), result["cpu"]
        exponent = f"{math.log(cpu / before[1]) / math.log(size / before[0]):.2f}" if before else ""
        lines.append([part, str(size), f"{result['wall']:.2f}", f"{cpu:.2f}", exponent, str(tokens),
                      f"{1e6 * cpu / tokens:.1f}", f"{result['peak'] / 2**20:.0f}"])
        before = size, cpu
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(CASES)}; default: all")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--largest", type=int, default=10**6, help="leave out larger sizes")
    parser.add_argument("--checkout", help="measure another one of this project", type=os.path.abspath,
                        default=str(REPO))
    parser.add_argument("--core", type=int, help="default: the last one")
    parser.add_argument("--out", help="JSON file of all numbers")
    args = parser.parse_args()
    core = max(os.sched_getaffinity(0)) if args.core is None else args.core
    os.sched_setaffinity(0, {core})
    adopt_orphans()
    print(machine(), flush=True)
    sides = {"ours": lambda case, malloc=None: Peer("ours", sys.executable, args.checkout, case, malloc)}
    table, raw = [HEAD], {}
    for part in args.parts or CASES:
        raw[part] = []
        for size, case in CASES[part]:
            if size <= args.largest:
                say = lambda text: print(f"    {part} {size}: {text}", flush=True)
                results = measure(case, sides, args.repetitions, say, memory=True)
                raw[part].append((size, case, results["ours"]))
        table += lines_of(part, raw[part])
    print(f"\n{markdown(table)}")
    if args.out:
        Path(args.out).write_text(json.dumps({"machine": machine(), "parts": raw}, indent=1))


if __name__ == "__main__":
    main()
