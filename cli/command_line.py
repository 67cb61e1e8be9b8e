"""The command lines of solve.py and train.py, checked before torch is imported.

    args = solve_arguments(tools)        # from sys.argv, with all defaults that do not depend on the weights
    args = train_arguments(tools)        # the same; with --resume RUN, the settings of that run

Importing torch and transformers takes seconds. So that --help and typos are answered at once, both scripts
first call one of these and before_imports(): a command line that cannot work, a wrong file of questions or a
folder that holds no model ends the process with one sentence.
"""
import argparse
import difflib
import gc
import json
import os
import re
import sys
from pathlib import Path

from benchmarks import tables, training
from cli.flags import FOR_TOY, TOY, TOY_TOOLS, flag_of, is_toy, solve_parser, train_defaults, train_parser
from logbook.endings import errors_leave
from logbook.folder import lock
from models.names import check_dtype, check_model
from models.server import Server
from rewards.questions import read_questions
from world import places
from world.files import check_file, read_object, reading
from world.places import MODULES
from world.sandbox import protection
from world.services import is_server

OF_THIS_START = {"resume", "allow_unconfined"}  # flags that --resume does not read from the folder


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


# --------------------------------------------------------------- the settings of a run, complete and checked
@errors_leave("solve.py")
def solve_arguments(tool_names):
    args = parse(solve_parser(), "put a question of several words into quotes")
    if args.question and os.path.isfile(args.question):
        raise ValueError(f"{args.question} is a file: to answer its questions, give --data {args.question}")
    if args.question and re.fullmatch(r"\S+\.jsonl?", args.question):
        raise ValueError(f"There is no file {args.question} here, and it is no question")
    check_counts(args)
    if args.tools and not args.question and re.search(r"[^\w, ]|\w +\w", args.tools[-1]):
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
    args = parse(parser, "questions to train on are given as --data FILE.jsonl")
    return settle_train(args, tool_names) if args.resume is None else resumed(parser, args)


def parse(parser, hint):
    """The command line. ValueError for what is no flag: with a flag like it, or the hint if it is a word."""
    args, more = parser.parse_known_args()
    if more:
        flags = [flag for flag in parser.format_help().split() if flag.startswith("--")]
        near = difflib.get_close_matches(more[0].split("=")[0], flags, 1)
        meant = f" (did you mean {near[0]}?)" if near else "" if more[0].startswith("-") else f" ({hint})"
        raise ValueError(f"{more[0]!r} is no flag{meant}: see --help")
    for name, value in vars(args).items():  # bash expands `--out ~/x`, but not `--out=~/x`
        if name != "question" and isinstance(value, str) and value.startswith("~/"):
            setattr(args, name, os.path.expanduser(value))
    return args


def settle_train(args, tool_names):
    """Fill in the defaults of the toy or of the paper. ValueError if the settings cannot work."""
    other_data = args.data is not None  # then the toy's validation and test questions are not the default
    minibatches = args.minibatches
    for name, value in train_defaults(args.model).items():
        if getattr(args, name) is None and not (other_data and name in ("valid", "test")):
            setattr(args, name, value)
    if minibatches is None:  # the default fits a step of few rollouts, too
        args.minibatches = max(1, min(args.minibatches, args.questions * args.group_size))
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
        resume = f"go on with --resume {args.out}, " if (Path(args.out) / "args.json").exists() else ""
        raise ValueError(f"{args.out} exists already and is not written over: {resume}give another --out, "
                         "or remove it")
    return args


