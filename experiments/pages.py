"""Tables and pictures of RESULTS.md (sections 1 to 8), README.md and docs/speed.md, from results/*.csv.

    python experiments/study.py --tables                      all; no run is made
    python experiments/study.py --tables --only hops-ways     one

PAGES has a table and a picture for each analysis of planning.py. Those of SmolLM2 are made no more: its
numbers are of commit 80a4902, and the last script that drew them is `git show 2623e65:experiments/paired.py`.
"""

import re
import statistics
from collections import Counter, defaultdict
from functools import partial

from cli.flags import FOR_HOPS
from experiments import curves, figures, runs
from experiments.figures import BLUE, COLOURS, GREEN, INK, PURPLE, RED, gather, over, pm, read
from experiments.planning import ONLINE, SFT, SFT_BATCHES, SITUATIONS, STEPS, TOOLS, TRIED, TRIES
from rewards.metrics import markdown
from toy.hops.questions import KINDS, MAX_TURNS

CURVES = {"reward": "reward (share right)", "errors": "tool-calling errors\n(share of turns)"}
LINES = [{"color": BLUE}, {"color": RED, "linestyle": "--"}]
TOOL_COLOURS = {"base_generator": PURPLE, "python_coder": BLUE, "wikipedia_search": GREEN, "web_search": INK,
                "unreadable": RED}


# ------------------------------------------------------------------------------------------ training curves
def best_router(planner="perfect", folder=None):
    """{seed: the row of hops-routers.csv with the highest accuracy}, of the routers in a planner's plans.

    The rules by the context and by the last result are none of them: they read the memory."""
    best = {}
    for row in read("hops-routers", folder):
        if row["planner"] == planner and row["route"] not in ("none", "context", "result"):
            best[row["seed"]] = max(best.get(row["seed"], row), row, key=lambda row: float(row["accuracy"]))
    return best


def tests_table():
    """Accuracy of each kind of question, before and after, each seed."""
    rows = read("hops-tests")
    lines = [["planner", "all", "seeds", *KINDS, "free wordings", "turns", "errors, %"]]
    for planner in ("untrained", "Flow-GRPO"):
        of = lambda column: gather(rows, "planner", column)[planner]
        lines.append([planner, pm(of("accuracy")), seeds_of(of("accuracy")),
                      *(pm(of(kind), 2) for kind in (*KINDS, "free")),
                      pm(of("turns"), 2), pm(of("errors"), 1, 100)])
    ruled = defaultdict(dict)  # {(planner, route): {seed: row}}
    for row in read("hops-routers"):
        ruled[row["planner"], row["route"]][row["seed"]] = row
    for label, best in (("best of six routers, perfect sub-goals", best_router()),
                        ("tools in a fixed sequence, perfect sub-goals", ruled["perfect", "sequence"]),
                        ("the same, sub-goals of Flow-GRPO", ruled["Flow-GRPO", "sequence"]),
                        ("rule by the context, perfect plans", ruled["perfect", "context"]),
                        ("rule by the last result, perfect plans", ruled["perfect", "result"]),
                        ("the same, plans of the untrained planner", ruled["untrained", "result"]),
                        ("perfect plans, perfect modules", ruled["perfect", "none"])):
        of = lambda column: [float(row[column]) for row in best.values()]
        seeds = seeds_of(of("accuracy")) if len(best) > 1 else ""
        lines.append([label, pm(of("accuracy")), seeds, *(pm(of(kind), 2) for kind in KINDS), "", "", ""])
    return markdown(lines)


def compared_table(name):
    """Reward at the start and at the end of training, the test before and after, and the gap at the end."""
    rows = read(name)
    end = max(int(row["step"]) for row in rows)
    lines = [["", "reward, steps 1-10", f"reward, steps {end - 9}-{end}", "test before", "test after",
              "last steps minus test"]]
    for run in dict.fromkeys(row["run"] for row in rows):
        first, last = (over(rows, run, start, start + 9, "reward") for start in (1, end - 9))
        before, after = (over(rows, run, 1, 1, f"test_{when}") for when in ("before", "after"))
        gap = [a - b for a, b in zip(last, after)]
        lines.append([run, *map(pm, (first, last, before, after, gap))])
    return markdown(lines)


