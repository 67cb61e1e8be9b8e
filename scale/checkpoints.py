"""A run's folder: its settings and its checkpoints, from which --resume goes on.

    args.json        the settings, for --resume, and the code that made the run (code.py)
    lock             held by the process that trains (files.py)
    log.csv, evals.csv, rollouts.jsonl      see log.py
    step-N/, best/   checkpoints: ordinary save_pretrained folders, with train.json (modules and tools, for
                     solve.py), trainer.pt (for --resume; not in best/) and, with --lora, adapters/

A checkpoint is written under another name and renamed when it is complete (files.py): a kill or a full disk
never damages the one before it. Paths in args.json and train.json are portable (places.py).
"""
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from scale import code, places, ranks
from scale.batches import memory_errors
from scale.files import check_file, lock, reading, replace_file, replace_folder

DAMAGED = "{} is damaged: remove it, then --resume goes on from the one before"


def open_folder(args, step=0):
    """Make the run's folder with its args.json; on --resume rewrite args.json, since --steps may be new.

    step: of the checkpoint to resume from. A kill leaves no folder, or one to resume. ValueError if the
    folder can't be made, because another process has just made it, for example."""
    folder = Path(args.out)
    beside = folder if args.resume else folder.with_name(f"{folder.name}.writing")
    if ranks.RANK == 0:
        args.code = code.with_present(getattr(args, "code", []), step)
        settings = places.all_portable(vars(args), folder) | {"out": folder.name, "resume": None}
        try:
            beside.mkdir(parents=True, exist_ok=True)  # a kill may have left one
            lock(beside, "train.py")
            replace_file(beside / "args.json", json.dumps(settings, indent=1, default=str))
            beside.rename(folder)  # not replace_folder(): a run that exists must stay
        except OSError as why:
            if args.resume:
                raise
            raise ValueError(f"{folder} can't be made ({why.strerror}): give another --out") from why
    ranks.wait()


def save(folder, policy, optimizer, step, best, args):
    """Write a checkpoint. optimizer None: without trainer.pt. So is best/, because trainer.pt is most of the
    bytes, and nothing resumes from best/."""
    state = optimizer and ranks.state_of(optimizer)

    def write(path):
        with memory_errors("the checkpoint"):  # adapters are merged on the GPU
            policy.save(path)
        names = "fixed", "executor", "verifier", "generator", "tools", "corpus"
        settings = {name: getattr(args, name) for name in names} | {"step": step}
        settings = places.all_portable(settings, folder)
        (path / "train.json").write_text(json.dumps(settings, indent=1))
        if optimizer:
            torch.save({"step": step, "best": best, "optimizer": state}, path / "trainer.pt")
        for file in filter(Path.is_file, path.rglob("*")):  # safetensors ignores the umask
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
    """Remove all step-N/ but the newest `number`; None keeps all."""
    if number and ranks.RANK == 0:
        for folder in checkpoints(run)[:-number]:
            shutil.rmtree(folder, ignore_errors=True)


def checkpoints(run):
    """The complete step-N folders of a run, the oldest first."""
    steps = [folder for folder in Path(run).glob("step-*")
             if (folder / "trainer.pt").exists() and folder.name[5:].isdigit()]
    return sorted(steps, key=lambda folder: int(folder.name[5:]))


def last_checkpoint(run):
    """The checkpoint to resume from. None before a run's first one: then the run begins anew."""
    return (checkpoints(run) or [None])[-1]


def load_state(checkpoint):
    """trainer.pt: {"step", "best", "optimizer"}; ValueError if it is damaged; None without a checkpoint."""
    if not checkpoint:
        return None
    with reading(checkpoint / "trainer.pt", DAMAGED.format(checkpoint)):
        check_file(checkpoint / "trainer.pt")
        # mmap: the host's memory holds it once, not once for each process
        state = torch.load(checkpoint / "trainer.pt", map_location="cpu", mmap=True, weights_only=True)
        if state["step"] != int(checkpoint.name[5:]):
            raise ValueError(f"its step is {state['step']!r}")
        if math.isnan(state["best"]):
            raise ValueError("its best accuracy is not a number")
    return state


def check_state(state, weights, checkpoint):
    """ValueError if the optimizer's state in trainer.pt belongs to other weights than these."""
    with reading(checkpoint / "trainer.pt", DAMAGED.format(checkpoint)):
        if len(state["optimizer"]["param_groups"][0]["params"]) != len(weights):
            raise ValueError("it is the state of another number of weights")
        for i, tensors in state["optimizer"]["state"].items():
            shapes = {tuple(tensor.shape) for name, tensor in tensors.items() if name != "step"}
            if not {"step", "exp_avg", "exp_avg_sq"} <= tensors.keys():
                raise ValueError(f"the state of weight {i} is incomplete")
            if shapes != {tuple(weights[i].shape)}:
                raise ValueError(f"the state of weight {i} has another shape")
