"""solve.py's run: which questions it answers, what it prints of them, and its folder.

benchmarks/runs.py answers the questions, batch by batch, and keeps the rollouts in the folder. A run with a
folder can be stopped at any time; the same command goes on.
"""

import signal
import sys
import time
from functools import partial

from tqdm import tqdm

from benchmarks import tables
from benchmarks.runs import answer_all, finished_trials, open_folder, row_of
from models.loading import fingerprint, pick_device, pick_dtype
from rewards.metrics import accuracy_line, calls_line, markdown, summary
from rewards.questions import Question, read_questions
from scale import advice, code
from scale.command_line import TOY, is_toy, leave
from scale.files import folder_name, lock, replace_file
from world.text import printable

EXAMPLES = 8  # how many of the toy's questions are answered if the command line names no question
FREE = {"out", "quiet", "device", "cache", "benchmark", "benchmark_dir", "trials",
        "compare"}  # may differ on resuming


def load_questions(args):
    """{name: [Question]} of each benchmark; or {"questions": [Question]} of the file or the one question."""
    if args.benchmark:
        return {name: tables.load(name, args.benchmark_dir, args.limit)
                for name in tables.names(args.benchmark)}
    if args.question:
        return {"questions": [Question(args.question, "")]}
    questions = read_questions(args.data or TOY / "test.jsonl")
    return {"questions": questions[: args.limit or (None if args.data else EXAMPLES)]}


def open_run(args):
    """The run's folder, which must be new or belong to a run with the same settings; None without --out.

    Benchmarks always have a folder."""
    if args.benchmark and not args.out:
        model = "toy" if is_toy(args.model) else folder_name(args.model)
        args.out = f"runs/{model}-benchmarks"
    if not args.out:
        return None
    models = [args.model, args.fixed, args.executor, args.verifier, args.generator, args.judge]
    settings = {name: value for name, value in vars(args).items() if name not in FREE}
    settings["dtype"] = str(pick_dtype(args.dtype, pick_device(args.device)))
    settings["set of weights"] = [fingerprint(model) for model in models if model]
    folder = open_folder(args.out, settings)
    lock(folder, "solve.py")
    code.note(folder / "settings.json")
    return folder


def answer(sets, args, folder, run, restore, trace):
    """Answer every set of questions --trials times, and print the results.

    sets: {name: [Question]}. run(trial, start, questions, watch) -> [Flow] answers one batch.
    restore(question, data): the flow of a record. trace(flow): a flow as text.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, questions in sets.items():
        answer_set(name, questions, args, folder, run, restore, trace)
    if args.benchmark:
        show_table(args, folder, restore)


def answer_set(name, questions, args, folder, run, restore, trace):
    start, flows = time.perf_counter(), []

    def finished(batch):
        flows.extend(batch)
        if not (args.quiet or args.benchmark):
            for flow in batch:
                grade = "right" if flow.reward > 0 else f"wrong: {flow.question.answer}"
                line = "" if args.question else printable(f"  ({grade})")
                tqdm.write(trace(flow) + line + "\n")  # above the bar
        sys.stdout.flush()

    try:
        for trial in range(args.trials):
            file = folder and folder / f"{name}-{trial}.jsonl"
            answer_all(name, questions, file, args.batch, partial(run, trial), restore, finished)
    except BrokenPipeError:  # `| head` has ended (endings.py)
        raise
    except (ValueError, OSError, MemoryError, KeyboardInterrupt) as why:
        if flows and not args.question:
            numbers = accuracy_line(summary(flows), min(len(flows), len(questions)))
            total = args.trials * len(questions)
            print(f"\npartial, {len(flows)} of {total} rollouts: {numbers}", flush=True)
        if isinstance(why, KeyboardInterrupt):
            leave(130, f"\nsolve.py: stopped{'; the same command goes on' if folder else ''}")
        leave(1, f"solve.py: {why}")
    show_summary(name, questions, flows, time.perf_counter() - start, args)


class TracePrinter:
    """Prints the trace of a typed question while it grows: each module's text as soon as it is there."""

    def __init__(self, trace):
        self.trace, self.printed = trace, 0  # lines of the trace

    def after(self, watch):
        """watch() of a rollout, and then what is new in the trace."""
        self.printed = 0

        def watch_and_print(flows, turn, module):
            watch(flows, turn, module)
            lines = self.trace(flows[0], ended=False).split("\n")
            if len(lines) > self.printed:
                tqdm.write("\n".join(lines[self.printed :]))  # above the bar
                sys.stdout.flush()
            self.printed = len(lines)
        return watch_and_print

    def rest(self, flow):
        """The lines of the finished trace that are not printed yet."""
        return "\n".join(self.trace(flow).split("\n")[self.printed :])


def show_summary(name, questions, flows, seconds, args):
    metrics = summary(flows)
    tokens = sum(output["tokens"] for flow in flows for output in flow.outputs)
    line = f"{len(flows)} flows, {tokens} tokens, {seconds:.1f} s | calls: {calls_line(metrics)}"
    print(printable(f"{name}: {line}" if args.benchmark else line))  # the tools that a file names, too
    if metrics["failed"]:
        print(advice.failures(flows))
    if not args.question:
        print(accuracy_line(metrics, len(questions)), flush=True)
    if metrics["failed"] == len(flows):
        leave(1, "solve.py: no flow came to an end")


def show_table(args, folder, restore):
    """Print table.md and write it: a row for each benchmark that has a complete trial in the folder."""
    rows = []
    for name in tables.BENCHMARKS:
        if any(folder.glob(f"{name}-*.jsonl")):
            number = len(tables.load(name, args.benchmark_dir, args.limit))
            if trials := finished_trials(folder, name, number, restore):
                rows.append(row_of(name, trials))
    text = markdown([list(rows[0]), *(list(row.values()) for row in rows)])
    replace_file(folder / "table.md", text + "\n")
    print(printable(f"\n{text}\nKept in {folder}"))
