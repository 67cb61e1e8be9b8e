"""A training run: its folder, the policy that it trains, and how far it is.

    with training_run(args, policy, optimizer, state) as run:   # state: of the checkpoint to resume from
        for step in run.steps():                                # those that are left; none after Ctrl-C
            with run.updating(passes):                          # measures the seconds of the update
                metrics = update(...)
            run.log_step(step, rollouts, ..., metrics)          # log.csv, rollouts.jsonl and a line
            accuracy = run.log_evaluation("valid", rollouts)    # evals.csv
            run.save(accuracy)                                  # step-N/, and best/ if it is the highest
"""
import math
import time
from contextlib import contextmanager
from pathlib import Path

from logbook import advice, log
from logbook.checkpoints import forget, save
from logbook.endings import FULL, errors_leave
from logbook.log import Log, say
from logbook.stopping import Stopping
from models.completion import outage
from rewards.metrics import accuracy_line, calls_line, summary
from scale import ranks

POISONED = 3  # the run ends after so many steps in a row whose rollouts or gradients were of no use
EVALUATED = "accuracy", "turns", "errors", "failed", "undecided"  # columns of evals.csv, before the last, n


class Down(Exception):
    """A model server stays down, of a module or of the judge: the run ends with a checkpoint."""


def stop_if_down(rollouts):
    """Raise Down if a server was down for more than half of these rollouts: training on the few that came
    through would waste the questions."""
    down = [rollout.failed for rollout in rollouts if outage(rollout.failed)]
    if 2 * len(down) > len(rollouts):
        raise Down(f"{len(down)} of {len(rollouts)} rollouts did not come to an end ({down[0]})")


@contextmanager
def training_run(args, policy, optimizer, state):
    """A Run, up to its last line. What ends it early becomes one sentence that says how to go on."""
    try:
        run = Run(args, policy, optimizer, state)
        try:
            yield run
        except Down as why:
            why = run.stop(f"{why}, after step {run.step}.", "Fix that, then go on")
            raise SystemExit(f"train.py: {why}")
        run.end()
        ranks.wait()  # until no rank needs this one any more
        ranks.stop()  # ends a rank; not after an error: the ranks might wait for each other
        if run.step < args.steps:
            raise SystemExit(run.stopping.exit_code())
    except MemoryError as why:
        raise SystemExit(f"train.py: {why}: {advice.MEMORY}")
    except OSError as why:
        cure = "Free some disk" if why.errno in FULL else "Fix that"
        raise SystemExit(f"train.py: could not write to {args.out} ({why}); the last checkpoint is "
                         f"untouched. {cure}, then --resume.")


