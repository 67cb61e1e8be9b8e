"""Verifier: does the memory answer the question? (AgentFlow §3.1). Frozen.

After every step the verifier reads the question, the analysis, the toolset and the memory, which now holds
the new result. It writes STOP (v^t = 1: the generator answers) or CONTINUE (v^t = 0: the planner plans
another step). Anything else counts as CONTINUE: one more turn is the cheaper mistake, and "we should not
stop" must never be read as STOP.
"""

from models.dressing import MARKS, labelled
from models.tokens import after_thinking
from planner import describe_all

PROMPT = """\
You check the work of a small team that answers a question step by step. \
Decide whether its memory holds all that the answer needs.
Say STOP if the results in memory answer every part of the question and do not contradict each other.
Say CONTINUE if something is missing, failed, doubtful or contradictory, and a further step could mend it.

Answer in exactly these two lines:
Explanation: what the results show, and what is missing
Conclusion: STOP or CONTINUE

Tools:
{tools}
Question: {question}

Query analysis:
{analysis}

Memory:
{memory}

Your check:
"""


def prompt(question, tools, analysis, memory):
    return PROMPT.format(tools=describe_all(tools), question=question, analysis=analysis, memory=memory)


def parse(text):
    """True for STOP: a line "Conclusion: STOP", or the bare word. Two conclusions that differ are no STOP.

    "Explanation: ...\\nConclusion: STOP" -> True        "We should not stop." -> False        "" -> False
    """
    text = after_thinking(text) or ""
    verdicts = [conclusion.partition("\n")[0] for _, conclusion in labelled(text, "conclusion")] or [text]
    return {verdict.strip(MARKS).upper() for verdict in verdicts} == {"STOP"}
