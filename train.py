"""train.py trains the planner: questions -> rollouts -> rewards -> advantages -> update -> log -> save.

    python train.py                                     the toy, on a laptop: it learns to plan
    python train.py --model Qwen/Qwen2.5-7B-Instruct    picks data, judge and GPU memory settings
    python train.py --model Qwen/Qwen2.5-7B-Instruct --data my_questions.jsonl --corpus my_texts.jsonl
    python train.py --resume runs/toy-seed0             goes on with a run that was stopped

Each training step takes `--questions` questions and runs each of them `--group-size` times through
the flow (solve.py), with the planner as it is now. Each rollout gets one reward: 1 if its answer is
right, else 0. The rewards of a question are normalised (eq. 7): this gives each rollout an advantage
A, and each of its turns gets this A. flow_grpo.update() then changes the planner, in `--minibatches`
optimiser steps. A frozen copy of the model plays all other modules and is π_ref.

A run has a folder:

    args.json        the settings, for --resume, and the commit of the code
    log.csv          a row for each step
    evals.csv        a row for each evaluation on --valid or --test
    rollouts.jsonl   each rollout of each step, with the text of every module
    step-N/          checkpoints: folders that transformers can read, with trainer-0.pt for --resume
    best             a link to the checkpoint with the highest accuracy on --valid

All random numbers of a step come from its number and --seed. So a run that is stopped and resumed on
the same machine gives the same files, byte for byte, as one that was never stopped.
"""

import argparse
import csv
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import solve  # imports neither torch nor transformers
from benchmarks import training
from rewards.metrics import accuracy_line, calls_line, summary
from rewards.questions import read_questions
from world.services import is_server
from world.text import printable

# The defaults: the paper's (the steps are read off its figures; mini-batches, temperature and the
# longest plan are those of the released code), and the toy's. A small model learns at a larger rate,
# from smaller batches.
PAPER = {"data": "nq+deepmath", "steps": 32, "questions": 32, "minibatches": 4, "max_turns": 3}
PAPER |= {"max_new_tokens": 2048, "every": 5, "keep": 2}
TOY = {"steps": 50, "questions": 16, "minibatches": 4, "max_turns": 3, "lr": 4e-4, "every": 10}
TOY |= {name: f"{solve.TOY}/{name}.jsonl" for name in ("valid", "test")}
TOY |= {"data": f"{solve.TOY}/train.jsonl"}


