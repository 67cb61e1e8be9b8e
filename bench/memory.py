"""What a step of training takes: bytes by part beside the prediction of scale/fit.py, and seconds.

    python bench/memory.py                       small models of Qwen2.5's kind, a process each; some minutes
    python bench/memory.py --model-size 7b --optimizer-device cpu     one GPU: the real shapes, random weights
    python bench/memory.py --model-size 7b --lora 32
    python bench/memory.py --table               what the four public sizes need, computed, and the cards

Each case is one real generate(), one update() of two equal micro-batches and one step of the optimizer. On a
CPU the peak is the process's VmHWM, reset before each phase (malloc returns what is freed: meter.MALLOC),
less what it had before the model was there; on a GPU it is torch.cuda.max_memory_allocated(). A step that is
not measured makes the optimizer's state. "computed" means: from the formulas of scale/fit.py, without a
measurement.
"""
import argparse
import copy
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging

from bench.meter import MALLOC, status
from flow_grpo import Action, update
from models.local import HF
from scale import adapters, fit
from scale.masters import MasterAdamW

logging.disable_progress_bar()
# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied: public models, and three for a CPU
SIZES = {
    "0.5b": (896, 4864, 24, 14, 2, 151936, True), "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True), "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "deep": (256, 1408, 12, 4, 2, 2048, False), "wide": (768, 4096, 3, 12, 2, 8192, False),
    "words": (256, 1408, 2, 4, 2, 151936, True)}
CASES = [dict(model_size=size, rows=4, prompt=448, new=32, checkpointing=checkpointing)
         for size in ("deep", "wide") for checkpointing in (False, True)]
CASES += [case | {"lora": 8} for case in CASES] if find_spec("peft") else []
CASES += [dict(model_size="words", rows=4, prompt=128, new=64, checkpointing=True),
          dict(model_size="words", rows=4, prompt=128, new=128, checkpointing=False)]
# FakeTensor runs of the 7B in bfloat16: rows, prompt, plan, checkpointing, GB beyond weights and gradients
KNOWN = [(1, 4096, 1024, True, 2.75), (2, 4096, 1024, True, 5.50), (4, 4096, 1024, True, 10.99),
         (8, 4096, 1024, True, 21.99), (4, 4096, 2048, True, 13.27), (1, 18432, 2048, True, 11.95),
         (1, 4096, 1024, False, 37.10)]
# dense bfloat16 operations a second, as the vendor says
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12, "A10": 125e12}
CARDS = {24: 25.7e9, 48: 48.3e9, 80: 85.5e9, 141: 149e9}      # bytes that nvidia-smi shows of a "24 GB" card
ENVIRONMENT = MALLOC | {"OMP_NUM_THREADS": "1"}


def config(name):
    d, f, layers, heads, kv, vocabulary, tied = SIZES[name]
    return Qwen2Config(
        hidden_size=d, intermediate_size=f, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocabulary, tie_word_embeddings=tied, eos_token_id=None,
        max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


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

    def seconds(self, start):
        torch.cuda.synchronize() if self.cuda else None
        return time.perf_counter() - start


class Watched:
    """The optimizer. When update() calls step(), the peak so far is the update's; then begins the step's."""

    def __init__(self, optimizer, meter, measured):
        self.optimizer, self.meter, self.measured = optimizer, meter, measured

    def step(self):
        self.measured["update"] = self.meter.peak()
        self.meter.reset()
        start = time.perf_counter()
        self.optimizer.step()
        self.measured |= {"seconds step": self.meter.seconds(start), "step": self.meter.peak()}


def warm_up(lora):
    """What the first generate() and update() load (libraries, threads, caches) is not counted."""
    model = AutoModelForCausalLM.from_config(Qwen2Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64))
    HF(model, SimpleNamespace(eos_token_id=None)).generate([[1, 2, 3]], [torch.rand(4)], 1.0, 4)
    optimizer = MasterAdamW(model.parameters(), lr=1e-6)
    update(model, None, optimizer, [Action([1, 2], [3, 4], 0)], [1.0], temperature=0.7)
    if lora:
        adapters.peft()


