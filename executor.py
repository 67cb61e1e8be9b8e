"""Executor: turns a plan into one tool call (AgentFlow §3.1). Not trained.

The executor reads the question, the plan's context and sub-goal, and the description of the planned
tool. It writes one call, in Python; models that were trained on tool calls may write JSON instead.
models/calls.py reads both, as *data*: it evaluates nothing and accepts only literal arguments. So
`python_coder(code=open("/etc/passwd").read())` is a parse error. That error becomes the result of
the step (tools.run_calls), and the planner reads it in its next prompt.
"""

from dataclasses import dataclass

from models.calls import read_call  # the tool and arguments that a text calls; literals only
from models.chat import after_thinking
from planner import Unparsed, describe
from world.text import indented

# Tags: add them to OURS in models/chat.py (generator.py says why)
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

# Characters: a longer call is a parse error, because deeply nested literals are slow to parse
CALL_LIMIT = 20_000


@dataclass
class Call:
    tool: str
    arguments: dict[str, object]  # literals; tools.py runs a call only if all of them are strings

    def __str__(self):
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.tool}({arguments})"


def prompt(question, plan, tool):
    """plan: a planner.Plan. tool: the tools.Tool that it names."""
    return PROMPT.format(
        tool=describe(plan.tool, tool),
        question=indented(question),
        context=indented(plan.context or "none"),
        sub_goal=indented(plan.sub_goal),
    )


def parse(text, name, tool):
    """Read what the executor wrote: a Call of the planned tool, or an Unparsed.

    >>> from tools import TOOLS
    >>> tool = TOOLS["python_coder"]
    >>> parse('python_coder(code="print(6)")', "python_coder", tool)
    Call(tool='python_coder', arguments={'code': 'print(6)'})
    >>> parse("python_coder(code=secret)", "python_coder", tool)[:60]  # an Unparsed
    'the call could not be read (the arguments must be literals, '
    >>> parse('wikipedia_search(query="iron")', "python_coder", tool)
    "the plan was to call python_coder, not 'wikipedia_search'"
    """
    text = after_thinking(text)
    if text is None:
        return Unparsed("the call never left its thinking")
    if len(text) > CALL_LIMIT:
        return Unparsed(f"the call is longer than {CALL_LIMIT} characters")
    try:
        called, arguments = read_call(
            text,
            tool_name=name,  # if it is also called outside a fence, either could be meant: an error
            names=list(tool.arguments),  # positional arguments get these names, in this order
        )
    except ValueError as why:
        return Unparsed(f"the call could not be read ({why}). Write it as {tool.example}")
    if called != name:
        return Unparsed(f"the plan was to call {name}, not {called[:60]!r}")
    return Call(name, arguments)
