"""Draw training runs: any columns of log.csv and evals.csv, step by step. Needs matplotlib.

    python experiments/curves.py runs/toy-seed0                   # writes runs/toy-seed0/curves.svg
    python experiments/curves.py runs/toy-seed? --columns reward kl valid.accuracy --out picture.svg

valid.accuracy and test.accuracy are columns of evals.csv. Runs whose folders differ only in -seedN
at the end are one line: their mean, in a band from the lowest to the highest. So bonus-0.2-seed0
and bonus-0.5-seed0 are two lines, and so are a/toy-seed0 and b/toy-seed1. Runs of one line should
differ in their seeds alone: it says which other settings, or code, differ. The number at the end of
a line is its last value."""

import argparse
import csv
import json
import math
import re
from pathlib import Path

COLUMNS = "reward errors turns kl".split()
FREE = {"seed", "out", "resume", "token_budget", "sampling_bytes"}  # settings that may differ


def rows_of(run):
    """{step: {column: text}} of a run."""
    rows = {}
    for name in ("log.csv", "evals.csv"):
        if (run / name).exists():
            with open(run / name, newline="") as file:
                for row in csv.DictReader(file):
                    start = f"{row['questions']}." if "questions" in row else ""
                    named = {start + column: text for column, text in row.items()}
                    rows.setdefault(int(row["step"]), {}).update(named)
    return rows


def line_of(run):
    """The name of the line that a run belongs to."""
    return re.sub(r"-seed\d+$", "", str(run))


def lines_of(runs):
    """{name of a line: [rows_of() each of its seeds]}"""
    lines = {}
    for run in runs:
        lines.setdefault(line_of(run), []).append(rows_of(run))
    return lines


def mixed(runs):
    """[(name of a line, a setting in which its runs differ)]: they should not be one line."""
    found = {}  # {(line, setting): {its values}}
    for run in runs:
        for name, value in json.loads((run / "args.json").read_text()).items():
            found.setdefault((line_of(run), name), set()).add(str(value))
    return [key for key, values in found.items() if len(values) > 1 and key[1] not in FREE]


def points(seeds, column):
    """[(step, lowest, mean, highest)] of the steps for which all seeds have a number."""
    found = []
    for step in sorted(set.intersection(*map(set, seeds))):
        values = [float(rows[step].get(column) or "nan") for rows in seeds]
        if all(map(math.isfinite, values)):
            found.append((step, min(values), sum(values) / len(values), max(values)))
    return found


def draw(plt, lines, columns):
    """The figure: a panel for each column."""
    height = math.ceil(len(columns) / 2)
    colours = {name: f"C{n}" for n, name in enumerate(lines)}  # in every panel
    figure, panels = plt.subplots(height, 2, figsize=(8, 2.4 * height + 0.5), squeeze=False)
    for panel in panels.flat[len(columns) :]:
        panel.remove()
    for panel, column in zip(panels.flat, columns, strict=False):
        panel.set_title(column, fontsize=10)
        panel.margins(x=0.12)  # room for the last values
        for name, seeds in lines.items():
            if found := points(seeds, column):
                steps, low, mean, high = zip(*found, strict=True)
                panel.plot(steps, mean, color=colours[name])
                panel.fill_between(steps, low, high, color=colours[name], alpha=0.25, linewidth=0)
                end = {"va": "center", "color": colours[name]}
                panel.annotate(f" {mean[-1]:.3g}", (steps[-1], mean[-1]), **end)
    for name, colour in colours.items():
        panels[0, 0].plot([], [], color=colour, label=name)  # if it has no number in this panel
    figure.legend(loc="outside upper left", ncols=3)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="folders of training runs")
    add("--columns", nargs="+", default=COLUMNS, help=f"default: {' '.join(COLUMNS)}")
    add("--out", type=Path, help="the picture (default: curves.svg in the first folder)")
    args = parser.parse_args()
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        parser.error("drawing needs matplotlib: pip install matplotlib")
    for run in args.runs:
        if not (run / "args.json").exists():
            parser.error(f"{run} is not the folder of a training run")
    for line, name in mixed(args.runs):
        print(f"the runs of {line} differ in {name}")
    lines = lines_of(args.runs)
    steps = (row for seeds in lines.values() for rows in seeds for row in rows.values())
    known = set().union(*steps)
    if missing := [column for column in args.columns if column not in known]:
        parser.error(f"there is no column {missing[0]}: choose from {', '.join(sorted(known))}")
    plt.rcParams["figure.constrained_layout.use"] = True
    out = args.out or args.runs[0] / "curves.svg"
    if not args.out:  # whoever made the folder may have put a link here
        out.unlink(missing_ok=True)
    draw(plt, lines, args.columns).savefig(out)
    print(out)


if __name__ == "__main__":
    main()
