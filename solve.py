"""solve.py: ask the flow one question, a file of questions, or a benchmark.

    python solve.py                                        a few questions of the toy, with the toy model: no download, key or GPU
    python solve.py "What is the capital of France?"
    python solve.py --data toy/test.jsonl --limit 100 --quiet
    python solve.py --model Qwen/Qwen2.5-7B-Instruct "Which is longer, the Nile or the Danube?"
    python solve.py --model Qwen/Qwen2.5-7B-Instruct --benchmark bamboogle gameof24
    python solve.py --model Qwen/Qwen2.5-7B-Instruct --fixed http://localhost:8000/v1 --judge http://localhost:8000/v1 --data my.jsonl

What happens to a question stands in flow.py. Here its answer is marked (rules first, then the judge if there is one), the marks of
many become numbers, and the numbers a line that says how sure they are.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import settings

if __name__ == "__main__":
    settings.before_imports(settings.solve_arguments)  # typos and --help do not wait for torch

import torch
from tqdm import tqdm

import advice
import benchmarks
import fit
import judge as judging
import llm
import lora
import tasks
import tools as toolset
import services
from flow import FIXED, Flow, rollout
from progress import Progress
from sandbox import protection
from settings import TOY, TOY_TOOLS, is_toy

EXAMPLES = 4  # toy questions that are shown when none is asked


# ------------------------------------------------------------------------------------------------------- marks and numbers
def evaluate(questions, policy, fixed, tools, judge=None, watch=None, **settings):
    """Run and mark every question: ({metric: number}, [Flow]). Every question stays in the denominator, also
    one that failed. watch: as rollout() takes it; None: the progress is shown."""
    start = time.perf_counter()
    with contextlib.nullcontext(watch) if watch else Progress(len(questions)) as watch:
        flows = rollout(questions, policy, fixed, tools, watch=watch, **settings)
        if judge:
            watch(flows, 0, "judge")
        mark(flows, judge)
    for flow in flows:
        flow.seconds = (time.perf_counter() - start) / len(flows)
    return summary(flows), flows


def mark(flows, judge=None):
    """R(o) of each flow that has an answer: by the rules, and where they cannot decide by the judge, an engine (None: not right).
    (tasks.mark() is the rules alone, for one answer.) To train on another reward, begin here: accuracy and best/ are means of it."""
    ended = [flow for flow in flows if not flow.failed]
    verdicts = [tasks.decide(flow.question, flow.answer) for flow in ended]
    for flow, verdict in zip(ended, verdicts):
        flow.reward = float(verdict is True)
    if judge:
        unread = [flow for flow, verdict in zip(ended, verdicts) if verdict is None]
        start = time.perf_counter()
        for flow, (verdict, said) in zip(unread, judging.ask([(flow.question, flow.answer) for flow in unread], judge)):
            flow.reward, flow.undecided = float(verdict is True), verdict is None and not said.error
            flow.failed = said.error and f"judge: {said.error}"
            flow.say(len(flow.actions), "judge", said.text, said.tokens, time.perf_counter() - start)


def summary(flows):
    """What a batch of marked flows amounts to. errors: the share of turns whose plan or call nobody could read, or whose tool said Error."""
    steps = [step for flow in flows for step in flow.memory.steps]
    used = {}
    for step in steps:
        calls, errors, seconds = used.get(step.tool or "unreadable", (0, 0, 0.0))
        used[step.tool or "unreadable"] = (calls + 1, errors + step.error, seconds + step.seconds)
    return {
        "accuracy": sum(flow.reward for flow in flows) / len(flows),
        "turns": len(steps) / len(flows),
        "errors": sum(step.error for step in steps) / max(1, len(steps)),
        "failed": sum(flow.failed != "" for flow in flows),
        "undecided": sum(flow.undecided for flow in flows),
        "tokens": sum(word["tokens"] for flow in flows for word in flow.words if word["module"] != "judge") / len(flows),
        "calls": {name: used[name] for name in sorted(used)},  # of each tool: (calls, errors, seconds)
    }


def show(metrics, n):
    """One line: accuracy with its 95 % interval, and what it cost. n: flows."""
    low, high = interval(metrics["accuracy"], n)
    line = f"accuracy {metrics['accuracy']:.3f} [{low:.2f}, {high:.2f}] of {n} | turns {metrics['turns']:.2f} | errors {metrics['errors']:.1%}"
    line += f" | {metrics['tokens']:.0f} tokens a flow"
    return line + "".join(f" | {name} {metrics[name]}" for name in ("failed", "undecided") if metrics[name])


def interval(p, n, z=1.96):
    """Wilson's 95 % interval of a share p of n, which does not collapse at 0 and 1."""
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + (z / (2 * n)) ** 2) ** 0.5
    return tuple((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))


