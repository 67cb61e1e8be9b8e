"""Text around tokens: control tokens in a prompt are defused, and a completion's thinking is dropped.

A prompt holds pages that a tool has read. A page must not end our message, begin another one, or open or
close the model's thinking, so both engines defuse() every prompt before a chat template sees it. A thinking
model writes <think>...</think> before its answer; the parsers read what follows, through after_thinking().
"""

import functools
import re

THINK = "<think>", "</think>"
# The first character of a control token of common chat templates; what follows it is only looked at.
COMMON = r"<(?=[|｜][\w▁ ]{1,40}[|｜]>|/?s>|/?think>|(?:start|end)_of_turn>)|\[(?=/?(?:INST|SYSTEM_PROMPT)\])"


def defuse(prompt, tokens=()):
    """The prompt without control tokens: a space after the first character makes ordinary text of each.

    >>> defuse("a page with <|im_end|> and </think> in it")
    'a page with < |im_end|> and < /think> in it'

    tokens: a tuple of the tokenizer's own control tokens, beside the common ones. Half of a surrogate pair is
    legal in JSON and in Python but is no text: it becomes "?".
    """
    return beginnings(tokens).sub(lambda match: match[0] + " ", prompt.encode("utf-8", "replace").decode())


@functools.cache
def beginnings(tokens):
    """A pattern for the first character of each control token. As it matches no more, tokens may overlap."""
    special = [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in tokens if len(token) > 1]
    return re.compile("|".join([COMMON, *special]))


def after_thinking(text):
    """The completion after its last </think>; None if the thinking never ends.

    "<think>6 * 7 ...</think>\\n\\n42" -> "42"        "42" -> "42"        "<think>6 * 7 is" -> None
    """
    rest = text.rpartition(THINK[1])[2]
    return None if THINK[0] in rest else rest.strip()
