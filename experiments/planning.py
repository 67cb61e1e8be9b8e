"""The paper's analyses in the world of the second toy, where planning matters (toy/hops, docs/toy.md).

    python experiments/study.py --only hops-tests hops-ways    Flow-GRPO and what it is compared with
    python experiments/study.py --tables --only hops-tests     the table and the picture, without any run

A question needs two to five calls. What the next one must be, only the result of the last one shows, and five
turns are all there are. The world is difficult enough: here no call fails by chance. Each analysis is a
generator, as in study.py, which runs them: it first yields the runs that it needs, then its CSV files.
"""

import re
import statistics
from collections import Counter
from functools import partial

from experiments import figures
from experiments.curves import COLOURS, INK
from experiments.figures import gather, pm, read
from experiments.runs import Run, as_flags, outcome, outcomes, rollouts_of, rows_of
from rewards.metrics import markdown
from toy.hops.questions import KINDS, MAX_TURNS
from toy.hops.teacher import TOOLS

HOPS = "toy/hops"
TEST = f"{HOPS}/test.jsonl"
FREE = "experiments/hops-freely.jsonl"  # 102 questions written by hand, in no wording of the others
STEPS = 150
MODULES = ("--fixed", HOPS, "--corpus", f"{HOPS}/corpus.jsonl", "--tools", *TOOLS)
BUDGETS = (1, 2, 3, 4, 5, 6, 8)
TRIES, TRIED = 64, 100  # how often the untrained planner tries each of so many test questions
SFT = {"SFT, its own successes": "own", "SFT, perfect planner's traces": "perfect"}
SFT_STEPS, SFT_SEEDS = 50, 1


# --------------------------------------------------------------------------------------------------- the runs
def training(seed):
    command = ("train.py", "--model", HOPS, "--seed", str(seed), "--valid", "none", "--out", "{out}")
    return Run(f"hops-seed{seed}", command, rollouts=STEPS * 128)


def solving(name, seed, model, turns=MAX_TURNS, after=(), flags=(), rollouts=300):
    """solve.py on the 300 test questions, or on those of FREE: a JSONL of whole rollouts for each trial."""
    settings = {"model": model, "data": FREE if name.endswith("free") else TEST, "max-turns": turns,
                "seed": seed, "batch": 300, "out": "{out}"}
    command = ("solve.py", *as_flags(settings), "--quiet", *MODULES, *flags)
    return Run(f"hops-{name}-seed{seed}-turns{turns}", command, (), after, rollouts)


def untrained(seed):
    return solving("untrained", seed, HOPS)


def trained(seed, turns=MAX_TURNS, name="trained"):
    return solving(name, seed, f"{{0}}/step-{STEPS}", turns, (training(seed),))


def sft(seed, traces):
    settings = {"world": "hops", "traces": traces, "seed": seed, "steps": SFT_STEPS, "questions": 16,
                "lr": 4e-4, "max-turns": MAX_TURNS, "model": HOPS, "fixed": HOPS, "out": "{out}"}
    command = ("experiments/sft.py", *as_flags(settings))
    return Run(f"hops-sft-{traces}-seed{seed}", command, rollouts=SFT_STEPS * 128)


# ------------------------------------------------------------------------------------------------ the numbers
def tests_and_curve(seeds):
    """The curve of training, and the accuracy on the test questions before and after, for each kind."""
    runs = {seed: training(seed) for seed in range(seeds)}
    tests = {("untrained", seed): untrained(seed) for seed in range(seeds)}
    tests |= {("Flow-GRPO", seed): trained(seed) for seed in range(seeds)}
    free = {("untrained", seed): solving("untrained-free", seed, HOPS, rollouts=102) for seed in range(seeds)}
    free |= {("Flow-GRPO", seed): trained(seed, name="trained-free") for seed in range(seeds)}
    yield [*runs.values(), *tests.values(), *free.values()]
    columns = ("step", "reward", "errors", "turns", "plan_tokens", "flat", "groups", "clip", "entropy")
    yield "hops-curve.csv", [{"seed": seed} | {column: row[column] for column in columns}
                             for seed, run in runs.items() for row in rows_of(run.folder / "log.csv")]
    rows = []
    for (planner, seed), run in tests.items():
        rollouts = list(rollouts_of(run))
        row = {"planner": planner, "seed": seed, "questions": len(rollouts)} | outcome(rollouts)
        for kind in KINDS:
            row[kind] = outcome(rollout for rollout in rollouts if rollout["kind"] == kind)["accuracy"]
        rows.append(row | {"free": outcome(rollouts_of(free[planner, seed]))["accuracy"]})
    yield "hops-tests.csv", rows


