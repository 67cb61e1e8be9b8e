"""Compare planners question by question, on the sets that experiments/held_out.py answered.

Two planners that answer the same questions are compared by McNemar's exact test, as in solve.py --compare
(rewards/compare.py).

report() writes results/smollm.csv (a row for each planner, seed and set), results/smollm-paired.csv (a row
for each pair), a figure, and the tables of RESULTS.md. Rows that it does not make anew stay in the files, so
that a report on some planners or seeds keeps what is there about the others.
"""

import csv
import json
from importlib.util import find_spec

from experiments import figures
from experiments.wordings import SETS
from rewards.compare import mcnemar
from rewards.metrics import interval, markdown

ORDER = ("untrained", "warm-started", "router bm25", "router word", "router words", "SFT own", "SFT perfect",
         "Flow-GRPO", "perfect planner")
PAIRS = (("untrained", "Flow-GRPO"), ("warm-started", "Flow-GRPO"), ("router bm25", "Flow-GRPO"),
         ("router words", "Flow-GRPO"), ("SFT own", "Flow-GRPO"), ("SFT perfect", "Flow-GRPO"),
         ("Flow-GRPO", "perfect planner"))
WORDS = ("roles", "planner", "set", "before", "after")  # the columns that hold no numbers


def records(run, name):
    with open(run.folder / f"{name}.jsonl", encoding="utf-8") as lines:
        return list(map(json.loads, lines))


def row_of(rollouts):
    """Accuracy with Wilson's interval, turns, tool-calling errors and parse errors of plans (a turn)."""
    steps = [step for rollout in rollouts for step in rollout["memory"]["steps"]]
    right, n = sum(rollout["reward"] for rollout in rollouts), len(rollouts)
    low, high = interval(right / n, n)
    return {
        "questions": n, "accuracy": right / n, "low": low, "high": high, "turns": len(steps) / n,
        "errors": sum(step["error"] for step in steps) / max(1, len(steps)),
        "unparsed plans": sum(not step["tool"] for step in steps) / max(1, len(steps)),
    }


def outcomes(tables):
    """(rows of smollm.csv, rows of smollm-paired.csv). tables: {roles: {(planner, seed): Run}}."""
    rows, pairs = [], []
    for roles, runs in tables.items():
        for name in SETS:
            found = {key: records(run, name) for key, run in runs.items()}
            rows += [{"roles": roles, "planner": planner, "seed": seed, "set": name} | row_of(rollouts)
                     for (planner, seed), rollouts in found.items()]
            rewards = {key: {rollout["question"]: rollout["reward"] for rollout in rollouts}
                       for key, rollouts in found.items()}
            for first, second in PAIRS:
                pairs += [{"roles": roles, "set": name} | row for row in paired(rewards, first, second)]
    return rows, pairs


def paired(rewards, first, second):
    """A row for each seed of the planner that was trained; one that has a single seed meets them all."""
    for seed in sorted({seed for planner, seed in rewards if planner in (first, second)}):
        before, after = (rewards.get((name, seed), rewards.get((name, 0))) for name in (first, second))
        if before and after:
            if before.keys() != after.keys():
                raise SystemExit(f"smollm.py: {first} and {second} answered different questions")
            lost, won, p = mcnemar(list(before.values()), [after[question] for question in before])
            yield {"before": first, "after": second, "seed": seed, "lost": lost, "won": won, "p": p}


def in_order(planners):
    return [name for name in ORDER if name in planners]


def accuracy_text(rows):
    """'0.34 [.29, .40]' of one seed; of several, their mean and the lowest and highest seed, (.31-.36)."""
    values, short = [row["accuracy"] for row in rows], lambda value: f"{value:.2f}".removeprefix("0")
    if len(rows) == 1:
        return f"{values[0]:.2f} [{short(rows[0]['low'])}, {short(rows[0]['high'])}]"
    return f"{sum(values) / len(values):.2f} ({short(min(values))}-{short(max(values))})"


