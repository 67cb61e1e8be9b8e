"""All runs, tables and pictures of RESULTS.md, on the toy.

    python experiments/study.py                       all runs: hours. The same command goes on
    python experiments/study.py --only planners       one table's runs
    python experiments/study.py --tables              tables and pictures again, from results/*.csv

A row of a table is a planner: a command that trains it (or none), and one that tests it on
toy/test.jsonl, for each seed. All folders are in runs/study/. results/study.csv has a line for each
row and seed, with both commands; the tables between the marks in RESULTS.md are made of it, with
its runs averaged over seeds; the table of pretrained models is of what pretrained.py has written.
Pictures need matplotlib.

Intervals are Student's t, 95 %, over seeds; those of a difference are over its differences seed by
seed. p is that of an exact permutation test of the seeds of two rows, corrected by Holm's method
for the rows of a table; there is none where the rows are tests of the same planners."""

import argparse
import csv
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments import curves
from memory import Step
from record.folder import lock, replace_file, rows_of
from record.folder import version as code_version
from record.metrics import markdown, summary
from record.compare import permutation
from record.rollouts import read_answers
from toy.teacher import TOOLS, Known
from train import TOY
from world.mistakes import Mistake

STUDY, RESULTS = ROOT / "runs" / "study", ROOT / "experiments" / "results"
T = 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262  # Student's, of 2 to 10 values
TEST, LONG = "toy/test.jsonl", "toy/long.jsonl"
BUDGETS, TRIES, ASKED = range(1, 7), 64, 100  # TRIES on ASKED questions, untrained
RATES, PILOTS = (1 / 3, 1, 3), (10, 11)  # learning rates of two baselines, times the toy's; seeds
# What train.py sets for the toy by itself, and for no other folder.
AS_TOY = f"""--data toy/train.jsonl --corpus toy/corpus.jsonl --tools {" ".join(TOOLS)} --judge none
    --valid none --test {TEST} --max-new-tokens 64 --max-turns {TOY["max_turns"]} --lr {TOY["lr"]}
    --steps {TOY["steps"]} --questions {TOY["questions"]} --minibatches {TOY["minibatches"]}
    --every {TOY["steps"]} --beta {TOY["beta"]}"""
CREDIT = {  # {row: (command, folder, fork)}
    "last turn alone": ("experiments/baselines.py last-turn", "last-turn", ""),
    "one mean over all tokens": ("train.py --token-mean", "token-mean", ""),
    "no std, no lengths": ("train.py", "dr-grpo", "dr-grpo"),
    "GiGPO": ("train.py", "gigpo", "gigpo"),
    "a turn costs 0.1": ("train.py", "turn-cost", "turn-cost"),
}


@dataclass(frozen=True)
class Row:
    """One planner with one seed: how it is made, and how it is tested. "": nothing is made."""

    table: str
    name: str
    seed: int
    train: str = ""  # a command; {out} is its folder
    folder: str = ""  # the name of that folder in runs/study/
    planner: str | None = ""  # the checkpoint in it; None: the command itself has run the test
    fork: str = ""  # a diff of experiments/forks that is applied for the training
    flags: str = ""  # of the test
    data: str = TEST

    def test(self):
        """The command that tests it."""
        model = f"runs/study/{self.folder}/{self.planner}" if self.folder else self.planner
        turns = "" if "--max-turns" in self.flags else f"--max-turns {TOY['max_turns']}"
        how = f"solve.py --model {model} --data {self.data} {turns} --seed {self.seed} {self.flags}"
        return f"{how} --quiet --out {{out}}"

    def tested(self):
        """The name of the folder of its test."""
        if self.planner is None:
            return self.folder
        data = "" if self.data == TEST else f"-{Path(self.data).stem}"
        flags = "".join(self.flags.split()).replace("--", "-")
        return f"test-{self.folder or f'frozen-seed{self.seed}'}{data}{flags}"


