"""The paper's analyses in the world of the second toy, where planning matters (toy/hops, docs/toy.md).

A question needs two to five calls. What the next one must be, only the result of the last one shows, and five
turns are all there are. Each analysis is a generator, which study.py runs: it first yields the runs that it
needs; when they are finished, it yields its CSV files, as (name, rows). A planner that is trained is trained
as `python train.py --model toy/hops` does it.
"""

import re
from collections import Counter

from cli.flags import FOR_HOPS
from experiments.runs import Run, as_flags, note, outcome, outcomes, rollouts_of, rows_of
from toy.hops.questions import KINDS, MAX_TURNS, World
from toy.hops.teacher import TOOLS

HOPS = "toy/hops"
TEST = f"{HOPS}/test.jsonl"
FREE = "experiments/hops-freely.jsonl"  # 102 questions written by hand, in no wording of the others
STEPS = FOR_HOPS["steps"]
TRAINING = {"data": f"{HOPS}/train.jsonl", "valid": "none", "test": TEST, "judge": "none", "every": STEPS,
            **{name.replace("_", "-"): FOR_HOPS[name] for name in
               ("steps", "questions", "lr", "minibatches", "max_turns")}}
WORLD = ("--base-generator", f"{HOPS}/base_generator", "--corpus", f"{HOPS}/corpus.jsonl", "--tools", *TOOLS)
BUDGETS = (1, 2, 3, 4, 5, 6, 8)
TRIES, TRIED = 64, 100  # how often the untrained planner tries each of so many test questions
SFT_BATCHES, SFT_SEEDS = 50, 3  # sft.py's default; with STEPS, rollouts and updates are Flow-GRPO's
SFT = {"own": "SFT, its own successes", f"own-{STEPS}": "SFT, its own successes, 3 x as many",
       "perfect": "SFT, perfect planner's traces", "foreign": "SFT, foreign teacher's traces"}
ONLINE = "SFT online, its own successes"  # Flow-GRPO's loop, with A = R: forks/successes.diff
FORKS = ("last-turn", "gigpo", "turn-cost", "dr-grpo")  # other credit for the turns; and --token-mean


# --------------------------------------------------------------------------------------------------- the runs
def training(seed, name="hops", model=HOPS, fixed=HOPS, flags=(), edits=(), after=()):
    settings = TRAINING | {"model": model, "fixed": fixed, "seed": seed, "out": "{out}"}
    command = ("train.py", *as_flags(settings), *WORLD, *flags)
    return Run(f"{name}-seed{seed}", command, edits, after, STEPS * 128 + 600)


def solving(name, seed, model, turns=MAX_TURNS, after=(), flags=(), rollouts=300):
    """solve.py on the 300 test questions, or on those of FREE: a JSONL of whole rollouts for each trial."""
    settings = {"model": model, "fixed": HOPS, "data": FREE if name.endswith("free") else TEST,
                "max-turns": turns, "seed": seed, "batch": 300, "out": "{out}"}
    command = ("solve.py", *as_flags(settings), "--quiet", *WORLD, *flags)
    return Run(f"hops-{name}-seed{seed}-turns{turns}", command, (), after, rollouts)


def untrained(seed):
    return solving("untrained", seed, HOPS)


def trained(seed, turns=MAX_TURNS, name="trained", run=None):
    """The test of a planner: of Flow-GRPO's, or of the one that this run trained."""
    return solving(name, seed, f"{{0}}/step-{STEPS}", turns, (run or training(seed),))


def sft(seed, name):
    """A run of sft.py; name: a key of SFT."""
    traces, _, batches = name.partition("-")
    command = ("experiments/sft.py", "--traces", traces, "--seed", str(seed), "--out", "{out}")
    more = ("--steps", batches) if batches else ()
    return Run(f"hops-sft-{name}-seed{seed}", command + more, rollouts=int(batches or SFT_BATCHES) * 128)


def monolith(seed):
    """One policy that thinks, calls and answers in one context, trained by the same update (monolith.py)."""
    start = Run("hops-monolith", ("experiments/monolith.py", "--out", "{out}"), rollouts=20_000)
    return training(seed, "hops-monolith", "{0}", edits=("edits/monolith",), after=(start,))


def small_toy():
    """The second toy, made from a first toy of half the width."""
    first = Run("toy-64", ("toy/make.py", "--width", "64", "--out", "{out}"), rollouts=20_000)
    return Run("hops-64", ("toy/hops/make.py", "--base", "{0}", "--out", "{out}"), (), (first,), 20_000)