def check_numbers(args):
    """What train.py refuses: no baseline, nothing to sample, numbers with which nothing is learnt."""
    if args.group_size < 2:
        raise ValueError(f"--group-size {args.group_size} has no baseline: use 2 or more")
    check_counts(args)
    if args.lr == 0:
        raise ValueError("--lr 0 learns nothing: use more than 0, e.g. 1e-6")
    for name, low, high in (("lr", 0, 1), ("beta", 0, 1e6), ("clip_low", 0, 1), ("clip_high", 0, 1e6)):
        value = getattr(args, name)
        if value is not None and not low <= value <= high:  # refuses nan, too
            limits = f"more than 0, at most {high}" if name == "lr" else f"{low} to {high:g}"
            raise ValueError(f"{flag_of(name)} {value} cannot work: use {limits}")
    if args.minibatches > (rollouts := args.questions * args.group_size):
        raise ValueError(f"--minibatches {args.minibatches} is more than the {rollouts} rollouts of a step")
    if not 1e-3 <= args.temperature < 1e6:
        raise ValueError(f"--temperature {args.temperature} does not sample, and a group of equal rollouts "
                         "teaches nothing: use e.g. 0.7")


def check_counts(args):
    """Refuse an empty value, as of --model "$MODEL" where MODEL is not set, and integers below 1: every flag
    that takes an integer, except --seed, counts something. Seeds of torch have 64 bits, and ours are made of
    --seed and the number of the step or trial."""
    if not abs(args.seed) < 2**31:
        raise ValueError(f"--seed {args.seed} is too large: give one below {2**31}")
    for name, value in vars(args).items():
        flag = "the question" if name == "question" else flag_of(name)
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
    gone = [tool for tool in remembered.get("tools") or [] if tool not in tool_names]
    if gone and args.tools is None:
        raise ValueError(f"{args.model} was trained with the tool {gone[0]!r}, which this code does not "
                         f"have: give --tools, some of {', '.join(tool_names)}")
    if not remembered and is_toy(args.model):
        remembered = {"tools": TOY_TOOLS, "corpus": str(TOY / "corpus.jsonl")}
    if args.tools is not None:
        args.tools = [tool.strip() for names in args.tools for tool in names.split(",") if tool.strip()]
        if wrong := [tool for tool in args.tools if tool not in tool_names]:
            raise ValueError(f"no tool is called {wrong[0]!r}: choose from {', '.join(tool_names)}")
    for name in (*MODULES, "tools", "corpus"):
        if getattr(args, name) is None:
            value, flag = remembered.get(name), flag_of(name)
            if name in MODULES and is_server(value):  # a download must not choose which server gets the key
                raise ValueError(f"{args.model} was trained with {flag} {value}: give that, or another")
            if places.missing(value):
                raise ValueError(f"{args.model} was trained with {flag} {value}, which is not there: "
                                 f"give {flag}, in its new place, or another")
            setattr(args, name, value)
    args.fixed = args.fixed or args.model
    if args.judge and is_toy(args.judge):
        raise ValueError(f"--judge {args.judge}: the toy cannot judge answers. Give another model, or none")
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
    file, above = Path(args.resume) / "args.json", Path(args.resume).parent
    if not file.exists():
        meant = f" (did you mean --resume {above}?)" if (above / "args.json").exists() else ""
        raise ValueError(f"{args.resume} is not the folder of a run: name one, or leave --resume out{meant}")
    repeated = {flag_of(name): name for name in (*MODULES, "judge")}
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
            path = getattr(settings, name)
            raise ValueError(f"the run's {flag_of(name)} {path} is not there: put it back, or write its new "
                             f"place into {file}")
    settings.out = settings.resume = args.resume
    settings.steps = args.steps or settings.steps
    settings.allow_unconfined = args.allow_unconfined
    lock(Path(args.resume), "train.py")  # before the checkpoint to resume from is chosen
    return settings


def read_settings(parser, data):
    """The settings in args.json, parsed like a command line. ValueError if one is missing or cannot work."""
    defaults = vars(parser.parse_args([]))
    names = defaults.keys() - OF_THIS_START
    if missing := sorted(names - data.keys()):
        name = missing[0]
        raise ValueError(f"it has no {name!r}; if this setting is newer than the run, add its default, "
                         f'"{name}": {json.dumps(defaults[name])}')
    if unknown := sorted(data.keys() - names - OF_THIS_START - {"code"}):
        raise ValueError(f"this code has no setting {unknown[0]!r}: go on with the code that made the run, "
                         'whose commit "code" names')
    words = []
    for name in names:
        value, flag = data[name], flag_of(name)
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
