"""What a training run needs before its first step: memory plan, questions, disk, models. It prints:

    memory  56.1 of 86 GB on the GPU, 107 of 128 GB on the host, with --optimizer-device cpu (without: 153 GB)
    data    nq+deepmath: 936 questions to train on, 64 to choose best/, 0 to test
    judge   Qwen/Qwen2.5-7B-Instruct (the frozen copy), for answers that the rules cannot read
    learn   all weights, lr 1e-06, 32 steps of 32 questions x 8 rollouts, at most 3 turns
    disk    335 of 900 GB, for at most 3 checkpoints of 107 GB and best/ of 15 GB
"""
import itertools
import math
import os
import shutil
from collections import namedtuple
from functools import partial
from pathlib import Path

import torch

from benchmarks import training
from cli.cast import Cast, load_engines, load_tools, show_engines, toy_warning
from cli.command_line import after_loading, local_models, named_set
from cli.flags import is_toy
from logbook.checkpoints import last_checkpoint, load_state, open_folder, restore
from logbook.endings import errors_leave
from logbook.log import say
from models import loading
from models.completion import NEW_TOKENS
from rewards.questions import read_questions
from scale import adapters, fit, ranks, sharding, threads
from world.places import MODULES


Data = namedtuple("Data", "train valid test")  # three lists of Question


def begin(args, table):
    """Prepare a run, and print its first lines. A run that cannot begin ends here, with one sentence.

    table: tools.TOOLS. Returns the Cast, the engine of π_ref or None, the optimizer, the Data, and the state
    of the checkpoint to resume or None.
    """
    with errors_leave("train.py"):
        checkpoint = last_checkpoint(args.resume) if args.resume else None
        args.device = ranks.start(args.device)
        state = load_state(checkpoint)
        check_steps(args, state["step"] if state else 0)
        plan_memory(args)
        data = load_questions(args)
        show_choices(args, data)
        show_shared(dict(zip(("training", "validation", "test"), data)))
        plan_disk(args)
        tools, without, cache = load_tools(args, table)
        policy, reference, optimizer, loaded = load_models(args, checkpoint)
        fixed, judge = load_engines(args, loaded, cache)
        open_folder(args, state["step"] if state else 0)
    after_loading()
    say(f"{show_engines(policy, fixed, judge, tools, without)}\nrun     {args.out}")
    say(toy_warning(policy, fixed, tools))
    return Cast(policy, fixed, tools, judge), reference, optimizer, data, state


def check_steps(args, done):
    """ValueError if a resumed run has done more steps than --steps. Prints a line if it has done all."""
    if args.steps < done:
        raise ValueError(f"{args.resume} has done {done} steps: give --steps {done} or more, or leave it out")
    if args.steps == done:
        say(f"steps   all {done} of {args.resume} are done: --steps N goes on to step N")


def plan_memory(args):
    """Choose how to train in the free memory, before anything large is downloaded: fill in --lora,
    --optimizer-device, --gradient-checkpointing, --token-budget and --lr where they were not given.
    ValueError if nothing fits."""
    device = loading.pick_device(args.device)
    if device.type == "cpu" and args.device is None and not Path(args.model).is_dir():
        raise ValueError(f"there is no folder {args.model} here, and no GPU to train a model from the hub. "
                         "If the name is right, train on a machine with a GPU, or give --device cpu to "
                         "download it and train on the CPU")
    config = loading.config_of(args.model)
    loading.refuse_to_train(config)  # a model of a kind that this code cannot train

    # What the user has chosen, fit.plan() keeps; it chooses the rest.
    given = [name for name in ("lora", "optimizer_device", "gradient_checkpointing")
             if args.resume or getattr(args, name) is not None]  # a resumed run has made these choices
    if args.gradient_checkpointing is None:
        args.gradient_checkpointing = device.type == "cuda"
    new_tokens = args.max_new_tokens or NEW_TOKENS
    longest_prompt = max(1, min(4096, fit.context(config, args.max_new_tokens) - new_tokens))
    gpu, host = free_memory(device)  # bytes
    changes, text = fit.plan(
        config, gpu, host, given, args.token_budget, prompt=longest_prompt, max_new_tokens=new_tokens,
        frozen=copies_on_a_rank(args), others=parameters_of_others(args), ranks=ranks.WORLD,
        dtype=loading.pick_dtype(args.dtype, device), lora=args.lora,
        optimizer_device=args.optimizer_device, gradient_checkpointing=args.gradient_checkpointing)
    vars(args).update(changes)
    if args.lr is None:
        args.lr = 1e-5 if args.lora else 1e-6
    say(f"memory  {text}")
    if args.lora:
        adapters.peft()  # ValueError if it is not installed, before the weights are downloaded


