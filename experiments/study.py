"""Remake the paper's analyses at toy scale: every run, every number and every picture of RESULTS.md.

    pip install matplotlib
    python plots/study.py                        everything: about two hours on 2 cores
    python plots/study.py --only ways budget     some of it
    python plots/figures.py                      only the pictures, from results/*.csv

A run is one command of this repository (train.py, solve.py, toy.py, or a script beside this one), in a copy of the code with a line or
two changed. So each experiment below is a name, some flags, and the very edit that you would make in a fork. Runs stay in runs/study/
and are not made twice: a folder's name holds a hash of its command and its edits (not of the rest of the code: remove runs/study after
you change that). A run that was cut off is begun anew.
"""

import argparse
import csv
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RUNS, RESULTS = ROOT / "runs" / "study", ROOT / "results"
FEW = "../few.jsonl"  # train.py wants some questions to choose best/ by: here there is one checkpoint to choose from
MODULES = ("--fixed", "toy", "--corpus", "toy/corpus.jsonl", "--tools", "base_generator", "python_coder", "wikipedia_search")
LOCK = threading.Lock()

# ---------------------------------------------------------------------------------------------------------------- the edits
# The world of all runs. The toy as it is saturates in a dozen steps; here one tool call in ten fails for no reason, and one
# verdict in ten is turned round. (Both draw from torch's generator, so a seed still decides everything.)
HARD = (
    ("executor.py", "import time\n", "import time\nimport torch\n"),
    ("executor.py", "        return list(pool.map(one, calls))",
     "        return [(\"Error: NameError: name 'value' is not defined (line 1)\", True, s) if torch.rand(()) < 0.1 else (r, e, s) for r, e, s in pool.map(one, calls)]"),
    ("flow.py", "flow.done = verifier.parse(said.text)", "flow.done = verifier.parse(said.text) ^ bool(llm.torch.rand(()) < 0.1)"),
)
FAST = (("tools.py", "from sandbox import python_coder\n", '''import sandbox

KEPT = services.Cache("../programs.sqlite")


def python_coder(code):
    if (known := KEPT.get(code)) is None:
        KEPT.put(known := sandbox.python_coder(code), code)
    return known
'''),)  # what a program printed, it prints again, in all runs
WORLD = HARD + FAST
MONOLITH = (("solve.py", "from flow import FIXED, Flow, rollout", "from flow import FIXED, Flow\nfrom plots.monolith import rollout"),)
RIGHT = (("flow.py", HARD[-1][2], HARD[-1][1]),)  # verdicts are not turned round after all: a monolith has none that could be
SMALL = (  # a smaller toy, written where its last argument says; a check that is meant for the default size is left out
    ("toy.py", 'TOY = Path(__file__).parent / "toy"', 'TOY = Path(__import__("sys").argv.pop())'),
    ("toy.py", "hidden_size=128, intermediate_size=384", "hidden_size=64, intermediate_size=192"),
    ("toy.py", "    engine.save(TOY)\n    check(engine, test)\n", "    engine.save(TOY)\n"),
)

GROUPS = "A, flat = advantages([flow.reward for _, flow in kept], [group for group, _ in kept])"
STEPS, MONOLITH_STEPS, EARLY = 24, 16, 8  # of the main runs; of the monolith's; of the variants', compared while most is learnt

# Name -> (flags, edits). What each changes, and nothing else.
VARIANTS = {
    "turn-stats": ((), (("train.py", GROUPS,
        "turns = [k for k, (_, flow) in enumerate(kept) for _ in flow.actions]; "
        "A, flat = advantages([kept[k][1].reward for k in turns], [kept[k][0] for k in turns]); A = A[[turns.index(k) for k in range(len(kept))]]"),)),
    "token-mean": (("--token-mean",), ()),
    "beta-0": (("--beta", "0"), ()),
    "beta-0.1": (("--beta", "0.1"), ()),
    "clip-0.2-0.2": (("--clip-high", "0.2"), ()),
    "clip-none": (("--clip-low", "1", "--clip-high", "1000"), ()),
    "G-2": (("--group-size", "2", "--questions", "48"), ()),
    "G-4": (("--group-size", "4", "--questions", "24"), ()),
    "G-16": (("--group-size", "16", "--questions", "6"), ()),
    "one-step": (("--minibatches", "1"), ()),
    "wrong-reward": ((), (("train.py", GROUPS,
        "A, flat = advantages([abs(flow.reward - (torch.rand(()).item() < 0.1)) for _, flow in kept], [group for group, _ in kept])"),)),
    "always-stops": ((), (("flow.py", HARD[-1][2], "flow.done = True"),)),
    "never-stops": ((), (("flow.py", HARD[-1][2], "flow.done = False"),)),
}