def all_rows(seeds):
    """The Rows of all tables."""
    step = f"step-{TOY['steps']}"
    for seed in range(seeds):
        trained = f"train.py --seed {seed} --out {{out}}", f"flow-grpo-seed{seed}", step
        frozen = "", "", "toy"
        yield Row("planners", "frozen", seed, *frozen)
        for traces in ("own", "perfect"):
            command = f"experiments/baselines.py sft {traces} {{out}} --seed {seed}"
            folder = f"sft-{traces}-seed{seed}"
            yield Row("planners", f"SFT, {traces} traces", seed, command, folder)
        if not seed:
            command = "experiments/baselines.py perfect {out}"
            yield Row("planners", "perfect plans", seed, command, "perfect", None)
        yield Row("planners", "Flow-GRPO", seed, *trained)
        for n in BUDGETS:
            yield Row("budget", f"{n} turns", seed, *trained, flags=f"--max-turns {n}")
        for name, made in (("frozen", frozen), ("Flow-GRPO", trained)):
            yield Row("long", name, seed, *made, flags="--max-turns 5", data=LONG)
        yield Row("designs", "the flow", seed, *trained[:2], None)
        monolith = "experiments/baselines.py monolith --model runs/study/monolith"
        command = f"{monolith} {AS_TOY} --seed {seed} --out {{out}}"
        yield Row("designs", "a monolith", seed, command, f"monolith-seed{seed}", None)
        yield Row("sizes", "width 128", seed, *trained[:2], None)
        command = f"train.py --model runs/study/width-64 --fixed toy {AS_TOY} --seed {seed}"
        folder = f"width-64-seed{seed}"
        yield Row("sizes", "width 64", seed, f"{command} --out {{out}}", folder, None)
        yield Row("credit", "as it is", seed, *trained)
        for name, (command, folder, fork) in CREDIT.items():
            command = f"{command} --seed {seed} --out {{out}}"
            yield Row("credit", name, seed, command, f"{folder}-seed{seed}", step, fork)
    for seed in PILOTS:
        for times in RATES:
            lr = f"{TOY['lr'] * times:.2g}"
            folder = f"sft-own-lr{lr}-seed{seed}"
            command = f"experiments/baselines.py sft own {{out}} --seed {seed} --lr {lr}"
            yield Row("rates", f"SFT, own traces, {lr}", seed, command, folder)
            command = f"{monolith} {AS_TOY} --lr {lr} --seed {seed} --out {{out}}"
            folder = f"monolith-lr{lr}-seed{seed}"
            yield Row("rates", f"a monolith, {lr}", seed, command, folder, None)


MADE_FIRST = {  # {table: (folder, command)}: models that more than one row begins with
    "designs": ("monolith", "experiments/baselines.py warm {out}"),
    "rates": ("monolith", "experiments/baselines.py warm {out}"),
    "sizes": ("width-64", "toy/make.py --width 64 --out {out}"),
}


# ---------------------------------------------------------------------------------------- the runs
@cache
def version(fork=""):
    """now(), as it was when this command began."""
    return now(fork)


def now(fork=""):
    """A digest of what decides a run: the code, the toy, and a fork's diff."""
    toy = (ROOT / "toy").glob("*.*")
    files = sorted(file for file in toy if file.suffix not in (".py", ".md"))
    files += [diff_of(fork)] if fork else []
    parts = [code_version()[-12:].encode(), *(file.read_bytes() for file in files)]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def diff_of(fork):
    return ROOT / "experiments" / "forks" / f"{fork}.diff"


def run(folder, command, fork=""):
    """Run a Python command with this folder in runs/study/, unless it has been run. What a killed
    one has left is deleted."""
    out, done = STUDY / folder, STUDY / f"{folder}.done"
    code = version(fork)
    if done.exists():
        if done.read_text() != code:
            print(f"{folder} was made by other code or data; to make it again, delete {done}")
        return
    shutil.rmtree(out, ignore_errors=True)
    words = [sys.executable, *shlex.split(command.format(out=out))]
    with open(STUDY / f"{folder}.txt", "w") as log:
        top = checkout(fork) if fork else ROOT
        failed = subprocess.run(words, cwd=top, stdout=log, stderr=subprocess.STDOUT).returncode
    if failed:
        raise SystemExit(f"study.py: {shlex.join(words)} failed: see {log.name}")
    if not fork and now() != code:
        raise SystemExit(f"study.py: the code was edited during {folder}: repeat the command")
    done.write_text(code)
    print(folder, flush=True)