def ways(seeds):
    """Table 3: the untrained planner, two kinds of supervised learning, Flow-GRPO, perfect plans."""
    runs = {("frozen", seed): untrained(seed) for seed in range(seeds)}
    for name, traces in SFT.items():
        for seed in range(min(seeds, SFT_SEEDS)):
            runs[name, seed] = solving(f"sft-{traces}", seed, "{0}/best", MAX_TURNS, (sft(seed, traces),))
    runs |= {("Flow-GRPO", seed): trained(seed) for seed in range(seeds)}
    runs |= {("perfect planner", seed): sft(seed, "perfect") for seed in range(min(seeds, SFT_SEEDS))}
    yield from outcomes("hops-ways.csv", runs)


SITUATIONS = {  # what the last result shows -> how it is recognised, in this order
    "a name not found": "no passage matches", "another error": "^Error",
    "another name": "filed as|now called", "a product": r"\d \* \d", "an address": r"(at|see) https://",
    "a number": r"\d",
}


def situation(steps, n):
    """What the planner saw last when it wrote its n-th plan."""
    if n == 0:
        return "nothing yet"
    return next((name for name, pattern in SITUATIONS.items() if re.search(pattern, steps[n - 1]["result"])),
                "nothing of use")


def tools(seeds):
    """Figure 5: which tool, depending on what memory shows last, before and after."""
    runs = {("before", seed): untrained(seed) for seed in range(seeds)}
    runs |= {("after", seed): trained(seed) for seed in range(seeds)}
    yield runs.values()
    rows = []
    for (when, seed), run in runs.items():
        plans = Counter((situation(steps, n), step["tool"] or "unreadable")
                        for steps in (rollout["memory"]["steps"] for rollout in rollouts_of(run))
                        for n, step in enumerate(steps))
        rows += [{"when": when, "seed": seed, "situation": what, "tool": tool, "plans": n}
                 for (what, tool), n in sorted(plans.items())]
    yield "hops-tools.csv", rows


def budget(seeds):
    """Figure 10: trained with five turns, used with one to eight."""
    runs = {(turns, seed): trained(seed, turns) for turns in BUDGETS for seed in range(seeds)}
    yield from outcomes("hops-budget.csv", runs, ("max_turns", "seed"))


def new(seeds):
    """Figure 7: test questions that the untrained planner never solves in TRIES rollouts."""
    flags = ("--trials", str(TRIES), "--limit", str(TRIED))
    many = solving("tries", 0, HOPS, flags=flags, rollouts=TRIES * TRIED)
    tests = [trained(seed) for seed in range(seeds)]
    yield [many, *tests]
    solved = Counter()
    for trial in range(TRIES):
        solved.update({row["id"]: row["reward"] for row in rollouts_of(many, f"questions-{trial}.jsonl")})
    after = [{row["id"]: row["reward"] for row in rollouts_of(run)} for run in tests]
    kinds = {row["id"]: row["kind"] for row in rollouts_of(many)}
    yield "hops-new.csv", [{"id": name, "kind": kind, "tries": TRIES, "solved": int(solved[name])}
                           | {f"seed {seed}": int(found[name]) for seed, found in enumerate(after)}
                           for name, kind in kinds.items()]


ANALYSES = {"hops-tests": tests_and_curve, "hops-ways": ways, "hops-tools": tools, "hops-budget": budget,
            "hops-new": new}


# ------------------------------------------------------------------------------------ the tables and pictures
def levels():
    """{words: accuracy on the test questions} of what Flow-GRPO is compared with."""
    routers = {row["route"]: float(row["accuracy"]) for row in read("hops-routers")}
    tests = gather(read("hops-tests"), "planner", "accuracy")
    return {"best router with perfect sub-goals": max(routers[name] for name in routers if name != "none"),
            "untrained planner": statistics.fmean(tests["untrained"])}


def tests_table():
    """Accuracy of each kind of question, before and after, each seed."""
    rows = read("hops-tests")
    lines = [["planner", "all", "seeds", *KINDS, "free wordings", "turns", "errors, %"]]
    for planner in ("untrained", "Flow-GRPO"):
        mine = [row for row in rows if row["planner"] == planner]
        of = lambda column: [float(row[column]) for row in mine]
        lines.append([planner, pm(of("accuracy")), " ".join(f"{x:.2f}" for x in of("accuracy")),
                      *(pm(of(kind), 2) for kind in (*KINDS, "free")),
                      pm(of("turns"), 2), pm(of("errors"), 1, 100)])
    routers = {row["route"]: row for row in read("hops-routers")}
    best = max((row for route, row in routers.items() if route != "none"), key=lambda row: row["accuracy"])
    for label, row in (("best router", best), ("perfect plans, perfect modules", routers["none"])):
        lines.append([label, f"{float(row['accuracy']):.3f}", "",
                      *(f"{float(row[kind]):.2f}" for kind in KINDS), "", "", ""])
    return markdown(lines)


