"""Make docs/tour.html: one training step of the toy, as a lesson in the order of time.

    python docs/annotate.py

The run is real: train.py takes one step on 16 questions. Only the planner does not sample. It plays
fixed plans, so every machine makes the same page. All settings are fixed for the same reason. The
seed was chosen: with it, the clip acts on one of the two tools that we follow and not on the other.

docs/tour.txt has the stops of the lesson:

    # title, and on the next lines why
    > FILE FUNCTION: first line .. last line ; another line               the code
    @ FILE FUNCTION: line | condition | expression ; label := expression    what it held

A line of code is given by its beginning. The expressions are evaluated when that line is about to
run, or without a line when the function ends: the first time that the condition is true. n counts
these times from 0, and `returned` is what the function returns.

After an edit of lines that the page quotes, or of code that decides its values, run this again; a
test says when. Other edits change nothing."""

import io
import linecache
import re
import sys
import tempfile
from collections import defaultdict
from contextlib import redirect_stdout
from html import escape
from itertools import accumulate
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

import train
from experiments.flows import HEAD, STYLE, safe
from flow_grpo import Action, objective, padded, token_logps
from models.completion import Completion
from models.local import Engine
from toy.teacher import TOOLS, Known, ids_of, plan

FOLDER = f"{Path(train.__file__).parent}/"  # as tracebacks name it
PAGE, STOPS = ROOT / "docs/tour.html", ROOT / "docs/tour.txt"
SETTINGS = f"""--steps 1 --questions 16 --group-size 8 --max-turns 3 --temperature 0.7 --seed 8
--minibatches 4 --lr 4e-4 --beta 0.01 --clip-low 0.2 --clip-high 0.3 --max-grad-norm 1
--token-budget 200000 --every 1 --valid none --test none --judge none --device cpu --dtype float32
--tools {" ".join(TOOLS)}"""
QUESTION = "Can you find the calling code of Dublin now."
KIND, FIRST = '"kind": "wb[wp]?"', 10  # of all 16 questions; how many stand before this one
# The tools of the 8 rollouts of a question, turn by turn, as in docs/tour.md. A rollout that ends
# early leaves the rest.
CHOSEN = "www wsp bws ppw pwp wbs wws psp".split()
LETTERS = dict(zip("bpws", TOOLS))  # base_generator, python_coder, wikipedia_search, web_search

MORE = """
body { max-width: 1240px; } p { max-width: 860px; color: var(--ink); } .links { columns: 18em; }
h2 { border-top: 1px solid var(--line); padding-top: 12px; } .row * + .who { margin-top: 6px; }
.row { display: grid; grid-template-columns: minmax(0, 60fr) minmax(0, 40fr); gap: 0 12px; }
.row pre, .row .who, td { font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; }
.row pre { max-height: none; } table { border-spacing: 0; overflow-wrap: break-word; }
td { padding: 0 14px 0 0; vertical-align: top; border-top: 1px solid var(--line); }
.held { border-left: 5px solid var(--good); } i { font-style: normal; color: var(--good); }
em { font-style: normal; color: var(--soft); }
.line { display: block; padding-left: calc(var(--n) + 2ch); text-indent: calc(-2ch - var(--n)); }
@media (max-width: 900px) { .row { display: block; } .gap { display: none; } }
"""


# ------------------------------------------------------------------------------------------ the run
def play(engine, prompts, temperature=0.0, max_new_tokens=None, sample=Engine.__call__):
    """Engine.__call__, but where it would sample, it writes the plan of the next CHOSEN tool."""
    if not temperature:
        return sample(engine, prompts, temperature, max_new_tokens)
    left, completions = defaultdict(lambda: iter(CHOSEN)), []
    letter_of = {tool: letter for letter, tool in LETTERS.items()}
    for prompt in prompts:  # of the rollouts that still run, in their order
        question, known = re.search(r"\nQuestion: .*", prompt)[0], Known(prompt)
        past = "".join(letter_of[tool] for tool in re.findall(r"^Tool: (\w+)$", prompt, re.M))
        tools = next(tools for tools in left[question] if tools.startswith(past))
        goal, *_ = known.resolve(re.search(r"Objective: the \w+ (\w+ of \w+)", prompt)[1])
        text = plan(known.pointer or "none", goal, LETTERS[tools[len(past)]])
        completions.append(Completion(text, engine.chat.encode(prompt), ids_of(engine, text)))
    return completions


