"""A run of many questions that goes on after a kill, and the table of its results.

A run has a folder: settings.json, NAME-0.jsonl, NAME-1.jsonl, ... (the rollouts of each trial of a
benchmark, one JSON object a line) and table.md. The same command goes on in the same folder.
"""

import json
import os
import statistics
from pathlib import Path

from benchmarks.tables import BENCHMARKS
from models.completion import outage
from rewards.metrics import interval, summary
from rewards.questions import Question
from scale.files import replace_file
from scale.progress import Progress


def answer_all(name, questions, path, batch, run, restore, finished=lambda flows: None):
    """The flows of all questions, batch by batch: run(start, questions, watch), then finished(flows).

    Each flow becomes a line of `path` (None: no file) and is not run again; restore(question, data) reads
    it. Only whole batches are saved: to save the fast rollouts of a killed batch and sample the slow ones
    anew would bias the result. A killed batch is run again with its own seed, so the run ends as an
    undisturbed one does. unfinished-NAME shows people what the modules have written so far in the present
    batch.
    """
    flows = saved_flows(path, questions, batch, restore) if path else []
    unfinished = path and path.with_name(f"unfinished-{path.name}")
    finished(flows)
    with Progress(len(questions), name, len(flows)) as progress:

        def watch(flows, turn, module):
            progress(flows, turn, module)
            if path:
                unfinished.write_text(records(flows), encoding="utf-8", errors="backslashreplace")

        for start in range(len(flows), len(questions), batch):
            new = run(start, questions[start : start + batch], watch)
            if path and outages(new):
                new = run(start, questions[start : start + batch], watch)
                refuse_outage(new)
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


def saved_flows(path, questions, batch, restore):
    """The flows of the whole batches in a file, which loses its other lines: a kill may leave half a line."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    lines = [line for line in lines if line.endswith(b"\n")]
    lines = lines if len(lines) == len(questions) else lines[: len(lines) // batch * batch]
    saved = [json.loads(line) for line in lines]
    expected = [(question.question, question.answer) for question in questions[: len(saved)]]
    if [(data["question"], data["gold"]) for data in saved] != expected:
        raise ValueError(f"{path} holds answers to other questions: give another --out")
    replace_file(path, b"".join(lines))
    return [restore(question, data) for question, data in zip(questions, saved)]


def outages(flows):
    return [flow.failed for flow in flows if outage(flow.failed)]


def refuse_outage(flows):
    """A server that is down would use up the questions, so its batch is not saved. But one that always
    fails at a single question must not end the run: that question counts as failed."""
    errors = outages(flows)
    if 2 * len(errors) > len(flows):
        raise ValueError(f"{len(errors)} of the {len(flows)} flows of a batch did not come to an end "
                         f"({errors[0]}): mend that, then the same command goes on")


def records(flows):
    return "".join(json.dumps(flow.record(), ensure_ascii=False) + "\n" for flow in flows)


def open_folder(path, settings):
    """The folder of a new run, or of one with the same settings, which then goes on; else ValueError."""
    folder, file = Path(path), Path(path) / "settings.json"
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            file.write_text(json.dumps(settings, indent=1))
        before = json.loads(file.read_text()) if file.exists() else None
    except (OSError, json.JSONDecodeError) as why:
        reason = getattr(why, "strerror", "its settings.json is damaged")
        raise ValueError(f"{path} can't be used ({reason}): give another --out") from why
    if not isinstance(before, dict):
        raise ValueError(f"{path} exists already and is not the folder of a run: give another --out")
    for name, value in settings.items():
        if value != before.get(name):
            flag = name if " " in name else f"--{name.replace('_', '-')} ({before.get(name)})"
            raise ValueError(f"{path} holds a run with another {flag}: give another --out")
    return folder


def finished_trials(folder, name, number, restore):
    """The flows of each trial of a benchmark in a run's folder, earlier commands included. A trial that was
    cut off has fewer lines than the benchmark's `number` of questions, and is left out."""
    trials = [path.read_bytes().splitlines() for path in sorted(folder.glob(f"{name}-*.jsonl"))]
    trials = [[json.loads(line) for line in lines] for lines in trials if len(lines) == number]
    return [[restore(Question(data["question"], data["gold"]), data) for data in trial] for trial in trials]


def markdown(rows):
    """An aligned Markdown table of [{column: text}], all with the same columns."""
    lines = [list(rows[0])] + [list(row.values()) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    lines = [" | ".join(text.ljust(width) for text, width in zip(line, widths)) for line in lines]
    return "\n".join(f"| {line} |" for line in lines)


def row_of(name, trials):
    """A row of the benchmarks' table, from the flows of each trial.

    The interval is Wilson's on the number of questions: another trial makes the share of a question surer,
    but adds no question.
    """
    benchmark, flows = BENCHMARKS[name], [flow for trial in trials for flow in trial]
    metrics, n = summary(flows), len(trials[0])
    low, high = interval(metrics["accuracy"], n)
    each = [100 * summary(trial)["accuracy"] for trial in trials]
    steps = max(1, sum(calls for calls, _, _ in metrics["calls"].values()))
    shares = sorted(((calls / steps, tool) for tool, (calls, _, _) in metrics["calls"].items()), reverse=True)
    seconds = sum(flow.seconds for flow in flows) / len(flows)
    return {
        "benchmark": name, "items": str(n),
        "accuracy %": f"{100 * metrics['accuracy']:.1f}", "95 %": f"{100 * low:.1f}-{100 * high:.1f}",
        "trials (sd)": f"{len(each)} ({statistics.stdev(each):.1f})" if len(each) > 1 else "1",
        **{f"paper: {name}": f"{getattr(benchmark, name):.1f}" for name in ("alone", "frozen", "trained")},
        "turns": f"{metrics['turns']:.2f}", "errors %": f"{100 * metrics['errors']:.1f}",
        "failed": str(metrics["failed"]), "undecided": str(metrics["undecided"]),
        "tokens": f"{metrics['tokens']:.0f}", "s a flow": f"{seconds:.2f}",
        "tools": ", ".join(f"{tool} {share:.0%}" for share, tool in shares),
    }
