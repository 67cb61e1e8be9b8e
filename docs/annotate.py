"""Make docs/tour.html: the nine scripts, and beside each function values that it held in one run.

    python docs/annotate.py

The run is real: train.py takes one step, with one question and 8 rollouts. Only the planner does
not sample: it plays fixed plans, so every machine makes the same page.

SHOWN says which values are shown. To show another one, add an expression there and run this again.
A test makes the page, too, and compares: so it also fails after an edit of the nine scripts."""

import ast
import io
import re
import sys
import tempfile
import threading
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

import train
from experiments.flows import HEAD, STYLE, safe
from models.completion import Completion
from models.local import Engine

PAGE = ROOT / "docs/tour.html"
NINE = "solve planner memory flow_grpo train executor verifier generator tools".split()
QUESTION = "Can you find the calling code of Dublin now."
# The tools that the planner chooses in the turns of 8 rollouts, as in docs/tour.md. A rollout that
# ends early leaves the rest.
CHOSEN = [
    "wikipedia_search wikipedia_search wikipedia_search",
    "wikipedia_search web_search python_coder",  # rollout 1, which most notes follow
    "base_generator wikipedia_search web_search",
    "python_coder python_coder wikipedia_search",
    "python_coder wikipedia_search python_coder",
    "wikipedia_search base_generator web_search",
    "wikipedia_search wikipedia_search web_search",
    "python_coder web_search python_coder",
]
PLAN = "Justification: The next step.\nContext: {}\nSub-goal: Find the code of Dublin\nTool: {}"

