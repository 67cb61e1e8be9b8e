"""What a step of training takes: bytes by part, beside the prediction of scale/fit.py.

    python bench/memory.py                       small models of Qwen2.5's kind on the CPU, every way to train
    python bench/memory.py sharded adapters      these ways alone

Each case is one real generate(), one update() of two equal micro-batches and one step of the optimizer, in a
process of its own; with ranks 2 in two (gloo), each with its own micro-batches. The peak is the process's
VmHWM, reset before each phase (malloc returns what is freed: meter.MALLOC), less what it had before the model
was there. An update that is not measured makes the optimizer's state. card.py starts the same processes on a
GPU, where the peak is torch.cuda.max_memory_allocated().
"""
import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging

from bench.meter import MALLOC, status
from fast import logps
from flow_grpo import Action, log_probs, update
from models.local import HF
from rewards.metrics import markdown
from scale import adapters, fit, ranks, sharding
from scale.lockstep import make_passes

logging.disable_progress_bar()
# Public models, and some for a CPU: hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
SIZES = fit.QWEN | {
    "deep": (256, 1408, 12, 4, 2, 2048, False), "wide": (768, 4096, 3, 12, 2, 8192, False),
    "words": (256, 1408, 2, 4, 2, 151936, True),
    "like7b": (512, 2816, 12, 8, 4, 8192, False), "like0.5b": (512, 2816, 8, 8, 4, 32768, True)}
BOTH = False, True
SHORT = dict(rows=1, prompt=56, new=8)        # the weights are the peak
LONG = dict(rows=4, prompt=448, new=32)       # the activations are
WAYS = {
    "plain": [dict(model_size=size, checkpointing=checkpointing, **LONG)
              for size in ("deep", "wide") for checkpointing in BOTH] + [
        dict(model_size="words", rows=4, prompt=128, new=64, checkpointing=True),
        dict(model_size="words", rows=4, prompt=128, new=128, checkpointing=False)],
    "plain, adapters": [dict(model_size=size, checkpointing=checkpointing, lora=8, **LONG)
                        for size in ("deep", "wide") for checkpointing in BOTH],
    "sharded, bfloat16": [dict(model_size=size, dtype="bfloat16", **SHORT)
                          for size in ("like7b", "like0.5b")],
    "sharded, 2 ranks": [dict(model_size=size, ranks=2, **SHORT) for size in ("like7b", "like0.5b")] + [
        dict(model_size="like7b", ranks=2, frozen=False, **SHORT), dict(model_size="deep", ranks=2, **LONG)],
    "adapters, 2 ranks": [dict(model_size="like7b", ranks=2, lora=8, **SHORT),
                          dict(model_size="deep", ranks=2, lora=8, **LONG)],
    "host, bfloat16": [dict(model_size="like7b", dtype="bfloat16", optimizer_device="cpu", **SHORT)],
    "host, 2 ranks": [dict(model_size="like7b", ranks=2, optimizer_device="cpu", **SHORT)]}
if not find_spec("peft"):
    WAYS = {way: cases for way, cases in WAYS.items() if "adapters" not in way}
DEFAULTS = dict(checkpointing=True, frozen=True, dtype=None, ranks=1, optimizer_device=None, lora=None)
ENVIRONMENT = MALLOC | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def config(name):
    return fit.qwen(*SIZES[name])


class Meter:
    """Bytes now, and the most since reset()."""

    def __init__(self, cuda):
        self.cuda, self.base = cuda, 0
        self.base = self.now()

    def now(self):
        return torch.cuda.memory_allocated() if self.cuda else status("VmRSS") - self.base

    def peak(self):
        return torch.cuda.max_memory_allocated() if self.cuda else status("VmHWM") - self.base

    def reset(self):
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")


class Watched:
    """The optimizer. When update() calls step(), the peak so far is the update's; then begins the step's."""

    def __init__(self, optimizer, meter, measured):
        self.optimizer, self.meter, self.measured = optimizer, meter, measured

    def step(self):
        self.measured["update"] = self.meter.peak()
        self.meter.reset()
        self.optimizer.step()
        self.measured["step"] = self.meter.peak()


def dtype_of(args, on_gpu):
    return getattr(torch, args.dtype or ("bfloat16" if on_gpu else "float32"))


def model_of(size, dtype, device):
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(size, dtype=dtype).eval()


def warm_up(args, dtype, device):
    """What the first generate() and update() load (libraries, threads, process groups) is not counted."""
    tiny = Qwen2Config(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                       num_key_value_heads=1, vocab_size=64)
    model = model_of(tiny, dtype, device)
    HF(model, SimpleNamespace(eos_token_id=None)).sample_all([[1, 2, 3]], 1.0, 4)
    how = logps.scoring(log_probs, model)
    sharding.shard(model, bool(args.optimizer_device))
    optimizer = sharding.adamw(model, 1e-6, bool(args.optimizer_device))
    action = Action([1, 2], [3, 4], 0, A=1.0)
    update(make_passes(model, None, *how), optimizer, [action], [0], temperature=0.7)
    if args.lora:
        adapters.peft()


