"""The folder of a training run, and its checkpoints: what train.py writes and --resume reads again.

    args.json                the settings, and what else decides the results
    log.csv, evals.csv       a row for each step, and for each evaluation
    rollouts.jsonl           each rollout of each step, with the text of every module
    step-N/                  the weights, as models/local.save() writes them
        train.json           what solve.py needs to play the same flow: models, tools, corpus
        trainer-R.pt         for --resume: the optimiser's state, of each rank R
    best                     a link to the checkpoint with the highest accuracy on --valid

A kill or a power cut leaves the old or the new checkpoint whole: it is written beside, synced and
renamed, before older ones are deleted. (On macOS, a sync does not wait for the disk.) Rows are cut
back to the checkpoint that a run goes on from.

With several GPUs, the first rank writes; each writes its own trainer-R.pt."""

import csv
import errno
import json
import os
import pickle
import re
import shutil
import signal
from pathlib import Path

import torch

from models import local
from record.flags import CHECKPOINT_SETTINGS
from record.folder import append, digest, identity, lock, refuse_links, replace_file, rows_of
from record.rollouts import record_of
from scale import sharded
from world.mistakes import Mistake, drop_output
from world.text import printable

# what reading a file that is no trainer-R.pt, or only half of one, may raise
DAMAGED = pickle.UnpicklingError, ValueError, KeyError, TypeError, AttributeError, EOFError
DAMAGED += RuntimeError, IndexError, OSError


def say(*lines):
    """Print lines. With several GPUs, only the first rank prints. If nobody reads them any more
    (Ctrl-C has ended the tee of `| tee`, or a terminal was closed), the run ends as by SIGTERM."""
    if sharded.RANK == 0 and lines:
        try:
            print(*map(printable, lines), sep="\n", flush=True)
        except OSError as why:
            if why.errno not in (errno.EPIPE, errno.EIO):  # a full disk, say
                raise
            drop_output()
            signal.raise_signal(signal.SIGTERM)


# ------------------------------------------------------------------------------------ the folder
def open_run(args, loaded, questions, done):
    """Make the folder of a training run, or take it for this process. Cut the logs back to the
    checkpoint: a run that was killed may have written rows after it, and these steps are run again.

    args.json holds the settings, and what else decides the results. A new folder gets its name when
    that file is in it, so each one with the name can be resumed."""
    if sharded.RANK == 0:
        out, settings = Path(args.out), vars(args).copy()
        begun = out if args.resume else out.with_name(f"{out.name}.new")
        begun.mkdir(parents=True, exist_ok=True)
        refuse_links(begun)
        lock(begun)
        shutil.rmtree(begun / "writing", ignore_errors=True)  # the disk may be full
        if step_of(last_checkpoint(out)) != done:  # between our choice and our lock
            raise Mistake(f"another process has just written into {out}: run this again")
        for name, now in identity(args, loaded, questions).items():
            before = settings.setdefault(name, now)  # that of args.json, if the run is resumed
            if name == "code" and digest(before) != digest(now):
                say(f"the code has changed since the run began: {before} | {now}")
                settings[name] = f"{before} | {now}"
            elif name != "code" and before != now:
                raise Mistake(f"{out}: {name} has changed since the run began: {before}, {now}")
        replace_file(begun / "args.json", json.dumps(settings, indent=1).encode())
        if begun != out:
            begun.rename(out)
        for name in ("log.csv", "evals.csv", "rollouts.jsonl"):
            cut_back(out / name, done)
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
        raise Mistake(f"{path} has only {rows} steps, but the checkpoint is of step {done}")
    if path.exists():
        os.truncate(path, kept)


def add_row(path, row):
    """Append a row, {column: value}, to a table of the run (with several GPUs, the first rank)."""
    if sharded.RANK:
        return
    with open(path, "a+", newline="") as file:
        file.seek(0)
        header, writer = next(csv.reader(file), None), csv.DictWriter(file, row)
        if not header:
            writer.writeheader()
        elif header != list(row):  # the code has changed since the run began
            raise Mistake(f"{path} has other columns than a row of step {row['step']}")
        writer.writerow(row)


def add_rollouts(path, step, rollouts):
    """Append the records of a step's rollouts (with several GPUs, the first rank)."""
    if sharded.RANK == 0:
        append(path, ({"step": step, **record_of(rollout)} for rollout in rollouts))


# ----------------------------------------------------------------------------------- checkpoints
def save(args, policy, optimizer, step):
    """Write step-N/, and delete checkpoints that are no longer needed."""
    out, folder, beside = Path(args.out), Path(args.out, f"step-{step}"), Path(args.out, "writing")
    if folder in checkpoints(out):
        return
    if sharded.RANK == 0:
        shutil.rmtree(beside, ignore_errors=True)
        local.save(policy.model, policy.tokenizer, beside)
        settings = {name: getattr(args, name) for name in CHECKPOINT_SETTINGS}
        (beside / "train.json").write_text(json.dumps(settings, indent=1))
    sharded.wait()
    state = {"ranks": sharded.WORLD, "step": step, "state": optimizer.state_dict()}
    torch.save(state, beside / f"trainer-{sharded.RANK}.pt")
    sharded.wait()
    if sharded.RANK == 0:
        for path in [*beside.iterdir(), beside, *out.glob("*.*")]:  # and the logs up to here
            sync(path)
        if folder.exists():  # without trainer-R.pt, of a run that then went on from an earlier step
            shutil.rmtree(folder)
        beside.rename(folder)
        sync(out)
        forget_old(out, args.keep)
    sharded.wait()


