"""Draw training runs: reward, tool-calling errors, turns, KL, clip, entropy and plan length, step by step.

    pip install matplotlib
    python experiments/curves.py runs/toy-seed0                  # writes runs/toy-seed0/curves.svg
    python experiments/curves.py runs/toy-seed0 runs/toy-seed1 --panels reward turns --out picture.svg

Runs whose folders differ only in the number at the end of their names are one line: their mean, in a band
from the lowest to the highest. The number at the end of a line is its last value.
"""

import argparse
import csv
import math
import re
import sys
from collections import defaultdict
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from logbook import endings

endings.without_traceback(__name__)

from experiments import figures
from logbook.endings import errors_leave

PANELS = {  # column of log.csv: title, with its unit
    "reward": "reward", "errors": "tool-calling errors (share)", "turns": "turns a rollout",
    "kl": "KL to the reference (nats)", "clip": "clipped tokens (share)", "entropy": "entropy (nats a token)",
    "plan_tokens": "tokens a plan"}
LOOKS = [{"color": colour, "linestyle": dashes} for dashes in ("-", "--", ":") for colour in figures.COLOURS]


def read(run):
    """{step: row of log.csv} of a run."""
    with open(Path(run) / "log.csv", newline="") as file:
        return {int(row["step"]): row for row in csv.DictReader(file)}


def lines_of(runs):
    """{name: [rows of each of its runs]}"""
    lines = defaultdict(list)
    for run in map(Path, runs):
        lines[re.sub(r"\W*(seed)?\W*\d+$", "", run.name) or run.name].append(read(run))
    return lines


def points(runs, column):
    """[(step, lowest, mean, highest)] of the steps for which every run has a number."""
    found = []
    for step in sorted(set.intersection(*map(set, runs))):
        values = [float(rows[step].get(column) or "nan") for rows in runs]
        if all(map(math.isfinite, values)):
            found.append((step, min(values), sum(values) / len(values), max(values)))
    return found


def picture(plt, lines, columns, rules=None):
    """The figure, a panel for each column. rules: {column: (value to compare with, its name)}."""
    plt.rcParams.update(figures.STYLE)
    height = math.ceil(len(columns) / 2)
    figure, axes = plt.subplots(height, 2, figsize=(4.8, 2.1 * height + 0.5), constrained_layout=True,
                                squeeze=False)
    for axis in axes.flat[len(columns):]:
        axis.remove()
    for axis, column in zip(axes.flat, columns):
        axis.set_title(PANELS[column], fontsize=9)
        axis.set_xlabel("step")
        ends, lowest = [], 0
        for (name, runs), look in zip(lines.items(), cycle(LOOKS)):
            if found := points(runs, column):
                steps, low, middle, high = zip(*found)
                axis.fill_between(steps, low, high, color=look["color"], alpha=0.25, linewidth=0)
                axis.plot(steps, middle, linewidth=1.5, label=name, **look)
                lowest = min(lowest, *low)
                ends.append((steps[-1], middle[-1], look["color"]))
        if column in (rules or {}):
            value, name = rules[column]
            axis.axhline(value, color=figures.INK, linewidth=1, linestyle=":", label=f"{name}, {value:.2f}")
        axis.set_ylim(bottom=lowest)
        figures.annotate_ends(axis, ends, 0.09 * axis.get_ylim()[1])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper left", frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", help="folders of training runs")
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=list(PANELS), metavar="COLUMN",
                        help=f"what to draw: some of {', '.join(PANELS)} (default: all)")
    parser.add_argument("--out", type=Path, help="picture to write (default: the first run's curves.svg)")
    args = parser.parse_args()
    if missing := [run for run in args.runs if not (Path(run) / "log.csv").is_file()]:
        parser.exit(2, f"curves.py: {missing[0]} holds no log.csv: give the folder of a training run\n")
    if find_spec("matplotlib") is None:
        parser.exit(2, "curves.py: needs matplotlib, which the project does not: pip install matplotlib\n")
    import matplotlib.pyplot as plt

    from world.files import reading  # it imports packages: study.py names those that are missing itself

    with errors_leave("curves.py"), reading(" ".join(args.runs), "leave out the run that is damaged"):
        drawn = picture(plt, lines_of(args.runs), args.panels)
    out = args.out or Path(args.runs[0], "curves.svg")
    if not args.out:
        out.unlink(missing_ok=True)  # a run that somebody else made may hold a link to another file
    figures.save(drawn, out)


if __name__ == "__main__":
    main()
