"""What a training run writes about itself: three files and an aligned line for each step.

    log.csv          a row for each step
    evals.csv        a row for each evaluation on --valid or --test
    rollouts.jsonl   each rollout of each step, with the text of every module; for one group of each step also
                     the log-ratios of its plans (ratios.py)

The two tables hold no times, so the same seed gives the same tables, byte for byte.
"""
import csv
import json
from pathlib import Path

from rewards.metrics import summary
from scale import ranks
from scale.endings import no_more_output
from scale.files import replace_file

# The numbers of flow_grpo.update() that log.csv holds, and their values in a step without an update.
COLUMNS = "kl clip entropy ratio_min ratio_max sampling_gap grad_norm skipped halved loss".split()
NO_UPDATE = dict.fromkeys(COLUMNS, 0.0) | {"ratio_min": 1.0, "ratio_max": 1.0}


unprintable = None  # in a training a list: once say() has failed, the exit code (Stopping ends the run)


def say(text):
    """Print a line, unless it is empty. With several GPUs, rank 0 speaks for all."""
    if text and ranks.RANK == 0:
        try:
            print(text, flush=True)
        except OSError as why:  # `| head` has ended, the terminal is closed, the disk is full
            if unprintable is None:
                raise
            unprintable.append(no_more_output(why))


def step_row(step, rollouts, usable, groups, flat, report, tools):
    """The row of log.csv. usable: the rollouts with an outcome; groups, flat: how many there were, and how
    many of them were flat; report: what update() returned, or NO_UPDATE."""
    metrics = summary(rollouts)
    plans = [len(action.ids) for rollout in usable for action in rollout.actions]
    row = {
        "step": step,
        "reward": sum(rollout.reward for rollout in usable) / max(1, len(usable)),
        "turns": metrics["turns"], "errors": metrics["errors"],
        "flat": flat, "groups": groups,
        "failed": metrics["failed"], "undecided": metrics["undecided"],
        "plan_tokens": sum(plans) / max(1, len(plans)),
    }
    row |= {name: report[name] for name in COLUMNS}
    for name in [*tools, "unreadable"]:
        row[name], row[f"{name}_errors"], _ = metrics["calls"].get(name, (0, 0, 0.0))
    return row


def step_line(row, steps, rollout_seconds, update_seconds):
    """The aligned line of a step: the reward first, then what can go wrong, then the seconds."""
    line = f"step {row['step']:3d}/{steps} | reward {row['reward']:.2f} | turns {row['turns']:.2f}"
    line += f" | errors {row['errors']:4.0%} | flat groups {row['flat']:2d}/{row['groups']}"
    line += f" | kl {row['kl']:.4f} | clip {row['clip']:4.1%}"
    line += f" | {rollout_seconds:.1f}s + {update_seconds:.1f}s"
    line += "".join(f" | {name} {row[name]}" for name in ("failed", "undecided") if row[name])
    return line + (f" | skipped updates {row['skipped']:.0f}" if row["skipped"] else "")


class Log:
    """The three files. With several GPUs, rank 0 alone writes them.

    A run that was killed may have written rows after its last checkpoint. When it is resumed, these rows are
    dropped: their steps are run again, and give the same rows."""

    def __init__(self, folder, step):
        """step: of the checkpoint to resume from; 0 for a new run."""
        self.folder = Path(folder)

        def evaluation_stays(line):
            """Rows of this very step stay, but for those that the resumed run makes again: the evaluation
            before step 1, and the test after the last step."""
            row_step, name = line.split(",")[:2]
            return int(row_step) < step or (int(row_step) == step > 0 and name != "test")

        self.filter_rows("log.csv", lambda line: int(line.split(",")[0]) <= step)
        self.filter_rows("evals.csv", evaluation_stays)
        self.filter_rows("rollouts.jsonl", lambda line: json.loads(line)["step"] <= step)

    def filter_rows(self, name, stays):
        """Rewrite a file with the rows for which stays(line) is true, and its header."""
        path = self.folder / name
        if ranks.RANK == 0 and path.exists():
            with open(path, encoding="utf-8", newline="") as file:
                whole = (line for line in file if line.endswith("\n"))  # a crash may have left half a line
                replace_file(path, (line for line in whole if line.startswith("step,") or stays(line)))

    def evaluated(self, name, step):
        """Does evals.csv hold the evaluation on this set after this step? Rank 0 answers for all ranks."""
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
                file.write(json.dumps({"step": step, **rollout.record()}, ensure_ascii=False) + "\n")