def checkout(fork):
    """A folder with the code of git's index, which is that of the files, and this fork."""
    folder = STUDY / "forks" / f"{fork}-{version(fork)}"
    if not folder.exists():
        beside = Path(f"{folder}-part")  # no half of it is taken for the fork
        shutil.rmtree(beside, ignore_errors=True)
        if subprocess.run(["git", "diff", "--quiet"], cwd=ROOT).returncode:
            raise SystemExit("study.py: git add your changes first: forks are made of its index")
        command = ["git", "checkout-index", "--all", f"--prefix={beside}/"]
        subprocess.run(command, cwd=ROOT, check=True)
        # In a repository, git would skip a diff that names files from its top.
        env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
        subprocess.run(["git", "apply", diff_of(fork)], cwd=beside, env=env, check=True)
        beside.rename(folder)
    return folder


def run_all(rows, workers):
    """All commands that the rows need, the models first."""
    version()  # before a run, during which the code may be edited
    first = {MADE_FIRST[row.table] for row in rows if row.table in MADE_FIRST}
    trainings = {(row.folder, row.train, row.fork) for row in rows if row.train}
    tests = {(row.tested(), row.test()) for row in rows if row.planner is not None}
    if any(row.table == "planners" for row in rows):
        asked = f"solve.py --model toy --data {TEST} --limit {ASKED} --trials {TRIES} --quiet"
        tests |= {("tries", f"{asked} --max-turns {TOY['max_turns']} --out {{out}}")}
        tests |= {("routers.csv", "toy/routers.py --out {out}")}
    for fork in sorted({row.fork for row in rows if row.fork}):
        checkout(fork)  # before two threads do it at the same time
    with ThreadPoolExecutor(workers) as pool:
        for commands in (first, trainings, tests):
            list(pool.map(lambda command: run(*command), sorted(commands)))


# ------------------------------------------------------------------- from the runs to results/*.csv
def collect(rows):
    """Write results/*.csv, as far as the runs of these rows have them."""
    tables, planners = {row.table for row in rows}, [row for row in rows if row.table == "planners"]
    kept = [line for line in read("study") if line["table"] not in tables]
    write("study", kept + [line for row in rows for line in results_of(row)])
    if planners:
        write("routers", csv.DictReader(open(STUDY / "routers.csv", newline="")))
        compared = [row for row in planners if row.name in ("frozen", "Flow-GRPO")]
        write("tools", [line for row in compared for line in tools_of(row)])
        write("new", new_solutions([row for row in planners if row.name == "Flow-GRPO"]))
    logs = {row.folder: STUDY / row.folder / "log.csv" for row in rows}
    logs = {name: log for name, log in sorted(logs.items()) if log.exists()}
    put("curves", ["run"], [line for name, log in logs.items() for line in curve_of(name, log)])


def lost_seeds(rows):
    """A row of study.csv with seeds that collect() would drop; None if there is none."""
    seeds = defaultdict(set)
    for row in rows:
        seeds[row.table, row.name].add(str(row.seed))
    for line in read("study"):
        name = line["table"], line["row"]
        if name in seeds and line["seed"] not in seeds[name]:
            return " / ".join(name)
    return None


def read(name):
    """The rows of results/NAME.csv; [] if there is none."""
    return rows_of(RESULTS / f"{name}.csv")


def refuse_mixed(name, model, planners):
    """Mistake if results/NAME.csv has planners of this model beside those that a command makes
    again: another machine or dtype made them, and no table would say so."""
    before = {row["planner"] for row in read(name) if row["model"] == model}
    if left := before - {*planners}:
        cure = "give as many --seeds, or move it away"
        raise Mistake(f"results/{name}.csv has {min(left)} of {model}, too: {cure}")


