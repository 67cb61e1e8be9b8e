"""A run's folder: what a training leaves behind, and how it goes on after whatever ended it.

    args.json        the settings, for --resume
    log.csv, evals.csv, rollouts.jsonl      see log.py
    step-N/, best/   checkpoints: ordinary save_pretrained folders, with train.json (how each was made),
                     trainer.pt (for --resume; not in best/) and, with --lora, adapters/ (adapters.py)

A checkpoint is written beside and renamed when it is whole (files.py), so that neither a kill nor a full disk
damages the checkpoint before it.
"""
import json
import pickle
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from scale import ranks
from scale.command_line import TAKEN
from scale.files import replace_file, replace_folder


def open_folder(args):
    """Make the run's folder with its args.json; on --resume rewrite args.json, since --steps may be new."""
    if ranks.RANK == 0 and args.resume:
        write_settings(args, Path(args.out))
    elif ranks.RANK == 0:
        new_folder(args, Path(args.out))
    ranks.wait()


def new_folder(args, folder):
    """A kill leaves no folder, or one to resume. ValueError with a sentence if it exists or can't be made."""
    beside = folder.with_name(f"{folder.name}.writing")
    try:
        beside.mkdir(parents=True, exist_ok=True)  # a kill may have left one
        write_settings(args, beside)
        beside.rename(folder)  # not replace_folder(): a run that exists must stay
    except OSError as why:
        cannot = f"{folder} can't be made ({why.strerror}): give another --out"
        raise ValueError(TAKEN.format(folder) if folder.exists() else cannot) from why


def write_settings(args, folder):
    replace_file(folder / "args.json", json.dumps(vars(args), indent=1, default=str))


def save(folder, policy, optimizer, step, best, args):
    """A checkpoint: save_pretrained, how it was made (train.json, for solve.py), and the trainer's state for
    --resume. best/ is saved without that state (optimizer None): it is most of the bytes, and nothing resumes
    from best/."""
    state = optimizer and ranks.state_of(optimizer)

    def write(path):
        policy.save(path)
        names = "fixed", "executor", "verifier", "generator", "tools", "corpus"
        settings = {name: getattr(args, name) for name in names} | {"step": step}
        (path / "train.json").write_text(json.dumps(settings, indent=1))
        if optimizer:
            torch.save({"step": step, "best": best, "optimizer": state}, path / "trainer.pt")
        for file in path.rglob("*"):  # safetensors lets nobody else read its files, whatever the umask
            if file.is_file():
                file.chmod((path / "train.json").stat().st_mode & 0o777)

    try:
        if ranks.RANK == 0:
            replace_folder(folder, write)
    except (OSError, RuntimeError, SafetensorError) as why:  # all three are raised when a disk is full
        why = str(why).partition("\n")[0]
        raise SystemExit(f"train.py: could not save {folder} ({why}); the last checkpoint is untouched. "
                         "Free some disk, then --resume.")
    ranks.wait()


def forget(run, number):
    """Remove all but the newest checkpoints; never best/."""
    if number and ranks.RANK == 0:
        for folder in checkpoints(run)[:-number]:
            shutil.rmtree(folder, ignore_errors=True)


def checkpoints(run):
    """The whole step-N folders of a run, the oldest first."""
    steps = [folder for folder in Path(run).glob("step-*")
             if (folder / "trainer.pt").exists() and folder.name[5:].isdigit()]
    return sorted(steps, key=lambda folder: int(folder.name[5:]))


def last_checkpoint(run):
    """The checkpoint to resume from, or None: a run that was stopped before its first one begins anew."""
    found = checkpoints(run)
    return found[-1] if found else None


def load_state(checkpoint):
    """trainer.pt; ValueError if it is damaged; None without a checkpoint."""
    try:  # mmap: the host's memory holds it once, not once for each process
        return checkpoint and torch.load(checkpoint / "trainer.pt", map_location="cpu", mmap=True)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as why:
        sentence = f"{checkpoint} is damaged: remove it, then --resume goes on from the one before"
        raise ValueError(sentence) from why
