"""The command lines of solve.py and train.py, and what a folder remembers for them.

Nothing here imports torch, which takes seconds: a mistake in a flag is reported at once. The
defaults of train.py stand there, in DEFAULTS, TOY, NIGHT and PAPER.

`tools` is tools.TOOLS: the folders of this project import none of the scripts at the top."""

import argparse
import json
import os
from pathlib import Path

from models.completion import is_server
from world.mistakes import Mistake

TOY = os.path.relpath(Path(__file__).parents[1] / "toy")
# the flags that name a model, beside --model
MODELS = "fixed", "executor", "verifier", "generator", "base_generator", "judge"
# what a checkpoint remembers of its training, for solve.py and for a training that goes on from it
CHECKPOINT_SETTINGS = *MODELS, "tools", "corpus", "think", "max_new_tokens", "trained"
EXAMPLES = 8  # how many of the toy's questions are answered if the command line names none
SWITCH = {"action": "store_const", "const": True}  # a flag without a value: True, else None


def solve_flags(words=None, *, tools, about):
    """The command line of solve.py, with all defaults. about: a sentence for --help."""
    parser = argparse.ArgumentParser("solve.py", description=about, allow_abbrev=False)
    add = parser.add_argument_group("the questions").add_argument
    add("question", nargs="*", help="one question, in quotes; else --data or --benchmark")
    add("--data", help="questions as JSONL, which are graded (default: a few of the toy's)")
    add("--benchmark", nargs="+", metavar="NAME", help="one of the paper's ten, or all")
    add("--benchmark-dir", help="folder with the benchmarks' files, for a machine without network")
    add("--limit", type=int, help="only the first so many questions")
    add("--compare", nargs=2, metavar=("A", "B"), help="two folders of --out, or models and --data")
    add = parser.add_argument_group("the planner").add_argument
    add("--model", default=TOY, help="folder, hub name or http://host:8000/v1#model")
    add("--temperature", type=float, help="of the planner (default: 0 for one question, else 0.7)")
    add_shared(parser, tools)
    add = parser.add_argument_group("the run").add_argument
    add("--max-turns", type=int, help="turns of a rollout at most (default: 10; the toy 3)")
    add("--batch", type=int, default=64, help="questions in lock-step (default: 64)")
    add("--trials", type=int, default=1, help="how often all questions are answered; the paper: 3")
    add("--out", help="folder for the rollouts; the same command goes on in it")
    add("--quiet", action="store_true", help="no traces, only the summary")
    args = parser.parse_args(words)
    if len(args.question) > 1:
        parser.error(f'put the question in quotes: "{" ".join(args.question)}"')
    args.question = args.question[0] if args.question else None
    if sum(value is not None for value in (args.question, args.data, args.benchmark)) > 1:
        parser.error("give one question, --data or --benchmark, not two of them")
    if args.compare:  # two models on questions, or two folders, beside which little else acts
        on_questions = args.data or args.benchmark
        idle = {"model"} if on_questions else {*vars(args)} - {"compare", "out"}
        for name in sorted(idle):
            if getattr(args, name) != parser.get_default(name):
                what = "the question" if name == "question" else flag_of(name)
                parser.error(f"leave out {what}, which does not act beside --compare")
    demo = not (args.question or args.data or args.benchmark or args.compare)
    args.data = args.data or (f"{TOY}/test.jsonl" if demo else None)
    args.limit = args.limit or (EXAMPLES if demo else None)
    args.max_turns = args.max_turns or (3 if demo or is_toy(args.model) else 10)
    if args.temperature is None:  # who types one question wants the likeliest plans
        args.temperature = 0.0 if args.question else 0.7
    if args.benchmark and not args.out:
        args.out = f"runs/{Path(args.model).name}-benchmarks"
    return fill_in(args, remembered(args) | {"seed": 0})


