"""Remake the paper's analyses at toy scale: every run, every table and every picture of RESULTS.md.

    pip install matplotlib
    python experiments/study.py --tables               tables and pictures from results/*.csv, without any run
    python experiments/study.py                        everything: four hours or more on 2 cores
    python experiments/study.py --only ways budget     some of it
    python experiments/study.py --only forks --seeds 9     section 8: so many seeds, says power.py

Each analysis below is a generator. It first yields the runs that it needs: commands of this repository
(train.py, solve.py, toy/make.py, or a script beside this one) in copies of the code with a line or two
changed (edits/, forks/, runs.py). When they are finished, it yields its CSV files. PAGES has the tables and
pictures that are made from these (figures.py, power.py, paired.py); those of section 9 are from runs of
smollm.py.
"""

import argparse
import csv
import json
import re
import statistics
import sys
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from logbook import endings

endings.without_traceback(__name__)

from experiments import figures, paired, planning, power
from experiments.runs import RUNS, Run, as_flags, make_all, note, outcome, outcomes, rollouts_of, rows_of

RESULTS = figures.RESULTS
FEW = "../few.jsonl"  # questions that choose best/: with one checkpoint four are enough
TOOLS = ("base_generator", "python_coder", "wikipedia_search")
MODULES = ("--fixed", "toy", "--corpus", "toy/corpus.jsonl", "--tools", *TOOLS)
STEPS, MONOLITH_STEPS, EARLY = 24, 16, 8  # of the main runs; of the monolith's; of the variants'

# The world of all runs. The toy as it is saturates in a dozen steps. In this world one tool call in ten fails
# for no reason, and one verdict in ten is inverted. Both draw from torch's generator, so a seed decides all.
RIGHT_VERDICTS = ("edits/calls-fail", "edits/programs-kept")
WORLD = (*RIGHT_VERDICTS, "edits/verdicts-wrong")
VARIANTS = {  # name -> (flags, edits): what each changes, and nothing else
    "turn-stats": ((), (*WORLD, "edits/turn-stats")),
    "token-mean": (("--token-mean",), WORLD),
    "beta-0": (("--beta", "0"), WORLD),
    "beta-0.1": (("--beta", "0.1"), WORLD),
    "clip-0.2-0.2": (("--clip-high", "0.2"), WORLD),
    "clip-none": (("--clip-low", "1", "--clip-high", "1000"), WORLD),
    "G-2": (("--group-size", "2", "--questions", "48"), WORLD),
    "G-4": (("--group-size", "4", "--questions", "24"), WORLD),
    "G-16": (("--group-size", "16", "--questions", "6"), WORLD),
    "one-step": (("--minibatches", "1"), WORLD),
    "wrong-reward": ((), (*WORLD, "edits/wrong-reward")),
    "always-stops": ((), (*RIGHT_VERDICTS, "edits/always-stops")),
    "never-stops": ((), (*RIGHT_VERDICTS, "edits/never-stops")),
}
TWO_STEPS = {"train": "../two-steps-train.jsonl", "test": "../two-steps-test.jsonl"}
TRACES = {"SFT, its own successes": "own", "SFT, perfect planner's traces": "perfect"}
RARE = {  # how the lazy planner learns: name -> (flags, edits)
    "Flow-GRPO": ((), WORLD),
    "Flow-GRPO, G = 32": (("--group-size", "32", "--questions", "3"), WORLD),
    "Flow-GRPO, flat groups replaced": ((), (*WORLD, "forks/dapo")),
}
FORKS = ("dr-grpo", "rloo", "dapo", "gspo", "cispo", "gigpo", "last-turn", "turn-cost", "asymmetric",
         "entropy")
TRIALS = 3  # how often each planner of section 8 answers the test questions


