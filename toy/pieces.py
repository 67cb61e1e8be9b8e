"""The constant pieces of all prompts, each a token of the toy's vocabulary, and edits that break them up.

Each constant line of a prompt is one token, and so is each number below 1 000, each name and each address. A
prompt is then only some tens of tokens long, among which the model finds and copies the right ones.

    edited(prompt, pieces, rng)     half of the prompts stay as they are

A line that is edited falls apart into its words. A toy that has only ever read the whole line reads nonsense then.
So in its warm start some lines, labels and error texts of half of the prompts have other words.
"""

import re

import executor
import generator
import planner
import tools as toolset
import verifier
from memory import Step
from toy import teacher
from toy.questions import URLS, WORDS, facts
from toy.wordings import COMMON

PROMPTS = {
    "planner.ANALYSIS_PROMPT": planner.ANALYSIS_PROMPT,
    "planner.PROMPT": planner.PROMPT,
    "executor.PROMPT": executor.PROMPT,
    "verifier.PROMPT": verifier.PROMPT,
    "generator.PROMPT": generator.PROMPT,
}
NUMBERS = [f" {n}" for n in range(1000)]
NAMES = [name for _, _, names in facts() for name in names]
ERRORS = [
    " Error:", " NameError: name 'none' is not defined (line 1)", " SyntaxError: invalid syntax (line 1)",
    " no passage matches '", "'. Try other or fewer words.",
    " this address is not a page of the corpus: take one that a result has shown",
    " this is not a URL that can be read: it must be http or https, with a host and no password",
    " this URL is too long, or has characters that no URL has",
]  # fmt: skip

WORD = re.compile("[A-Za-z]+")
ALL_WORDS = sorted({*COMMON, *(word for prompt in PROMPTS.values() for word in WORD.findall(prompt))})


def lines(text):
    """A constant text in pieces: its lines, each with the line breaks around it."""
    return re.findall(r"\n*[^\n]+\n*", text)


def step_pieces(turn, verdict="CONTINUE"):
    """The labels of a step in memory: ["Step 1\\nTool: ", "\\nSub-goal: ", ..., "\\nVerdict: CONTINUE"]."""
    step = Step(turn, tool="\0", sub_goal="\0", command="\0", result="\0", verdict=verdict)
    return step.render().split("\0")


def prompt_pieces():
    """{piece: may it be edited?}, in the order of the vocabulary.

    The space before a variable belongs to the variable, not to the piece, so that a word has one token wherever it
    is copied to."""
    tools = {name: toolset.TOOLS[name] for name in teacher.TOOLS}
    editable = [line for prompt in PROMPTS.values() for piece in re.split(r"{\w+}", prompt) for line in lines(piece)]
    editable += [line for name, tool in tools.items()
                 for line in lines(planner.describe(name, tool).removeprefix(f"{name}:"))]
    editable += ["No steps yet.", *step_pieces(1)[1:], step_pieces(1, "STOP")[-1], "\nContext:", "\nTool:"]
    editable += [f"{gap}{step_pieces(n)[0]}" for n in range(1, 11) for gap in ("", "\n\n")]
    editable += ERRORS
    constant = ["user\n", "assistant\n", "\nContext: none", " none"]
    constant += [piece for name in tools for piece in (f"{name}:", f" {name}")]
    for what in (*WORDS.values(), None):  # calls as the executor writes them, and as memory shows them
        query = f"{what} of" if what else teacher.ANSWER
        for name in ("wikipedia_search", "base_generator"):
            constant += [f'{name}(query="{query}', f" {name}(query='{query}"]
        constant += [f'", query="{query}', f"', query='{query}", f" Find the {query}"]
    constant += ['web_search(url="', " web_search(url='", 'python_coder(code="number =', " python_coder(code='number ="]
    constant += ['; print(number)")', "; print(number)')", '")', "')"]
    for what, word in WORDS.items():
        constant += [f"Objective: the {what} of", f": The {what} of", f"): The {word} is", f"): The {word} is at"]
    constant += [" is at", ", but see", "\n  [2]", " [1]", " [1] passage 1 of 1 (", "): It is filed as", *SPOKEN]
    constant += [f" {op}" for op in ("plus", "minus", "times", "+", "-", "*")]
    constant += [*(f" {name}" for name in NAMES), *URLS, *NUMBERS]
    pieces = dict.fromkeys([piece.rstrip(" ") for piece in editable if piece.strip()], True)
    return pieces | {piece: pieces.get(piece, False) for piece in constant}


SPOKEN = [*teacher.SKILLS.values(), *teacher.CHECKS.values(), teacher.WHY, teacher.FOUND, teacher.END,
          teacher.UNKNOWN, *(text.split(" {")[0] for text in (teacher.GUESS,)), f" {teacher.GUESS}".split(" {")[0],
          teacher.NO_OBJECTIVE]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ edits
def edited(prompt, editable, rng):
    """The prompt, in half of the cases with some of its pieces edited. editable: those that may be."""
    if rng.random() < 0.5:
        return prompt
    for piece in editable:
        if rng.random() < 0.08 and piece in prompt:
            prompt = prompt.replace(piece, edited_piece(piece, rng))
    return prompt


def edited_piece(piece, rng):
    """A line without some of its words, or with others; or no line, or two."""
    if piece.endswith("\n") and rng.random() < 0.2:
        if ":" not in piece and rng.random() < 0.5:
            return ""
        return piece + " ".join(new_word(rng) for _ in range(rng.randrange(2, 16))) + "\n"
    share = rng.choice([0.1, 0.3, 0.3, 0.6, 1.0])  # of its words
    return WORD.sub(lambda found: edited_word(found[0], rng) if rng.random() < share else found[0], piece)


def edited_word(word, rng):
    """Another word twice as often as none, or this one and another."""
    return rng.choice([new_word(rng), new_word(rng), f"{word} {new_word(rng)}", ""])


def new_word(rng):
    """A word, or a quarter of the time letters that are none, for words that the toy has never seen."""
    if rng.random() < 0.75:
        return rng.choice(ALL_WORDS)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 10)))
