"""The reward R(o) of a rollout. The rules grade its answer; what they cannot decide, a judge may grade.

To train on another reward, change reward(): its arguments are the rollout and the verdict on its answer.
Accuracy, and with it the choice of best/, is the mean of this reward. To keep it the share of right answers,
change one more line, as in experiments/forks/turn-cost.diff.
"""

import time

from rewards import rules
from rewards.judge import verdicts_on


def reward(rollout, verdict):
    """R(o) in {0, 1}. rollout: it; verdict: True, False, or None (rules and judge could not tell).

    With a cost for each turn: experiments/forks/turn-cost.diff.
    """
    return float(verdict is True)


def grade(rollouts, judge=None):
    """Set the reward of every rollout that has not failed. judge: an engine, or None.

    If the judge gives no verdict, the rollout is undecided; if the judge is down, it has failed. Training
    leaves both out. Without a judge, an answer that the rules cannot decide counts as wrong.
    """
    answered = [rollout for rollout in rollouts if not rollout.failed]
    verdicts = [rules.decide(rollout.question, rollout.answer) for rollout in answered]
    for rollout, verdict in zip(answered, verdicts):
        rollout.reward = reward(rollout, verdict)
    if judge:
        unclear = [rollout for rollout, verdict in zip(answered, verdicts) if verdict is None]
        start = time.perf_counter()
        results = verdicts_on([(rollout.question, rollout.answer) for rollout in unclear], judge)
        seconds = time.perf_counter() - start
        for rollout, (verdict, completion) in zip(unclear, results):
            rollout.reward = reward(rollout, verdict)
            rollout.undecided = verdict is None and not completion.error
            rollout.failed = completion.error and f"judge: {completion.error}"
            rollout.seconds += seconds / len(unclear)
            rollout.add_output(len(rollout.actions), "judge", completion.text, completion.tokens, seconds)
