"""Progress: how many rollouts have ended, and which module is at work.

On a terminal a bar shows it, elsewhere a line each minute:

    bamboogle, accuracy 0.500:  10%|██▍             | 12/125 [04:10<39:20, 20.9s/rollout, turn 3 executor]
    bamboogle, accuracy 0.500: 12 of 125 rollouts ended, turn 3 executor, 4 min
"""

import os
import sys
import threading
import time

from tqdm import tqdm

from scale.laps import lap

RANK = os.environ.get("RANK", "0")  # with several GPUs, rank 0 shows its share of the rollouts
estimated = set()  # numbers of rollouts whose seconds have been estimated: each is printed once
LONG = 60  # seconds: shorter rollouts are not estimated
MINUTE = 60  # seconds between two lines where there is no terminal


class Progress:
    """with Progress(125, "bamboogle") as progress: rollout(questions, policy, fixed, tools, watch=progress)

    Minutes may pass between two calls of a slow model, so a thread keeps the clock of the bar running.
    """

    def __init__(self, total, name="", before=0, turns=None):
        """before: how many of the rollouts have ended in earlier batches. turns: of a rollout at most; then
        a line estimates the time that they will take."""
        self.total, self.name, self.before = total, name, before
        self.ended, self.module, self.start = before, "starting", time.monotonic()
        self.terminal, self.closed = sys.stderr.isatty(), threading.Event()
        hidden = RANK != "0" or not self.terminal
        self.bar = tqdm(total=total, initial=before, unit="rollout", leave=False, disable=hidden)
        self.turns, self.stages = turns, []  # (module, turn, start) of the stages so far
        self.thread = threading.Thread(target=self.tick, daemon=True)

    def __call__(self, flows, turn, module):
        """solve.rollout() calls this before each stage."""
        lap(module)
        self.ended = self.before + sum(flow.stopped or flow.failed != "" for flow in flows)
        self.module = module if module in ("analysis", "generator", "judge") else f"turn {turn} {module}"
        self.stages.append((module, turn, time.monotonic()))
        if turn and self.turns and self.total not in estimated:
            self.estimate(flows)
        if self.terminal:
            self.show()

    def estimate(self, flows):
        """Once the first plans are there: a line, if all rollouts together will take more than a minute.

        Where the executor, the verifier and the generator take as long as the planner, and nothing stops
        early. A rollout whose plan cannot be parsed has no executor and no verifier in this turn."""
        starts = [start for module, turn, start in self.stages if (module, turn) == ("planner", 1)]
        if not starts or self.stages[-1][2] == starts[0]:
            return  # the first plans are not there yet
        estimated.add(self.total)
        plans = self.stages[-1][2] - starts[0]
        parsed = sum(not isinstance(flow.plan, str) for flow in flows) / len(flows)
        seconds = starts[0] - self.start + plans * (self.turns * (1 + 2 * parsed) + 1)
        if seconds > LONG and RANK == "0":
            line = f"about {seconds:.0f} s for {self.total} rollouts, without judge and update: "
            line += f"the first plans took {plans:.0f} s, {parsed:.0%} of them can be parsed, "
            tqdm.write(line + f"and there are up to {self.turns} turns", file=sys.stderr)

    def show(self):
        if self.terminal:  # on other ranks than 0 the bar is disabled
            self.bar.n = self.ended
            self.bar.set_description(self.name, refresh=False)
            self.bar.set_postfix_str(self.module)
        elif RANK == "0":
            name, minutes = self.name and f"{self.name}: ", (time.monotonic() - self.start) / 60
            line = f"{name}{self.ended} of {self.total} rollouts ended, {self.module}, {minutes:.0f} min"
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
