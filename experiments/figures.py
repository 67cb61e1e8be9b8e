"""Draw results/*.csv, and fill the tables of RESULTS.md from them: no number there is typed by hand.

    pip install matplotlib
    python experiments/figures.py                all
    python experiments/figures.py ways budget    some

Every mean is over seeds, with a 95 % interval by Student's t. A thin line or a small dot is one seed.
"""

import argparse
import csv
import re
import statistics
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from logbook import endings

endings.without_traceback(__name__)

from rewards.metrics import markdown

RESULTS = FOLDER / "results"
# n -> t(0.975) of n - 1 degrees of freedom
T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 11: 2.23, 12: 2.20,
     13: 2.18, 14: 2.16, 15: 2.14, 16: 2.13, 17: 2.12, 18: 2.11, 19: 2.10, 20: 2.09}
LINES = [{"color": "black"}, {"color": "0.5", "linestyle": "--"}, {"color": "0.3", "linestyle": ":"},
         {"color": "0.65", "linestyle": "-."}]
TOOLS = {"base_generator": ("0.85", ""), "python_coder": ("0.25", ""), "wikipedia_search": ("0.55", "///"),
         "unreadable": ("white", "xxx")}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
         "svg.hashsalt": "nano-agentflow", "svg.fonttype": "none"}
TOPICS = {  # the variants of each small figure: {run: its label}
    "statistics": {"turn-stats": "over turns"},
    "mean": {"token-mean": "all tokens alike"},
    "kl": {"beta-0": "β = 0", "beta-0.1": "β = 0.1"},
    "clip": {"clip-0.2-0.2": "0.2 and 0.2", "clip-none": "no clip"},
    "group": {"G-2": "G = 2", "G-4": "G = 4", "G-16": "G = 16"},
    "steps": {"one-step": "one step a batch"},
    "reward": {"wrong-reward": "1 of 10 wrong"},
    "verifier": {"always-stops": "always stops", "never-stops": "never stops"},
}
AS_IT_IS = {"statistics": "over rollouts", "mean": "nested means", "kl": "β = 0.001", "clip": "0.2 and 0.3",
            "group": "G = 8", "steps": "four steps a batch", "reward": "all right", "verifier": "as it is"}


def read(name):
    with open(RESULTS / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def mean(values):
    """(mean, half of its 95 % interval) over seeds."""
    values = list(values)
    return statistics.fmean(values), T[len(values)] * statistics.stdev(values) / len(values) ** 0.5


def pm(values, digits=3, scale=1):
    """'0.912 ± 0.010'"""
    middle, half = mean(scale * value for value in values)
    return f"{middle:.{digits}f} ± {half:.{digits}f}"


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


def fill(name, text):
    """Put a table between `<!-- name -->` and `<!-- /name -->`, in RESULTS.md or README.md."""
    between = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
    for file in (FOLDER / "RESULTS.md", FOLDER.parent / "README.md"):
        before = file.read_text(encoding="utf-8")
        after = between.sub(lambda _: text + "\n", before)
        if after != before:
            file.write_text(after, encoding="utf-8")


def band(axis, rows, run, value, label, look, seeds=True):
    """Mean over seeds by step with its interval, and the seeds as thin lines."""
    rows = select(rows, run)
    by_step = gather(rows, "step", value)
    steps = [int(step) for step in by_step]
    middle, half = zip(*(mean(values) for values in by_step.values()))
    if seeds:
        for values in gather(rows, "seed", value).values():
            axis.plot(steps, values, linewidth=0.5, alpha=0.5, **look)
    low, high = [m - h for m, h in zip(middle, half)], [m + h for m, h in zip(middle, half)]
    axis.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axis.plot(steps, middle, label=label, linewidth=1.8, **look)
    axis.set_xticks(range(0, max(steps) + 1, 4))
    axis.set_xlabel("step (96 rollouts each)")


def panels(plt, number, width=3.1, height=2.6):
    size = (width * number, height)
    figure, axes = plt.subplots(1, number, figsize=size, constrained_layout=True, squeeze=False)
    return figure, axes[0]


def save(figure, name, title):
    figure.suptitle(title, fontsize=9.5)
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})
    print(f"experiments/results/{name}.svg")