# A note: function | title | call | expressions. The expressions are evaluated when the function
# ends, or, after an @, when the line that begins so is about to run. The call is the first one for
# which the condition is true; n counts from 0, and no condition means the first. `returned` is what
# the function returns. of(i, actions, values): the values of the tokens of rollout i, turn by turn.
SHOWN = r"""
solve.roll_out @ def ask( ||| rollouts[1].question.question; len(rollouts)
solve.roll_out.ask | the planner, turn 2 | module == "planner" and turn == 2
  | len(some); sampled; how; completions[1].text
  ; [engine.tokenizer.decode(token) for token in completions[1].ids]
solve.roll_out @ for turn in ||| rollouts[1].memory.analysis
solve.roll_out @ planned = | turn 1 || len(running); written[1][1].text
solve.roll_out @ called = | turn 1 || rollouts[1].plans[0]; written[1][1].text
solve.roll_out @ bar.set_postfix_str(f"turn {turn} tools | turn 1 || rollouts[1].call
solve.roll_out @ written = ask("verifier" | turn 1 || results[1].text; rollouts[1].memory.render()
solve.roll_out @ written = ask("generator" | after all turns
  || [len(r.plans) for r in rollouts]; [r.stopped for r in rollouts]; rollouts[1].memory.render()
solve.roll_out ||| rollouts[1].answer; [r.answer for r in rollouts]; [r.reward for r in rollouts]
planner.describe | one tool | name == "web_search" | returned
planner.analysis_prompt | before turn 1 || question
planner.prompt | the state s^2 of rollout 1 | "facts.org" in returned
  | memory.render(); returned
planner.parse | turn 1 of rollout 1 | n == 1 | text; returned
planner.parse | turn 2 of rollout 1 | n == 9 | text; returned
memory.Step.render | turn 1 of rollout 1 | "facts.org" in returned | returned
memory.Memory.render | before turn 1 || returned
memory.Memory.render | the end of rollout 1 | self.steps[1:] and "Verdict: STOP" in returned
  | len(returned); self.budget; returned
flow_grpo.advantages ||| rewards; groups; A; A.sum(); flat
flow_grpo.distribution | first call by the update | temperature == 0.7
  | logits.shape; temperature; returned.exp().sum(-1)[:4]; returned.exp().max(-1).values[:4]
flow_grpo.padded | second mini-batch || len(actions); token_budget; x.shape; place[:8]
flow_grpo.token_logps | first mini-batch; π of the tokens of rollout 1 | torch.is_grad_enabled()
  | x.shape; states.shape; returned.shape; of(1, actions, returned.exp())
flow_grpo.token_weight | turn 1 of rollout 1 | action.rollout == 1
  | N; T; len(action.ids); returned; 1 / returned
flow_grpo.weighted | first mini-batch || rollouts; turns; len(actions)
flow_grpo.split_rollouts ||| groups; minibatches; returned
flow_grpo.per_token | the A of each token || values; returned.shape
flow_grpo.loss | first mini-batch: ρ is 1 || returned[0]; ratio.min(); ratio.max(); kl.max()
flow_grpo.loss | second mini-batch: the weights have moved | n == 1
  | returned[0]; ratio.min(); ratio.max(); (clipped != ratio).sum(); kl.max()
flow_grpo.update @ for mini in minis[1:] ||| len(actions); beta
  ; minibatches; [len(mini) for mini in minis]
flow_grpo.update @ totals, | second mini-batch; π_θold of rollout 6
  || of(6, minis[1], torch.cat([a.logp_old for a in minis[1]]).exp())
flow_grpo.update ||| norms; max_grad_norm; skipped; returned
flow_grpo.check_actions ||| num_rollouts; temperature
flow_grpo.score_old | second mini-batch || len(batches); of(6, batch[0], logps)
flow_grpo.gradient | first mini-batch; rollout 1
  || of(1, actions, A); of(1, actions, weight); of(1, actions, logp); of(1, actions, ratio); sums
flow_grpo.gradient | second mini-batch; rollout 6 | n == 1 | of(6, actions, A)
  ; of(6, actions, logp_old); of(6, actions, logp); of(6, actions, ratio); of(6, actions, kl); sums
train.train @ how = distribution ||| len(data); done; args.steps; args.questions; args.group_size
train.train @ weights = ||| list(tools); args.temperature; args.beta
train.train @ open_run( ||| args.lr; len(weights)
train.train @ for step in ||| settings
train.train @ usable, groups = ||| questions; len(copies); len(rollouts)
train.train @ middle = ||| [[step.tool for step in rollout.memory.steps] for rollout in usable]
  ; rewards; A; flat; len(actions)
train.train @ end = ||| metrics
train.questions_of ||| step; count; [question.question for question in returned]
train.with_outcome ||| len(rollouts); len(returned[0]); returned[1]
train.actions_of | rollout, tokens of s and of a, A of the turns of rollouts 0 and 1
  || [(a.rollout, len(a.prompt_ids), len(a.ids), a.A) for a in returned if a.rollout < 2]
executor.Call.__str__ | turn 1 of rollout 1 | self.tool == "wikipedia_search"
  | self.arguments; returned
executor.prompt | turn 2 of rollout 1 | plan.tool == "web_search" and plan.context != "none"
  | returned
executor.parse | turn 2 of rollout 1 | name == "web_search" and "facts.org" in text | text; returned
verifier.prompt | turn 1 of rollout 1 | n == 1 | memory.render()
verifier.parse | turn 1 of rollout 1 | n == 1 | text; returned
verifier.parse | turn 2 of rollout 1 | n == 9 | text; returned
generator.prompt | rollout 1 | n == 1 | returned
generator.parse | rollout 1 | n == 1 | text; returned
tools.choose ||| names; list(returned)
tools.run_calls | turn 1 || [str(call) for call in calls]; queries; returned[1].text
  ; returned[3].text; [r.error for r in returned]
tools.answer_queries | turn 1 || queries; results[2].text
tools.run_tool | turn 2 of rollout 1 | "facts.org" in str(arguments) | arguments; text
tools.problem_with | turn 1 of rollout 0 || str(call); returned
"""
MORE = """
body { max-width: 1500px; } p { max-width: 860px; } i { font-style: normal; color: var(--good); }
.row { display: grid; grid-template-columns: minmax(0, 101ch) minmax(0, 1fr); gap: 0 20px;
  border-top: 1px solid var(--line); padding: 6px 0; font: 12.5px/1.5 ui-monospace, Menlo,
  Consolas, monospace; } .row pre { font: inherit; max-height: none; }
.row em { font-style: normal; color: var(--soft); }
.row > div { position: sticky; top: 0; align-self: start; max-height: 100vh; overflow-y: auto; }
.box { border-left: 5px solid var(--good); } .box b { font-family: system-ui, sans-serif; }
.box pre { max-height: 40vh; margin-bottom: 5px; }
.row > pre > span { display: block; padding-left: calc(var(--n) + 2ch);
  text-indent: calc(-2ch - var(--n)); }
@media (max-width: 900px) { .row { display: block; font-size: 11.5px; }
  .row > div { position: static; max-height: none; } }
"""
INTRO = """\
<p>The nine scripts in reading order. Beside the code are values that it held in a real step
of train.py: the untrained toy runs one question 8 times and learns from these rollouts in 2
mini-batches. Most notes follow rollout 1. Each expression has the value that it had at the end of
the code beside it. Blue numbers are rounded.</p>
<p>docs/annotate.py made this page. docs/tour.md tells the same story in words.</p><p>{}</p>
"""


