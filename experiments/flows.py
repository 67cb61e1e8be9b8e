"""See a run: one page with all rollouts of a training run, which opens from a file and needs no network.

    python experiments/flows.py runs/toy-seed0                   # writes runs/toy-seed0/flows.html
    python experiments/flows.py runs/toy-seed0 --steps 1-5 60    # only these steps

The page has a list of rollouts, filtered by step, reward, tool and error; the chosen rollout turn by turn,
with what each module read and wrote; its group side by side, with rewards and advantages; and the planner's
tokens, coloured by advantage, or by log-ratio if the run has kept these (experiments/ratios.py).

rollouts.jsonl holds no prompts. They are made again by solve.prompt_of() of this code, with the whole memory:
if prompts have changed since, or if a long memory had to be shortened to fit the model, the page differs from
what the model has read.

What models and web pages wrote is hostile. It reaches the page as data (JSON, in which "<" is escaped, and
compressed JSON in base64), the script of flows.html turns it into text nodes only, and the page's policy lets
the browser run no other script and load nothing.
"""

import argparse
import base64
import csv
import hashlib
import json
import re
import sys
import zlib
from dataclasses import replace
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from logbook import endings

endings.without_traceback(__name__)

import memory
import planner
import solve
from flow_grpo import advantages
from logbook.endings import errors_leave
from memory import Memory, Step
from rewards.questions import Question
from solve import Rollout
from tools import TOOLS
from train import with_outcome
from world.files import reading
from world.text import truncate

TEMPLATE = Path(__file__).with_suffix(".html")
MODULES = ("analysis", "planner", "executor", "verifier", "generator")
LIMIT = 50  # megabytes of a page: a browser opens it in two seconds


def steps_of(folder):
    """(number, [record]) of each step in rollouts.jsonl. A line that is still being written is left out."""
    with open(folder / "rollouts.jsonl", encoding="utf-8") as file:
        records = (json.loads(line, parse_constant=lambda nan: None) for line in file if line.endswith("\n"))
        for step, group in groupby(records, key=lambda record: record["step"]):
            yield step, list(group)


def rollout_of(record):
    """The Rollout that wrote this record."""
    question = Question(record["question"], record["gold"], id=record["id"], kind=record["kind"])
    names = "answer", "reward", "failed", "undecided", "seconds"
    fields = {name: record[name] for name in names} | {"outputs": record["words"]}
    steps = [Step(**step) for step in record["memory"]["steps"]]
    return Rollout(question, Memory(**record["memory"] | {"steps": steps}), **fields)


def prompts_of(rollout, tools):
    """What was read for each output: a module's prompt, a tool's call; "" where that is unknown."""
    steps, texts = {step.turn: step for step in rollout.memory.steps}, []
    for output in rollout.outputs:
        module, step = output["module"], steps.get(output["turn"])
        before = [steps[turn] for turn in steps if turn < output["turn"]]
        seen = before + [replace(step, verdict="")] if module == "verifier" else before
        now = replace(rollout, memory=Memory(rollout.memory.question, rollout.memory.analysis, seen))
        if module not in MODULES:
            texts.append(step.command if step and step.tool == module else "")
        elif not tools or (module == "executor" and not isinstance(rollout.plan, planner.Plan)):
            texts.append("")
        else:
            texts.append(solve.prompt_of(module, tools, now, memory.BUDGET))
        if module == "planner":
            rollout.plan = planner.parse(output["text"], tools)
    return texts


def error_of(step):
    """Which tool-calling error a step of a memory is: "plan", "call" or "tool"; "" for none."""
    if not step.error:
        return ""
    return "plan" if not step.tool else "tool" if step.command else "call"


def state_of(rollout):
    """Why a rollout has no outcome; "" if it has one."""
    return "failed" if rollout.failed else "undecided" if rollout.undecided else ""


def advantages_of(rollouts, group_size):
    """A_i of each rollout, as train.py computed it; None for those without an outcome."""
    usable, groups = with_outcome(rollouts, group_size)
    A = iter(advantages([rollout.reward for rollout in usable], groups)[0].tolist())
    return [None if state_of(rollout) else next(A) for rollout in rollouts]


def overview(rollouts, group_size):
    """The groups of a step as the page's list shows them: the question, and a few facts of each rollout."""
    rows = [{
        "reward": rollout.reward, "advantage": a, "answer": truncate(rollout.answer, 200),
        "state": state_of(rollout),
        "turns": [[step.tool or "(no tool)", error_of(step)] for step in rollout.memory.steps],
        "sample": any("log_ratios" in output for output in rollout.outputs),
    } for rollout, a in zip(rollouts, advantages_of(rollouts, group_size))]
    return [{"question": rollout.question.question, "gold": rollout.question.answer,
             "rollouts": rows[i * group_size :][:group_size]}
            for i, rollout in enumerate(rollouts[::group_size])]