# ---------------------------------------------------------------------------------------------- the analyses
def planners(plt, name, title):
    """Section 1: the accuracy of each planner."""
    rows = read(name)
    order = list(dict.fromkeys(row["planner"] for row in rows))
    accuracy, turns, errors = (gather(rows, "planner", name) for name in ("accuracy", "turns", "errors"))
    figure, (axis,) = panels(plt, 1, 5.6, 2.5)
    for place, who in enumerate(order):
        middle, half = mean(accuracy[who])
        axis.plot(accuracy[who], [place + 0.3] * len(accuracy[who]), "o", color="0.6", markersize=3)
        axis.errorbar(middle, place, xerr=half, fmt="s", color="black", markersize=5, capsize=3)
        beside = {"textcoords": "offset points", "xytext": (6, -3)}
        axis.annotate(f"{middle:.2f}", (middle + half, place), fontsize=8, **beside)
    axis.set_yticks(range(len(order)), order)
    axis.set_ylim(len(order) - 0.4, -0.5)
    axis.set_xlim(0, 1)
    axis.set_xlabel("accuracy on the test questions")
    save(figure, name, f"{title}: {len(accuracy['frozen'])} seeds (dots), mean, 95 %")
    frozen = statistics.fmean(accuracy["frozen"])
    lines = [["planner", "accuracy", "against frozen", "tool-calling errors, %", "turns"]]
    for who in order:
        gain = f"{100 * (statistics.fmean(accuracy[who]) - frozen):+.1f} points" if who != "frozen" else ""
        lines.append([who, pm(accuracy[who]), gain, pm(errors[who], 1, 100), pm(turns[who], 2)])
    fill(name, markdown(lines))


def tools(plt):
    rows = read("tools")
    kinds, whens = ["arithmetic", "fact", "fact_math", "compare"], ["before", "after"]
    calls = gather(rows, ("when", "seed", "kind", "tool"), "calls")
    seeds = sorted({row["seed"] for row in rows})
    share = {}  # (when, kind, tool) -> a share of the turns for each seed
    for when in whens:
        for kind in kinds:
            for seed in seeds:
                every = {tool: sum(calls.get((when, seed, kind, tool), [0])) for tool in TOOLS}
                for tool, n in every.items():
                    share.setdefault((when, kind, tool), []).append(n / sum(every.values()))
    figure, (axis,) = panels(plt, 1, 6.4, 2.9)
    for k, kind in enumerate(kinds):
        for w, when in enumerate(whens):
            left = 0
            for tool, (colour, hatch) in TOOLS.items():
                middle = statistics.fmean(share[when, kind, tool])
                look = {"color": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.6}
                axis.barh(k + 0.4 * w, middle, 0.34, left, label=tool if not k + w else None, **look)
                left += middle
    places = [k + 0.4 * w for k in range(len(kinds)) for w in (0, 1)]
    axis.set_yticks(places, [f"{kind}, {when}" for kind in kinds for when in whens])
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of the planner's turns")
    axis.legend(loc="upper center", bbox_to_anchor=(0.4, -0.2), ncol=4, frameon=False, fontsize=8)
    title = f"Which tool for which kind of question: mean of {len(seeds)} seeds, 300 test questions each"
    save(figure, "tools", title)
    lines = [["kind of question", "", *TOOLS]]
    for kind in kinds:
        for when in whens:
            cells = [pm(share[when, kind, tool], 0, 100) for tool in TOOLS]
            lines.append([kind if when == "before" else "", when, *cells])
    fill("tools", markdown(lines))


def over(rows, run, first, last, value):
    """The mean of a column over these steps, for each seed of a run."""
    by_seed = gather(select(rows, run, first, last), "seed", value)
    return [statistics.fmean(values) for values in by_seed.values()]


def training(plt):
    rows = read("training")
    figure, axes = panels(plt, 3)
    labels = [("reward", "reward (share right)"), ("errors", "tool-calling errors a turn"),
              ("plan_tokens", "plan length (tokens a turn)")]
    for axis, (value, label) in zip(axes, labels):
        band(axis, rows, "Flow-GRPO", value, None, LINES[0])
        axis.set_ylabel(label)
        axis.set_ylim(0, 1 if value == "reward" else None)
    axes[1].axhline(0.1, color="0.5", linewidth=0.8, linestyle=":")
    axes[1].annotate("calls that fail by themselves", (24, 0.085), ha="right", va="top", fontsize=7)
    seeds = len({row["seed"] for row in rows})
    save(figure, "training", f"Flow-GRPO in training: {seeds} seeds (thin), their mean, 95 %")
    last = max(int(row["step"]) for row in rows)
    lines = [["", "steps 1-3", f"steps {last - 2}-{last}"]]
    for value, label, digits, scale in (
        ("reward", "reward", 3, 1), ("errors", "tool-calling errors, %", 1, 100),
        ("plan_tokens", "tokens a plan", 2, 1), ("turns", "turns", 2, 1),
    ):
        ends = [over(rows, "Flow-GRPO", low, low + 2, value) for low in (1, last - 2)]
        lines.append([label, *(pm(end, digits, scale) for end in ends)])
    fill("training", markdown(lines))