def fork(name, seed):
    if name == "token-mean":
        return training(seed, "hops-token-mean", flags=("--token-mean",))
    edit = f"forks/{name}"
    return training(seed, f"hops-{name}", flags=note(edit, "flags").split(), edits=(edit,))


# ------------------------------------------------------------------------------------------------ the numbers
def curves(runs):
    """The rows of log.csv of {(name, seed): Run}; each has the accuracy of its run's tests, too."""
    columns = ("step", "reward", "errors", "turns", "plan_tokens", "flat", "groups", "clip", "entropy")
    rows = []
    for (name, seed), run in runs.items():
        tests = [row["accuracy"] for row in rows_of(run.folder / "evals.csv") if row["questions"] == "test"]
        rows += [{"run": name, "seed": seed} | {column: row[column] for column in columns}
                 | {"test_before": tests[0], "test_after": tests[-1]}
                 for row in rows_of(run.folder / "log.csv")]
    return rows


def flows(name, seeds):
    return {(name, seed): training(seed) for seed in range(seeds)}


def routers(planner="", seed="", route="", after=()):
    """The rules of hops.py that pick the tool: all with perfect plans, or `route` in the plans of a model."""
    command = ("experiments/hops.py", "--out", "{out}/routers.csv")
    if planner:
        command += ("--planner", planner, "--route", route, "--seed", str(seed))
    return Run(f"hops-routers-{route}{seed}", command, (), after, 600)


def tests_and_curve(seeds=5):
    """Table 3, Figures 6 and 8a: the curve of training, the test before and after for each kind, routers."""
    runs = flows("Flow-GRPO", seeds)
    tests = {("untrained", seed): untrained(seed) for seed in range(seeds)}
    tests |= {("Flow-GRPO", seed): trained(seed) for seed in range(seeds)}
    free = {("untrained", seed): solving("untrained-free", seed, HOPS, rollouts=102) for seed in range(seeds)}
    free |= {("Flow-GRPO", seed): trained(seed, name="trained-free") for seed in range(seeds)}
    routed = {("perfect", ""): routers()}
    for seed in range(seeds):
        routed["Flow-GRPO", seed] = routers(f"{{0}}/step-{STEPS}", seed, "sequence", (training(seed),))
        routed["untrained", seed] = routers(HOPS, seed, "result")
    yield [*runs.values(), *tests.values(), *free.values(), *routed.values()]
    yield "hops-curve", curves(runs)
    yield "hops-routers", [row | {"seed": seed} | ({} if planner == "perfect" else {"planner": planner})
                           for (planner, seed), run in routed.items()
                           for row in rows_of(run.folder / "routers.csv")]
    rows = []
    for (planner, seed), run in tests.items():
        rollouts = list(rollouts_of(run))
        row = {"planner": planner, "seed": seed, "questions": len(rollouts)} | outcome(rollouts)
        for kind in KINDS:
            row[kind] = outcome(rollout for rollout in rollouts if rollout["kind"] == kind)["accuracy"]
        names, at_once = looked_up(rollouts)
        rows.append(row | {"free": outcome(rollouts_of(free[planner, seed]))["accuracy"],
                           "old_names": names, "at_once": at_once})
    yield "hops-tests", rows


def looked_up(rollouts):
    """(old names in the questions that a step looks for, those that are first looked for as their new name).

    Only base_generator knows the new name. A planner that writes it at once has learnt it by heart."""
    first, renamed = [], World(0).renamed
    for rollout in rollouts:
        goals = [step["sub_goal"] for step in rollout["memory"]["steps"]]
        for old, new in renamed.items():
            if old in rollout["question"]:
                first += [new in goal for goal in goals if old in goal or new in goal][:1]
    return len(first), sum(first)


def ways(seeds=5):
    """Table 3: the untrained planner, four kinds of supervised learning, Flow-GRPO, two teachers' plans."""
    runs = {("frozen", seed): untrained(seed) for seed in range(seeds)}
    for traces, name in SFT.items():
        for seed in range(min(seeds, SFT_SEEDS)):
            runs[name, seed] = solving(f"sft-{traces}", seed, "{0}/best", after=(sft(seed, traces),))
    online = {(ONLINE, seed): fork("successes", seed) for seed in range(seeds)}
    runs |= {key: trained(key[1], name="successes-trained", run=run) for key, run in online.items()}
    runs |= {("Flow-GRPO", seed): trained(seed) for seed in range(seeds)}
    runs |= {("foreign teacher's plans", 0): sft(0, "foreign"), ("perfect planner", 0): sft(0, "perfect")}
    yield from outcomes("hops-ways", runs)
    yield "hops-online", curves(online)


