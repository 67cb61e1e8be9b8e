"""How fast this project is beside others: the same work, on the same machine, in one run, in turn.

    python bench/speed.py --trl-python trl/bin/python       update, step, start: about 15 minutes
    python bench/speed.py step --trl-python trl/bin/python --case 3     one line of a table
    python bench/speed.py update generate --plain           beside the same without fast/, as --plain runs it
    python bench/speed.py toy start --against FOLDER        commands, beside another checkout of this project
    python bench/card.py                                    shares of what one GPU can do

    update    one update of 16 completions of 2 prompts, beside TRL's GRPOTrainer
    generate  sample 32 tokens for each of 8 rows with one prompt
    step      a whole step: sample 32 tokens for each row, rewards, update, beside GRPOTrainer.train()
    start     --help, and solve.py on the toy, in all
    toy       python train.py in all, a seed for each repetition

Each side of a comparison is a process of its own (peers.py), pinned to one core, with one thread; the sides
take turns (A B A B), and a table holds medians. TRL is needed for update and step alone. Install it apart:
python -m venv trl; trl/bin/pip install trl==1.16.0, with the torch and the transformers of this project.

The commands (start, toy) run on all cores, as people run them, unless --core pins them. "faster" is the
ratio of CPU seconds: other processes on the machine change it least. "leaner" is the ratio of peak memory
beyond what the process held before, measured in a run of its own in which malloc returns what is freed.
"""
import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
from bench.meter import MALLOC, Meter, adopt_orphans
from experiments import figures
from rewards.metrics import markdown

STEP = dict(work="step", vocabulary=1024, groups=1, group=8, prompt=512, new=32)
SHAPES = [dict(prompt=64), dict(prompt=100), {}, dict(prompt=2048), dict(group=4), dict(group=16),
          dict(groups=4, prompt=100), dict(groups=4), dict(prompt=100, vocabulary=151936)]
CASES = {
    "update": [dict(work="update", vocabulary=vocabulary, groups=2, group=8, prompt=512, new=64)
               for vocabulary in (151936, 1024)],
    "step": [STEP | shape for shape in SHAPES],
    "generate": [STEP | dict(work="generate", prompt=prompt) for prompt in (100, 512, 2048)],
    "start": [dict(work="start", command=command.split()) for command in
              ("train.py --help", "solve.py --help", "solve.py")],
    "toy": [dict(work="toy", command=["train.py"])]}
HEAD = ["work", "beside", "its s", "its CPU s", "our s", "our CPU s", "faster", "leaner", "both did",
        "command"]
FLAGS = {"TRL": " --trl-python PYTHON", "before": " --against FOLDER", "plain": " --plain"}
SHORT = 10      # seconds: work that takes less in all its repetitions is repeated up to five times as often


class Peer:
    """A process of peers.py. It has warmed up when it is made; lap() is one more repetition."""

    def __init__(self, peer, python, checkout, case, malloc=None):
        command = [python, str(REPO / "bench" / "peers.py"), peer, str(checkout), json.dumps(case)]
        self.errors = tempfile.TemporaryFile("w+")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | (malloc or {})
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True,
                                        stdout=subprocess.PIPE, stderr=self.errors)
        self.answer()       # of the warm-up

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise ChildProcessError((self.errors.read().strip().splitlines() or ["ended without a word"])[-1])
        return json.loads(line)

    def lap(self):
        print(file=self.process.stdin, flush=True)
        return self.answer()

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Command:
    """python COMMAND in a checkout, as a Peer: a lap runs it in all, with its start."""

    def __init__(self, checkout, case):
        self.checkout, self.case, self.laps = checkout, case, 0

    def lap(self):
        command = [sys.executable, *self.case["command"]]
        with tempfile.TemporaryDirectory() as folder:
            if self.case["work"] == "toy":
                command += ["--out", f"{folder}/run", "--seed", str(self.laps), *self.case.get("flags", [])]
            meter = Meter()
            result = subprocess.run(command, cwd=self.checkout, capture_output=True, text=True,
                                    env=os.environ | {"HF_HUB_OFFLINE": "1"})
            cost = meter.cost()
        if result.returncode:
            raise ChildProcessError((result.stderr.strip().splitlines() or [f"exit {result.returncode}"])[-1])
        self.laps += 1
        accuracies = re.findall(r"test.*accuracy ([0-9.]+)", result.stdout)
        return {"wall": cost["wall"], "cpu": cost["cpu"]} | {"accuracy": float(a) for a in accuracies[-1:]}

    def close(self):
        """Nothing is left to end."""


