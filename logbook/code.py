"""Which code made a run: its commit, kept in args.json, and whether files were changed since then.

"-dirty-1a2b3c4d" says that they were, and how a hash of the changes begins: so two variants differ. What was
changed, and files that git does not know, are not recorded: commit a variant before you train it.
"""
import hashlib
import subprocess

from world.places import ROOT


def git(*words):
    """What git prints about this folder; "" if there is no git, or if it refuses."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True)
    except OSError:
        return ""
    # a diff may hold any bytes
    return done.stdout.decode(errors="surrogateescape").strip() if done.returncode == 0 else ""


def present():
    """The commit of the code that runs now; None if it is in no git repository of its own."""
    if git("rev-parse", "--show-toplevel") != str(ROOT):  # a copy of the code in another repository
        return None
    commit = git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    if commit.endswith("-dirty"):
        changes = git("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
        commit += f"-{hashlib.sha256(changes.encode(errors='surrogateescape')).hexdigest()[:8]}"
    return commit or None


def with_present(records, step):
    """The records of a run, with that of the present code if it is another: it makes the run after `step`."""
    now = {"after step": step, "commit": present()}
    return records if records and records[-1]["commit"] == now["commit"] else [*records, now]
