"""A rollout as it is recorded (JSON) and as it is shown (text), in one place.

record = record_of(rollout)     a dict for JSON, without token ids: a line of rollouts.jsonl
rollout_of(record)              back again: what the metrics and the trace need
read_answers(folder)            the rollouts that solve.py --out wrote
trace(question, rollout)        what every module and tool wrote, turn by turn
tokens_of(output)               "6 written, 35 read"
"""

import dataclasses
import json
import re
from types import SimpleNamespace

from world.mistakes import Mistake
from world.text import printable


def record_of(rollout):
    """A rollout as data for JSON, without its token ids."""
    q = rollout.question
    record = {"id": q.id, "kind": q.kind, "question": q.question, "gold": q.answer}
    names = "answer right reward judged failed undecided".split()
    record |= {name: getattr(rollout, name) for name in names}
    record |= {"turns": len(rollout.plans), "seconds": round(rollout.seconds, 3)}
    return record | {"memory": dataclasses.asdict(rollout.memory), "outputs": rollout.outputs}


def rollout_of(record):
    """What the metrics need of the rollout that wrote this record."""
    steps = [SimpleNamespace(**step) for step in record["memory"]["steps"]]
    memory = SimpleNamespace(**record["memory"] | {"steps": steps})
    return SimpleNamespace(**record | {"memory": memory})


def read_answers(folder):
    """{name of a set: for each question, its rollouts, one a trial}, of NAME-0.jsonl and so on.

    A trial with fewer questions than another one is unfinished, and left out.
    """
    sets = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]  # a kill may leave half a line
        found = re.fullmatch(r"(.+)-\d+\.jsonl", path.name)
        if found and whole:
            sets.setdefault(found[1], []).append([rollout_of(json.loads(line)) for line in whole])
    if not sets:
        raise Mistake(f"{folder} holds no answers: give a folder that solve.py --out wrote")
    for name, trials in sets.items():
        number = max(map(len, trials))
        sets[name] = list(zip(*(trial for trial in trials if len(trial) == number), strict=True))
    return sets


def tokens_of(output):
    """The tokens of a module: "6 written, 35 read"; "41 tokens" where only the sum is known, of a
    server or in an older record; "" of a tool without a language model."""
    total, written = output["tokens"], output.get("written", 0)
    if written:
        return f"{written} written, {total - written} read"
    return f"{total} tokens" if total else ""


def block(output):
    """What a module or tool wrote, for people: a title and indented lines."""
    once = output["module"] in ("analysis", "generator", "judge")
    title = output["module"] if once else f"turn {output['turn']} {output['module']}"
    numbers = [tokens_of(output), f"{output['seconds']:.2f} s"]
    lines = [f"[{title}]  {', '.join(filter(None, numbers))}"]
    lines += ["    " + line for line in output["text"].strip().splitlines()]
    return printable("\n".join(lines))


def trace(question, rollout):
    """A finished rollout as text: what every module and tool wrote, turn by turn."""
    question = printable(f"Question: {question.question}")
    return "\n".join([question, *map(block, rollout.outputs), ending(rollout)])


def ending(rollout):
    """The last line of a trace."""
    end = f"Failed: {rollout.failed}" if rollout.failed else f"Answer: {rollout.answer}"
    return printable(end)