@dataclass
class Note:
    """A paragraph of SHOWN, and the values that a run had."""

    function: str  # "solve.roll_out.ask"
    line: str  # the beginning of a line; "" for the end of the function
    title: str
    condition: str
    expressions: list[str]
    at: int = 0  # the number of the line, counted from 1
    cut: int = 0  # it is shown beside the code above this line
    calls: int = 0  # so far
    values: list[str] = field(default_factory=list)  # as HTML


def notes_of(table, sources):
    """[Note] of SHOWN, with their places in the sources."""
    notes, found = [], {name: dict(functions(ast.parse(sources[name]), name)) for name in NINE}
    for paragraph in table.replace("\n  ", " ").strip().split("\n"):
        place, title, condition, expressions = (part.strip() for part in paragraph.split("|"))
        function, _, line = place.partition(" @ ")
        name = function.partition(".")[0]
        note = Note(function, line, title, condition or "True", re.split(" *; ", expressions))
        lines, node = sources[name].splitlines(), found[name][function]
        note.cut = node.end_lineno
        if line:
            inside = range(node.lineno, node.end_lineno)
            note.at = next(i for i in inside if lines[i].strip().startswith(line)) + 1
            note.cut = note.at - 1
            while lines[note.cut - 1].strip()[:1] in ("", "#"):  # comments belong to the line
                note.cut -= 1
        notes.append(note)
    return notes