def curve_picture(plt):
    rows = [row | {"run": "Flow-GRPO"} for row in smoothed(read("hops-curve"), figures.CURVES)]
    figure, axes = figures.panels(plt, 2, 2.3)
    for axis, (value, label), colour in zip(axes, figures.CURVES.items(), COLOURS):
        end = figures.band(axis, rows, "Flow-GRPO", value, None, {"color": colour}, every=30, rollouts=128)
        figures.annotate_ends(axis, [end], 0)
        axis.set_ylabel(label)
        axis.set_ylim(0, 1)
    for words, value in levels().items():
        figures.rule(axes[0], value, words, place=0.5)
    axes[0].axhline(1, color=INK, linewidth=1, linestyle=":", zorder=0)
    figures.save(figure, "hops-tests")


def smoothed(rows, columns, width=5):
    """The rows with means over `width` steps, as a step's 16 questions make a ragged line."""
    by_seed = {}
    for row in rows:
        by_seed.setdefault(row["seed"], []).append(row)
    return [row | {column: statistics.fmean(float(r[column]) for r in mine[max(0, i - width + 1) : i + 1])
                   for column in columns}
            for mine in by_seed.values() for i, row in enumerate(mine)]


def shares(when):
    """{situation: {tool: its share of the plans written then}}, means over seeds."""
    count = gather([row for row in read("hops-tools") if row["when"] == when],
                   ("seed", "situation", "tool"), "plans")
    seeds = sorted({seed for seed, _, _ in count})
    found = {}
    for what in ("nothing yet", *SITUATIONS):
        plans = [{tool: sum(count.get((seed, what, tool), [0])) for tool in (*TOOLS, "unreadable")}
                 for seed in seeds]
        plans = [by_tool for by_tool in plans if any(by_tool.values())]
        found[what] = {tool: statistics.fmean(by_tool[tool] / sum(by_tool.values()) for by_tool in plans)
                       for tool in (*TOOLS, "unreadable")}
    return found


def tools_table():
    """After each kind of result, the share of each tool before → after training."""
    before, after = shares("before"), shares("after")
    lines = [["memory shows last; % of plans", *TOOLS]]
    for what in before:
        cells = [f"{100 * before[what][tool]:.0f} → {100 * after[what][tool]:.0f}" for tool in TOOLS]
        lines.append([what, *cells])
    return markdown(lines)


def tools_picture(plt):
    before, after = shares("before"), shares("after")
    figures.stacked_picture(plt, "hops-tools", {what: [before[what], after[what]] for what in before})


def budget_picture(plt):
    words = f"untrained planner, {MAX_TURNS} turns"
    figures.budget_picture(plt, "hops-budget", MAX_TURNS, {words: levels()["untrained planner"]})


def bins():
    """[(right how often in TRIES tries without training, questions, share right after training each seed)]"""
    rows = read("hops-new")
    seeds = [column for column in rows[0] if column.startswith("seed ")]
    found = []
    for words, low, high in (("0", 0, 0), ("1 to 4", 1, 4), ("5 or more", 5, TRIES)):
        mine = [row for row in rows if low <= int(row["solved"]) <= high]
        share = [statistics.fmean(float(row[seed]) for row in mine) for seed in seeds]
        found.append((words, len(mine), share))
    return found


def new_table():
    lines = [[f"untrained: right in {TRIES} tries", "questions", "right after training, one try"]]
    return markdown(lines + [[words, str(number), pm(share)] for words, number, share in bins()])


def new_picture(plt):
    figure, (axis,) = figures.panels(plt, 1, 1.9)
    for place, (_, _, share) in enumerate(bins()):
        middle, half = figures.dots(axis, place, share, COLOURS[0])
        axis.annotate(f"{middle:.2f}", (middle, place), xytext=(0, 8), textcoords="offset points",
                      ha="center", color=COLOURS[0], fontweight="bold")
    axis.set_yticks(range(3), [f"{words} ({number} questions)" for words, number, _ in bins()])
    axis.set_ylim(2.6, -0.6)
    axis.set_xlim(0, 1)
    axis.set_ylabel(f"right in {TRIES} tries\nwithout training")
    axis.set_xlabel("share right after training, one try")
    figures.save(figure, "hops-new")


PAGES = {  # as in study.py
    "hops-tests": ("Reward and errors in the world of the second toy",
             "Flow-GRPO in training, means over five steps; in the table, 300 test questions",
             tests_table, curve_picture),
    "hops-ways": ("Accuracy of five planners",
                  f"Accuracy on 300 test questions; SFT and perfect planner: {SFT_SEEDS} seed",
                  partial(figures.planners_table, "hops-ways"),
                  partial(figures.planners_picture, name="hops-ways")),
    "hops-tools": ("Shares of tools, by what memory shows last",
                   "Tools by what memory shows last, 300 test questions, before and after training; means",
                   tools_table, tools_picture),
    "hops-budget": ("Accuracy and turns used", "Turn budget in use; 300 test questions",
                    partial(figures.budget_table, "hops-budget"), budget_picture),
    "hops-new": ("Accuracy after training", f"The first {TRIED} test questions, by how often the untrained "
                 f"planner is right in {TRIES} rollouts", new_table, new_picture),
}
