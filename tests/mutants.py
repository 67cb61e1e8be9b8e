"""Change a function in one place at a time: another operator or comparison, a dropped operand,
method or minus sign, min for max, a number one more or less. Tests that use this must notice each
change. Annotations and the strictness of zip() are left alone: they compute nothing."""

import ast
import copy

OTHERS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Gt: ast.Lt,
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPPOSITE = {"min": "max", "max": "min"}


def with_field(node, field, value):
    """A copy of the node with another value in this field."""
    new = copy.copy(node)
    setattr(new, field, value)
    return new


def changes(node):
    """What may take the place of this expression."""
    match node:
        case ast.BinOp(left, op, right):
            yield from (left, right, with_field(node, "op", OTHERS[type(op)]()))
        case ast.Compare(_, [op]):
            yield with_field(node, "ops", [OTHERS[type(op)]()])
        case ast.UnaryOp():
            yield node.operand
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Constant(int() | float() as number):
            yield from (ast.Constant(number + 1), ast.Constant(number - 1))
        case ast.Name(name) if name in OPPOSITE:
            yield with_field(node, "id", OPPOSITE[name])
        case ast.Attribute(_, name) if name in OPPOSITE:
            yield with_field(node, "attr", OPPOSITE[name])
        case ast.Call(ast.Attribute(value)) if (
            not isinstance(value, ast.Name) or value.id != "torch"
        ):
            yield value


def mutants(source, functions):
    """(function, the changed line, the whole source), for each change in these functions."""
    tree = ast.parse(source)
    for function in (node for node in tree.body if getattr(node, "name", "") in functions):
        for parent in list(ast.walk(function)):
            for field, value in ast.iter_fields(parent):
                if field in ("annotation", "returns") or getattr(parent, "arg", "") == "strict":
                    continue
                for i, node in enumerate(value if isinstance(value, list) else [value]):
                    for new in changes(node):
                        setattr(
                            parent,
                            field,
                            [*value[:i], new, *value[i + 1 :]] if isinstance(value, list) else new,
                        )
                        yield function.name, ast.unparse(parent), ast.unparse(tree)
                        setattr(parent, field, value)
