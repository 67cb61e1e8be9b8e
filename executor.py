"""Executor: turns a planned step into one tool call (AgentFlow §3.1). Frozen.

The executor reads the question, the planner's context and sub-goal, and the metadata of the chosen tool; it
writes one call. That call is *data*. It is read, as JSON or as the syntax tree of a Python call with literal
arguments, and never evaluated in our process: `python_coder(code=open("/etc/passwd").read())` has an argument
that is no literal, so it is a parse error, which the planner reads in its next prompt.
"""

import ast
import json
from dataclasses import dataclass

from models.dressing import unwrapped
from models.tokens import after_thinking
from planner import describe

PROMPT = """\
You turn one planned step into one call of one tool. \
Write the call and nothing else: the tool's name with literal arguments,
as in the tool's example. No variables, no comments, no other text.

Tool:
{tool}
Question: {question}

Context: {context}

Sub-goal: {sub_goal}

Call:
"""

CALL_LIMIT = 20_000  # characters: a longer call is a parse error, because deep nesting costs time to read

KEYS = {"name": "tool", "parameters": "arguments"}  # as Qwen and Llama were trained to write it


@dataclass
class Call:
    tool: str
    arguments: dict[str, str]

    def __str__(self):
        return f"{self.tool}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


def prompt(question, context, sub_goal, name, tool):
    tool = describe(name, tool)
    return PROMPT.format(tool=tool, question=question, context=context or "none", sub_goal=sub_goal)


def parse(text, name, tool):
    """Read the call of the tool that was planned: a Call, or the parse error, as one sentence.

    'python_coder(code="print(6)")'                                -> Call("python_coder", {"code": ...})
    '{"tool": "python_coder", "arguments": {"code": "print(6)"}}'  -> the same
    'python_coder(code=secret)'                                    -> "the call could not be read (...)..."
    """
    if (text := after_thinking(text)) is None:
        return "the call never left its thinking: raise --max-new-tokens or leave --think out"
    if len(text) > CALL_LIMIT:
        return f"the call is longer than {CALL_LIMIT} characters"
    for source in unwrapped(text, name):  # bare, or in a fence or tags
        try:
            called, arguments = read(source, list(tool.arguments))
            if called != name:
                return f"the plan was to call {name}, not {called[:60]!r}"
            return Call(name, arguments)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # all that json and ast raise
            reason = getattr(error, "msg", str(error)) or type(error).__name__
    return f"the call could not be read ({reason}). Write it as {tool.example}"


def read(source, names):
    """The name and the arguments of a source that is one call from its first to its last character."""
    called, arguments = read_json(source) if source.startswith("{") else read_python(source, names)
    for key, value in arguments.items():
        f"{key} {value}".encode()  # fails for half of a surrogate pair, 5 000 digits, too deep a list
    return called, arguments


def read_json(source):
    """{"tool": name, "arguments": {...}}; arguments may be JSON inside a string, as OpenAI's API has them."""
    data = json.loads(source, object_pairs_hook=once)
    data = once([(KEYS.get(key, key), value) for key, value in data.items()])
    called, arguments = data.get("tool"), data.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments, object_pairs_hook=once)
    if not isinstance(called, str) or not isinstance(arguments, dict):
        raise ValueError('JSON needs the keys "tool" and "arguments"')
    return called, arguments


def read_python(source, names):
    """One call of a plain name; positional arguments take the tool's argument names in order."""
    body = ast.parse(source).body
    if len(body) != 1 or not isinstance(body[0], ast.Expr) or not isinstance(body[0].value, ast.Call):
        raise ValueError("there must be one call and nothing else")
    call = body[0].value
    named = [(keyword.arg, keyword.value) for keyword in call.keywords]  # of **rest, keyword.arg is None
    if not isinstance(call.func, ast.Name) or len(call.args) > len(names) or None in dict(named):
        raise ValueError("there must be one call of the tool by its name")
    arguments = once(list(zip(names, call.args)) + named)
    try:
        return call.func.id, {key: ast.literal_eval(value) for key, value in arguments.items()}
    except (ValueError, TypeError) as why:  # TypeError: {[]: 1} is no dict
        raise ValueError("the arguments must be literals, not code to run") from why


def once(pairs):
    """The dict of these pairs; ValueError if a key comes twice, because either value could be meant."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an argument is given twice")
    return dict(pairs)