class Run:
    def __init__(self, args, policy, optimizer, state):
        self.args, self.policy, self.optimizer, self.folder = args, policy, optimizer, Path(args.out)
        self.step, self.best = 0, -math.inf  # the last finished step; the highest accuracy on --valid
        self.moved = False  # has a step changed the policy? Before that it equals the reference
        self.rows, self.poisoned = [], 0  # of log.csv, since this start; steps of no use in a row
        if state:
            self.step, self.best, self.moved = state["step"], state["best"], state["moved"]
        headers = {"log.csv": log.columns(args.tools), "evals.csv": ["step", "questions", *EVALUATED, "n"]}
        with errors_leave("train.py"):
            self.log = Log(self.folder, self.step, headers)
        self.stopping = Stopping()

    def steps(self):
        """The numbers of the steps that are left, until a signal ends the run."""
        while self.step < self.args.steps and not self.stopping.requested():
            self.started, self.update_seconds = time.perf_counter(), 0.0
            yield self.step + 1

    @contextmanager
    def updating(self, passes):
        """Around the update of a step: measures its seconds, and lets `passes` (scale/passes.py) prepare it
        and clean up: shard the weights, gather them again, say what did not fit into memory."""
        start = time.perf_counter()
        with passes.around_update():
            yield
        self.update_seconds = time.perf_counter() - start

    def log_step(self, step, rollouts, usable, groups, flat, metrics):
        """Write and show a step. SystemExit, with a checkpoint, if the last steps were of no use.

        usable: the rollouts with an outcome. groups: the group of each of these. flat: how many groups were
        flat. metrics: what update() returned."""
        row = log.step_row(step, rollouts, usable, groups, flat, metrics, self.args.tools)
        rollout_seconds = time.perf_counter() - self.started - self.update_seconds
        budget = int(metrics["token_budget"])
        say(advice.smaller_budget(self.args.token_budget, budget))
        self.args.token_budget = budget  # so it is said once
        all_skipped = row["skipped"] == self.args.minibatches
        self.step, self.moved = step, self.moved or metrics["steps"] > 0
        self.rows.append(row)
        self.log.add_row("log.csv", row)
        self.log.add_rollouts(self.step, rollouts)
        say(log.step_line(row, self.args.steps, rollout_seconds, self.update_seconds))
        say(advice.failures(rollouts))
        say(advice.flat_steps(self.rows, rollouts, self.args.temperature))
        self.poisoned = self.poisoned + 1 if all_skipped or row["failed"] == len(rollouts) else 0
        if self.poisoned == POISONED:
            raise SystemExit(f"train.py: {self.stop(advice.poisoned(row, self.args), 'Or go on')}")

    def log_evaluation(self, name, rollouts):
        """Write and show an evaluation on `name` (valid or test): its accuracy. SystemExit if all failed."""
        metrics = summary(rollouts)
        row = {"step": self.step, "questions": name} | {column: metrics[column] for column in EVALUATED}
        row["n"] = len(rollouts)
        self.log.add_row("evals.csv", row)
        say(f"{name} after step {self.step}: {accuracy_line(metrics, len(rollouts))}")
        say(f"calls   {calls_line(metrics)}" if name == "test" or self.step == 0 else "")
        say(advice.failures(rollouts))
        if metrics["failed"] == len(rollouts):
            why = self.stop(f"no rollout of {name} ended.", "Fix that, then go on")
            raise SystemExit(f"train.py: {why}")
        if self.step == 0:
            say(advice.unparsed(rollouts))
            say(advice.dead_tools(rollouts))
        return metrics["accuracy"]

    def due(self):
        """Is it time to validate and save? Every --every steps, and after the last one."""
        return self.step > 0 and (self.step % self.args.every == 0 or self.step == self.args.steps)

    def lacks(self, name):
        """Is an evaluation on `name` (valid or test) due that is not in evals.csv yet?"""
        return self.due() and not self.log.evaluated(name, self.step)

    def save(self, accuracy):
        """Save step-N/, and best/ if this accuracy is the highest so far; delete old checkpoints (--keep)."""
        if accuracy > self.best:
            self.best = accuracy
            save(self.folder / "best", self.policy, None, self.step, self.best, self.args)
        self.save_step()  # after best/: it records self.best, so best/ must already be there
        forget(self.folder, self.args.keep)

    def save_step(self):
        save(self.folder / f"step-{self.step}", self.policy, self.optimizer, self.step, self.best, self.args)

    def stop(self, why, then):
        """Save a checkpoint of this step, if there is none; return the sentence with which the run ends.

        --valid is not evaluated: the resumed run does that, and so ends like a run that was never stopped."""
        if self.step and not (self.folder / f"step-{self.step}").exists():
            self.save_step()
        return f"{why} {then} with: python train.py --resume {self.folder}"

    def end(self):
        """The last line: how to resume, or whether anything was learnt."""
        rollouts = self.args.questions * self.args.group_size
        # without validation, or if no answer was ever right (a reward of your own), best/ says nothing
        best = self.folder / ("best" if self.best > 0 else f"step-{self.step}")
        if self.step < self.args.steps:
            say(self.stop(f"Stopped after step {self.step}.", "Go on"))
        elif self.rows and all(row["failed"] == rollouts for row in self.rows):
            raise SystemExit("train.py: every rollout failed, and nothing was learnt")
        elif not self.moved and any(row["skipped"] for row in self.rows):
            say("Done, but nothing was learnt: updates were skipped, because their loss or gradient was "
                "not finite or far too large.")
        elif not self.moved:
            say(f"Done, but nothing was learnt: no step had a gradient, and {self.folder} holds the model "
                "that came in.")
        else:
            say(f"Done. Try: python solve.py --model {best}")