# --------------------------------------------------------------------------------------------------- the runs
def training(name, seed, model="toy", steps=STEPS, flags=(), edits=WORLD, after=(), graded="test"):
    """train.py for a planner. graded: the questions of toy/ that it answers before and after; None: a few."""
    settings = {
        "model": model, "seed": seed, "steps": steps, "every": steps, "max-turns": 3, "questions": 12,
        "group-size": 8, "lr": 3e-4, "minibatches": 4, "data": "toy/train.jsonl", "valid": FEW,
        "test": f"toy/{graded}.jsonl" if graded else FEW, "out": "{out}",
    }
    command = ("train.py", *as_flags(settings), *MODULES, *flags)  # of two equal ones the last counts
    return Run(f"{name}-seed{seed}", command, edits, after, steps * 96 + (300 if graded else 0))


def solving(name, seed, model, turns=3, after=(), data="toy/test.jsonl"):
    """solve.py on the 300 test questions: a JSONL of whole rollouts."""
    command = ("solve.py", "--model", model, "--data", data, "--max-turns", str(turns),
               "--seed", str(seed), "--batch", "300", "--quiet", "--out", "{out}", *MODULES)
    return Run(f"{name}-solving-seed{seed}-turns{turns}", command, WORLD, after, 150)


def trained(run, seed, turns=3, data="toy/test.jsonl"):
    """solve.py with the planner that this run trained."""
    return solving(run.name, seed, "{0}/best", turns, (run,), data)


def flow_grpo(seed):
    return training("flow-grpo", seed)


def sft(seed, traces, flags=(), after=(), name="sft"):
    settings = ("--traces", traces, "--seed", str(seed), "--steps", str(STEPS), "--out", "{out}", *flags)
    return Run(f"{name}-{traces}-seed{seed}", ("experiments/sft.py", *settings), WORLD, after, STEPS * 50)


def lazy():
    """A planner that names base_generator in three plans of five: its first rollouts rarely end well."""
    return sft(0, "lazy", ("--steps", "8"))


def rare(name, seed):
    """The lazy planner learns, from questions with two steps alone."""
    if name in TRACES:
        flags = ("--model", "{0}/best", "--kind", "fact_math")
        return sft(seed, TRACES[name], flags, (lazy(),), "rare-sft")
    flags, edits = RARE[name]
    name, flags = re.sub(r"\W+", "-", f"rare-{name}"), ("--data", TWO_STEPS["train"], *flags)
    return training(name, seed, "{0}/best", STEPS, flags, edits, (lazy(),), None)


def monolith(seed):
    start = Run("monolith", ("experiments/monolith.py", "--out", "{out}"), ("edits/programs-kept",), (), 4000)
    edits = (*WORLD, "edits/monolith")
    return training("monolith", seed, "{0}", MONOLITH_STEPS, edits=edits, after=(start,))


def small(seed):
    command = ("toy/make.py", "--rollouts", "6000", "--steps", "3000", "{out}")
    start = Run("toy-64", command, ("edits/small-toy",), (), 4000)
    return training("width-64", seed, "{0}", after=(start,))


def variant(name, seed):
    flags, edits = VARIANTS[name]
    return training(name, seed, steps=EARLY, flags=flags, edits=edits, graded=None)


def fork(name, seed):
    edit = f"forks/{name}"
    flags = note(edit, "flags").split()
    return training(f"fork-{name}", seed, flags=flags, edits=(*WORLD, edit), graded=None)


# ------------------------------------------------------------------------------------------------ the numbers
def ways(seeds):
    """1. Frozen, offline SFT on two kinds of traces, Flow-GRPO, on the same test questions."""
    runs = {("frozen", seed): solving("frozen", seed, "toy") for seed in range(seeds)}
    runs |= {(name, seed): trained(sft(seed, TRACES[name]), seed) for name in TRACES for seed in range(seeds)}
    runs |= {("Flow-GRPO", seed): trained(flow_grpo(seed), seed) for seed in range(seeds)}
    runs |= {("perfect planner", seed): sft(seed, "perfect") for seed in range(seeds)}
    yield from outcomes("ways.csv", runs)


