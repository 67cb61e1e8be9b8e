"""Generator: writes the answer from what is in memory (AgentFlow §3.1). Not trained.

After the verifier's STOP, or after the last turn, the generator reads the question, the analysis
and the final memory. It sums up in a sentence or two how the answer was found, and writes the
answer itself between <answer> tags. The text between the last pair of tags is graded; without tags,
the whole completion (but not its thinking, and nothing if it was cut).
"""

import re

from models.chat import after_thinking  # what follows a thinking model's thoughts
from world.text import indented, show_analysis  # no line of a text looks like one of our labels

# If you ask for other tags, add them to OURS in models/chat.py. Otherwise they may be taken for
# control tokens, and changed: the model would read "< final_answer>" instead of "<final_answer>".
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

# between the tags: any text without a further <answer>, so "<answer>a <answer>b</answer>" gives "b"
ANSWER = re.compile(r"(?is)<answer>((?:(?!<answer>).)*?)</answer>")
OPEN = re.compile(r"(?i)<answer>")


def prompt(memory):
    return PROMPT.format(
        question=indented(memory.question),
        analysis=show_analysis(memory.analysis),
        memory=memory.render(),
    )


def parse(text, cut=False):
    """The last answer in tags, or else the whole text. The model's thinking is dropped first.

    >>> parse("2 + 2 is 4. <answer> 4 </answer>"), parse("2 + 2 is 4. <answer> 4")
    ('4', '4')
    >>> parse("It is 4.")
    'It is 4.'

    cut: the text was cut at the limit of tokens. Then only an answer in tags is whole: of "It is
    18." the start "It is 1" may be left, and "1" is another answer.
    """
    text = after_thinking(text) or ""
    answers = ANSWER.findall(text)
    if not answers and not cut:  # the text after the last <answer> that has text after it
        answers = [part for part in OPEN.split(text) if part.strip()]
    return answers[-1].strip() if answers else ""
