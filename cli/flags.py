"""The flags of solve.py and train.py, with their help and their defaults.

    python solve.py --help
    python train.py --help

A new flag is one line in solve_parser() or train_parser(). command_line.py checks what was typed, and fills
in the defaults that depend on other flags.
"""
import argparse
from pathlib import Path

from benchmarks import tables
from world.places import MODULES

TOY = Path(__file__).parents[1] / "toy"
HOPS = TOY / "hops"  # the second toy, in which the right tool depends on memory
TOY_TOOLS = ["base_generator", "python_coder", "wikipedia_search"]  # the tools that the toy has learnt

# Defaults: the paper's (steps are read off its figures; it gives no minibatches and no every; the temperature
# is the released code's), and the toy's.
# A small model learns at a larger rate, from smaller batches. The toy's questions need one or two turns: with
# no turn to spare, each wrong tool costs the answer.
FOR_PAPER = {"lr": None, "steps": 32, "questions": 32, "minibatches": 1, "max_turns": 3, "every": 5,
             "keep": 2, "data": "nq+deepmath", "valid": None, "test": None}
FOR_TOY = {"lr": 2e-4, "steps": 60, "questions": 16, "minibatches": 4, "max_turns": 2, "every": 10}
FOR_HOPS = FOR_TOY | {"lr": 4e-4, "steps": 150, "max_turns": 5}
for defaults, folder in ((FOR_TOY, TOY), (FOR_HOPS, HOPS)):
    defaults |= {name: str(folder / f"{file}.jsonl") for name, file in
                 (("data", "train"), ("valid", "valid"), ("test", "test"))}


def is_toy(model):
    return Path(model).resolve() in (TOY.resolve(), HOPS.resolve())


def train_defaults(model):
    """The defaults of train.py for this model."""
    return {TOY.resolve(): FOR_TOY, HOPS.resolve(): FOR_HOPS}.get(Path(model).resolve(), FOR_PAPER)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not None, which the help text explains, nor the False of a switch."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def new_parser(name, usage, description):
    return argparse.ArgumentParser(
        prog=name, usage=f"{name} {usage}", allow_abbrev=False, formatter_class=Help, description=description)


def flag_group(parser, title):
    """add(flag, help, ...): adds a flag under this heading."""
    group = parser.add_argument_group(title)
    return lambda flag, help, **settings: group.add_argument(flag, help=help, **settings)


def flag_of(name):
    """The flag of a setting: max_turns -> --max-turns."""
    return f"--{name.replace('_', '-')}"


def add_engines(parser):
    add = flag_group(parser, "the modules that are not trained, and the tools")
    add("--fixed", "all modules but the planner: folder, hub name or http://host:8000/v1#model; "
                   "None: the one --model was trained with, or --model")
    for module in MODULES[1:]:
        what = "tool base_generator" if module == "base_generator" else module
        add(flag_of(module), f"another model for the {what} alone; None: --fixed")
    add("--judge", "model that grades what the rules cannot read, or none; None: --fixed, for the toy none")
    add("--tools", "tools to choose from, as in a,b; None: as --model was trained, or all", nargs="+")
    add("--corpus", "what wikipedia_search reads: JSONL of title and text, or wikipedia:LANGUAGE; if lines "
                    "have a url too, web_search reads these pages alone; None: as --tools, or wikipedia:en")
    add("--allow-unconfined", "web_search and python_coder together where nothing protects your files",
        action="store_true")
    add("--cache", "SQLite file that keeps answers of the web and verdicts of the judge")
    add("--think", "let models think whose chat template has enable_thinking", action="store_true")
    add("--device", "cuda, mps or cpu; None: the first there is")
    add("--dtype", "float32, bfloat16, ...; None: bfloat16 on cuda, float32 elsewhere")


def add_plain(add):
    add("--plain", "the same without fast/, as the nine scripts and models/local.py say: slower",
        action="store_true")


