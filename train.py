"""Train the planner: questions -> rollouts -> rewards -> advantages -> update -> log -> save.

    python train.py                                     the toy, on a laptop: it learns to plan
    python train.py --model Qwen/Qwen2.5-7B-Instruct    picks data, judge and GPU memory settings
    python train.py --model MODEL --data my_questions.jsonl --corpus my_texts.jsonl
    python train.py --resume runs/toy-seed0             goes on with a run that was stopped

Each training step takes `--questions` questions and runs each of them `--group-size` times through
the flow (solve.py), with the planner as it is now. Each rollout gets one reward: 1 if its answer is
right, else 0. The rewards of a question are normalised (eq. 7): this gives each rollout an
advantage A, and each of its turns gets this A. flow_grpo.update() then changes the planner, in
`--minibatches` optimiser steps. By default a frozen copy of the model plays all other modules; it
also is π_ref.

The method is in train(), from `for step in` to `update(`. What stands before it makes the models
and the optimiser, what follows writes everything down.

A run has a folder:

    args.json        the settings, for --resume, and the commit of the code
    log.csv          a row for each step
    evals.csv        a row for each evaluation on --valid or --test
    rollouts.jsonl   each rollout of each step, with the text of every module
    step-N/          checkpoints: folders that transformers can read; trainer-0.pt is for --resume
    best             a link to the checkpoint with the highest accuracy on --valid, if it is higher
                     than that of the untrained planner

All random numbers of a step come from its number and --seed. So a run that is stopped and resumed
on the same machine gives the same tables and weights, byte for byte, as one that was never stopped.
"""

import argparse
import csv
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import solve  # imports neither torch nor transformers
from rewards.health import advice, check_line, cost_line, line_of, row_of
from rewards.metrics import accuracy_line, calls_line, summary
from rewards.questions import read_questions
from world.services import is_server, replace_file

# The defaults: the paper's (the steps are read off its figures; temperature, mini-batches of 8
# questions and the longest plan are the released configuration's), and the toy's. A small model
# learns at a larger rate, from smaller batches.
PAPER = {
    "data": "nq+deepmath",
    "steps": 32,
    "questions": 32,
    "minibatches": 4,
    "max_turns": 3,
    "max_new_tokens": 2048,
    "beta": 0.001,
    "every": 5,
    "keep": 2,
}
TOY = {
    "data": f"{solve.TOY}/train.jsonl",
    "valid": f"{solve.TOY}/valid.jsonl",
    "test": f"{solve.TOY}/test.jsonl",
    "steps": 50,
    "questions": 16,
    "minibatches": 4,
    "max_turns": 3,
    "every": 10,
    "lr": 4e-4,
    "beta": 0.01,
}


