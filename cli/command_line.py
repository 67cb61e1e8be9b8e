"""The command lines of solve.py and train.py, checked before torch is imported.

    args = solve_arguments(tools)        # from sys.argv, with all defaults that do not depend on the weights
    args = train_arguments(tools)        # the same; with --resume RUN, the settings of that run

Importing torch and transformers takes seconds. So that --help and typos are answered at once, both scripts
first call one of these and before_imports(): a command line that cannot work, a wrong file of questions or a
folder that holds no model ends the process with one sentence.
"""
import argparse
import gc
import re
import sys
from pathlib import Path

from benchmarks import tables, training
from logbook.endings import errors_leave
from logbook.folder import lock
from models.names import check_dtype, check_model
from models.server import Server
from rewards.questions import read_questions
from world import places
from world.files import check_file, read_object, reading
from world.sandbox import protection
from world.services import is_server

TOY = Path(__file__).parents[1] / "toy"
HOPS = TOY / "hops"  # the second toy, in which the right tool depends on memory
TOY_TOOLS = ["base_generator", "python_coder", "wikipedia_search"]  # the tools that the toy has learnt
MODULES = ("fixed", "executor", "verifier", "generator")
OF_THIS_START = {"resume", "allow_unconfined"}  # flags that --resume does not read from the folder

# Defaults: the paper's (steps are read off its figures; it gives no minibatches and no every), and the toy's.
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


def before_imports(args, tools):
    """ValueError for a command line that cannot work. tools: the run's, which have kept the corpus's index.

    From here on, a letter that the terminal cannot show is printed as an escape, and is not an error."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    check_files(args)
    check_confinement(args, tools)
    gc.disable()  # imports make a million objects and no garbage: looking for it takes a fifth of their time


def check_files(args):
    """ValueError if a file or a folder that the command line names cannot work."""
    check_dtype(args.dtype)
    for name in ("data", "valid", "test"):
        path = getattr(args, name, None)
        if path not in (None, "none") and not named_set(path):
            check_file(path, "write the questions into one, and give that")  # it is read more than once
            read_questions(path)
    for name in local_models(args):
        check_model(name)
    for name in servers(args):
        Server(name)  # ValueError if it does not run, or has no such model


def check_confinement(args, tools):
    """ValueError if nothing keeps python_coder from the user's files. With web_search, a page could then
    persuade the model to read a key and to send it away, in the address of the next page. A sandbox that does
    not start is refused, too: if it starts later, what it protects has not been checked."""
    reads_web = "web_search" in tools and tools["web_search"].from_web  # and not only pages of the corpus
    if args.allow_unconfined or "python_coder" not in tools or not reads_web:
        return
    if any(words in protection() for words in ("read your files", "does not run here")):
        raise ValueError(f"{protection().rstrip('.')}. A web page could make the model read your files by it "
                         "and send them away by web_search: leave one of the two out of --tools, or give "
                         "--allow-unconfined")


def after_loading():
    """Collect garbage again, but only among new objects: the modules and models stay until the end.

    Python's last search through them, when the process ends, would take half a second."""
    if not gc.isenabled():  # before_imports() was called: this is a process of its own, not a test
        gc.freeze()
        gc.enable()


def rollout_settings(args):
    """The settings of solve.roll_out() that both command lines have."""
    return {name: getattr(args, name) for name in ("max_turns", "temperature", "max_new_tokens")}


# ------------------------------------------------------------------------------ parsers, for both scripts
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


