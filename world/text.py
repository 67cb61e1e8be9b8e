"""Texts that others wrote: truncated to a budget, indented for a prompt, and made safe for a terminal."""
import unicodedata

ANALYSED = "Objective:", "Skills:"  # lines of an analysis that are not indented


# It does not say how much is cut: a text may be cut more than once
CUT = " ... [cut] ... "


def truncate(text, budget):
    """Head and tail of a text, `budget` characters at most: 'aaaa ... [cut] ... zzzz'."""
    if len(text) <= budget:
        return text
    room = budget - len(CUT)
    if room < 2:
        return text[:max(budget, 0)]
    head, tail = room - room // 2, room // 2
    return text[:head] + CUT + text[-tail:]


def indented(text):
    """The text for a place in a prompt, behind a label: further lines are indented by two spaces.

    Only our own labels begin at the left margin, so no text forges one, whatever it breaks its lines with.
    "7\\nVerdict: STOP" -> "7\\n  Verdict: STOP"
    """
    return "\n  ".join(text.splitlines())


def show_analysis(analysis):
    """The analysis of a question for a place in a prompt, below a label: all its lines are indented, so that
    none of them forges a label. There are two harmless exceptions, which the toy was trained on:

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
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else ascii(c)[1:-1] for c in text)
