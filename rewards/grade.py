"""The reward R(o) of a rollout. The rules grade its answer; what they cannot decide, a judge may grade.

To train on another reward, change reward(): its arguments are the rollout and the verdict on its answer.
Accuracy, and with it the choice of best/, is the mean of this reward. To keep it the share of right answers,
change one more line, as in experiments/forks/turn-cost.diff.
"""

import time

from rewards import rules
from rewards.judge import verdicts_on


def reward(flow, verdict):
    """R(o) in {0, 1}. flow: the rollout; verdict: True, False, or None (rules and judge could not tell).

    With a cost for each turn: experiments/forks/turn-cost.diff.
    """
    return float(verdict is True)


def grade(flows, judge=None):
    """Set the reward of every rollout that has not failed. judge: an engine, or None.

    If the judge gives no verdict, the rollout is undecided; if the judge is down, it has failed. Training
    leaves both out. Without a judge, an answer that the rules cannot decide counts as wrong.
    """
    answered = [flow for flow in flows if not flow.failed]
    verdicts = [rules.decide(flow.question, flow.answer) for flow in answered]
    for flow, verdict in zip(answered, verdicts):
        flow.reward = reward(flow, verdict)
    if judge:
        unclear = [flow for flow, verdict in zip(answered, verdicts) if verdict is None]
        start = time.perf_counter()
        results = verdicts_on([(flow.question, flow.answer) for flow in unclear], judge)
        seconds = time.perf_counter() - start
        for flow, (verdict, completion) in zip(unclear, results):
            flow.reward, flow.undecided = reward(flow, verdict), verdict is None and not completion.error
            flow.failed = completion.error and f"judge: {completion.error}"
            flow.seconds += seconds / len(unclear)
            flow.add_output(len(flow.actions), "judge", completion.text, completion.tokens, seconds)
