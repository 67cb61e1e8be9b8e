"""scale.log"""

import csv
import json
from pathlib import Path

from scale import ranks


class Log:
    """log.csv, evals.csv and rollouts.jsonl. On resuming, what came after the checkpoint is dropped: it will be made again."""

    def __init__(self, run, step):
        self.run = Path(run)
        if ranks.RANK:
            return
        before = {
            "log.csv": lambda line: int(line.split(",")[0]) <= step,
            # The first evaluation comes before step 1, the last test after the last checkpoint: both are made again.
            "evals.csv": lambda line: int(line.split(",")[0]) < step + (step > 0 and ",test," not in line),
            "rollouts.jsonl": lambda line: json.loads(line)["step"] <= step,
        }
        for name, keep in before.items():
            path, beside = self.run / name, self.run / f"{name}.writing"
            if path.exists():
                with open(path, encoding="utf-8", newline="") as old, open(beside, "w", encoding="utf-8", newline="") as new:
                    whole = (line for line in old if line.endswith("\n"))  # a crash may have left half a line
                    new.writelines(line for line in whole if line.startswith("step,") or keep(line))
                beside.rename(path)

    def marked(self, step):
        """Have the validation questions been marked after this step? Rank 0 knows for all."""
        path = self.run / "evals.csv"
        lines = path.read_text().splitlines() if ranks.RANK == 0 and path.exists() else []
        return ranks.any_rank(any(line.startswith(f"{step},valid,") for line in lines))

    def row(self, name, row):
        if ranks.RANK:
            return
        path = self.run / name
        first = not path.exists() or path.stat().st_size == 0
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if first:
                writer.writeheader()
            writer.writerow(row)

    def flows(self, step, flows):
        if ranks.RANK:
            return
        with open(self.run / "rollouts.jsonl", "a", encoding="utf-8", errors="backslashreplace") as file:  # \ud800 is JSON
            file.writelines(json.dumps({"step": step, **flow.record()}, ensure_ascii=False) + "\n" for flow in flows)