def refuse_small_disk(args, model, optimizer):
    """Mistake if the checkpoints of the run will not fit on the disk. Saving the first one is no
    test: it has no moments yet."""
    out = Path(args.out).absolute()
    weights = sum(w.numel() * w.itemsize for w in model.parameters() if w.requires_grad)
    state = sum(sharded.exchanged(optimizer.size()))
    steps = args.rehearse["steps"] if args.rehearse else args.steps
    number = steps + 1 if args.minutes else steps // args.every + 2  # with the first, and the last
    if args.keep:  # one is written before an older one is deleted
        number = min(number, args.keep + 1)
    needed = number * (weights + state) + weights  # the best one keeps its weights
    there = [file for folder in (*step_folders(out), out / "writing") for file in folder.glob("*")]
    disk = next(folder for folder in (out, *out.parents) if folder.exists())
    room = shutil.disk_usage(disk).free + sum(file.stat().st_size for file in there)
    if room < needed:
        why = f"need {needed / 1e9:.1f} GB, and there is room for {room / 1e9:.1f}"
        raise Mistake(f"checkpoints in {args.out} {why}: make room, or give another --out")


def sync(path):
    """Wait until a file or a folder is on the disk."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def forget_old(out, keep):
    """Delete all but the newest `keep` checkpoints; of the best one, only what --resume needs."""
    for folder in {*step_folders(out)} - {*checkpoints(out)[-keep:]} if keep else ():
        if folder.resolve() == (out / "best").resolve():
            for file in folder.glob("trainer-*.pt"):
                file.unlink()
        else:
            shutil.rmtree(folder)


def mark_best(out, keep):
    """Let `best` point to the checkpoint with the highest accuracy on --valid, of equals the first.
    There is none while the untrained planner, of step 0, has not been beaten. (One that was deleted
    for a later one, which was damaged since, is gone.)"""
    rows = [row for row in rows_of(Path(out, "evals.csv")) if row["questions"] == "valid"]
    accuracy = {int(row["step"]): float(row["accuracy"]) for row in rows}
    there = {0, *map(step_of, step_folders(out))}
    accuracy = {step: value for step, value in accuracy.items() if step in there}
    step = max(accuracy, key=accuracy.get, default=0)
    if sharded.RANK == 0 and step:
        beside = Path(out, "best.new")
        beside.unlink(missing_ok=True)
        beside.symlink_to(f"step-{step}")
        beside.rename(Path(out, "best"))
        sync(out)
        forget_old(Path(out), keep)


def step_folders(run):
    """The step-N folders, the oldest first. Others, such as step-40-merged, are not ours."""
    folders = Path(run).glob("step-*")
    return sorted((f for f in folders if re.fullmatch(r"step-\d+", f.name)), key=step_of)


def checkpoints(run):
    """The step-N folders that --resume can go on from, the oldest first."""
    return [folder for folder in step_folders(run) if (folder / "trainer-0.pt").exists()]


def last_checkpoint(run):
    """The checkpoint to go on from; None if the run was stopped before its first one."""
    return (checkpoints(run) or [None])[-1]


def step_of(checkpoint):
    """The step that a checkpoint was written after; 0 if there is none."""
    return int(checkpoint.name.removeprefix("step-")) if checkpoint else 0


def restore(checkpoint, optimizer):
    """Give the optimiser its masters and moments back, exactly, whatever number of ranks saved
    them."""
    ranks, states = len([*checkpoint.glob("trainer-*.pt")]), []
    other = ranks != sharded.WORLD
    for rank in range(ranks) if other else [sharded.RANK]:
        file = checkpoint / f"trainer-{rank}.pt"
        try:
            # mmap: masters and moments are copied from the file one by one, or a host that has
            # room for them once would not have it for a resume
            saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            written, step, state = (saved[name] for name in ("ranks", "step", "state"))
        except DAMAGED as why:
            what = f"{type(why).__name__}: {' '.join(str(why).split())}"  # or memory has run out
            cure = f"if so, move {checkpoint} away, and --resume goes on from the one before"
            raise Mistake(f"{file} may be damaged ({what}): {cure}") from why
        if written != ranks:
            raise Mistake(f"{checkpoint} has {ranks} of {written} files trainer-R.pt")
        if step != step_of(checkpoint):
            raise Mistake(f"{file} is of step {step}")
        states.append(state)
    try:
        state = sharded.divided(states, optimizer.weights) if other else states[0]
        optimizer.load_state_dict(state)
    except DAMAGED as why:
        raise Mistake(f"{file} does not fit this model: {why}") from why