def sides_of(row, args):
    """{name: make(case, **settings) -> a Peer or a Command}; the first is this checkout."""
    if row in ("start", "toy"):
        folders = {"ours": REPO, "before": args.against}
        return {name: lambda case, folder=folder: Command(folder, case)
                for name, folder in folders.items() if folder}
    ours = "ours", sys.executable, REPO
    sides = {"ours": ours}
    if row in ("update", "step") and args.trl_python:
        sides["TRL"] = ("trl", args.trl_python, REPO)
    if args.against:
        sides["before"] = ("ours", sys.executable, args.against)
    sides = {name: lambda case, malloc=None, side=side: Peer(*side, case, malloc)
             for name, side in sides.items()}
    if args.plain:
        sides["plain"] = lambda case, malloc=None: Peer(*ours, case | {"plain": True}, malloc)
    return sides


def measure(case, sides, repetitions, say, memory=False):
    """{side: {"wall", "cpu": medians, "peak": bytes, "laps": all}}; a side that fails is left out.

    Short work is repeated more often. memory: the peak is measured, too, at the end and each side alone.
    """
    running, laps = {}, {name: [] for name in sides}

    def attempt(name, work):
        try:
            work(name)
        except ChildProcessError as why:
            say(f"{name} is left out: {why}")
            laps.pop(name)

    try:
        for name in list(laps):
            attempt(name, lambda name: running.update({name: sides[name](case)}))
        start = time.perf_counter()
        for number in range(5 * repetitions):
            if number >= repetitions and time.perf_counter() - start > SHORT:
                break
            for name in list(laps):
                attempt(name, lambda name: laps[name].append(running[name].lap()))
    finally:
        for peer in running.values():
            peer.close()
    if "ours" not in laps:
        sys.exit("this checkout cannot do the work itself")
    results = {name: {key: statistics.median(lap[key] for lap in of_side) for key in ("wall", "cpu")}
               | {"laps": of_side} for name, of_side in laps.items()}
    for name, result in results.items():
        if memory:
            peer = sides[name](case, malloc=MALLOC)
            result["peak"] = peer.lap()["peak"]
            peer.close()
        peak = f", {result['peak'] / 2**20:.0f} MiB" if memory else ""
        say(f"{name} {result['wall']:.2f} s, CPU {result['cpu']:.2f} s{peak} ({len(laps[name])} repetitions)")
    return results


def check(case, results):
    """A sentence for each thing that the sides did not do alike, or []."""
    problems, laps = [], {name: result["laps"][-1] for name, result in results.items()}
    if case["work"] in ("update", "step") and len({lap["tokens"] for lap in laps.values()}) > 1:
        problems.append(f"the numbers of tokens differ: {[lap['tokens'] for lap in laps.values()]}")
    gradients = [lap["gradient"] for lap in laps.values() if "gradient" in lap]
    for gradient in gradients[1:]:
        error = max(abs(a - b) for a, b in zip(gradient, gradients[0])) / max(map(abs, gradients[0]))
        if error > 1e-4:
            problems.append(f"the gradients differ by {error:.1e}")
    return problems


def label(case):
    if "command" in case:
        return " ".join(case["command"] + case.get("flags", []))
    return (f"{case['work']} {case['groups']} x {case['group']} x ({case['prompt']} + {case['new']}), "
            f"V {case['vocabulary']}")