def show_calls(metrics):
    """'python_coder 4 (0 errors, 0.1 s) | wikipedia_search 2 (1 errors, 0.0 s)'"""
    return " | ".join(f"{name} {n} ({errors} errors, {seconds:.1f} s)" for name, (n, errors, seconds) in metrics["calls"].items()) or "none"


def trace(flow):
    """The flow as text to read: every module's words, turn by turn. What a terminal would obey and not show is escaped."""
    lines = [f"Question: {flow.question.question}"]
    for word in flow.words:
        where = f"turn {word['turn']} {word['module']}" if word["module"] not in ("analysis", "generator", "judge") else word["module"]
        lines.append(f"[{where}]  {word['tokens']} tokens, {word['seconds']:.2f} s" if word["tokens"] else f"[{where}]  {word['seconds']:.2f} s")
        lines += ["    " + line for line in word["text"].strip().splitlines()]
    lines.append(f"Failed: {flow.failed}" if flow.failed else f"Answer: {flow.answer}")
    return advice.printable("\n".join(lines))


# ------------------------------------------------------------------------------------------- engines and tools
def load_tools(args):
    """The toolbox, and the cache for what may be asked once. Before any model is loaded, which may take minutes."""
    cache = services.Cache(args.cache or ":memory:")
    return toolset.toolbox(args.tools, args.corpus, cache if args.cache else None), cache


def load_engines(args, loaded, cache):
    """({module: engine} for rollout(), the judge or None). loaded: {name: engine} that are there already; a model is loaded once."""

    def engine(name):
        if name not in loaded:
            loaded[name] = lora.load(name, args.device, args.dtype, args.think)
        return loaded[name]

    fixed = {module: engine(getattr(args, module, None) or args.fixed) for module in FIXED}
    return fixed, llm.Cached(engine(args.judge), cache) if args.judge else None


def show_engines(policy, fixed, judge, tools, named):
    """The first lines of a run: who plays what, with which tools. named: were the tools named on the command line?"""
    lines = [f"planner {policy}", f"fixed   {fixed['analysis']}"]
    lines += [f"{module} {engine}" for module, engine in fixed.items() if engine is not fixed["analysis"]]
    lines += [f"judge   {judge}"] * bool(judge) + [f"tools   {', '.join(tools)}"]
    lines += [f"sandbox {protection()}"] if "python_coder" in tools else []
    lines += [] if named else [f"without {why}" for why in map(toolset.missing, toolset.TOOLS) if why]
    return "\n".join(lines)


def flow_settings(args):
    """What rollout() takes from a command line, here and in train.py."""
    return {"max_turns": args.max_turns, "temperature": args.temperature, "max_new_tokens": args.max_new_tokens}


# --------------------------------------------------------------------------------------------------- a run of many questions
def batch_size(engines):
    """Questions in lock-step: 64; on a CPU a billion over the parameters (7 for a 135M), at least 2. A batch
    is kept when it ends: with 64, after hours. There 8 at once are only 3 % slower per question than 32."""
    models = [engine.model for engine in engines if isinstance(engine, llm.HF)]
    largest = max([model.num_parameters() for model in models if model.device.type == "cpu"], default=1)
    return max(2, min(64, round(1e9 / largest)))


