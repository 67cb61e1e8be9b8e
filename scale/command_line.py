"""The command lines of solve.py and train.py, read before torch is imported.

torch and transformers take seconds to import. Nobody should wait that long for --help, or to hear of a typo,
so both scripts call before_imports() first. It ends the process with one sentence if the command line cannot
work.

    args = solve_arguments(tools)        # of sys.argv, with each default that can be known without the model
    args = train_arguments(tools)        # with --resume RUN, the settings of that run

--help shows the flags that most people need, --help-all shows all of them.
"""
import argparse
import json
import re
import signal
import sys
from pathlib import Path

from benchmarks import tables, training
from world.services import is_server

TOY = Path(__file__).parents[1] / "toy"
TOY_TOOLS = ["base_generator", "python_coder", "wikipedia_search"]  # those that the toy model was made for
MODULES = ("fixed", "executor", "verifier", "generator")
TAKEN = "{} exists already and is not written over: give another --out, or remove it"

# The paper's settings, and the toy's: a small model learns at a larger rate, from smaller batches. Its
# questions need one turn or two; with no turn to spare, each wrong tool costs the answer.
FOR_PAPER = {"lr": None, "steps": 32, "questions": 32, "minibatches": 1, "max_turns": 3, "every": 5,
             "data": "nq+deepmath", "valid": None, "test": None}
FOR_TOY = {"lr": 2e-4, "steps": 60, "questions": 16, "minibatches": 4, "max_turns": 2, "every": 10}
FOR_TOY |= {name: str(TOY / f"{file}.jsonl") for name, file in
            (("data", "train"), ("valid", "valid"), ("test", "test"))}


def is_toy(model):
    return Path(model).resolve() == TOY.resolve()


