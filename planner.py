"""Planner: the one module that learns (AgentFlow §3.1).

Each turn the planner reads the state s^t = (question q, toolset K, memory M^t) and writes the action a^t: a
justification, the context and the sub-goal for the executor, and one tool. That action is one sequence of
tokens; those tokens, and no others, are what Flow-GRPO trains (flow_grpo.py).

Two pure functions: prompt() makes the text that goes in, parse() reads the text that comes out. Engines are
called in solve.py alone. The prompt starts with what all rollouts of a question share and ends with the
memory, so these rollouts have a long prefix in common.

The query analysis comes before the first turn: a fixed engine writes it once a question, and every module
but the executor reads it.
"""

import re
from dataclasses import dataclass

from models.dressing import labelled, plain_name
from models.tokens import after_thinking

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

PROMPT = """\
You are the planner of a small team that answers a question step by step. \
For each step that you plan, an executor calls one tool.
Plan only the NEXT step: the sub-goal that brings the answer closest, and the one tool that suits it best.

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

PLAN_LIMIT = 20_000  # characters: a longer plan is a parse error, because memory keeps its sub-goal
LABELS = "justification|context|sub[-_ ]?goal|tool(?:[-_ ]name)?"


@dataclass
class Plan:
    """What the executor needs of an action a^t."""

    context: str
    sub_goal: str
    tool: str


def describe(name, tool):
    """The metadata of a tool as the planner and the executor read it."""
    arguments = "; ".join(f"{key} (string): {meaning}" for key, meaning in tool.arguments.items())
    text = f"{name}: {tool.description}\n  Arguments: {arguments}"
    return f"{text}\n  Limits: {tool.limits}\n  Example: {tool.example}\n"


def describe_all(tools):
    """The toolset K as the planner and the verifier read it."""
    return "".join(describe(name, tool) for name, tool in tools.items())


def analysis_prompt(question, tools):
    return ANALYSIS_PROMPT.format(tools=describe_all(tools), question=question)


def prompt(question, tools, analysis, memory):
    """The state s^t as text; `memory` is already rendered."""
    return PROMPT.format(tools=describe_all(tools), question=question, analysis=analysis, memory=memory)


def parse(text, tools):
    """Read an action: a Plan, or the parse error, as one sentence. Never guesses between two readings.

    "Context: none\\nSub-goal: add 2 and 2\\nTool: python_coder"
                         -> Plan("none", "add 2 and 2", "python_coder")
    "I would search."    -> "no line 'Sub-goal: ...'. Answer in the four lines asked for."
    """
    if (text := after_thinking(text)) is None:
        return "the plan never left its thinking: think less, raise --max-new-tokens or leave --think out."
    if len(text) > PLAN_LIMIT:
        return f"the plan is longer than {PLAN_LIMIT} characters. Answer in the four lines asked for."
    fields = {}
    for label, value in labelled(text, LABELS):
        name = re.sub(r"[-_ ]", "", label.lower()).removesuffix("name")
        value = plain_name(value, tools) if name == "tool" else value
        if fields.setdefault(name, value) != value:
            return f"two different lines '{label}: ...'. Plan one step only."
    for name, shown in (("subgoal", "Sub-goal"), ("tool", "Tool")):
        if not fields.get(name):
            return f"no line '{shown}: ...'. Answer in the four lines asked for."
    if fields["tool"] not in tools:
        return f"no tool called {fields['tool'][:60]!r}. Use one of: {', '.join(tools)}."
    return Plan(fields.get("context", ""), fields["subgoal"], fields["tool"])
