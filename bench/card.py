"""What only a GPU shows, on one card. Nothing is downloaded.

    python bench/card.py host sample           some parts: each takes at most ten minutes
    python bench/card.py                       all parts, about an hour
    python bench/card.py --cpu host static     tiny models on a CPU: shows that this script runs

Lines of JSON, also in $OUT/card.jsonl. The parts, in the order of what is worth knowing first:

    host       the host: cores, load, microseconds to launch a kernel
    sample     Qwen2.5-7B's shape: 64, 128, 256 rows, equal and mixed prompts, without adapters,
               with them in bfloat16 and in float32
    prefill    the peak of reading 128 prompts of 2,312 tokens, in parts and in one piece
    static     a static cache, grouped attention, CUDA graphs (bench/static_cache.py)
    update     update() of 128 rollouts of three turns, in four mini-batches, with adapters
    night      a whole step of train.py of a 7B, beside a process that holds 28 GB
    smollm     train.py of SmolLM2-135M's real weights, 20 steps, in float32 and bfloat16: give the
               folder as --smollm
    7b-host    updates of all weights of a 7B, with masters and moments in the host's memory
    toy        train.py of the toy, three steps
    equal      the gradient of update() on the card beside that on the CPU: rows and trees, float32
               and bfloat16. `error` is relative to that on the CPU, in float32, with rows
    sampled    log π while sampling beside token_logps() of the same tokens: how far apart
    rehearse   train.py --rehearse of Qwen2.5-0.5B's shape: load, sample, update, save, resume
    0.5b       updates of all weights on the card, in Qwen2.5-0.5B's shape

Where tokens are sampled, `prefill_s` is the time up to the first token, after a warm-up;
ms_a_token is wall time of the later ones. Of four tokens, a profiler adds up the kernels: `kernels`
a token, and `busy_ms` that the card computed. If ms_a_token is far above busy_ms, the host is too
slow: `cpu` is the share of the wall time that this process computed, `lost` how often another
process took its core, `load` that of the whole host.

But for `smollm`, all weights are random, so nothing here says how well a model learns, and `night`
is a step whose plans cannot be parsed. Its prompts are shorter than a real night's, since the toy's
tokens hold whole lines, so its seconds and GB are lower. GB is the peak of what tensors took,
plan_GB what scale/fit.py expects. A part that fails, or takes longer than its limit, leaves a line
that says so, and the next one begins.
"""

import argparse
import copy
import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parent.parent
NAMES = "host sample prefill static update night smollm 7b-host toy equal sampled rehearse 0.5b"
NAMES = NAMES.split()
LIMITS = dict.fromkeys(NAMES, 120) | {"host": 30, "sample": 330, "static": 540, "update": 400}
LIMITS |= {"night": 540, "smollm": 540, "7b-host": 240, "rehearse": 240}  # seconds


