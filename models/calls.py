"""What models write around a label, a name or a call, and a tool call as text -> data.

A model that should write four plain lines writes "2. **Sub-goal:** ...", a code fence around
everything, or a remark after a name. None of that changes the meaning, so the parsers drop it. What
could be meant in two ways stays as it is, and becomes a parse error.

    'double(number="2")'                                -> "double", {"number": "2"}
    '{"tool": "double", "arguments": {"number": "2"}}'  -> the same
    'double(number=secret)'                             -> ValueError

Models that were trained on tool calls write them in a format of their own. All of these are a name
with arguments in Python, JSON or tags, in a frame of marks:

    Qwen, Hermes    <tool_call>{"name": "double", "arguments": {"number": "2"}}</tool_call>
    Qwen3-Coder     <function=double><parameter=number>2</parameter></function>
    MiniMax         <invoke name="double"><parameter name="number">2</parameter></invoke>
    GLM             <tool_call>double<arg_key>number</arg_key><arg_value>2</arg_value></tool_call>
    Mistral         [TOOL_CALLS][{"name": ...}]  or  [TOOL_CALLS]double[ARGS]{"number": "2"}
    DeepSeek        <｜tool▁call▁begin｜>double<｜tool▁sep｜>{"number": "2"}<｜tool▁call▁end｜>
    Kimi            <|tool_call_begin|>functions.double:0<|tool_call_argument_begin|>{"number": "2"}
    gpt-oss         commentary to=functions.double <|constrain|>json<|message|>{"number": "2"}
    Granite, Phi    <|tool_call|>[{"name": ...}]
    Llama           <|python_tag|>{"name": ..., "parameters": ...}  or  [double(number="2")]
    OpenAI          {"tool_calls": [{"function": {"name": ..., "arguments": "{...}"}}]}

Nothing in a call is ever evaluated: its arguments must be literals.
"""

import ast
import json
import re
from collections.abc import Iterable

# What may stand before a label: a list number, bold. It is matched with the label, or else it would
# end up in the value of the label above.
START = r"^(?:[ \t*#>_`-]|\d+[.)])*"
MARKS = " \t\r\n-*_`'\".!<>()[]{}"  # what may stand around a single word

# A name, or a verdict, ends with its line, or where a remark begins. "(or a calculator)" is not a
# remark but an alternative: it stays part of the name, and no tool has that name.
DOUBT = "no(?=[,.!:;])|not|or|and|but|however|though|although|unless|except"
REMARK = re.compile(rf"(?:[\n(\[:—]| [-–]|[.!] )(?!\W{{0,9}}(?:{DOUBT})\b)", re.IGNORECASE)

# What may stand around a call: a list, the prompt's last label, a fence, tags. Of the last two, the
# end may be missing.
TAG = r"(?:<[|｜]?/?[\w:]{0,20}?(?:tool|action|function_|python_tag)[^<>\n]{0,60}>|\[TOOL_CALLS\])"
WRAP = re.compile(
    r"(?ims)\A\s*\[(?=\s*\{|\w+\()(.*)\]\s*\Z"
    r"|^[*# ]*call:\**(.*)"
    r"|```(?:\w*[ \r]*\n)?(?:(.*)```|(.*))"
    rf"|{TAG}(?:(.*){TAG}|(.*))"
)
# the start of another call
SECOND_CALL = r"""^[^\w\n]*\w+\(|\{{\s*["']|\b{name}\s*\(|<function=|<invoke|<arg_"""

KEYS = {"name": "tool", "tool_name": "tool", "parameters": "arguments"}  # of others' JSON -> ours
# A name with its arguments as JSON, among tags and words that mean nothing; arguments in tags.
NOISE = (
    r"(?:\s|<function=|<invoke name=\"|\"?>|<[^<>=\n]{1,60}>|```\w*|\[CALL_ID\]\w+|\[[A-Z_]+\]"
    r"|to=|functions?\b\.?|:\d+|(?:assistant|commentary|json)\b)*+"
)
NAMED = re.compile(rf"(?s){NOISE}(\w+){NOISE}(\{{.*\}})?{NOISE}")
STRING = re.compile(r"""(["'])(?:\\.|(?!\1)[^\\])*+\1?""", re.DOTALL)  # even with line breaks
TAGGED = re.compile(
    r'(?s)<(?:parameter=|parameter name="|arg_key>)(\w+)(?:"?>|</arg_key>\s*<arg_value>)\n?'
    r"((?:(?!<parameter|<arg_key).)*?)\n?</(?:parameter|arg_value)>"
)