def put(name, keys, rows):
    """Write rows to results/NAME.csv, in the place of those with the same values of `keys`; all
    others stay, after them."""
    values = lambda row: [row[key] for key in keys]
    new = list(map(values, rows))
    write(name, [*rows, *(row for row in read(name) if values(row) not in new)])


def write(name, rows):
    rows, text = list(rows), io.StringIO()
    columns = max(rows, key=len) if rows else ["empty"]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(RESULTS / f"{name}.csv", text.getvalue().encode())


def answers(folder):
    """For each question, its rollouts: one for each trial."""
    return read_answers(STUDY / folder)["questions"]


def results_of(row):
    """The lines of study.csv of a row: one, or two of a run that has tested itself."""
    line = {"table": row.table, "row": row.name, "seed": row.seed}
    commands = {"train": row.train, "test": "" if row.planner is None else row.test()}
    if row.planner is None and row.table != "planners":
        evals = csv.DictReader(open(STUDY / row.folder / "evals.csv", newline=""))
        tests = [found for found in evals if found["questions"] == "test"]
        names = [row.name + " before" * (found["step"] == "0") for found in tests]
    else:
        rollouts = [rollout for trials in answers(row.tested()) for rollout in trials]
        tests, names = [summary(rollouts) | {"n": len(rollouts)}], [row.name]
    for name, found in zip(names, tests, strict=True):
        numbers = {key: f"{float(found[key]):.4f}" for key in ("accuracy", "turns", "errors")}
        yield line | {"row": name, "n": found["n"]} | numbers | commands


def tools_of(row):
    """How often the plans of a row name each tool, by what memory shows last."""
    counts = Counter()
    for rollout in (rollout for trials in answers(row.tested()) for rollout in trials):
        steps = rollout.memory.steps
        for n, step in enumerate(steps):
            counts[last_shown(steps[:n]), step.tool or "unreadable"] += 1
    for (last, tool), plans in sorted(counts.items()):
        yield {"row": row.name, "seed": row.seed, "last": last, "tool": tool, "plans": plans}


def last_shown(steps):
    if not steps:
        return "nothing yet"
    memory = "\n\n".join(Step(**vars(step)).render() for step in steps)
    last = Known(f"\nMemory:\n{memory}").last if steps[-1].tool else ""
    return last or "another error"


def new_solutions(trained):
    """Of each question: how often it was right untrained, and after training."""
    tried, after = answers("tries"), [answers(row.tested()) for row in trained]
    for n, trials in enumerate(tried):
        line = {"question": trials[0].question, "tries": len(trials)}
        line |= {"right": sum(rollout.right for rollout in trials), "seeds": len(after)}
        yield line | {"right_after": sum(some[n][0].right for some in after)}


def curve_of(run, log):
    """The steps of a run's log.csv, as rows of curves.csv."""
    columns = "step reward errors turns kl grad_norm".split()
    for row in csv.DictReader(open(log, newline="")):
        yield {"run": run} | {name: row[name] for name in columns}


