"""Texts of models: cut to a budget, and made safe for a terminal."""
import unicodedata


def truncate(text, budget):
    """Head and tail of a text, at most budget characters: 'aaaa ... [920 characters cut] ... zzzz'."""
    if len(text) <= budget:
        return text
    room = budget - len(f" ... [{len(text)} characters cut] ... ")  # the longest that the notice can be
    if room < 2:
        return text[:max(budget, 0)]
    head, tail = room - room // 2, room // 2
    return f"{text[:head]} ... [{len(text) - room} characters cut] ... {text[-tail:]}"


def printable(text):
    """A model's text for a terminal: characters that a terminal would obey and not show are escaped."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else ascii(c)[1:-1] for c in text)