def functions(node, name):
    """(name, node) of each function and class in a module, however deep."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield f"{name}.{child.name}", child
            yield from functions(child, f"{name}.{child.name}")


# ------------------------------------------------------------------------------------------ the run
def play(engine, prompts, temperature=0.0, max_new_tokens=None, sample=Engine.__call__):
    """Engine.__call__, but where it would sample, it writes the next CHOSEN plan."""
    if not temperature:
        return sample(engine, prompts, temperature, max_new_tokens)
    chosen, completions = iter(CHOSEN), []
    for prompt in prompts:  # of the rollouts that still run, in their order
        past = "".join(f"{tool} " for tool in re.findall(r"^Tool: (\w+)$", prompt, re.M))
        tool = next(tools for tools in chosen if tools.startswith(past))[len(past) :].split()[0]
        address = re.findall(r"^Result: .* (https:\S+)$", prompt, re.M)[-1:] or ["none"]
        text = PLAN.format(*address, tool)
        ids = engine.tokenizer(text)["input_ids"] + engine.chat.stops[:1]
        completions.append(Completion(text, engine.chat.encode(prompt), ids))
    return completions


def training_step(trace):
    """Run train.py for a step. trace(frame, event, value) is called as sys.settrace() says."""
    before = sys.gettrace(), threading.gettrace()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(Engine, "__call__", play),
        patch("signal.signal"),  # train.py's Ctrl-C
        redirect_stdout(io.StringIO()),
    ):
        lines = (ROOT / "toy/train.jsonl").read_text("utf-8").splitlines()
        data = Path(folder, "question.jsonl")
        data.write_text("".join(line for line in lines if QUESTION in line), "utf-8")
        words = f"--data {data} --out {folder}/run --valid none --test none --device cpu --plain"
        args = train.settings(
            train.given(f"{words} --steps 1 --questions 1 --minibatches 2".split())
        )
        threading.settrace(trace)
        sys.settrace(trace)
        try:
            train.train(args)
        finally:
            sys.settrace(before[0])
            threading.settrace(before[1])


def recorder(notes):
    """The trace function that fills in the values of the notes."""
    files = {sys.modules[name].__file__: name for name in NINE}
    wanted = {note.function: [n for n in notes if n.function == note.function] for note in notes}

    def trace(frame, event, value):
        code = frame.f_code
        if code.co_filename not in files:
            return None
        name = f"{files[code.co_filename]}.{code.co_qualname}".replace(".<locals>", "")
        for note in wanted.get(name, ()):
            here = event == "line" and frame.f_lineno == note.at
            if (here or event == "return" and not note.at) and not note.values:
                names = frame.f_globals | frame.f_locals
                names |= {"n": note.calls, "returned": value, "of": of, "torch": torch}
                note.calls += 1
                if eval(note.condition, names):
                    note.values = [shown(eval(text, names)) for text in note.expressions]
        return trace if name in wanted else None

    return trace


def of(i, actions, values):
    """The values of the tokens of rollout i: a list for each turn."""
    pairs = zip(actions, values.split([len(action.ids) for action in actions]))
    pairs = sorted((len(a.prompt_ids), some.tolist()) for a, some in pairs if a.rollout == i)
    return [some for _, some in pairs]


# ----------------------------------------------------------------------------------------- the page
def shown(value, inside=False):
    """A value as HTML. Fractions are rounded, and marked: the test tolerates small differences."""
    if isinstance(value, float):
        return f"<i>{round(value, 5) + 0.0:.3g}</i>"  # + 0.0: no minus zero
    if isinstance(value, torch.Tensor):
        return shown(value.tolist())
    if isinstance(value, dict):
        parts, ends = [f"{safe(key)}: {shown(item, True)}" for key, item in value.items()], "{}"
    elif isinstance(value, list | tuple):
        parts, ends = [shown(item, True) for item in value], "[]" if type(value) is list else "()"
    else:
        return safe(repr(value) if inside and isinstance(value, str) else value)
    rows = ends != "()" and max(map(len, parts), default=0) > 40
    return ends[0] + (",\n " if rows else ", ").join(parts) + ends[1]


def page(notes, sources):
    """The whole page as text."""
    links = " · ".join(f'<a href="#{name}">{name}.py</a>' for name in NINE)
    parts = [HEAD.format(title="A tour with the values", style=STYLE + MORE), INTRO.format(links)]
    for name in NINE:
        parts.append(f'<h2 id="{name}">{name}.py</h2>')
        beside = [note for note in notes if note.function.startswith(f"{name}.")]
        for end, code, folded in pieces(sources[name], name, beside):
            row = "".join(note_shown(note) for note in beside if note.cut == end)
            row = f'<div class="row">{coloured(code)}<div>{row}</div></div>'
            names = f"<summary>Not followed here: {', '.join(folded)}</summary>"
            parts.append(f"<details>{names}{row}</details>" if folded else row)
    return "\n".join(parts) + "</body></html>\n"


def pieces(source, name, notes):
    """[[number of the last line, code, names]]: a script, cut where notes want it.

    Functions without a note are pieces to be folded, and have names. Neighbours are one piece."""
    lines, tree, found = source.splitlines(), ast.parse(source), []
    cuts, folded = {0, len(lines), *(note.cut for note in notes)}, {}
    followed = "".join(f"{note.function}.\n" for note in notes)
    for function, node in functions(tree, name):
        if f"{function}." in followed:
            cuts.add(first_line(node))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.If) and first_line(node) not in cuts:
            cuts |= {first_line(node), node.end_lineno}
            folded[first_line(node)] = [getattr(node, "name", "the command line")]
    cuts, above = sorted(cuts), ""
    for start, end in zip(cuts, cuts[1:]):
        code, names = above + "\n".join(lines[start:end]) + "\n", folded.get(start, [])
        above = "" if re.search(r"^[^#\n]", code, re.M) else code.strip("\n") + "\n"
        if above:  # nothing but comments: they belong to what follows
            continue
        if names and found and found[-1][2]:
            found[-1] = [end, found[-1][1] + code, found[-1][2] + names]
        else:
            found.append([end, code, names])
    return found


def first_line(node):
    """The number of the line above a function and its decorators."""
    return min(part.lineno for part in [node, *getattr(node, "decorator_list", [])]) - 1


def coloured(code):
    """Code as HTML: docstrings and comments are soft, and a line that wraps keeps its indent."""
    parts = r'(?ms)(= """.*?""")|(^ *""".*?"""|(?:^|(?<= ))# [^\n]*)'
    soft = lambda m: m[1] or re.sub("(?m)^.+$", r"<em>\g<0></em>", m[2])
    lines, html = code.strip("\n").split("\n"), []
    for line, text in zip(lines, re.sub(parts, soft, escape("\n".join(lines), False)).split("\n")):
        indent = len(line) - len(line.lstrip())
        html.append(f'<span style="--n:{indent}ch">{text}</span>' if line[50:] else f"{text}\n")
    return f"<pre>{''.join(html)}</pre>"


def note_shown(note):
    """A note as HTML."""
    if not note.values:
        raise ValueError(f"SHOWN: {note.function} {note.line} {note.condition} did not happen")
    title = " · ".join(filter(None, [note.function.partition(".")[2] + "()", note.title]))
    lines = [f'<div class="box"><b>{safe(title)}</b>']
    for text, value in zip(note.expressions, note.values):
        if "\n" in value or len(text + re.sub("<.*?>", "", value)) > 58:
            lines.append(f'<div class="who">{safe(text)}</div><pre>{value}</pre>')
        else:
            lines.append(f'<pre><span class="who">{safe(text)} =</span> {value}</pre>')
    return "".join(lines) + "</div>"


def make():
    """The page, from a new run."""
    sources = {name: (ROOT / f"{name}.py").read_text("utf-8") for name in NINE}
    notes = notes_of(SHOWN, sources)
    training_step(recorder(notes))
    return page(notes, sources)


if __name__ == "__main__":
    PAGE.write_text(make(), "utf-8")
    print(PAGE)