def train_flags(words=None, *, tools, about):
    """The command line of train.py. A flag that is not given is None."""
    parser = argparse.ArgumentParser("train.py", description=about, allow_abbrev=False)
    add = parser.add_argument_group("what is trained, on what").add_argument
    add("--model", help="folder or hub name of the planner (default: the toy)")
    add("--data", help="questions: JSONL, or nq, deepmath, nq+deepmath (default; the toy its own)")
    help = "questions that choose best: JSONL, or none (default: 64 of --data; the toy's)"
    add("--valid", help=help)
    help = "questions graded before and after: JSONL, or none (default: none; the toy's)"
    add("--test", help=help)
    add("--limit", type=int, help="questions of --data at most (default: 1100 of a named set)")
    add_shared(parser, tools)
    add = parser.add_argument_group("the rollouts").add_argument
    add("--max-turns", type=int, help="turns of a rollout at most (default: 3)")
    add("--temperature", type=float, help="of the planner, also in the ratio (default: 0.7)")
    add = parser.add_argument_group("the objective").add_argument
    add("--paper", **SWITCH, help="the paper's batches, plans, rate; all weights: dearer")
    add("--steps", type=int, help="training steps (default: 40; --paper 32; the toy 50)")
    add("--questions", type=int, help="questions a step (default: 16; --paper 32)")
    add("--group-size", type=int, help="G, rollouts of a question (default: 8)")
    add("--lr", type=float, help="default: with adapters 2e-5; all weights 1e-6; the toy 4e-4")
    help = "weight of the KL to the untrained planner (default: 0.001; the toy 0.01)"
    add("--beta", type=float, help=help)
    add("--minibatches", type=int, help="optimiser steps a batch of rollouts (default: 4)")
    add("--max-grad-norm", type=float, help="longer gradients get this norm (default: 1)")
    add("--clip-low", type=float, help="the ratio is clipped below 1 - this (default: 0.2)")
    add("--clip-high", type=float, help="the ratio is clipped above 1 + this (default: 0.3)")
    add("--token-mean", **SWITCH, help="one mean over all tokens, not the three of eq. 5")
    add = parser.add_argument_group("the machine's memory (default: what fits)").add_argument
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank (needs peft)")
    add("--token-budget", type=int, help="tokens of a micro-batch")
    add("--optimizer-device", choices=["cpu"], help="float32 masters and moments on the host")
    help = "less memory, a third more time"
    add("--gradient-checkpointing", action=argparse.BooleanOptionalAction, help=help)
    add = parser.add_argument_group("the run").add_argument
    help = "save, and evaluate on --valid, every so many steps (default: 10; --paper 5)"
    add("--every", type=int, help=help)
    add("--minutes", type=float, help="save as often, too (default: 30; the toy: never)")
    add("--keep", type=int, help="checkpoints to keep, the newest (default: 2; the toy all)")
    add("--out", help="the run's folder, which must not exist (default: runs/MODEL-seedN)")
    add("--resume", metavar="RUN", help="go on with it; --steps and --token-budget may change")
    add("--rehearse", **SWITCH, help="a small run that meets what a long one does, and resumes")
    args = parser.parse_args(words)
    if is_server(args.model or ""):
        parser.error("--model must be local weights: a server's cannot be updated from here")
    if (args.group_size or 2) < 2:
        parser.error(f"--group-size {args.group_size} has no baseline: use 2 or more")
    if args.temperature is not None and args.temperature <= 0:
        parser.error("a greedy planner has no distribution to train: use a --temperature above 0")
    if args.dtype == "float16":
        parser.error("--dtype float16 cannot train: it has no small gradients. Use bfloat16")
    return args


