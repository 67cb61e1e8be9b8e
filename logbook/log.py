"""What a training run writes about itself: three files and an aligned line for each step.

    log.csv          a row for each step
    evals.csv        a row for each evaluation on --valid or --test
    rollouts.jsonl   each rollout of each step, with the text of every module

The two tables hold no times, so the same seed gives the same tables, byte for byte.
"""
import csv
import json
import os
import re
import signal
from pathlib import Path

from logbook.endings import no_more_output
from logbook.records import record_of
from rewards.metrics import summary
from scale import ranks
from world.files import check_own, reading
from world.text import printable

# The first columns of log.csv
FIRST = "step reward right turns errors flat groups failed undecided plan_tokens".split()
# The metrics of flow_grpo.update() that log.csv holds
COLUMNS = "kl clip entropy ratio_min ratio_max sampling_gap grad_norm skipped halved loss".split()
# How a row of the three files begins: 3,0.5 or 3,test,0.97 or {"step": 3, "id"
ROW = re.compile(rb'(?:\{"step": )?(\d+),')


def say(text):
    """Print a line, unless it is empty. With several GPUs, only rank 0 prints.

    Control characters are escaped: the text may hold what a model, a server or a data set wrote. If nobody
    can read the lines any more, a run ends as after SIGTERM, with a checkpoint."""
    if text and ranks.RANK == 0:
        try:
            print(printable(text), flush=True)
        except OSError as why:  # `| head` has ended, the terminal is closed, the disk is full
            no_more_output(why)
            signal.raise_signal(signal.SIGTERM)


def columns(tools):
    """The columns of log.csv, in the order of step_row()."""
    return FIRST + COLUMNS + [f"{name}{part}" for name in [*tools, "unreadable"] for part in ("", "_errors")]


def step_row(step, rollouts, usable, groups, flat, metrics, tools):
    """The row of log.csv. usable: the rollouts with an outcome. groups: the group of each of these. flat: how
    many groups were flat. metrics: what update() returned."""
    found = summary(rollouts)
    plans = [len(plan.ids) for rollout in usable for plan in rollout.plans]
    row = {
        "step": step,
        "reward": sum(rollout.reward for rollout in usable) / max(1, len(usable)),
        "right": sum(rollout.right for rollout in usable) / max(1, len(usable)),
        "turns": found["turns"], "errors": found["errors"],
        "flat": flat, "groups": len(set(groups)),
        "failed": found["failed"], "undecided": found["undecided"],
        "plan_tokens": sum(plans) / max(1, len(plans)),
    }
    row |= {name: metrics[name] for name in COLUMNS}
    for name in [*tools, "unreadable"]:
        row[name], row[f"{name}_errors"], _ = found["calls"].get(name, (0, 0, 0.0))
    return row


def step_line(row, steps, rollout_seconds, update_seconds):
    """The aligned line of a step: the reward first, then what can go wrong, then the seconds."""
    line = f"step {row['step']:3d}/{steps} | reward {row['reward']:.2f}"
    if row["right"] != row["reward"]:  # a reward of your own
        line += f" | right {row['right']:4.0%}"
    line += f" | turns {row['turns']:.2f} | errors {row['errors']:4.0%}"
    line += f" | flat groups {row['flat']:2d}/{row['groups']}"
    line += f" | kl {row['kl']:.4f} | clip {row['clip']:4.1%}"
    line += f" | {rollout_seconds:.1f}s + {update_seconds:.1f}s"
    line += "".join(f" | {name} {row[name]}" for name in ("failed", "undecided") if row[name])
    return line + (f" | skipped updates {row['skipped']:.0f}" if row["skipped"] else "")


def stays(line, step):
    """Does this row belong to the model of the checkpoint of `step`? A run from step 0 writes all rows anew,
    also the evaluation before step 1."""
    found = ROW.match(line)
    if not found:
        raise ValueError("a row does not begin with its step")
    return step > 0 and int(found[1]) <= step


class Log:
    """The three files. With several GPUs, rank 0 alone writes them.

    A run that was killed may have written rows after its last checkpoint. When it is resumed, these rows are
    dropped: their steps are run again, and give the same rows. ValueError if a file is damaged."""

    def __init__(self, folder, step, headers=None):
        """step: of the checkpoint to resume from; 0 for a new run. headers: {"log.csv": its columns, ...}, to
        check that the files belong to this code."""
        self.folder, self.headers = Path(folder), headers

        for name in ("log.csv", "evals.csv", "rollouts.jsonl"):
            self.cut_back(name, step)

    def cut_back(self, name, step):
        """Cut a file off behind the last row that stays, and half a line that a crash has left."""
        path, end = self.folder / name, 0
        if ranks.RANK == 0:
            check_own(path)  # rows are added to it
        if ranks.RANK or not path.exists():
            return
        with reading(path, "move it away, and --resume begins a new one"), open(path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if end == 0 and path.suffix == ".csv":
                    if self.headers and line.decode().strip().split(",") != self.headers[name]:
                        raise ValueError("its columns are not those of this code")
                elif not stays(line, step):
                    break
                end += len(line)
        os.truncate(path, end)

    def evaluated(self, name, step):
        """True if evals.csv has the evaluation on this set after this step. Rank 0 answers for all ranks."""
        path = self.folder / "evals.csv"
        lines = path.read_text().splitlines() if ranks.RANK == 0 and path.exists() else []
        return ranks.any_rank(any(line.startswith(f"{step},{name},") for line in lines))

    def add_row(self, name, row):
        """Append a row, {column: value}, to a table; a new table begins with its header."""
        if ranks.RANK:
            return
        path = self.folder / name
        first = not path.exists() or path.stat().st_size == 0
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if first:
                writer.writeheader()
            writer.writerow(row)

    def add_rollouts(self, step, rollouts):
        if ranks.RANK:
            return
        path = self.folder / "rollouts.jsonl"
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:  # a lone surrogate
            for rollout in rollouts:
                file.write(json.dumps({"step": step, **record_of(rollout)}, ensure_ascii=False) + "\n")