def trailing(rows, width=5):
    """(row, the last `width` rows of its seed, up to it), for each row of one run. The few questions of a
    step make a ragged line, so the pictures show each step together with those before it."""
    by_seed = defaultdict(list)
    for row in rows:
        by_seed[row["seed"]].append(row)
        yield row, by_seed[row["seed"]][-width:]


def smoothed(rows, columns):
    """The rows of one run, with means over five steps in these columns."""
    return [row | {column: statistics.fmean(float(r[column]) for r in last) for column in columns}
            for row, last in trailing(rows)]


def shares_of(rows, right, of):
    """[{"seed", "step", "share"}]: of the plans of five steps that `of` counts, how many `right` counts."""
    shares = []
    for row, last in trailing(rows):
        some, all_of_them = (sum(int(r[name]) for r in last) for name in (right, of))
        if all_of_them:
            shares.append({"seed": row["seed"], "step": row["step"], "share": some / all_of_them})
    return shares


def curves_picture(plt, name, csv):
    """Reward and errors, step by step, of each run of a CSV file."""
    rows = read(csv)
    names = dict.fromkeys(row["run"] for row in rows)
    figure, axes = figures.panels(plt, 2, 2.4)
    for axis, (column, label) in zip(axes, CURVES.items()):
        ends = []
        for run, look in zip(names, LINES):
            mine = smoothed([row for row in rows if row["run"] == run], CURVES)
            ends.append(figures.band(axis, mine, column, run, look))
        figures.annotate_ends(axis, ends, 0.09)
        axis.set_xlabel("step (128 rollouts each)")
        axis.set_ylabel(label)
        axis.set_ylim(0, 1)
    if len(names) > 1:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", frameon=False, ncol=2)
    else:
        for words, (value, place) in levels().items():
            figures.rule(axes[0], value, words, place)
    figures.save(figure, figures.RESULTS / f"{name}.svg")


def smollm_picture(plt):
    """SmolLM2 in the second toy's world: its reward, and how often it names the right tool after each of the
    two kinds of result."""
    rows = read("smollm-hops-curve")
    figure, axes = figures.panels(plt, 2, 2.4)
    ends = [figures.band(axes[0], smoothed(rows, ["reward"]), "reward", "SmolLM2 plans", LINES[0])]
    if figures.path_of("smollm-hops-all-curve").exists():
        alone = smoothed(read("smollm-hops-all-curve"), ["reward"])
        ends.append(figures.band(axes[0], alone, "reward", "SmolLM2 plays all modules (one seed)", LINES[1]))
    figures.annotate_ends(axes[0], ends, 0.09)
    figures.rule(axes[0], 0.5, "the best that a router can do", 0.02)
    ends = [figures.band(axes[1], shares_of(rows, f"{seen}_right", f"{seen}_plans"), "share", words, look)
            for (seen, words), look in zip((("address", "web_search after an address"),
                                            ("product", "python_coder after a product")), LINES)]
    figures.annotate_ends(axes[1], ends, 0.09)
    for axis, label in zip(axes, ("reward (share right)", "right tool (share of plans)")):
        axis.set_xlabel("step (32 rollouts each)")
        axis.set_ylabel(label)
        axis.set_ylim(0, 1)
        axis.legend(frameon=False, loc="lower right", fontsize=8)
    figures.save(figure, figures.RESULTS / "smollm-hops.svg")


def levels():
    """{words: (accuracy on the test questions, where the words stand)}, to compare Flow-GRPO with."""
    untrained = gather(read("hops-tests"), "planner", "accuracy")["untrained"]
    return {"best of six routers": (float(best_router()[""]["accuracy"]), 0.02),
            "untrained planner": (statistics.fmean(untrained), 0.3)}


