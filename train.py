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

What a run writes into its folder, and reads again after it was stopped: record/checkpoints.py. All
random numbers of a step come from its number and --seed. So a run that is stopped and resumed on
the same machine gives the same tables and weights, byte for byte, as one that was never stopped. (A
local judge is asked again what it has judged before, and may round differently.)
"""

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import solve  # imports neither torch nor transformers
from record import flags
from tools import TOOLS, available, without_contact

given = partial(flags.train_flags, tools=TOOLS, about=__doc__.split("\n")[0])
if __name__ == "__main__":
    GIVEN = given()  # before torch is imported, which takes seconds

import torch

from benchmarks.questions import is_file, three_sets
from fast import trees
from flow_grpo import Action, advantages, padded, update
from models import local
from models.completion import servers_down
from record import checkpoints
from record.checkpoints import add_row, save, say
from record.folder import rows_of
from record.health import advice, check_lines, cost_line, line_of, log_row
from record.metrics import accuracy_line, calls_line, summary
from scale import adapters, fit, masters, rehearsal, sharded
from world.mistakes import Mistake

TRAINED = ("planner",)  # of solve.MODULES: those that the policy plays, and that are trained
SIGNALS = {}  # {those that have asked the run to end: when}


def one_step(step, args, data, cast, reference, optimizer, for_update, first):
    """A step of Flow-GRPO -> its row of log.csv, its rollouts, the seconds of both halves.

    cast: who plays what, as roll_out() takes it: policy, fixed engines, toolset, judge.
    for_update: the settings of update(). first: is it the first of this process?"""
    policy, _, tools, _ = cast
    start, seed = time.perf_counter(), args.seed * 1_000_003 + step
    temperature = args.temperature  # of sampling and of the ratio: edit it here for a schedule
    questions = questions_of(step, data, args.questions, args.seed)
    rollouts = rollouts_of(questions, args.group_size, args, cast, temperature, seed)
    if why := servers_down(rollouts, tools):
        save(args, policy, optimizer, step - 1)  # this step is run again
        raise Mistake(f"{why}. Then go on with --resume {args.out}")

    usable, groups = with_outcome(rollouts, args.group_size)  # neither failed nor undecided
    rewards = [rollout.reward for rollout in usable]  # to shape them: rewards/grade.py
    A, flat = advantages(rewards, groups)
    row = log_row(step, rollouts, usable, groups, flat, tools)
    say(*advice(row, rollouts), *(check_lines(row) if first else []))
    actions = actions_of(usable, A)  # to train on fewer rollouts: docs/fork.md

    middle = time.perf_counter()
    this_step = dict(temperature=temperature, seed=seed)
    metrics = update(policy.model, reference, optimizer, actions, groups, **for_update, **this_step)
    for_update["token_budget"] = metrics.pop("token_budget")  # less, once memory was short
    return row | metrics, rollouts, (middle - start, time.perf_counter() - middle)


def train(args):
    """A whole run: its steps, with an evaluation and a checkpoint now and then."""
    (data, valid, test), cast, frozen, reference, optimizer, for_update, done = set_up(args)
    policy = cast[0]  # plays the planner, and is trained
    due = lambda step: step % args.every == 0 or step == args.steps  # of a validation
    if done == 0:
        evaluate(args, cast, frozen, 0, "test", test)
    if due(done):  # a kill may have prevented it
        evaluate(args, cast, frozen, done, "valid", valid)
    saved = time.monotonic()  # when the last checkpoint was written
    heed_signals()

    step = done  # and stays so if no step is left
    for step in range(done + 1, args.steps + 1):
        first = step == done + 1
        here = step, args, data, cast, reference, optimizer, for_update, first
        row, rollouts, seconds = one_step(*here)
        add_row(Path(args.out, "log.csv"), row)
        checkpoints.add_rollouts(Path(args.out, "rollouts.jsonl"), step, rollouts)
        say(line_of(row, args.steps, *seconds))
        if first:
            say(cost_line(rollouts, sum(seconds), args.steps - step, cast[2]))
            if not getattr(policy.model, "tree_rows", True):  # fast/trees.py has tried
                say("        the update reads a row for each plan, which is slower")

        ending = sharded.any_rank(SIGNALS)  # the same on all GPUs
        late = sharded.any_rank(args.minutes and time.monotonic() - saved > 60 * args.minutes)
        if due(step) or late or ending:
            save(args, policy, optimizer, step)
            saved = time.monotonic()
        if ending:
            say(f"Stopped after step {step}. Go on with --resume {args.out}")
            raise SystemExit(exit_status())
        if due(step):
            evaluate(args, cast, frozen, step, "valid", valid)

    evaluate(args, cast, frozen, step, "test", test)
    if args.rehearse and done < args.steps:
        learn = partial(update, policy.model, reference, optimizer, **for_update)
        rehearse(args, policy, frozen, learn, seconds)
    sharded.stop()
    last = "best" if Path(args.out, "best").exists() else f"step-{step}"
    trained = [f"--{name} {args.out}/{last}" for name in TRAINED if name in flags.MODELS]
    model = f"{args.out}/{last}" if "planner" in TRAINED else args.model
    say(" ".join(["Done. Try: python solve.py --model", model, *trained]))


# ------------------------------------------------------------------------------ the parts of a step
def questions_of(step, questions, count, seed):
    """The `count` questions of a step; they depend on its number and the seed alone.

    The questions are taken in a shuffled order, and shuffled again for each epoch. (A run may be
    shorter than an epoch.)"""
    first, n = (step - 1) * count, len(questions)
    epochs = range(first // n, (first + count - 1) // n + 1)  # a step may reach into the next one
    orders = [random.Random(f"{seed}-{epoch}").sample(questions, n) for epoch in epochs]
    return [question for order in orders for question in order][first % n :][:count]


def rollouts_of(questions, copies, args, cast, temperature, seed):
    """So many rollouts of each question, one after the other. With several GPUs, each runs its
    share of the questions, and gets the rollouts of all.

    The same seed gives the same rollouts: to sample a question again in a step, give another one
    (experiments/forks/dapo.diff)."""
    own = [question for question in sharded.own(questions) for _ in range(copies)]
    torch.manual_seed(seed + 7_919 * sharded.RANK)
    random.seed(seed + 7_919 * sharded.RANK)  # for a fork whose prompts, say, depend on chance
    rollouts = solve.roll_out(
        own,
        *cast,
        max_turns=args.max_turns,
        temperature=temperature,
        max_new_tokens=args.max_new_tokens,
        trained=TRAINED,
    )
    for rollout in rollouts:  # graded, so their tools' connections, say, need not go to other GPUs
        rollout.state = {}
    return sharded.together(rollouts, copies)


def with_outcome(rollouts, group_size):
    """(usable, groups). usable: the rollouts with an outcome: neither failed nor undecided.

    groups[i] is the group of usable[i]: the number of its question in the batch. (Not the text of
    the question: one that comes twice in a batch makes two groups.) The others have no outcome,
    mostly through no fault of the planner. But if its own plans cause the failure (say, they make
    prompts too long), it is not punished: so watch the number of failures in the log. To leave out
    others yourself, set rollout.failed here: without them in their places, questions would be
    mixed."""
    questions = [rollout.question for rollout in rollouts]
    if questions != [first for first in questions[::group_size] for _ in range(group_size)]:
        raise ValueError("a group is not whole: set rollout.failed of what you leave out")
    numbers = [n for n, rollout in enumerate(rollouts) if not (rollout.failed or rollout.undecided)]
    return [rollouts[n] for n in numbers], [n // group_size for n in numbers]


def actions_of(rollouts, A):
    """[Action]: what the policy wrote in all turns of these rollouts, as it was sampled, even if it
    could not be parsed. This is the broadcast of Flow-GRPO: each turn of rollout i gets A_i."""
    if len(A) != len(rollouts):
        raise ValueError("A has another length: remove the same from usable, groups and A")
    return [
        Action(completion.prompt_ids, completion.ids, i, A=A[i].item(), turn=t)
        for i, rollout in enumerate(rollouts)
        for t, completion in enumerate(rollout.sampled)
    ]


def evaluate(args, cast, frozen, step, name, questions):
    """The accuracy on --valid or --test, and how far the weights moved: a row of evals.csv. Each
    question is sampled once, always with the same seed, so the planner alone makes a difference."""
    file = Path(args.out, "evals.csv")
    done = any((row["step"], row["questions"]) == (str(step), name) for row in rows_of(file))
    if questions and not done:  # it is done if a finished run is resumed
        rollouts = rollouts_of(questions, 1, args, cast, args.temperature, args.seed)
        if why := servers_down(rollouts, cast[2]):
            raise Mistake(f"{why}. Then go on with --resume {args.out}")
        found = summary(rollouts)
        columns = "accuracy turns errors failed undecided".split()
        row = {"step": step, "questions": name} | {column: found[column] for column in columns}
        row |= {"n": len(rollouts)} | (adapters.moved(cast[0], frozen) if frozen else {})
        add_row(file, row)
        say(f"{name:<5} after step {step}: {accuracy_line(found, len(questions))}")
        if name == "test" or step == 0:
            say(f"calls   {calls_line(found)}")
        if step and frozen:
            line = "moved   weights by {moved_max:.2g} at most, {moved_mean:.2g} on average; "
            say(line.format(**row) + f"{row['moved_share']:.1%} of them changed")
    checkpoints.mark_best(args.out, args.keep)


def heed_signals():
    """Ctrl-C, SIGTERM and a closed terminal (without nohup) now end the run after its step."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    for number in (signal.SIGINT, signal.SIGTERM, *([] if nohup else [signal.SIGHUP])):
        signal.signal(number, stop)


