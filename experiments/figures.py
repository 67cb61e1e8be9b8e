"""The tables and pictures of RESULTS.md, from results/*.csv: no number in them is typed by hand.

    python experiments/study.py --tables                 all, and README's table of seeds; no run is made
    python experiments/study.py --tables --only ways     some

A mean is over seeds, with a 95 % interval by Student's t over those seeds. A small dot or a thin line is one
seed. Each analysis has a function for its table, one for its picture, and its caption in CAPTIONS. Pictures
have no background: their colours, those of curves.py, can be read on a white page and on a dark one. They are
at most 4.8 inches wide, so that a phone does not shrink their words too much.
"""

import csv
import math
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from experiments import curves
from experiments.curves import COLOURS, INK
from rewards.metrics import markdown

RESULTS = FOLDER / "results"
# n -> t(0.975) of n - 1 degrees of freedom
T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 11: 2.23, 12: 2.20,
     13: 2.18, 14: 2.16, 15: 2.14, 16: 2.13, 17: 2.12, 18: 2.11, 19: 2.10, 20: 2.09}
BLUE, RED, GREEN, PURPLE = COLOURS
LINES = [{"color": BLUE}, {"color": RED, "linestyle": "--"}, {"color": GREEN, "linestyle": ":"}]
TOOLS = {"base_generator": PURPLE, "python_coder": BLUE, "wikipedia_search": GREEN, "web_search": INK,
         "unreadable": RED}
STYLE = {"font.size": 10, "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False,
         "svg.hashsalt": "nano-agentflow", "svg.fonttype": "none", "savefig.transparent": True,
         "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK,
         "ytick.color": INK}
WIDTH = 4.6  # inches
VARIANTS = {  # the variants of section 8: {run: what it is}
    "turn-stats": "statistics over turns", "token-mean": "mean over all tokens",
    "beta-0": "β = 0, not 0.001", "beta-0.1": "β = 0.1", "clip-0.2-0.2": "clip 0.2 and 0.2",
    "clip-none": "no clip", "G-2": "G = 2, not 8", "G-4": "G = 4", "G-16": "G = 16",
    "one-step": "one optimiser step", "wrong-reward": "1 of 10 rewards wrong",
    "always-stops": "verifier always stops", "never-stops": "verifier never stops",
}


def read(name):
    with open(RESULTS / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------------------------- statistics
def mean(values):
    """(mean, half of its 95 % interval) over seeds; (value, 0) of a single one, which has no interval."""
    values = list(values)
    if len(values) == 1:
        return values[0], 0.0
    return statistics.fmean(values), T[len(values)] * statistics.stdev(values) / len(values) ** 0.5


def pm(values, digits=3, scale=1):
    """'0.912 ± 0.010'; of a single seed '0.912', without an interval."""
    values = list(values)
    middle, half = mean(scale * value for value in values)
    return f"{middle:.{digits}f} ± {half:.{digits}f}" if len(values) > 1 else f"{middle:.{digits}f}"


def student_p(values):
    """The two-sided p of Student's t-test: could values with a mean of 0 lie as far from 0 by chance?

    With φ = atan(t / √ν), a t of ν degrees of freedom lies in [-t, t] with a probability that is the integral
    of cos^(ν-1) from 0 to φ, divided by the same integral up to π/2. Both by Simpson's rule."""
    nu = len(values) - 1
    middle, error = abs(statistics.fmean(values)), statistics.stdev(values) / len(values) ** 0.5
    if error == 0:
        return float(middle == 0)

    def integral(end, pieces=2000):
        heights = [math.cos(end * i / pieces) ** (nu - 1) for i in range(pieces + 1)]
        inner = 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
        return end / pieces / 3 * (heights[0] + inner + heights[-1])

    whole = integral(math.pi / 2)
    return max(0.0, 1 - integral(math.atan(middle / error / nu**0.5)) / whole)


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


def select(rows, run, first=0, last=1000):
    """The rows of this run in these steps."""
    return [row for row in rows if row["run"] == run and first <= int(row["step"]) <= last]


def over(rows, run, first, last, value):
    """The mean of a column over these steps, for each seed of a run."""
    by_seed = gather(select(rows, run, first, last), "seed", value)
    return [statistics.fmean(values) for values in by_seed.values()]


def number_of_seeds(rows):
    """Each seed has rows of its own, or a column of its own."""
    return len({row.get("seed") or column for row in rows for column in row if column.startswith("seed")})


def steps_of(rows):
    """The number of the last step."""
    return max(int(row["step"]) for row in rows)


def level(planner):
    """The mean accuracy of a planner of section 1: "frozen" is chance, "perfect planner" the ceiling."""
    return statistics.fmean(gather(read("ways"), "planner", "accuracy")[planner])


# ---------------------------------------------------------------------------------------------- pages
def block(name, alt, caption, table):
    """A picture of RESULTS.md with its caption and its table."""
    return f"![{alt}](results/{name}.svg)\n\n*{caption}*\n\n{table}"


def fill(name, text, files=(FOLDER / "RESULTS.md", FOLDER.parent / "README.md")):
    """Put a text between `<!-- name -->` and `<!-- /name -->`, wherever these are."""
    between = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
    for file in files:
        before = file.read_text(encoding="utf-8")
        after = between.sub(lambda _: text + "\n", before)
        if after != before:
            file.write_text(after, encoding="utf-8")


# ---------------------------------------------------------------------------------------------- drawing
def panels(plt, number, height=2.1, width=WIDTH):
    """A figure with so many panels, one below the other."""
    figure, axes = plt.subplots(number, 1, figsize=(width, height * number), constrained_layout=True,
                                squeeze=False)
    return figure, [axis for row in axes for axis in row]


def save(figure, name):
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})
    print(f"experiments/results/{name}.svg")


