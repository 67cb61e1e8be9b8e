"""What a step of training takes, beside what fit.py predicts: bytes by part, and on a GPU seconds and the share of its arithmetic.

    python bench/memory.py                                     small models of Qwen2.5's configuration, a process each, some minutes
    python bench/memory.py --model-size 7b --optimizer-device cpu     one GPU: the real configuration with random weights
    python bench/memory.py --model-size 7b --lora 32
    python bench/memory.py --table                             what the four sizes need, computed, and the cards that hold it

One real generate(), one real update() of two equal micro-batches and one real step each. On a CPU the peak is the process's
VmHWM, reset before each phase (malloc returns what is freed: MALLOC_* below), less what it had before the model was there; on a
GPU it is torch.cuda.max_memory_allocated(). The optimiser's state is made by a step that is not measured. "computed" means: from
fit.py's formulas and no measurement.
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

from flow_grpo import Action, update
from models.local import HF
from scale import adapters, fit
from scale.masters import MasterAdamW

logging.disable_progress_bar()
# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied: the four public ones, and three of the same kind for a CPU
SIZES = {"0.5b": (896, 4864, 24, 14, 2, 151936, True), "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
         "3b": (2048, 11008, 36, 16, 2, 151936, True), "7b": (3584, 18944, 28, 28, 4, 152064, False),
         "deep": (256, 1408, 12, 4, 2, 2048, False), "wide": (768, 4096, 3, 12, 2, 8192, False),
         "words": (256, 1408, 2, 4, 2, 151936, True)}
CASES = [dict(model_size="deep", rows=4, prompt=448, new=32), dict(model_size="deep", rows=4, prompt=448, new=32, checkpointing=True),
         dict(model_size="wide", rows=4, prompt=448, new=32), dict(model_size="wide", rows=4, prompt=448, new=32, checkpointing=True),
         dict(model_size="words", rows=4, prompt=128, new=64, checkpointing=True), dict(model_size="words", rows=4, prompt=128, new=128)]
CASES += [case | {"lora": 8} for case in CASES[:4]] if find_spec("peft") else []
# Measured elsewhere: FakeTensor runs of the 7B in bfloat16, rows x (prompt + plan), checkpointing, GB beyond weights and gradients.
KNOWN = [(1, 4096, 1024, True, 2.75), (2, 4096, 1024, True, 5.50), (4, 4096, 1024, True, 10.99), (8, 4096, 1024, True, 21.99),
         (4, 4096, 2048, True, 13.27), (1, 18432, 2048, True, 11.95), (1, 4096, 1024, False, 37.10)]
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12, "A10": 125e12}     # dense bfloat16, vendors'
CARDS = {24: 25.7e9, 48: 48.3e9, 80: 85.5e9, 141: 149e9}      # what "24 GB" and so on are in bytes, as nvidia-smi shows them
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_TOP_PAD_": "0", "OMP_NUM_THREADS": "1"}


def config(name):
    d, f, layers, heads, kv, vocabulary, tied = SIZES[name]
    return Qwen2Config(hidden_size=d, intermediate_size=f, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
                       vocab_size=vocabulary, tie_word_embeddings=tied, max_position_embeddings=32768, eos_token_id=None,
                       rope_parameters={"rope_type": "default", "rope_theta": 1e6})


class Meter:
    """Bytes now, and the most since reset()."""

    def __init__(self, cuda):
        self.cuda, self.base = cuda, 0
        self.base = self.now()

    def now(self):
        return torch.cuda.memory_allocated() if self.cuda else self.status("VmRSS") - self.base

    def peak(self):
        return torch.cuda.max_memory_allocated() if self.cuda else self.status("VmHWM") - self.base

    def status(self, key):
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

    def reset(self):
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")


class Watched:
    """The optimiser; what update() needed is read off when it calls step(), and what step() needed after it."""

    def __init__(self, optimizer, meter, measured):
        self.optimizer, self.meter, self.measured = optimizer, meter, measured

    def step(self):
        self.measured["update"] = self.meter.peak()
        self.meter.reset()
        start = time.perf_counter()
        self.optimizer.step()
        torch.cuda.synchronize() if self.meter.cuda else None
        self.measured |= {"step": self.meter.peak(), "seconds step": time.perf_counter() - start}


def engine(model, args):
    """(policy, frozen): one model twice, or with --lora once (lora.py)."""
    stub = SimpleNamespace(eos_token_id=None)                              # nobody stops: every row has all its tokens
    if args.lora:
        return adapters.adapted(HF(model, stub), args.lora)
    return HF(model, stub), HF(copy.deepcopy(model).requires_grad_(False), stub)


def warm_up():
    """Libraries, threads and caches that come with the first generate() and update() are nobody's bytes."""
    small = Qwen2Config(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
    model = AutoModelForCausalLM.from_config(small)
    HF(model, SimpleNamespace(eos_token_id=None)).generate([[1, 2, 3]], 1.0, 4)
    update(model, None, MasterAdamW(model.parameters(), lr=1e-6), [Action([1, 2], [3, 4], 0)], [1.0], temperature=0.7)


def measure(args):
    """{part or phase: bytes, "seconds ...": seconds} of one size in this process."""
    cuda, measured = torch.cuda.is_available(), {}
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(0)
    warm_up()
    if args.lora:
        import peft  # noqa: F401                                          # its own bytes are nobody's either
    meter = Meter(cuda)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(args.model_size), dtype=dtype).eval()
    measured["weights"] = meter.now()
    policy, frozen = engine(model, args)
    measured["frozen copy"] = meter.now() - measured["weights"]
    if args.checkpointing:
        policy.model.activation_checkpointing_enable()
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = Watched(MasterAdamW(trained, lr=1e-6, device=args.optimizer_device), meter, measured)
    reference = policy.model if args.lora else frozen.model
    words = lambda number: torch.randint(10, SIZES[args.model_size][5], (number,)).tolist()
    actions = [Action(words(args.prompt), words(args.new), i) for i in range(2 * args.rows)]

    def learn():
        meter.reset()
        update(policy.model, reference, optimizer, actions, [1.0, -1.0] * args.rows, temperature=0.7,
               token_budget=args.rows * (args.prompt + args.new))
        torch.cuda.synchronize() if cuda else None
    before = meter.now()
    learn()                                                                # makes the state
    measured["optimizer"] = meter.now() - before
    start = time.perf_counter()
    learn()
    measured["seconds update"] = time.perf_counter() - start - measured["seconds step"]
    meter.reset()
    start = time.perf_counter()
    policy.generate([a.prompt_ids for a in actions[: args.rows]], 0.7, args.new)
    torch.cuda.synchronize() if cuda else None
    return measured | {"generate": meter.peak(), "seconds generate": time.perf_counter() - start}


