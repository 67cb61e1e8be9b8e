"""Edits of prompts, such as a reader of this repository may make. The toy reads them in its warm start.

    edited(prompt, pieces, rng)     half of the prompts stay as they are

Each constant line of a prompt is one token of the toy's vocabulary (pieces.py), and falls apart into its
words if it is edited. A toy that has only ever read the whole line reads nonsense then. So in its warm start
some lines, labels and error texts of half of the prompts have other words.
"""

import re

import tools as toolset
from toy.pieces import PROMPTS
from toy.wordings import COMMON

EDITABLE = {*PROMPTS, "memory.Step.render", "an error", *(f"tools.TOOLS[{name!r}]" for name in toolset.TOOLS)}
SHARE = 0.08  # of the constant pieces of a prompt
WORD = re.compile("[A-Za-z]+")
WORDS = sorted({*COMMON, *(word for prompt in PROMPTS.values() for word in WORD.findall(prompt))})


def edited(prompt, pieces, rng):
    """The prompt, in half of the cases after an edit. pieces: {constant piece: where it comes from}."""
    if rng.random() < 0.5:
        return prompt
    for piece, where in pieces.items():
        if where in EDITABLE and piece in prompt and rng.random() < SHARE:
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
        return rng.choice(WORDS)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 10)))