def stop(number, frame):
    """The run ends after the present step. Ctrl-C again ends it at once, but not within a second:
    `timeout --foreground` passes on what the terminal has already sent."""
    now = time.monotonic()
    if not SIGNALS:
        say("\nStopping after this step; Ctrl-C again leaves at once.")
    if now > SIGNALS.setdefault(number, now) + 1:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def exit_status():
    """That of a run which a signal has ended: its own, or else another rank's."""
    return 128 + max(SIGNALS, default=signal.SIGTERM)


# -------------------------------------------------------------------------------- around the steps
def rehearse(args, policy, frozen, learn, seconds):
    """--rehearse, after its step and the checkpoint: the largest batches, and a second process.

    learn: update() with all but the actions. seconds: those of the step."""
    if args.steps == 1:
        say(*rehearsal.largest(args, policy, frozen, learn, Action))
        if sharded.any_rank(SIGNALS):
            raise SystemExit(exit_status())
    say(rehearsal.whole_run(args, policy, *seconds))
    if args.steps == 1:
        sharded.stop()
        rehearsal.second_step(flags.resuming(args))


def set_up(args):
    """The questions, the models, the optimiser, the settings of update(), and the last finished
    step, of a new run or of one that goes on."""
    choose_device(args)
    data, valid, test = three_sets(args.data, args.valid, args.test, args.limit, args.seed)
    numbers = f"{len(data)} to train on, {len(valid)} to validate, {len(test)} to test"
    say(f"data    {args.data}: {numbers}")
    texts = {question.question for question in data}
    if known := sum(question.question in texts for question in valid + test):
        say(f"        {known} of the questions to validate or test are also trained on")
    if both := len({question.question for question in valid} & {q.question for q in test}):
        say(f"        {both} of the questions to test also validate, so best/ is chosen on them")
    checkpoint = checkpoints.last_checkpoint(args.out) if args.resume else None
    done = checkpoints.step_of(checkpoint)
    if args.resume and not checkpoint and rows_of(Path(args.out, "log.csv")):
        raise Mistake(f"{args.out} has steps, but no checkpoint to go on from: give another --out")
    if args.steps < done:
        raise Mistake(f"{args.out} has done {done} steps: give --steps {done} or more")

    tools, cache = solve.load_tools(args)
    if why := without_contact(tools):  # a run would wait for Wikipedia, and then stop
        raise Mistake(f"{why}; or give --corpus, or leave wikipedia_search out of --tools")

    # Fixed models play all modules but the planner. By default that is one frozen copy of the
    # policy as it began, which also is π_ref.
    policy = load_policy(args, checkpoint)
    say(f"planner {policy}")
    loaded = {args.model: adapters.without(policy)} if args.lora else {}
    if args.beta:  # first: if --fixed were adapters on --model, these would be part of π_ref
        solve.engine_of(args.model, args, loaded)
    fixed, judge = solve.load_cast(args, loaded, tools, cache, say)
    frozen = loaded.get(args.model)
    reference = frozen.model if args.beta else None  # π_ref
    cast = policy, fixed, tools, judge
    for engine in (policy, *loaded.values()):
        if args.sampling_bytes and isinstance(engine, local.Engine):
            fit.give_room(engine, args.sampling_bytes, args.plain)

    # AdamW with a constant learning rate and no weight decay. Any elementwise optimiser of torch
    # may stand here; of what it keeps, checkpoints have the tensors in its `state`.
    adamw = partial(torch.optim.AdamW, lr=args.lr, weight_decay=0.0, fused=True)
    weights = {name: w for name, w in policy.model.named_parameters() if w.requires_grad}
    optimizer = masters.Masters(weights, adamw, args.optimizer_device)
    if checkpoint:
        checkpoints.restore(checkpoint, optimizer)
    sharded.gather(policy.model)  # whole weights for the rollouts; nothing to do on one device

    for_update = dict(
        clip=(args.clip_low, args.clip_high),
        beta=args.beta,
        minibatches=args.minibatches,
        max_grad_norm=args.max_grad_norm,
        token_mean=args.token_mean,
        token_budget=args.token_budget,
        rows=padded if args.plain else trees.rows,
        ranks=sharded if sharded.WORLD > 1 else None,
    )
    checkpoints.refuse_small_disk(args, policy.model, optimizer)
    checkpoints.open_run(args, loaded, {"data": data, "valid": valid, "test": test}, done)
    if not checkpoint:
        save(args, policy, optimizer, 0)
    return (data, valid, test), cast, frozen, reference, optimizer, for_update, done


