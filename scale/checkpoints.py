"""A run's folder: what a training leaves behind, and how it goes on after whatever ended it.

    args.json        the settings, for --resume
    log.csv          a row a step; evals.csv: a row for each marking of --valid and --test; no times, so that a seed gives one log
    rollouts.jsonl   every word of every training flow
    step-N/, best/   checkpoints: ordinary save_pretrained folders, with train.json (how it was made), trainer.pt
                     (for --resume; not in best/) and, of --lora, adapters/ (lora.py)

A checkpoint is written into a folder beside and renamed when it is whole, so that neither a kill nor a full disk can damage the one
before. After a kill the log may be ahead of the last checkpoint: what came after it is dropped and made again, the same.
"""

import json
import pickle
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from scale import ranks
from scale.command_line import TAKEN


def new_folder(args):
    """Make the run's folder with its args.json, in one rename: a kill leaves no folder, or one to resume.
    ValueError with a sentence if it exists or can't be made."""
    out = Path(args.out)
    beside = out.with_name(out.name + ".writing")
    try:
        beside.mkdir(parents=True, exist_ok=True)  # a kill may have left one
        write_settings(args, beside)
        beside.rename(out)
    except OSError as why:
        cannot = f"{out} can't be made ({why.strerror}): give another --out"
        raise ValueError(TAKEN.format(out) if out.exists() else cannot) from why


def write_folder(folder, write):
    """write(path) into a folder beside, then rename: whatever goes wrong while writing, the folder that was there survives."""
    beside, old = folder.with_name(folder.name + ".writing"), folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():  # a crash fell between the two renames below
        old.rename(folder)
    for leftover in (beside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        write(beside)
        if folder.exists():
            folder.rename(old)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def write_settings(args, folder):
    """args.json, whole or not at all."""
    beside = folder / "args.json.writing"
    beside.write_text(json.dumps(vars(args), indent=1, default=str))
    beside.replace(folder / "args.json")


def save(folder, policy, optimizer, step, best, args):
    """A checkpoint: save_pretrained, how it was made (train.json, for solve.py), and the trainer's state for
    --resume. best/ is saved without that state (optimizer None): it is most of the bytes, and nothing resumes
    from best/."""
    whole = optimizer and ranks.state_of(optimizer)

    def write(path):
        policy.save(path)
        flow = {name: getattr(args, name) for name in ("fixed", "executor", "verifier", "generator", "tools", "corpus")}
        (path / "train.json").write_text(json.dumps(flow | {"step": step}, indent=1))
        if optimizer:
            torch.save({"step": step, "best": best, "optimizer": whole}, path / "trainer.pt")
        for file in path.rglob("*"):  # safetensors lets nobody else read its files, whatever the umask
            if file.is_file():
                file.chmod((path / "train.json").stat().st_mode & 0o777)

    try:
        if ranks.RANK == 0:
            write_folder(folder, write)
    except (OSError, RuntimeError, SafetensorError) as why:  # what Python, torch.save and safetensors make of a full disk
        why = str(why).partition("\n")[0]
        raise SystemExit(f"train.py: could not save {folder} ({why}); the last checkpoint is untouched. Free some disk, then --resume.")
    ranks.wait()


def forget(run, number):
    """Remove all but the newest checkpoints; never best/."""
    if number and ranks.RANK == 0:
        for folder in checkpoints(run)[:-number]:
            shutil.rmtree(folder, ignore_errors=True)


def checkpoints(run):
    """The whole step-N folders of a run, the oldest first."""
    steps = [folder for folder in Path(run).glob("step-*") if (folder / "trainer.pt").exists() and folder.name[5:].isdigit()]
    return sorted(steps, key=lambda folder: int(folder.name[5:]))


def load_state(checkpoint):
    """trainer.pt; ValueError if it is damaged."""
    try:
        return torch.load(checkpoint / "trainer.pt", map_location="cpu", mmap=True)  # mmap: not once for each process
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as why:
        raise ValueError(f"{checkpoint} is damaged: remove it, then --resume goes on from the one before") from why
