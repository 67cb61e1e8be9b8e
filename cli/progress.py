"""Progress: how many rollouts have ended, and which module is at work.

On a terminal a bar shows it, elsewhere a line each minute:

    bamboogle, accuracy 0.500:  10%|██▍             | 12/125 [04:10<39:20, 20.9s/rollout, turn 3 executor]
    bamboogle, accuracy 0.500: 12 of 125 rollouts ended, turn 3 executor, 4 min
"""

import os
import sys
import threading
import time
from contextlib import nullcontext

from tqdm import tqdm

from rewards.metrics import summary
from scale.laps import lap

RANK = os.environ.get("RANK", "0")  # with several GPUs, rank 0 shows its share of the rollouts
MINUTE = 60  # seconds between two lines where there is no terminal


def progress_bar(total, unless=None):
    """with progress_bar(8) as watch: roll_out(..., watch=watch). unless: another watch, in its place."""
    return nullcontext(unless) if unless else Progress(total)


class Progress:
    """with Progress(125, "bamboogle") as progress: roll_out(questions, policy, fixed, tools, watch=progress)

    Minutes may pass between two calls of a slow model, so a thread keeps the clock of the bar running.
    """

    def __init__(self, total, name="", before=0):
        """before: the number of rollouts that ended in earlier batches."""
        self.total, self.name, self.title, self.before = total, name, name, before
        self.ended, self.module, self.start = before, "starting", time.monotonic()
        self.terminal, self.closed = sys.stderr.isatty(), threading.Event()
        hidden = RANK != "0" or not self.terminal
        self.bar = tqdm(total=total, initial=before, unit="rollout", leave=False, disable=hidden)
        self.thread = threading.Thread(target=self.tick, daemon=True)

    def __call__(self, rollouts, turn, module):
        """solve.roll_out() calls this before each stage."""
        lap(module)
        self.ended = self.before + sum(rollout.stopped or rollout.failed != "" for rollout in rollouts)
        self.module = module if module in ("analysis", "generator", "grade") else f"turn {turn} {module}"
        if self.terminal:
            self.show()

    def next_batch(self, rollouts):
        """These rollouts have ended; from here on, those of another batch are counted."""
        self.before = len(rollouts)
        self.title = f"{self.name}, accuracy {summary(rollouts)['accuracy']:.3f}"

    def show(self):
        if self.terminal:  # on other ranks than 0 the bar is disabled
            self.bar.n = self.ended
            self.bar.set_description(self.title, refresh=False)
            self.bar.set_postfix_str(self.module)
        elif RANK == "0":
            title, minutes = self.title and f"{self.title}: ", (time.monotonic() - self.start) / 60
            line = f"{title}{self.ended} of {self.total} rollouts ended, {self.module}, {minutes:.0f} min"
            print(line, file=sys.stderr, flush=True)

    def tick(self):
        while not self.closed.wait(1 if self.terminal else MINUTE):
            self.show()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.closed.set()
        self.thread.join()
        self.bar.close()
        lap("rest")  # grading has ended