def before_imports(arguments, tool_names):
    """Refuse what cannot work. From here on, neither Ctrl-C during the imports nor a letter that the terminal
    lacks gives a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    arguments(tool_names)


def leave(code, text):
    """End the process with this sentence: code 2 before a run, 1 in it."""
    print(text, file=sys.stderr)
    raise SystemExit(code)


# ------------------------------------------------------------------------------ parsers, for both scripts
class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not None, which the help text explains, nor the False of a switch."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def new_parser(name, usage, description):
    parser = argparse.ArgumentParser(
        prog=name, usage=f"{name} {usage}", allow_abbrev=False, formatter_class=Help, description=description)
    parser.add_argument("--help-all", action="help", help="show all flags and exit")
    return parser


def flag_group(parser, title):
    """Two functions that add a flag under this heading. Flags of the second are shown by --help-all alone."""
    group = parser.add_argument_group(title)

    def add_rare(name, help, **settings):
        group.add_argument(name, help=help if "--help-all" in sys.argv else argparse.SUPPRESS, **settings)

    return group.add_argument, add_rare


def add_engines(parser):
    add, rare = flag_group(parser, "the modules that are not trained, and the tools")
    add("--fixed", help="all modules but the planner: folder, hub name or http://host:8000/v1#model; "
                        "None: the one --model was trained with, or --model")
    for module in MODULES[1:]:
        rare(f"--{module}", help=f"another model for the {module} alone; None: --fixed")
    add("--judge", help="model that grades what the rules cannot read, or none: such an answer is not right; "
                        "None: --fixed, but none for the toy")
    add("--tools", nargs="+", help="tools the planner may choose from, as in a,b; None: those --model was "
                                   "trained with, or all that can run")
    add("--corpus", help="what wikipedia_search reads: JSONL of title and text, or wikipedia:en, the live one"
                         " in a language; None: as --tools, or wikipedia:en")
    rare("--cache", help="SQLite file that keeps answers of the web and verdicts of the judge")
    rare("--think", action="store_true", help="let models think whose chat template has enable_thinking")
    add("--device", help="cuda, mps or cpu; None: the first there is")
    rare("--dtype", help="float32, bfloat16, ...; None: bfloat16 on cuda, float32 elsewhere")


def solve_parser():
    parser = new_parser("solve.py", "[question] [flags]",
                        "Ask the flow one question, a file of questions, or a benchmark.")
    add, _ = flag_group(parser, "the questions")
    add("question", nargs="?", help="one question; without one, --data or --benchmark, a few of the toy's")
    add("--data", help="questions as JSONL, which are graded")
    add("--benchmark", nargs="+", metavar="NAME",
        help=f"all, or some of {', '.join(tables.BENCHMARKS)}; downloaded once")
    add("--benchmark-dir", help="folder that holds the benchmarks' files, for a machine without network")
    add("--limit", type=int, help="only the first so many questions")
    add("--trials", type=int, default=1, help="how many times each benchmark is run; the paper: 3")
    add, _ = flag_group(parser, "the planner")
    add("--model", default=str(TOY), help="folder, hub name or http://host:8000/v1#model")
    add("--temperature", type=float, default=0.7, help="of the planner's sampling; 0 is greedy")
    add_engines(parser)
    add, _ = flag_group(parser, "the run")
    add("--max-turns", type=int, default=10, help="turns of a rollout at most")
    add("--max-new-tokens", type=int, help="longest completion of a module; None: the checkpoint's, or 1024")
    add("--batch", type=int, help="questions in lock-step; None: 64, fewer where a CPU is slow")
    add("--seed", type=int, default=0, help="decides what is sampled")
    add("--out", help="folder for every rollout as a line of JSON, where a run that was cut off goes on; "
                      "None: none, or runs/MODEL-benchmarks")
    add("--quiet", action="store_true", help="no traces, only the summary")
    return parser


def train_parser():
    parser = new_parser("train.py", "[flags]",
                        "Flow-GRPO in the flow. Questions -> rollouts -> rewards -> advantages -> update.")

    def default(name):
        return f"(default: {FOR_PAPER[name]}; the toy {FOR_TOY[name]})"

    add, rare = flag_group(parser, "what is trained, on what")
    add("--model", default=str(TOY), help="folder or hub name of the planner")
    add("--data", help="training questions: JSONL, or nq, deepmath, nq+deepmath (default; the toy its own)")
    add("--valid", help="questions that choose best/: JSONL, or none (default: 64 of --data; the toy its)")
    add("--test", help="questions graded before and after: JSONL, or none (default: none; the toy its own)")
    rare("--limit", type=int, help="questions of --data at most; None: all of a file, 1000 of a named set")
    add_engines(parser)
    add, _ = flag_group(parser, "the rollouts")
    add("--max-turns", type=int, help=f"turns of a rollout in training {default('max_turns')}")
    add("--temperature", type=float, default=0.7, help="of the planner, in rollouts and in the ratio")
    add("--max-new-tokens", type=int, help="longest completion of a module; None: the checkpoint's, or 1024")
    add, rare = flag_group(parser, "the objective")
    add("--steps", type=int, help=f"optimisation steps {default('steps')}")
    add("--questions", type=int, help=f"questions a step {default('questions')}")
    add("--group-size", type=int, default=8, help="G, rollouts per question; their mean is the baseline")
    add("--lr", type=float, help=f"default: 1e-6, with adapters 1e-5; the toy {FOR_TOY['lr']}")
    add("--beta", type=float, default=0.001, help="weight of the KL to the untrained planner; 0 saves a pass")
    add("--minibatches", type=int,
        help=f"optimiser steps a batch of rollouts; above 1 the ratio leaves 1 {default('minibatches')}")
    rare("--clip-low", type=float, default=0.2, help="the ratio is clipped below 1 - this")
    rare("--clip-high", type=float, default=0.3, help="the ratio is clipped above 1 + this")
    rare("--token-mean", action="store_true",
         help="the released code's mean over all tokens, in place of the three nested means")
    add, rare = flag_group(parser, "the machine's memory")
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank, one copy for all roles (needs "
                                                 "peft); None: all weights, or 32 if these do not fit")
    rare("--token-budget", type=int,
         help="tokens of a micro-batch: bounds memory, changes nothing else; None: 16384, or what fits")
    rare("--optimizer-device", choices=["cpu"],
         help="cpu: float32 masters and moments in the host's memory; None: beside the weights if they fit")
    rare("--gradient-checkpointing", action=argparse.BooleanOptionalAction,
         help="less memory, a third more time; None: on cuda, or if nothing else fits")
    add, rare = flag_group(parser, "the run")
    add("--seed", type=int, default=0, help="decides everything random")
    add("--every", type=int, help=f"save, and evaluate on --valid, every so many steps {default('every')}")
    add("--out", help="the run's folder, which must not exist; None: runs/MODEL-seedN")
    rare("--keep", type=int, help="checkpoints step-N to keep, the newest, and best/; None: all")
    add("--resume", metavar="RUN",
        help="go on with the run in this folder, with its settings (only --steps may be given anew)")
    return parser


# --------------------------------------------------------------------- what the arguments mean, or a sentence
def solve_arguments(tool_names):
    args = solve_parser().parse_args()
    try:
        return settle_solve(args, tool_names)
    except (ValueError, OSError) as why:
        leave(2, f"solve.py: {why}")


def train_arguments(tool_names):
    parser = train_parser()
    args = parser.parse_args()
    try:
        return settle_train(args, tool_names) if args.resume is None else resumed(parser, args)
    except (ValueError, OSError) as why:
        leave(2, f"train.py: {why}")


def settle_solve(args, tool_names):
    if not 0 <= args.temperature < float("inf"):  # nan, too
        raise ValueError(f"--temperature {args.temperature} is no temperature: use 0 or more")
    at_least_1(args, "max_turns", "max_new_tokens", "limit", "trials", "batch")
    if args.tools and len(args.tools) > 1 and not args.question and re.search(r"[^\w,]", args.tools[-1]):
        args.question = args.tools.pop()  # --tools a b "2 + 2?": argparse takes it for a third tool
    given = [value for value in (args.question, args.data, args.benchmark) if value is not None]
    if len(given) > 1 or given and not str(given[0]).strip():
        raise ValueError("give one question, --data FILE.jsonl or --benchmark NAME, "
                         "not two of them and not an empty one")
    must_exist(args.data)
    settle_engines(args, tool_names, graded=args.question is None)
    return args


def settle_train(args, tool_names):
    """Fill in the defaults of the toy or of the paper; ValueError, a sentence, for what cannot work."""
    other_data = args.data is not None  # the toy's held-out sets belong to its own data
    for name, value in (FOR_TOY if is_toy(args.model) else FOR_PAPER).items():
        if getattr(args, name) is None and not (other_data and name in ("valid", "test")):
            setattr(args, name, value)
    check_numbers(args)
    if is_server(args.model):
        raise ValueError("--model must be local weights, a folder or a hub name: those of a server cannot be "
                         "updated from here. It can play --fixed")
    must_exist(*(path for path in (args.valid, args.test) if path != "none"),
               None if named_set(args.data) else args.data)
    settle_engines(args, tool_names)
    for name in ("model", *MODULES, "judge"):  # a checkpoint remembers them, also for use from another folder
        if getattr(args, name) and Path(getattr(args, name)).is_dir():
            setattr(args, name, str(Path(getattr(args, name)).resolve()))
    if args.corpus and Path(args.corpus).is_file():
        args.corpus = str(Path(args.corpus).resolve())
    args.out = args.out or f"runs/{Path(args.model).name}-seed{args.seed}"
    if Path(args.out).exists():
        raise ValueError(TAKEN.format(args.out))
    return args


def check_numbers(args):
    if args.group_size < 2:
        raise ValueError(f"--group-size {args.group_size} has no baseline: use 2 or more")
    at_least_1(args, "limit", "lora", "keep", "steps", "questions", "minibatches", "max_turns", "every",
               "token_budget", "max_new_tokens")
    for name, low, high in (("lr", 0, 1), ("beta", 0, 1e6), ("clip_low", 0, 1), ("clip_high", 0, 1e6)):
        value = getattr(args, name)
        if value is not None and not low <= value <= high:  # nor nan
            raise ValueError(f"--{name.replace('_', '-')} {value} cannot work: use {low} to {high:g}")
    if not 1e-3 <= args.temperature < 1e6:
        raise ValueError(f"--temperature {args.temperature} does not sample, and a group of equal rollouts "
                         "teaches nothing: use e.g. 0.7")


def at_least_1(args, *names):
    for name in names:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} does nothing: use 1 or more")


def must_exist(*paths):
    for path in paths:
        if path and not Path(path).exists():
            raise ValueError(f"{path}: no such file; give a JSONL file of questions.")


def named_set(data):
    """Is this the name of a training set, or of a benchmark, which training.py refuses with the reason?"""
    return set(data.split("+")) <= {*training.TRAINING, *tables.BENCHMARKS}


def settle_engines(args, tool_names, graded=True):
    """Fill in what depends on the planner: a checkpoint remembers its modules and tools (train.json).

    graded: are there answers to grade? Then the judge is the fixed model, unless --judge says otherwise."""
    checkpoint = Path(args.model) / "train.json"
    try:
        remembered = json.loads(checkpoint.read_text()) if checkpoint.exists() else {}
    except json.JSONDecodeError as why:
        raise ValueError(f"{checkpoint} is damaged ({why}): take another checkpoint, or remove it") from why
    if not remembered and is_toy(args.model):
        remembered = {"tools": TOY_TOOLS, "corpus": str(TOY / "corpus.jsonl")}
    if args.tools is not None:
        args.tools = [tool for names in args.tools for tool in names.split(",") if tool]
        if wrong := [tool for tool in args.tools if tool not in tool_names]:
            raise ValueError(f"no tool is called {wrong[0]!r}: choose from {', '.join(tool_names)}")
    for name in (*MODULES, "tools", "corpus"):
        if getattr(args, name) is None:
            value = remembered.get(name)
            if name in MODULES and is_server(value):  # a download must not choose who gets our key
                raise ValueError(f"{args.model} was trained with --{name} {value}: give that, or another")
            setattr(args, name, value)
    args.fixed = args.fixed or args.model
    if args.judge is None and graded and not is_toy(args.fixed):
        args.judge = args.fixed
    args.judge = None if args.judge == "none" else args.judge


def resumed(parser, args):
    """The settings of the run in --resume, with --steps if that is given."""
    file = Path(args.resume) / "args.json"
    if not file.exists():
        raise ValueError(f"{args.resume} is not the folder of a run: name one, or leave --resume out")
    no_defaults = argparse.Namespace(**dict.fromkeys(vars(args)))  # what a namespace has gets no default
    flags = vars(parser.parse_args(namespace=no_defaults))
    given = [name for name, value in flags.items() if value is not None and name not in ("resume", "steps")]
    if given or (args.steps is not None and args.steps < 1):
        wrong = f"--{given[0].replace('_', '-')}" if given else f"--steps {args.steps}"
        raise ValueError(f"--resume goes on with the run's own settings: leave out {wrong}")
    try:
        settings = json.loads(file.read_text())
    except json.JSONDecodeError as why:
        raise ValueError(f"{file} is damaged ({why}): begin anew") from why
    settings |= {"out": args.resume, "resume": args.resume, "steps": args.steps or settings["steps"]}
    return argparse.Namespace(**vars(parser.parse_args([])) | settings)
