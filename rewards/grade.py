"""rewards.grade"""

import time

from rewards import judge as judging
from rewards import rules


def grade(flows, judge=None):
    """R(o) of each flow that has an answer: by the rules, and where they cannot decide by the judge, an engine (None: not right).
    (tasks.mark() is the rules alone, for one answer.) To train on another reward, begin here: accuracy and best/ are means of it."""
    ended = [flow for flow in flows if not flow.failed]
    verdicts = [rules.decide(flow.question, flow.answer) for flow in ended]
    for flow, verdict in zip(ended, verdicts):
        flow.reward = float(verdict is True)
    if judge:
        unread = [flow for flow, verdict in zip(ended, verdicts) if verdict is None]
        start = time.perf_counter()
        for flow, (verdict, said) in zip(unread, judging.ask([(flow.question, flow.answer) for flow in unread], judge)):
            flow.reward, flow.undecided = float(verdict is True), verdict is None and not said.error
            flow.failed = said.error and f"judge: {said.error}"
            flow.add_output(len(flow.actions), "judge", said.text, said.tokens, time.perf_counter() - start)
