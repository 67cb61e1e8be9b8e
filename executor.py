"""Executor: turns a plan into one tool call (AgentFlow §3.1). Not trained.

The executor reads the question, the plan's context and sub-goal, and the description of the planned tool. It
writes one call, in Python. Models that were trained on tool calls may write JSON instead: parse() reads both.
parse() reads this call as *data*: it evaluates nothing and accepts only literal arguments. So
`python_coder(code=open("/etc/passwd").read())` is a parse error, and the planner reads that error in its next
prompt.
"""

import ast
import json
from dataclasses import dataclass

from models.dressing import unwrapped
from models.tokens import after_thinking
from planner import ParseError, describe
from world.text import indented

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

CALL_LIMIT = 20_000  # characters: a longer call is a parse error, because deep nesting takes long to parse
KEYS = {"name": "tool", "parameters": "arguments"}  # keys of Qwen's and Llama's JSON -> those read here


@dataclass
class Call:
    tool: str
    arguments: dict[str, object]  # literals; tools.check() refuses all but strings

    def __str__(self):
        return f"{self.tool}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


def prompt(question, context, sub_goal, name, tool):
    question, context, sub_goal = indented(question), indented(context or "none"), indented(sub_goal)
    return PROMPT.format(tool=describe(name, tool), question=question, context=context, sub_goal=sub_goal)


def parse(text, name, tool):
    """Read what the executor wrote: a Call of the planned tool, or a ParseError.

    'python_coder(code="print(6)")'                                -> Call("python_coder", {"code": ...})
    '{"tool": "python_coder", "arguments": {"code": "print(6)"}}'  -> the same
    'python_coder(code=secret)'                                    -> ParseError("the call could not be ...")
    """
    if (text := after_thinking(text)) is None:
        return ParseError("the call never left its thinking: raise --max-new-tokens or leave --think out")
    if len(text) > CALL_LIMIT:
        return ParseError(f"the call is longer than {CALL_LIMIT} characters")
    reason = ""
    for source in unwrapped(text, name):  # the text itself, then what is inside a fence or tags
        read = read_json if source.startswith("{") else read_python
        try:
            called, arguments = read(source, list(tool.arguments))
            must_be_writable(arguments)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # of json and ast
            reason = getattr(error, "msg", str(error)) or type(error).__name__  # .msg: without the position
        else:
            if called != name:
                return ParseError(f"the plan was to call {name}, not {called[:60]!r}")
            return Call(name, arguments)
    # reason: of the last source
    return ParseError(f"the call could not be read ({reason}). Write it as {tool.example}")


def read_python(source, names):
    """(tool name, {argument: literal}) of a text that is one call, name(...), and nothing else.

    names: the tool's argument names, for positional arguments. Here and in read_json(), a text that is
    anything else raises one of the errors that parse() expects."""
    match ast.parse(source).body:
        case [ast.Expr(ast.Call(ast.Name(called), args, keywords))]:
            pairs = [*zip(names, args), *((keyword.arg, keyword.value) for keyword in keywords)]
        case [ast.Expr(ast.Call())]:
            raise ValueError("there must be one call of the tool by its name")
        case _:
            raise ValueError("there must be one call and nothing else")
    if len(args) > len(names):
        raise ValueError(f"the tool has no argument number {len(args)}")
    if not all(keyword.arg for keyword in keywords):
        raise ValueError("each argument must be written out: no **")
    try:
        literals = [(name, ast.literal_eval(value)) for name, value in pairs]
    except (ValueError, TypeError) as why:  # TypeError: a literal such as {[]: 1}
        raise ValueError("the arguments must be literals, not code to run") from why
    return called, unique_dict(literals)


def read_json(source, names):
    """The same for {"tool": name, "arguments": {...}}. As in OpenAI's API, the arguments may be a string of
    JSON."""
    data = json.loads(source, object_pairs_hook=unique_dict)
    data = unique_dict([(KEYS.get(key, key), value) for key, value in data.items()])  # "name" beside "tool"?
    called, arguments = data.get("tool"), data.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments, object_pairs_hook=unique_dict)
    if not isinstance(called, str) or not isinstance(arguments, dict):
        raise ValueError('JSON needs the keys "tool" and "arguments"')
    return called, arguments


def unique_dict(pairs):
    """dict(pairs), or ValueError if a name comes twice, because either value could be meant."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an argument is given twice")
    return dict(pairs)


def must_be_writable(arguments):
    """Raises an error, here and not later in a tool, for what cannot be written as text: half of a surrogate
    pair, a number of 5 000 digits, a list that is too deep."""
    for word in (*arguments, *arguments.values()):
        str(word).encode()
