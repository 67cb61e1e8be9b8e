"""Which of two planners is better? compare() answers for two folders that `solve.py --out` wrote.

    A  accuracy 0.340 [0.29, 0.40] of 300 | turns 1.66 | errors 31.4% | 119 tokens a rollout
    B  accuracy 0.970 [0.94, 0.98] of 300 | turns 1.50 | errors 0.2% | 118 tokens a rollout
    questions that differ: A alone right 2, B alone right 191, exact McNemar p = 3e-54
    B - A: +63.0 points, 95 % interval +56.9 to +68.3 (Newcombe's, paired)

Most questions are easy for both planners or hard for both. They say nothing about which planner is
better, but they widen the interval of each accuracy. So the planners are compared in pairs: only
the questions on which they differ count. A question without an outcome (failed, undecided) counts
as not right. Several trials of a question count as one, by the share that was right. If one side
has more trials or seeds than the other, the test of these questions leaves out the surplus.

A side may also be several folders, one for each seed: solve.py --compare 'runs/mine-seed*' ... All
this then says something about these very planners. Whether other seeds would differ as much, only
the seeds can say: each counts once, in an exact permutation test of their accuracies.
"""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from glob import glob
from pathlib import Path
from statistics import fmean

from record.flags import CHECKPOINT_SETTINGS, MODELS, flag_of
from record.folder import digest, replace_file
from record.metrics import accuracy_line, interval, summary
from record.rollouts import read_answers
from world.mistakes import Mistake
from world.text import printable

SHOWN = 5  # how many questions of each kind are printed
WIDTH = 50  # characters of a question or an answer that are printed
UNSHOWN = {"batch", "data", "limit", "out"}  # settings that are no reason for a difference
OWN = {"model", "seed", "weights"}  # settings that differ between the seeds of a side


