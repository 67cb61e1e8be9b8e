"""Dressing: what real models write around a plan or a call, and how to look behind it.

A model that is asked for four plain lines writes "2. **Sub-goal:** ...", a code fence around everything, or a
remark behind a name. None of that changes what it means, so the parsers read through it. What could be meant
in two ways stays as it is, and becomes a parse error.
"""

import re

# At the start of a line, before a label: a list number, bold. It belongs to the label, so that it never leaks
# into the field above.
START = r"^(?:[ \t*#>_`-]|\d+[.)])*"
MARKS = " \t\r\n-*_`'\".<>()[]{}"  # around a single word

# What ends a name: the end of its line, or the beginning of a remark. "(or a calculator)" is no remark but a
# second reading: it stays with the name, and no tool has that name.
REMARK = re.compile(r"(?:[\n(:—]| [-–]|\. )(?!\W{0,9}(?:no|not|or|and)\b)", re.IGNORECASE)

# Around a call: the prompt's last label, a fence, tags. The closing fence or tag may be missing.
WRAP = re.compile(
    r"(?ims)^[*# ]*call:\**(.*)"
    r"|```(?:\w*[ \r]*\n)?(?:(.*)```|(.*))"
    r"|<tool_call>(?:(.*)</tool_call>|(.*))")
SECOND_CALL = r"""^[^\w\n]*\w+\(|\{{\s*["']|\b{name}\s*\("""  # the start of another call


def labelled(text, labels):
    """The labelled parts of a text, in order: [(label as it is written, what follows it)].

    "1. **Tool:** x\\n2. Sub-Goal: y" -> [("Tool", "x"), ("Sub-Goal", "y")]    for the labels "tool|sub-goal"

    A code fence that ends a part is left out.
    """
    parts = re.split(START + rf"({labels})[*_` \t]*:[*_`]*", text, flags=re.IGNORECASE | re.MULTILINE)
    values = [value.strip().removesuffix("```").strip() for value in parts[2::2]]
    return list(zip(parts[1::2], values))


def plain_name(field, names):
    """The name that a field begins with, if it names no other one; else the field as it is.

    "**python_coder** (it computes)\\n\\nI hope this helps." -> "python_coder"
    "not python_coder"                                      -> "not python_coder"
    """
    first = REMARK.split(field.strip(MARKS))[0].strip(MARKS).lower()
    first = first.removeprefix("the ").removesuffix(" tool").strip(MARKS)
    named = [name for name in names if re.search(rf"\b{re.escape(name)}\b", field, re.IGNORECASE)]
    return named[0] if [first] == [name.lower() for name in named] else field


def unwrapped(text, name):
    """The text, then what is inside its wraps, one after the other: "Call:", then a fence, then tags.

    It ends where another call stands outside the wrap. The caller takes the first text that is a call, so a
    fence inside a call's arguments is never taken for a wrap.
    """
    for _ in range(4):
        yield text.strip().strip("`").strip()
        if not (wrap := WRAP.search(text)):
            break
        start, end = wrap.span(wrap.lastindex)
        outside = f"{text[:start]}\n{text[end:]}"
        if re.search(SECOND_CALL.format(name=re.escape(name)), outside, re.MULTILINE):
            break
        text = text[start:end]
