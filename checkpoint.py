"""A run's folder: what a training leaves behind, and how it goes on after whatever ended it.

    args.json        the settings, for --resume
    log.csv          a row a step; evals.csv: a row for each marking of --valid and --test; no times, so that a seed gives one log
    rollouts.jsonl   every word of every training flow
    step-N/, best/   checkpoints: ordinary save_pretrained folders, with train.json (how it was made), trainer.pt
                     (for --resume; not in best/) and, of --lora, adapters/ (lora.py)

A checkpoint is written into a folder beside and renamed when it is whole, so that neither a kill nor a full disk can damage the one
before. After a kill the log may be ahead of the last checkpoint: what came after it is dropped and made again, the same.
"""
import csv
import json
import pickle
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

import parallel
from settings import TAKEN

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
    whole = optimizer and parallel.state_of(optimizer)

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
        if parallel.RANK == 0:
            write_folder(folder, write)
    except (OSError, RuntimeError, SafetensorError) as why:  # what Python, torch.save and safetensors make of a full disk
        why = str(why).partition("\n")[0]
        raise SystemExit(f"train.py: could not save {folder} ({why}); the last checkpoint is untouched. Free some disk, then --resume.")
    parallel.wait()


def forget(run, number):
    """Remove all but the newest checkpoints; never best/."""
    if number and parallel.RANK == 0:
        for folder in checkpoints(run)[:-number]:
            shutil.rmtree(folder, ignore_errors=True)


def checkpoints(run):
    """The whole step-N folders of a run, the oldest first."""
    steps = [folder for folder in Path(run).glob("step-*") if (folder / "trainer.pt").exists() and folder.name[5:].isdigit()]
    return sorted(steps, key=lambda folder: int(folder.name[5:]))


class Log:
    """log.csv, evals.csv and rollouts.jsonl. On resuming, what came after the checkpoint is dropped: it will be made again."""

    def __init__(self, run, step):
        self.run = Path(run)
        if parallel.RANK:
            return
        before = {
            "log.csv": lambda line: int(line.split(",")[0]) <= step,
            # The first evaluation comes before step 1, the last test after the last checkpoint: both are made again.
            "evals.csv": lambda line: int(line.split(",")[0]) < step + (step > 0 and ",test," not in line),
            "rollouts.jsonl": lambda line: json.loads(line)["step"] <= step,
        }
        for name, keep in before.items():
            path, beside = self.run / name, self.run / f"{name}.writing"
            if path.exists():
                with open(path, encoding="utf-8", newline="") as old, open(beside, "w", encoding="utf-8", newline="") as new:
                    whole = (line for line in old if line.endswith("\n"))  # a crash may have left half a line
                    new.writelines(line for line in whole if line.startswith("step,") or keep(line))
                beside.rename(path)

    def marked(self, step):
        """Have the validation questions been marked after this step? Rank 0 knows for all."""
        path = self.run / "evals.csv"
        lines = path.read_text().splitlines() if parallel.RANK == 0 and path.exists() else []
        return parallel.any_rank(any(line.startswith(f"{step},valid,") for line in lines))

    def row(self, name, row):
        if parallel.RANK:
            return
        path = self.run / name
        first = not path.exists() or path.stat().st_size == 0
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if first:
                writer.writeheader()
            writer.writerow(row)

    def flows(self, step, flows):
        if parallel.RANK:
            return
        with open(self.run / "rollouts.jsonl", "a", encoding="utf-8", errors="backslashreplace") as file:  # \ud800 is JSON
            file.writelines(json.dumps({"step": step, **flow.record()}, ensure_ascii=False) + "\n" for flow in flows)


def load_state(checkpoint):
    """trainer.pt; ValueError if it is damaged."""
    try:
        return torch.load(checkpoint / "trainer.pt", map_location="cpu", mmap=True)  # mmap: not once for each process
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as why:
        raise ValueError(f"{checkpoint} is damaged: remove it, then --resume goes on from the one before") from why