def add_engines(parser):
    add = flag_group(parser, "the modules that are not trained, and the tools")
    add("--fixed", "all modules but the planner: folder, hub name or http://host:8000/v1#model; "
                   "None: the one --model was trained with, or --model")
    for module in MODULES[1:]:
        add(f"--{module}", f"another model for the {module} alone; None: --fixed")
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
    add("--plain", "the same without fast/: slower, and nothing but what the nine scripts and models/ say",
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
    add("--steps", f"optimisation steps {default('steps')}", type=int)
    add("--questions", f"questions a step {default('questions')}", type=int)
    add("--group-size", "G, rollouts per question; their mean is the baseline", type=int, default=8)
    add("--lr", f"default: 1e-6, with adapters 1e-5; the toy {FOR_TOY['lr']}", type=float)
    add("--beta", "weight of the KL to the untrained planner; 0 saves a pass", type=float, default=0.001)
    add("--minibatches", f"optimiser steps a batch of rollouts {default('minibatches')}", type=int)
    add("--clip-low", "the ratio is clipped below 1 - this", type=float, default=0.2)
    add("--clip-high", "the ratio is clipped above 1 + this", type=float, default=0.3)
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


# --------------------------------------------------------------- the settings of a run, complete and checked
@errors_leave("solve.py")
def solve_arguments(tool_names):
    args, more = solve_parser().parse_known_args()
    if more:
        raise ValueError(f"{more[0]!r} is no flag (a question of several words needs quotes): see --help")
    check_counts(args)
    if args.tools and not args.question and re.search(r"[^\w,]", args.tools[-1]):
        args.question = args.tools.pop()  # --tools a b "2 + 2?": argparse takes it for a third tool
    if args.temperature is None:  # who types one question wants the likeliest plans, not a sample of them
        args.temperature = 0.0 if args.question else 0.7
    if args.temperature and not 1e-3 <= args.temperature < 1e6:  # refuses nan, too
        raise ValueError(f"--temperature {args.temperature} does not sample: use 0 (greedy), or e.g. 0.7")
    given = [value for value in (args.question, args.data, args.benchmark) if value is not None]
    if len(given) > 1:
        raise ValueError("give one question, --data FILE.jsonl or --benchmark NAME, not two of them")
    if args.benchmark_dir is not None and args.benchmark is None:
        raise ValueError("--benchmark-dir holds the files of benchmarks: name them with --benchmark")
    if args.max_turns is None:  # the demo shows the toy's own questions under the conditions of its training
        demo = not (given or args.compare)
        args.max_turns = FOR_TOY["max_turns"] if demo else 10
    settle_engines(args, tool_names, graded=args.question is None)
    return args


@errors_leave("train.py")
def train_arguments(tool_names):
    parser = train_parser()
    args = parser.parse_args()
    return settle_train(args, tool_names) if args.resume is None else resumed(parser, args)


def settle_train(args, tool_names):
    """Fill in the defaults of the toy or of the paper. ValueError if the settings cannot work."""
    other_data = args.data is not None  # then the toy's validation and test questions are not the default
    for name, value in train_defaults(args.model).items():
        if getattr(args, name) is None and not (other_data and name in ("valid", "test")):
            setattr(args, name, value)
    check_numbers(args)
    if is_server(args.model):
        raise ValueError("--model must be local weights, a folder or a hub name: those of a server cannot be "
                         "updated from here. It can play --fixed")
    settle_engines(args, tool_names)
    for name in ("model", *MODULES, "judge", "corpus"):  # train.json may be read from another folder
        if getattr(args, name) and Path(getattr(args, name)).exists():
            setattr(args, name, str(Path(getattr(args, name)).resolve()))
    args.out = args.out or f"runs/{Path(args.model).name}-seed{args.seed}"
    if Path(args.out).exists():
        raise ValueError(f"{args.out} exists already and is not written over: give another --out, "
                         "or remove it")
    return args


def check_numbers(args):
    """What train.py refuses: no baseline, nothing to sample, numbers with which nothing is learnt."""
    if args.group_size < 2:
        raise ValueError(f"--group-size {args.group_size} has no baseline: use 2 or more")
    check_counts(args)
    for name, low, high in (("lr", 0, 1), ("beta", 0, 1e6), ("clip_low", 0, 1), ("clip_high", 0, 1e6)):
        value = getattr(args, name)
        if value is not None and not low <= value <= high:  # refuses nan, too
            raise ValueError(f"--{name.replace('_', '-')} {value} cannot work: use {low} to {high:g}")
    if not 1e-3 <= args.temperature < 1e6:
        raise ValueError(f"--temperature {args.temperature} does not sample, and a group of equal rollouts "
                         "teaches nothing: use e.g. 0.7")


def check_counts(args):
    """Refuse an empty value, as of --model "$MODEL" where MODEL is not set, and integers below 1: every flag
    that takes an integer, except --seed, counts something."""
    for name, value in vars(args).items():
        flag = "the question" if name == "question" else f"--{name.replace('_', '-')}"
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"{flag} is empty: give a value, or leave it out")
        if type(value) is int and name != "seed" and value < 1:  # not isinstance(): a bool is an int, too
            raise ValueError(f"{flag} {value} does nothing: use 1 or more")


def named_set(data):
    """Is this the name of a training set, or of a benchmark, which training.py refuses with the reason?"""
    return set(data.split("+")) <= {*training.TRAINING, *tables.BENCHMARKS}


def models_of(args):
    """The names of all models of a command line, each once."""
    return sorted({getattr(args, name) for name in ("model", *MODULES, "judge")} - {None, ""})


def local_models(args):
    """The names of all models that are loaded on this machine."""
    return [name for name in models_of(args) if not is_server(name)]


def servers(args):
    """The names of all models that are on a server."""
    return [name for name in models_of(args) if is_server(name)]


