"""The constant pieces of all texts, each a token of the toy's vocabulary, and edits that break them
up.

    pieces_of(examples)     ["\\nSub-goal: Find the number of", "\\nTool: web_search", ...]
    edited(prompt, rng)     the prompt, in half of the cases with other words in some places

Each paragraph of a prompt is one token, and so is each line between two variables: a name, a
number, an address. A prompt is then some tens of tokens long, among which the model finds and
copies the right ones. A piece that is edited falls apart into its words. A toy that has only ever
read the whole piece reads nonsense then, so in its warm start some paragraphs, labels and errors
have other words."""

import re
from collections import Counter

import executor
import generator
import planner
import tools as toolset
import verifier
from toy import teacher
from toy.questions import URLS, facts
from toy.wordings import COMMON

NUMBERS = [f" {n}" for n in range(1000)]
NAMES = [name for _, _, names in facts() for name in names]
VARIABLE = re.compile(rf" (?:{'|'.join(NAMES)})\b| \d+\b| ?https://facts.org/\d+|(?<=url=.)\d+")
PROMPTS = [planner.ANALYSIS_PROMPT]
PROMPTS += [module.PROMPT for module in (planner, executor, verifier, generator)]
WORD = re.compile("[A-Za-z]+")
WORDS = sorted({*COMMON, *WORD.findall(" ".join(PROMPTS))})
LABEL = re.compile(r"(?<=\n)(?:[A-Z][\w -]*(?=:)|Step(?= \d+\n)|No steps yet)")


def paragraphs():
    """The prompts' constant paragraphs before the question, and what they say of each tool."""
    described = [planner.describe(name, toolset.TOOLS[name]) for name in teacher.TOOLS]
    starts = [prompt.partition("{question}")[0] for prompt in PROMPTS]
    texts = [part for start in starts for part in re.split(r"{\w+}", start)]
    texts += [text.partition(":")[2] for text in described]
    paragraph = re.compile(r"\n*(?:[^\n]+\n?)+\n*")
    return [piece.rstrip(" ") for text in texts for piece in paragraph.findall(text)]


def pieces_of(examples):
    """The vocabulary's pieces, from [(prompt, text)] of all modules: a list of strings.

    A space before a variable belongs to the variable (but for an address), so that a word has one
    token wherever it is copied to."""
    texts = [text for example in examples for text in (after_question(example[0]), example[1])]
    constant = [part for text in texts for part in VARIABLE.split(text)]
    counts = Counter(line for text in constant for line in re.findall(r"\n*[^\n]+(?:\n+$)?", text))
    lines = [line for line, n in counts.items() if n >= 5 and line.strip()]
    starts = ["user\n", "assistant\n", "user\nnumber of", "user\ncode of"]
    names = [f"{name}:" for name in teacher.TOOLS] + [f" {name}" for name in NAMES]
    return list(dict.fromkeys([*starts, *paragraphs(), *lines, *names, *URLS, *NUMBERS]))


def after_question(prompt):
    """What follows the question in a prompt: analysis, memory, plan."""
    return "\n" + prompt.split("\nQuestion: ")[1].partition("\n")[2]


# -------------------------------------------------------------------------------------------- edits
def edited(prompt, rng):
    """The prompt, in half of the cases with some of its paragraphs, labels and errors edited."""
    if rng.random() < 0.5:
        return prompt
    for paragraph in PARAGRAPHS:
        if rng.random() < 0.12 and paragraph in prompt:
            prompt = prompt.replace(paragraph, edited_text(paragraph, rng))
    for label in sorted(set(LABEL.findall(prompt))):
        if rng.random() < 0.3:
            prompt = re.sub(rf"(?<=\n){label}\b", edited_text(label, rng), prompt)
    for error in sorted(set(re.findall(r"Error: [^'\n]+", prompt))):
        if rng.random() < 0.4:
            prompt = prompt.replace(error, edited_text(error, rng))
    return prompt


PARAGRAPHS = paragraphs()


def edited_text(text, rng):
    """A text without some of its words, or with others; a paragraph with another line, or none."""
    if text.endswith("\n") and rng.random() < 0.2:
        if ":" not in text and rng.random() < 0.5:
            return ""
        lines = text.split("\n")
        extra = " ".join(new_word(rng) for _ in range(rng.randrange(2, 16)))
        return "\n".join(lines[:1] + [extra] + lines[1:])
    share = rng.choice([0.1, 0.3, 0.3, 0.6, 1.0])  # of its words
    edit = lambda word: edited_word(word[0], rng) if rng.random() < share else word[0]
    return WORD.sub(edit, text)


def edited_word(word, rng):
    """Another word twice as often as none, or this one and another."""
    return rng.choice([new_word(rng), new_word(rng), f"{word} {new_word(rng)}", ""])


def new_word(rng):
    """A word, or a quarter of the time letters, for words that the toy has never seen."""
    if rng.random() < 0.75:
        return rng.choice(WORDS)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 10)))
