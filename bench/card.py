"""The first GPU at hand: what was predicted or is possible, beside what it reached. One table in ten minutes.

    python bench/card.py                        all rows; runs/card.json after each, the table at the end
    python bench/card.py speed trl              these rows alone
    python bench/card.py --device cpu --quick   shows that it runs, with tiny models: no GPU measurement

    speed         the update's operations a second beside those of one large matrix product, and the bytes
                  that decoding reads a second beside those of one large copy: a 7B, or the largest that fits
    memory-0.5b   the peaks of generate(), of update() and with the optimizer's step, beside predict() of
                  scale/fit.py: all weights of a 0.5B
    memory-7b     the same: adapters of rank 32 on a 7B (needs peft)
    sharded       update() and generate() of a 0.5B through fully_shard with one process, beside the plain one
    trl           one step of a 0.5B, beside TRL's GRPOTrainer (needs trl==1.16.0; --trl-python)

All models have random weights. Each row is a process of its own, so that none finds the memory of another.
A row that fails, such as one without enough memory, says why in one line, and the others go on.

The arithmetic of speed is printed. A token costs 2 operations a weight forward and 4 backward, and attention;
what checkpointing computes again counts once. The prompt of G rows counts once in "needed", because one
computation of it is enough, and G times in "as rows", the number that others report. A step of decoding reads
all weights but the table of embeddings, and the keys and values of all rows; the steps are what a longer
generate() takes beyond a shorter one, so the prompt does not count. The optimizer's step is left out.
"""
import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from bench import memory, peers, speed
from bench.memory import SIZES, config
from fast import logps
from flow_grpo import Action, log_probs, update
from rewards.metrics import markdown
from scale import fit
from scale.lockstep import make_passes
from world.files import replace_file
from world.text import truncate

CASES = {
    "speed": dict(size=None, group=8, prompt=2048, new=512, repetitions=3),
    "memory-0.5b": dict(model_size="0.5b", rows=3, prompt=4096, new=512, lora=None),
    "memory-7b": dict(model_size="7b", rows=3, prompt=4096, new=512, lora=32),
    "sharded": dict(size="0.5b", group=8, prompt=2048, new=128, repetitions=3),
    "trl": dict(work="step", size="0.5b", groups=1, group=8, prompt=512, new=128, repetitions=3)}
QUICK = {  # with --quick
    "speed": dict(size="deep", group=2, prompt=24, new=8, repetitions=1),
    "memory-0.5b": dict(model_size="deep", rows=2, prompt=128, new=8),
    "memory-7b": dict(model_size="deep", rows=2, prompt=128, new=8, lora=4),
    "sharded": dict(size="deep", group=2, prompt=8, new=4, repetitions=1),
    "trl": dict(size="deep", group=2, prompt=24, new=4, repetitions=1)}
NOT_A_GPU = "a CPU: THIS IS NOT A GPU MEASUREMENT"
HEAD = ["row", "what", "predicted, or limit", "measured", "measured / that", "from"]
PER_WEIGHT = 6      # bytes a weight that "speed" needs: weights and gradients in bfloat16, and activations


# ------------------------------------------------------------------- the rows; each runs in its own process
def speed_row(case):
    """The lines of "speed", and all numbers."""
    if case.size is None:
        free = torch.cuda.mem_get_info()[0]
        sizes = [name for name in ("7b", "3b", "1.5b", "0.5b")
                 if PER_WEIGHT * fit.shapes(config(name))["parameters"] < free]
        case.size = (sizes or ["0.5b"])[0]
    measured = measure(case)
    return {"lines": speed_lines(case, measured), "size": case.size, **measured}


def measure(case):
    """{"update", "decode": seconds, "product", "copy": operations and bytes a second, ...}"""
    device, dtype = place_of(case)
    halved, learn, sample = works_of(case, model_of(case))
    short, long = case.new // 4, case.new
    times = timed(device, case.repetitions, {"update": learn, "short": lambda: sample(short),
                                             "long": lambda: sample(long)})
    product, copy = limits(device, dtype, case.repetitions)
    return {"update": times["update"], "decode": (times["long"] - times["short"]) / (long - short),
            "product": product, "copy": copy, "itemsize": dtype.itemsize, "halved": sum(halved)}


def place_of(case):
    device = torch.device(case.device)
    return device, torch.bfloat16 if device.type == "cuda" else torch.float32


def model_of(case, dtype=None):
    device, usual = place_of(case)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config(case.size), dtype=dtype or usual).eval()
    model.activation_checkpointing_enable()
    return model