def measure(args):
    """{part or phase: bytes} of one case, in this process; with several ranks of the one that needs most."""
    cuda, measured = torch.cuda.is_available(), {}
    device = ranks.start(None if cuda else "cpu") or ("cuda" if cuda else "cpu")
    dtype, host = dtype_of(args, cuda), bool(args.optimizer_device)
    torch.manual_seed(0)
    warm_up(args, dtype, device)
    meter = Meter(cuda)
    model = model_of(config(args.model_size), dtype, device)
    policy = HF(model, SimpleNamespace(eos_token_id=None))                  # no stop token: equal lengths
    reference = None
    if args.lora:
        policy, _ = adapters.adapted(policy, args.lora)
        reference = policy.model
    if args.checkpointing:
        policy.model.activation_checkpointing_enable()
    how = logps.scoring(log_probs, policy.model)
    sharding.shard(policy.model, host)
    measured["weights"] = meter.now()
    if args.frozen and not args.lora:
        reference = model_of(config(args.model_size), dtype, device).requires_grad_(False)
        logps.scoring(log_probs, reference)
    measured["frozen copy"] = meter.now() - measured["weights"]
    optimizer = Watched(sharding.adamw(policy.model, 1e-6, host), meter, measured)
    words = lambda number: torch.randint(10, SIZES[args.model_size][5], (number,)).tolist()
    actions = [Action(words(args.prompt), words(args.new), i, A=(-1.0) ** i) for i in range(2 * args.rows)]
    passes = make_passes(policy.model, reference, *how, token_budget=args.rows * (args.prompt + args.new))

    def learn():
        meter.reset()
        update(passes, optimizer, actions, range(len(actions)), temperature=0.7)

    before = meter.now()
    learn()                                                                 # makes the state
    measured["optimizer"] = meter.now() - before
    learn()
    meter.reset()
    sharding.gather(policy.model)
    policy.budget = passes.budget                                           # all rows in one batch
    policy.sample_all([a.prompt_ids for a in actions[: args.rows]], 0.7, args.new)
    measured["generate"] = meter.peak()
    everyone = ranks.together([measured], ranks.WORLD)
    return max(everyone, key=lambda each: max(each["update"], each["generate"]))


def predicted(args, on_gpu):
    """The Fit of a case, with the host's part if there is no GPU: all of it is in the process's memory."""
    tokens = args.rows * (args.prompt + args.new)
    fitted = fit.predict(
        fit.shapes(config(args.model_size)), dtype=dtype_of(args, on_gpu), token_budget=tokens,
        generate_budget=tokens, max_new_tokens=args.new, prompt=args.prompt, context=0,
        gradient_checkpointing=args.checkpointing, optimizer_device=args.optimizer_device, lora=args.lora,
        ranks=args.ranks, frozen=args.frozen)
    extra = 0 if on_gpu else fitted.parts["host: optimizer"] // args.ranks
    phases = {name: size + extra for name, size in fitted.phases.items()}
    parts = fitted.parts | {"moments": fitted.parts["moments"] + extra}
    return fit.Fit(fitted.gpu + extra, fitted.host, parts, phases)


def peaks(fitted, measured):
    """{phase: (predicted, measured)} of generate(), of update(), and of all with the optimizer's step."""
    most = max(measured[name] for name in ("generate", "update", "step"))
    return {phase: (fitted.phases[phase], measured[phase]) for phase in ("generate", "update")} | {
        "all, with the optimizer's step": (fitted.gpu, most)}


def compare(args, measured):
    """Print part | predicted | measured | ratio; return the ratios of (generate, update, all)."""
    fitted = predicted(args, on_gpu=False)
    parts, ends = fitted.parts, peaks(fitted, measured)
    rows = {"weights": (parts["weights"], measured["weights"]),
            "frozen copy": (parts["frozen copy"], measured["frozen copy"]),
            "optimizer": (parts["moments"], measured["optimizer"]), **ends}
    print("\n" + ", ".join(f"{name} {value}" for name, value in vars(args).items()))
    print(f"{'part':32s} {'predicted':>10s} {'measured':>10s}  ratio   (MB)")
    for name, (guess, real) in rows.items():
        print(f"{name:32s} {guess / 1e6:10.1f} {real / 1e6:10.1f}  "
              f"{f'{guess / real:5.2f}' if real > 1e6 else ''}", flush=True)
    return [guess / real for guess, real in ends.values()]


def run(case):
    """What measure() returns for a case, from its own process, or from one for each rank."""
    start = [] if case["ranks"] == 1 else [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case["ranks"])]
    command = [sys.executable, *start, __file__, "--child", json.dumps(case)]
    result = subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(f"{case} failed (exit code {result.returncode})")
    return json.loads(result.stdout.splitlines()[-1])


def child(case):
    measured = measure(SimpleNamespace(**DEFAULTS | case))
    if ranks.RANK == 0:
        print(json.dumps(measured), flush=True)
    ranks.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("ways", nargs="*", help=f"words of: {'; '.join(WAYS)}; default: all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(json.loads(args.child))
    chosen = {way: cases for way, cases in WAYS.items() if all(word in way for word in args.ways)}
    table = [["way", "cases", "generate", "update", "peak"]]
    for way, cases in chosen.items():
        ratios = []
        for case in cases:
            case = SimpleNamespace(**DEFAULTS | case)
            ratios.append(compare(case, run(vars(case))))
        spans = [f"{min(column):.2f}-{max(column):.2f}" for column in zip(*ratios)]
        table.append([way, str(len(cases)), *spans])
    print(f"\npredicted / measured (target of the peak: 0.85 to 1.15)\n{markdown(table)}")


if __name__ == "__main__":
    main()