def solve_parser():
    parser = new_parser("solve.py", "[question] [flags]",
                        "Ask the flow one question, a file of questions, or a benchmark.")
    add = flag_group(parser, "the questions")
    add("question", "one question; without one, --data or --benchmark, a few of the toy's", nargs="?")
    add("--data", "questions as JSONL, which are graded")
    add("--benchmark", f"all, or some of {', '.join(tables.BENCHMARKS)}", nargs="+",
        metavar="NAME", choices=["all", *tables.BENCHMARKS])
    add("--benchmark-dir", "folder that holds the benchmarks' files, for a machine without network")
    add("--limit", "only the first so many questions", type=int)
    add("--compare", "the better of two: folders of --out, or models and --data", nargs=2, metavar=("A", "B"))
    add("--trials", "how many times each benchmark is run; the paper: 3", type=int, default=1)
    add = flag_group(parser, "the planner")
    add("--model", "folder, hub name or http://host:8000/v1#model", default=str(TOY))
    add("--temperature", "of the planner's sampling; None: 0 (greedy) for one question, else 0.7", type=float)
    add_engines(parser)
    add = flag_group(parser, "the run")
    add("--max-turns", "turns of a rollout at most (default: 10; for the few questions of the toy 2)",
        type=int)
    add("--max-new-tokens", "longest completion, of the judge too; None: the checkpoint's, or 1024", type=int)
    add("--batch", "questions in lock-step; None: 64, fewer where a CPU is slow", type=int)
    add("--seed", "decides what is sampled", type=int, default=0)
    add("--out", "folder for the rollouts, where a stopped run goes on; None: none, or runs/MODEL-benchmarks")
    add("--quiet", "no traces, only the summary", action="store_true")
    add_plain(add)
    return parser


def train_parser():
    parser = new_parser("train.py", "[flags]",
                        "Flow-GRPO in the flow. Questions -> rollouts -> rewards -> advantages -> update.")

    def default(name):
        return f"(default: {FOR_PAPER[name]}; the toy {FOR_TOY[name]})"

    add = flag_group(parser, "what is trained, on what")
    add("--model", "folder or hub name of the planner", default=str(TOY))
    add("--data", "training questions: JSONL, or nq, deepmath, nq+deepmath (default; the toy its own)")
    add("--valid", "questions that choose best/: JSONL, or none (default: 64 of --data; the toy its own)")
    add("--test", "questions graded before and after: JSONL, or none (default: none; the toy its own)")
    add("--limit", "questions of --data at most; None: all of a file, 1000 of a named set", type=int)
    add_engines(parser)
    add = flag_group(parser, "the rollouts")
    add("--max-turns", f"turns of a rollout in training {default('max_turns')}", type=int)
    add("--temperature", "of the planner, in rollouts and in the ratio", type=float, default=0.7)
    add("--max-new-tokens", "longest completion, of the judge too; None: the checkpoint's, or 1024",
        type=int)
    add = flag_group(parser, "the objective")
    add("--steps", f"training steps {default('steps')}", type=int)
    add("--questions", f"questions a step {default('questions')}", type=int)
    add("--group-size", "G, rollouts per question; their mean is the baseline", type=int, default=8)
    add("--lr", f"default: 1e-6, with adapters 1e-5; the toy {FOR_TOY['lr']}", type=float)
    add("--beta", "weight of the KL to the untrained planner; 0 saves a pass", type=float, default=0.001)
    add("--minibatches", f"optimiser steps a batch of rollouts {default('minibatches')}", type=int)
    add("--clip-low", "the ratio is clipped below 1 - this (needs --minibatches 2 or more)", type=float,
        default=0.2)
    add("--clip-high", "the ratio is clipped above 1 + this (likewise)", type=float, default=0.3)
    add("--token-mean", "one mean over all tokens, not the three nested means", action="store_true")
    add = flag_group(parser, "the machine's memory")
    add("--lora", "train adapters of this rank (needs peft); None: all weights, or 32 if these do not fit",
        type=int, metavar="RANK")
    add("--token-budget", "tokens of a micro-batch: bounds memory; None: 16384, or what fits", type=int)
    add("--optimizer-device", "cpu: float32 masters and moments in the host's memory; None: if need be",
        choices=["cpu"])
    add("--gradient-checkpointing", "less memory, a third more time; None: on cuda, or if nothing else fits",
        action=argparse.BooleanOptionalAction)
    add = flag_group(parser, "the run")
    add("--seed", "decides everything random", type=int, default=0)
    add("--every", f"save, and evaluate on --valid, every so many steps {default('every')}", type=int)
    add("--out", "the run's folder, which must not exist; None: runs/MODEL-seedN")
    add("--keep", "checkpoints step-N to keep, the newest, and best/ (default: 2; the toy all)", type=int)
    add("--resume", "resume the run in this folder; only --steps may change", metavar="RUN")
    add_plain(add)
    return parser
