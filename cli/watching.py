"""What solve.py shows and saves while it answers: the progress bar, the traces, unfinished rollouts on disk.

    with watching(trial, args) as watch:
        rollouts = roll_out(questions, ..., watch=watch)  # watch(rollouts, turn, module) before each stage
        watch.finished(rollouts)                         # a batch has ended and is graded

A typed question is traced live: its lines are printed as soon as a module has written them. The rollouts of a
file of questions are printed when they have ended. --quiet and --benchmark print no traces.
"""

import sys
from contextlib import contextmanager

from cli.progress import Progress
from world.text import printable


@contextmanager
def watching(trial, args):
    """The Watch of a trial. Rollouts that a stopped run has saved are printed first."""
    trial.resume()
    with Progress(len(trial.questions), trial.name, len(trial.rollouts)) as progress:
        watch = Watch(trial, args, progress)
        watch.print_traces(trial.rollouts)
        yield watch


class Watch:
    def __init__(self, trial, args, progress):
        self.trial, self.args, self.progress = trial, args, progress
        self.traced, self.printed = None, 0  # a rollout with a trace, and how many lines of it

    def __call__(self, rollouts, turn, module):
        """Before each stage: it sees all rollouts of the batch, and changes nothing in them."""
        self.progress(rollouts, turn, module)
        self.trial.save_unfinished(rollouts)
        if self.args.question:
            self.print_traces(rollouts, ended=False)

    def finished(self, rollouts):
        """After each batch that the trial has taken."""
        self.print_traces(rollouts)
        self.progress.next_batch(self.trial.rollouts)

    def print_traces(self, rollouts, ended=True):
        """Print the lines of each rollout's trace that are not printed yet. ended: as in trace()."""
        if self.args.quiet or self.args.benchmark:
            return
        for rollout in rollouts:
            if rollout is not self.traced:
                self.traced, self.printed = rollout, 0
            lines = trace(rollout, ended).split("\n")
            new, self.printed = lines[self.printed :], len(lines)
            if ended and not self.args.question:
                verdict = "right" if rollout.right else f"wrong: {rollout.question.answer}"
                new[-1] += printable(f"  ({verdict})")
            if new:
                self.progress.write("\n".join(new) + "\n" * ended)
        sys.stdout.flush()


def trace(rollout, ended=True):
    """A rollout as text: what every module and tool wrote, turn by turn. Control characters are escaped.

    ended: whether there is an answer to show. While a rollout runs, its trace only grows at the end.
    """
    lines = [f"Question: {rollout.question.question}"]
    for output in rollout.outputs:
        once_a_rollout = output["module"] in ("analysis", "generator", "judge")
        title = output["module"] if once_a_rollout else f"turn {output['turn']} {output['module']}"
        tokens = f"{output['tokens']} tokens, " if output["tokens"] else ""
        lines.append(f"[{title}]  {tokens}{output['seconds']:.2f} s")
        lines += ["    " + line for line in output["text"].strip().splitlines()]
    if ended:
        lines.append(f"Failed: {rollout.failed}" if rollout.failed else f"Answer: {rollout.answer}")
    return printable("\n".join(lines))