def flags():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    help = f"{', '.join(NAMES)}; default: all"
    parser.add_argument("parts", nargs="*", metavar="PART", help=help)
    parser.add_argument("--cpu", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--seconds", type=float, default=4000, help="for all parts (4000)")
    parser.add_argument("--smollm", metavar="FOLDER", help="SmolLM2-135M-Instruct")
    help = "host memory, where the machine grows beyond what is free at the start"
    parser.add_argument("--host", type=float, default=0.0, metavar="GB", help=help)
    return parser.parse_args()


ARGS = flags()
sys.path.insert(0, str(REPO))
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from fast import prefix, trees
from flow_grpo import Action, advantages, distribution, padded, token_logps, update
from models.local import ready_to_update, sample, sampling_mode
from scale import adapters, fit
from scale.masters import Masters

CPU, CARD = torch.device("cpu"), torch.device("cpu" if ARGS.cpu else "cuda")
LAYOUTS = {"rows": padded, "trees": trees.rows}
SHAPE = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
SHAPE = f"{SHAPE} vocab_size tie_word_embeddings".split()
SHAPES = {"tiny": (64, 128, 2, 4, 2, 8000, True), "7b": (3584, 18944, 28, 28, 4, 152064, False)}
SHAPES["0.5b"] = (896, 4864, 24, 14, 2, 151936, True)
PROMPT, LONG, NEW = (64, 96, 16) if ARGS.cpu else (2048, 4096, 64)
ROWS = (4, 8) if ARGS.cpu else (64, 128, 256)
HELD = 28  # GB of another process, such as vLLM
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


def host():
    """A kernel that does nothing, many times: how long the CPU takes to launch it."""
    x, number = torch.zeros(1, device=CARD), 1_000 if ARGS.cpu else 20_000
    for _ in range(2):  # the first time warms up
        start = clock()
        for _ in range(number):
            x.add_(1)
        seconds = clock() - start
    cores = len(os.sched_getaffinity(0))
    yield "a launch", dict(microseconds=1e6 * seconds / number, cores=cores)


def sample_rows():
    for model, kind in kinds_of_adapters():
        watched(model, prompts_of(2, True), NEW)  # warm-up
        for rows in ROWS:
            for mixed in False, True:
                what = f"{rows} x ({'mixed' if mixed else PROMPT} + {NEW}), {kind}"
                yield what, watched(model, prompts_of(rows, mixed), NEW)[1]


def kinds_of_adapters():
    """(a model of the 7B's shape, its kind of adapters): the same one, changed."""
    model = model_of("7b", "bfloat16")
    yield model, "no adapters"
    if adapters.installed():
        model = adapters.add(model, 32)
        yield model, "bfloat16 adapters"
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()
        yield model, "float32 adapters"


def prefill_peak():
    model, rows = model_of("7b", "bfloat16"), ROWS[-2]
    prompts = [ids.prompt_ids for ids in batch(rows, 1, PROMPT + 264, 1)[0]]
    before = prefix.CHUNK
    for chunk in before, 2**20:
        prefix.CHUNK = chunk
        peak()
        start = clock()
        try:
            with sampling_mode(model):
                sample(model, prompts, [], 0, 1, distribution, prefix.prefill)
            numbers = dict(seconds=clock() - start)
        except torch.OutOfMemoryError:
            numbers = dict(seconds="out of memory")
        gc.collect()
        yield f"{rows} x {len(prompts[0])}, {chunk} columns at a time", numbers | peak()
    prefix.CHUNK = before


def static():
    """Today's way and three others: greedy tokens, and their speed."""
    from bench import static_cache

    for model, kind in kinds_of_adapters():
        if kind.startswith("float32"):
            return
        prompts, right = prompts_of(ROWS[-2], True), None
        ways = [("today", "sdpa", None), ("static", "sdpa", None), ("static", "grouped", None)]
        ways += [("static", "grouped", backend) for backend in BACKENDS]
        for cache, attention, backend in ways:
            begin = prefix.prefill
            if cache == "static":
                begin = static_cache.Static(max(map(len, prompts)) + NEW)
            static_cache.attention(model, attention)
            how = partial(static_cache.compiled, backend=backend)
            try:
                first, _ = watched(model, prompts, NEW, begin, how)
                once = clock() - first.began  # with the capture
                run, numbers = watched(model, prompts, NEW, begin, how)
                numbers["capture_s"] = once - (clock() - run.began)
                right = right or run.ids
                same = [a == b for a, b in zip(right, run.ids, strict=True)]
                numbers["rows_equal"] = sum(same) / len(same)
            except Exception as why:  # of this way alone
                if isinstance(why, TimeoutError):
                    raise
                numbers = dict(error=f"{type(why).__name__}: {why}"[:300])
            yield f"{kind}: {cache}, {attention}, {backend or 'not compiled'}", numbers
            begin = first = run = None  # their memory
            gc.collect()
        static_cache.attention(model, "sdpa")


BACKENDS = ["eager"] if ARGS.cpu else ["cudagraphs", "inductor"]


def update_step():
    """The update of a night's step: 16 questions x 8 rollouts, three turns with longer prompts."""
    if not adapters.installed():
        yield "left out: pip install peft", {}
        return
    model = adapters.add(model_of("7b", "bfloat16"), 32)
    questions, lengths, new = (2, (24, 36, 48), 8) if ARGS.cpu else (16, (880, 1340, 1800), 150)
    n = 8 * questions
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = Masters(weights, partial(ADAMW, lr=2e-5))
    model.activation_checkpointing_enable()
    ready_to_update(model)
    draw, actions, groups = torch.Generator().manual_seed(0), [], [i // 8 for i in range(n)]
    ids = lambda number: torch.randint(1, 2000, (number,), generator=draw).tolist()
    asked = [ids(lengths[0]) for _ in range(questions)]
    for i, A in enumerate(advantages([float(i % 2) for i in range(n)], groups)[0].tolist()):
        memory = ids(lengths[-1] - lengths[0])
        for turn, length in enumerate(lengths, 1):
            prompt = asked[i // 8] + memory[: length - lengths[0]]
            actions.append(Action(prompt, ids(new), i, A=A, turn=turn))
    settings = dict(temperature=0.7, clip=(0.2, 0.3), beta=0.001, minibatches=4)
    settings |= dict(token_budget=4 * LONG, rows=trees.rows)
    peak()
    start = clock()
    found = update(model, model, optimizer, actions, groups, **settings)
    numbers = dict(seconds=clock() - start, skipped=found["skipped"]) | peak()
    yield f"update of {n} rollouts x {len(lengths)} turns, bfloat16 adapters", numbers


def night():
    """A step of train.py beside a process that holds the memory which vLLM would."""
    hold = f"import torch; x = torch.empty({HELD}_000_000_000, dtype=torch.uint8, device='cuda')"
    hold += "; print('held', flush=True); input()"
    with tempfile.TemporaryDirectory() as folder:
        save_model("7b", folder)
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        holder = None if ARGS.cpu else subprocess.Popen([sys.executable, "-c", hold], **pipes)
        try:
            if holder:
                holder.stdout.readline()
            words = f"--model {folder}/model --out {folder}/run --data toy/train.jsonl --steps 1"
            words += " --valid none --judge none --tools base_generator"
            words += f" --max-new-tokens {NEW}" + " --questions 2" * ARGS.cpu
            yield train(words)
        finally:
            if holder:
                holder.kill()


def smollm():
    if not ARGS.smollm:
        yield "left out: give --smollm FOLDER", {}
        return
    for dtype in "float32", "bfloat16":
        with tempfile.TemporaryDirectory() as folder:
            words = f"--model {ARGS.smollm} --dtype {dtype} --lora 32 --out {folder}/run"
            words += " --data toy/train.jsonl --valid none --judge none --max-new-tokens 128"
            words += " --tools base_generator --steps 20"
            what, numbers = train(words)
            yield f"{dtype}, {what}", numbers


def rehearse():
    with tempfile.TemporaryDirectory() as folder:
        save_model("0.5b", folder)
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


WAYS = host, sample_rows, prefill_peak, static, update_step, night, smollm, seven_host, toy, equal
PARTS = dict(zip(NAMES, (*WAYS, sampled, rehearse, half), strict=True))


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


def save_model(size, folder):
    """A random model with the toy's tokenizer, as {folder}/model."""
    model_of(size, "bfloat16").save_pretrained(f"{folder}/model")
    AutoTokenizer.from_pretrained(REPO / "toy").save_pretrained(f"{folder}/model")
    gc.collect()
    peak()


def prompts_of(rows, mixed):
    """Token lists: copies of one prompt. Or mixed ones: all begin alike, eight each have the same
    question, and each ends in a memory of its own."""
    if not mixed:
        return [batch(1, 1, PROMPT, 1)[0][0].prompt_ids] * rows
    draw = torch.Generator().manual_seed(0)
    ids = lambda number: torch.randint(1, 2000, (number,), generator=draw).tolist()
    shared, questions = ids(PROMPT // 4), [ids(PROMPT // 8) for _ in range(0, rows, 8)]
    memory = lambda row: ids(PROMPT // 8 * (1 + row % 5))
    return [shared + questions[row // 8] + memory(row) for row in range(rows)]


class Watch:
    """flow_grpo.distribution(), which looks at the clock between tokens. Tokens 2 to new - 6 are
    timed; of the next four, a profiler adds up the card's kernels."""

    def __init__(self, new):
        self.new, self.token, self.began, self.numbers = new, 0, clock(), {}
        self.profile = None

    def __call__(self, logits, temperature):
        self.token += 1
        if self.token == 1:
            self.numbers["prefill_s"] = clock() - self.began
        if self.token == 2:
            self.start = clock(), *used()
        if self.token == self.new - 6:
            wall, cpu, lost = (b - a for a, b in zip(self.start, (clock(), *used()), strict=True))
            self.numbers |= dict(ms_a_token=1000 * wall / (self.new - 8), cpu=cpu / wall, lost=lost)
            if not ARGS.cpu:
                kinds = [torch.profiler.ProfilerActivity.CUDA]
                self.profile = torch.profiler.profile(activities=kinds)
                self.profile.start()
        if self.token == self.new - 2 and self.profile:
            clock()
            self.profile.stop()
            self.numbers |= kernels(self.profile, 4)
        return distribution(logits, temperature)


def used():
    """(CPU seconds of this process, how often another one took its core)"""
    return time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def kernels(profile, tokens):
    rows = [row for row in profile.key_averages() if row.device_type.name == "CUDA"]
    busy = sum(row.self_device_time_total for row in rows) / 1000
    return dict(busy_ms=busy / tokens, kernels=sum(row.count for row in rows) / tokens)


def watched(model, prompts, new, begin=prefix.prefill, compiled=None):
    """(the Watch, numbers) of a greedy batch."""
    gc.collect()
    peak()
    with sampling_mode(model), compiled(model) if compiled else nullcontext():
        watch = Watch(new)
        watch.ids = sample(model, prompts, [], 0, new, watch, begin)
    return watch, watch.numbers | peak()


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
    host_peak()
    for layout in ("trees", "rows", "trees"):
        settings["rows"] = LAYOUTS[layout]
        start = clock()
        found = update(model, reference, optimizer, actions, groups, **settings)
        numbers |= dict(seconds=clock() - start) | peak()
        numbers["host_GB"] = host_peak()
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
    taken, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return dict(GB=taken / 1e9, reserved_GB=reserved / 1e9)


def host_peak():
    """GB that this process took on the host at most since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak, begins anew
    return int(re.search(r"VmHWM:\s*(\d+)", status)[1]) * 1024 / 1e9


def host_memory():
    """GB that are free on the host."""
    return fit.free_memory(CARD)[1] / 1e9


# --------------------------------------------------------------------------------------- the run
def write(part, what, numbers):
    """Print a line of the table. It is also in the file at once, should this process be killed."""
    numbers = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in numbers.items()}
    line = json.dumps({"part": part, "what": what} | numbers | {"load": os.getloadavg()[0]})
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
        if before > ARGS.seconds:
            write(part, "left out: the time is over", {})
            continue
        run(part, min(LIMITS[part], ARGS.seconds - before))
        gc.collect()
        peak()
        write(part, "ended", {"seconds": time.monotonic() - start - before})


if __name__ == "__main__":
    main()
