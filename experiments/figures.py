"""What all tables and pictures of RESULTS.md share: CSV files, statistics over seeds, and how they are drawn.

A mean is over seeds, with a 95 % interval by Student's t over those seeds. A small dot or a thin line is one
seed. Pictures have no background: their colours can be read on a white page and on a dark one. They are at
most 4.8 inches wide, so that a phone does not shrink their words too much.
"""

import csv
import functools
import math
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
# One palette for all pictures, after Okabe and Ito: told apart by the colour-blind, and at least 3.6 : 1
# against white and against the dark page of GitHub. INK, for texts and axes, has at least 4.2 : 1 there.
COLOURS = BLUE, RED, GREEN, PURPLE = "#1b7fc4", "#d55e00", "#00926a", "#b565a7"
INK = "#767b84"
STYLE = {"font.size": 10, "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False,
         "svg.hashsalt": "nano-agentflow", "svg.fonttype": "none", "savefig.transparent": True,
         "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK,
         "ytick.color": INK}
WIDTH = 4.6  # inches


# ---------------------------------------------------------------------------------------------- files
def path_of(name):
    return RESULTS / f"{name}.csv"


def read(name, folder=None):
    with open(folder / f"{name}.csv" if folder else path_of(name), newline="") as file:
        return list(csv.DictReader(file))


def write(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f"{path}: {len(rows)} rows")


def fill(name, text, files=(FOLDER / "RESULTS.md", FOLDER.parent / "README.md")):
    """Put a text between `<!-- name -->` and `<!-- /name -->`, wherever these are."""
    between = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
    for file in files:
        before = file.read_text(encoding="utf-8")
        after = between.sub(lambda _: text + "\n", before)
        if after != before:
            file.write_text(after, encoding="utf-8")


# ---------------------------------------------------------------------------------------------- statistics
def mean(values):
    """(mean, half of its 95 % interval) over seeds; (value, 0) of a single one, which has no interval."""
    values = list(values)
    if len(values) == 1:
        return values[0], 0.0
    return statistics.fmean(values), t_of(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5


def pm(values, digits=3, scale=1):
    """'0.912 ± 0.010'; of a single seed '0.912', without an interval."""
    values = list(values)
    middle, half = mean(scale * value for value in values)
    return f"{middle:.{digits}f} ± {half:.{digits}f}" if len(values) > 1 else f"{middle:.{digits}f}"


class Difference(NamedTuple):
    mean: float  # of some values, minus that of others
    half: float  # of its 95 % interval
    p: float  # could two sets with the same true mean lie as far apart by chance?

    def __str__(self):
        return f"{self.mean:.3f} ± {self.half:.3f}"


def difference(some, others):
    """Welch's t-test of two sets of seeds. (Not of pairs: runs with the same seed soon part.)"""
    error, nu = error_and_nu(*map(statistics.variance, (some, others)), len(some), len(others))
    change = statistics.fmean(some) - statistics.fmean(others)
    return Difference(change, t_of(nu) * error, two_sided_p(change, error, nu))


def error_and_nu(variance, other, n, m):
    """The standard error of a difference of means of n and m values, and its degrees of freedom (Welch)."""
    one, two = variance / n, other / m
    if not one + two:
        return 0.0, 1.0
    return (one + two) ** 0.5, (one + two) ** 2 / (one**2 / (n - 1) + two**2 / (m - 1))


@functools.cache
def t_of(nu):
    """t(0.975) of ν degrees of freedom."""
    return bisected(lambda t: two_sided_p(t, 1, nu) > 0.05)


def bisected(below, low=0.0, high=100.0):
    """The place from which on below() is False."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low


def two_sided_p(difference, error, nu):
    """The p of t = difference / error, with ν degrees of freedom.

    With φ = atan(t / √ν), t lies in [-t, t] with a probability that is the integral of cos^(ν-1) from 0 to φ,
    divided by the same integral up to π/2. Both by Simpson's rule."""
    if error == 0:
        return float(difference == 0)

    def integral(end, pieces=2000):  # max: at π/2, rounding can make the cosine negative
        heights = [max(0.0, math.cos(end * i / pieces)) ** (nu - 1) for i in range(pieces + 1)]
        inner = 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
        return end / pieces / 3 * (heights[0] + inner + heights[-1])

    whole = integral(math.pi / 2)
    return max(0.0, 1 - integral(math.atan(abs(difference) / error / nu**0.5)) / whole)


def findable(some, others, seeds=None):
    """How large a true difference must be for so many seeds each to find it (p < 0.05) in four studies of
    five, if they scatter as these two sets do.

    With a true difference of d standard errors, t = (z + d) / s, with z normal and s = √(χ²_ν / ν) the error
    of the estimated deviation. So the chance of t > T is the mean of Φ(d - T s) over s, here over its density
    on a grid. (A t below -T adds nothing that counts.)"""
    n = seeds or len(some)
    error, nu = error_and_nu(*map(statistics.variance, (some, others)), n, n)
    grid, limit, normal = [0.002 + 0.004 * k for k in range(1000)], t_of(nu), statistics.NormalDist().cdf
    density = [s ** (nu - 1) * math.exp(-nu * s * s / 2) for s in grid]

    def power(d):
        return sum(height * normal(d - limit * s) for s, height in zip(grid, density)) / sum(density)

    return error * bisected(lambda d: power(d) < 0.8)


def holm(ps):
    """Holm's adjusted p of several tests: where no effect is real, one table in 20 has one below 0.05."""
    order, adjusted, largest = sorted(range(len(ps)), key=ps.__getitem__), [0.0] * len(ps), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(ps) - place) * ps[i]))
        adjusted[i] = largest
    return adjusted


