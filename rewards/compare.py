"""Which of two planners is better, if both answered the same questions: they are compared in pairs.

Most questions are easy for both planners or hard for both. They say nothing about which planner is better,
but they widen the interval of each accuracy. So only the questions on which the two differ count here:

    mcnemar       whether such a difference could be chance
    difference    how large it is, with a 95 % interval

first, second: for each question 1 if this planner was right and 0 if not, in the same order of the questions.
Of several trials it is the share that was right: more trials add no questions.
"""

import math
from statistics import fmean

from rewards.metrics import accuracy_line, interval, summary


def mcnemar(first, second):
    """(questions that are worse in the second, questions that are better, two-sided exact p).

    If the planners are equally good, each question on which they differ is a coin toss.
    """
    lost = sum(a > b for a, b in zip(first, second, strict=True))
    won = sum(a < b for a, b in zip(first, second, strict=True))
    n = lost + won
    tail = sum(math.comb(n, k) for k in range(min(lost, won) + 1)) / 2**n
    return lost, won, min(1.0, 2 * tail)


def difference(first, second):
    """(second - first, low, high): the difference of the means with Newcombe's 95 % interval for pairs.

    It joins the Wilson intervals of both means. The more often the planners are right on the same questions
    (the correlation), the narrower it is. Method 10 of Newcombe 1998, Statistics in Medicine 17, 2635-2650.
    """
    n, p, q = len(first), fmean(first), fmean(second)
    (p_low, p_high), (q_low, q_high) = interval(p, n), interval(q, n)
    covariance = fmean((a - p) * (b - q) for a, b in zip(first, second, strict=True))
    if covariance > 0:
        covariance = max(covariance - 0.5 / n, 0)  # his correction: the counts are whole numbers
    spread = math.sqrt(fmean((a - p) ** 2 for a in first) * fmean((b - q) ** 2 for b in second))
    correlation = covariance / spread if spread > 1e-12 else 0.0  # 0 if one of them never varies

    def joined(a, b):
        return math.sqrt(a * a - 2 * correlation * a * b + b * b)

    return q - p, q - p - joined(p_high - p, q - q_low), q - p + joined(p - p_low, q_high - q)


def shares_right(trials):
    """How often each question was answered right, from 0 to 1. trials: for each question, its rollouts."""
    return [fmean(rollout.right for rollout in rollouts) for rollouts in trials]


def lines(first, second):
    """The comparison of A and B as lines of text. first, second: for each question, its rollouts.

    A  accuracy 0.340 [0.29, 0.40] of 300 | turns 1.66 | errors 31.4% | 119 tokens a rollout
    B  accuracy 0.970 [0.94, 0.98] of 300 | turns 1.50 | errors 0.2% | 118 tokens a rollout
    questions that differ: A alone right 2, B alone right 191, exact McNemar p = 3e-54
    B - A: +63.0 points, 95 % interval +56.9 to +68.3 (Newcombe's, paired)
    """
    for name, trials in (("A", first), ("B", second)):
        metrics = summary([rollout for rollouts in trials for rollout in rollouts])
        metrics["accuracy"] = fmean(shares_right(trials))  # if some sets have more trials: each question once
        yield f"{name}  {accuracy_line(metrics, len(trials))}"
    several = max(len(rollouts) for rollouts in first + second) > 1
    shares = shares_right(first), shares_right(second)
    lost, won, p = mcnemar(*shares)
    what, test = ("more often right", "exact sign test") if several else ("alone right", "exact McNemar")
    yield f"questions that differ: A {what} {lost}, B {what} {won}, {test} p = {p:.2g}"
    gain, low, high = (100 * value for value in difference(*shares))
    yield f"B - A: {gain:+.1f} points, 95 % interval {low:+.1f} to {high:+.1f} (Newcombe's, paired)"
