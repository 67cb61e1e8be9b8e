"""Tokens with a meaning: control tokens in a prompt are defused, and a completion's thinking is dropped.

A prompt may hold a web page. Its text must not end our message, begin another one, or open or close the
model's thinking. So both engines defuse() each prompt before the chat template is applied. A thinking model
writes <think>...</think> before its answer; all parsers call after_thinking() to drop that part.
"""

import functools
import re

THINK = "<think>", "</think>"
# The first character of a control token in common chat templates. The rest is a look-ahead, not matched.
COMMON = r"<(?=[|｜][\w▁ ]{1,40}[|｜]>|/?s>|/?think>|(?:start|end)_of_turn>)|\[(?=/?(?:INST|SYSTEM_PROMPT)\])"


def defuse(prompt, tokens=()):
    """The prompt without control tokens: a space after the first character makes each one ordinary text.

    >>> defuse("a page with <|im_end|> and </think> in it")
    'a page with < |im_end|> and < /think> in it'

    tokens: the tokenizer's own control tokens, a tuple; the common ones are always defused. Half of a
    surrogate pair, which JSON and Python allow but tokenizers do not, becomes "?".
    """
    return beginnings(tokens).sub(lambda match: match[0] + " ", prompt.encode("utf-8", "replace").decode())


@functools.cache
def beginnings(tokens):
    """A pattern for the first character of each control token: it matches no more, so tokens may overlap."""
    special = [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in tokens if len(token) > 1]
    return re.compile("|".join([COMMON, *special]))


def after_thinking(text):
    """The text after the last </think>; None if the thinking never ends.

    "<think>6 * 7 ...</think>\\n\\n42" -> "42"        "42" -> "42"        "<think>6 * 7 is" -> None
    """
    rest = text.rpartition(THINK[1])[2]
    return None if THINK[0] in rest else rest.strip()