def works_of(case, model):
    """(halved, learn, sample): learn() updates on `group` completions of one prompt and adds to the list
    `halved` how often memory was short; sample(new) samples them."""
    engine, nothing, halved = peers.engine_of(model), SimpleNamespace(step=lambda: None), []
    draw = lambda number: random.choices(range(10, SIZES[case.size][5]), k=number)
    prompt = draw(case.prompt)
    actions = [Action(prompt, draw(case.new), row, A=(-1.0) ** row) for row in range(case.group)]
    passes = make_passes(model, None, *logps.scoring(log_probs, model))

    def learn():
        report = update(passes, nothing, actions, range(case.group), temperature=1.0)
        halved.append(int(report["halved"]))

    return halved, learn, lambda new: engine([tuple(prompt)] * case.group, 1.0, new)


def timed(device, repetitions, works):
    """{name: median seconds} of works that take turns; each is done once before, to warm up."""
    times = {name: [] for name in works}
    for number in range(1 + repetitions):
        for name, work in works.items():
            times[name] += [seconds(device, work)] * (number > 0)
    return {name: statistics.median(values) for name, values in times.items()}


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
    times = timed(device, 5 + repetitions, {"product": lambda: a @ b, "copy": lambda: y.copy_(x)})
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


def speed_lines(case, measured):
    of, tied = fit.shapes(config(case.size)), SIZES[case.size][6]
    lines, rate = [], measured["product"] / 1e12
    halved = f", micro-batches halved {measured['halved']} times" if measured["halved"] else ""
    for name, prompts in (("needed", 1), ("as rows", case.group)):
        needed = operations(of, tied, case.group, case.prompt, case.new, prompts) / 1e12
        reached = needed / measured["update"]
        lines.append([f"{case.size}: update, {name}", f"{rate:.4g} T operations/s", f"{reached:.4g} T/s",
                      f"{reached / rate:.0%}",
                      f"{needed:.4g} T operations / {measured['update']:.3f} s{halved}"])
    context = case.prompt + (case.new + case.new // 4) // 2             # on average, of the steps that count
    weights, cache = bytes_of_a_step(of, tied, measured["itemsize"], case.group, context)
    reached, limit = (weights + cache) / measured["decode"] / 1e9, measured["copy"] / 1e9
    arithmetic = f"({weights / 1e9:.4g} + {cache / 1e9:.4g}) GB / {1000 * measured['decode']:.2f} ms"
    return lines + [[f"{case.size}: decode, weights + cache", f"{limit:.4g} GB/s", f"{reached:.4g} GB/s",
                     f"{reached / limit:.0%}", arithmetic]]


def memory_lines(case, measured, on_gpu):
    """Of the peaks that `bench/memory.py --child` has measured."""
    fitted = memory.predicted(SimpleNamespace(**memory.DEFAULTS | case), on_gpu)
    how = f"adapters of rank {case['lora']}" if case["lora"] else "all weights"
    return [[f"{case['model_size']}, {how}: peak of {phase}", f"{guess / 1e9:.2f} GB", f"{real / 1e9:.2f} GB",
             f"{real / guess:.2f}", f"{case['rows']} x ({case['prompt']} + {case['new']}) tokens"]
            for phase, (guess, real) in memory.peaks(fitted, measured).items()]


def sharded_row(case):
    """The lines of "sharded": the same bfloat16 model, its weights in parts of float32 or as they are."""
    from scale import sharding      # its import takes a second, and no other row needs it
    times = {}
    for name in ("plain", "sharded"):
        model = model_of(case, torch.bfloat16)
        if name == "sharded":
            sharding.shard(model)
        _, learn, sample = works_of(case, model)

        def update_of_parts():
            with sharding.released(model):
                learn()

        sharding.gather(model)
        times[name] = timed(torch.device(case.device), case.repetitions,
                            {"update": update_of_parts, "generate": lambda: sample(case.new)})
    return {"lines": [
        [f"{case.size}: {work}, beside plain", f"{plain:.2f} s", f"{times['sharded'][work]:.2f} s",
         f"{times['sharded'][work] / plain:.2f}", f"{case.group} x ({case.prompt} + {case.new}) tokens"]
        for work, plain in times["plain"].items()], **times}


def trl_row(case):
    """The lines of "trl": each side alone, after one step to warm up."""
    sides = {}
    for name, python in (("trl", case.trl_python or sys.executable), ("ours", sys.executable)):
        peer = speed.Peer(name, python, REPO, vars(case) | {"vocabulary": SIZES[case.size][5]})
        laps = [peer.lap() for _ in range(case.repetitions)]
        peer.close()
        sides[name] = {key: statistics.median(lap[key] for lap in laps) for key in ("wall", "peak", "tokens")}
    ours, trl = sides["ours"], sides["trl"]
    same = "" if ours["tokens"] == trl["tokens"] else "NOT THE SAME WORK: "
    sampled = f"{ours['tokens']:.0f} tokens sampled, TRL {trl['tokens']:.0f}"
    seconds, peak = f"{case.size}: step, beside TRL's", f"{case.size}: its peak, beside TRL's"
    return {"lines": [
        [seconds, f"{trl['wall']:.2f} s", f"{ours['wall']:.2f} s", f"{ours['wall'] / trl['wall']:.2f}",
         f"{same}{case.group} x ({case.prompt} + {case.new}), {sampled}"],
        [peak, f"{trl['peak'] / 1e9:.2f} GB", f"{ours['peak'] / 1e9:.2f} GB",
         f"{ours['peak'] / trl['peak']:.2f}", "on a GPU with the weights, on a CPU without"]], **sides}


CHILDREN = {"speed": speed_row, "sharded": sharded_row, "trl": trl_row}


# --------------------------------------------------------------------------- the process that starts the rows
def command_of(row, case):
    if row.startswith("memory"):
        return [sys.executable, str(REPO / "bench" / "memory.py"), "--child", json.dumps(case)]
    return [sys.executable, __file__, "--child", row, json.dumps(case)]


def run(command, limit, on_gpu):
    """What the command prints last, read as JSON; {"failed": the reason} if it fails or takes `limit` s."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | memory.ENVIRONMENT
    environment |= {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
                                   start_new_session=True)
        try:
            printed = process.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            return {"failed": f"stopped after {limit:.0f} s"}
        finally:
            if process.poll() is None:          # with the processes that it has started
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        errors.seek(0)
        said = errors.read().strip().splitlines() or [f"exit code {process.returncode}"]
    return {"failed": truncate(said[-1], 200)} if process.returncode else json.loads(printed.splitlines()[-1])


def lines_of(row, case, result, on_gpu):
    if "failed" in result:
        return [[row, "not measured", "", "", "", result["failed"]]]
    lines = memory_lines(case, result, on_gpu) if row.startswith("memory") else result["lines"]
    return [[row, *line] for line in lines]


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(CASES)}; default: all")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"],
                        help="cpu shows that the script runs, and measures no GPU (default: cuda)")
    parser.add_argument("--quick", action="store_true", help="tiny models and short texts: seconds a row")
    parser.add_argument("--minutes", type=float, default=9.5,
                        help="of all rows together; what is not done then is left out (default: 9.5)")
    parser.add_argument("--model-size", choices=SIZES, help="of speed; default: 7b, or the largest that fits")
    parser.add_argument("--trl-python", help="the Python of an environment with TRL; default: this one")
    parser.add_argument("--out", default="runs/card.json", type=Path,
                        help="file of all numbers, written after each row (default: runs/card.json)")
    args = parser.parse_args()
    if wrong := [row for row in args.rows if row not in CASES]:
        parser.error(f"no row is called {wrong[0]}: choose from {', '.join(CASES)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU: --device cpu --quick shows that the script runs")
    return args


def main():
    args, table, results = arguments(), [HEAD], {}
    on_gpu, end = args.device == "cuda", time.monotonic() + 60 * args.minutes
    name = torch.cuda.get_device_name() if on_gpu else NOT_A_GPU
    about = {"device": name, "torch": torch.__version__}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{name} | torch {torch.__version__} | random weights | numbers in {args.out}", flush=True)
    for row in args.rows or CASES:
        case = CASES[row] | (QUICK[row] if args.quick else {})
        if row == "speed":
            case["size"] = args.model_size or case["size"]
        if not row.startswith("memory"):
            case |= {"device": args.device, "trl_python": args.trl_python}
        start, left = time.monotonic(), end - time.monotonic()
        result = run(command_of(row, case), left, on_gpu) if left > 0 else {"failed": "the time was over"}
        lines = lines_of(row, case, result, on_gpu)
        table += lines
        results[row] = {"case": case, "lines": lines, "result": result}
        replace_file(args.out, json.dumps(about | {"rows": results}, indent=1))
        for line in lines:
            print(" | ".join(filter(None, line)), flush=True)
        print(f"    ({row} took {time.monotonic() - start:.0f} s)", flush=True)
    print(f"\n{name}\n{markdown(table)}")


def child(row, case):
    """Run one row, and print its result."""
    logging.disable_progress_bar()
    print(json.dumps(CHILDREN[row](SimpleNamespace(**json.loads(case)))))


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main()