def foreign(seeds):
    """1. The same with a teacher whose sub-goals are in words that the executor does not know."""
    runs = {("frozen", seed): solving("frozen", seed, "toy") for seed in range(seeds)}
    planners = {"SFT, perfect planner's traces": partial(sft, traces="perfect"), "Flow-GRPO": flow_grpo,
                "SFT, foreign teacher's traces": partial(sft, traces="foreign")}
    for name, make in planners.items():
        runs |= {(name, seed): trained(make(seed), seed) for seed in range(seeds)}
    runs |= {("foreign teacher's plans", seed): sft(seed, "foreign") for seed in range(seeds)}
    yield from outcomes("foreign.csv", runs)


def rarely(seeds):
    """1. The same where the first successes are rare: a lazy planner, and questions with two steps alone."""
    found = {("frozen", seed): lazy() for seed in range(seeds)}
    found |= {(name, seed): rare(name, seed) for name in (*TRACES, *RARE) for seed in range(seeds)}
    runs = {key: trained(run, key[1], 3, TWO_STEPS["test"]) for key, run in found.items()}
    yield from outcomes("rarely.csv", runs)


def curves(runs, steps=STEPS, tested=True):
    """The rows of log.csv of {(name, seed): Run}, with the tokens of a rollout.

    tested: each row also has its run's accuracy on the test questions, before and after.
    """
    columns = ("step", "reward", "errors", "turns", "plan_tokens", "flat", "groups", "kl", "clip", "entropy",
               *TOOLS, "unreadable")
    rows = []
    for (name, seed), run in runs.items():
        tokens, tests = {}, {}
        for rollout in rollouts_of(run, "rollouts.jsonl"):
            total = sum(word["tokens"] for word in rollout["words"])
            tokens.setdefault(str(rollout["step"]), []).append(total)
        if tested:
            evals = rows_of(run.folder / "evals.csv")
            accuracy = [row["accuracy"] for row in evals if row["questions"] == "test"]
            tests = {"test_before": accuracy[0], "test_after": accuracy[-1]}
        for row in rows_of(run.folder / "log.csv"):
            if int(row["step"]) <= steps:
                logged = {column: row[column] for column in columns}
                logged["tokens"] = statistics.fmean(tokens[row["step"]])
                rows.append({"run": name, "seed": seed} | logged | tests)
    return rows


def against_monolith(seeds):
    """6. One policy that thinks, calls and answers in one context, trained by the same update on the same
    questions. (The flow's test comes after its 24 steps, that of the two others after 16.)"""
    runs = {("Flow-GRPO", seed): flow_grpo(seed) for seed in range(seeds)}
    runs |= {("monolith", seed): monolith(seed) for seed in range(seeds)}
    for seed in range(seeds):
        runs["right verdicts", seed] = training(
            "right-verdicts", seed, steps=MONOLITH_STEPS, edits=RIGHT_VERDICTS)
    yield runs.values()
    yield "monolith.csv", curves(runs, MONOLITH_STEPS)


def sizes(seeds):
    """7. A planner of a third of the size, with a shorter warm start; the same fixed modules."""
    runs = {("width 128", seed): flow_grpo(seed) for seed in range(min(seeds, 3))}
    runs |= {("width 64", seed): small(seed) for seed in range(min(seeds, 3))}
    yield runs.values()
    yield "sizes.csv", curves(runs)


def variants(seeds):
    """8. What the paper does not test: one change each, over the first steps."""
    runs = {("as it is", seed): flow_grpo(seed) for seed in range(min(seeds, 3))}
    runs |= {(name, seed): variant(name, seed) for seed in range(min(seeds, 3)) for name in VARIANTS}
    yield runs.values()
    yield "variants.csv", curves(runs, EARLY, tested=False)
    rows = []
    for (name, seed), run in runs.items():
        rewards = {}
        for rollout in rollouts_of(run, "rollouts.jsonl"):
            if EARLY - 2 <= rollout["step"] <= EARLY:
                rewards.setdefault(rollout["kind"], []).append(rollout["reward"])
        for kind, values in sorted(rewards.items()):
            rows.append({"run": name, "seed": seed, "kind": kind, "flows": len(values), "right": sum(values)})
    yield "kinds.csv", rows