def budget(plt):
    rows = read("budget")
    figure, axes = panels(plt, 2)
    lines = [["turns at most", "accuracy", "turns used"]]
    labels = [("accuracy", "accuracy on 300 test questions"), ("turns", "turns used")]
    for axis, (value, label) in zip(axes, labels):
        by_turns = gather(rows, "max_turns", value)
        places = [int(turns) for turns in by_turns]
        middle, half = zip(*(mean(values) for values in by_turns.values()))
        for place, values in zip(places, by_turns.values()):
            axis.plot([place] * len(values), values, "o", color="0.6", markersize=3)
        axis.errorbar(places, middle, yerr=half, color="black", marker="s", markersize=4, capsize=3)
        axis.axvline(3, color="0.8", linewidth=0.8, zorder=0)
        axis.set_xticks(places)
        axis.set_xlabel("turns at most (trained with 3)")
        axis.set_ylabel(label)
        axis.set_ylim(0, 1 if value == "accuracy" else None)
    accuracy, used = gather(rows, "max_turns", "accuracy"), gather(rows, "max_turns", "turns")
    lines += [[turns, pm(accuracy[turns]), pm(used[turns], 2)] for turns in accuracy]
    save(figure, "budget", f"Turn budget when used: {len(accuracy['3'])} seeds (dots), mean, 95 %")
    fill("budget", markdown(lines))


def compare(plt, name, runs, title, labels):
    """Reward curves of some runs, and the reward at the start and the end."""
    rows = read(name)
    figure, axes = panels(plt, 2, 3.3)
    for run, label, look in zip(runs, labels, LINES):
        for axis, value in zip(axes, ("reward", "errors")):
            band(axis, rows, run, value, label, look)
    for axis, label in zip(axes, ("reward (share right)", "tool-calling errors a turn")):
        axis.set_ylabel(label)
        axis.set_ylim(0, 1)
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, name, f"{title}: {len({row['seed'] for row in rows})} seeds (thin), means, 95 %")
    last = max(int(row["step"]) for row in rows)
    steps = ["steps 1-3", f"steps {last - 2}-{last}", f"steps 1-{last}"]
    lines = [["reward", *steps, "test before", "test after"]]
    for run, label in zip(runs, labels):
        parts = [over(rows, run, *ends, "reward") for ends in ((1, 3), (last - 2, last), (1, last))]
        tests = [over(rows, run, 1, 1, when) for when in ("test_before", "test_after")]
        lines.append([label, *map(pm, parts + tests)])
    fill(name, markdown(lines))


def monolith(plt):
    compare(plt, "monolith", ["monolith", "Flow-GRPO", "right verdicts"], "The flow and a monolithic policy",
            ["monolith", "flow", "flow, no wrong verdicts"])


def sizes(plt):
    labels = ["1.23 M parameters", "0.42 M parameters"]
    compare(plt, "sizes", ["width 128", "width 64"], "Size of the planner", labels)


def variants(plt):
    rows = read("variants")
    last = max(int(row["step"]) for row in rows)
    whole = {key: statistics.fmean(values) for key, values in gather(rows, ("run", "seed"), "reward").items()}
    seeds = sorted({row["seed"] for row in rows})
    lines = [["variant", f"reward, mean of steps 1-{last}", "difference, seed by seed", "told apart?"]]
    lines.append(["as it is", pm([whole["as it is", seed] for seed in seeds]), "", ""])
    for topic, runs in TOPICS.items():
        figure, (axis,) = panels(plt, 1, 3.4, 2.3)
        for run, label, look in zip(["as it is", *runs], [AS_IT_IS[topic], *runs.values()], LINES):
            band(axis, rows, run, "reward", label, look, seeds=False)
        axis.set_ylabel("reward (share right)")
        axis.set_ylim(0, 1)
        axis.legend(frameon=False, fontsize=8, loc="upper left")
        save(figure, f"variants-{topic}", f"{topic}: mean of {len(seeds)} seeds, 95 %")
        for run, label in runs.items():
            apart = [whole[run, seed] - whole["as it is", seed] for seed in seeds]
            middle, half = mean(apart)
            told = "yes" if abs(middle) > half else "no"
            lines.append([f"{topic}: {label}", pm([whole[run, seed] for seed in seeds]), pm(apart), told])
    fill("variants", markdown(lines))


def forks(plt):
    from experiments import power  # which imports this file
    power.forks(plt)


PLANNERS = {"ways": "Ways to train the planner", "foreign": "A teacher with words of its own",
            "rarely": "A planner that is rarely right"}
FIGURES = {name: partial(planners, name=name, title=title) for name, title in PLANNERS.items()}
FIGURES |= {"training": training, "tools": tools, "budget": budget, "monolith": monolith, "sizes": sizes,
            "variants": variants, "forks": forks}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(FIGURES)}; none: all")
    args = parser.parse_args()
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        parser.exit(2, "figures.py: needs matplotlib, which the project does not: pip install matplotlib\n")
    plt.rcParams.update(STYLE)
    for name in args.names or FIGURES:
        if name not in FIGURES:
            parser.exit(2, f"figures.py: there is no figure {name}: choose from {', '.join(FIGURES)}\n")
        FIGURES[name](plt)
        plt.close("all")


if __name__ == "__main__":
    main()
