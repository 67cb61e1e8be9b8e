"""Replace a file or a folder in one step: after a kill or on a full disk, the old or the new one is complete.

The new content is written under another name beside the old one, and renamed when it is complete.
"""
import os
import re
import shutil


def folder_name(model):
    """A name for a folder of this model's answers: 'runs/toy-seed0/best' -> 'runs-toy-seed0-best'."""
    return re.sub(r"[^\w.]+", "-", model).strip("-")


def replace_file(path, content):
    """content: text, bytes, or an iterable of texts, which are written one by one."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.writing")  # two processes may write the same file
    try:
        with beside.open("wb") as file:
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