def load_policy(args, checkpoint):
    """The engine that is trained: the checkpoint's, or --model's, with new adapters if --lora."""
    policy = solve.load(str(checkpoint or args.model), args, trainable=True)
    if args.lora and not checkpoint:
        torch.manual_seed(args.seed)  # new adapters begin with random numbers
        policy.model = adapters.add(policy.model, args.lora)
    if args.gradient_checkpointing:
        policy.model.activation_checkpointing_enable()
    local.ready_to_update(policy.model)
    if sharded.WORLD > 1 and not args.lora:
        sharded.shard(policy.model)
    return policy


def choose_device(args):
    """Join the other GPUs. Then fill in the flags of memory that were not given, by what is free,
    and the learning rate, which depends on them. A resumed run keeps its choice."""
    args.device = sharded.start(args.device)
    if args.resume:
        return
    device = local.pick_device(args.device)
    if device.type == "cpu" and not args.device and not Path(args.model).is_dir():
        why = f"there is no folder {args.model}, and no GPU to train a model from the hub"
        cure = "if the name is right, train on a machine with a GPU, or give --device cpu (or mps)"
        raise Mistake(f"{why}: {cure}")
    names = "lora optimizer_device gradient_checkpointing token_budget".split()
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.paper:
        given.setdefault("lora", 0)  # all weights, or Mistake
    others = {getattr(args, name) for name in flags.MODELS} - {None, "none"}
    chosen, lines = fit.choose(
        args.model,
        # the least of all ranks, so all choose alike
        *map(min, zip(*sharded.exchanged(fit.free_memory(device)), strict=True)),
        given,
        ranks=sharded.WORLD,
        itemsize=local.pick_dtype(args.dtype, device).itemsize,
        others=others - {args.model},
        frozen=bool(args.beta) or args.model in others,
        adapters_first=sharded.WORLD == 1 and not flags.is_toy(args.model),
    )
    args.sampling_bytes = None
    for name, value in chosen.items():
        setattr(args, name, value)
    if args.lr is None:
        args.lr = 2e-5 if args.lora else 1e-6
    say(f"device  {device}", *lines)


