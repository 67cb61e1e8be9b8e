"""The reward R(o) of a rollout: by the rules, else by a judge.

To train on another reward, change reward(): it gets the whole rollout and the verdict on its answer.
Accuracy, and with it the choice of best/, is the mean of this reward.
"""

import time

from rewards import rules
from rewards.judge import verdicts_on


def reward(flow, verdict):
    """R(o) in {0, 1}. flow: the rollout; verdict: True, False, or None (neither rules nor judge can tell).

    With a cost of 0.1 for each turn: return float(verdict is True) - 0.1 * len(flow.actions)
    """
    return float(verdict is True)


def grade(flows, judge=None):
    """Set the reward of every rollout that did not fail. judge: an engine for what the rules cannot decide.

    A rollout on which the judge has no verdict is undecided, and one whose judge is down has failed: neither
    is an outcome, and training leaves both out. Without a judge, what the rules cannot decide is not right.
    """
    answered = [flow for flow in flows if not flow.failed]
    verdicts = [rules.decide(flow.question, flow.answer) for flow in answered]
    for flow, verdict in zip(answered, verdicts):
        flow.reward = reward(flow, verdict)
    if judge:
        unclear = [flow for flow, verdict in zip(answered, verdicts) if verdict is None]
        start = time.perf_counter()
        results = verdicts_on([(flow.question, flow.answer) for flow in unclear], judge)
        for flow, (verdict, completion) in zip(unclear, results):
            flow.reward, flow.undecided = reward(flow, verdict), verdict is None and not completion.error
            flow.failed = completion.error and f"judge: {completion.error}"
            seconds = time.perf_counter() - start
            flow.add_output(len(flow.actions), "judge", completion.text, completion.tokens, seconds)
