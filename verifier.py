"""Verifier: is the question answered by what is in memory? (AgentFlow §3.1). Frozen.

After every step the verifier reads the question, the analysis, the toolset and the memory, the new result included, and says STOP
(v^t = 1: the generator may answer) or CONTINUE (v^t = 0: the planner plans another step). Whoever writes neither gets CONTINUE:
one more turn is the cheaper mistake, and "we should not stop" must never be read as STOP.
"""

import re

from models.tokens import after_thinking
from planner import DRESSING, MARKS, describe_all

PROMPT = """\
You check the work of a small team that answers a question step by step. Decide whether its memory holds all that the answer needs.
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

CONCLUSION = re.compile(DRESSING + r"conclusion[*_` \t]*:[*_`]*\s*(.*)$", re.IGNORECASE | re.MULTILINE)


def prompt(question, tools, analysis, memory):
    return PROMPT.format(tools=describe_all(tools), question=question, analysis=analysis, memory=memory)


def parse(text):
    """True for STOP. Only a line "Conclusion: STOP", or the bare word, stops; two conclusions that differ do not.

    "Explanation: ...\\nConclusion: STOP" -> True        "We should not stop." -> False        "" -> False
    """
    text = after_thinking(text) or ""
    verdicts = CONCLUSION.findall(text) or [text]
    return {verdict.strip(MARKS).upper() for verdict in verdicts} == {"STOP"}