# ------------------------------------------------------------------------------------------ planners, forks
FLOW = "Flow-GRPO, ten seeds"
SFTS = [*SFT.values(), ONLINE]
LEARNS = {  # planner: what it learns from, and the steps of 128 rollouts
    SFT["own"]: ("right rollouts", SFT_BATCHES), SFT[f"own-{STEPS}"]: ("right rollouts", STEPS),
    ONLINE: ("right rollouts", STEPS), SFT["perfect"]: ("right plans", SFT_BATCHES),
    SFT["foreign"]: ("right plans", SFT_BATCHES), "Flow-GRPO": ("right or wrong", STEPS),
    FLOW: ("right or wrong", STEPS)}


def ways_table():
    """What each planner has learnt from, how much of it, and its accuracy."""
    lines = [["planner", "learns from", "rollouts", "updates", "accuracy", "seeds (Intel)",
              "minus the ten seeds", "p, Holm"]]
    rows, ten = read("hops-ways"), ten_seeds()
    accuracies = gather(rows, "planner", "accuracy")
    compared = with_holm({who: values for who, values in accuracies.items() if who in SFTS}, ten)
    compared["Flow-GRPO"] = str(figures.difference(accuracies["Flow-GRPO"], ten)), ""
    on_intel = Counter(row["planner"] for row in rows if "(Intel)" in row["seed"])
    for who, values in [*accuracies.items(), (FLOW, ten)]:
        source, steps = LEARNS.get(who, ("", 0))
        amounts = [str(n * steps or "") for n in (128, FOR_HOPS["minibatches"])]
        intel = len(values) if who == FLOW else on_intel[who]
        seeds = f"{len(values)} ({intel})" if intel else str(len(values))
        lines.append([who, source, *amounts, pm(values), seeds, *compared.get(who, ("", ""))])
    return markdown(lines)