def forks(seeds):
    """8. What other papers propose: forks/*.diff, each trained as the main runs are. All are tested in the
    same world, which grades by right or wrong, whatever the reward was in training."""
    runs = {("as it is", seed): flow_grpo(seed) for seed in range(seeds)}
    for seed in range(seeds):
        flags = ("--token-mean",)
        runs["token-mean", seed] = training("fork-token-mean", seed, flags=flags, graded=None)
        runs |= {(name, seed): fork(name, seed) for name in FORKS}
    tests = {(key, trial): trained(run, key[1] + 1000 * trial)
             for key, run in runs.items() for trial in range(TRIALS)}
    yield tests.values()
    rows = []
    for (name, seed), run in runs.items():
        tested = chain.from_iterable(rollouts_of(tests[(name, seed), trial]) for trial in range(TRIALS))
        log = rows_of(run.folder / "log.csv")
        means = {column: statistics.fmean(float(row[column]) for row in log) for column in ("flat", "clip")}
        rows.append({"run": name, "seed": seed} | outcome(tested) | means)
    yield "forks.csv", rows


def toy(seeds):
    """README's table and curve: the default run, as it is."""
    command = lambda seed: ("train.py", "--seed", str(seed), "--out", "{out}")
    runs = {seed: Run(f"toy-seed{seed}", command(seed), rollouts=60 * 128) for seed in range(min(seeds, 3))}
    yield runs.values()
    columns = ("step", "reward", "errors", "turns")
    yield "toy.csv", [{"seed": seed} | {column: row[column] for column in columns}
                      for seed, run in runs.items() for row in rows_of(run.folder / "log.csv")]
    rows = []
    for seed, run in runs.items():
        tests = [row for row in rows_of(run.folder / "evals.csv") if row["questions"] == "test"]
        for when, row in (("before", tests[0]), ("after", tests[-1])):
            rows.append({"seed": seed, "when": when, "questions": row["n"]}
                        | {column: row[column] for column in ("accuracy", "errors", "turns")})
    yield "toy-tests.csv", rows


ANALYSES = {"toy": toy, "ways": ways, "foreign": foreign, "rarely": rarely,
            "monolith": against_monolith, "sizes": sizes,
            "variants": variants, "forks": forks} | planning.ANALYSES


# ------------------------------------------------------------------------------------ the tables and pictures
def caption(what, n, name):
    """What is drawn, n and the kind of the intervals, and the command that makes the runs again."""
    return f"{what}; 95 % t-intervals, n = {n} seeds. `python experiments/study.py --only {name}`"


PAGES = {  # {name: (the picture's text, what the caption says first, () -> table, plt -> picture)}
    "ways": ("Accuracy of five planners", "Accuracy on the 300 test questions",
             partial(figures.planners_table, "ways"), partial(figures.planners_picture, name="ways")),
    "foreign": ("Accuracy of five planners", "A teacher with words of its own; 300 test questions",
                partial(figures.planners_table, "foreign"),
                partial(figures.planners_picture, name="foreign")),
    "rarely": ("Accuracy of six planners", "A start that is rarely right; 75 test questions with two steps",
               partial(figures.planners_table, "rarely"), partial(figures.planners_picture, name="rarely")),
    "monolith": ("Reward and errors", "The flow and a monolithic policy in training",
                 partial(figures.compared_table, "monolith"),
                 partial(figures.compared_picture, name="monolith")),
    "sizes": ("Reward and errors", "Two sizes of the planner in training",
              partial(figures.compared_table, "sizes"), partial(figures.compared_picture, name="sizes")),
    "variants": ("Difference of thirteen variants",
                 "Mean reward of steps 1-8, minus that of the planner as it is",
                 figures.variants_table, figures.variants_picture),
    "forks": ("Difference of eleven forks",
              "Accuracy on 300 test questions asked three times, minus that of the planner as it is",
              power.forks_table, power.forks_picture),
} | planning.PAGES
SMOLLM = {  # {roles: who plays what}
    "toy": "The toy as planner, in its own world",
    "planner": "SmolLM2 as planner, the rest the toy",
    "transfer": "The same planners, the rest SmolLM2",
}


