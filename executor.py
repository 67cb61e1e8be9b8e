"""Executor: turns a planned step into one tool call, and runs it (AgentFlow §3.1). Frozen.

The executor reads the question, the planner's context and sub-goal, and the metadata of the chosen tool; it writes one call.
That call is *data*. It is read, as JSON or as the syntax tree of a Python call with literal arguments, and never evaluated in our
process: `python_coder(code=open("/etc/passwd").read())` is not a literal, so it is a mistake that is told to the planner.
"""

import ast
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import tools as toolset
from memory import after_thinking
from tools import describe

PROMPT = """\
You turn one planned step into one call of one tool. Write the call and nothing else: the tool's name with literal arguments,
as in the tool's example. No variables, no comments, no other text.

Tool:
{tool}
Question: {question}

Context: {context}

Sub-goal: {sub_goal}

Call:
"""

LONGEST = 20_000  # characters of a call; more is not a call, and deep nesting costs time to read
FENCE = re.compile(r"```[a-z_]*\n(.*?)```", re.DOTALL)


@dataclass
class Call:
    tool: str
    arguments: dict[str, str]

    def __str__(self):
        return f"{self.tool}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


def prompt(question, context, sub_goal, name, tool):
    return PROMPT.format(tool=describe(name, tool), question=question, context=context or "none", sub_goal=sub_goal)


def parse(text, name, tool):
    """Read the call of the tool that was planned: a Call, or a sentence that says why nobody can.

    'python_coder(code="print(6 * 7)")'                                     -> Call("python_coder", {"code": "print(6 * 7)"})
    '{"tool": "python_coder", "arguments": {"code": "print(6 * 7)"}}'        -> the same
    'python_coder(code=secret)'                                              -> "the arguments must be literals, not code to run"
    """
    if (text := after_thinking(text)) is None:
        return "the call never left its thinking: raise --max-new-tokens or leave --think out"
    if len(text) > LONGEST:
        return f"the call is longer than {LONGEST} characters"
    fenced = FENCE.findall(text)
    if len(fenced) > 1:
        return "there must be one call, not several"
    source = (fenced[0] if fenced else text).strip()
    try:
        called, arguments = read_json(source) if source.startswith("{") else read_python(source, list(tool.arguments))
        for key, value in arguments.items():
            f"{key} {value}".encode()  # a literal may be no text: half of a surrogate pair, 5 000 digits, nested too deep
    except (SyntaxError, ValueError, RecursionError, MemoryError) as why:  # all that json and ast raise on hostile text
        said = why.msg if isinstance(why, (SyntaxError, json.JSONDecodeError)) else str(why)
        return f"the call could not be read ({said or type(why).__name__}). Write it as {tool.example}"
    if called != name:
        return f"the plan was to call {name}, not {called[:60]!r}"
    return Call(name, arguments)


def read_json(source):
    data = json.loads(source, object_pairs_hook=once)
    if not isinstance(data.get("tool"), str) or not isinstance(data.get("arguments"), dict):
        raise ValueError('JSON needs the keys "tool" and "arguments"')
    return data["tool"], data["arguments"]


def read_python(source, names):
    """One call of a plain name; positional arguments take the tool's argument names in order."""
    body = ast.parse(source).body
    if len(body) != 1 or not isinstance(body[0], ast.Expr) or not isinstance(body[0].value, ast.Call):
        raise ValueError("there must be one call and nothing else")
    call = body[0].value
    if not isinstance(call.func, ast.Name) or len(call.args) > len(names) or None in [keyword.arg for keyword in call.keywords]:
        raise ValueError("there must be one call of the tool by its name")
    arguments = once(list(zip(names, call.args)) + [(keyword.arg, keyword.value) for keyword in call.keywords])
    try:
        return call.func.id, {key: ast.literal_eval(value) for key, value in arguments.items()}
    except (ValueError, TypeError) as why:  # TypeError: {[]: 1} is no dict
        raise ValueError("the arguments must be literals, not code to run") from why


def once(pairs):
    """The dict of these pairs; two readings of one key are none."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an argument is given twice")
    return dict(pairs)


def run(calls, tools, ask):
    """Run one batch of calls: [(result e^t, whether it is a tool-calling error, seconds)], in their order.

    calls: [Call, or the sentence that says why there is none]; ask: [query] -> [text], the fixed language model.
    base_generator is a language model and not a function, so all its queries are answered first, as one batch, and then looked up.
    """
    queries = [call.arguments.get("query") for call in calls if isinstance(call, Call) and tools[call.tool].run is None]
    queries = list(dict.fromkeys(query for query in queries if isinstance(query, str)))
    start = time.perf_counter()
    answers = dict(zip(queries, ask(queries))) if queries else {}
    asking = time.perf_counter() - start
    ready = {name: tool if tool.run else replace(tool, run=lambda query: answers[query]) for name, tool in tools.items()}

    def one(call):
        if isinstance(call, str):
            return f"Error: {call}", True, 0.0
        start = time.perf_counter()
        result, error = toolset.call(ready, call.tool, call.arguments)
        return result, error, time.perf_counter() - start + (asking if tools[call.tool].run is None else 0.0)

    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(one, calls))