def answer_all(name, questions, path, batch, run, finished=lambda flows: None):
    """[Flow] of all questions, batch by batch: run(start, questions, watch) -> [Flow], then finished(flows).

    Each flow becomes a line of JSON in `path` (None: nothing is kept), and is not run again. A batch is kept
    whole: to keep the fast rollouts of a killed batch and sample the slow ones anew would bias the result.
    A killed batch is run again with its own seed, so the run ends as an undisturbed one does. unfinished-NAME
    holds what the modules have written so far in the present batch, for people to read.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path and path.exists() else []
    lines = [line for line in lines if line.endswith(b"\n")]
    lines = lines if len(lines) == len(questions) else lines[: len(lines) // batch * batch]
    before = [json.loads(line) for line in lines]
    expected = [(question.question, question.answer) for question in questions[: len(before)]]
    if [(data["question"], data["gold"]) for data in before] != expected:
        raise ValueError(f"{path} holds answers to other questions: give another --out")
    flows = [Flow.from_record(question, data) for question, data in zip(questions, before)]
    finished(flows)
    if path:
        beside, unfinished = path.with_name(path.name + ".writing"), path.with_name(f"unfinished-{path.name}")
        beside.write_bytes(b"".join(lines))
        beside.replace(path)
    with Progress(len(questions), name, len(flows)) as progress:

        def watch(some, turn, module):
            progress(some, turn, module)
            if path:
                unfinished.write_text(records(some), encoding="utf-8", errors="backslashreplace")

        for start in range(len(flows), len(questions), batch):
            for _ in range(2):  # a batch with an outage in it is run once more
                new = run(start, questions[start : start + batch], watch)
                down = [flow.failed for flow in new if llm.outage(flow.failed)]
                if not (path and down):
                    break
            # A server that is down would use up the questions, so such a batch is not kept. But one that
            # always fails at a single question must not end the run: that question counts as failed.
            if path and 2 * len(down) > len(new):
                raise ValueError(
                    f"{len(down)} of the {len(new)} flows of a batch did not come to an end ({down[0]}): "
                    "mend that, then the same command goes on")
            flows += new
            progress.before, progress.name = len(flows), f"{name}, accuracy {summary(flows)['accuracy']:.3f}"
            if path:
                with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:  # \ud800 is JSON
                    file.write(records(new))
                    file.flush()
                    os.fsync(file.fileno())
                unfinished.unlink(missing_ok=True)
            finished(new)
    return flows


def records(flows):
    return "".join(json.dumps(flow.record(), ensure_ascii=False) + "\n" for flow in flows)


def open_folder(path, settings):
    """The folder of a run: a new one, or that of the same run, which then goes on. ValueError, a sentence, for any other."""
    folder, file = Path(path), Path(path) / "settings.json"
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            file.write_text(json.dumps(settings, indent=1))
        before = json.loads(file.read_text()) if file.exists() else None
    except (OSError, json.JSONDecodeError) as why:
        raise ValueError(f"{path} can't be used ({getattr(why, 'strerror', 'its settings.json is damaged')}): give another --out") from why
    if not isinstance(before, dict):
        raise ValueError(f"{path} exists already and is not the folder of a run: give another --out")
    other = next((name for name in settings if settings[name] != before.get(name)), "")
    if other:
        flag = other if " " in other else f"--{other.replace('_', '-')} ({before.get(other)})"
        raise ValueError(f"{path} holds a run with another {flag}: give another --out")
    return folder


def kept(folder, name, number):
    """[[Flow]]: the trials of a benchmark of `number` questions that a run's folder holds from its first to its last, also from
    earlier commands. What was cut off is no trial yet."""
    trials = [path.read_bytes().splitlines() for path in sorted(folder.glob(f"{name}-*.jsonl"))]  # of bytes: U+2028 is no end of a line
    return [[Flow.from_record(tasks.Question(data["question"], data["gold"]), data) for data in map(json.loads, lines)] for lines in trials if len(lines) == number]


def table(rows):
    """Markdown, aligned: [{column: text}] with the same columns."""
    lines = [list(rows[0])] + [list(row.values()) for row in rows]
    wide = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in wide])
    return "\n".join("| " + " | ".join(text.ljust(width) for text, width in zip(line, wide)) + " |" for line in lines)


def row_of(name, trials):
    """A row of the benchmarks' table from the flows of each trial. The interval is Wilson's on the number of questions: repeating a
    question makes its own share surer, but adds no question."""
    benchmark, flows = benchmarks.BENCHMARKS[name], [flow for trial in trials for flow in trial]
    metrics, n = summary(flows), len(trials[0])
    low, high = (100 * end for end in interval(metrics["accuracy"], n))
    each = [100 * summary(trial)["accuracy"] for trial in trials]
    steps = max(1, sum(calls for calls, _, _ in metrics["calls"].values()))
    shares = sorted(((calls / steps, tool) for tool, (calls, _, _) in metrics["calls"].items()), reverse=True)
    paper = {"alone": benchmark.alone, "frozen": benchmark.frozen, "trained": benchmark.trained}
    return {
        "benchmark": name, "items": str(n), "accuracy %": f"{100 * metrics['accuracy']:.1f}", "95 %": f"{low:.1f}-{high:.1f}",
        "trials (sd)": f"{len(each)} ({statistics.stdev(each):.1f})" if len(each) > 1 else "1",
        **{f"paper: {column}": f"{value:.1f}" for column, value in paper.items()},
        "turns": f"{metrics['turns']:.2f}", "errors %": f"{100 * metrics['errors']:.1f}", "failed": str(metrics["failed"]),
        "undecided": str(metrics["undecided"]), "tokens": f"{metrics['tokens']:.0f}", "s a flow": f"{sum(f.seconds for f in flows) / len(flows):.2f}",
        "tools": ", ".join(f"{tool} {share:.0%}" for share, tool in shares),
    }


# ----------------------------------------------------------------------------------------------------------- the command line
def load_questions(args):
    """What is to be answered: {name: [Question]}."""
    if args.benchmark:
        args.out = args.out or "runs/" + ("toy" if is_toy(args.model) else re.sub(r"[^\w.]+", "-", args.model).strip("-")) + "-benchmarks"
        names = list(benchmarks.BENCHMARKS) if "all" in args.benchmark else args.benchmark
        return {name: benchmarks.load(name, args.benchmark_dir, args.limit) for name in names}
    questions = [tasks.Question(args.question, "")] if args.question else tasks.load(args.data or TOY / "test.jsonl")
    return {"questions": questions[: args.limit or (len(questions) if args.data else EXAMPLES)]}


def plan_memory(args):
    """The "memory" line for the weights of all local models; ValueError, before they are downloaded, if they do
    not fit. Without a GPU, models that do not fit in float32 are loaded in bfloat16, unless --dtype is given."""
    names = {args.model, args.judge, *(getattr(args, name) for name in settings.MODULES)} - {None}
    configs = [llm.config_of(name) for name in sorted(names) if not llm.is_server(name)]
    for config in configs:
        fit.context(config, args.max_new_tokens)
    device = llm.pick_device(args.device)
    weights = sum(fit.shapes(config)["parameters"] for config in configs)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else fit.host_memory()
    if args.dtype is None and device.type == "cpu" and 4 * weights > 0.9 * free:
        args.dtype = "bfloat16"
    dtype = llm.pick_dtype(args.dtype, device)
    name = str(dtype).removeprefix("torch.")
    needed = f"{dtype.itemsize * weights / 1e9:.1f} of {free / 1e9:.0f} GB for the weights, in {name}"
    if dtype.itemsize * weights > 0.9 * free:
        raise ValueError(f"this needs {needed}: use smaller models, or a server for --model or --fixed")
    return f"memory  {needed}"


def main():
    args = settings.solve_arguments()
    try:
        memory = plan_memory(args)
        asked = load_questions(args)
        tools, cache = load_tools(args)
        if llm.pick_device(args.device).type != "cuda":
            fit.bound_host_memory()
        policy = lora.load(args.model, args.device, args.dtype, args.think)
        fixed, judge = load_engines(args, {args.model: policy}, cache)
        args.batch = args.batch or batch_size([policy, *fixed.values()])
        named, args.tools = args.tools is not None, list(tools)
        same = {name: value for name, value in vars(args).items() if name not in ("out", "quiet", "device", "cache", "benchmark", "benchmark_dir", "trials")}
        same |= {"dtype": str(llm.pick_dtype(args.dtype, llm.pick_device(args.device))), "set of weights": [llm.fingerprint(model) for model in (args.model, args.fixed, args.executor, args.verifier, args.generator, args.judge) if model]}
        folder = open_folder(args.out, same) if args.out else None
    except (ValueError, OSError) as why:
        settings.leave(2, f"solve.py: {why}")
    warning = tasks.prose_warning(asked["questions"]) if args.data and not judge else ""
    engines = show_engines(policy, fixed, judge, tools, named)
    print(memory, engines, warning and warning + "\n", sep="\n", flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def run(trial, start, questions, bar):
        torch.manual_seed((args.seed * 1_009 + trial) * 1_000_003 + start)
        return evaluate(questions, policy, fixed, tools, judge, bar, **flow_settings(args))[1]

    for name, questions in asked.items():
        begun, flows = time.perf_counter(), []

        def finished(batch):
            flows.extend(batch)
            for flow in batch if not (args.quiet or args.benchmark) else []:
                grade = "right" if flow.reward else f"wrong: {flow.question.answer}"
                tqdm.write(trace(flow) + ("" if args.question else f"  ({grade})") + "\n")  # above the bar
            sys.stdout.flush()

        try:
            for trial in range(args.trials):
                file = folder and folder / f"{name}-{trial}.jsonl"
                answer_all(name, questions, file, args.batch, partial(run, trial), finished)
        except (ValueError, OSError, MemoryError, KeyboardInterrupt) as why:
            if flows and not args.question:
                numbers = show(summary(flows), min(len(flows), len(questions)))
                total = args.trials * len(questions)
                print(f"\npartial, {len(flows)} of {total} rollouts: {numbers}", flush=True)
            if isinstance(why, KeyboardInterrupt):
                settings.leave(130, f"\nsolve.py: stopped{'; the same command goes on' if folder else ''}")
            settings.leave(1, f"solve.py: {why}")
        metrics = summary(flows)
        tokens = sum(word["tokens"] for flow in flows for word in flow.words)
        print(f"{f'{name}: ' if args.benchmark else ''}{len(flows)} flows, {tokens} tokens, {time.perf_counter() - begun:.1f} s | calls: {show_calls(metrics)}")
        if metrics["failed"]:
            print(advice.failures(flows))
        if not args.question:
            print(show(metrics, len(questions)), flush=True)
        if metrics["failed"] == len(flows):
            settings.leave(1, "solve.py: no flow came to an end")
    if args.benchmark:
        there = {name: len(benchmarks.load(name, args.benchmark_dir, args.limit)) for name in benchmarks.BENCHMARKS if [*folder.glob(f"{name}-*.jsonl")]}
        text = table([row_of(name, runs) for name, number in there.items() if (runs := kept(folder, name, number))])
        (folder / "table.md").write_text(text + "\n")
        print(f"\n{text}\nKept in {folder}")
    if is_toy(args.model):
        print("This planner has only learnt the formats and picks its tools blindly. Train it: python train.py; then: python solve.py --model runs/toy-seed0/best")


if __name__ == "__main__":
    main()
