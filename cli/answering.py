"""solve.py's run: what it needs before the first question, the trials of each set of questions, an early end,
and what it prints at the end."""

import signal
import statistics
import time
from contextlib import contextmanager
from pathlib import Path

from benchmarks import tables
from cli.cast import Cast, load_engines, load_tools, plan_memory, show_engines, toy_warning
from cli.command_line import after_loading
from cli.flags import TOY, is_toy
from logbook import advice
from logbook.endings import errors_leave, leave
from logbook.folder import folder_name, lock
from logbook.records import Trial, finished_trials, run_folder
from models.loading import fingerprint, pick_device, pick_dtype
from rewards.metrics import accuracy_line, calls_line, interval, markdown, summary
from rewards.questions import Question, read_questions
from scale import adapters, fit, threads
from world.files import replace_file
from world.places import MODULES
from world.text import printable

EXAMPLES = 8  # how many of the toy's questions are answered if the command line names no question
FREE = {"out", "quiet", "device", "cache", "benchmark", "benchmark_dir", "trials",
        "compare"}  # may differ on resuming


def begin(args, table):
    """Load all that the command line names, and print the first lines of the run. A run that cannot begin
    ends here, with one sentence.

    table: tools.TOOLS. Returns ({name: [Question]}, the Cast, the run's folder or None).
    """
    with errors_leave("solve.py"):
        sets = load_questions(args)
        tools, without, cache = load_tools(args, table)
        policy, fixed, judge, lines = load_models(args, cache, tools, without)
        folder = open_run(args)
    lines.append(toy_warning(policy, fixed, tools))
    for line in filter(None, lines):
        print(printable(line))
    print(flush=True)
    return sets, Cast(policy, fixed, tools, judge), folder


def load_questions(args):
    """{name: [Question]} of each benchmark; or {"questions": [Question]} of the file or the one question."""
    if args.benchmark:
        return {name: tables.load(name, args.benchmark_dir, args.limit)
                for name in tables.names(args.benchmark)}
    if args.question:
        return {"questions": [Question(args.question, "")]}
    questions = read_questions(args.data or TOY / "test.jsonl")
    return {"questions": questions[: args.limit or (None if args.data else EXAMPLES)]}


def load_models(args, cache, tools, without):
    """(policy, {module: engine}, judge or None, the first lines of the run). tools, without: of load_tools().

    ValueError if the models cannot be loaded or do not fit into memory. Sets --batch if it was not given."""
    lines = [plan_memory(args)]
    if pick_device(args.device).type != "cuda":
        fit.bound_host_memory()
    policy = adapters.load(args.model, args.device, args.dtype, args.think, args.plain)
    fixed, judge = load_engines(args, {args.model: policy}, cache)
    args.batch = args.batch or fit.batch_size([policy, *fixed.values()])
    lines += [threads.choose(policy), show_engines(policy, fixed, judge, tools, without)]
    after_loading()
    return policy, fixed, judge, lines


def open_run(args):
    """The run's folder, which must be new or belong to a run with the same settings; None without --out.

    Benchmarks always have a folder."""
    if args.benchmark and not args.out:
        model = "toy" if is_toy(args.model) else folder_name(args.model)
        args.out = f"runs/{model}-benchmarks"
    if not args.out:
        return None
    models = [getattr(args, name) for name in ("model", *MODULES, "judge")]
    settings = {name: value for name, value in vars(args).items() if name not in FREE}
    settings["dtype"] = str(pick_dtype(args.dtype, pick_device(args.device)))
    settings["set of weights"] = [fingerprint(model) for model in models if model]
    folder = run_folder(args.out, settings)
    lock(folder, "solve.py")
    return folder


