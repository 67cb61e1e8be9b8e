"""Mistake: what a user did wrong, as one sentence that says what to do.

solve.py and train.py print it and exit with an error. Every other exception keeps its traceback: it
is a bug, in this code or in a fork's."""

import os
import stat
import sys

from world.text import printable


class Mistake(ValueError):
    """One sentence for the user: what is wrong with a flag, a file or a folder, and what to do."""

    def __str__(self):
        return printable(super().__str__())


def drop_output():
    """Nobody reads stdout any more (`| head` has read enough): what is still unprinted is dropped.

    SIGPIPE's default would end us there, too, but also, without a word, when a worker of
    python_coder or a server closes its end of a pipe or a socket."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def refuse_link(path, why):
    """Mistake if this is a link, a hard one too: whoever made it would choose which file of ours is
    overwritten. Pipes and devices are refused as well. why: what a link would do, for the user."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode) and found.st_nlink == 1):
        raise Mistake(f"{path} is a link, and {why}: delete it")
