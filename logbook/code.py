"""Which code made a run: its commit and the changes since then, kept in args.json.

Two forks of one commit, or a commit and an edit of it, write the same settings: without this record, only the
folder's name would tell their runs apart. A key that is set in the environment becomes ***; any other secret
that somebody wrote into the code stays in the record.
"""
import subprocess

from world.places import ROOT
from world.services import without_whole_keys

LIMIT = 200_000  # characters of the changes; longer ones are truncated


def git(*words):
    """What git prints about this folder; "" if there is no git, or if it refuses."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.decode("utf-8", "backslashreplace")


def present():
    """The record of the code that runs now. Of files that are new to git it has the names alone."""
    if git("rev-parse", "--show-toplevel").strip() != str(ROOT):  # a copy of the code in another repository
        return {"commit": None, "changes": "unknown: this code is in no git repository of its own"}
    changes = git("status", "--short") + git("diff", "--no-ext-diff", "--no-color", "HEAD")
    return {"commit": git("rev-parse", "HEAD").strip(), "changes": without_whole_keys(changes)[:LIMIT]}


def with_present(records, step):
    """The records of a run, with that of the present code if it is another: it makes the run after `step`."""
    now = {"after step": step, **present()}
    return records if records and {**records[-1], "after step": step} == now else [*records, now]
