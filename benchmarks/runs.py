"""benchmarks.runs"""

import json
import os
import statistics
from pathlib import Path

from benchmarks import tables
from models.completion import outage
from rewards.metrics import interval, summary
from rewards.questions import Question
from scale import command_line
from scale.progress import Progress


def answer_all(name, questions, path, batch, run, restore, finished=lambda flows: None):
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
    flows = [restore(question, data) for question, data in zip(questions, before)]
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
                down = [flow.failed for flow in new if outage(flow.failed)]
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


def kept(folder, name, number, restore):
    """[[Flow]]: the trials of a benchmark of `number` questions that a run's folder holds from its first to its last, also from
    earlier commands. What was cut off is no trial yet."""
    trials = [path.read_bytes().splitlines() for path in sorted(folder.glob(f"{name}-*.jsonl"))]  # of bytes: U+2028 is no end of a line
    return [[restore(Question(data["question"], data["gold"]), data) for data in map(json.loads, lines)] for lines in trials if len(lines) == number]


def markdown(rows):
    """Markdown, aligned: [{column: text}] with the same columns."""
    lines = [list(rows[0])] + [list(row.values()) for row in rows]
    wide = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in wide])
    return "\n".join("| " + " | ".join(text.ljust(width) for text, width in zip(line, wide)) + " |" for line in lines)


def row_of(name, trials):
    """A row of the benchmarks' table from the flows of each trial. The interval is Wilson's on the number of questions: repeating a
    question makes its own share surer, but adds no question."""
    benchmark, flows = tables.BENCHMARKS[name], [flow for trial in trials for flow in trial]
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
