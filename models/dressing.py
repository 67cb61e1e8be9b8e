"""Dressing: what real models write around a plan or a call, and how the parsers see through it.

A model that should write four plain lines writes "2. **Sub-goal:** ...", a code fence around everything, or a
remark after a name. None of that changes the meaning, so the parsers drop it. What could be meant in two ways
stays as it is, and becomes a parse error.
"""

import re

# What may stand before a label: a list number, bold. It is matched with the label, or else it would end up in
# the value of the label above.
START = r"^(?:[ \t*#>_`-]|\d+[.)])*"
MARKS = " \t\r\n-*_`'\".!<>()[]{}"  # what may stand around a single word

# A name, or a verdict, ends with its line, or where a remark begins. "(or a calculator)" is not a remark but
# an alternative: it stays part of the name, and no tool has that name.
DOUBT = "no(?=[,.!:;])|not|or|and|but|however|though|although|unless|except"
REMARK = re.compile(rf"(?:[\n(\[:—]| [-–]|[.!] )(?!\W{{0,9}}(?:{DOUBT})\b)", re.IGNORECASE)

# What may stand around a call: the prompt's last label, a fence, tags. The fence or tag may lack its end.
WRAP = re.compile(
    r"(?ims)^[*# ]*call:\**(.*)"
    r"|```(?:\w*[ \r]*\n)?(?:(.*)```|(.*))"
    r"|<tool_call>(?:(.*)</tool_call>|(.*))")
SECOND_CALL = r"""^[^\w\n]*\w+\(|\{{\s*["']|\b{name}\s*\("""  # the start of another call


def labelled(text, labels):
    """[(label, the text up to the next label)], in the order of the text. labels: {label: its spellings}.

    "1. **Tool:** x\\n2. sub goal: y" -> [("Tool", "x"), ("Sub-goal", "y")]
                                       for the labels {"Tool": "tool", "Sub-goal": "sub[- ]goal"}

    A code fence at the end of a value is dropped.
    """
    any_label = "|".join(f"(?:{spellings})" for spellings in labels.values())
    # ：is the colon of Chinese text
    parts = re.split(START + rf"({any_label})[*_` \t]*[:：][*_`]*", text, flags=re.IGNORECASE | re.MULTILINE)
    found = [next(label for label in labels if re.fullmatch(labels[label], written, re.IGNORECASE))
             for written in parts[1::2]]
    values = [value.strip().removesuffix("```").strip() for value in parts[2::2]]
    return list(zip(found, values))


def plain_name(field, names):
    """The one of `names` that a field begins with, if the field mentions no other; else the field itself.

    "**python_coder** (it computes)\\n\\nI hope this helps." -> "python_coder"
    "not python_coder"                                      -> "not python_coder"
    """
    first = REMARK.split(field.strip(MARKS))[0].strip(MARKS).lower()
    first = first.removeprefix("the ").removesuffix(" tool").strip(MARKS)
    named = [name for name in names if re.search(rf"\b{re.escape(name)}\b", field, re.IGNORECASE)]
    return named[0] if [first] == [name.lower() for name in named] else field


def unwrapped(text, name):
    """Yield the text, then what is inside its wrap ("Call:", a fence, tags), then what is inside that, ...

    The caller takes the first text that is a call, so a fence inside a call's arguments is never unwrapped.
    If another call is outside the wrap, nothing is unwrapped: either of the two could be meant.
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