def predicted(args, dtype, context=0):
    tokens = args.rows * (args.prompt + args.new)
    return fit.predict(config(args.model_size), dtype=dtype, token_budget=tokens, generate_budget=tokens, max_new_tokens=args.new,
                       prompt=args.prompt, gradient_checkpointing=args.checkpointing, optimizer_device=args.optimizer_device, lora=args.lora, context=context)


def compare(args, measured):
    """Print part | predicted | measured | ratio, and return the ratio of the peak: of the phase that needs most.

    A host optimiser's state is the host's, but on a CPU the device is the host: there it is in every phase.
    """
    cuda = torch.cuda.is_available()
    said = predicted(args, torch.bfloat16 if cuda else torch.float32)
    parts, extra = said.parts, 0 if cuda else said.parts["host: optimizer"]
    resident = sum(measured[name] for name in ("weights", "frozen copy", "optimizer"))
    rows = {"weights, frozen copy": (parts["weights"] + parts["frozen copy"], measured["weights"] + measured["frozen copy"])}
    rows["optimizer"] = parts["optimizer"] + extra, measured["optimizer"]
    rows["cache, prompts of generate"] = parts["cache of generate"] + parts["prompts of generate"], measured["generate"] - resident
    activations = max(parts[name] for name in ("activations of layers", "activations at the logits", "gradient of the embedding"))
    rows["gradients, activations"] = parts["gradients"] + activations, measured["update"] - resident
    rows["gradients, step"] = parts["gradients"] + parts["step, float32 copies"], measured["step"] - resident
    rows |= {f"PEAK {name}": (said.phases[name] + extra, measured[name]) for name in ("generate", "update", "step")}
    print(f"\n{args.model_size} {SIZES[args.model_size]} | {args.rows} x ({args.prompt} + {args.new}) tokens | checkpointing "
          f"{args.checkpointing} | lora {args.lora} | optimizer on {args.optimizer_device or 'the device'}")
    print(f"{'part':28s} {'predicted':>10s} {'measured':>10s}  ratio   (MiB)")
    for name, (guess, real) in rows.items():
        print(f"{name:28s} {guess / 2**20:10.1f} {real / 2**20:10.1f}  {guess / real if real > 0 else 1:5.2f}", flush=True)
    guess, real = max((row for name, row in rows.items() if name.startswith("PEAK")), key=lambda row: row[1])
    return guess / real


