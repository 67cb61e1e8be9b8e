"""Is the answer of a rollout right, and what is its reward R? Rules decide, or else a judge may.

To train on another reward, change reward(). Accuracy, and with it the choice of best/ and all comparisons,
remains the share of right answers.
"""

import math
import time

from rewards import rules
from rewards.judge import verdicts_on


def reward(rollout):
    """R of a rollout: here 1 or 0. It may read all of a solve.Rollout but `reward`: question (with its
    gold answer), answer, right, actions (one Completion for each turn, so their number is that of the turns
    used; len(action.ids) is the length of a plan in tokens, action.tokens also counts its prompt), memory.
    `stopped` is true also if the verifier stops in the last turn; the turns allowed are not in a
    Rollout. (rules.quantity() reads a number as graders do.)

    A cost for errors could sum `step.error` over rollout.memory.steps. That counts plans and calls that could
    not be parsed, and any result that begins with "Error:". Those with a step.command could be parsed:
    the tool refused the call or failed.

    With a cost for each turn: experiments/forks/turn-cost.diff. In a group of right answers, even a tiny cost
    counts fully, because advantages are divided by the standard deviation of the group.
    """
    return float(rollout.right)


def grade(rollouts, judge=None):
    """Set `right` and `reward` of every rollout that has not failed. judge: an engine, or None.

    If the judge gives no verdict, the rollout is undecided; if the judge is down, it has failed. Training
    leaves both out. Without a judge, an answer that the rules cannot decide counts as wrong.
    """
    answered = [rollout for rollout in rollouts if not rollout.failed]
    verdicts = [rules.decide(rollout.question, rollout.answer) for rollout in answered]  # None: in doubt
    if judge:
        unclear = [i for i, verdict in enumerate(verdicts) if verdict is None]
        start = time.perf_counter()
        results = verdicts_on([(answered[i].question, answered[i].answer) for i in unclear], judge)
        seconds = time.perf_counter() - start
        for i, (verdict, completion) in zip(unclear, results):
            rollout, verdicts[i] = answered[i], verdict
            rollout.undecided = verdict is None and not completion.error
            rollout.failed = completion.error and f"judge: {completion.error}"
            rollout.seconds += seconds / len(unclear)
            rollout.add_output(len(rollout.actions), "judge", completion.text, completion.tokens, seconds)
    for rollout, verdict in zip(answered, verdicts):
        rollout.right = verdict is True
        rollout.reward = float(reward(rollout))
        if not math.isfinite(rollout.reward):
            raise SystemExit(f"rewards/grade.py: reward() is {rollout.reward} for the question "
                             f"{rollout.question.question[:80]!r}: it must be a finite number.")
