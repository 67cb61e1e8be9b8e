"""What models write around a label, a name or a call, and a tool call as text -> data.

A model that should write four plain lines writes "2. **Sub-goal:** ...", a code fence around
everything, or a remark after a name. None of that changes the meaning, so the parsers drop it. What
could be meant in two ways stays as it is, and becomes a parse error.

    'double(number="2")'                                -> "double", {"number": "2"}
    '{"tool": "double", "arguments": {"number": "2"}}'  -> the same
    'double(number=secret)'                             -> ValueError

Nothing in a call is ever evaluated: its arguments must be literals.
"""

import ast
import json
import re

# What may stand before a label: a list number, bold. It is matched with the label, or else it would
# end up in the value of the label above.
START = r"^(?:[ \t*#>_`-]|\d+[.)])*"
MARKS = " \t\r\n-*_`'\".!<>()[]{}"  # what may stand around a single word

# A name, or a verdict, ends with its line, or where a remark begins. "(or a calculator)" is not a
# remark but an alternative: it stays part of the name, and no tool has that name.
DOUBT = "no(?=[,.!:;])|not|or|and|but|however|though|although|unless|except"
REMARK = re.compile(rf"(?:[\n(\[:—]| [-–]|[.!] )(?!\W{{0,9}}(?:{DOUBT})\b)", re.IGNORECASE)

# What may stand around a call: the prompt's last label, a fence, tags. The end may be missing.
WRAP = re.compile(
    r"(?ims)^[*# ]*call:\**(.*)"
    r"|```(?:\w*[ \r]*\n)?(?:(.*)```|(.*))"
    r"|<tool_call>(?:(.*)</tool_call>|(.*))"
)
SECOND_CALL = r"""^[^\w\n]*\w+\(|\{{\s*["']|\b{name}\s*\("""  # the start of another call

KEYS = {"name": "tool", "parameters": "arguments"}  # keys of Qwen's and Llama's JSON -> ours


def labelled(text, labels):
    """[(label, the text up to the next label)], in the order of the text.

    labels: {label: a pattern for its spellings}. With {"Tool": "tool", "Sub-goal": "sub[- ]goal"}:
    "1. **Tool:** x\\n2. sub goal: y" -> [("Tool", "x"), ("Sub-goal", "y")]

    A code fence at the end of a value is dropped.
    """
    any_label = "|".join(f"(?:{spellings})" for spellings in labels.values())
    label = START + rf"({any_label})[*_` \t]*[:：][*_`]*"  # ：is the colon of Chinese text
    parts = re.split(label, text, flags=re.IGNORECASE | re.MULTILINE)
    found = []
    for written, value in zip(parts[1::2], parts[2::2]):
        name = next(n for n in labels if re.fullmatch(labels[n], written, re.IGNORECASE))
        found.append((name, value.strip().removesuffix("```").strip()))
    return found


def plain_name(field, names):
    """The one of `names` that a field begins with, if it mentions no other; else the field itself.

    "**python_coder** (it computes)\\n\\nI hope this helps." -> "python_coder"
    "not python_coder"                                      -> "not python_coder"
    """
    first = REMARK.split(field.strip(MARKS))[0].strip(MARKS).lower()
    first = first.removeprefix("the ").removesuffix(" tool").strip(MARKS)
    named = [n for n in names if re.search(rf"\b{re.escape(n)}\b", field, re.IGNORECASE)]
    return named[0] if [first] == [name.lower() for name in named] else field


def read_call(text, tool_name, names):
    """(tool name, {argument: literal}), of the text itself or of what is inside its fence or tags.

    tool_name: the planned tool's. names: of its arguments, for those that are given by position.
    ValueError says what is wrong; of several texts, one inside the other, with the last one.
    """
    reason = ""
    for source in unwrapped(text, tool_name):
        try:
            called, arguments = (read_json if source[:1] == "{" else read_python)(source, names)
            # Refused here and not later in a tool: what cannot be written as text, such as half of
            # a surrogate pair, a number of 5,000 digits, a list that is too deep.
            for word in (*arguments, *arguments.values()):
                str(word).encode()
            return called, arguments
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # of json and ast
            reason = getattr(error, "msg", str(error)) or type(error).__name__  # .msg: no position
    raise ValueError(reason)


def unwrapped(text, name):
    """Yield the text, then what is inside its wrap ("Call:", a fence, tags), and so on.

    The caller takes the first text that is a call, so a fence inside of an argument is never
    unwrapped. If another call is outside the wrap, nothing is unwrapped: either could be meant.
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


def read_python(source, names):
    """The call of a text that is name(...) and nothing else."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        # Models also break lines inside of quotes that Python allows on a single line only. (Not
        # with a fence in it, which may be the end of a call that lacks its own.)
        if "```" in source:
            raise
        body = ast.parse(with_escaped_breaks(source)).body
    match body:
        case [ast.Expr(ast.Call(ast.Name(called), args, keywords))]:
            pairs = [*zip(names, args), *((keyword.arg, keyword.value) for keyword in keywords)]
        case [ast.Expr(ast.Call())]:
            raise ValueError("there must be one call of the tool by its name")
        case _:
            raise ValueError("there must be one call and nothing else")
    if len(args) > len(names):
        raise ValueError(f"the tool has no argument number {len(args)}")
    if not all(keyword.arg for keyword in keywords):
        raise ValueError("each argument must be written out: no **")
    try:
        literals = [(name, ast.literal_eval(value)) for name, value in pairs]
    except (ValueError, TypeError) as why:  # TypeError: a literal such as {[]: 1}
        raise ValueError("the arguments must be literals, not code to run") from why
    return called, unique_dict(literals)


def with_escaped_breaks(source):
    """f(x="one<line break>two") -> f(x="one\\ntwo")"""
    written, quote, escaped = [], "", False  # quote: the one that began this string; "" outside
    for c in source:
        written.append("\\n" if c == "\n" and quote and not escaped else c)
        if escaped or c == "\\":
            escaped = not escaped
        elif c == quote:
            quote = ""
        elif not quote and c in "'\"":
            quote = c
    return "".join(written)


def read_json(source, names):
    """The call of {"tool": name, "arguments": {...}}. As in OpenAI's API, the arguments may be a
    string of JSON. Line breaks inside of strings are allowed (strict=False)."""
    data = json.loads(source, object_pairs_hook=unique_dict, strict=False)
    # Renamed by KEYS: {"name": ..., "tool": ...} has the same key twice.
    data = unique_dict([(KEYS.get(key, key), value) for key, value in data.items()])
    called, arguments = data.get("tool"), data.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments, object_pairs_hook=unique_dict, strict=False)
    if not isinstance(called, str) or not isinstance(arguments, dict):
        raise ValueError('JSON needs the keys "tool" and "arguments"')
    return called, arguments


def unique_dict(pairs):
    """dict(pairs), or ValueError if a name comes twice, because either value could be meant."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an argument is given twice")
    return dict(pairs)
