"""What only a GPU shows, on one card, in at most eight minutes. Nothing is downloaded.

    python bench/card.py                   all parts, as JSON lines; also to $OUT/card.jsonl
    python bench/card.py equal toy         some parts
    python bench/card.py --cpu             tiny models on a CPU: shows that this script runs

    equal      the gradient of update() on the card beside that on the CPU: rows and trees, float32
               and bfloat16. `error` is relative to that on the CPU, in float32, with rows
    sampled    log π while sampling beside token_logps() of the same tokens: how far apart
    7b-lora    Qwen2.5-7B's shape: 64 completions of a prompt, and updates of adapters
    rehearse   train.py --rehearse of Qwen2.5-0.5B's shape: load, sample, update, save, resume
    toy        train.py of the toy, three steps
    0.5b       updates of all weights on the card, in Qwen2.5-0.5B's shape
    7b-host    updates of all weights of a 7B, with masters and moments in the host's memory

All weights are random, so nothing here says how well a model learns. GB is the peak of what tensors
took, plan_GB what scale/fit.py expects. A part that fails, or takes longer than its limit, leaves a
line that says so, and the next one begins.
"""

import argparse
import copy
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parent.parent
NAMES = "equal sampled 7b-lora rehearse toy 0.5b 7b-host".split()
LIMITS = dict(zip(NAMES, (60, 60, 150, 240, 120, 60, 240), strict=True))  # seconds


