"""The runs of the study: one command each, in an edited copy of the code, made once, after the runs it needs.

An edit is a diff beside this file: edits/NAME.diff, or forks/NAME.diff, which `git apply` makes yours.

Runs stay in runs/study/. A folder's name holds a hash of its command and its edits, but not of the rest of
the code: remove runs/study after you change that. A run that was killed is begun anew, unless it has a
command that resumes it. Copies of the code are named after what is in them, so two processes share one.
"""

import csv
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "study"
NO_CODE = shutil.ignore_patterns(".*", "runs", "docs", "tests", "results", "__pycache__")
LOCK = threading.Lock()
PROGRAM = Path(sys.argv[0]).name  # study.py or smollm.py
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
STOPPED = {*(-number for number in SIGNALS), *(128 + number for number in SIGNALS)}  # exit codes


def path_of(edit):
    """"forks/rloo" -> .../experiments/forks/rloo.diff"""
    return ROOT / "experiments" / f"{edit}.diff"


def head_and_changes(edit):
    """The text before the diff, which `git apply` skips, and the diff."""
    return re.split(r"(?m)^(?=diff --git |--- )", path_of(edit).read_text(encoding="utf-8"), maxsplit=1)


def note(edit, name):
    """What the line `name: ...` of the head says: the source, the flags or the result of a fork."""
    return next(iter(re.findall(rf"(?m)^{name}: (.*)$", head_and_changes(edit)[0])), "")


@dataclass(frozen=True)
class Run:
    """One command in a copy of the code with `edits`; "{out}" in it is this run's folder, "{0}" after[0]'s.

    edits: names of diffs, which are applied in this order.

    rollouts: how many rollouts it costs, for the progress bar. resume: the command that goes on in the folder
    that a kill has left; (): the folder is removed, and the run begun anew.
    """

    name: str
    command: tuple
    edits: tuple = ()
    after: tuple = ()
    rollouts: int = 0
    resume: tuple = ()
    threads: int = 1

    @property
    def folder(self):
        changes = [head_and_changes(edit)[1] for edit in self.edits]
        parts = repr((self.command, changes, [run.folder.name for run in self.after]))
        return RUNS / f"{self.name}-{hashlib.sha256(parts.encode()).hexdigest()[:8]}"

    @property
    def finished(self):
        return (self.folder / "done").exists()

    def make(self):
        """Run the command unless it is finished; a folder that a kill has left incomplete is begun anew."""
        if self.finished:
            return
        begun = self.resume and self.folder.exists()
        if not begun:
            shutil.rmtree(self.folder, ignore_errors=True)
        words = self.resume if begun else self.command
        words = [word.format(*(run.folder for run in self.after), out=self.folder) for word in words]
        log = RUNS / f"{self.folder.name}.log"  # not with_suffix: there are dots in names
        with LOCK:
            code = edited(RUNS, self.edits)
        with open(log, "a" if begun else "w") as file:
            environment = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
            command = [sys.executable, *words]
            start = time.perf_counter()
            process = subprocess.Popen(command, cwd=code, env=environment, stdout=file, stderr=file)
            _, status, used = os.wait4(process.pid, 0)  # used: by the run and all its children
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode in STOPPED:
            raise SystemExit(f"{PROGRAM}: {self.name} was stopped; the same command goes on")
        if process.returncode:
            raise SystemExit(f"{PROGRAM}: {self.name} failed: {' '.join(words)}\n{log.read_text()[-2000:]}")
        cost = {"seconds": time.perf_counter() - start, "cpu_seconds": used.ru_utime + used.ru_stime}
        (self.folder / "done").write_text(json.dumps(cost))  # of the last part, if a kill came between


def as_flags(settings):
    """{"max-turns": 2, "dtype": None} -> ("--max-turns", "2")"""
    given = {key: value for key, value in settings.items() if value is not None}
    return tuple(word for key, value in given.items() for word in (f"--{key}", str(value)))


def copy_code(folder):
    """Make a copy of the code, without its tests; files other than Python's are links."""
    copy = lambda source, target: (shutil.copy if source.endswith(".py") else os.symlink)(source, target)
    shutil.copytree(ROOT, folder, copy_function=copy, ignore=NO_CODE)


def hash_of(folder):
    """A hash of the files in a copy of the code; of links, only their names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        content = b"" if path.is_symlink() else path.read_bytes()
        digest.update(repr((str(path.relative_to(folder)), content)).encode())
    return digest.hexdigest()[:8]


@functools.cache
def edited(runs, edits):
    """The folder of a copy of the code with the edits in it. It is never removed: a run may be at work there.

    Another process may make the same copy at the same time: each makes its own, the first one's stays."""
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="code-", suffix=".writing", dir=runs) as beside:
        made = Path(beside) / "code"
        copy_code(made)
        apply_edits(made, edits)
        folder = runs / f"code-{hash_of(made)}"
        try:
            made.rename(folder)
        except OSError:  # it is there already
            if not folder.is_dir():
                raise
    return folder


def apply_edits(folder, edits):
    """Apply the diffs to a copy of the code. SystemExit says which does not fit."""
    # If git saw the repository around the copy, it would skip diffs with a new file, and not say so.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    for edit in edits:
        command = ["git", "apply", path_of(edit)]
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"{PROGRAM}: {edit}.diff does not fit the code: {result.stderr.strip()}")


def with_forerunners(runs):
    """These runs and all that they need, each once, and none before those it needs."""
    needed = {}

    def add(run):
        for before in run.after:
            add(before)
        needed.setdefault(run.folder, run)

    for run in runs:
        add(run)
    return list(needed.values())


def make_all(runs, workers):
    """Make the runs, `workers` at a time, each after those it needs, with a bar that shows the time left."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C waits for the runs, which save
    needed = with_forerunners(runs)
    waiting, running = [run for run in needed if not run.finished], {}
    rollouts = sum(run.rollouts for run in waiting)
    print(f"{len(needed)} runs, {len(needed) - len(waiting)} of them finished already")
    with tqdm(total=rollouts, unit=" rollouts") as bar, ThreadPoolExecutor(workers) as pool:
        while waiting or running:
            ready = [run for run in waiting if all(before.finished for before in run.after)]
            for run in ready[: workers - len(running)]:
                waiting.remove(run)
                running[pool.submit(run.make)] = run
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
                future.result()
                bar.update(run.rollouts)
                bar.set_postfix_str(run.name)


# ------------------------------------------------------------------------------- what the runs have left
def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def rollouts_of(run, file="questions-0.jsonl"):
    with open(run.folder / file, encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def outcome(rollouts):
    """Accuracy, turns and tool-calling errors of these records, as rewards.metrics.summary() counts them."""
    rollouts = list(rollouts)
    steps = [step for rollout in rollouts for step in rollout["memory"]["steps"]]
    return {
        "accuracy": sum(rollout["right"] for rollout in rollouts) / len(rollouts),
        "turns": len(steps) / len(rollouts),
        "errors": sum(step["error"] for step in steps) / len(steps),
    }


def outcomes(name, runs, columns=("planner", "seed")):
    """An analysis of {(planner, seed): Run}: how each did on the questions it was tested on."""
    yield runs.values()
    yield name, [dict(zip(columns, key)) | outcome(rollouts_of(run)) for key, run in runs.items()]