def flags(words=None):
    """The command line, with all defaults that do not depend on the machine."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = lambda name: f"(default: {PAPER[name]}; the toy {TOY[name]})"
    add = parser.add_argument_group("what is trained, on what").add_argument
    add("--model", default=solve.TOY, help="folder or hub name of the planner")
    add("--data", help="questions: JSONL, or nq, deepmath, nq+deepmath (default; the toy its own)")
    add("--valid", help="questions that choose best: JSONL, or none (default: 64 of --data)")
    add("--test", help="questions graded before and after: JSONL, or none (default: none)")
    add("--limit", type=int, help="questions of --data at most (default: 1000 of a named set)")
    solve.add_shared(parser)
    add = parser.add_argument_group("the rollouts").add_argument
    add("--max-turns", type=int, help=f"turns of a rollout {default('max_turns')}")
    help = "of the planner, in rollouts and in the ratio (default: 0.7)"
    add("--temperature", type=float, default=0.7, help=help)
    add = parser.add_argument_group("the objective").add_argument
    add("--steps", type=int, help=f"training steps {default('steps')}")
    add("--questions", type=int, help=f"questions a step {default('questions')}")
    add("--group-size", type=int, default=8, help="G, rollouts of a question (default: 8)")
    add("--lr", type=float, help=f"default: 1e-6, with adapters 1e-5; the toy {TOY['lr']}")
    help = "weight of the KL to the untrained planner; 0 saves a pass (default: 0.001)"
    add("--beta", type=float, default=0.001, help=help)
    help = f"optimiser steps a batch of rollouts {default('minibatches')}"
    add("--minibatches", type=int, help=help)
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
    add("--every", type=int, help=f"save and validate every so many steps {default('every')}")
    add("--keep", type=int, help="checkpoints to keep, the newest (default: 2; the toy all)")
    add("--out", help="the run's folder, which must not exist (default: runs/MODEL-seedN)")
    add(
        "--resume", metavar="RUN", help="go on with the run in this folder; only --steps may change"
    )

    args = parser.parse_args(words)
    if args.resume:
        return resumed(parser, args, words)
    parser.set_defaults(**(TOY if solve.is_toy(args.model) else PAPER))
    if args.data and solve.is_toy(args.model):  # the toy's other questions do not belong to them
        parser.set_defaults(valid=None, test=None)
    parser.set_defaults(**solve.remembered(args.model))
    args = parser.parse_args(words)
    if is_server(args.model):
        parser.error("--model must be local weights: those of a server cannot be updated from here")
    if args.group_size < 2:
        parser.error(f"--group-size {args.group_size} has no baseline: use 2 or more")
    if args.temperature <= 0:
        parser.error("a greedy planner has no distribution to train: give a --temperature above 0")
    args.out = args.out or f"runs/{Path(args.model).name}-seed{args.seed}"
    if Path(args.out).exists():
        parser.error(
            f"{args.out} exists: --resume {args.out} goes on with it, or give another --out"
        )
    return args


def resumed(parser, args, words):
    """The settings of the run in --resume; only --steps may differ."""
    file = Path(args.resume, "args.json")
    if not file.exists():
        parser.error(f"{args.resume} is not the folder of a run")
    saved = json.loads(file.read_text())
    free = {"steps": args.steps or saved["steps"], "resume": args.resume, "out": args.resume}
    free |= {"allow_unconfined": args.allow_unconfined}
    given = {name: value for name, value in vars(args).items() if value != parser.get_default(name)}
    for name, value in saved.items():
        if is_server(str(value)) and given.get(name) != value:
            # A folder that somebody else made must not choose which server gets the key.
            parser.error(f"the run uses a server: repeat --{name.replace('_', '-')} {value}")
    for name, value in given.items():
        if name not in free and value != saved[name]:
            parser.error(
                f"--resume keeps the run's own settings: leave out --{name.replace('_', '-')}"
            )
    return argparse.Namespace(**saved | free)


if __name__ == "__main__":
    ARGS = flags()  # before torch, which takes seconds to import

import torch

from fast import trees
from flow_grpo import Action, advantages, distribution, padded, update
from models import local
from scale import adapters, masters, memory, sharded

SIGNALS = []  # those that have asked the run to end


def train(args):
    """A whole run."""
    ranks = sharded if sharded.WORLD > 1 else None  # torchrun has started several processes
    args.device = sharded.start(args.device)
    data, valid, test = load_questions(args)
    if not args.resume:
        plan_memory(args)
    checkpoint = last_checkpoint(args.out) if args.resume else None
    done, best = state_of(checkpoint)  # the last finished step; the highest accuracy on --valid

    # The models: the policy, and a frozen copy, which is π_ref and plays the other modules. With
    # adapters the copy is the policy with its adapters off.
    how = distribution, args.device, args.dtype, args.think, args.plain
    policy = adapters.load(checkpoint or args.model, *how, trainable=True)
    if args.lora:
        if not checkpoint:
            torch.manual_seed(args.seed)  # new adapters begin with random numbers
            policy.model = adapters.add(policy.model, args.lora)
        frozen = adapters.without(policy)
    else:
        frozen = local.load(args.model, *how)
    model, reference = policy.model, frozen.model if args.beta else None
    fixed, tools, judge = solve.load_cast(args, {args.model: frozen}, say)
    cast = policy, fixed, tools, judge
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable()
    local.ready_to_update(model)
    if ranks and not args.lora:
        ranks.shard(model)

    # The optimiser: AdamW with a constant learning rate and no weight decay
    weights = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if all(type(w.data) is torch.Tensor and w.dtype == torch.float32 for _, w in weights):
        optimizer = torch.optim.AdamW(weights, lr=args.lr, weight_decay=0.0, fused=True)
    else:  # bfloat16 would round the steps away
        optimizer = masters.MasterAdamW(weights, lr=args.lr, device=args.optimizer_device)
    if checkpoint:
        restore(checkpoint, optimizer, weights)
    if ranks:
        ranks.gather(model)

    open_run(args, done)
    if not checkpoint:
        evaluate(args, cast, 0, "test", test)
        best = evaluate(
            args, cast, 0, "valid", valid
        )  # the checkpoint `best` must beat the untrained
        save(
            args, policy, optimizer, weights, 0, best
        )  # a run that cannot save ends before it costs
    for number in (signal.SIGINT, signal.SIGTERM):  # the run ends after the present step
        signal.signal(number, stop)

    for step in range(max(done, 0) + 1, args.steps + 1):
        start, seed = time.perf_counter(), args.seed * 1_000_003 + step
        questions = questions_of(step, data, args.questions, args.seed)
        rollouts = graded_rollouts(args, cast, questions, args.group_size, seed)
        if why := solve.servers_down(rollouts):
            save(args, policy, optimizer, weights, step - 1, best)
            raise SystemExit(f"train.py: {why}. Then go on with --resume {args.out}")

        usable, groups = with_outcome(rollouts, args.group_size)  # neither failed nor undecided
        rewards = [rollout.reward for rollout in usable]  # 1 or 0, unless you edit rewards/grade.py
        A, flat = advantages(rewards, groups)
        actions = actions_of(usable, A)

        middle = time.perf_counter()
        if ranks:
            ranks.release(model)
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
            token_mean=args.token_mean,
            seed=seed,
            token_budget=args.token_budget,
            rows=padded if args.plain else trees.rows,
            ranks=ranks,
        )
        if ranks:
            ranks.gather(model)
        args.token_budget = metrics["token_budget"]  # smaller if memory was short
        end = time.perf_counter()

        row = row_of(step, rollouts, usable, groups, flat, metrics, tools)
        add_row(args, "log.csv", row)
        if sharded.RANK == 0:
            records = ({"step": step, **solve.record_of(rollout)} for rollout in rollouts)
            solve.append(Path(args.out, "rollouts.jsonl"), records)
        say(line_of(row, args.steps, middle - start, end - middle), *advice(row, rollouts))

        ending = sharded.any_rank(SIGNALS)
        if step % args.every == 0 or step == args.steps:
            accuracy = evaluate(args, cast, step, "valid", valid)
            save(args, policy, optimizer, weights, step, max(accuracy, best), accuracy > best)
            best = max(accuracy, best)
        elif ending:
            save(args, policy, optimizer, weights, step, best)
        if ending:
            say(f"Stopped after step {step}. Go on with: python train.py --resume {args.out}")
            raise SystemExit(128 + max(SIGNALS, default=signal.SIGTERM))
    if f"\n{args.steps},test," not in Path(args.out, "evals.csv").read_text():
        evaluate(args, cast, args.steps, "test", test)
    trained = Path(args.out, "best" if Path(args.out, "best").exists() else f"step-{args.steps}")
    say(f"Done. Try: python solve.py --model {trained}")


# -------------------------------------------------------------------------------- the data of a step
def load_questions(args):
    """(training, validation, test): three lists of Question; "none" is an empty one.

    Without --valid, up to 64 of --data are held out for it."""
    if set(args.data.split("+")) <= training.TRAINING.keys():
        questions = training.training(args.data, args.limit or 1000, args.seed)
    else:
        questions = read_questions(args.data)[: args.limit]
    valid, test = (
        read_questions(path) if path not in (None, "none") else []
        for path in (args.valid, args.test)
    )
    if args.valid is None:
        number = min(64, len(questions) // 2)
        questions, valid = training.held_out(questions, number, args.seed)
    sizes = f"{len(questions)} questions to train on, {len(valid)} to validate, {len(test)} to test"
    say(f"data    {args.data}: {sizes}")
    return questions, valid, test


def questions_of(step, questions, count, seed):
    """The `count` questions of a step; they depend on its number and the seed alone.

    The questions are taken in a shuffled order, and shuffled again for each epoch."""
    found = []
    for n in range((step - 1) * count, step * count):  # the n-th question of the run
        epoch, place = divmod(n, len(questions))
        order = random.Random(f"{seed}-{epoch}").sample(range(len(questions)), len(questions))
        found.append(questions[order[place]])
    return found


def graded_rollouts(args, cast, questions, group_size, seed):
    """Run each question `group_size` times through the flow and grade the answers: [Rollout], those
    of a question one after the other. With several GPUs, each rank runs its part of the questions."""
    part = [question for question in sharded.own(questions) for _ in range(group_size)]
    torch.manual_seed(seed + 7_919 * sharded.RANK)
    settings = {name: getattr(args, name) for name in solve.ROLLOUT_SETTINGS}
    rollouts = solve.evaluate(part, *cast, **settings)
    groups = [rollouts[i : i + group_size] for i in range(0, len(rollouts), group_size)]
    return [rollout for group in sharded.together(groups, len(questions)) for rollout in group]


def with_outcome(rollouts, group_size):
    """(usable, groups). usable: the rollouts with an outcome, which neither failed nor are undecided.

    groups[i] is the group of usable[i]: the number of its question in the batch. (Not the question's
    text: a question that comes twice in a batch makes two groups.) The others have no outcome, mostly
    through no fault of the planner. When its plans are at fault (say, they make prompts too long), it
    gets no signal to stop: so watch the number of failures in the log."""
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


# ---------------------------------------------------------------------------------- memory, signals
def plan_memory(args):
    """Choose how to train in the free memory: fill in the flags of memory that were not given."""
    device = local.pick_device(args.device)
    if device.type == "cpu" and not args.device and not Path(args.model).is_dir():
        raise SystemExit(
            f"there is no folder {args.model}, and no GPU to train a model from the hub: "
            "--device cpu does it all the same"
        )
    names = "lora optimizer_device gradient_checkpointing token_budget".split()
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    frees = sharded.exchanged(memory.free_memory(device))
    others = {getattr(args, name) for name in solve.MODULES + ["judge"]} - {
        None,
        "none",
        args.model,
    }
    how, lines = memory.plan(
        args.model,
        *map(min, zip(*frees)),  # of the rank that has least
        given,
        ranks=sharded.WORLD,
        itemsize=local.pick_dtype(args.dtype, device).itemsize,
        others=sum(memory.sizes(name)[0] for name in others if not is_server(name)),
    )
    for name, value in how.items():
        setattr(args, name, value)
    if args.lr is None:
        args.lr = 1e-5 if args.lora else 1e-6
    say(*lines)


def stop(number, frame):
    """Ctrl-C or SIGTERM: the run ends after the present step. A second Ctrl-C ends it at once."""
    SIGNALS.append(number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    say("\nStopping after this step; Ctrl-C again leaves at once.")


# ------------------------------------------------------------------------------------- the run's folder
def open_run(args, done):
    """Make the run's folder, or take it for this process. Cut the logs back to the checkpoint: a run
    that was killed may have written rows after it, and these steps are run again."""
    if sharded.RANK == 0:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=bool(args.resume))
        solve.lock(out)
        args.code = solve.commit()
        (out / "args.json").write_text(json.dumps(vars(args), indent=1))
        for name in ("log.csv", "evals.csv", "rollouts.jsonl"):
            cut_back(out / name, done)
    sharded.wait()


def cut_back(path, done):
    """Keep the header and the rows of steps up to `done`, the last one of the checkpoint."""
    if not path.exists():
        return
    kept, last = 0, 0
    with open(path, "rb") as file:
        for line in file:
            step = re.match(rb'(?:\{"step": )?(\d+),', line)
            if step and int(step[1]) > done or not line.endswith(b"\n"):
                break
            kept, last = kept + len(line), int(step[1]) if step else 0
    if path.name == "log.csv" and last < done:
        raise SystemExit(
            f"{path} ends with step {last}, but the checkpoint is of step {done}: rows are missing"
        )
    os.truncate(path, kept)


def add_row(args, name, row):
    """Append a row, {column: value}, to a table of the run."""
    if sharded.RANK == 0:
        path = Path(args.out, name)
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if not path.stat().st_size:
                writer.writeheader()
            writer.writerow(row)


def row_of(step, rollouts, usable, groups, flat, metrics, tools):
    """The row of log.csv. usable: the rollouts with an outcome; groups: the group of each."""
    found = summary(rollouts)
    plans = [len(completion.ids) for rollout in usable for completion in rollout.sampled]
    row = {
        "step": step,
        "reward": sum(rollout.reward for rollout in usable) / max(1, len(usable)),
        "right": sum(rollout.right for rollout in usable) / max(1, len(usable)),
        "judged": sum(rollout.judged for rollout in usable) / max(1, len(usable)),
        "turns": found["turns"],
        "errors": found["errors"],
        "flat": flat,
        "groups": len(set(groups)),
        "failed": found["failed"],
        "undecided": found["undecided"],
        "plan_tokens": sum(plans) / max(1, len(plans)),
        "cut_plans": found["cut_plans"],
        "cut_answers": found["cut_answers"],
    }
    row |= {name: value for name, value in metrics.items() if name != "token_budget"}
    for name in [*tools, "unreadable"]:
        row[name], row[f"{name}_errors"], _ = found["calls"].get(name, (0, 0, 0.0))
    return row


def line_of(row, steps, rollout_seconds, update_seconds):
    """The aligned line of a step: the reward first, then what can go wrong, then the seconds."""
    line = f"step {row['step']:3d}/{steps} | reward {row['reward']:.2f}"
    if row["right"] != row["reward"]:  # a reward of your own
        line += f" | right {row['right']:4.0%}"
    line += f" | turns {row['turns']:.2f} | errors {row['errors']:4.0%}"
    line += f" | flat groups {row['flat']:2d}/{row['groups']}"
    line += f" | kl {row['kl']:.3g} | clip {row['clip']:4.1%}"
    line += f" | {rollout_seconds:.1f}s + {update_seconds:.1f}s"
    for name in ("failed", "undecided", "skipped"):
        line += f" | {name} {row[name]}" * (row[name] > 0)
    return line


def advice(row, rollouts):
    """Lines about what keeps a run from learning."""
    for why in dict.fromkeys(rollout.failed for rollout in rollouts if rollout.failed):
        yield f"        failed: {printable(why)}"
    steps = [step for rollout in rollouts for step in rollout.memory.steps]
    if unread := [step.result for step in steps if not step.tool]:
        if len(unread) > len(steps) / 2:
            yield f"        {len(unread)} of {len(steps)} plans could not be parsed, as: {unread[0]}"
    if row["flat"] == row["groups"]:
        yield "        all groups are flat: their rollouts are all right or all wrong, so none is better"


def evaluate(args, cast, step, name, questions):
    """The accuracy on --valid or --test, each question once, sampled as in training -> log, evals.csv.

    The seed is always the same, so that evaluations differ by the planner alone. 0.0 without
    questions."""
    if not questions:
        return 0.0
    rollouts = graded_rollouts(args, cast, questions, 1, args.seed)
    found = summary(rollouts)
    columns = "accuracy turns errors failed undecided".split()
    row = {"step": step, "questions": name} | {column: found[column] for column in columns}
    add_row(args, "evals.csv", row | {"n": len(rollouts)})
    say(f"{name} after step {step}: {accuracy_line(found, len(rollouts))}")
    if name == "test" or step == 0:
        say(f"calls   {calls_line(found)}")
    return found["accuracy"]


# ------------------------------------------------------------------------------------- checkpoints
def save(args, policy, optimizer, weights, step, best, is_best=False):
    """Write step-N/, and let `best` point to it. A kill or a power cut leaves the old or the new one
    whole: the folder is written beside, synced and renamed, before older ones are deleted."""
    out, folder = Path(args.out), Path(args.out, f"step-{step}")
    beside = out / "writing"
    if folder.exists():
        return
    if sharded.RANK == 0:
        shutil.rmtree(beside, ignore_errors=True)
        local.save(policy.model, policy.tokenizer, beside)
        names = [*solve.MODULES, "judge", "tools", "corpus"]
        settings = {name: getattr(args, name) for name in names} | {"step": step, "best": best}
        (beside / "train.json").write_text(json.dumps(settings, indent=1))
    sharded.wait()
    state = {name: optimizer.state[weight] for name, weight in weights if weight in optimizer.state}
    torch.save({"ranks": sharded.WORLD, "state": state}, beside / f"trainer-{sharded.RANK}.pt")
    sharded.wait()
    if sharded.RANK == 0:
        for path in [*beside.iterdir(), *out.glob("*.*"), beside]:
            sync(path)
        beside.rename(folder)
        if is_best:
            (out / "best.new").symlink_to(folder.name)
            (out / "best.new").rename(out / "best")
        sync(out)
        forget(args)
    sharded.wait()


def sync(path):
    """Wait until a file or a folder is on the disk."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def forget(args):
    """Delete all but the newest --keep checkpoints; of the best one, what only --resume needs."""
    for folder in checkpoints(args.out)[: -args.keep if args.keep else 0]:
        if folder.resolve() == Path(args.out, "best").resolve():
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
    """(the last finished step, the highest accuracy on --valid) of a checkpoint; (-1, 0) without."""
    if not checkpoint:
        return -1, 0.0
    data = json.loads((checkpoint / "train.json").read_text())
    return data["step"], data["best"]


def restore(checkpoint, optimizer, weights):
    """Give the optimiser its masters and moments back, exactly."""
    file = checkpoint / f"trainer-{sharded.RANK}.pt"
    saved = torch.load(file, weights_only=True) if file.exists() else {"ranks": 0}
    if saved["ranks"] != sharded.WORLD:
        raise SystemExit(f"{checkpoint} was written by another number of processes: use as many")
    for name, weight in weights:
        if name in saved["state"]:
            optimizer.state[weight] = saved["state"][name]


def say(*lines):
    """Print lines. With several GPUs, only the first rank prints."""
    if sharded.RANK == 0:
        print(*lines, sep="\n", end="\n" * bool(lines), flush=True)


if __name__ == "__main__":
    try:
        train(ARGS)
    except ValueError as why:  # a mistake in the command line or in a file: one sentence
        raise SystemExit(f"train.py: {why}") from None