def flags():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(NAMES)}; default: all"
    )
    parser.add_argument("--cpu", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--seconds", type=float, default=480, help="for all parts (default: 480)")
    help = "host memory, where the machine grows beyond what is free at the start"
    parser.add_argument("--host", type=float, default=0.0, metavar="GB", help=help)
    return parser.parse_args()


ARGS = flags()
sys.path.insert(0, str(REPO))
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from fast import trees
from flow_grpo import Action, distribution, padded, token_logps, update
from models.local import ready_to_update, sample, sampling_mode
from scale import adapters, fit
from scale.masters import Masters

CPU, CARD = torch.device("cpu"), torch.device("cpu" if ARGS.cpu else "cuda")
LAYOUTS = {"rows": padded, "trees": trees.rows}
SHAPE = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
SHAPE = f"{SHAPE} vocab_size tie_word_embeddings".split()
SHAPES = {"tiny": (64, 128, 2, 4, 2, 8000, True), "7b": (3584, 18944, 28, 28, 4, 152064, False)}
SHAPES["0.5b"] = (896, 4864, 24, 14, 2, 151936, True)
PROMPT, LONG, NEW, COPIES = (64, 96, 8, 8) if ARGS.cpu else (2048, 4096, 256, 64)
ADAMW = partial(torch.optim.AdamW, lr=1e-6, weight_decay=0.0, fused=True)
ON_CARD = {"token_budget": 4 * LONG, "gradient_checkpointing": True}


# ------------------------------------------------------- the parts: each yields lines of the table
def equal():
    """Two mini-batches with a KL; the second one needs old log-probs."""
    settings = dict(temperature=0.7, clip=(0.2, 0.3), beta=0.1, minibatches=2, token_budget=500)
    right = None  # the first: on the CPU, in float32, with rows
    for device, dtype in (CPU, "float32"), (CARD, "float32"), (CARD, "bfloat16"):
        for layout, rows in LAYOUTS.items():
            policy, reference = (model_of("tiny", dtype, device, seed) for seed in (0, 1))
            found = []
            # it keeps the gradients of both steps, and changes nothing
            optimizer = SimpleNamespace(step=partial(keep_gradients, policy, found))
            update(policy, reference, optimizer, *batch(4, 3, 40, 9), rows=rows, **settings)
            found = torch.cat(found)
            right = found if right is None else right
            error = ((found - right).norm() / right.norm()).item()
            yield f"{device.type}, {dtype}, {layout}", dict(error=error)


def keep_gradients(model, found):
    found.extend(weight.grad.flatten().float().cpu() for weight in model.parameters())


def sampled():
    for size, dtype in ("tiny", "float32"), ("tiny", "bfloat16"), ("0.5b", "bfloat16"):
        model = model_of(size, dtype)
        prompts = [action.prompt_ids for action in batch(2, 4, PROMPT, 1)[0]]
        logps = []  # of each new token: (N, V)

        def watched(logits, temperature, logps=logps):
            logps.append(distribution(logits, temperature))
            return logps[-1]

        with sampling_mode(model):
            ids = sample(model, prompts, [], 0.7, 32, watched)
        drawn = torch.stack(logps, 1).gather(-1, torch.tensor(ids, device=CARD)[..., None])
        actions = [Action(s, a, row) for row, (s, a) in enumerate(zip(prompts, ids, strict=True))]
        for layout, rows in LAYOUTS.items():
            gaps = []
            for micro_batch in rows(model, actions, 2**20):
                with torch.no_grad():
                    scored = token_logps(model, micro_batch, 0.7)
                gaps.append(scored - drawn[[a.rollout for a in micro_batch[0]]].flatten())
            gaps = torch.cat(gaps).abs()
            numbers = dict(largest=gaps.max().item(), mean=gaps.mean().item())
            yield f"{size}, {dtype}, scored with {layout}", numbers


def seven_lora():
    model = model_of("7b", "bfloat16")
    yield sampling("without adapters", model, NEW)
    model = adapters.add(model, 32)
    yield sampling("with adapters", model, NEW // 4)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, weight_decay=0.0, fused=True)
    yield from updates("7b", model, model, optimizer, ON_CARD | {"lora": 32})


def rehearse():
    with tempfile.TemporaryDirectory() as folder:
        model_of("0.5b", "bfloat16").save_pretrained(f"{folder}/model")
        AutoTokenizer.from_pretrained(REPO / "toy").save_pretrained(f"{folder}/model")
        flags = f"--model {folder}/model --data toy/train.jsonl --judge none"
        flags += f" --tools base_generator --max-turns 1 --max-new-tokens {NEW // 2} --rehearse"
        yield train(f"{flags} --out {folder}/run")


def toy():
    with tempfile.TemporaryDirectory() as folder:
        yield train(f"--out {folder}/run --steps 3 --valid none --test none")


def half():
    model = model_of("0.5b", "bfloat16")
    optimizer = Masters(dict(model.named_parameters()), ADAMW)
    yield from updates("0.5b", model, copy.deepcopy(model), optimizer, ON_CARD)


def seven_host():
    model = model_of("7b", "bfloat16")
    needed, free = 12e-9 * model.num_parameters(), max(ARGS.host, host_memory())
    if needed > 0.97 * free:
        yield "left out: too little host memory", dict(needed_GB=needed, free_GB=free)
        return
    optimizer = Masters(dict(model.named_parameters()), ADAMW, "cpu")
    how = ON_CARD | {"optimizer_device": "cpu"}
    yield from updates("7b", model, copy.deepcopy(model), optimizer, how)


PARTS = dict(zip(NAMES, (equal, sampled, seven_lora, rehearse, toy, half, seven_host), strict=True))


# --------------------------------------------------------------------------------- what they use
def config_of(size):
    shape = dict(zip(SHAPE, SHAPES["tiny" if ARGS.cpu else size], strict=True))
    return Qwen2Config(max_position_embeddings=32_768, rms_norm_eps=1e-6, **shape)


def model_of(size, dtype, device=CARD, seed=0):
    torch.manual_seed(seed)
    with CPU if size == "tiny" else device:  # the same weights on each device and in each dtype
        first = "float32" if size == "tiny" else dtype
        model = AutoModelForCausalLM.from_config(config_of(size), dtype=getattr(torch, first))
    return model.to(device, getattr(torch, dtype)).eval()


def batch(groups, group, prompt, new):
    """(actions, groups): `groups` prompts with `group` completions each, of random ids."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 2000, (groups, prompt + group * new), generator=draw).tolist()
    actions = [
        Action(row[:prompt], row[start : start + new], 0, A=(-1.0) ** number)
        for row in ids
        for number, start in enumerate(range(prompt, len(row), new))
    ]
    for number, action in enumerate(actions):
        action.rollout = number
    return actions, [number // group for number in range(len(actions))]


def sampling(how, model, new):
    prompts = [batch(1, 1, PROMPT, 1)[0][0].prompt_ids] * COPIES
    peak()
    start = clock()
    with sampling_mode(model):
        sample(model, prompts, [], 0.7, new, distribution)
    seconds = clock() - start
    numbers = dict(seconds=seconds, ms_a_token=1000 * seconds / new) | peak()
    return f"{COPIES} x ({PROMPT} shared + {new}) sampled {how}", numbers


def updates(size, model, reference, optimizer, how):
    """Three updates of 2 x 8 sequences. The first one also makes the optimiser's state.

    reference: π_ref, as in train.py; a model with adapters is its own."""
    with tempfile.TemporaryDirectory() as folder:
        config_of(size).save_pretrained(folder)
        of = fit.sizes(folder)
    card, _, host = fit.needed(of, how, ranks=1, itemsize=2, others=0)
    numbers = dict(plan_GB=card / 1e9, host_plan_GB=host / 1e9)
    model.activation_checkpointing_enable()
    ready_to_update(model)
    actions, groups = batch(2, 8, LONG, NEW)
    settings = dict(temperature=0.7, clip=(0.2, 0.3), beta=0.001, minibatches=1)
    settings |= dict(token_budget=how["token_budget"])
    peak()
    for layout in ("trees", "rows", "trees"):
        settings["rows"] = LAYOUTS[layout]
        start = clock()
        found = update(model, reference, optimizer, actions, groups, **settings)
        numbers |= dict(seconds=clock() - start) | peak()
        numbers["host_GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        numbers |= {name: found[name] for name in ("grad_norm", "skipped", "token_budget")}
        yield f"update of {len(actions)} x ({LONG} + {NEW}) tokens, {layout}", numbers


def train(flags):
    """Run train.py. Its output is printed; the lines of its steps go to the table, too."""
    start = time.perf_counter()
    command = [sys.executable, "train.py", "--device", CARD.type, *flags.split()]
    with tempfile.TemporaryFile("w+") as out:
        try:
            run = subprocess.run(command, cwd=REPO, stdout=out, stderr=subprocess.STDOUT)
        finally:  # also if its time is over
            out.seek(0)
            lines = out.read().splitlines()
            print(*lines, sep="\n", flush=True)
    shown = [line for line in lines if line.startswith(("memory", "    ", "planner", "step"))]
    return f"exit {run.returncode}", dict(seconds=time.perf_counter() - start, lines=shown)


def clock():
    """Seconds, once the card has finished."""
    if not ARGS.cpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def peak():
    """GB that tensors took at most since the last call, and that torch reserved for them."""
    if ARGS.cpu:
        return {}
    found = dict(
        GB=torch.cuda.max_memory_allocated() / 1e9,
        reserved_GB=torch.cuda.max_memory_reserved() / 1e9,
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return found


def host_memory():
    """GB that are free on the host."""
    return fit.free_memory(CARD)[1] / 1e9


# --------------------------------------------------------------------------------------- the run
def write(part, what, numbers):
    """Print a line of the table. It is also in the file at once, should this process be killed."""
    numbers = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in numbers.items()}
    line = json.dumps({"part": part, "what": what} | numbers)
    print(line, flush=True)
    if "OUT" in os.environ:
        with open(Path(os.environ["OUT"], "card.jsonl"), "a") as file:
            print(line, file=file)


def run(part, limit):
    """Run a part; its errors go to the table."""
    signal.alarm(max(1, int(limit)))
    try:
        for what, numbers in PARTS[part]():
            write(part, what, numbers)
    except Exception as why:
        traceback.print_exc()
        write(part, "failed", {"error": f"{type(why).__name__}: {why}"[:500]})
    finally:
        signal.alarm(0)


def over(*_):
    raise TimeoutError("its time is over")


def main():
    signal.signal(signal.SIGALRM, over)
    start = time.monotonic()
    name = "a CPU: no measurement" if ARGS.cpu else torch.cuda.get_device_name()
    write("machine", name, {"torch": torch.__version__, "free_host_GB": host_memory()})
    for part in ARGS.parts or NAMES:
        before = time.monotonic() - start
        run(part, min(LIMITS[part], ARGS.seconds - before))
        gc.collect()
        peak()
        write(part, "ended", {"seconds": time.monotonic() - start - before})


if __name__ == "__main__":
    main()