def measure(args):
    """{part or phase: bytes, "seconds ...": seconds} of one case, in this process."""
    cuda, measured = torch.cuda.is_available(), {}
    torch.manual_seed(0)
    warm_up(args.lora)
    meter = Meter(cuda)
    with torch.device("cuda" if cuda else "cpu"):
        dtype = torch.bfloat16 if cuda else torch.float32
        model = AutoModelForCausalLM.from_config(config(args.model_size), dtype=dtype).eval()
    measured["weights"] = meter.now()
    policy = HF(model, SimpleNamespace(eos_token_id=None))                  # no stop token: equal lengths
    if args.lora:
        policy, _ = adapters.adapted(policy, args.lora)
        reference = policy.model
    else:
        reference = copy.deepcopy(model).requires_grad_(False)
    measured["frozen copy"] = meter.now() - measured["weights"]
    if args.checkpointing:
        policy.model.activation_checkpointing_enable()
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = Watched(MasterAdamW(trained, lr=1e-6, device=args.optimizer_device), meter, measured)
    words = lambda number: torch.randint(10, SIZES[args.model_size][5], (number,)).tolist()
    actions = [Action(words(args.prompt), words(args.new), i) for i in range(2 * args.rows)]

    def learn():
        meter.reset()
        start = time.perf_counter()
        update(policy.model, reference, optimizer, actions, [1.0, -1.0] * args.rows, temperature=0.7,
               token_budget=args.rows * (args.prompt + args.new))
        return meter.seconds(start)

    before = meter.now()
    learn()                                                                 # makes the state
    measured["optimizer"] = meter.now() - before
    measured["seconds update"] = learn() - measured["seconds step"]
    meter.reset()
    start = time.perf_counter()
    prompts = [a.prompt_ids for a in actions[: args.rows]]
    policy.generate(prompts, list(torch.rand(len(prompts), args.new)), 0.7, args.new)
    return measured | {"seconds generate": meter.seconds(start), "generate": meter.peak()}


def compare(args, measured):
    """Print part | predicted | measured | ratio; return the ratio of the peak.

    The state of --optimizer-device cpu is on the host; without a GPU everything is, so it counts there.
    """
    cuda, tokens = torch.cuda.is_available(), args.rows * (args.prompt + args.new)
    fitted = fit.predict(
        fit.shapes(config(args.model_size)), dtype=torch.bfloat16 if cuda else torch.float32,
        token_budget=tokens, generate_budget=tokens, max_new_tokens=args.new, prompt=args.prompt, context=0,
        gradient_checkpointing=args.checkpointing, optimizer_device=args.optimizer_device, lora=args.lora)
    parts, extra = fitted.parts, 0 if cuda else fitted.parts["host: optimizer"]
    always = sum(measured[name] for name in ("weights", "frozen copy", "optimizer"))
    peak = max(measured[name] for name in ("generate", "update", "step"))
    rows = {
        "weights, frozen copy": (parts["weights"] + parts["frozen copy"],
                                 measured["weights"] + measured["frozen copy"]),
        "optimizer": (parts["optimizer"] + extra, measured["optimizer"]),
        "cache of generate": (parts["cache of generate"], measured["generate"] - always),
        "gradients, activations": (fitted.phases["update"] - fitted.phases["generate"]
                                   + parts["cache of generate"], measured["update"] - always),
        "generate": (fitted.phases["generate"] + extra, measured["generate"]),
        "update": (fitted.phases["update"] + extra, measured["update"]),
        "PEAK, with the step": (fitted.gpu + extra, peak)}
    print(f"\n{args.model_size} {SIZES[args.model_size]} | {args.rows} x ({args.prompt} + {args.new}) tokens "
          f"| checkpointing {args.checkpointing} | lora {args.lora} | optimizer on "
          f"{args.optimizer_device or 'the device'}")
    print(f"{'part':28s} {'predicted':>10s} {'measured':>10s}  ratio   (MiB)")
    for name, (guess, real) in rows.items():
        ratio = guess / real if real > 0 else 1
        print(f"{name:28s} {guess / 2**20:10.1f} {real / 2**20:10.1f}  {ratio:5.2f}", flush=True)
    return ratio


