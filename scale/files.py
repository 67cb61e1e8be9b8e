"""The files of a run and of a checkpoint: replaced in one step, read with care, used by one process.

A folder is replaced in one step, as world/files.py replaces a file: after a kill or on a full disk, the old
or the new one is complete. The new one is written beside it under another name, and renamed when it is
complete.

What is read may have been damaged by a disk, changed by an editor, or written by somebody else. Everything
that is read goes through reading(), which makes one sentence of whatever is wrong with it.
"""
import errno
import fcntl
import json
import os
import pickle
import re
import shutil
import sys
from contextlib import contextmanager

from safetensors import SafetensorError

from world.files import check_file
from world.text import printable, truncate

# What Python, torch and safetensors raise for content of another shape.
WRONG = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError, RuntimeError,
         pickle.UnpicklingError, SafetensorError)
DAMAGED = "{} is damaged: remove it, then --resume goes on from the one before"  # a checkpoint
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # of a file system without flock


@contextmanager
def reading(path, advice):
    """What goes wrong while this file is read becomes one ValueError: the file, the reason, what to do."""
    try:
        yield
    except WRONG as why:
        text = getattr(why, "strerror", None) or (str(why).strip() or type(why).__name__).splitlines()[0]
        if not isinstance(why, (OSError, ValueError)):  # str(KeyError("seed")) is "'seed'"
            text = f"{type(why).__name__}: {text}"
        raise ValueError(f"{path} cannot be used ({truncate(printable(text), 200)}): {advice}") from why


def check_own(path):
    """ValueError if this is not a file of its folder. A folder that somebody else made may hold a link: what
    is written to it would reach any file of ours."""
    if os.path.islink(path):
        raise ValueError(f"{path} is a link to another place, which is not written to: remove it")
    check_file(path)


def read_object(path):
    """The JSON object in a file. To be called within reading()."""
    check_file(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError("it holds no JSON object")
    return data


LOCKS = []  # the file descriptors of this process's locks, open until it ends


def lock(folder, script):
    """Take a folder for this process, until it ends: the kernel releases the lock, also after a kill.

    ValueError if another process has it. Some network file systems have no locks; there a run must go on all
    the same, so the user is only warned. With several GPUs, rank 0 has the lock for all."""
    if os.environ.get("RANK", "0") != "0":
        return
    check_own(folder / "lock")
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    if any(os.path.samestat(os.fstat(file), os.fstat(other)) for other in LOCKS):
        os.close(file)
        return  # ours already
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as why:
        process = re.sub(r"\D", "", os.read(file, 20).decode("ascii", "replace")) or "?"
        os.close(file)
        raise ValueError(f"{folder} is in use by another process ({process}): wait until that has ended, "
                         "or stop it") from why
    except OSError as why:
        if why.errno not in NO_LOCKS:
            raise
        print(f"{script}: the file system of {folder} has no locks: see to it yourself that no other process "
              "uses this folder", file=sys.stderr)
    os.ftruncate(file, 0)
    os.write(file, str(os.getpid()).encode())
    LOCKS.append(file)


def folder_name(model):
    """A name for a folder of this model's answers: 'runs/toy-seed0/best' -> 'runs-toy-seed0-best'."""
    return re.sub(r"[^\w.]+", "-", model).strip("-")


def replace_folder(folder, write):
    """write(path) fills a new folder, which then replaces `folder`. If it fails, the old folder stays."""
    beside, old = folder.with_name(f"{folder.name}.writing"), folder.with_name(f"{folder.name}.old")
    if old.exists() and not folder.exists():  # a crash fell between the two renames below
        old.rename(folder)
    for leftover in (beside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        beside.mkdir()
        write(beside)
        if folder.exists():
            folder.rename(old)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