SITUATIONS = {  # what the last result shows -> how it is recognised, in this order
    "a name not found": "no passage matches", "another error": "^Error",
    "another name": "filed as|now called", "a product": r"\d \* \d", "an address": r"(at|see) https://",
    "a number": r"\d",
}


def situation(results, n):
    """What the planner saw last when it wrote its n-th plan."""
    if n == 0:
        return "nothing yet"
    return next((name for name, pattern in SITUATIONS.items() if re.search(pattern, results[n - 1])),
                "nothing of use")


def tools(seeds=5):
    """Figure 5: which tool, depending on what memory shows last, before and after."""
    runs = {("before", seed): untrained(seed) for seed in range(seeds)}
    runs |= {("after", seed): trained(seed) for seed in range(seeds)}
    yield runs.values()
    rows = []
    for (when, seed), run in runs.items():
        plans = Counter()
        for rollout in rollouts_of(run):
            steps = rollout["memory"]["steps"]
            results = [step["result"] for step in steps]
            plans.update((situation(results, n), step["tool"] or "unreadable")
                         for n, step in enumerate(steps))
        rows += [{"when": when, "seed": seed, "situation": what, "tool": tool, "plans": n}
                 for (what, tool), n in sorted(plans.items())]
    yield "hops-tools", rows


def budget(seeds=5):
    """Figure 10: trained with five turns, used with one to eight."""
    runs = {(turns, seed): trained(seed, turns) for turns in BUDGETS for seed in range(seeds)}
    yield from outcomes("hops-budget", runs, ("max_turns", "seed"))


def trace(rollout):
    """A row for each turn of a rollout."""
    return [{"question": rollout["question"], "answer": rollout["answer"]}
            | {column: step[column] for column in ("turn", "sub_goal", "tool", "result")}
            for step in rollout["memory"]["steps"]]


def new(seeds=5):
    """Figure 7: test questions that the untrained planner never solves in TRIES rollouts; and how the first
    trained planner solves one of those, that with the most turns."""
    flags = ("--trials", str(TRIES), "--limit", str(TRIED))
    many = solving("tries", 0, HOPS, flags=flags, rollouts=TRIES * TRIED)
    tests = [trained(seed) for seed in range(seeds)]
    yield [many, *tests]
    solved = Counter()
    for trial in range(TRIES):
        solved.update({row["id"]: row["right"] for row in rollouts_of(many, f"questions-{trial}.jsonl")})
    after = [{row["id"]: row["right"] for row in rollouts_of(run)} for run in tests]
    kinds = {row["id"]: row["kind"] for row in rollouts_of(many)}
    yield "hops-new", [{"id": name, "kind": kind, "tries": TRIES, "solved": int(solved[name])}
                       | {f"seed {seed}": int(found[name]) for seed, found in enumerate(after)}
                       for name, kind in kinds.items()]
    solutions = [row for row in rollouts_of(tests[0]) if row["right"] and row["id"] in kinds
                 and not solved[row["id"]]]
    yield "hops-trace", trace(max(solutions, key=lambda row: len(row["memory"]["steps"])))


def against_monolith(seeds=3):
    """Figure 8b: a monolithic policy, trained by the same command."""
    runs = {("monolith", seed): monolith(seed) for seed in range(seeds)} | flows("flow", seeds)
    yield runs.values()
    yield "hops-monolith", curves(runs)


def sizes(seeds=3):
    """Figure 9: all modules are smaller."""
    small = small_toy()
    runs = flows("width 128", seeds)
    runs |= {("width 64", seed): training(seed, "hops-64", "{0}", "{0}", after=(small,))
             for seed in range(seeds)}
    yield runs.values()
    yield "hops-sizes", curves(runs)


def forks(seeds=5):
    """Section 3.2: other credit for the turns. Each is trained with its reward, and graded by right or wrong.

    reward: the share of right rollouts in training, of all steps."""
    runs = {(name, seed): fork(name, seed) for name in (*FORKS, "token-mean") for seed in range(seeds)}
    tests = {key: trained(key[1], name=f"{key[0]}-trained", run=run) for key, run in runs.items()}
    runs |= flows("as it is", seeds)
    tests |= {("as it is", seed): trained(seed) for seed in range(seeds)}
    yield tests.values()
    yield "hops-forks", [{"run": name, "seed": seed} | outcome(rollouts_of(tests[name, seed]))
                         | {"reward": outcome(rollouts_of(run, "rollouts.jsonl"))["accuracy"]}
                         for (name, seed), run in runs.items()]


ANALYSES = {"hops-tests": tests_and_curve, "hops-ways": ways, "hops-tools": tools, "hops-budget": budget,
            "hops-new": new, "hops-monolith": against_monolith, "hops-sizes": sizes, "hops-forks": forks}