def speed(args, measured):
    """Tokens a second, and model FLOPs as a share of the card's: 6 P a token for forward and backward, 2 P for the reference, and
    attention; the head only where a plan's token is predicted; what checkpointing computes twice is no model FLOP. The target is
    40 % in the update, without the optimiser's step, which is no matter of matrices and may be the host's."""
    of, length = fit.shapes(config(args.model_size)), args.prompt + args.new
    tokens, head = 2 * args.rows * length, of["V"] * of["d"]
    layers = of["parameters"] - head * (1 if of["tied"] else 2)                          # looking a token up is no product
    attention = 4 * of["layers"] * of["q"] * length / 2                                  # forward, causal, for each token
    flops = (8 if not args.lora else 6) * (tokens * layers + 2 * args.rows * args.new * head) + 4 * tokens * attention  # LoRA: no gradient of frozen weights
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    peak = (args.peak_tflops or 0) * 1e12 or next((value for card, value in PEAKS.items() if card in name), None)
    generate, learn, step = (measured[f"seconds {phase}"] for phase in ("generate", "update", "step"))
    print(f"{name}: generate {args.rows * args.new / generate:.0f} new tokens/s ({generate:.1f} s), update {tokens / learn:.0f} tokens/s "
          f"({learn:.1f} s), the optimiser's step {step:.1f} s" + (f", model FLOP utilisation {flops / learn / peak:.0%}" if peak else ""), flush=True)


def table():
    """README's table: prompts of 4 096 and plans of 1 024 tokens, micro-batches of 16 384, checkpointing, bfloat16."""
    print("computed | prompts 4096 + plans 1024, gradient checkpointing, bfloat16, GB = 1e9 bytes; a tenth of a card is left free\n")
    print("| model | mode | GPU, --token-budget 16384 | GPU, 5120 | host | smallest card |\n|---|---|---|---|---|---|")
    for name in ("0.5b", "1.5b", "3b", "7b"):
        for mode, settings in (("full", {}), ("full, --optimizer-device cpu", {"optimizer_device": "cpu"}), ("--lora 32", {"lora": 32})):
            large, small = (fit.predict(config(name), dtype=torch.bfloat16, token_budget=budget, max_new_tokens=1024, gradient_checkpointing=True,
                                        **settings) for budget in (16384, 5120))
            holds = lambda needed: next((card for card, size in CARDS.items() if needed <= 0.9 * size), None)
            first, least = holds(large.gpu), holds(small.gpu)
            cards = f"{first} GB" if first else "none"
            cards += f", {least} GB with 5120" if least and least != first else ""
            print(f"| {name} | {mode} | {large.gpu / 1e9:.1f} | {small.gpu / 1e9:.1f} | {large.host / 1e9:.1f} | {cards} |")


def known():
    print("\nactivations of the 7B, bfloat16, GB beyond weights and gradients: predicted | FakeTensor | ratio")
    of = fit.shapes(config("7b"))
    for rows, prompt, new, checkpointing, real in KNOWN:
        guess = max(fit.activations(of, rows * (prompt + new), rows * new, 2, checkpointing, None)) / 1e9
        print(f"{rows} x ({prompt} + {new}), checkpointing {checkpointing!s:5s}   {guess:6.2f} | {real:6.2f} | {guess / real:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model-size", choices=SIZES, help="only this one; without: the small cases on a CPU, 0.5b on a GPU")
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
        print(json.dumps(measure(SimpleNamespace(**json.loads(args.child)))))
        return
    if args.table:
        table()
        return
    one = {name: getattr(args, name) for name in ("rows", "prompt", "new", "checkpointing", "optimizer_device", "lora")}
    plain = dict(checkpointing=False, optimizer_device=None, lora=None)
    small = not args.model_size and not torch.cuda.is_available()
    worst = 1.0
    for case in CASES if small else [one | {"model_size": args.model_size or "0.5b"}]:
        case = plain | case
        done = subprocess.run([sys.executable, __file__, "--child", json.dumps(case)], env=os.environ | MALLOC, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{case} failed (exit code {done.returncode})")
        measured, case = json.loads(done.stdout.splitlines()[-1]), SimpleNamespace(**case, peak_tflops=args.peak_tflops)
        ratio = compare(case, measured)
        worst = max(worst, ratio, key=lambda x: abs(x - 1))
        speed(case, measured)
    known()
    print(f"\nworst ratio of a peak: {worst:.2f} (target: 0.85 to 1.15)")


if __name__ == "__main__":
    main()