# ------------------------------------------------------------------------------------------- tables
def interval(values):
    """'0.915 ± 0.062', or one value alone."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    half = T[len(values) - 2] * stdev(values) / len(values) ** 0.5
    return f"{fmean(values):.3f} ± {half:.3f}"


def holm(ps):
    """Corrected p values, in their order."""
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = largest
    return corrected


def table(lines, versus, same=False):
    """A table of study.csv's lines. versus: the row that the others are compared with. same: all
    rows are tests of the same planners."""
    rows = {}
    for line in lines:
        rows.setdefault(line["row"], []).append(line)
    values = {name: [float(line["accuracy"]) for line in some] for name, some in rows.items()}
    others = [name for name in rows if name != versus and len(values[name]) > 1]
    # study.csv has four digits of an accuracy: gaps that differ by less are equal
    ps = holm([permutation(values[name], values[versus], 3e-4) for name in others])
    p_of = dict(zip(others, ps, strict=True))
    shown = [["planner", "accuracy", "each seed", "questions", "turns", "errors, %"]]
    shown[0] += [f"minus {versus}"] + ["p, Holm"] * (not same)
    for name, some in rows.items():
        means = [fmean(float(line[key]) for line in some) for key in ("turns", "errors")]
        cells = [name, interval(values[name]), " ".join(f"{v:.2f}" for v in values[name])]
        cells += [some[0]["n"], f"{means[0]:.2f}", f"{100 * means[1]:.1f}"]
        if name in others:
            cells += [interval([a - b for a, b in zip(values[name], values[versus], strict=True)])]
            cells += [f"{p_of[name]:.2g}"] * (not same)
        shown.append(cells + [""] * (len(shown[0]) - len(cells)))
    return markdown(shown)


def tools_table():
    """Tool by what memory shows last, in % of plans: frozen → Flow-GRPO."""
    counts = Counter()
    for line in read("tools"):
        counts[line["row"], line["last"], line["tool"]] += int(line["plans"])
    tools, lasts = (sorted({key[n] for key in counts}) for n in (2, 1))
    shown = [["memory shows last", "plans", *tools]]
    for last in lasts:
        totals = [sum(counts[row, last, tool] for tool in tools) for row in ("frozen", "Flow-GRPO")]
        cells = [" → ".join(map(str, totals))]
        for tool in tools:
            found = counts["frozen", last, tool], counts["Flow-GRPO", last, tool]
            pairs = zip(found, totals, strict=True)
            shares = (f"{100 * n / total:.0f}" if total else "-" for n, total in pairs)
            cells.append(" → ".join(shares))
        shown.append([last, *cells])
    return markdown(shown)


def new_table():
    shown = [["untrained: right", "questions", "right after training"]]
    for low, high in ((0, 0), (1, 4), (5, TRIES)):
        some = [line for line in read("new") if low <= int(line["right"]) <= high]
        if some:
            after = sum(int(line["right_after"]) for line in some)
            share = after / sum(int(line["seeds"]) for line in some)
            bin = f"{low}" if low == high else f"{low} to {high}"
            shown.append([f"{bin} of {some[0]['tries']}", str(len(some)), f"{share:.2f}"])
    return markdown(shown)


def rates_table():
    """Accuracy of two baselines at each learning rate, on other seeds than those of the tables."""
    found = {}
    for line in read("study"):
        if line["table"] == "rates" and "before" not in line["row"]:
            found.setdefault(line["row"], []).append(float(line["accuracy"]))
    shown = [["baseline, learning rate", "mean", "each seed"]]
    for row, values in sorted(found.items()):
        each = " ".join(f"{value:.2f}" for value in values)
        shown.append([row, f"{fmean(values):.3f}", each])
    return markdown(shown)


def pretrained_table():
    """What pretrained.py has written, for people."""
    titles = "model | planner | accuracy | pages | calculations | errors, % | reward in training"
    shown = [titles.split(" | ")]
    for row in read("pretrained"):
        shares = [f"{float(row[name]):.2f}" for name in ("accuracy", "page", "calculation")]
        steps = [f"{float(row[name]):.2f}" for name in ("first_steps", "last_steps") if row[name]]
        errors = f"{100 * float(row['errors']):.0f}"
        shown.append([row["model"], row["planner"], *shares, errors, " → ".join(steps)])
    return markdown(shown)


VERSUS = {"planners": "Flow-GRPO", "budget": f"{TOY['max_turns']} turns", "long": "frozen"}
VERSUS |= {"designs": "the flow", "sizes": "width 128", "credit": "as it is"}


RULES = {  # of toy/routers.py
    "perfect": "everything: a planner without mistakes",
    "frequent": "nothing: always the most frequent tool",
    "bm25": "the description nearest to the sub-goal",
    "sub-goal": "the sub-goal's first three words",
    "question": "the question's first three words",
    "sequence": "the kind of question: its best sequence",
    "table": "the kind of question, the turn, the sub-goal",
    "result": "the kind of the last result",
}


def write_tables():
    """Put all tables between their marks in RESULTS.md, and draw the pictures."""
    path, lines = ROOT / "experiments" / "RESULTS.md", read("study")
    text, tables = path.read_text(encoding="utf-8"), {"tools": tools_table(), "new": new_table()}
    tables |= {"rates": rates_table(), "pretrained": pretrained_table()}
    for name, versus in VERSUS.items():
        if some := [line for line in lines if line["table"] == name]:
            tables[name] = table(some, versus, same=name == "budget")
    scores = {row["rule"]: f"{float(row['accuracy']):.3f}" for row in read("routers")}
    routers = [[rule, RULES[rule], accuracy] for rule, accuracy in scores.items()]
    tables["routers"] = markdown([["rule", "picks the tool by", "accuracy"], *routers])
    for name, made in tables.items():
        marks = rf"(?s)(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text = re.sub(marks, lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)
    path.write_text(text, encoding="utf-8")
    draw()


def draw():
    """README's picture, with levels to compare it with; that of credit; those of SmolLM2 in two
    turns and in the stages of three."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return print("The pictures need matplotlib: pip install matplotlib")
    lines = {}
    for row in read("curves"):
        name, _, seed = row["run"].rpartition("-seed")
        lines.setdefault(name, {}).setdefault(seed, {})[int(row["step"])] = row
    for row in read("pretrained-log"):
        name, _, seed = row["run"].partition(", ")
        lines.setdefault(name, {}).setdefault(seed, {})[int(row["step"])] = row
    lines = {name: list(seeds.values()) for name, seeds in lines.items()}
    kinds = ["flow-grpo", *(folder for _, folder, _ in CREDIT.values() if folder in lines)]
    plt.rcParams["figure.constrained_layout.use"] = True
    plt.rcParams["svg.hashsalt"] = "study"  # equal pictures are equal files
    for picture, names, marked in (
        ("flow-grpo", ["flow-grpo"], levels()),
        ("credit", kinds, {}),
        ("pretrained", ["smollm2"], {}),
        ("stages", ["smollm2-two", "smollm2-four", "smollm2-all"], {}),
    ):
        shown = {name: lines[name] for name in names if name in lines}
        figure = curves.draw(plt, shown, ["reward", "errors"])
        for rule, level in marked.items():
            figure.axes[0].axhline(level, linestyle=":", linewidth=1)
            figure.axes[0].annotate(rule, (0, level), fontsize=7, va="bottom")
        figure.savefig(RESULTS / f"{picture}.svg", metadata={"Date": None})


