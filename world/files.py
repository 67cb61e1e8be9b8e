"""Files and folders: read with care, replaced in one step.

What is read may have been damaged by a disk, changed by an editor, or written by somebody else. reading()
turns whatever is wrong with it into one sentence.

A replacement is written under another name, and renamed when it is complete: after a kill or on a full disk,
either the old or the new one is whole.
"""
import json
import os
import pickle
import shutil
from contextlib import contextmanager

from safetensors import SafetensorError

from world.text import printable, truncate

# What Python, torch and safetensors raise for content of another shape.
WRONG = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError, RuntimeError,
         pickle.UnpicklingError, SafetensorError)


@contextmanager
def reading(path, advice):
    """Turns any error while this file is read into one ValueError: the file, the reason, what to do."""
    try:
        yield
    except WRONG as why:
        text = getattr(why, "strerror", None) or (str(why).strip() or type(why).__name__).splitlines()[0]
        if not isinstance(why, (OSError, ValueError)):  # str(KeyError("seed")) is "'seed'"
            text = f"{type(why).__name__}: {text}"
        raise ValueError(f"{path} cannot be used ({truncate(printable(text), 200)}): {advice}") from why


def check_file(path, advice=""):
    """ValueError for a pipe or a device, which would be read for ever. A file that is not there passes."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is not a regular file" + (f": {advice}" if advice else ""))


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


def replace_file(path, content):
    """Write a file in one step: after a kill or on a full disk, the old or the new content is complete.

    content: text, bytes, or an iterable of texts, which are written one by one.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.writing")  # two processes may write the same file
    try:
        beside.unlink(missing_ok=True)  # a kill may have left one
        with beside.open("xb") as file:  # not through a link
            for piece in [content] if isinstance(content, (str, bytes)) else content:
                file.write(piece if isinstance(piece, bytes) else piece.encode("utf-8"))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


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