def settle_engines(args, tool_names, graded=True):
    """Fill in what depends on the planner: a checkpoint has its modules and tools in train.json.

    graded: are answers graded? Then the fixed model is the judge, unless --judge names another or none."""
    remembered = read_remembered(args.model)
    if not remembered and is_toy(args.model):
        remembered = {"tools": TOY_TOOLS, "corpus": str(TOY / "corpus.jsonl")}
    if args.tools is not None:
        args.tools = [tool for names in args.tools for tool in names.split(",") if tool]
        if wrong := [tool for tool in args.tools if tool not in tool_names]:
            raise ValueError(f"no tool is called {wrong[0]!r}: choose from {', '.join(tool_names)}")
    for name in (*MODULES, "tools", "corpus"):
        if getattr(args, name) is None:
            value = remembered.get(name)
            if name in MODULES and is_server(value):  # a download must not choose which server gets the key
                raise ValueError(f"{args.model} was trained with --{name} {value}: give that, or another")
            if places.missing(value):
                raise ValueError(f"{args.model} was trained with --{name} {value}, which is not there: "
                                 f"give --{name}, in its new place, or another")
            setattr(args, name, value)
    args.fixed = args.fixed or args.model
    if args.judge is None and graded and not is_toy(args.fixed):
        args.judge = args.fixed
    args.judge = None if args.judge == "none" else args.judge


def read_remembered(model):
    """The modules, tools and corpus that a checkpoint was trained with, from its train.json; or {}."""
    file = Path(model) / "train.json"
    if is_server(model) or not file.exists():
        return {}
    with reading(file, "take another checkpoint, or remove this file and give --fixed and --tools"):
        data = read_object(file)
        texts = [data.get(name) or "" for name in (*MODULES, "corpus")] + list(data.get("tools") or [])
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(f"{wrong[0]!r} is no name of a model, tool or corpus")
        return places.all_located(data, model)


def resumed(parser, args):
    """The settings of the run in --resume, with --steps if that is given.

    The names of its servers must be repeated: a folder that somebody else made must not decide which server
    receives the prompts and the key."""
    file = Path(args.resume) / "args.json"
    if not file.exists():
        raise ValueError(f"{args.resume} is not the folder of a run: name one, or leave --resume out")
    repeated = {f"--{name}": name for name in (*MODULES, "judge")}
    flags = [word.split("=")[0] for word in sys.argv[1:] if word.startswith("--")]
    allowed = {"--resume", "--steps", "--allow-unconfined", *repeated}
    wrong = [flag for flag in flags if flag not in allowed]
    if args.steps is not None and args.steps < 1:
        wrong.append(f"--steps {args.steps}")
    if wrong:
        raise ValueError(f"--resume goes on with the run's own settings: leave out {wrong[0]}")
    with reading(file, "repair it, or start a new run"):
        settings = read_settings(parser, read_object(file))
    vars(settings).update(places.all_located(vars(settings), args.resume))
    for flag, name in repeated.items():
        given, recorded = getattr(args, name), getattr(settings, name)
        if given is not None and recorded not in (given, str(Path(given).resolve())):
            raise ValueError(f"{flag} {given} is not the run's, {recorded}: leave it out, or start a new run")
    unconfirmed = {flag: getattr(settings, name) for flag, name in repeated.items()
                   if is_server(getattr(settings, name)) and getattr(args, name) is None}
    if unconfirmed:
        words = " ".join(f"{flag} {url}" for flag, url in unconfirmed.items())
        raise ValueError(f"{args.resume} names servers, which would get your prompts and your key. If you "
                         f"trust them, repeat them: --resume {args.resume} {words}")
    for name in places.SETTINGS:
        if places.missing(getattr(settings, name)):  # a folder must not say where a cache is made, either
            raise ValueError(f"the run's --{name} {getattr(settings, name)} is not there: put it back, or "
                             f"write its new place into {file}")
    settings.out = settings.resume = args.resume
    settings.steps = args.steps or settings.steps
    settings.allow_unconfined = args.allow_unconfined
    lock(Path(args.resume), "train.py")  # before the checkpoint to resume from is chosen
    return settings


def read_settings(parser, data):
    """The settings in args.json, parsed like a command line. ValueError if one is missing or cannot work."""
    names = vars(parser.parse_args([])).keys() - OF_THIS_START
    if missing := sorted(names - data.keys()):
        raise ValueError(f"it has no {missing[0]!r}")
    words = []
    for name in names:
        value, flag = data[name], f"--{name.replace('_', '-')}"
        if isinstance(value, list):
            words += [flag, *map(str, value)]
        elif isinstance(value, bool):
            words += [flag] if value else ["--no-gradient-checkpointing"] * (name == "gradient_checkpointing")
        elif value is not None:
            words.append(f"{flag}={value}")
    parser.exit_on_error = False
    try:
        settings = parser.parse_args(words)
    except argparse.ArgumentError as why:
        raise ValueError(str(why)) from why
    settings.code = data.get("code") or []
    if is_server(settings.model):
        raise ValueError("its model is a server")
    check_numbers(settings)
    return settings