def band(axis, rows, run, value, label, look, every=4, rollouts=96):
    """Mean over seeds by step with its interval, the seeds as thin lines, the last mean as a number.

    every: steps between two ticks. rollouts: of a step."""
    rows = select(rows, run)
    by_step = gather(rows, "step", value)
    steps = [int(step) for step in by_step]
    middle, half = zip(*(mean(values) for values in by_step.values()))
    for values in gather(rows, "seed", value).values():
        axis.plot(steps, values, linewidth=0.5, alpha=0.6, color=look["color"])
    low, high = [m - h for m, h in zip(middle, half)], [m + h for m, h in zip(middle, half)]
    axis.fill_between(steps, low, high, color=look["color"], alpha=0.2, linewidth=0)
    axis.plot(steps, middle, label=label, linewidth=2, **look)
    axis.set_xticks(range(0, max(steps) + 1, every))
    axis.set_xlabel(f"step ({rollouts} rollouts each)")
    return steps[-1], middle[-1], look["color"]


def annotate_ends(axis, ends, gap):
    """Write the last values of some lines beside them, at least `gap` apart. ends: what band() returned."""
    lowest = -math.inf
    for step, value, colour in sorted(ends, key=lambda end: end[1]):
        lowest = max(value, lowest + gap)
        axis.annotate(f"{value:.2f}" if value < 10 else f"{value:.1f}", (step, lowest), xytext=(5, 0),
                      textcoords="offset points", annotation_clip=False, color=colour, va="center",
                      fontweight="bold")


def rule(axis, value, words, across=True, place=0.02):
    """A dotted line at a level to compare with, and its name."""
    (axis.axhline if across else axis.axvline)(value, color=INK, linewidth=1, linestyle=":", zorder=0)
    if across:
        axis.annotate(f"{words}, {value:.2f}", (place, value), xycoords=("axes fraction", "data"),
                      va="bottom", fontsize=9)


def dots(axis, place, values, colour, marker="s"):
    """The seeds as small dots, above them their mean and its interval. Returns the end of the interval."""
    middle, half = mean(values)
    axis.plot(values, [place + 0.3] * len(values), "o", color=colour, markersize=3, alpha=0.6)
    axis.errorbar(middle, place, xerr=half, fmt=marker, color=colour, markersize=6, capsize=3)
    return middle, half


# ---------------------------------------------------------------------------------------------- the analyses
def planners_table(name):
    """Section 1: each planner's accuracy."""
    accuracy = gather(read(name), "planner", "accuracy")
    return markdown([["planner", "accuracy"], *([who, pm(values)] for who, values in accuracy.items())])


def planners_picture(plt, name):
    """Section 1: the accuracy of each planner; dotted: the frozen and the perfect planner."""
    accuracy = gather(read(name), "planner", "accuracy")
    figure, (axis,) = panels(plt, 1, 0.42 * len(accuracy) + 0.7)
    for place, who in enumerate(accuracy):
        ends = ("frozen", "perfect planner")
        colour = INK if who in ends else BLUE if who.startswith("Flow") else RED
        middle, half = dots(axis, place, accuracy[who], colour, "o" if who in ends else "s")
        axis.annotate(f"{middle:.2f}", (middle + half, place), xytext=(6, 0), textcoords="offset points",
                      va="center", color=colour, fontweight="bold")
        if who in ends:
            rule(axis, middle, who, across=False)
    if name == "foreign":  # it has no perfect planner of its own
        rule(axis, level("perfect planner"), "", across=False)
    axis.set_yticks(range(len(accuracy)), [who.replace(", ", ",\n") for who in accuracy])
    axis.set_ylim(len(accuracy) - 0.4, -0.6)
    axis.set_xlim(0, 1)
    axis.set_xlabel("accuracy (share of test questions)")
    save(figure, name)


