"""The rollouts of a run in its folder: written batch by batch, and read again.

A run of solve.py with --out has a folder with settings.json and the rollouts of each trial of each set of
questions, one JSON object a line: NAME-0.jsonl, NAME-1.jsonl, ... Such a run can be stopped at any time; the
same command continues in its folder.
"""

import dataclasses
import json
import os
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from models.completion import outage
from models.names import did_you_mean
from world.files import check_file, check_own, read_object, reading, replace_file

OTHER = "give another --out"


def run_folder(path, settings):
    """The folder of a new run, or of one with the same settings, which continues; else ValueError."""
    folder, file = Path(path), Path(path) / "settings.json"
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
        if folder.is_dir() and not any(folder.iterdir()):  # new, or a kill came before the settings
            replace_file(file, json.dumps(settings, indent=1))
    except OSError as why:
        raise ValueError(f"{path} can't be used ({why.strerror}): {OTHER}") from why
    if not file.exists():
        raise ValueError(f"{path} exists already and is not a folder that solve.py --out wrote: {OTHER}")
    with reading(file, OTHER):
        before = read_object(file)
    for name, value in settings.items():
        if value != before.get(name):
            flag = name if " " in name else f"--{name.replace('_', '-')} ({before.get(name)})"
            raise ValueError(f"{path} holds a run with another {flag}: give another --out")
    return folder


class Trial:
    """One trial of a set of questions: `rollouts` has the finished rollouts, in the order of the questions.

    batch: how many questions run together. path: the file that gets the rollouts, or None. A batch that was
    cut off is run again with the same seed, so the results are those of a run that was never stopped. (If its
    fast rollouts were kept and the slow ones sampled again, the results would be biased.)
    """

    def __init__(self, name, questions, batch, seed, path=None):
        self.name, self.questions, self.batch, self.seed, self.path = name, questions, batch, seed, path
        self.rollouts, self.again = [], False  # again: a server was down, so the batch runs once more

    def resume(self):
        """Take over the rollouts of the batches that were saved before the run was stopped."""
        records = saved_records(self.path, self.questions, self.batch) if self.path else []
        self.rollouts = [rollout_of(record) for record in records]
        for rollout, question in zip(self.rollouts, self.questions):
            rollout.question = question

    def batches(self):
        """(seed, questions) of each batch that is not finished. The seed depends on no other batch."""
        while len(self.rollouts) < len(self.questions):
            start = len(self.rollouts)
            yield self.seed * 1_000_003 + start, self.questions[start : start + self.batch]

    def save_unfinished(self, rollouts):
        """Write what the modules have written so far in the present batch, for people to read."""
        if self.path:
            replace_file(self.unfinished(), lines_of(rollouts).encode("utf-8", "backslashreplace"))

    def unfinished(self):
        return self.path.with_name(f"unfinished-{self.path.name}")

    def add(self, rollouts):
        """Save a finished batch and return True; or False if a server was down: then batches() repeats it.

        ValueError if the server was down for more than half of the batch the second time, too. A server that
        always fails at a single question does not end the run: that question counts as failed.
        """
        errors = [rollout.failed for rollout in rollouts if outage(rollout.failed)]
        if self.path and errors and not self.again:
            self.again = True
            return False
        if self.path and 2 * len(errors) > len(rollouts):
            raise ValueError(f"{len(errors)} of the {len(rollouts)} rollouts of a batch did not come to an "
                             f"end ({errors[0]}): fix that, then the same command goes on")
        self.rollouts, self.again = self.rollouts + rollouts, False
        if self.path:
            with open(self.path, "a", encoding="utf-8", errors="backslashreplace") as file:  # \ud800 is JSON
                file.write(lines_of(rollouts))
                file.flush()
                os.fsync(file.fileno())
            self.unfinished().unlink(missing_ok=True)
        return True


def lines_of(rollouts):
    return "".join(json.dumps(record_of(rollout), ensure_ascii=False) + "\n" for rollout in rollouts)


def record_of(rollout):
    """A rollout as data for JSON, without its token ids."""
    q = rollout.question
    data = {"id": q.id, "kind": q.kind, "question": q.question, "gold": q.answer, "answer": rollout.answer}
    data |= {"right": rollout.right, "reward": rollout.reward}
    data |= {"failed": rollout.failed, "undecided": rollout.undecided}
    data |= {"turns": len(rollout.plans), "seconds": round(rollout.seconds, 3)}
    return data | {"memory": dataclasses.asdict(rollout.memory), "words": rollout.outputs}


def saved_records(path, questions, batch):
    """The records of the whole batches in a file. Removes all other lines: a kill may leave half a line."""
    check_own(path)  # batches are added to it
    lines = whole_lines(path) if path.exists() else []
    lines = lines if len(lines) == len(questions) else lines[: len(lines) // batch * batch]
    with reading(path, OTHER):
        records = [json.loads(line) for line in lines]
        keys = [(record["question"], record["gold"]) for record in records]
    if keys != [(question.question, question.answer) for question in questions[: len(records)]]:
        raise ValueError(f"{path} holds answers to other questions: {OTHER}")
    replace_file(path, b"".join(lines))
    return records


def whole_lines(path):
    """The lines of a file; not half a line, which a kill may leave at its end."""
    check_file(path)
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def rollout_of(record):
    """What traces, metrics and comparisons need of the rollout that wrote this record: no actions."""
    steps = [SimpleNamespace(**step) for step in record["memory"]["steps"]]
    filled = SimpleNamespace(**record["memory"] | {"steps": steps})
    return SimpleNamespace(**record | {"memory": filled, "outputs": record["words"]})


# ------------------------------------------------------------------------------------- trials to be counted
def finished_trials(folder, name, number):
    """The rollouts of each trial of a set in a run's folder, also of earlier commands.

    An unfinished trial has fewer rollouts than the set's `number` of questions, and is left out.
    """
    trials = [read_trial(path) for path in sorted(folder.glob(f"{name}-*.jsonl"))]
    return [list(trial.values()) for trial in trials if len(trial) == number]


def read_answers(folder):
    """{name of a set: {(question, gold, its number among equal ones): rollouts, one a trial}} of a folder.

    Only whole trials count. ValueError if the folder has none.
    """
    sets = {}
    for path in sorted(Path(folder).glob("*.jsonl")):
        if found := re.fullmatch(r"(?!unfinished-)(.+)-\d+\.jsonl", path.name):
            sets.setdefault(found[1], []).append(read_trial(path))
    answers = {}
    for name, trials in sets.items():
        number = max(map(len, trials))  # a trial with fewer questions is unfinished
        whole = [trial for trial in trials if len(trial) == number]
        if number:
            answers[name] = {key: [trial[key] for trial in whole] for key in whole[0]}
    if not answers:
        raise ValueError(f"{folder} holds no answers: give a folder that solve.py --out wrote; "
                         f"two models need --data FILE.jsonl.{did_you_mean(folder)}")
    return answers


def read_trial(path):
    """{(question, gold, its number among equal ones): rollout} of a file, in its order."""
    rollouts, seen = {}, Counter()
    with reading(path, "give a folder that solve.py --out wrote"):
        for line in whole_lines(path):
            record = json.loads(line)
            question = record["question"], record["gold"]
            seen[question] += 1
            rollouts[(*question, seen[question])] = rollout_of(record)
    return rollouts
