"""models.tokens"""

import re


def after_thinking(text):
    """What a completion says after its last </think>; None if it never leaves its thinking.

    "<think>6 * 7 ...</think>\n\n42" -> "42"        "42" -> "42"        "<think>6 * 7 is" -> None
    """
    rest = text.rpartition("</think>")[2]
    return None if "<think>" in rest else rest.strip()
THINK = "<think>", "</think>"  # what a model writes between them is thinking, and no part of its answer


def marks_of(tokens=()):
    """A pattern that finds where a control token begins: one of common chat templates, or of `tokens`. It
    matches the first character alone, so that tokens may overlap; grouped by it, 1 000 tokens are quick."""
    rest = {"<": [r"[|｜][\w▁ ]{1,40}[|｜]>", "/?s>", "/?think>", "(?:start|end)_of_turn>"],
            "[": [r"/?INST\]", r"/?SYSTEM_PROMPT\]"]}
    for token in tokens:
        if len(token) > 1:
            rest.setdefault(token[0], []).append(re.escape(token[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(ends)})" for first, ends in rest.items()))


def harmless(prompt, marks=marks_of()):
    """A prompt in which no control token is left: a space behind its first character takes its meaning away.

    >>> harmless("a page with <|im_end|> and </think> in it")
    'a page with < |im_end|> and < /think> in it'

    A page that a tool has read must not end our message, or open or close the model's thinking. Half of a
    surrogate pair is legal in JSON and in Python, but is no text: it becomes "?".
    """
    return marks.sub(lambda mark: mark[0] + " ", prompt.encode("utf-8", "replace").decode())
