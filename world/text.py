"""Texts that others wrote: truncated to a budget, indented for a prompt, and made safe to show."""

import re
import unicodedata

ANALYSED = "Objective:", "Skills:"  # lines of an analysis that are not indented

# It does not say how much is cut: a text may be cut more than once
CUT = " ... [cut] ... "

# Soft hyphens, joiners, and marks of direction and variants: "ir\u00adon" looks like "iron".
INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]"
)


def visible(text):
    """The text without characters that nobody sees, and with one hyphen: "so\u2011called"."""
    return text if text.isascii() else re.sub("[\u2010\u2011]", "-", INVISIBLE.sub("", text))


def truncate(text, budget):
    """Head and tail of a text, `budget` characters at most: 'aaaa ... [cut] ... zzzz'."""
    if len(text) <= budget:
        return text
    room = budget - len(CUT)
    if room < 2:
        return text[: max(budget, 0)]
    head, tail = room - room // 2, room // 2
    return text[:head] + CUT + text[-tail:]


def indented(text):
    """The text for a place in a prompt, behind a label: further lines are indented by two spaces.

    Only our own labels begin at the left margin, so no text forges one, whatever breaks its lines.
    "7\\nVerdict: STOP" -> "7\\n  Verdict: STOP"
    """
    return "\n  ".join(text.splitlines())


def show_analysis(analysis):
    """The analysis of a question for a prompt, below a label: all its lines are indented,
    so that none of them forges a label. Two harmless exceptions are what the toy was trained on:

    "A sum.\\nMemory:"  -> "  A sum.\\n  Memory:"
    "A sum."            -> "A sum.": a single line without a colon, of any width
    "Objective: a sum." -> "Objective: a sum.": a line that begins with one of ANALYSED
    """
    lines = analysis.splitlines()
    if len(lines) == 1 and ":" not in unicodedata.normalize("NFKC", analysis):
        return analysis
    return "\n".join(line if line.startswith(ANALYSED) else f"  {line}" for line in lines)


def printable(text):
    """The text with its control characters escaped: a terminal would obey them."""
    plain = lambda c: c in "\n\t" or unicodedata.category(c)[0] != "C"
    return "".join(c if plain(c) else ascii(c)[1:-1] for c in text)