def training_step(trace):
    """Run train.py for a step. trace(frame, event, value) is called as sys.settrace() says."""
    lines = (ROOT / "toy/train.jsonl").read_text("utf-8").splitlines(keepends=True)
    lines = [line for line in lines if re.search(KIND, line)]
    start = next(n for n, line in enumerate(lines) if QUESTION in line) - FIRST
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(Engine, "__call__", play),
        patch("signal.signal"),  # train.py's Ctrl-C
        redirect_stdout(io.StringIO()),
    ):
        data = Path(folder, "questions.jsonl")
        data.write_text("".join(lines[start : start + 16]), "utf-8")
        words = [*SETTINGS.split(), "--data", str(data), "--out", f"{folder}/run"]
        args = train.settings(train.given(words))
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            train.train(args)
        finally:
            sys.settrace(before)


def recorder(moments):
    """The trace function that fills in the values of the moments."""
    wanted = defaultdict(list)
    for moment in moments:
        wanted[moment.place].append(moment)

    def trace(frame, event, value):
        code = frame.f_code
        place = f"{code.co_filename.removeprefix(FOLDER)} {code.co_qualname}"
        for moment in wanted.get(place, ()):
            due = event == ("line" if moment.line else "return")
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            due = due and not moment.values and (not moment.line or line.startswith(moment.line))
            if due:
                names = globals() | frame.f_globals | frame.f_locals
                names |= {"n": moment.calls, "returned": value}
                moment.calls += 1
                if eval(moment.condition or "True", names):
                    moment.values = [shown(eval(text, names)) for _, text in moment.expressions]
        return trace if place in wanted else None

    return trace


# ----------------------------------------------------------------------- helpers of the expressions
def by_tool(completion, *engines):
    """[(tool, its π by each engine)], at the token where this plan names its tool."""
    texts = [re.sub(r"(?<=Tool: )\w+", tool, completion.text) for tool in TOOLS]
    plans = [Action(completion.prompt_ids, ids_of(engines[0], text), 0) for text in texts]
    [batch] = padded(engines[0].model, plans, token_budget=10_000)
    with torch.no_grad():
        logps = [token_logps(engine.model, batch, temperature=0.7) for engine in engines]
    return list(zip(TOOLS, *(some.view(len(plans), -1)[:, -2].exp().tolist() for some in logps)))


def tool_tokens(actions, values):
    """[(name, in turn 1, in turn 2)] of {name: (K,)}, at the tools that rollout 1 chose."""
    ends = accumulate(len(a.ids) for a in actions)
    at = sorted((a.turn, end - 2) for a, end in zip(actions, ends) if a.rollout == 1)
    return [(name, *(some[i].item() for _, i in at)) for name, some in values.items()]


def by_loops(actions, logp, logp_old, logp_ref, clip, beta):
    """objective() of a mini-batch."""
    tokens, rollouts = iter(zip(logp.detach(), logp_old, logp_ref)), defaultdict(list)
    for a in actions:
        rollouts[a.rollout].append([next(tokens) for _ in a.ids])
    A = {a.rollout: a.A for a in actions}
    return objective(rollouts.values(), [A[i] for i in rollouts], clip, beta)


# ----------------------------------------------------------------------------------------- the page
def stops():
    """[(title, why, [(place, ranges of lines)], [moment])] of docs/tour.txt."""
    found = []
    for paragraph in STOPS.read_text("utf-8").strip().split("\n\n"):
        lines = paragraph.replace("\n  ", " ").split("\n")
        why = " ".join(line for line in lines if line[0] not in "#>@")
        code = [line[2:].split(": ", 1) for line in lines if line[0] == ">"]
        moments = [moment(line[2:]) for line in lines if line[0] == "@"]
        found.append((lines[0][2:], why, code, moments))
    return found