@contextmanager
def trials(args, name, questions, folder):
    """The trials of a set of questions, [records.Trial]; at the end the numbers of all of them are printed.

    Ctrl-C or an error inside ends the process: with the numbers so far, and one sentence.
    """
    made = [Trial(name, questions, args.batch, seed=args.seed * 1_009 + number,
                  path=folder and folder / f"{name}-{number}.jsonl") for number in range(args.trials)]
    start = time.perf_counter()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield made
        print_summary(args, name, made, time.perf_counter() - start)
    except BrokenPipeError:  # `| head` has ended (endings.py)
        raise
    except (ValueError, OSError, MemoryError, KeyboardInterrupt) as why:
        rollouts = [rollout for trial in made for rollout in trial.rollouts]
        if rollouts and not args.question:
            number = len(questions)
            numbers = accuracy_line(summary(rollouts), min(len(rollouts), number))
            print(f"\npartial, {len(rollouts)} of {args.trials * number} rollouts: {numbers}", flush=True)
        if isinstance(why, KeyboardInterrupt):
            leave(130, f"\nsolve.py: stopped{'; the same command goes on' if args.out else ''}")
        leave(1, f"solve.py: {why}")


def print_summary(args, name, trials, seconds):
    """The last lines of a set of questions: calls, failures and the accuracy, over all trials."""
    rollouts = [rollout for trial in trials for rollout in trial.rollouts]
    metrics, number = summary(rollouts), len(trials[0].questions)
    tokens = sum(output["tokens"] for rollout in rollouts for output in rollout.outputs)
    line = f"{len(rollouts)} rollouts, {tokens} tokens, {seconds:.1f} s | calls: {calls_line(metrics)}"
    print(printable(f"{name}: {line}" if args.benchmark else line))  # the tools that a file names, too
    if metrics["failed"]:
        print(advice.failures(rollouts))
    if dead := advice.dead_tools(rollouts):
        print(dead)
    if not args.question:
        print(accuracy_line(metrics, number), flush=True)
    if metrics["failed"] == len(rollouts):
        leave(1, "solve.py: no rollout came to an end")


def print_end(args):
    """The last lines of a run: the benchmarks' table, and what makes the toy better."""
    if args.benchmark:
        print_table(args)
    if is_toy(args.model):
        name = Path(args.model).resolve().name
        chosen = "" if name == "toy" else f" --model {args.model}"
        print("This planner has only learnt the formats and picks its tools blindly. "
              f"Train it: python train.py{chosen}; then: python solve.py --model runs/{name}-seed0/best")


def print_table(args):
    """Print table.md and write it: a row for each benchmark that has a complete trial in the folder."""
    folder, rows = Path(args.out), []
    for name in tables.BENCHMARKS:
        if any(folder.glob(f"{name}-*.jsonl")):
            number = len(tables.load(name, args.benchmark_dir, args.limit))
            if trials := finished_trials(folder, name, number):
                rows.append(row_of(name, trials))
    text = markdown([list(rows[0]), *(list(row.values()) for row in rows)])
    replace_file(folder / "table.md", text + "\n")
    print(printable(f"\n{text}\nKept in {folder}"))


def row_of(name, trials):
    """A row of the benchmarks' table, from the rollouts of each trial.

    The interval is Wilson's for the number of questions: more trials add no questions.
    """
    benchmark, rollouts = tables.BENCHMARKS[name], [rollout for trial in trials for rollout in trial]
    metrics, n = summary(rollouts), len(trials[0])
    low, high = interval(metrics["accuracy"], n)
    each = [100 * summary(trial)["accuracy"] for trial in trials]
    steps = max(1, sum(calls for calls, _, _ in metrics["calls"].values()))
    shares = sorted(((calls / steps, tool) for tool, (calls, _, _) in metrics["calls"].items()), reverse=True)
    seconds = sum(rollout.seconds for rollout in rollouts) / len(rollouts)
    return {
        "benchmark": name, "items": str(n),
        "accuracy %": f"{100 * metrics['accuracy']:.1f}", "95 %": f"{100 * low:.1f}-{100 * high:.1f}",
        "trials (sd)": f"{len(each)} ({statistics.stdev(each):.1f})" if len(each) > 1 else "1",
        **{f"paper: {name}": f"{getattr(benchmark, name):.1f}" for name in ("alone", "frozen", "trained")},
        "turns": f"{metrics['turns']:.2f}", "errors %": f"{100 * metrics['errors']:.1f}",
        "failed": str(metrics["failed"]), "undecided": str(metrics["undecided"]),
        "tokens": f"{metrics['tokens']:.0f}", "s a rollout": f"{seconds:.2f}",
        "tools": ", ".join(f"{tool} {share:.0%}" for share, tool in shares),
    }
