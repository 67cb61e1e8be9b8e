"""A run of many questions, which can be resumed after a kill, and the table of its results.

A run has a folder with settings.json, table.md, and the rollouts of each trial of a benchmark, one JSON
object a line: NAME-0.jsonl, NAME-1.jsonl, ... The same command resumes the run in its folder.
"""

import json
import os
import statistics
from pathlib import Path

from benchmarks.tables import BENCHMARKS
from models.completion import outage
from rewards.metrics import interval, summary
from rewards.questions import Question
from scale.files import check_file, check_own, read_object, reading, replace_file
from scale.progress import Progress

OTHER = "give another --out"


def answer_all(name, questions, path, batch, run, restore, finished=lambda flows: None):
    """Run all questions, batch by batch: [flow]. Each batch: run(start, questions, watch), finished(flows).

    Each flow becomes a line of `path` (None: no file). On resuming, restore(question, data) makes it a flow
    again. Only whole batches are saved and restored: a batch that was killed is run again with the same
    seed, so the results are those of a run without a kill. (To keep its fast rollouts and sample the slow
    ones again would bias the results.) unfinished-NAME shows what the modules have written so far in the
    current batch, for people to read.
    """
    flows = saved_flows(path, questions, batch, restore) if path else []
    unfinished = path and path.with_name(f"unfinished-{path.name}")
    finished(flows)
    with Progress(len(questions), name, len(flows)) as progress:

        def watch(flows, turn, module):
            progress(flows, turn, module)
            if path:
                replace_file(unfinished, records(flows).encode("utf-8", "backslashreplace"))

        for start in range(len(flows), len(questions), batch):
            new = run(start, questions[start : start + batch], watch)
            if path and any(outage(flow.failed) for flow in new):
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
    """The flows of the whole batches in a file. Removes all other lines: a kill may leave half a line."""
    check_own(path)  # batches are added to it
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    lines = [line for line in lines if line.endswith(b"\n")]
    lines = lines if len(lines) == len(questions) else lines[: len(lines) // batch * batch]
    with reading(path, OTHER):
        saved = [json.loads(line) for line in lines]
        keys = [(data["question"], data["gold"]) for data in saved]
    if keys != [(question.question, question.answer) for question in questions[: len(saved)]]:
        raise ValueError(f"{path} holds answers to other questions: {OTHER}")
    with reading(path, OTHER):
        flows = [restore(question, checked(data)) for question, data in zip(questions, saved)]
    replace_file(path, b"".join(lines))
    return flows


def checked(data):
    """The record of a flow; ValueError if a text in it is no text, or a number no number."""
    texts, numbers = ["question", "gold", "answer", "failed"], ["reward", "undecided"]
    parts = [(data, texts, numbers), (data["memory"], ["question", "analysis"], [])]
    parts += [(step, ["tool", "sub_goal", "command", "result", "verdict"], ["turn", "error", "seconds"])
              for step in data["memory"]["steps"]]
    parts += [(output, ["module", "text"], ["turn", "tokens", "seconds"]) for output in data["words"]]
    for part, texts, numbers in parts:
        wrong = [part[name] for name in texts if not isinstance(part[name], str)]
        wrong += [part[name] for name in numbers
                  if not (isinstance(part[name], (int, float)) and abs(part[name]) <= 1e12)]  # nan neither
        if wrong:
            raise ValueError(f"{wrong[0]!r} stands in a wrong place")
    return data


def refuse_outage(flows):
    """ValueError if a server failed at more than half of a batch: it is down, so the batch is not saved.

    A server that always fails at a single question does not end the run: that question counts as failed.
    """
    errors = [flow.failed for flow in flows if outage(flow.failed)]
    if 2 * len(errors) > len(flows):
        raise ValueError(f"{len(errors)} of the {len(flows)} flows of a batch did not come to an end "
                         f"({errors[0]}): mend that, then the same command goes on")


def records(flows):
    return "".join(json.dumps(flow.record(), ensure_ascii=False) + "\n" for flow in flows)


def open_folder(path, settings):
    """The folder of a new run, or of one with the same settings to resume; else ValueError."""
    folder, file = Path(path), Path(path) / "settings.json"
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
        if folder.is_dir() and not any(folder.iterdir()):  # new, or a kill came before the settings
            replace_file(file, json.dumps(settings, indent=1))
    except OSError as why:
        raise ValueError(f"{path} can't be used ({why.strerror}): {OTHER}") from why
    if not file.exists():
        raise ValueError(f"{path} exists already and is not the folder of a run: {OTHER}")
    with reading(file, OTHER):
        before = read_object(file)
    for name, value in settings.items():
        if value != before.get(name):
            flag = name if " " in name else f"--{name.replace('_', '-')} ({before.get(name)})"
            raise ValueError(f"{path} holds a run with another {flag}: give another --out")
    return folder


def finished_trials(folder, name, number, restore):
    """The flows of each trial of a benchmark in a run's folder, also of earlier commands.

    An unfinished trial has fewer lines than the benchmark's `number` of questions, and is left out.
    """
    trials = []
    for path in sorted(folder.glob(f"{name}-*.jsonl")):
        with reading(path, OTHER):
            check_file(path)
            if len(lines := path.read_bytes().splitlines()) == number:
                records = [json.loads(line) for line in lines]
                trials.append([restore(Question(data["question"], data["gold"]), checked(data))
                               for data in records])
    return trials


def row_of(name, trials):
    """A row of the benchmarks' table, from the flows of each trial.

    The interval is Wilson's for the number of questions: more trials add no questions.
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