def levels():
    """{what: accuracy} to compare the curve with."""
    rules = {row["rule"]: float(row["accuracy"]) for row in read("routers")}
    routers = [rules[name] for name in rules if name not in ("perfect", "result")]  # which read
    return {"perfect plans": rules["perfect"], "best router": max(routers)} if rules else {}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    help = "tables (default: all)"
    add("--only", nargs="+", choices=[*VERSUS, "rates"], default=list(VERSUS), help=help)
    some = dict(choices=range(1, 2 + len(T)), metavar="N")
    add("--seeds", type=int, default=5, help="of each row (default: 5)", **some)
    add("--workers", type=int, default=1, help="runs at a time")
    add("--tables", action="store_true", help="run nothing")
    args = parser.parse_args()
    if not args.tables:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # All on the CPU: on a GPU, train.py would choose adapters for all models but the toy, and
        # the baselines never use it.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        rows = [row for row in all_rows(args.seeds) if row.table in args.only]
        if lost := lost_seeds(rows):
            parser.error(
                f"results/study.csv has more seeds of {lost}: give as many, or move it away"
            )
        STUDY.mkdir(parents=True, exist_ok=True)
        lock(STUDY)  # another study.py would delete what this one is making
        run_all(rows, args.workers)
        collect(rows)
    write_tables()


if __name__ == "__main__":
    try:
        main()
    except Mistake as why:
        raise SystemExit(f"study.py: {why}") from None