def copies_on_a_rank(args):
    """How much of a frozen copy of --model each rank holds: all of it if it plays modules, because sampling
    needs whole weights. If it is only π_ref, it is sharded."""
    if plays_modules(args):
        return 1
    return 1 / ranks.WORLD if needs_reference(args) else 0


def parameters_of_others(args):
    """The number of parameters of all other models that are loaded here."""
    configs = [loading.config_of(name) for name in local_models(args) if name != args.model]
    return sum(fit.shapes(config)["parameters"] for config in configs)


def free_memory(device):
    """(bytes free on the GPU, or 0; bytes free on the host): the least of all ranks, so all choose alike."""
    gpu = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    memories = ranks.together([(gpu, fit.host_memory())], ranks.WORLD)
    return tuple(map(min, zip(*memories)))


def load_questions(args):
    """The Data; "none" is an empty set.

    Without --valid, up to 64 of --data are held out for validation; training leaves out those and, unless
    all questions are alike, their near-duplicates."""
    if named_set(args.data):
        questions = training.training(args.data, args.limit or 1000, args.seed)
    else:
        questions = read_questions(args.data)[: args.limit]
    valid, test = (read_questions(path) if path not in (None, "none") else []
                   for path in (args.valid, args.test))
    if not args.valid:
        if len(questions) < 2:
            raise ValueError(f"{args.data} has too few questions to hold some out: give --valid FILE.jsonl "
                             "or none, or more questions")
        questions, valid, note = training.held_out(questions, min(64, len(questions) // 2), args.seed)
        say(note and f"data    {note}")
    return Data(questions, valid, test)


def show_choices(args, data):
    """Print the lines "data", "judge" and "learn"."""
    folder = f"{Path.cwd()}{os.sep}"
    copy = " (the frozen copy)" if args.judge == args.model else ""
    judge = f"{(args.judge or '').removeprefix(folder)}{copy}, for answers that the rules cannot read"
    part = f"adapters of rank {args.lora}" if args.lora else "all weights"
    say(f"data    {args.data.removeprefix(folder)}: {len(data.train)} questions to train on, "
        f"{len(data.valid)} to choose best/, {len(data.test)} to test")
    if is_toy(args.model) and Path(args.data).resolve().parent != Path(args.model).resolve():
        say("        the toy only knows calculations and the facts of its corpus: for other questions, give "
            "a real --model")
    say(f"judge   {judge if args.judge else 'none: an answer that the rules cannot read is not right'}")
    again = " (some again: there are no more)" if len(data.train) < args.questions else ""
    say(f"learn   {part}, lr {args.lr:g}, {args.steps} steps of {args.questions} questions{again} "
        f"x {args.group_size} rollouts, at most {args.max_turns} turns")


def show_shared(sets):
    """Print a warning for any two of these {name: [Question]} that share questions: the accuracy on them says
    little about new ones. Case, accents and articles do not count."""
    words = {name: {tuple(training.words_of(question.question)) for question in questions}
             for name, questions in sets.items()}
    for (one, these), (other, those) in itertools.combinations(words.items(), 2):
        if shared := len(these & those):
            say(f"warning: {shared} of the {len(those)} {other} questions are also {one} questions")


def plan_disk(args):
    """Print what the checkpoints will take at most: --keep of them, one being written, and best/.

    ValueError if they do not fit, or nothing can be written there. A resumed run, whose settings stay, is
    only warned that they do not fit."""
    folder = Path(args.out).resolve()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise ValueError(f"{args.out} can't be made: {parent} is not a folder that you may write to. Give "
                         "another --out")
    in_use = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free = shutil.disk_usage(parent).free + in_use  # what a resumed run has there is part of `need`, too

    shapes = fit.shapes(loading.config_of(args.model))
    itemsize = loading.pick_dtype(args.dtype, loading.pick_device(args.device)).itemsize
    weights = itemsize * shapes["parameters"] + 4 * shapes["adapter"] * (args.lora or 0)
    checkpoint = weights + fit.state_bytes(shapes, args.lora)
    # of the checkpoints, --keep stay (0: all), and one more is there while it is written
    number = min(math.ceil(args.steps / args.every), args.keep + 1 if args.keep else args.steps)
    best = 0 if args.valid == "none" else weights
    need = number * checkpoint + best

    say(f"disk    {gigabytes(need)} of {gigabytes(free)} GB, for at most {number} checkpoints of "
        f"{gigabytes(checkpoint)} GB and best/ of {gigabytes(best)} GB")
    if need > free:
        why = (f"the checkpoints need {gigabytes(need)} GB of disk, and {gigabytes(free)} are free for "
               f"{args.out}")
        if not args.resume:
            raise ValueError(f"{why}: give --keep 1, a larger --every, --lora 32 or --out on a larger disk")
        say(f"warning: {why}: free some, or the run will end with the last checkpoint that fits")


def gigabytes(size):
    return f"{size / 1e9:.3g}"


def load_models(args, checkpoint):
    """(policy, reference, optimizer, {name: engine} for the fixed modules).

    A frozen copy of the model is π_ref and, by default, plays all fixed modules; if nobody needs it, it is
    not loaded. With adapters, the copy is the policy with its adapters off.

    With several GPUs or in bfloat16, most policies are sharded (scale/sharding.py). That comes before the
    optimizer, which keeps its state for the shards, and the optimizer before the state of a checkpoint.
    At the end, the weights are gathered, because the run begins with sampling."""
    if loading.pick_device(args.device).type != "cuda":
        fit.bound_host_memory()  # running out of memory becomes an error, and does not kill the process
    load = partial(loading.load_engine, device=args.device, dtype=args.dtype, think=args.think,
                   plain=args.plain)
    reference, loaded = None, {}
    if args.lora:
        torch.manual_seed(args.seed)  # the adapters begin with random numbers
        policy, frozen = adapters.adapted(load(args.model), args.lora, checkpoint)
        reference, loaded = policy, {args.model: frozen}
    else:
        policy = load(checkpoint or args.model)
    say(threads.choose(policy))
    if args.gradient_checkpointing:
        policy.model.activation_checkpointing_enable()
    host = args.optimizer_device == "cpu"
    sharding.shard(policy.model, host)
    optimizer = sharding.adamw(policy.model, args.lr, host)
    if checkpoint:
        restore(checkpoint, optimizer)
    if not args.lora and (needs_reference(args) or plays_modules(args)):
        reference = load(args.model)
        reference.model.requires_grad_(False)
        loaded = {args.model: reference}
        if not plays_modules(args):  # π_ref alone
            sharding.shard(reference.model)
    sharding.gather(*[engine.model for engine in (policy, reference) if engine])
    # the checkpoint records which type was chosen
    args.dtype = str(loading.pick_dtype(args.dtype, loading.pick_device(args.device))).removeprefix("torch.")
    return policy, reference, optimizer, loaded


def needs_reference(args):
    """Does the objective need log π_ref? If a term of yours does, add its flag here."""
    return args.beta > 0


def plays_modules(args):
    """Does the frozen copy of --model play a fixed module, or the judge? All may have models of their own."""
    return args.model in [args.fixed, args.judge, *(getattr(args, module) for module in MODULES[1:])]
