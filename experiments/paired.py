"""Compare planners question by question, on the sets that experiments/held_out.py answered.

Two planners that answer the same questions are compared by McNemar's exact test, as in solve.py --compare
(rewards/compare.py).

report() writes results/smollm.csv (a row for each planner, seed and set) and results/smollm-paired.csv (a row
for each pair). Rows that it does not make again stay in the files, so that a report on some planners or seeds
keeps what is there about the others. study.py --tables makes tables and pictures from them.
"""

import json

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


def known_sets(rows):
    """The sets of questions that some planner gets right at all."""
    return [name for name in SETS if any(row["accuracy"] for row in rows if row["set"] == name)]


def short(value):
    return f"{value:.2f}".removeprefix("0")


def accuracy_text(rows):
    """Of one seed '0.34 [.29-.40]', with Wilson's interval; of several the mean and each: '0.34: .31 .36'."""
    values = [row["accuracy"] for row in rows]
    if len(rows) == 1:
        return f"{values[0]:.2f} [{short(rows[0]['low'])}-{short(rows[0]['high'])}]"
    return f"{sum(values) / len(values):.2f}: {' '.join(map(short, values))}"


def table_of(rows):
    """The accuracies of one table's planners on each set, and the tool-calling errors on the first."""
    sets, rows = known_sets(rows), sorted(rows, key=lambda row: row["seed"])
    lines = [["planner", *sets, "errors, %"]]
    for planner in in_order({row["planner"] for row in rows}):
        of_planner = [row for row in rows if row["planner"] == planner]
        cells = [accuracy_text([row for row in of_planner if row["set"] == name]) for name in sets]
        errors = [100 * row["errors"] for row in of_planner if row["set"] == SETS[0]]
        lines.append([planner, *cells, " ".join(f"{error:.0f}" for error in errors)])
    return markdown(lines)


def paired_table(pairs):
    """The paired comparisons of one table: questions won and lost, and p, of its worst and its best seed.

    The worst is the one with the lowest difference of won and lost. So a pair whose seeds point both ways
    shows both."""
    sets = [name for name in SETS if any(row["won"] + row["lost"] for row in pairs if row["set"] == name)]
    lines = [["won, lost (p)", *sets]]
    for first, second in PAIRS:
        found = [row for row in pairs if (row["before"], row["after"]) == (first, second)]
        cells = []
        for name in sets:
            seeds = [row for row in found if row["set"] == name]
            seeds.sort(key=lambda row: row["won"] - row["lost"])
            ends = [seeds[0], seeds[-1]] if len(seeds) > 1 else seeds
            cells.append(" … ".join(f"+{row['won']:.0f} -{row['lost']:.0f} ({row['p']:.1g})" for row in ends))
        if all(cells):
            lines.append([f"{first} → {second}", *cells])
    return markdown(lines)


COLOURS = {"Flow-GRPO": figures.BLUE, "SFT": figures.RED, "router": figures.GREEN}


def draw(plt, rows, name):
    """Accuracy of each planner, a panel for each set: each seed with the Wilson interval of its questions.

    The number is the mean over the seeds. Dotted: the warm-started planner, which picks tools by chance, and
    the perfect one."""
    sets, planners = known_sets(rows), in_order({row["planner"] for row in rows})
    slots, end = {}, 0.0  # of a planner with several seeds a row is wider
    for planner in planners:
        seeds = sorted({row["seed"] for row in rows if row["planner"] == planner})
        slots |= {(planner, seed): end + 0.4 * place for place, seed in enumerate(seeds)}
        end += 0.4 * (len(seeds) - 1) + 1
    middle_of = {planner: sum(at := [place for (who, _), place in slots.items() if who == planner]) / len(at)
                 for planner in planners}
    figure, axes = plt.subplots(1, len(sets), figsize=(4.8, 0.27 * end + 0.9), constrained_layout=True,
                                squeeze=False, sharey=True)
    for axis, set_name in zip(axes[0], sets):
        for planner in planners:
            chosen = [row for row in rows if (row["planner"], row["set"]) == (planner, set_name)]
            colour = COLOURS.get(planner.split()[0], figures.INK)
            marker = "o" if colour == figures.INK else "s"
            for row in chosen:
                place = slots[planner, row["seed"]]
                axis.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=1.5)
                axis.plot(row["accuracy"], place, marker, color=colour, markersize=4)
            value = sum(row["accuracy"] for row in chosen) / len(chosen)
            axis.annotate(short(value), (1.03, middle_of[planner]), xycoords=("axes fraction", "data"),
                          va="center", color=colour, fontweight="bold", fontsize=9)
            if colour == figures.INK:
                axis.axvline(value, color=figures.INK, linewidth=1, linestyle=":", zorder=0)
        axis.set_yticks(list(middle_of.values()), list(middle_of))
        axis.set_ylim(end - 0.4, -0.6)
        axis.set_xlim(0, 1)
        axis.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
        axis.set_title(f"{set_name}\nn = {chosen[0]['questions']:.0f}", fontsize=9)
    figure.supxlabel("accuracy (share of questions)", fontsize=10)
    figures.save(figure, name)


def of_roles(roles):
    """(rows of smollm.csv, rows of smollm-paired.csv) of one table."""
    return tuple([row for row in read(name) if row["roles"] == roles] for name in ("smollm", "smollm-paired"))


def tables(roles):
    rows, pairs = of_roles(roles)
    return f"{table_of(rows)}\n\n{paired_table(pairs)}"


def picture(plt, roles):
    draw(plt, of_roles(roles)[0], f"smollm-{roles}")


def read(name):
    """The rows of results/NAME.csv, with numbers as numbers."""
    return [{column: text if column in WORDS else float(text) for column, text in row.items()}
            for row in figures.read(name)]


def write(name, rows, number):
    """Put the rows into the file in the place of those with the same first `number` columns. Returns all."""
    key = lambda row: tuple(map(str, row.values()))[:number]
    known = {key(row): row for row in (figures.read(name) if figures.path_of(name).exists() else [])}
    figures.write(figures.path_of(name), list((known | {key(row): row for row in rows}).values()))
    return read(name)


def report(found):
    """Write the CSV files, and print the tables. found: {roles: {(planner, seed): Run}}."""
    rows, pairs = outcomes(found)
    write("smollm", rows, 4), write("smollm-paired", pairs, 5)
    for roles in found:
        print(f"\n{roles}\n\n{tables(roles)}")
    print("\npython experiments/study.py --tables puts them into RESULTS.md")
