"""Texts that models wrote: truncated to a budget, and made safe for a terminal."""
import unicodedata


def truncate(text, budget):
    """Head and tail of a text, `budget` characters at most: 'aaaa ... [920 characters cut] ... zzzz'."""
    if len(text) <= budget:
        return text
    room = budget - len(f" ... [{len(text)} characters cut] ... ")  # the notice at its longest
    if room < 2:
        return text[:max(budget, 0)]
    head, tail = room - room // 2, room // 2
    return f"{text[:head]} ... [{len(text) - room} characters cut] ... {text[-tail:]}"


def printable(text):
    """The text with its control characters escaped: a terminal would obey them."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else ascii(c)[1:-1] for c in text)