def stacked_picture(plt, name, bars):
    """Two stacked bars, before and after, for each of some kinds. bars: {kind: [{tool: share}, {...}]}"""
    figure, (axis,) = panels(plt, 1, 0.9 * len(bars) + 0.6)
    places = []
    for k, pair in enumerate(bars.values()):
        for w, parts in enumerate(pair):
            places.append(k + 0.42 * w)
            left = 0
            for tool, share in parts.items():
                label = tool.replace("unreadable", "plan not parsed") if len(places) == 1 else None
                axis.barh(places[-1], share, 0.38, left, color=TOOLS[tool], label=label)
                if share > 0.07:
                    axis.annotate(f"{100 * share:.0f}", (left + share / 2, places[-1]), color="white",
                                  ha="center", va="center", fontweight="bold")
                left += share
    axis.set_yticks(places, [text for words in bars for text in (f"{words}, before", "after")])
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    axis.set_xlabel("share of the planner's turns, %")
    figure.legend(loc="outside lower center", ncol=2, frameon=False)
    save(figure, name)


CURVES = {"reward": "reward (share right)", "errors": "tool-calling errors\n(share of turns)"}


def budget_table(name):
    rows = read(name)
    accuracy, used = gather(rows, "max_turns", "accuracy"), gather(rows, "max_turns", "turns")
    return markdown([["turns at most", "accuracy", "turns used"],
                     *([turns, pm(accuracy[turns]), pm(used[turns], 2)] for turns in accuracy)])


def budget_picture(plt, name, trained_with, levels):
    """levels: {words: accuracy to compare with}."""
    rows = read(name)
    figure, axes = panels(plt, 2)
    labels = [("accuracy", "accuracy\n(share of test questions)"), ("turns", "turns used")]
    for axis, (column, label), colour in zip(axes, labels, COLOURS):
        by_turns = gather(rows, "max_turns", column)
        places = [int(turns) for turns in by_turns]
        middle, half = zip(*(mean(values) for values in by_turns.values()))
        for place, values in zip(places, by_turns.values()):
            axis.plot([place + 0.15] * len(values), values, "o", color=colour, markersize=3, alpha=0.6)
            value = statistics.fmean(values)
            axis.annotate(f"{value:.2f}", (place, value), xytext=(3, -17), textcoords="offset points",
                          ha="center", color=colour, fontweight="bold")
        axis.errorbar(places, middle, yerr=half, color=colour, marker="s", markersize=5, capsize=3)
        axis.set_xticks(places)
        axis.set_xlabel(f"turns at most (trained with {trained_with})")
        axis.set_ylabel(label)
        axis.set_ylim(0, 1 if column == "accuracy" else None)
    for words, value in levels.items():
        rule(axes[0], value, words, place=0.45)
    save(figure, name)


COMPARED = {  # {CSV: {run: its name}}
    "monolith": {"monolith": "monolith", "Flow-GRPO": "flow", "right verdicts": "flow, no wrong verdicts"},
    "sizes": {"width 128": "1.23 M parameters", "width 64": "0.42 M parameters"},
}


def compared_table(name):
    """Reward at the start and at the end of training, and the test before and after."""
    rows = read(name)
    last = steps_of(rows)
    lines = [["", "reward, steps 1-3", f"reward, steps {last - 2}-{last}", "test before", "test after"]]
    for run, label in COMPARED[name].items():
        parts = [over(rows, run, *ends, "reward") for ends in ((1, 3), (last - 2, last))]
        tests = [over(rows, run, 1, 1, when) for when in ("test_before", "test_after")]
        lines.append([label, *map(pm, parts + tests)])
    return markdown(lines)


