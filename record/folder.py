"""A folder of results: used by one process at a time, and never by two experiments.

What a kill leaves half is cut off when the same command goes on. A folder knows what decides its
results (settings, code, weights, data), and a command that differs in one of them is refused.

solve.py --out has such a folder: settings.json, and the answers. That of a training run:
checkpoints.py."""

import contextlib
import csv
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from models.completion import is_server
from record.flags import read_settings
from record.rollouts import rollout_of
from world.mistakes import Mistake, refuse_link


def lock(folder):
    """Take a folder for this process until it ends. Mistake if another one has it."""
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends, however
    except BlockingIOError:
        raise Mistake(f"{folder} is in use by another process") from None


def refuse_links(folder):
    """Mistake if the folder holds a link, but for `best` and `best.new` (a kill can leave it)."""
    for path in folder.iterdir():
        if path.name not in ("best", "best.new"):
            refuse_link(path, "a run writes only into its own folder")


# --------------------------------------------------------------------------- what decides results
def version():
    """The commit of this code, with "-dirty" if files were changed since, and a digest of it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    top, found = Path(__file__).parents[1], ""
    with contextlib.suppress(OSError):  # there is no git
        found = subprocess.run(command, cwd=top, capture_output=True, text=True).stdout.strip()
    files = sorted([*top.glob("*.py"), *top.glob("*/*.py")])
    files = [file for file in files if file.parent.name not in ("tests", "docs", "bench")]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return f"{found}-{digest.hexdigest()[:12]}"


def digest(version):
    """Of a version: what counts, because a commit may change nothing that runs."""
    return str(version).rpartition("-")[2]


def identity(args, loaded, questions):
    """What decides the results besides the flags: the script, the code, the weights (or the name of
    a server's model), the corpus and the questions. loaded: {name: engine}. questions: {name of a
    set: [Question]}."""
    from models.local import fingerprint

    found = {"script": Path(sys.argv[0]).name, "code": version()}
    weights = {f"{e.name} {e.fingerprint}".strip() for e in loaded.values()}
    if not is_server(args.model):
        weights.add(f"{args.model} {fingerprint(args.model)}".strip())
    found["weights"] = sorted(weights)
    for name, some in questions.items():
        found[f"{name}_digest"] = hashlib.sha256(repr(some).encode()).hexdigest()[:12]
    if Path(args.corpus or "none").is_file():
        with open(args.corpus, "rb") as corpus:
            found["corpus_digest"] = hashlib.file_digest(corpus, "sha256").hexdigest()[:12]
    return found


# ------------------------------------------------------------------------------- files of a folder
def replace_file(path, content):
    """Write these bytes in one step: after a kill or a power cut, the file is old or new. Its
    folder is made if it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    beside = f"{path}.{os.getpid()}.part"  # two processes may write the same file
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def append(path, records):
    """Add records to a JSONL file; they are on the disk when this returns."""
    with open(path, "a", encoding="utf-8", errors="replace") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())


def rows_of(path):
    """The rows of a table, as {column: text}; none if there is no such file."""
    if not Path(path).exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------- solve.py --out
def open_answers(args, loaded, questions):
    """The folder of solve.py --out, new or with the same settings: the command goes on in it."""
    free = {"out", "quiet", "device", "cache", "benchmark", "benchmark_dir", "trials", "compare"}
    settings = {name: value for name, value in vars(args).items() if name not in free}
    settings |= identity(args, loaded, questions)
    folder, file = Path(args.out), Path(args.out, "settings.json")
    folder.mkdir(parents=True, exist_ok=True)
    refuse_links(folder)
    lock(folder)
    if not file.exists() and any(folder.glob("*.jsonl")):
        raise Mistake(f"{folder} holds answers, but no settings.json: give another --out")
    before = read_settings(file) if file.exists() else settings
    for name, now in settings.items():
        one_more = name.endswith("_digest") and name not in before  # another benchmark
        same = now == before.get(name) or name == "code" and digest(now) == digest(before.get(name))
        if not same and not one_more:
            other = f"another {name} ({before.get(name)})"
            raise Mistake(f"{folder} has rollouts with {other}: give another --out")
    replace_file(file, json.dumps(before | settings, indent=1).encode())
    return folder


def kept_rollouts(path, questions, batch):
    """The rollouts of the whole batches in a file; the rest, which a kill may leave, is cut off."""
    if not path or not path.exists():
        return []
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    if len(lines) < len(questions):
        lines = lines[: len(lines) // batch * batch]
    rollouts = [rollout_of(json.loads(line)) for line in lines]
    asked = [(question.question, question.answer) for question in questions[: len(lines)]]
    if [(rollout.question, rollout.gold) for rollout in rollouts] != asked:
        raise Mistake(f"{path} holds answers to other questions: give another --out")
    os.truncate(path, sum(map(len, lines)))
    return rollouts