def both_did(laps, others):
    """What the sides did, the other side before ours: '1024 tokens', 'accuracy 0.9 0.9 / 0.9 0.91'."""
    sides = [others, laps] if others else [laps]
    if "accuracy" in laps[0]:
        return "accuracy " + " / ".join(" ".join(str(lap.get("accuracy")) for lap in side) for side in sides)
    return f"{laps[0]['tokens']} tokens" if "tokens" in laps[0] else ""


def lines_of(case, results, command):
    """The lines of the table: one for each side but ours, or a line of ours alone."""
    ours, lines = results["ours"], []
    for name, other in list(results.items())[1:] or [("", None)]:
        line = [label(case), name] + ["", ""] * (not other)
        for result in filter(None, (other, ours)):
            line += [f"{result['wall']:.2f}", f"{result['cpu']:.2f}"]
        line.append(f"{other['cpu'] / ours['cpu']:.2f}" if other else "")
        peaks = [result["peak"] / 2**20 for result in (other, ours) if result and "peak" in result]
        many = len(peaks) == 2
        line.append(f"{peaks[0] / peaks[1]:.1f} ({peaks[0]:.0f} / {peaks[1]:.0f} MiB)" if many else "")
        line.append(both_did(ours["laps"], other and other["laps"]))
        lines.append(line + [command + FLAGS.get(name, "")])
    return lines


def numbers_of(row, number, case, results):
    """[{column: number}] for --out: a row for each other side, with what both cost. Commands have no MiB."""
    def cost(whose, result):
        peak = f"{result['peak'] / 2**20:.4g}" if "peak" in result else ""
        return {f"{whose}_seconds": f"{result['wall']:.4g}", f"{whose}_cpu_seconds": f"{result['cpu']:.4g}",
                f"{whose}_MiB": peak}

    return [{"row": row, "case": number, "work": label(case), "beside": name} | cost("its", result)
            | cost("our", results["ours"]) for name, result in results.items() if name != "ours"]


def machine():
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return (f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, load before "
            f"{os.getloadavg()[0]:.1f}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("rows", nargs="*", help="all but generate and toy, unless named")
    parser.add_argument("--case", type=int, help="only this case of each row, from 1")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--trl-python", help="the Python of an environment that has TRL 1.16.0")
    parser.add_argument("--plain", action="store_true", help="this project without fast/, beside it")
    parser.add_argument("--against", help="another checkout of this project", type=os.path.abspath)
    parser.add_argument("--core", type=int, help="default: the last one; for commands all")
    parser.add_argument("--steps", help="of the toy's training; default: train.py's")
    parser.add_argument("--out", help="CSV file of all medians, written after each case")
    args = parser.parse_args()
    args.rows = args.rows or ["update", "step", "start"]
    if wrong := [row for row in args.rows if row not in CASES]:
        parser.error(f"no row is called {wrong[0]}: choose from {', '.join(CASES)}")
    return args


def main():
    args, table, numbers = arguments(), [HEAD], []
    cores = os.sched_getaffinity(0)
    adopt_orphans()
    print(machine(), flush=True)
    if set(args.rows) & {"update", "step"} and not args.trl_python:
        print("TRL is left out: pip install trl==1.16.0 in an environment of its own, then --trl-python")
    for row in args.rows:
        commands = row in ("start", "toy")
        pinned = {max(cores) if args.core is None else args.core}
        os.sched_setaffinity(0, cores if commands and args.core is None else pinned)
        for number, case in enumerate(CASES[row], 1):
            if args.case in (None, number):
                case = case | {"flags": ["--steps", args.steps] if row == "toy" and args.steps else []}
                say = lambda text: print(f"    {label(case)}: {text}", flush=True)
                memory = row in ("update", "generate", "step")
                results = measure(case, sides_of(row, args), args.repetitions, say, memory)
                for problem in check(case, results):
                    say(f"NOT THE SAME WORK: {problem}")
                table += lines_of(case, results, f"python bench/speed.py {row} --case {number}")
                numbers += numbers_of(row, number, case, results)
                if args.out and numbers:
                    figures.write(args.out, numbers)
    print(f"\n{markdown(table)}")


if __name__ == "__main__":
    main()