# ------------------------------------------------------------------------------------- the defaults
DEFAULTS = {
    "seed": 0,
    "max_turns": 3,
    "group_size": 8,
    "temperature": 0.7,
    "minibatches": 4,
    "clip_low": 0.2,
    "clip_high": 0.3,
    "max_grad_norm": 1.0,
}
TOY = DEFAULTS | {
    "data": f"{flags.TOY}/train.jsonl",
    "valid": f"{flags.TOY}/valid.jsonl",
    "test": f"{flags.TOY}/test.jsonl",
    "steps": 50,
    "questions": 16,
    "every": 10,
    "lr": 4e-4,
    "beta": 0.01,
}
# Of a real model: a night on one card, as computed (docs/gpu.md), with adapters if peft is there.
NIGHT = DEFAULTS | {
    "data": "nq+deepmath",
    "steps": 40,
    "questions": 16,
    "max_new_tokens": 512,
    "beta": 0.001,
    "every": 10,
    "minutes": 30,
    "keep": 2,
}
# --paper: its batches, its plans, all weights at its rate. The steps are read off its figures; the
# temperature is the released code's, and so is 64 in a mini-batch (there turns, here rollouts).
PAPER = NIGHT | {"steps": 32, "questions": 32, "max_new_tokens": 2048, "every": 5}


