"""Planner: the one module that is trained (AgentFlow §3.1).

In turn t the planner reads the state s^t = (question q, toolset K, memory M^t) and writes the
action a^t, a plan: a justification, the context that the executor needs, a sub-goal, and the name
of one tool. Flow-GRPO trains the tokens of these plans and no others (flow_grpo.py).

prompt() makes the text that the planner reads, parse() reads the text that it writes. Neither calls
a language model: solve.py does. In all scripts, `tools` is the toolset K, {name: tools.Tool}. This
file uses only the texts of a Tool that describe it: description, arguments, limits and example.

Before the first turn, a model that is not trained analyses the question (ANALYSIS_PROMPT). Planner,
verifier and generator read this analysis.
"""

from dataclasses import dataclass

from models.calls import labelled, plain_name
from models.chat import after_thinking
from world.text import indented, show_analysis

# labelled(text, labels)    the (label, value) pairs of a text, bold or not
# plain_name(text, names)   "the **python_coder** tool (it computes)" -> "python_coder"
# after_thinking(text)      what follows a thinking model's thoughts; None if they never end
# indented(text)            two spaces before each line but the first: none looks like our labels
# show_analysis(text)       the analysis, with its lines indented for the same reason

# Filled in with str.format(): for a literal brace, write {{ or }}. Tags: add them to OURS in
# models/chat.py, or the model may read "< goal_1>" instead of "<goal_1>".
PROMPT = """\
You are the planner of a small team that answers a question step by step. \
For each step that you plan, an executor calls one tool.
Plan only the NEXT step: the sub-goal that brings the answer closest, \
and the one tool that suits it best.

Rules:
- One sub-goal and one tool. Use the exact name of a tool from the list.
- The executor sees only the question, your context and your sub-goal: \
give every fact, number and URL it needs.
- Build on the results in memory. If a step failed, change the sub-goal or the tool.

Answer in exactly these four lines:
Justification: why this step and this tool
Context: what the executor needs from memory, or "none"
Sub-goal: what this step must find out
Tool: the exact name of the tool

Tools:
{tools}
Question: {question}

Query analysis:
{analysis}

Memory:
{memory}

Next step:
"""

ANALYSIS_PROMPT = """\
You analyse a question before a team works on it with tools. Do not answer it. \
In at most four short lines, say:
- the objective: what exactly the answer must be (a name, a number, a unit, a choice);
- the skills and the tools from the list that may help;
- what to be careful about.

Tools:
{tools}
Question: {question}

Analysis:
"""

# Characters: a longer plan is a parse error, to keep huge sub-goals out of memory
PLAN_LIMIT = 20_000
LABELS = {  # {label: a pattern for its spellings}; \u2010 and \u2011 are hyphens, too
    "Justification": "justification",
    "Context": "context",
    "Sub-goal": r"sub[-_ \u2010\u2011]?goal",
    "Tool": "tool(?:[-_ ]name)?",
}


@dataclass
class Plan:
    """The parsed plan a^t. Its justification is dropped: it only makes the planner think first."""

    context: str
    sub_goal: str
    tool: str


class Unparsed(str):
    """Why a plan or a call could not be parsed, as a text for the memory."""


def describe(name, tool):
    """One tool (a tools.Tool) of the toolset, as text for a prompt."""
    arguments = "; ".join(f"{key} (string): {meaning}" for key, meaning in tool.arguments.items())
    return (
        f"{name}: {tool.description}\n  Arguments: {arguments}\n  Limits: {tool.limits}\n"
        f"  Example: {tool.example}\n"
    )


def describe_all(tools):
    """The toolset K, as text for a prompt."""
    return "".join(describe(name, tool) for name, tool in tools.items())


def analysis_prompt(question, tools):
    return ANALYSIS_PROMPT.format(tools=describe_all(tools), question=indented(question))


def prompt(memory, tools):
    """The state s^t as text: the question, the toolset and the memory.

    The parts that all rollouts of a question share come first: fast/ can compute them once.
    """
    return PROMPT.format(
        tools=describe_all(tools),
        question=indented(memory.question),
        analysis=show_analysis(memory.analysis),
        memory=memory.render(),
    )


def parse(text, tools):
    """Read what the planner wrote: a Plan, or an Unparsed. An ambiguous plan is an error.

    >>> tools = ["python_coder", "web_search"]
    >>> parse("Context: none\\nSub-goal: add 2 and 2\\nTool: python_coder", tools)
    Plan(context='none', sub_goal='add 2 and 2', tool='python_coder')
    >>> parse("**Sub-goal:** add 2\\nand 2\\n**Tool name:** the python_coder tool", tools)
    Plan(context='', sub_goal='add 2\\nand 2', tool='python_coder')
    >>> parse("I would search.", tools)  # an Unparsed
    "no line 'Sub-goal: ...'. Answer in the four lines asked for."

    A value goes on up to the next label. A plan that was cut off at the token limit is valid if its
    sub-goal and tool are there.
    """
    text = after_thinking(text)
    if text is None:
        return Unparsed("the plan never left its thinking: think less.")
    cure = "Answer in the four lines asked for."
    if len(text) > PLAN_LIMIT:
        return Unparsed(f"the plan is longer than {PLAN_LIMIT} characters. {cure}")
    fields = {}
    for label, value in labelled(text, LABELS):  # value: the text up to the next label
        if label == "Tool":
            value = plain_name(value, tools)  # unchanged if it names no single tool: rejected below
        if label in fields and fields[label] != value:  # the same line twice is fine
            return Unparsed(f"two different lines '{label}: ...'. Plan one step only.")
        fields[label] = value
    for label in ("Sub-goal", "Tool"):  # the other two may be missing
        if not fields.get(label):
            return Unparsed(f"no line '{label}: ...'. {cure}")
    if fields["Tool"] not in tools:
        return Unparsed(f"no tool called {fields['Tool'][:60]!r}. Use one of: {', '.join(tools)}.")
    return Plan(fields.get("Context", ""), fields["Sub-goal"], fields["Tool"])
