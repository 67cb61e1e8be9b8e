"""Progress: a bar of tqdm that shows how many rollouts have ended, and which module is at work.

    bamboogle, accuracy 0.500:  10%|██▍             | 12/125 [04:10<39:20, 20.9s/rollout, turn 3 executor]

Where there is no terminal, it is printed once a minute.
"""

import os
import sys

from tqdm import tqdm

from rewards.metrics import summary

RANK = os.environ.get("RANK", "0")  # with several GPUs, rank 0 shows its share of the rollouts
MINUTE = 60  # seconds between two lines where there is no terminal


class Progress:
    """with Progress(125, "bamboogle") as progress: roll_out(questions, policy, fixed, tools, watch=progress)
    """

    def __init__(self, total, name="", before=0):
        """before: the number of rollouts that ended in earlier batches."""
        self.name, self.before, self.terminal = name, before, sys.stderr.isatty()
        pause = 0 if self.terminal else MINUTE
        self.bar = tqdm(total=total, desc=name, initial=before, unit="rollout", leave=False,
                        disable=RANK != "0", delay=pause, mininterval=pause, miniters=0)

    def __call__(self, rollouts, turn, module):
        """solve.roll_out() calls this before each stage."""
        ended = sum(rollout.stopped or rollout.failed != "" for rollout in rollouts)
        once = module in ("analysis", "generator", "grade")
        self.bar.set_postfix_str(module if once else f"turn {turn} {module}", refresh=False)
        self.bar.update(self.before + ended - self.bar.n)

    def next_batch(self, rollouts):
        """These rollouts have ended; from here on, those of another batch are counted."""
        self.before = len(rollouts)
        title = f"{self.name}, accuracy {summary(rollouts)['accuracy']:.3f}"
        self.bar.set_description(title, refresh=False)

    def write(self, text):
        """Print a text above the bar, which tqdm.write() draws again, even where there is no terminal."""
        (tqdm.write if self.terminal else print)(text)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.bar.close()