def compared_picture(plt, name):
    rows = read(name)
    figure, axes = panels(plt, 2, 2.4)
    for axis, (value, label) in zip(axes, CURVES.items()):
        ends = [band(axis, rows, run, value, words, look)
                for (run, words), look in zip(COMPARED[name].items(), LINES)]
        annotate_ends(axis, ends, 0.09)
        axis.set_ylabel(label)
        axis.set_ylim(0, 1)
    ceiling = level("perfect planner")
    words = f"perfect planner: {ceiling:.2f};\ncalls that fail anyway: 0.10"
    axes[0].axhline(ceiling, color=INK, linestyle=":", linewidth=1, label=words)
    axes[1].axhline(0.1, color=INK, linestyle=":", linewidth=1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", frameon=False, ncol=2)
    save(figure, name)


def changes_of_variants():
    """{variant: [its mean reward minus that of the planner as it is, seed by seed]}; the latter's rewards."""
    rows = read("variants")
    whole = {key: statistics.fmean(values) for key, values in gather(rows, ("run", "seed"), "reward").items()}
    seeds = sorted({row["seed"] for row in rows})
    base = [whole["as it is", seed] for seed in seeds]
    return {run: [whole[run, seed] - value for seed, value in zip(seeds, base)] for run in VARIANTS}, base


def variants_table():
    changes, base = changes_of_variants()
    ps = [student_p(change) for change in changes.values()]
    lines = [["variant", f"reward, minus {statistics.fmean(base):.3f}", "p, Holm"]]
    for (run, change), adjusted in zip(changes.items(), holm(ps)):
        lines.append([VARIANTS[run], pm(change), shown_p(adjusted)])
    return markdown(lines)


def variants_picture(plt):
    changes, _ = changes_of_variants()
    differences_picture(plt, "variants", {VARIANTS[run]: change for run, change in changes.items()},
                        "reward of steps 1-8, minus that\nof the planner as it is")


def differences_picture(plt, name, changes, label):
    """Differences to the planner as it is, seed by seed; the line at 0 is no difference."""
    figure, (axis,) = panels(plt, 1, 0.34 * len(changes) + 0.9)
    adjusted = holm([student_p(change) for change in changes.values()])
    for place, (change, p) in enumerate(zip(changes.values(), adjusted)):
        colour = RED if p < 0.05 else BLUE
        middle, _ = dots(axis, place, change, colour)
        axis.annotate(f"{middle:+.3f}", (1.02, place), xycoords=("axes fraction", "data"), va="center",
                      color=colour, fontweight="bold")
    axis.axvline(0, color=INK, linewidth=1, zorder=0)
    axis.locator_params(axis="x", nbins=4)
    axis.set_yticks(range(len(changes)), list(changes))
    axis.set_ylim(len(changes) - 0.3, -0.7)
    axis.set_xlabel(label)
    save(figure, name)


# ---------------------------------------------------------------------------------------------- curves.py
def toy_table():
    """README's table: the seeds of `python train.py`, before and after."""
    tests = read("toy-tests")
    lines = [["", "before training", "after"]]
    columns = (("accuracy", "accuracy", 3, 1), ("errors", "tool-calling errors, %", 1, 100),
               ("turns", "turns", 2, 1))
    for value, label, digits, scale in columns:
        found = gather(tests, "when", value)
        cells = [", ".join(f"{scale * x:.{digits}f}" for x in found[when]) for when in ("before", "after")]
        lines.append([label, *cells])
    return markdown(lines)


def levels(roles):
    """{"reward": [(accuracy, words)]}: warm-started and perfect planner on the toy's 300 test questions."""
    rows = [row for row in read("smollm") if (row["roles"], row["set"]) == (roles, "toy")]
    return {"reward": [(float(row["accuracy"]), f"{row['planner']}, reward on the test questions")
                       for row in rows if row["planner"] in ("warm-started", "perfect planner")]}


def toy_picture():
    """experiments/curve.svg, README's curve."""
    by_seed = defaultdict(dict)
    for row in read("toy"):
        by_seed[row["seed"]][int(row["step"])] = row
    seeds = list(by_seed)
    line = curves.Line({}, seeds, list(by_seed.values()), seeds, f"Flow-GRPO on the toy, {len(seeds)} seeds")
    drawn = curves.picture([line], ["reward", "errors", "turns"], levels("toy"))
    (FOLDER / "curve.svg").write_text(drawn, encoding="utf-8")
    print("experiments/curve.svg")


@dataclass
class Summary:
    """A line of curves.picture() of which only the mean, the lowest and the highest seed are known."""

    label: str
    runs: list
    columns: dict  # {column: [(step, lowest, mean, highest)]}

    def points(self, column):
        return self.columns[column]


def smollm_curve():
    """smollm-curve.svg. Its CSV was read off the picture before it, to three digits: the logs are lost."""
    columns = defaultdict(list)
    for row in read("smollm-curve"):
        point = (int(row["step"]), *(float(row[name]) for name in ("lowest", "mean", "highest")))
        columns[row["column"]].append(point)
    line = Summary("SmolLM2, seeds 0, 2, 3 and 4", [0, 2, 3, 4], columns)
    drawn = curves.picture([line], list(columns), levels("planner"))
    (RESULTS / "smollm-curve.svg").write_text(drawn, encoding="utf-8")
    print("experiments/results/smollm-curve.svg")
