"""Generator: writes the answer from what is in memory (AgentFlow §3.1). Frozen.

When the verifier stops the rollout, or its turns are spent, the generator reads the question, the analysis
and the final memory M^T. It sums up in a line or two how the answer was found, and puts the answer into
<answer> tags. Only what is inside the last pair of tags is graded.
"""

import re

from models.tokens import after_thinking

PROMPT = """\
You write the final answer of a small team that has worked on a question step by step. \
Rely on the results in its memory.
First sum up in one or two sentences how the answer was found. \
Then give only the answer itself, as short as possible
(a name, a number, a choice), inside tags: <answer> ... </answer>. \
If the memory does not hold it, give your best answer.

Question: {question}

Query analysis:
{analysis}

Memory:
{memory}

Summary and answer:
"""

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)


def prompt(question, analysis, memory):
    return PROMPT.format(question=question, analysis=analysis, memory=memory)


def parse(text):
    """The last answer in tags, else the whole text; without the model's thinking.

    "2 + 2 is 4. <answer> 4 </answer>" -> "4"        "It is 4." -> "It is 4."
    """
    text = after_thinking(text) or ""
    answers = ANSWER.findall(text)
    return (answers[-1] if answers else text).strip()
