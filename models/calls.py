"""A tool call as text -> data. Nothing in the text is ever evaluated: its arguments must be literals.

    'python_coder(code="print(6)")'                                -> "python_coder", {"code": "print(6)"}
    '{"tool": "python_coder", "arguments": {"code": "print(6)"}}'  -> the same
    'python_coder(code=secret)'                                    -> ValueError
"""

import ast
import json

from models.dressing import unwrapped

KEYS = {"name": "tool", "parameters": "arguments"}  # keys of Qwen's and Llama's JSON -> those read here


def read_call(text, tool_name, names):
    """(tool name, {argument: literal}), of the text itself or of what is inside its fence or tags.

    tool_name: the planned tool's. names: of its arguments, for those that are given by position. ValueError
    says what is wrong; of several texts, one inside the other, with the last one."""
    reason = ""
    for source in unwrapped(text, tool_name):
        read = read_json if source.startswith("{") else read_python
        try:
            called, arguments = read(source, names)
            must_be_writable(arguments)
            return called, arguments
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # of json and ast
            reason = getattr(error, "msg", str(error)) or type(error).__name__  # .msg: without the position
    raise ValueError(reason)


def read_python(source, names):
    """The call of a text that is name(...) and nothing else. Any other text raises an error, here and in
    read_json()."""
    match parsed(source).body:
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


def parsed(source):
    """ast.parse(source). Models also write programs in quotes that Python allows on a single line only: if it
    does not parse, a line break inside of quotes is read as the two characters \\n. (Not with a code fence
    in it, which may be the end of a call that lacks its own.)"""
    try:
        return ast.parse(source)
    except SyntaxError:
        if "```" in source:
            raise
        return ast.parse(with_escaped_breaks(source))


def with_escaped_breaks(source):
    """f(x="one<line break>two") -> f(x="one\\ntwo")"""
    written, quote, escaped = [], "", False  # quote: the one that began the present string; "" outside
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
    """The same for {"tool": name, "arguments": {...}}. As in OpenAI's API, the arguments may be a string of
    JSON. strict=False: line breaks inside of strings are allowed."""
    data = json.loads(source, object_pairs_hook=unique_dict, strict=False)
    # Renamed by KEYS: {"name": ..., "tool": ...} has the same key twice, which unique_dict() refuses.
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


def must_be_writable(arguments):
    """Raises an error, here and not later in a tool, for what cannot be written as text: half of a surrogate
    pair, a number of 5 000 digits, a list that is too deep."""
    for word in (*arguments, *arguments.values()):
        str(word).encode()