def rows_picture(plt, rows, label):
    """A row for each of {name: (seeds, colour)}: the seeds as dots, their mean, its interval, its value."""
    figure, (axis,) = figures.panels(plt, 1, 0.42 * len(rows) + 0.8)
    for place, (values, colour) in enumerate(rows.values()):
        middle, _ = figures.dots(axis, place, values, colour)
        axis.annotate(f"{middle:.3f}", (1.02, place), xycoords=("axes fraction", "data"), va="center",
                      color=colour, fontweight="bold")
    axis.set_yticks(range(len(rows)), [who.replace(", ", ",\n") for who in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlabel(label)
    return figure, axis


def ways_picture(plt):
    """The accuracy of each planner; dotted: the frozen and the perfect planner."""
    accuracy = gather(read("hops-ways"), "planner", "accuracy")
    ends = "frozen", "perfect planner"
    rows = {who: (values, INK if who in ends else BLUE if who.startswith("Flow") else RED)
            for who, values in accuracy.items()}
    figure, axis = rows_picture(plt, rows, "accuracy (share of test questions)")
    for who in ends:
        axis.axvline(statistics.fmean(accuracy[who]), color=INK, linewidth=1, linestyle=":", zorder=0)
    axis.set_xlim(0, 1)
    figures.save(figure, figures.RESULTS / "hops-ways.svg")


def forked(column):
    """({fork: the values of its seeds}, those of the planner as it is); column: of hops-forks.csv."""
    rows = read("hops-forks") if figures.path_of("hops-forks").exists() else []  # none before they ran
    values = dict(gather(rows, "run", column))
    as_it_is = values.pop("as it is", [])
    return values, as_it_is


def ten_seeds():
    """The accuracies of all ten seeds of Flow-GRPO on the Intel."""
    return [accuracy for name in ("hops-tests", "hops-fresh")
            for accuracy in gather(read(name, INTEL), "planner", "accuracy")["Flow-GRPO"]]


def fork_results():
    """{fork: what its head says after "result:"}, of those that were measured."""
    values, as_it_is = forked("accuracy")
    measured = {name: (seeds, as_it_is, 8) for name, seeds in values.items()}
    online = gather(read("hops-ways", INTEL), "planner", "accuracy")[ONLINE]
    measured["successes"] = online, ten_seeds(), 1
    return {name: f"{figures.difference(seeds, base)} in accuracy, {len(seeds)} seeds "
                  f"(experiments/RESULTS.md, section {section})"
            for name, (seeds, base, section) in measured.items()}


def write_results():
    """The line `result:` in the head of each fork that was measured; --token-mean is a flag and has none."""
    for name, result in fork_results().items():
        path = runs.path_of(f"forks/{name}")
        if path.exists():
            line, text = f"result: {result}", path.read_text(encoding="utf-8")
            path.write_text(re.sub("(?m)^result: .*$", lambda _: line, text, count=1), encoding="utf-8")


def forks_table():
    """Each fork's accuracy, minus that of the planner as it is, and the same of its success in training."""
    accuracies, as_it_is = forked("accuracy")
    tested, training = with_holm(accuracies, as_it_is), with_holm(*forked("reward"))
    lines = [["fork", "accuracy of each seed", "minus as it is", "p, Holm", "findable",
              "right in training, minus as it is", "p, Holm"],
             ["as it is", seeds_of(as_it_is), *[""] * 5]]
    for name, seeds in accuracies.items():
        found = f"{figures.findable(seeds, as_it_is):.2f}"
        lines.append([name, seeds_of(seeds), *tested[name], found, *training[name]])
    return markdown(lines)


def seeds_of(values):
    return " ".join(f"{value:.2f}" for value in values)


def with_holm(values, base):
    """{name: (its difference from base, Holm's p)}, as text."""
    changes = [figures.difference(seeds, base) for seeds in values.values()]
    adjusted = figures.holm([change.p for change in changes])
    return {name: (str(change), figures.shown_p(p)) for name, change, p in zip(values, changes, adjusted)}


def forks_picture(plt):
    """The accuracies; the line is the mean of the planner as it is."""
    values, as_it_is = forked("accuracy")
    rows = {"as it is": (as_it_is, INK)} | {name: (seeds, BLUE) for name, seeds in values.items()}
    figure, axis = rows_picture(plt, rows, "accuracy (share of test questions)")
    axis.axvline(statistics.fmean(as_it_is), color=INK, linewidth=1, linestyle=":", zorder=0)
    axis.set_xlim(0, 1)
    figures.save(figure, figures.RESULTS / "hops-forks.svg")


# ------------------------------------------------------------------------------------------ what is learnt
def shares(when):
    """{situation: {tool: its share of the plans written then}}, of all seeds together."""
    count = plans(when)
    return {what: {tool: n / sum(by_tool.values()) for tool, n in by_tool.items()}
            for what, by_tool in count.items()}


def plans(when):
    """{situation: {tool: how many plans named it then}}, of all seeds together."""
    count = gather([row for row in read("hops-tools") if row["when"] == when], ("situation", "tool"), "plans")
    return {what: {tool: sum(count.get((what, tool), [0])) for tool in TOOL_COLOURS}
            for what in ("nothing yet", *SITUATIONS)}


def tools_table():
    """After each kind of result, the share of each tool before → after training."""
    before, after, number = shares("before"), shares("after"), plans("after")
    lines = [["memory shows last; % of plans", *TOOLS, "not parsed", "plans, after"]]
    for what in before:
        cells = [f"{100 * before[what][tool]:.0f} → {100 * after[what][tool]:.0f}"
                 for tool in (*TOOLS, "unreadable")]
        lines.append([what, *cells, f"{sum(number[what].values()):.0f}"])
    return markdown(lines)


def tools_picture(plt):
    """Two stacked bars, before and after, for each kind of result."""
    before, after = shares("before"), shares("after")
    figure, (axis,) = figures.panels(plt, 1, 0.9 * len(before) + 0.6)
    places = [k + 0.42 * w for k in range(len(before)) for w in range(2)]
    bars = [parts for what in before for parts in (before[what], after[what])]
    for place, parts in zip(places, bars):
        left = 0
        for tool, share in parts.items():
            label = tool.replace("unreadable", "plan not parsed") if place == 0 else None
            axis.barh(place, share, 0.38, left, color=TOOL_COLOURS[tool], label=label)
            if share > 0.07:
                axis.annotate(f"{100 * share:.0f}", (left + share / 2, place), color="white",
                              ha="center", va="center", fontweight="bold")
            left += share
    axis.set_yticks(places, [text for words in before for text in (f"{words}, before", "after")])
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    axis.set_xlabel("share of the planner's turns, %")
    figure.legend(loc="outside lower center", ncol=2, frameon=False)
    figures.save(figure, figures.RESULTS / "hops-tools.svg")


def budget_table():
    accuracy, used = (gather(read("hops-budget"), "max_turns", column) for column in ("accuracy", "turns"))
    return markdown([["turns at most", "accuracy", "turns used"],
                     *([turns, pm(accuracy[turns]), pm(used[turns], 2)] for turns in accuracy)])


def budget_picture(plt):
    figure, axes = figures.panels(plt, 2)
    labels = [("accuracy", "accuracy\n(share of test questions)"), ("turns", "turns used")]
    for axis, (column, label), colour in zip(axes, labels, COLOURS):
        by_turns = gather(read("hops-budget"), "max_turns", column)
        places = [int(turns) for turns in by_turns]
        middle, half = zip(*map(figures.mean, by_turns.values()))
        for place, value, values in zip(places, middle, by_turns.values()):
            axis.plot([place + 0.15] * len(values), values, "o", color=colour, markersize=3, alpha=0.6)
            axis.annotate(f"{value:.2f}", (place, value), xytext=(-5, 6), textcoords="offset points",
                          ha="right", color=colour, fontweight="bold")
        axis.errorbar(places, middle, yerr=half, color=colour, marker="s", markersize=5, capsize=3)
        axis.set_xticks(places)
        axis.set_xlabel(f"turns at most (trained with {MAX_TURNS})")
        axis.set_ylabel(label)
        axis.set_xlim(places[0] - 0.9, None)
        axis.set_ylim(0, 1.15 if column == "accuracy" else 4)
    untrained, _ = levels()["untrained planner"]
    figures.rule(axes[0], untrained, f"untrained planner, {MAX_TURNS} turns", place=0.45)
    figures.save(figure, figures.RESULTS / "hops-budget.svg")


def bins(folder=None):
    """[(right how often in TRIES tries without training, questions, share right after training each seed)]"""
    rows = read("hops-new", folder)
    seeds = [column for column in rows[0] if column.startswith("seed ")]
    found = []
    for words, low, high in (("0", 0, 0), ("1 to 4", 1, 4), ("5 or more", 5, TRIES)):
        mine = [row for row in rows if low <= int(row["solved"]) <= high]
        share = [statistics.fmean(float(row[seed]) for row in mine) for seed in seeds]
        found.append((words, len(mine), share))
    return found


def new_table():
    lines = [[f"untrained: right in {TRIES} tries", "questions", "right after training, one try"]]
    lines += [[words, str(number), pm(share)] for words, number, share in bins()]
    steps = read("hops-trace")
    turns = [[row["turn"], row["sub_goal"], row["tool"], row["result"].replace("\n", "; ")] for row in steps]
    question, answer = steps[0]["question"], steps[0]["answer"]
    return (f"{markdown(lines)}\n\nOne of the first row, solved after training: *{question}*\n\n"
            f"{markdown([['turn', 'sub-goal', 'tool', 'result'], *turns])}\n\nAnswer: {answer}")


def new_picture(plt):
    rows = {f"{words} ({number} questions)": (share, BLUE) for words, number, share in bins()}
    figure, axis = rows_picture(plt, rows, "share right after training, one try")
    axis.set_ylabel(f"right in {TRIES} tries\nwithout training")
    axis.set_xlim(0, 1)
    figures.save(figure, figures.RESULTS / "hops-new.svg")


def mixtures_table():
    """Section 1: what becomes of base_generator, for each mixture of training questions that was tried."""
    runs_of = defaultdict(dict)  # {(mixture, seed): {steps: row}}
    for row in read("hops-mixtures"):
        runs_of[row["training"], row["seed"]][row["steps"]] = row
    lines = [["questions with an old name", "seed", "base_generator, steps 31-40", "steps 141-150",
              "old names, right", "others, right", "accuracy"]]
    for (mixture, seed), by_steps in runs_of.items():
        early, last = by_steps["31-40"], by_steps["141-150"]
        shares = [f"{int(row['base_generator']) / int(row['plans_after_not_found']):.1%}".replace("%", " %")
                  for row in (early, last)]
        lines.append([mixture, seed, *shares, f"{last['old_names_right']} of {last['old_names']}",
                      f"{last['others_right']} of {last['others']}", f"{float(last['test_accuracy']):.2f}"])
    return markdown(lines)


def speed_table(beside):
    """docs/speed.md: what the same work costs the side `beside` and ours, from `bench/speed.py --out`."""
    lines = [["work", f"{beside}: s", "CPU s", "ours: s", "CPU s", "faster", "leaner (MiB)"]]
    for row in read("speed"):
        if row["beside"] == beside:
            its, our = ([float(row[f"{whose}_{key}"]) for key in ("seconds", "cpu_seconds", "MiB")]
                        for whose in ("its", "our"))
            seconds = [f"{x:.2f}" for x in (*its[:2], *our[:2])]
            memory = f"{its[2] / our[2]:.1f} ({its[2]:.0f} / {our[2]:.0f})"
            lines.append([row["work"].replace("V 151936", "V 152k").replace("V 1024", "V 1k"), *seconds,
                          f"{its[1] / our[1]:.1f}", memory])
    return markdown(lines)


PAGES = {  # {name: (the picture's text, what the caption says first, () -> table, plt -> picture)}
    "hops-tests": ("Reward and errors",
                   "Flow-GRPO in training, means over five steps; in the table, 300 test questions, 100 of "
                   "each kind: one (the number of a thing), plus (this number plus a given one), sum (of the "
                   "numbers of two things)",
                   tests_table, partial(curves_picture, name="hops-tests", csv="hops-curve")),
    "hops-ways": ("Accuracy of each planner", "Accuracy on 300 test questions (the table has ten more seeds)",
                  ways_table, ways_picture),
    "hops-tools": ("Shares of tools, by what memory shows last",
                   "Tools by what memory shows last, 300 test questions, before and after training",
                   tools_table, tools_picture),
    "hops-budget": ("Accuracy and turns used", "Turn budget in use; 300 test questions",
                    budget_table, budget_picture),
    "hops-new": ("Accuracy after training", f"The first {TRIED} test questions, by how often the untrained "
                 f"planner is right in {TRIES} rollouts", new_table, new_picture),
    "hops-monolith": ("Reward and errors",
                      "The flow and a monolithic policy in training; in the picture, means over five steps",
                      partial(compared_table, "hops-monolith"),
                      partial(curves_picture, name="hops-monolith", csv="hops-monolith")),
    "hops-sizes": ("Reward and errors",
                   "Two sizes of all modules in training; in the picture, means over five steps",
                   partial(compared_table, "hops-sizes"),
                   partial(curves_picture, name="hops-sizes", csv="hops-sizes")),
    "hops-forks": ("Accuracy of each fork",
                   "Accuracy on 300 test questions, and share of right rollouts in all steps of training; "
                   "findable: the smallest true difference in accuracy that five seeds each would find in "
                   "four studies of five", forks_table, forks_picture),
}
INTEL = figures.RESULTS / "intel"  # the CSV files of another CPU


def block(name):
    """What RESULTS.md holds between the two comments of this name: picture, caption, table.

    The caption says what is drawn, n and the kind of the intervals, and the command that makes the runs."""
    alt, what, table, _ = PAGES[name]
    rows = [row for row in read(name) if row.get("run") != "as it is"]  # with which forks are compared
    how = f"n = {figures.number_of_seeds(rows)} seeds"
    how = f"{how} together" if name == "hops-tools" else f"95 % t-intervals, {how}"
    caption = f"{what}; {how}. `python experiments/study.py --only {name}`"
    return f"![{alt}](results/{name}.svg)\n\n*{caption}*\n\n{table()}"


def draw(plt, name):
    """The picture of a block, with Matplotlib."""
    plt.rcParams.update(figures.STYLE)
    PAGES[name][-1](plt)
    plt.close("all")


# ------------------------------------------------------------------------------------------ another CPU
FITTING = {"a name not found": "base_generator", "an address": "web_search", "a product": "python_coder",
           "another name": "wikipedia_search"}  # what memory shows last -> the tool that the next step needs


def measures(folder):
    """{what was measured: its value for each seed}, from the CSV files that study.py wrote into a folder."""
    names = ("toy-tests", "hops-tests", "hops-tools", "hops-budget", "hops-ways", "hops-monolith",
             "hops-sizes")
    rows = {name: read(name, folder) for name in names}
    toy = gather(rows["toy-tests"], "when", "accuracy")
    found = {"first toy, untrained": toy["before"], "first toy, Flow-GRPO": toy["after"]}
    of = lambda column: gather(rows["hops-tests"], "planner", column)
    found |= {f"second toy, {planner}": of("accuracy")[planner] for planner in ("untrained", "Flow-GRPO")}
    ways = gather(rows["hops-ways"], "planner", "accuracy")
    found |= {f"second toy, {name}": ways[name] for traces, name in SFT.items() if "-" not in traces}
    found |= {f"second toy, Flow-GRPO, {words}": of(column)["Flow-GRPO"] for column, words in (
        ("sum", "questions for a sum"), ("free", "free wordings"), ("errors", "share of errors"))}
    for name, run, words in (("hops-monolith", "monolith", "monolith"),
                             ("hops-sizes", "width 64", "all modules half as wide")):
        tests = {row["seed"]: float(row["test_after"]) for row in rows[name] if row["run"] == run}
        found[f"second toy, {words}"] = list(tests.values())
    routed = best_router("Flow-GRPO", folder)
    found["second toy, router, Flow-GRPO's sub-goals"] = [float(row["accuracy"]) for row in routed.values()]
    by_budget = gather(rows["hops-budget"], "max_turns", "accuracy")
    found |= {f"second toy, Flow-GRPO, at most {turns} turns": by_budget[turns] for turns in "2348"}
    found[f"questions that were never right in {TRIES} tries, after training"] = bins(folder)[0][2]
    after = [row for row in rows["hops-tools"] if row["when"] == "after"]
    seeds = dict.fromkeys(row["seed"] for row in after)
    written = gather(after, ("situation", "seed"), "plans")
    fitting = gather([row for row in after if row["tool"] == FITTING.get(row["situation"])],
                     ("situation", "seed"), "plans")
    for what, tool in FITTING.items():
        found[f"{tool} after {what}"] = [sum(fitting[what, n]) / sum(written[what, n]) for n in seeds]
    return found


def two_cpus_table():
    """What the same commands gave on two CPUs."""
    epyc, intel = measures(figures.RESULTS), measures(INTEL)
    return markdown([["", "AMD EPYC", "Intel Xeon"],
                     *([what, pm(values), pm(intel[what])] for what, values in epyc.items())])


# ------------------------------------------------------------------------------------------ README
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


def toy_picture(plt):
    """experiments/curve.svg, README's curve."""
    by_seed = defaultdict(dict)
    for row in read("toy"):
        by_seed[row["seed"]][int(row["step"])] = row
    lines = {f"Flow-GRPO on the toy, {len(by_seed)} seeds": list(by_seed.values())}
    untrained = statistics.fmean(gather(read("toy-tests"), "when", "accuracy")["before"])
    rules = {"reward": (untrained, "untrained planner, reward on the test questions")}
    figures.save(curves.picture(plt, lines, ["reward", "errors", "turns"], rules),
                 figures.FOLDER / "curve.svg")
    plt.close("all")