def labelled(text: str, labels: dict[str, str]) -> list[tuple[str, str]]:
    """[(label, the text up to the next label)], in the order of the text.

    labels: {label: a pattern for its spellings}. With {"Tool": "tool", "Sub-goal": "sub[- ]goal"}:
    "1. **Tool:** x\\n2. sub goal: y" -> [("Tool", "x"), ("Sub-goal", "y")]

    A code fence at the end of a value is dropped.
    """
    any_label = "|".join(f"(?:{spellings})" for spellings in labels.values())
    label = START + rf"({any_label})[*_` \t]*[:：][*_`]*"  # ：is the colon of Chinese text
    parts = re.split(label, text, flags=re.IGNORECASE | re.MULTILINE)
    found = []
    for written, value in zip(parts[1::2], parts[2::2], strict=True):
        name = next(n for n in labels if re.fullmatch(labels[n], written, re.IGNORECASE))
        found.append((name, value.strip().removesuffix("```").strip()))
    return found


def plain_name(field: str, names: Iterable[str]) -> str:
    """The one of `names` that a field begins with, if it mentions no other; else the field itself.

    "**python_coder** (it computes)\\n\\nI hope this helps." -> "python_coder"
    "not python_coder"                                      -> "not python_coder"
    """
    first = REMARK.split(field.strip(MARKS))[0].strip(MARKS).lower()
    first = first.removeprefix("the ").removesuffix(" tool").strip(MARKS)
    named = [n for n in names if re.search(rf"\b{re.escape(n)}\b", field, re.IGNORECASE)]
    return named[0] if [first] == [name.lower() for name in named] else field


def read_call(text: str, tool_name: str, names: list[str]) -> tuple[str, dict[str, object]]:
    """(tool name, {argument: literal}), of the text itself or of what is inside its fence or tags.

    tool_name: the planned tool's. names: of its arguments, for those that are given by position.
    ValueError says what is wrong; of several texts, one inside the other, with the last one.
    """
    reason = ""
    for source in unwrapped(text, tool_name):
        try:
            called, arguments = read_source(source, tool_name, names)
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


def read_source(source, tool_name, names):
    """The call of a text that is one call, in any format, and nothing else."""
    if source[:1] == "{":
        return read_json(source)
    named = NAMED.fullmatch(source)
    if named and named[1] == tool_name and named[2]:  # another word: the language of a fence
        arguments = loads(named[2])
        return read_json(named[2]) if "arguments" in arguments else (tool_name, arguments)
    named, pairs = NAMED.fullmatch(TAGGED.sub("", source)), TAGGED.findall(source)
    if named and not named[2] and pairs:
        return named[1], unique_dict(pairs)
    return read_python(source, names)


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
            named = [(keyword.arg, keyword.value) for keyword in keywords]
        case [ast.Expr(ast.Call())]:
            raise ValueError("there must be one call of the tool by its name")
        case _:
            raise ValueError("there must be one call and nothing else")
    if len(args) > len(names):
        raise ValueError(f"the tool has no argument number {len(args)}")
    if None in dict(named):
        raise ValueError("each argument must be written out: no **")
    pairs = [*zip(names, args, strict=False), *named]
    try:
        literals = [(name, ast.literal_eval(value)) for name, value in pairs]
    except (ValueError, TypeError) as why:  # TypeError: a literal such as {[]: 1}
        raise ValueError("the arguments must be literals, not code to run") from why
    return called, unique_dict(literals)


def with_escaped_breaks(source):
    """f(x="one<line break>two") -> f(x="one\\ntwo")"""
    escape = lambda string: re.sub(r"(\\.)|\n", lambda m: m[1] or r"\n", string[0], flags=re.S)
    return STRING.sub(escape, source)


def read_json(source):
    """The call of {"tool": name, "arguments": {...}}, which may be the value of "function", or the
    only one of "tool_calls". As in OpenAI's API, the arguments may be a string of JSON."""
    data = loads(source)
    for key in ("tool_calls", "function"):
        match data.get(key):
            case [dict(inner)] | dict(inner):
                data = unique_dict([*data.items(), *inner.items()])
    # Renamed by KEYS: {"name": ..., "tool": ...} has the same key twice.
    data = unique_dict([(KEYS.get(key, key), value) for key, value in data.items()])
    called, arguments = data.get("tool"), data.get("arguments")
    if isinstance(arguments, str):
        arguments = loads(arguments)
    if not isinstance(called, str) or not isinstance(arguments, dict):
        raise ValueError('JSON needs the keys "tool" and "arguments"')
    return called, arguments


def loads(source):
    """json.loads(), without a name that comes twice; line breaks inside of strings are allowed."""
    return json.loads(source, object_pairs_hook=unique_dict, strict=False)


def unique_dict(pairs):
    """dict(pairs), or ValueError if a name comes twice, because either value could be meant."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an argument is given twice")
    return dict(pairs)