def shown_p(p):
    return f"{p:.2f}" if p >= 0.1 else f"{p:.1g}"


# ---------------------------------------------------------------------------------------------- rows
def gather(rows, key, value):
    """{key: [value, ...]} in the rows' order; key: a column, or a tuple of columns."""
    found = defaultdict(list)
    for row in rows:
        name = tuple(row[column] for column in key) if isinstance(key, tuple) else row[key]
        found[name].append(float(row[value]))
    return found


def over(rows, run, first, last, value):
    """The mean of a column over these steps, for each seed of a run."""
    rows = [row for row in rows if row["run"] == run and first <= int(row["step"]) <= last]
    return [statistics.fmean(values) for values in gather(rows, "seed", value).values()]


def number_of_seeds(rows):
    """"5", or "1 to 5" if some runs have fewer. Each seed has rows, or a column, of its own."""
    if "seed" not in rows[0]:
        return str(sum(column.startswith("seed ") for column in rows[0]))
    seeds = defaultdict(set)
    for row in rows:
        seeds[next(iter(row.values()))].add(row["seed"])  # the first column says of which run
    counts = sorted(map(len, seeds.values()))
    return str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"


# ---------------------------------------------------------------------------------------------- drawing
def panels(plt, number, height=2.1, width=WIDTH):
    """A figure with so many panels, one below the other."""
    figure, axes = plt.subplots(number, 1, figsize=(width, height * number), constrained_layout=True,
                                squeeze=False)
    return figure, [axis for row in axes for axis in row]


def save(figure, path):
    figure.savefig(path, metadata={"Date": None})
    print(path)


def band(axis, rows, value, label, look):
    """Mean over seeds by step with its interval, the seeds as thin lines. Returns the end of the line."""
    by_step = gather(rows, "step", value)
    steps = [int(step) for step in by_step]
    middle, half = zip(*(mean(values) for values in by_step.values()))
    for values in gather(rows, "seed", value).values():
        axis.plot(steps, values, linewidth=0.5, alpha=0.6, color=look["color"])
    low, high = [m - h for m, h in zip(middle, half)], [m + h for m, h in zip(middle, half)]
    axis.fill_between(steps, low, high, color=look["color"], alpha=0.2, linewidth=0)
    axis.plot(steps, middle, label=label, linewidth=2, **look)
    return steps[-1], middle[-1], look["color"]


def annotate_ends(axis, ends, gap):
    """Write the last values of some lines beside them, at least `gap` apart. ends: what band() returned."""
    lowest = -math.inf
    for step, value, colour in sorted(ends, key=lambda end: end[1]):
        lowest = max(value, lowest + gap)
        axis.annotate(f"{value:.2f}", (step, lowest), xytext=(5, 0), textcoords="offset points",
                      annotation_clip=False, color=colour, va="center", fontweight="bold")


def rule(axis, value, words, place):
    """A dotted line at a level to compare with, and its name."""
    axis.axhline(value, color=INK, linewidth=1, linestyle=":", zorder=0)
    axis.annotate(f"{words}, {value:.2f}", (place, value), xycoords=("axes fraction", "data"),
                  va="bottom", fontsize=9)


def dots(axis, place, values, colour):
    """The seeds as small dots, above them their mean and its interval. Returns both."""
    middle, half = mean(values)
    axis.plot(values, [place + 0.3] * len(values), "o", color=colour, markersize=3, alpha=0.6)
    axis.errorbar(middle, place, xerr=half, fmt="s", color=colour, markersize=6, capsize=3)
    return middle, half