def block(name):
    """What RESULTS.md holds between the two comments of this name: picture, caption, table."""
    if name in PAGES:
        alt, what, table, _ = PAGES[name]
        n = figures.number_of_seeds(figures.read(name))
        return figures.block(name, alt, caption(what, n, name), table())
    roles = name.removeprefix("smollm-")
    what = (f"{SMOLLM[roles]}; a mark a seed, with its 95 % Wilson interval over n questions. "
            f"`python experiments/smollm.py all --roles {roles}`")
    return figures.block(name, "Accuracy of each planner", what, paired.tables(roles))


BLOCKS = (*PAGES, *(f"smollm-{roles}" for roles in SMOLLM))


def make_pages(names):
    """Fill RESULTS.md, README.md and the heads of the forks from results/*.csv, and draw the pictures."""
    for name in names:
        if name == "toy":
            figures.fill("toy-seeds", figures.toy_table())
            figures.toy_picture()
        else:
            figures.fill(name, block(name))
    if "forks" in names:
        power.write_results()
    if find_spec("matplotlib") is None:
        print("The tables are made. The pictures need matplotlib, which the project does not: "
              "pip install matplotlib")
        return
    import matplotlib.pyplot as plt

    plt.rcParams.update(figures.STYLE)
    for name in names:
        if name in PAGES:
            PAGES[name][-1](plt)
        elif name.startswith("smollm-"):
            paired.picture(plt, name.removeprefix("smollm-"))
        plt.close("all")


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    add = parser.add_argument
    add("--only", nargs="+", choices=["toy", *BLOCKS], metavar="NAME", help="some analyses")
    add("--seeds", type=int, default=5, help="seeds; toy, sizes and variants take three of them at most")
    add("--workers", type=int, default=2, help="runs at a time, a thread each")
    add("--tables", action="store_true", help="no runs: only tables and pictures, from results/*.csv")
    args = parser.parse_args()
    if not 2 <= args.seeds <= 20 or args.workers < 1:
        parser.exit(2, "study.py: --seeds from 2 (one seed has no interval) to 20, --workers from 1\n")
    if args.tables:
        make_pages(args.only or ("toy", *BLOCKS))
        if not args.only:
            figures.smollm_curve()
        return
    only = args.only or list(ANALYSES)
    if others := [name for name in only if name not in ANALYSES]:
        parser.exit(2, f"study.py: the runs of {others[0]} are made by smollm.py: add --tables\n")
    if find_spec("matplotlib") is None:  # before the runs, which take hours
        parser.exit(2, "study.py: needs matplotlib, which the project does not: pip install matplotlib\n")
    RUNS.mkdir(parents=True, exist_ok=True)
    few = (ROOT / "toy" / "valid.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:4]
    (RUNS / "few.jsonl").write_text("".join(few), encoding="utf-8")
    for name in TWO_STEPS:
        lines = (ROOT / "toy" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        chosen = "".join(line for line in lines if json.loads(line)["kind"] == "fact_math")
        (RUNS / f"two-steps-{name}.jsonl").write_text(chosen, encoding="utf-8")
    analyses = [ANALYSES[name](args.seeds) for name in only]
    make_all([run for analysis in analyses for run in next(analysis)], args.workers)
    for name, rows in chain.from_iterable(analyses):
        with open(RESULTS / name, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        print(f"experiments/results/{name}: {len(rows)} rows")
    make_pages(only)


if __name__ == "__main__":
    main()