def settings(given):
    """All settings of a run: the flags that were given, and defaults for the others."""
    if given.resume:
        return flags.resumed(given, DEFAULTS | {"trained": [*TRAINED]})
    given.model = given.model or flags.TOY
    defaults = PAPER if given.paper else NIGHT
    if flags.is_toy(given.model):
        if given.paper:
            raise Mistake("--paper is for a real model, not for the toy: give another --model")
        defaults = TOY | ({"valid": None, "test": None} if given.data else {})
    was_trained = flags.remembered(given)
    if was_trained and not flags.is_toy(given.model) and None in (given.data, given.lr):
        why = "give --data and --lr, or go on with its run: --resume"
        raise Mistake(f"{given.model} is a checkpoint, with its own data and learning rate: {why}")
    args = flags.fill_in(given, defaults | was_trained)
    if not is_file(args.data):  # as many as the paper's steps use, 1,024, and 64 to validate on
        args.limit = args.limit or 1100
    args.out = args.out or f"runs/{Path(args.model).name}-seed{args.seed}"
    if args.rehearse:
        args.rehearse = {"steps": args.steps, "questions": args.questions}  # of the whole run
        args.out, args.steps, args.questions, args.minibatches = f"{args.out}-rehearsal", 1, 2, 1
        args.valid = args.test = "none"
    args.trained = [*TRAINED]
    if twice := [name for name in TRAINED if getattr(args, name, None) not in (None, args.model)]:
        raise Mistake(f"the {twice[0]} is trained: leave out --{twice[0]}, which would not act")
    if Path(args.out).exists():
        raise Mistake(f"{args.out} exists: --resume {args.out} goes on; or give another --out")
    args.tools = args.tools or available()
    return args


if __name__ == "__main__":
    try:
        ARGS = settings(GIVEN)
        train(ARGS)
    except Mistake as why:  # any other exception is a bug, and keeps its traceback
        raise SystemExit(f"train.py: {why}") from None
    except torch.OutOfMemoryError as why:
        less = f"--resume {ARGS.out} --token-budget {ARGS.token_budget // 2}"
        raise SystemExit(f"train.py: {why} If it was in an update, go on with {less}") from None
    except KeyboardInterrupt:
        raise SystemExit("train.py: stopped; if it has a folder, --resume goes on") from None