def speed(args, measured):
    """Print tokens a second, and the model's operations as a share of what the card can do.

    A token costs 6 operations a weight forward and backward, 2 for the reference, and attention. The head
    counts only where a token of a plan is predicted; with LoRA frozen weights have no gradient; what
    checkpointing computes twice counts once. The target is 40 % in the update without the optimizer's step.
    """
    of, tokens = fit.shapes(config(args.model_size)), 2 * args.rows * (args.prompt + args.new)
    head = of["V"] * of["d"]
    inner = of["parameters"] - head * (1 if SIZES[args.model_size][6] else 2)   # looking a token up is free
    attention = 2 * of["layers"] * of["q"] * (args.prompt + args.new)               # forward, causal, a token
    weights = tokens * inner + 2 * args.rows * args.new * head
    flops = (6 if args.lora else 8) * weights + 4 * tokens * attention
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    known = next((value for card, value in PEAKS.items() if card in name), None)
    peak = args.peak_tflops * 1e12 if args.peak_tflops else known
    generate, learn, step = (measured[f"seconds {phase}"] for phase in ("generate", "update", "step"))
    share = f", model FLOP utilisation {flops / learn / peak:.0%}" if peak else ""
    print(f"{name}: generate {args.rows * args.new / generate:.0f} new tokens/s ({generate:.1f} s), "
          f"update {tokens / learn:.0f} tokens/s ({learn:.1f} s), the optimizer's step {step:.1f} s{share}")


def table():
    """README's table: prompts of 4096 and plans of 1024 tokens, checkpointing, bfloat16."""
    print("computed | prompts 4096 + plans 1024, gradient checkpointing, bfloat16, GB = 1e9 bytes; a tenth "
          "of a card is left free\n\n| model | mode | GPU, --token-budget 16384 | GPU, 5120 | host "
          "| smallest card |\n" + "|---" * 6 + "|")
    on_host = {"optimizer_device": "cpu"}
    modes = [("full", {}), ("full, --optimizer-device cpu", on_host), ("--lora 32", {"lora": 32})]
    for name in ("0.5b", "1.5b", "3b", "7b"):
        of = fit.shapes(config(name))
        for mode, settings in modes:
            large, small = (
                fit.predict(of, dtype=torch.bfloat16, token_budget=budget, max_new_tokens=1024,
                            gradient_checkpointing=True, **settings) for budget in (16384, 5120))
            first, least = smallest_card(large.gpu), smallest_card(small.gpu)
            cards = f"{first} GB" if first else "none"
            cards += f", {least} GB with 5120" if least and least != first else ""
            sizes = " | ".join(f"{size / 1e9:.1f}" for size in (large.gpu, small.gpu, large.host))
            print(f"| {name} | {mode} | {sizes} | {cards} |")


def smallest_card(needed):
    return next((card for card, size in CARDS.items() if needed <= 0.9 * size), None)


def known():
    print("\nactivations of the 7B, bfloat16, GB: predicted | FakeTensor | ratio")
    of = fit.shapes(config("7b"))
    for rows, prompt, new, checkpointing, real in KNOWN:
        guess = max(fit.activations(of, rows * (prompt + new), rows * new, 2, checkpointing, None)) / 1e9
        ratio = f"{guess:6.2f} | {real:6.2f} | {guess / real:.2f}"
        print(f"{rows} x ({prompt} + {new}), checkpointing {checkpointing!s:5s}   {ratio}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model-size", choices=SIZES, help="default: small cases on a CPU, 0.5b on a GPU")
    parser.add_argument("--rows", type=int, default=3, help="rows of a micro-batch, and of generate()")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--new", type=int, default=1024, help="tokens of a plan")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--optimizer-device", default=None)
    parser.add_argument("--lora", type=int, default=None)
    parser.add_argument("--peak-tflops", type=float, help="of the card, if its name is not known here")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return print(json.dumps(measure(SimpleNamespace(**json.loads(args.child)))))
    if args.table:
        return table()
    small, worst = not args.model_size and not torch.cuda.is_available(), 1.0
    args.model_size = args.model_size or "0.5b"
    plain = vars(args) | (dict(optimizer_device=None, lora=None) if small else {})
    for case in CASES if small else [{}]:
        command = [sys.executable, __file__, "--child", json.dumps(plain | case)]
        result = subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True)
        if result.returncode:
            sys.exit(f"{case} failed (exit code {result.returncode})")
        measured, case = json.loads(result.stdout.splitlines()[-1]), SimpleNamespace(**plain | case)
        worst = max(worst, compare(case, measured), key=lambda ratio: abs(ratio - 1))
        speed(case, measured)
    known()
    print(f"\nworst ratio of a peak: {worst:.2f} (target: 0.85 to 1.15)")


if __name__ == "__main__":
    main()