def table_of(rows):
    """The accuracies of one table's planners on each set, and the tool-calling errors on the first."""
    lines = [["planner", *SETS, "errors, %"]]
    for planner in in_order({row["planner"] for row in rows}):
        of_planner = [row for row in rows if row["planner"] == planner]
        cells = [accuracy_text([row for row in of_planner if row["set"] == name]) for name in SETS]
        errors = [100 * row["errors"] for row in of_planner if row["set"] == SETS[0]]
        lines.append([planner, *cells, f"{sum(errors) / len(errors):.0f}"])
    return markdown(lines)


def paired_table(pairs):
    """The paired comparisons of one table: questions won and lost, and p; of the least certain seed."""
    lines = [["won, lost (p)", *SETS]]
    for first, second in PAIRS:
        cells = []
        for name in SETS:
            chosen = [row for row in pairs
                      if (row["before"], row["after"], row["set"]) == (first, second, name)]
            worst = max(chosen, key=lambda row: (row["p"], row["lost"] - row["won"]), default=None)
            cells.append(worst and f"+{worst['won']:.0f} -{worst['lost']:.0f} ({worst['p']:.1g})")
        if all(cells):
            lines.append([f"{first} → {second}", *cells])
    return markdown(lines)


def draw(plt, rows, name, title):
    """Accuracy of each planner, a panel for each set: a dot a seed, and the interval of a single one."""
    planners = in_order({row["planner"] for row in rows})
    figure, axes = figures.panels(plt, len(SETS), 2.5, 0.3 * len(planners) + 1.2)
    for axis, set_name in zip(axes, SETS):
        for place, planner in enumerate(planners):
            chosen = [row for row in rows if (row["planner"], row["set"]) == (planner, set_name)]
            values = [row["accuracy"] for row in chosen]
            axis.plot(values, [place] * len(values), "o", color="0.6", markersize=3)
            ends = (chosen[0]["low"], chosen[0]["high"]) if len(chosen) == 1 else (min(values), max(values))
            axis.plot(ends, [place, place], color="black", linewidth=1)
            axis.plot(sum(values) / len(values), place, "s", color="black", markersize=4)
        axis.set_yticks(range(len(planners)), planners if axis is axes[0] else [""] * len(planners))
        axis.set_ylim(len(planners) - 0.5, -0.5)
        axis.set_xlim(0, 1)
        axis.set_xlabel(set_name)
    figures.save(figure, name, title)


def read(name):
    """The rows of results/NAME.csv, with numbers as numbers."""
    return [{column: text if column in WORDS else float(text) for column, text in row.items()}
            for row in figures.read(name)]


def write(name, rows, number):
    """Put the rows into the file in the place of those with the same first `number` columns. Returns all."""
    path = figures.RESULTS / f"{name}.csv"
    key = lambda row: tuple(map(str, row.values()))[:number]
    known = {key(row): row for row in (figures.read(name) if path.exists() else [])}
    rows = list((known | {key(row): row for row in rows}).values())
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f"experiments/results/{name}.csv: {len(rows)} rows")
    return read(name)


def report(tables):
    """Write the CSV files, print the tables, fill those of RESULTS.md that have their markers there."""
    rows, pairs = outcomes(tables)
    rows, pairs = write("smollm", rows, 4), write("smollm-paired", pairs, 5)
    plt = None
    if find_spec("matplotlib") is None:
        print("no figure: it needs matplotlib, which the project does not: pip install matplotlib")
    else:
        import matplotlib.pyplot as plt

        plt.rcParams.update(figures.STYLE)
    for roles in tables:
        chosen = [row for row in rows if row["roles"] == roles]
        text = f"{table_of(chosen)}\n\n{paired_table([row for row in pairs if row['roles'] == roles])}"
        print(f"\n{roles}\n\n{text}")
        figures.fill(f"smollm-{roles}", text)
        if plt:
            draw(plt, chosen, f"smollm-{roles}", f"Accuracy on held-out questions: {roles}")