def details(rollouts, tools):
    """All texts of a step: {"read": [each text once], "rollouts": [{"failed", "outputs": [...]}]}."""
    place, texts_of = {}, []
    for rollout in rollouts:
        outputs = [output | {"read": place.setdefault(text, len(place))}
                   for output, text in zip(rollout.outputs, prompts_of(rollout, tools))]
        texts_of.append({"failed": rollout.failed, "outputs": outputs})
    return {"read": list(place), "rollouts": texts_of}


def packed(data):
    """JSON, compressed, in base64. The prompts of a step repeat each other, so little is left of them."""
    return base64.b64encode(zlib.compress(json.dumps(data).encode())).decode()


def rows_of(folder):
    """{step: its row of log.csv, with four digits of each number}."""
    try:
        with open(folder / "log.csv", newline="") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        return {}
    return {int(row["step"]): {name: f"{float(row[name]):.4g}" for name in row} for row in rows}


def few_enough(steps, limit):
    """Every step, every second, every third ...: as many as make a page of `limit` bytes at most; and why."""
    every = next(k for k in range(1, len(steps) + 1)
                 if k == len(steps) or sum(len(step["texts"]) for step in steps[::k]) <= limit)
    note = f"Only {len(steps[::every])} of {len(steps)} steps are shown, evenly spread: a page with all of " \
           "them would be too large. Choose others with --steps, or allow more with --limit."
    return steps[::every], note if every > 1 else ""


def page(folder, chosen=(), limit=LIMIT):
    """The page as text. chosen: numbers of steps; () for all. limit: in megabytes."""
    args, rows, steps = json.loads((folder / "args.json").read_text()), rows_of(folder), []
    unknown = [name for name in args["tools"] if name not in TOOLS]
    tools = {} if unknown else {name: TOOLS[name] for name in TOOLS if name in args["tools"]}
    for number, records in steps_of(folder):
        size = args["group_size"]
        records = records[: len(records) // size * size]  # the last group may not be written to its end
        if records and (not chosen or number in chosen):
            rollouts = [rollout_of(record) for record in records]
            steps.append({"step": number, "row": rows.get(number, {}), "groups": overview(rollouts, size),
                          "texts": packed(details(rollouts, tools))})
    if not steps:
        raise SystemExit(f"flows.py: {folder} has no rollouts of these steps")
    steps, note = few_enough(steps, 1e6 * limit)
    if unknown:
        note += f" This code has no tool {', '.join(unknown)}: the prompts are left out."
    index = {"name": str(folder), "note": note, "settings": args, "steps": steps}
    return filled(index, [step.pop("texts") for step in steps])


def filled(index, texts):
    """The template with its data, and a policy that allows the template's own script and style only."""
    template = TEMPLATE.read_text(encoding="utf-8")
    data = [f'<script type="application/json" id="index">{escaped(index)}</script>']
    data += [f'<script type="text/plain" id="texts-{n}">{text}</script>' for n, text in enumerate(texts)]
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'"
    for name in ("script", "style"):
        code = re.search(f"<{name}>(.*?)</{name}>", template, re.DOTALL)[1]
        policy += f"; {name}-src 'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
    return template.replace("{policy}", policy).replace("{data}", "\n".join(data))


def escaped(data):
    """JSON for a <script>: in ASCII, and without any "<", so no text in it can end the element."""
    return json.dumps(data).replace("<", "\\u003c")


def numbers(text):
    """The numbers of "7" or "3-5"."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a training run")
    parser.add_argument("--steps", nargs="+", type=numbers, default=[], metavar="N-M",
                        help="only these steps (default: all)")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="MB",
                        help="leave out steps, evenly, if the page would be larger (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the page (default: flows.html in the run's folder)")
    args = parser.parse_args()
    if not (args.run / "rollouts.jsonl").is_file():
        parser.exit(2, f"flows.py: {args.run} holds no rollouts.jsonl: give the folder of a training run\n")
    with errors_leave("flows.py"), reading(args.run, "give the folder of a whole run"):
        text = page(args.run, {step for numbers in args.steps for step in numbers}, args.limit)
    out = args.out or args.run / "flows.html"
    if not args.out:
        out.unlink(missing_ok=True)  # a run that somebody else made may hold a link to another file
    out.write_text(text, encoding="utf-8")
    print(f"wrote {out}, {len(text) / 1e6:.1f} MB: open it in a browser")


if __name__ == "__main__":
    main()