def flags(words=None):
    """The command line, with all defaults that do not depend on the machine."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument_group("what is trained, on what").add_argument
    add("--model", default=solve.TOY, help="folder or hub name of the planner (default: the toy)")
    add("--data", help="questions: JSONL, or nq, deepmath, nq+deepmath (default; the toy its own)")
    add("--valid", help="questions that choose best: JSONL, or none (default: 64 of --data)")
    add("--test", help="questions graded before and after: JSONL, or none (default: none)")
    add("--limit", type=int, help="questions of --data at most (default: 1000 of a named set)")
    solve.add_shared(parser)
    add = parser.add_argument_group("the rollouts").add_argument
    add("--max-turns", type=int, help="turns of a rollout at most (default: 3)")
    help = "of the planner, in rollouts and in the ratio (default: 0.7)"
    add("--temperature", type=float, default=0.7, help=help)
    add = parser.add_argument_group("the objective").add_argument
    add("--steps", type=int, help="training steps (default: 32; the toy 50)")
    add("--questions", type=int, help="questions a step (default: 32; the toy 16)")
    add("--group-size", type=int, default=8, help="G, rollouts of a question (default: 8)")
    add("--lr", type=float, help="default: 1e-6; with adapters 1e-5; the toy 4e-4")
    help = "weight of the KL to the untrained planner (default: 0.001; the toy 0.01)"
    add("--beta", type=float, help=help)
    add("--minibatches", type=int, help="optimiser steps a batch of rollouts (default: 4)")
    help = "longer gradients are scaled down to this norm (default: 1)"
    add("--max-grad-norm", type=float, default=1.0, help=help)
    add("--clip-low", type=float, default=0.2, help="ε: ρ is clipped below 1 - ε (default: 0.2)")
    add("--clip-high", type=float, default=0.3, help="ε': ρ is clipped above 1 + ε' (default: 0.3)")
    add(
        "--token-mean", action="store_true", help="one mean over all tokens, not the three of eq. 5"
    )
    add = parser.add_argument_group("the machine's memory (default: what fits)").add_argument
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank (needs peft)")
    add("--token-budget", type=int, help="tokens of a micro-batch")
    help = "cpu: float32 masters and moments in the host's memory"
    add("--optimizer-device", choices=["cpu"], help=help)
    help = "less memory, a third more time"
    add("--gradient-checkpointing", action=argparse.BooleanOptionalAction, help=help)
    add = parser.add_argument_group("the run").add_argument
    help = "save, and evaluate on --valid, every so many steps (default: 5; the toy 10)"
    add("--every", type=int, help=help)
    add("--minutes", type=float, help="save after so many minutes, too: for cards taken back")
    add("--keep", type=int, help="checkpoints to keep, the newest (default: 2; the toy all)")
    add("--out", help="the run's folder, which must not exist (default: runs/MODEL-seedN)")
    help = "go on with this run; only --steps and --token-budget may change"
    add("--resume", metavar="RUN", help=help)
    help = "two questions, the longest plan, a checkpoint, a resumed step: what a long run meets"
    add("--rehearse", action="store_true", help=help)

    args = parser.parse_args(words)
    if args.resume:
        return resumed(parser, words)
    parser.set_defaults(**(TOY if solve.is_toy(args.model) else PAPER))
    if args.data and solve.is_toy(args.model):
        parser.set_defaults(valid=None, test=None)  # the toy's own belong to other questions
    parser.set_defaults(**solve.remembered(args))
    args = parser.parse_args(words)
    if is_server(args.model):
        parser.error("--model must be local weights: a server's cannot be updated from here")
    if args.group_size < 2:
        parser.error(f"--group-size {args.group_size} has no baseline: use 2 or more")
    if args.temperature <= 0:
        parser.error("a greedy planner has no distribution to train: use a --temperature above 0")
    args.out = args.out or f"runs/{Path(args.model).name}-seed{args.seed}"
    if args.rehearse:
        args.out, args.steps, args.questions, args.minibatches = f"{args.out}-rehearsal", 1, 2, 1
        args.valid = args.test = "none"
    if Path(args.out).exists():
        parser.error(
            f"{args.out} exists: --resume {args.out} goes on with it; or give another --out"
        )
    return args


def resumed(parser, words):
    """The settings of the run in --resume; only --steps and --token-budget may differ."""
    defaults = vars(parser.parse_args([]))
    # argparse leaves an attribute that exists: so what is not given stays None
    nothing = argparse.Namespace(**dict.fromkeys(defaults))
    given = vars(parser.parse_args(words, nothing))
    given = {name: value for name, value in given.items() if value is not None}
    file = Path(given["resume"], "args.json")
    if not file.exists():
        parser.error(f"{given['resume']} is not the folder of a run")
    saved = json.loads(file.read_text())
    for name, value in saved.items():
        if is_server(str(value)) and given.get(name) != value:
            # A folder that somebody else made must not choose which server gets the key.
            parser.error(f"the run uses a server: repeat --{name.replace('_', '-')} {value}")
    for name, value in given.items():
        free = "steps", "token_budget", "resume", "allow_unconfined"
        if name not in free and value != saved.get(name):
            parser.error(f"--resume keeps the run's settings: leave out --{name.replace('_', '-')}")
    # Nor must it decide that the model's code may read this machine's files.
    saved["allow_unconfined"] = False
    # The defaults are for flags that are newer than the run.
    return argparse.Namespace(**defaults | saved | given | {"out": given["resume"]})


if __name__ == "__main__":
    ARGS = flags()  # before torch, which takes seconds to import

import torch

from fast import trees
from flow_grpo import Action, advantages, distribution, padded, update
from models import local
from scale import adapters, fit, masters, sharded

SIGNALS = {}  # {those that have asked the run to end: when}


def train(args):
    """A whole run."""
    ranks = sharded if sharded.WORLD > 1 else None  # torchrun has started several processes
    args.device = sharded.start(args.device)
    if not args.resume:
        plan_memory(args)
    data, valid, test = load_questions(args)
    checkpoint = last_checkpoint(args.out) if args.resume else None
    # the last finished step, -1 before the evaluation of step 0; the highest accuracy on --valid
    done, best = state_of(checkpoint)
    if args.steps < done:
        raise ValueError(f"{args.out} has done {done} steps: give --steps {done} or more")

    # The models: the policy, and a frozen copy, which is π_ref and plays the other modules. With
    # adapters the copy is the policy with its adapters off.
    how = distribution, args.device, args.dtype, args.think, args.plain
    policy = adapters.load(str(checkpoint or args.model), *how, trainable=True)
    if args.lora and not checkpoint:
        torch.manual_seed(args.seed)  # new adapters begin with random numbers
        policy.model = adapters.add(policy.model, args.lora)
    frozen = adapters.without(policy) if args.lora else local.load(args.model, *how)
    model, reference = policy.model, frozen.model if args.beta else None
    say(f"planner {policy}")
    loaded = {args.model: frozen}
    fixed, tools, judge = solve.load_cast(args, loaded, say)
    cast = policy, fixed, tools, judge
    for engine in (policy, *loaded.values()):
        engine.token_budget = args.sampling_tokens
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable()
    local.ready_to_update(model)
    if ranks and not args.lora:
        ranks.shard(model)

    # The optimiser: AdamW with a constant learning rate and no weight decay.
    weights = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    optimizer = masters.MasterAdamW(weights, args.lr, args.optimizer_device)
    if checkpoint:
        restore(checkpoint, optimizer, weights)
    sharded.gather(model)  # whole weights for the rollouts; nothing to do on one device

    open_run(args, loaded, done, checkpoint)
    if not checkpoint:
        evaluate(args, cast, frozen, 0, "test", test)
        best = evaluate(args, cast, frozen, 0, "valid", valid)
        save(args, policy, optimizer, weights, 0, best)  # a disk that is full shows now
        done = 0
    saved = time.monotonic()  # when the last checkpoint was written
    settings = {name: getattr(args, name) for name in solve.ROLLOUT_SETTINGS}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)

    for step in range(done + 1, args.steps + 1):
        start, seed = time.perf_counter(), args.seed * 1_000_003 + step
        questions = sharded.own(questions_of(step, data, args.questions, args.seed))
        copies = [question for question in questions for _ in range(args.group_size)]
        torch.manual_seed(seed + 7_919 * sharded.RANK)
        rollouts = solve.roll_out(copies, *cast, **settings)  # of this GPU
        rollouts = sharded.together(rollouts, args.group_size)  # those of a question are neighbours
        if why := solve.servers_down(rollouts):
            save(args, policy, optimizer, weights, step - 1, best)  # this step is run again
            raise SystemExit(f"train.py: {why}. Then go on with --resume {args.out}")

        usable, groups = with_outcome(rollouts, args.group_size)  # neither failed nor undecided
        rewards = [rollout.reward for rollout in usable]  # 1 or 0, unless you edit rewards/grade.py
        A, flat = advantages(rewards, groups)
        actions = actions_of(usable, A)
        if args.rehearse and usable:
            actions.append(longest_action(policy, args.max_new_tokens))
        row = row_of(step, rollouts, usable, groups, flat, tools)
        first = step == done + 1  # of this process
        say(*advice(row, rollouts), *([check_line(row)] if first else []))

        middle = time.perf_counter()
        sharded.release(model)
        metrics = update(
            model,
            reference,
            optimizer,
            actions,
            groups,
            temperature=args.temperature,
            clip=(args.clip_low, args.clip_high),
            beta=args.beta,
            minibatches=args.minibatches,
            max_grad_norm=args.max_grad_norm,
            token_mean=args.token_mean,
            seed=seed,
            token_budget=args.token_budget,
            rows=padded if args.plain else trees.rows,
            ranks=ranks,
        )
        sharded.gather(model)
        args.token_budget = metrics.pop("token_budget")  # smaller if memory was short
        end = time.perf_counter()

        row |= metrics
        add_row(args, "log.csv", row)
        if sharded.RANK == 0:
            records = ({"step": step, **solve.record_of(rollout)} for rollout in rollouts)
            solve.append(Path(args.out, "rollouts.jsonl"), records)
        say(line_of(row, args.steps, middle - start, end - middle))
        if first:
            say(cost_line(rollouts, end - start, args.steps - step))

        # all ranks must agree
        ending = sharded.any_rank(SIGNALS)
        late = sharded.any_rank(args.minutes and time.monotonic() - saved > 60 * args.minutes)
        if step % args.every == 0 or step == args.steps:
            accuracy = evaluate(args, cast, frozen, step, "valid", valid)
            save(args, policy, optimizer, weights, step, max(best, accuracy), accuracy > best)
            best, saved = max(best, accuracy), time.monotonic()
        elif ending or late:
            save(args, policy, optimizer, weights, step, best)
            saved = time.monotonic()
        if ending:
            say(f"Stopped after step {step}. Go on with --resume {args.out}")
            raise SystemExit(128 + max(SIGNALS, default=signal.SIGTERM))

    evaluate(args, cast, frozen, args.steps, "test", test)
    sharded.stop()
    if args.rehearse and args.steps == 1:
        words = [sys.argv[0], "--resume", args.out, "--steps", "2"]
        words += ["--allow-unconfined"] * args.allow_unconfined  # must be repeated, see resumed()
        for name in solve.MODELS:
            if is_server(getattr(args, name) or ""):  # so must these
                words += [f"--{name.replace('_', '-')}", getattr(args, name)]
        os.execv(sys.executable, [sys.executable, *words])  # this process becomes the resumed run
    trained = "best" if Path(args.out, "best").exists() else f"step-{args.steps}"
    say(f"Done. Try: python solve.py --model {args.out}/{trained}")


# ------------------------------------------------------------------------------ the parts of a step
def load_questions(args):
    """(training, validation, test): three lists of Question; "none" is an empty one.

    Without --valid, up to 64 of --data are held out for it."""
    if Path(args.data).exists() or args.data.endswith(".jsonl"):
        questions = read_questions(args.data)[: args.limit]
    else:
        from benchmarks.training import training

        questions = training(args.data, args.limit or 1000, args.seed)
    valid, test = (
        read_questions(path) if path not in (None, "none") else []
        for path in (args.valid, args.test)
    )
    if args.valid is None:
        from benchmarks.training import held_out

        questions, valid = held_out(questions, min(64, len(questions) // 2), args.seed)
    numbers = f"{len(questions)} to train on, {len(valid)} to validate, {len(test)} to test"
    say(f"data    {args.data}: {numbers}")
    return questions, valid, test


def questions_of(step, questions, count, seed):
    """The `count` questions of a step; they depend on its number and the seed alone.

    The questions are taken in a shuffled order, and shuffled again for each epoch. (A run may be
    shorter than an epoch.)"""
    first, n = (step - 1) * count, len(questions)
    epochs = range(first // n, (first + count - 1) // n + 1)  # a step may reach into the next one
    orders = [random.Random(f"{seed}-{epoch}").sample(questions, n) for epoch in epochs]
    return [question for order in orders for question in order][first % n :][:count]


def with_outcome(rollouts, group_size):
    """(usable, groups). usable: the rollouts with an outcome: neither failed nor undecided.

    groups[i] is the group of usable[i]: the number of its question in the batch. (Not the text of
    the question: one that comes twice in a batch makes two groups.) The others have no outcome,
    mostly through no fault of the planner. But if its own plans cause the failure (say, they make
    prompts too long), it is not punished: so watch the number of failures in the log."""
    numbers = [n for n, rollout in enumerate(rollouts) if not (rollout.failed or rollout.undecided)]
    return [rollouts[n] for n in numbers], [n // group_size for n in numbers]


def actions_of(rollouts, A):
    """[Action]: what the policy wrote in all turns of these rollouts, as it was sampled, even if it
    could not be parsed. This is the broadcast of Flow-GRPO: each turn of rollout i gets A_i."""
    return [
        Action(completion.prompt_ids, completion.ids, i, A[i].item())
        for i, rollout in enumerate(rollouts)
        for completion in rollout.sampled
    ]


def longest_action(policy, new_tokens):
    """For --rehearse: a plan of the most tokens, behind a prompt of 4 096, or what fits."""
    new_tokens = policy.new_tokens(new_tokens)
    return Action([1] * min(4096, policy.context() - new_tokens), [1] * new_tokens, 0, A=1.0)


def evaluate(args, cast, frozen, step, name, questions):
    """The accuracy on --valid or --test, each question once, sampled as in training; 0.0 without
    any.

    It goes to evals.csv, with how far the weights have moved. The seed is always the same, so that
    evaluations differ by the planner alone."""
    file = Path(args.out, "evals.csv")
    if not questions or file.exists() and f"\n{step},{name}," in file.read_text():
        return 0.0  # nothing to do; or a finished run is resumed
    torch.manual_seed(args.seed + 7_919 * sharded.RANK)
    settings = {name: getattr(args, name) for name in solve.ROLLOUT_SETTINGS}
    rollouts = sharded.together(solve.roll_out(sharded.own(questions), *cast, **settings), 1)
    if why := solve.servers_down(rollouts):
        raise SystemExit(f"train.py: {why}. Then go on with --resume {args.out}")
    found = summary(rollouts)
    columns = "accuracy turns errors failed undecided".split()
    row = {"step": step, "questions": name} | {column: found[column] for column in columns}
    row |= {"n": len(rollouts)} | adapters.moved(cast[0], frozen)
    add_row(args, "evals.csv", row)
    say(f"{name:<5} after step {step}: {accuracy_line(found, len(rollouts))}")
    if name == "test" or step == 0:
        say(f"calls   {calls_line(found)}")
    if step:
        say(
            "moved   weights by {moved_max:.2g} at most, {moved_mean:.2g} on average; "
            "{moved_share:.1%} of them changed".format(**row)
        )
    return found["accuracy"]


def plan_memory(args):
    """Choose how to train in the free memory: fill in the flags of memory that were not given."""
    device = local.pick_device(args.device)
    if device.type == "cpu" and not args.device and not Path(args.model).is_dir():
        raise ValueError(
            f"there is no folder {args.model}, and no GPU to train a model from the hub: if the "
            "name is right, train on a machine with a GPU, or give --device cpu"
        )
    names = "lora optimizer_device gradient_checkpointing token_budget".split()
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    others = {getattr(args, name) for name in solve.MODELS} - {None, "none", args.model}
    how, lines = fit.plan(
        args.model,
        # the least of all ranks, so all choose alike
        *map(min, zip(*sharded.exchanged(fit.free_memory(device)))),
        given,
        ranks=sharded.WORLD,
        itemsize=local.pick_dtype(args.dtype, device).itemsize,
        others=sum(fit.sizes(name).weights for name in others if not is_server(name)),
    )
    args.sampling_tokens = local.TOKENS
    for name, value in how.items():
        setattr(args, name, value)
    if args.lr is None:
        args.lr = 1e-5 if args.lora else 1e-6
    say(f"device  {device}", *lines)


def stop(number, frame):
    """Ctrl-C or SIGTERM: the run ends after the present step. Ctrl-C again ends it at once, but not
    within a second: `timeout --foreground` passes on what the terminal has already sent."""
    now = time.monotonic()
    if not SIGNALS:
        say("\nStopping after this step; Ctrl-C again leaves at once.")
    if now > SIGNALS.setdefault(number, now) + 1:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


# --------------------------------------------------------------------------------- the run's folder
def say(*lines):
    """Print lines. With several GPUs, only the first rank prints."""
    if sharded.RANK == 0 and lines:
        print(*lines, sep="\n", flush=True)


def open_run(args, loaded, done, checkpoint):
    """Make the run's folder, or take it for this process. Cut the logs back to the checkpoint: a
    run that was killed may have written rows after it, and these steps are run again."""
    if sharded.RANK == 0:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=bool(args.resume))
        solve.lock(out)
        for name, value in solve.identity(args, loaded).items():
            before = getattr(args, name, value)  # that of args.json, if the run is resumed
            if name == "code" and before.split(" | ")[-1] != value:
                say(f"the code has changed since the run began: {before} | {value}")
                before += f" | {value}"
            elif name != "code" and before != value:
                why = "has changed since the run began"
                raise ValueError(f"{out}: {name} {why}: {before}, {value}")
            setattr(args, name, before)
        replace_file(out / "args.json", json.dumps(vars(args), indent=1).encode())
        for name in ("log.csv", "evals.csv", "rollouts.jsonl"):
            cut_back(out / name, done)
        if checkpoint and json.loads((checkpoint / "train.json").read_text())["is_best"]:
            mark_best(checkpoint)  # a kill may have come before save() could
    sharded.wait()


def cut_back(path, done):
    """Keep the header and the rows of the steps up to `done`, that of the checkpoint."""
    kept, rows = 0, 0
    if path.exists():
        with open(path, "rb") as file:
            for line in file:
                step = re.match(rb'(?:\{"step": )?(\d+),', line)  # 3,0.5 or {"step": 3, ...
                if step and int(step[1]) > done or not line.endswith(b"\n"):
                    break
                kept, rows = kept + len(line), rows + bool(step)
    if path.name == "log.csv" and rows < done:
        raise ValueError(f"{path} has only {rows} steps, but the checkpoint is of step {done}")
    if path.exists():
        os.truncate(path, kept)


def add_row(args, name, row):
    """Append a row, {column: value}, to a table of the run."""
    if sharded.RANK == 0:
        path = Path(args.out, name)
        with open(path, "a+", newline="") as file:
            file.seek(0)
            header, writer = next(csv.reader(file), None), csv.DictWriter(file, row)
            if not header:
                writer.writeheader()
            elif header != list(row):  # the code has changed since the run began
                raise ValueError(f"{path} has other columns than a row of step {row['step']}")
            writer.writerow(row)


def save(args, policy, optimizer, weights, step, best, is_best=False):
    """Write step-N/, and let `best` point to it. A kill or a power cut leaves the old or the new
    one whole: the folder is written beside, synced and renamed, before older ones are deleted."""
    out, folder, beside = Path(args.out), Path(args.out, f"step-{step}"), Path(args.out, "writing")
    if folder.exists():
        return
    if sharded.RANK == 0:
        shutil.rmtree(beside, ignore_errors=True)
        local.save(policy.model, policy.tokenizer, beside)
        names = [*solve.MODELS, "tools", "corpus", "think", "max_new_tokens"]
        settings = {name: getattr(args, name) for name in names}
        settings |= {"step": step, "best": best, "is_best": is_best}
        (beside / "train.json").write_text(json.dumps(settings, indent=1))
    sharded.wait()
    state = {name: optimizer.state[weight] for name, weight in weights if weight in optimizer.state}
    torch.save({"ranks": sharded.WORLD, "state": state}, beside / f"trainer-{sharded.RANK}.pt")
    sharded.wait()
    if sharded.RANK == 0:
        for path in [*beside.iterdir(), beside, *out.glob("*.*")]:  # and the logs up to here
            sync(path)
        beside.rename(folder)
        if is_best:
            mark_best(folder)
        sync(out)
        if args.keep:
            for old in {*out.glob("step-*")} - {*checkpoints(out)[-args.keep :]}:
                forget(old, out / "best")
    sharded.wait()


def mark_best(folder):
    """Let `best` point to this checkpoint."""
    beside = folder.with_name("best.new")
    beside.unlink(missing_ok=True)
    beside.symlink_to(folder.name)
    beside.rename(folder.with_name("best"))


def sync(path):
    """Wait until a file or a folder is on the disk."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def forget(folder, best):
    """Delete a checkpoint; of the best one, only what --resume needs."""
    if folder.resolve() == best.resolve():
        for file in folder.glob("trainer-*.pt"):
            file.unlink()
    else:
        shutil.rmtree(folder)


