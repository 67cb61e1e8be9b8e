"""The names of models and files as a run and a checkpoint keep them, so that they can be moved and passed on.

    portable("/home/me/nano/toy", "runs/toy-seed0/best")     "./toy": in this repository, wherever it is
    portable("/data/base", "/data/run/best")                 "../../base": from the checkpoint's folder
    portable("/home/me/models/base", "runs/a/best")          "~/models/base"
    portable("/mnt/base", "runs/a/best")                     "/mnt/base": nothing else finds it
    located("./toy", "runs/toy-seed0/best")                  the absolute path again

Names on the hub and addresses of servers stay unchanged. The form is the one that survives most moves (of a
clone, of a checkpoint to another clone, of run and model together), and it reveals as little as possible
about the machine.
"""
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The settings that name models. --fixed plays all modules but the planner, unless one has a model of its own.
MODULES = ("fixed", "executor", "verifier", "generator", "base_generator")
SETTINGS = ("model", *MODULES, "judge", "data", "valid", "test", "corpus", "cache")  # those that can be paths


def portable(name, folder):
    """The name of an existing path, for a file in this folder."""
    if name in (None, "none") or not os.path.exists(os.path.expanduser(name)):
        return name
    path, folder, home = Path(name).expanduser().resolve(), Path(folder).resolve(), Path.home().resolve()
    shared = Path(os.path.commonpath([path, folder]))
    if path.is_relative_to(ROOT):
        return f"./{path.relative_to(ROOT)}"
    if shared == folder:
        return f"../{folder.name}/{path.relative_to(folder)}"
    if shared not in (home, Path(shared.anchor)):
        return os.path.relpath(path, folder)
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def located(name, folder):
    """The path that portable() has named; any other name unchanged."""
    if not isinstance(name, str) or not name.startswith(("./", "../", "~/")):
        return name
    start = {".": ROOT, "..": Path(folder), "~": Path.home()}[name.partition("/")[0]]
    return str((start / (name if name.startswith("..") else name[2:])).resolve())


def missing(name):
    """True for the path of something that is gone. A name on the hub is not a path."""
    return isinstance(name, str) and os.path.isabs(name) and not os.path.exists(name)


def all_portable(settings, folder):
    """The settings, with the portable form of each path."""
    return settings | {name: portable(settings[name], folder) for name in SETTINGS if name in settings}


def all_located(settings, folder):
    return settings | {name: located(settings[name], folder) for name in SETTINGS if name in settings}
