"""See rollouts turn by turn: one page that a browser opens from a file, without network or script.

    python experiments/flows.py runs/toy-seed0                    # some steps of a training run
    python experiments/flows.py runs/toy-seed0 --steps 1 20-22
    python experiments/flows.py runs/before runs/after            # two folders of solve.py --out

docs/rollouts.html shows the same questions before and after training:

    python solve.py --data toy/test.jsonl --max-turns 3 --limit 24 --out runs/before
    python solve.py --data toy/test.jsonl --max-turns 3 --limit 24 --out runs/after \\
        --model runs/toy-seed0/best
    python experiments/flows.py runs/before runs/after --out docs/rollouts.html \\
        --title "The first 24 test questions: 3 right before training, 24 after" \\
        --notes docs/rollouts.txt

Of a training run the page shows the groups of a step, with the reward and the advantage of each
rollout. Of several folders it shows what each has made of a question, one below the other. A line
"5: text" in the file of --notes is shown at question 5.

What models and web pages wrote is hostile: every text is escaped, control characters too, and the
page's policy lets a browser run no script and load nothing."""

import argparse
import json
import sys
from html import escape
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flow_grpo import advantages
from record.rollouts import tokens_of
from world.text import printable

STYLE = """
:root { color-scheme: light dark; --page: light-dark(#fff, #0d1117);
  --ink: light-dark(#1f2328, #e6edf3); --soft: light-dark(#59636e, #9198a1);
  --line: light-dark(#d1d9e0, #3d444d); --card: light-dark(#f6f8fa, #151b23);
  --good: light-dark(#0969da, #58a6ff); --bad: light-dark(#bc4c00, #f0883e); }
body { max-width: 860px; margin: auto; padding: 12px; color: var(--ink); background: var(--page);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 20px; } h2 { font-size: 18px; margin-top: 36px; } h3 { margin: 26px 0 4px; }
h3, h4 { font-size: 15px; } h4 { margin: 14px 0 4px; }
p { margin: 4px 0; } a { color: var(--good); }
p, .who { color: var(--soft); }
details { border: 1px solid var(--line); border-left: 5px solid var(--line); border-radius: 6px;
  margin: 6px 0; padding: 4px 10px; }
summary { cursor: pointer; }
.box { border: 1px solid var(--line); border-radius: 6px; background: var(--card); margin: 6px 0;
  padding: 4px 10px; }
.planner { border-left-width: 5px; }
.right, .up { border-left-color: var(--good); } .wrong, .down { border-left-color: var(--bad); }
.right > summary > b { color: var(--good); }
.wrong > summary > b, .error .who { color: var(--bad); }
.note { color: var(--ink); border-left: 5px solid var(--ink); padding-left: 10px; }
pre { margin: 0; font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap;
  unicode-bidi: isolate; max-height: 60vh; overflow-y: auto; }
"""
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1>
"""
INTRO = """\
<p>A click on a rollout shows what each module wrote in it, and how many tokens it wrote and read.
Blue: right. Orange: wrong.</p>
"""
PUSHED = "<p>A: by eq. 7. A blue plan was pushed up in training (A &gt; 0), an orange one down.</p>"


def safe(text):
    """A text that others wrote, for any place in the page."""
    return escape(printable(str(text)))


def read(path):
    """The records of a JSONL file. The last line may still be being written."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def sections_of(folders, steps=()):
    """[(title, [group])], a group: [(label, record, A or None)], rollouts of one question."""
    run = folders[0]
    if not (run / "rollouts.jsonl").exists():
        return [("", answers_of(folders))]
    size, records = json.loads((run / "args.json").read_text())["group_size"], {}
    for record in read(run / "rollouts.jsonl"):
        records.setdefault(record["step"], []).append(record)
    chosen = steps or {min(records), sorted(records)[len(records) // 2], max(records)}
    sections = []
    for step in sorted(records.keys() & set(chosen)):
        some = records[step]
        groups = [some[i : i + size] for i in range(0, len(some) - size + 1, size)]
        sections.append((f"Step {step}", [with_advantages(group) for group in groups]))
    return sections


def answers_of(folders):
    """A group for each question: how the folders, and the trials in each, have answered it."""
    groups = {}
    for folder in folders:
        for path in sorted(folder.glob("*-*.jsonl")):
            for n, record in enumerate(read(path)):
                label = folder.name if len(folders) > 1 else ""
                key = path.stem.rpartition("-")[0], n, record["question"]
                groups.setdefault(key, []).append((label, record, None))
    return list(groups.values())


def with_advantages(group):
    """A group of a training run, with its advantages by eq. 7, whatever a fork gives its turns."""
    rewards = [record["reward"] for record in group if has_outcome(record)]
    A = iter(advantages(rewards, [0] * len(rewards))[0].tolist())
    return [("", record, next(A) if has_outcome(record) else None) for record in group]


def has_outcome(record):
    return not (record["failed"] or record["undecided"])


def group_shown(group, number, note=""):
    """The HTML of a group, in parts."""
    question, gold = group[0][1]["question"], group[0][1]["gold"]
    mark = f' id="{number}"' if note else ""
    yield f"<h3{mark}>{number}. {safe(question)}</h3><p>Answer: {safe(gold) or 'unknown'}</p>"
    yield f'<p class="note">Look at this: {safe(note)}</p>' if note else ""
    for label, record, A in group:
        yield from rollout_shown(label, record, A)


def rollout_shown(label, record, A):
    steps = {step["turn"]: step for step in record["memory"]["steps"]}
    verdict = ("right" if record["right"] else "wrong") if has_outcome(record) else "no outcome"
    tools = " → ".join(step["tool"] or "unreadable plan" for step in steps.values())
    facts = [label, tools, f"“{record['answer']}”", f"reward {record['reward']:g}"]
    facts += [] if A is None else [f"A {A:+.2f}"]
    yield f'<details class="{verdict}"><summary><b>{verdict}</b> '
    yield f"{safe(' · '.join(filter(None, facts)))}</summary>"
    for output in record["outputs"]:
        module, step = output["module"], steps.get(output["turn"])
        title = " · ".join(filter(None, [module, tokens_of(output), "cut" * output["cut"]]))
        kind = "error" if step and step["error"] and module == step["tool"] else ""
        if module == "planner":
            yield f"<h4>Turn {safe(str(output['turn']))}</h4>"
            kind = "planner up" if A and A > 0 else "planner down" if A else "planner"
        yield box(kind, title, output["text"])
        if module == "planner" and step and not step["tool"]:  # nothing else happens in this turn
            yield box("error", "memory", step["result"])
    yield f"<p>{safe(record['failed'])}</p></details>"


def box(kind, title, text):
    who = f'<div class="who">{safe(title)}</div>'
    return f'<div class="box {kind}">{who}<pre>{safe(text)}</pre></div>'


def page(title, sections, notes=None):
    """The whole page as text. notes: {number of a question on the page: text}, or None."""
    parts, numbers, notes = [HEAD.format(title=safe(title), style=STYLE)], count(1), notes or {}
    links = ", ".join(f'<a href="#{n}">question {n}</a>' for n in sorted(notes))
    parts += [INTRO, f"<p>Look at {links}.</p>" if notes else ""]
    parts += [PUSHED] if any(name for name, _ in sections) else []
    for name, groups in sections:
        parts.append(f"<h2>{safe(name)}</h2>" if name else "")
        for group in groups:
            number = next(numbers)
            parts += group_shown(group, number, notes.get(number, ""))
    return "\n".join(parts) + "</body></html>\n"


def numbers(text):
    """The numbers of "7" or "3-5"."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def notes(path):
    """{5: "text"} of a file with lines "5: text"."""
    lines = filter(str.strip, Path(path).read_text("utf-8").splitlines())
    pairs = (line.split(":", 1) for line in lines)
    return {int(number): text.strip() for number, text in pairs}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("folders", nargs="+", type=Path, help="a training run, or folders of solve.py --out")
    help = "steps of a training run (default: the first, one in the middle, the last)"
    add("--steps", nargs="+", type=numbers, default=[], metavar="N-M", help=help)
    add("--title", help="of the page (default: the folders)")
    help = 'lines "NUMBER: a note on a question"'
    add("--notes", type=notes, default={}, metavar="FILE", help=help)
    add("--out", type=Path, help="the page (default: flows.html in the first folder)")
    args = parser.parse_args()
    if len(args.folders) > 1 and any((each / "rollouts.jsonl").exists() for each in args.folders):
        parser.error("give one training run, or several folders of solve.py --out")
    sections = sections_of(args.folders, {step for some in args.steps for step in some})
    if not any(groups for _, groups in sections):
        parser.error(f"{args.folders[0]} has no rollouts, or none of these steps")
    number = sum(len(groups) for _, groups in sections)
    if lost := {*args.notes} - {*range(1, number + 1)}:
        parser.error(f"a note is on question {min(lost)}, but the page has {number}")
    out = args.out or args.folders[0] / "flows.html"
    title = args.title or " and ".join(map(str, args.folders))
    shown = page(title, sections, args.notes)
    if not args.out:  # whoever made the folder may have put a link here
        out.unlink(missing_ok=True)
    out.write_text(shown, encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
