"""Verifier: does the memory hold all that the answer needs? (AgentFlow §3.1). Not trained.

In each turn whose plan could be parsed, even if the call ended in an error, the verifier reads the
question, the analysis, the toolset and the memory with the new result. It writes the verdict: STOP
(v^t = 1: the generator answers) or CONTINUE (v^t = 0: the planner plans another step). What cannot
be read as STOP counts as CONTINUE: an extra turn costs little, but stopping too early may lose the
answer.

The explanation lets the model think before it decides; it is not parsed. parse() returns a bool,
which solve.roll_out() writes into the memory as "Verdict: STOP" or "Verdict: CONTINUE".
"""

# labelled: the (label, value) pairs of a text. MARKS: quotes, asterisks, full stops and such.
# plain_name: "STOP. All is there." -> "STOP"; what is not plainly one of the names stays as it is
from models.calls import MARKS, labelled, plain_name
from models.chat import after_thinking
from planner import describe_all
from world.text import indented, show_analysis

# Tags: add them to OURS in models/chat.py (generator.py says why)
PROMPT = """\
You check the work of a small team that answers a question step by step. \
Decide whether its memory holds all that the answer needs.
Say STOP if the results in memory answer every part of the question \
and do not contradict each other.
Say CONTINUE if something is missing, failed, doubtful or contradictory, \
and a further step could mend it.

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


def prompt(memory, tools):
    return PROMPT.format(
        tools=describe_all(tools),
        question=indented(memory.question),
        analysis=show_analysis(memory.analysis),
        memory=memory.render(),
    )


def parse(text, cut=False):
    """True if every line "Conclusion: ..." says STOP. Without such a line, the text must be STOP.

    After "STOP.", a remark may follow, unless it begins like an objection ("but", "unless"). In
    doubt, the verdict is CONTINUE (REMARK in models/calls.py has the rules).

    >>> parse("Explanation: ...\\nConclusion: STOP"), parse("**Conclusion:** STOP. All is there.")
    (True, True)
    >>> parse("Conclusion: STOP. But a price is missing."), parse("We should not stop.")
    (False, False)
    >>> parse("Conclusion: STOP if a price was found")
    False
    >>> parse("Conclusion: STOP, all is there")  # after a comma, it could be a condition
    False

    cut: the text was cut at the limit of tokens, so an objection may have followed: CONTINUE.
    """
    if cut:
        return False
    text = after_thinking(text) or ""  # thinking that never ended is not STOP
    values = [value for _, value in labelled(text, {"Conclusion": "conclusion"})]
    if not values:
        return text.strip(MARKS).upper() == "STOP"
    return all(plain_name(value, ["STOP", "CONTINUE"]) == "STOP" for value in values)
