"""Which code made a run: its commit and the changes since then, kept in args.json and settings.json.

    present()                  {"commit": "3a1b375...", "diff": "diff --git a/flow_grpo.py ..."}
    note(file)                 adds it to settings.json
    last(file)                 reads the last one of a file
    different("answers", first, second)      the lines of --compare, if the code of two runs differs

Two forks of one commit, or a commit and an edit of it, write the same settings: without this record, only the
folder's name would tell their runs apart. The diff is git's, of tracked files and new Python files, without
the documentation. Its paths are those in the repository, so it says nothing about the machine. A key that is
set in the environment becomes ***; any other secret that somebody wrote into the code stays in the record.
"""
import difflib
import hashlib
import json
import re
import subprocess

from world.files import read_object, reading, replace_file
from world.places import ROOT
from world.services import without_whole_keys

LIMIT = 200_000  # characters of a diff; a longer one is truncated, but its hash is that of the whole
FILES = "--", ".", ":!docs", ":!*.md"
DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/",
        *FILES)
SHOWN = 5  # files that a line names
ADVICE = 'mend its "code", or remove it'


def git(*words):
    """What git prints; None if there is no git, or if it refuses."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *words]
    try:
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=nothing) as process:
            printed = process.communicate()[0].decode("utf-8", "backslashreplace")
    except OSError:
        return None
    return None if process.returncode else printed


def present():
    """The record of the code that runs now."""
    top = git("rev-parse", "--show-toplevel", "HEAD")
    if top is None or top.splitlines()[0] != str(ROOT):  # a copy of the code inside another repository
        return {"commit": None, "diff": "unknown: this code is in no git repository of its own"}
    changes = [git(*DIFF) or ""]
    new = git("ls-files", "--others", "--exclude-standard", "-z", "--", "*.py") or ""
    for name in new.split("\0")[:-1]:
        if sum(map(len, changes)) > LIMIT:  # such as an environment that git does not ignore
            break
        changes.append(new_file(name))
    diff = without_whole_keys("".join(changes))
    record = {"commit": top.split()[-1], "diff": diff[:LIMIT]}
    return record | {"sha256": hashlib.sha256(diff.encode()).hexdigest()} if len(diff) > LIMIT else record


def new_file(name):
    """The diff of a file that git does not know yet."""
    try:
        lines = (ROOT / name).read_text(encoding="utf-8", errors="backslashreplace").splitlines(keepends=True)
    except OSError:  # a link to nowhere
        lines = []
    return f"diff --git a/{name} b/{name}\nnew file\n" + "".join(
        difflib.unified_diff([], lines, "/dev/null", f"b/{name}"))


def with_present(records, step):
    """The records of a run, with that of the present code if it is another: it makes the run after `step`."""
    now = present()
    if records and records[-1] | now == records[-1]:
        return records
    return [*records, {"after step": step, **now}]


def records_of(settings):
    """The records in a run's settings. ValueError if they have another shape."""
    records = settings.get("code") or []
    if not isinstance(records, list):
        raise ValueError("its code is no list")
    for record in records:
        if not (re.fullmatch("[0-9a-f]{40,64}", record["commit"] or 40 * "0")  # git gets it
                and isinstance(record["diff"], str)):
            raise ValueError("its code has another shape")
    return records


def note(file):
    """Add the record of the present code to the JSON object in a file of settings."""
    with reading(file, ADVICE):
        settings = read_object(file)
        records = with_present(records_of(settings), None)
    if records != settings.get("code"):
        replace_file(file, json.dumps(settings | {"code": records}, indent=1))


def last(file):
    """The last record in a file of settings; None without one. ValueError if it has another shape."""
    if not file.is_file():
        return None
    with reading(file, ADVICE):
        record = (records_of(read_object(file)) or [None])[-1]
    return record and {name: record.get(name) for name in ("commit", "diff", "sha256")}


def parts(record):
    """{file: its part of the diff}"""
    pieces = re.split(r"(?m)^(?=diff --git a/)", record["diff"])
    return {piece.partition(" b/")[0].removeprefix("diff --git a/"): piece for piece in pieces if piece}


def summary(record):
    """'3a1b375 with changes in flow_grpo.py (+3 -1), train.py (+1 -0)'"""
    if record["commit"] is None:
        return record["diff"]
    files = []
    for name, piece in parts(record).items():
        body = piece.partition("\n@@")[2]
        files.append(f"{name} (+{len(re.findall('(?m)^[+]', body))} -{len(re.findall('(?m)^-', body))})")
    shown = ", ".join(files[:SHOWN]) + (f" and {len(files) - SHOWN} more files" if len(files) > SHOWN else "")
    return record["commit"][:7] + (f" with changes in {shown}" if files else "")


def different(name, first, second):
    """Lines that say in which files the code of two runs differs; none if it is the same or was not recorded.

    name: of what the code did, "answers" or "training". first, second: what last() returned."""
    if not first or not second or first == second:
        return
    yield f"code of the {name} that differs, A | B: {summary(first)} | {summary(second)}"
    if None in (first["commit"], second["commit"]):
        return
    one, other = parts(first), parts(second)
    files = {file for file in one.keys() | other.keys() if one.get(file) != other.get(file)}
    if first["commit"] != second["commit"]:
        between = git("diff", "--name-only", "--no-ext-diff", first["commit"], second["commit"], *FILES)
        if between is None:
            yield "    this repository does not have both commits: what they change is not shown"
        files |= set((between or "").splitlines())
    yield f"    in {', '.join(sorted(files)[: 4 * SHOWN]) or 'no file of the code'}"