def add_shared(parser, tools):
    """The flags that solve.py and train.py share."""
    add = parser.add_argument_group("the modules that are not trained, and the tools").add_argument
    add("--fixed", help="the model of all modules but the planner (default: --model)")
    for module in MODELS[1:-1]:
        add(flag_of(module), help=f"another model for the {module} alone")
    help = "model that grades what the rules cannot, or none (default: --fixed; the toy none)"
    add("--judge", help=help)
    add("--tools", nargs="+", choices=tools, help="default: all that have their key")
    help = "what wikipedia_search reads: JSONL, or wikipedia:LANGUAGE (default: wikipedia:en); if "
    help += "lines of the file have a url, web_search reads these pages alone"
    add("--corpus", help=help)
    help = "web_search and python_coder together where nothing protects your files"
    add("--allow-unconfined", **SWITCH, help=help)
    add("--cache", help="SQLite file that keeps answers of the web and verdicts of the judge")
    add("--think", **SWITCH, help="let models think, if their template can switch it")
    help = "default: cuda if there is one, else cpu"
    add("--device", choices=["cuda", "mps", "cpu"], help=help)
    dtypes = ["float32", "bfloat16", "float16", "float64"]
    add("--dtype", choices=dtypes, help="default: bfloat16 on cuda, float32 elsewhere")
    help = "longest completion, in tokens (default: the checkpoint's limit, or 1024; to train a "
    help += "real model 512, --paper 2048)"
    add("--max-new-tokens", type=int, help=help)
    add("--seed", type=int, help="decides everything random (default: 0)")
    add("--plain", **SWITCH, help="without fast/: slower, the same distributions")


def fill_in(args, defaults):
    """Give each flag that was not given its default. Those of --fixed and --judge are the values of
    other flags."""
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.fixed = args.fixed or args.model
    args.judge = args.judge or args.fixed
    return args


def flag_of(name):
    return f"--{name.replace('_', '-')}"


def is_toy(model):
    return Path(model).resolve() == Path(TOY).resolve()


def remembered(args):
    """What the checkpoint --model was trained with, for defaults: models, tools, corpus, length."""
    for model in {getattr(args, name) for name in ("model", *MODELS)} - {None, "none"}:
        if Path(model, "args.json").exists():
            why = f"{model} is the folder of a run: give a checkpoint in it, as {model}/best"
            raise Mistake(f"{why} or {model}/step-10")
    model, file = args.model, Path(args.model, "train.json")
    if not file.exists():
        return {}
    found = json.loads(file.read_text())
    for name in MODELS:
        if is_server(found.get(name) or "") and not getattr(args, name):
            # A folder that somebody else made must not choose which server gets the key.
            flag = flag_of(name)
            raise Mistake(f"{model} was trained with {flag} {found[name]}: give that or another")
    if found.get("corpus") and Path(model, found["corpus"]).exists():
        found["corpus"] = str(Path(model, found["corpus"]))
    found |= {name: model for name in found.pop("trained", ()) if name in MODELS}  # plays them, too
    return {name: found[name] for name in CHECKPOINT_SETTINGS if found.get(name)}


def read_settings(file):
    """The settings in args.json or settings.json. Mistake if a disk has lost them."""
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as why:
        raise Mistake(f"{file} is damaged ({why}): begin anew, with another --out") from why


def resumed(args, defaults):
    """The settings of the run in --resume; --steps, --token-budget and --allow-unconfined may
    differ."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    file = Path(args.resume, "args.json")
    if not file.exists():
        raise Mistake(f"{args.resume} is not the folder of a run")
    saved = read_settings(file)
    for name, value in saved.items():
        # A folder that somebody else made must not choose which server gets the key, nor which file
        # is written. (A server that --fixed names may be the judge, too.)
        unnamed = is_server(str(value)) and value not in given.values()
        if unnamed or name == "cache" and value and given.get(name) != value:
            what = "cache" if name == "cache" else "server"
            raise Mistake(f"the run uses a {what}: repeat {flag_of(name)} {value}")
    for name, value in given.items():
        free = "steps", "token_budget", "resume", "allow_unconfined"
        if name not in free and value != saved.get(name):
            raise Mistake(f"--resume keeps the run's settings: leave out {flag_of(name)}")
    # Nor must it decide that the model's code may read this machine's files.
    saved["allow_unconfined"] = None
    # The defaults are for flags that are newer than the run.
    return argparse.Namespace(**vars(args) | defaults | saved | given | {"out": args.resume})


def resuming(args):
    """The words that go on with a run: resumed() wants some flags repeated."""
    words = ["--resume", args.out] + ["--allow-unconfined"] * bool(args.allow_unconfined)
    for name in (*MODELS, "cache"):
        if name == "cache" and args.cache or is_server(getattr(args, name) or ""):
            words += [flag_of(name), getattr(args, name)]
    return words