def checkpoints(run):
    """The step-N folders that --resume can go on from, the oldest first."""
    folders = [file.parent for file in Path(run).glob("step-*/trainer-0.pt")]
    return sorted(folders, key=lambda folder: int(folder.name[5:]))


def last_checkpoint(run):
    """The checkpoint to go on from; None if the run was stopped before its first one."""
    return (checkpoints(run) or [None])[-1]


def state_of(checkpoint):
    """(the last finished step, the highest accuracy on --valid); (-1, 0.0) without a checkpoint."""
    if not checkpoint:
        return -1, 0.0
    data = json.loads((checkpoint / "train.json").read_text())
    return data["step"], data["best"]


def restore(checkpoint, optimizer, weights):
    """Give the optimiser its masters and moments back, exactly."""
    file = checkpoint / f"trainer-{sharded.RANK}.pt"
    saved = torch.load(file, weights_only=True) if file.exists() else {"ranks": 0}
    if saved["ranks"] != sharded.WORLD:
        raise ValueError(f"{checkpoint} was written by another number of processes: use as many")
    if unknown := saved["state"].keys() - dict(weights).keys():
        raise ValueError(f"{checkpoint} has other weights than this model: {sorted(unknown)[0]}")
    for name, weight in weights:
        if name in saved["state"]:
            optimizer.state[weight] = saved["state"][name]


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        train(ARGS)
    except ValueError as why:  # one sentence
        raise SystemExit(f"train.py: {why}") from None
    except torch.OutOfMemoryError as why:
        less = f"--resume {ARGS.out} --token-budget {ARGS.token_budget // 2}"
        raise SystemExit(f"train.py: {why} If it was in an update, go on with {less}") from None
    except KeyboardInterrupt:
        go_on = f"; go on with --resume {ARGS.out}" if Path(ARGS.out).exists() else ""
        raise SystemExit(f"train.py: stopped{go_on}") from None