def moment(text):
    """What a line "@ ..." asks for, without values so far."""
    place, line, condition, expressions = re.fullmatch("(.+?): (.*?)[|](.*?)[|](.*)", text).groups()
    asked = SimpleNamespace(place=place, line=line.strip(), condition=condition.strip())
    asked.calls, asked.values = 0, []
    pairs = [part.split(" := ") for part in re.split(" +; +", expressions.strip())]
    asked.expressions = [(pair[0], pair[-1]) for pair in pairs]  # without a label it is its own
    return asked


def excerpt(place, ranges):
    """These lines of a function, with "…" between the ranges."""
    (file, function), found, end = place.split(), [], -1
    lines = (ROOT / file).read_text("utf-8").splitlines()

    def line_of(beginning, start):
        for n in range(start, len(lines)):
            if lines[n].strip().startswith(beginning):
                return n
        raise ValueError(f"docs/tour.txt: in {place}, no line begins with {beginning!r}")

    for name in function.split("."):
        end = line_of(f"class {name}" if name[0].isupper() else f"def {name}(", end + 1)
    for part in ranges.split(" ; "):
        first, _, last = part.partition(" .. ")
        start = line_of(first, end + 1)
        end = line_of(last or first, start)
        found += [re.match(" *", lines[start])[0] + "…"] * bool(found) + lines[start : end + 1]
    return dedent("\n".join(found)).split("\n")


def quoted(place, ranges):
    """Code as HTML: comments are soft, and a line that wraps keeps its indent."""
    html = f'<div class="who"><b>{place.replace(" ", ": ")}()</b></div><pre>'
    for line in excerpt(place, ranges):
        indent = len(line) - len(line.lstrip())
        soft = r'<span class="gap">\1</span><em>\2</em>'
        text = re.sub("( *)((?:^|  )# .*)", soft, escape(line, False))
        wrapped = f'<span class="line" style="--n:{indent}ch">{text}</span>'
        html += wrapped if line[40:] else f"{text}\n"
    return f"{html}</pre>"


def held(moment):
    """The expressions of a moment and their values, as HTML."""
    if not moment.values:
        raise ValueError(f"docs/tour.txt: {moment.place}: {moment.line} did not happen")
    html = ""
    for (label, _), value in zip(moment.expressions, moment.values):
        if len(label + value) < 57 and "\n" not in value:
            html += f'<pre><span class="who">{safe(label)} =</span> {value}</pre>'
        else:
            value = value if value.startswith("<table") else f"<pre>{value}</pre>"
            html += f'<div class="who">{safe(label)}</div>{value}'
    return html


def shown(value, inside=False):
    """A value as HTML. Fractions are rounded, and marked: the test tolerates small differences."""
    if isinstance(value, float):
        return f"<i>{round(value, 7) + 0.0:.3g}</i>"  # + 0.0: no minus zero
    if isinstance(value, torch.Tensor):
        return shown(value.item())
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        rows = ("".join(f"<td>{shown(item)}</td>" for item in row) for row in value)
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
    if isinstance(value, list):
        parts = [shown(item, True) for item in value]
        return "[" + (", " if sum(map(len, parts)) < 60 else ",\n ").join(parts) + "]"
    lines = str(value).split("\n")
    lines = [*lines[:4], "…", *lines[-11:]] if lines[16:] else lines
    return safe(repr(value) if inside and isinstance(value, str) else "\n".join(lines))


def make():
    """The page, from a new run."""
    (title, why, *_), *found = stops()
    training_step(recorder([moment for *_, moments in found for moment in moments]))
    html = [HEAD.format(title=title, style=STYLE + MORE), f'<p>{safe(why)}</p><p class="links">']
    titles = [f"{n} · {safe(title)}" for n, (title, *_) in enumerate(found, 1)]
    html += [f'<a href="#{n}">{title}</a><br>' for n, title in enumerate(titles, 1)]
    for n, (_, why, code, moments) in enumerate(found, 1):
        html.append(f'</p><h2 id="{n}">{titles[n - 1]}</h2><p>{safe(why)}')
        if code:
            html += ['</p><div class="row"><div class="box">', *(quoted(*some) for some in code)]
            html += ['</div><div class="box held">', *map(held, moments), "</div></div><p>"]
    return "\n".join([*html, "</p></body></html>\n"])


if __name__ == "__main__":
    PAGE.write_text(make(), "utf-8")
    print(PAGE)