def compare(a, b, out=None):
    """The lines to print. a, b: a folder, a pattern of several, or a list of folders. out: a folder
    that gets all questions that differ (differences.jsonl)."""
    folders = [[Path(folder) for folder in matching(side)] for side in (a, b)]
    a, b = (" ".join(map(str, side)) for side in folders)
    each = [[read_answers(folder) for folder in side] for side in folders]
    both = [joined(side) for side in each]
    names = [name for name in both[0] if name in both[1]]
    if not names:
        raise Mistake(f"nothing to compare: {a} has {[*both[0]]}, {b} {[*both[1]]}")
    firsts = [[trials[0] for name in names for trials in answers[name]] for answers in both]
    questions, others = ([(first.question, first.gold) for first in side] for side in firsts)
    if questions != others:
        why = f"{a} and {b} have answered different questions ({len(questions)} and {len(others)})"
        raise Mistake(f"{why}: let both runs finish, with the same questions and the same --limit")
    if not any(gold for _, gold in questions):
        raise Mistake("nothing to compare: no question has a gold answer, so none was graded")
    different = "; ".join(different_settings(*folders)) or "none"
    lines = [f"A  {a}", f"B  {b}", f"settings that differ, A | B: {different}"]
    sets = {name: [answers[name] for answers in both] for name in names}
    if len(names) > 1:
        sets["all"] = [sum((answers[name] for name in names), []) for answers in both]
    for name, sides in sets.items():
        lines += ["", name, *statistics(*sides)]
        if max(map(len, folders)) > 1:
            lines.append(seeds_line(*each, names if name == "all" else [name]))
    rows = [question_row(name, *pair) for name in names for pair in as_many(*sets[name])]
    rows = [row for row in rows if row["right"][0] != row["right"][1]]
    for letter in "AB":
        better = [row for row in rows if (row["right"][0] > row["right"][1]) == (letter == "A")]
        if better:
            lines += ["", f"{letter} is better on {len(better)}:", *map(line_of, better[:SHOWN])]
    if out:
        file = Path(out, "differences.jsonl")
        replace_file(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
        lines += ["", f"all {len(rows)} questions that differ: {file}"]
    return [printable(line) for line in lines]


def matching(pattern):
    """The folders, or models, of a pattern such as "runs/mine-seed*"; a name without * is one."""
    if isinstance(pattern, list):
        return pattern
    found = sorted(glob(str(pattern))) if "*" in str(pattern) else [pattern]
    if not found:
        raise Mistake(f"no folder matches {pattern}")
    return found


def joined(sides):
    """The answers of several folders as those of one: {name: for each question, its rollouts}."""
    sets = {}
    for name in set.intersection(*map(set, sides)):
        each = [answers[name] for answers in sides]
        asked = {tuple(trials[0].question for trials in answers) for answers in each}
        if len(asked) > 1:
            raise Mistake(f"the folders of a side have answered different questions of {name}")
        sets[name] = [sum(trials, ()) for trials in zip(*each, strict=True)]
    return dict(sorted(sets.items()))


def seeds_line(first, second, names):
    """'each folder: A 0.97 0.95 | B 0.11 0.12, exact permutation test p = 0.33'

    first, second: the answers of each folder of a side."""
    accuracy = lambda answers: fmean(right(trials) for name in names for trials in answers[name])
    accuracies = [list(map(accuracy, side)) for side in (first, second)]
    shown = [" ".join(f"{value:.3f}" for value in values) for values in accuracies]
    p = permutation(*accuracies)
    return f"each folder: A {shown[0]} | B {shown[1]}, exact permutation test p = {p:.2g}"


def permutation(first, second, equal=1e-9):
    """The share of all ways to deal the values to two sides whose means differ at least as much.
    equal: gaps that differ by less are equal."""
    pooled = first + second
    scale = len(pooled) / len(second)  # a side's distance to all, times this: to the other side
    gap = lambda chosen: scale * abs(fmean(chosen) - fmean(pooled))
    deals = [gap(chosen) for chosen in itertools.combinations(pooled, len(first))]
    return sum(deal >= gap(first) - equal for deal in deals) / len(deals)


def different_settings(*sides):
    """'temperature 0.7, 1.0 | 0.0' for each setting that differs: it, too, may be the cause. Of
    what each seed of a side has for itself, only the first folder's is shown."""
    files = [[folder / "settings.json" for folder in side] for side in sides]
    each = [[json.loads(f.read_text()) if f.exists() else {} for f in side] for side in files]
    for name in dict.fromkeys(name for side in each for settings in side for name in settings):
        some = [side[:1] if name in OWN else side for side in each]
        key = digest if name == "code" else str
        a, b = ({key(one.get(name)): str(one.get(name)) for one in side} for side in some)
        if name not in UNSHOWN and (a.keys() != b.keys() or len(a) > 1):
            yield f"{name} {', '.join(a.values())} | {', '.join(b.values())}"


def statistics(first, second):
    """The comparison as lines. first, second: for each question, its rollouts."""
    for name, questions in (("A", first), ("B", second)):
        metrics = summary([rollout for trials in questions for rollout in trials])
        metrics["accuracy"] = fmean(map(right, questions))  # if some sets have more trials
        yield f"{name}  {accuracy_line(metrics, len(questions))}"
    pairs = as_many(first, second)
    most = max(len(trials) for trials, _ in pairs)
    what, test = ("more often", "exact sign test") if most > 1 else ("alone", "exact McNemar")
    shares = lambda sides: [list(map(right, side)) for side in sides]
    lost, won, p = mcnemar(*shares(zip(*pairs, strict=True)))
    gain, low, high = (100 * value for value in difference(*shares((first, second))))
    part = "" if pairs == [*zip(first, second, strict=True)] else f", in trials 1 to {most} of both"
    found = f"A {what} right {lost}, B {what} right {won}, {test} p = {p:.2g}"
    yield f"questions that differ{part}: {found}"
    yield f"B - A: {gain:+.1f} points, 95 % interval {low:+.1f} to {high:+.1f} (Newcombe's, paired)"


def as_many(first, second):
    """[(trials, trials)]: of each question as many of both. Of equal planners, one that is mostly
    right is more often all right in one trial than in five: this would be no coin toss."""
    return [(a[: len(b)], b[: len(a)]) for a, b in zip(first, second, strict=True)]


def right(trials):
    """How often a question was answered right, from 0 to 1. trials: its rollouts."""
    return fmean(rollout.right for rollout in trials)


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
    """(second - first, low, high): the difference of the means, with Newcombe's 95 % interval.

    It joins the Wilson intervals of both means. The more often the planners are right on the same
    questions (the correlation), the narrower it is. Method 10 of Newcombe 1998, Statistics in
    Medicine 17, 2635-2650: for pairs.
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


def question_row(name, *pair):
    """A question of a set, and how both did on it. answers: of the first trial."""
    first = pair[0][0]
    answers = [trials[0].answer or trials[0].failed for trials in pair]
    row = {"set": name, "question": first.question, "gold": first.gold}
    return row | {"right": [right(trials) for trials in pair], "answers": answers}


def line_of(row):
    """'    What is 2 + 2? | gold 4 | A 5 | B 4'"""
    texts = [" ".join(text.split()) for text in (row["question"], row["gold"], *row["answers"])]
    short = [text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..." for text in texts]
    return "    {} | gold {} | A {} | B {}".format(*short)


def refuse_two_flows(settings):
    """Mistake if models would not be run in the same flow: checkpoints remember that of their
    training, others have the defaults, and a planner with more turns would seem better."""
    plain = lambda value: os.path.realpath(value) if os.path.exists(str(value)) else str(value)
    for name in (*CHECKPOINT_SETTINGS, "max_turns"):
        values = {plain(getattr(one, name, None)): one.model for one in settings}
        if name in MODELS[1:-1]:  # a model that was trained for this module, too, plays it
            values = {value: model for value, model in values.items() if value != plain(model)}
        if len(values) > 1:
            found = " | ".join(f"{model}: {value}" for value, model in values.items())
            cure = f"give {flag_of(name)}, or run solve.py --out for each and compare the folders"
            raise Mistake(f"{name} would not be the same for both ({found}): {cure}")


def answer_both(args, flags):
    """The folders with the answers of two models, or patterns of models: this command runs once for
    each. flags: solve.py's, which say how a model would be run."""
    top, at = Path(args.out or "runs/compare"), sys.argv.index("--compare")
    words = sys.argv[1:at] + sys.argv[at + 3 :]
    folder_of = lambda model: top / re.sub(r"[^\w*]+", "-", model)
    models = [*itertools.chain(*map(matching, args.compare))]
    refuse_two_flows([flags([*words, "--model", model]) for model in models])
    for model in models:
        folder = folder_of(model)
        print(f"{model} answers, kept in {folder}", flush=True)
        run = [sys.executable, sys.argv[0], *words, "--model", model, "--out", str(folder)]
        if subprocess.run([*run, "--quiet"]).returncode:
            raise Mistake(f"{model} has not answered all questions, so nothing is compared")
    return [[folder_of(model) for model in matching(side)] for side in args.compare]