# ----------------------------------------------------------------------------------------------------------------- the runs
@dataclass(frozen=True)
class Run:
    """One command in a copy of the code with `edits`; "{out}" in it is this run's folder, "{0}" that of after[0]. flows: what it costs."""

    name: str
    command: tuple
    edits: tuple = ()
    after: tuple = ()
    flows: int = 0

    @property
    def folder(self):
        made_of = repr((self.command, self.edits, [run.folder.name for run in self.after]))
        return RUNS / f"{self.name}-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}"

    @property
    def done(self):
        return (self.folder / "done").exists()

    def make(self):
        """Run the command unless that was done; a folder that a kill has left half made is begun anew."""
        if self.done:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        words = [word.format(*(run.folder for run in self.after), out=self.folder) for word in self.command]
        log = RUNS / f"{self.folder.name}.log"  # not with_suffix: there are dots in names
        with open(log, "w") as file:
            threads = {"OMP_NUM_THREADS": "1"}  # two runs at a time on two cores beat one on two threads
            ended = subprocess.run([sys.executable, *words], cwd=edited(self.edits), env=os.environ | threads, stdout=file, stderr=file)
        if ended.returncode:
            raise SystemExit(f"study.py: {self.name} failed:\n  python {' '.join(words)}\n{log.read_text()[-2000:]}")
        (self.folder / "done").touch()


def edited(edits):
    """A copy of the code with the edits in it. toy/ is a link: no run writes there."""
    folder = RUNS / f"code-{hashlib.sha256(repr(edits).encode()).hexdigest()[:8]}"
    with LOCK:
        for file in [*ROOT.glob("*.py"), *ROOT.glob("plots/*.py")]:
            text = file.read_text(encoding="utf-8")
            for _, old, new in [edit for edit in edits if edit[0] == file.name]:
                if text.count(old) != 1:
                    raise SystemExit(f"study.py: the line to change stands {text.count(old)} times in {file.name}, not once: {old}")
                text = text.replace(old, new)
            copy = folder / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists() or copy.read_text(encoding="utf-8") != text:
                copy.write_text(text, encoding="utf-8")
        if not (folder / "toy").exists():
            (folder / "toy").symlink_to(ROOT / "toy")
    return folder


def training(name, seed, model="toy", steps=STEPS, flags=(), edits=(), after=(), marked="test"):
    """train.py for a planner; marked: the questions of toy/ that are marked before and after."""
    settings = ("--steps", str(steps), "--every", str(steps), "--max-turns", "3", "--questions", "12", "--group-size", "8", "--lr", "3e-4",
                "--minibatches", "4", "--data", "toy/train.jsonl", "--valid", FEW, "--test", f"toy/{marked}.jsonl" if marked else FEW, *MODULES)
    command = ("train.py", "--model", model, "--out", "{out}", "--seed", str(seed), *settings, *flags)  # argparse: the last one counts
    return Run(f"{name}-seed{seed}", command, WORLD + edits, after, steps * 96 + (300 if marked else 0))


def asking(name, seed, model, turns=3, after=()):
    """solve.py on the 300 test questions: a JSONL of whole flows."""
    command = ("solve.py", "--model", model, "--data", "toy/test.jsonl", "--max-turns", str(turns), "--seed", str(seed), "--batch", "300",
               "--quiet", "--out", "{out}", *MODULES)
    return Run(f"{name}-asked-seed{seed}-turns{turns}", command, WORLD, after, 150)


def flow_grpo(seed):
    return training("flow-grpo", seed)


def sft(seed, traces):
    command = ("plots/sft.py", "--traces", traces, "--seed", str(seed), "--steps", str(STEPS), "--out", "{out}")
    return Run(f"sft-{traces}-seed{seed}", command, WORLD, (), STEPS * 50)


def monolith(seed):
    start = Run("monolith", ("plots/monolith.py", "--out", "{out}"), FAST, (), 4000)
    return training("monolith", seed, "{0}", MONOLITH_STEPS, edits=MONOLITH, after=(start,))


def small(seed):
    start = Run("toy-64", ("toy.py", "--flows", "6000", "--steps", "3000", "{out}"), SMALL, (), 4000)
    return training("width-64", seed, "{0}", after=(start,))


def variant(name, seed):
    flags, edits = VARIANTS[name]
    return training(name, seed, steps=EARLY, flags=flags, edits=edits, marked=None)


# ------------------------------------------------------------------------------------------------------------- the numbers
def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def flows_of(run, file="questions-0.jsonl"):
    with open(run.folder / file, encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def outcome(flows):
    """Accuracy, turns and tool-calling errors of a file of flows, each as solve.summary() counts them."""
    flows = list(flows)
    steps = [step for flow in flows for step in flow["memory"]["steps"]]
    return {"accuracy": sum(flow["reward"] for flow in flows) / len(flows), "turns": len(steps) / len(flows),
            "errors": sum(step["error"] for step in steps) / len(steps)}


def ways(seeds):
    """1. Frozen, offline SFT on two kinds of traces, Flow-GRPO: the same 300 test questions, three turns at most."""
    trained = {"Flow-GRPO": flow_grpo, "SFT, perfect planner's traces": lambda seed: sft(seed, "perfect"),
               "SFT, its own successes": lambda seed: sft(seed, "own")}
    runs = {("frozen", seed): asking("frozen", seed, "toy") for seed in range(seeds)}
    for name, make in trained.items():
        for seed in range(seeds):
            runs[name, seed] = asking(make(seed).name, seed, "{0}/best", after=(make(seed),))
    runs |= {("perfect planner", seed): sft(seed, "perfect") for seed in range(seeds)}
    yield runs.values()
    yield "ways.csv", [{"planner": name, "seed": seed, **outcome(flows_of(run))} for (name, seed), run in runs.items()]


def tools(seeds):
    """2. Which tool for which kind of question, before and after."""
    runs = {("before", seed): asking("frozen", seed, "toy") for seed in range(seeds)}
    runs |= {("after", seed): asking(flow_grpo(seed).name, seed, "{0}/best", after=(flow_grpo(seed),)) for seed in range(seeds)}
    yield runs.values()
    rows, why = [], []
    for (when, seed), run in runs.items():
        steps = [(flow["kind"], step["tool"] or "unreadable", step["result"]) for flow in flows_of(run) for step in flow["memory"]["steps"]]
        calls = Counter((kind, tool) for kind, tool, _ in steps)
        rows += [{"when": when, "seed": seed, "kind": kind, "tool": tool, "calls": n} for (kind, tool), n in sorted(calls.items())]
        said = Counter(result.split(". ")[0] for _, tool, result in steps if tool == "unreadable")
        why += [{"when": when, "seed": seed, "turns": len(steps), "unreadable": n, "what was said of them": text} for text, n in sorted(said.items())]
    yield "tools.csv", rows
    yield "unreadable.csv", why


def budget(seeds):
    """4. Trained with three turns at most, used with 1 to 10."""
    runs = {(turns, seed): asking(flow_grpo(seed).name, seed, "{0}/best", turns, after=(flow_grpo(seed),)) for turns in (1, 2, 3, 5, 7, 10) for seed in range(seeds)}
    yield runs.values()
    yield "budget.csv", [{"max_turns": turns, "seed": seed, **outcome(flows_of(run))} for (turns, seed), run in runs.items()]


def curves(runs, steps=STEPS, tested=True):
    """The rows of log.csv of {(name, seed): Run}, one run after the other, with the tokens of a flow; tested: each with its run's
    accuracy on the test questions, too."""
    kept = ("step", "reward", "errors", "turns", "plan_tokens", "flat", "groups", "kl", "clip", "entropy", *MODULES[-3:], "unreadable")
    rows = []
    for (name, seed), run in runs.items():
        tokens = {}
        for flow in flows_of(run, "rollouts.jsonl"):
            tokens.setdefault(str(flow["step"]), []).append(sum(word["tokens"] for word in flow["words"]))
        tests = [row["accuracy"] for row in rows_of(run.folder / "evals.csv") if row["questions"] == "test"]
        whole = {"test_before": tests[0], "test_after": tests[-1]} if tested else {}
        rows += [{"run": name, "seed": seed} | {key: row[key] for key in kept} | {"tokens": statistics.fmean(tokens[row["step"]])} | whole
                 for row in rows_of(run.folder / "log.csv") if int(row["step"]) <= steps]
    return rows


def training_curves(seeds):
    """3, 5. Reward, plan length and tool-calling errors over training."""
    runs = {("Flow-GRPO", seed): flow_grpo(seed) for seed in range(seeds)}
    yield runs.values()
    yield "training.csv", curves(runs)


def against_monolith(seeds):
    """6. One policy that thinks, calls and answers in one context, trained by the same update on the same questions. (The flow was marked
    after its 24 steps, the two others after 16.)"""
    runs = {("Flow-GRPO", seed): flow_grpo(seed) for seed in range(seeds)} | {("monolith", seed): monolith(seed) for seed in range(seeds)}
    runs |= {("right verdicts", seed): training("right-verdicts", seed, steps=MONOLITH_STEPS, edits=RIGHT) for seed in range(seeds)}
    yield runs.values()
    yield "monolith.csv", curves(runs, MONOLITH_STEPS)


def sizes(seeds):
    """7. A planner of a third of the size, its warm start shortened as well; the same fixed modules."""
    runs = {("width 128", seed): flow_grpo(seed) for seed in range(min(seeds, 3))} | {("width 64", seed): small(seed) for seed in range(min(seeds, 3))}
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
        marks = {}
        for flow in flows_of(run, "rollouts.jsonl"):
            if EARLY - 2 <= flow["step"] <= EARLY:
                marks.setdefault(flow["kind"], []).append(flow["reward"])
        rows += [{"run": name, "seed": seed, "kind": kind, "flows": len(each), "right": sum(each)} for kind, each in sorted(marks.items())]
    yield "kinds.csv", rows


ANALYSES = {"training": training_curves, "ways": ways, "tools": tools, "budget": budget, "monolith": against_monolith, "sizes": sizes, "variants": variants}


# ---------------------------------------------------------------------------------------------------------------------- main
def make_all(runs, workers):
    """Make the runs, each after those it needs, with a bar that tells the time left."""
    needed = {}

    def add(run):
        for before in run.after:
            add(before)
        needed.setdefault(run.folder, run)

    for run in runs:
        add(run)
    missing = {folder: run for folder, run in needed.items() if not run.done}
    print(f"{len(needed)} runs, {len(needed) - len(missing)} of them there already")
    waiting, running = list(missing.values()), {}
    with tqdm(total=sum(run.flows for run in waiting), unit=" flows") as bar, ThreadPoolExecutor(workers) as pool:
        while waiting or running:
            ready = [run for run in waiting if all(before.done for before in run.after)]
            for run in ready[: workers - len(running)]:
                waiting.remove(run)
                running[pool.submit(run.make)] = run
            for end in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(end)
                end.result()
                bar.update(run.flows)
                bar.set_postfix_str(run.name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ANALYSES, default=list(ANALYSES), metavar="NAME", help=f"some of {', '.join(ANALYSES)}")
    parser.add_argument("--seeds", type=int, default=5, help="seeds; sizes and variants take three of them at most")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a thread each")
    args = parser.parse_args()
    if not 2 <= args.seeds <= 10 or args.workers < 1:
        parser.exit(2, "plots/study.py: --seeds from 2 (one seed has no interval) to 10, --workers from 1\n")
    if find_spec("matplotlib") is None:  # told now, not after two hours
        parser.exit(2, "plots/study.py: needs matplotlib, which the project does not: pip install matplotlib\n")
    RUNS.mkdir(parents=True, exist_ok=True)
    few = (ROOT / "toy" / "valid.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:4]
    (RUNS / "few.jsonl").write_text("".join(few), encoding="utf-8")
    analyses = [ANALYSES[name](args.seeds) for name in args.only]
    make_all([run for analysis in analyses for run in next(analysis)], args.workers)
    RESULTS.mkdir(exist_ok=True)
    for name, rows in chain.from_iterable(analyses):
        with open(RESULTS / name, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        print(f"results/{name}: {len(rows)} rows")
    sys.exit(subprocess.run([sys.executable, str(ROOT / "plots" / "figures.py"), *args.only]).returncode)


if __name__ == "__main__":
    main()
