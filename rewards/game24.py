"""The Game of 24: an expression of value 24 from the question's numbers, each of them used once.

Every solution is right, not only that of the gold. What can be read as an equation is computed
exactly; what cannot be read is left to the judge.
"""

import ast
import re
from fractions import Fraction
from operator import add, mul, sub, truediv

from rewards.plain import folded, undressed

LABEL = re.compile(
    r"(?i)^[*_# ]*(?:(?:here is|one|an?|the|my|possible|valid|correct|final) )*"
    r"(?:solution|expression|equation|answer|result)(?: is\b|[:*_\n])[:*_]*"
)
# How models write an equation -> as Python writes it. Fractions of four numbers nest at most three
# deep; behind a digit \frac may be a mixed number, so it is not read.
FRACTION = r"(?<![0-9])(?<![0-9] )\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))"
EQUATION = [
    *[FRACTION] * 3,
    (r"\\boxed|```[a-z]*|[$`]|\\[()\[\]]|\\(?=\*)", ""),
    (r"\\(?:times|cdot|ast)(?![a-z])|(?<=[0-9)\]}])\s*[xX]\s*(?=[0-9(\[{])", "*"),
    (r"\\div(?![a-z])", "/"),
    (r"\s+(?==)|(?<==)\s+", " "),
    (r"((?:^|=) *[0-9]+)\.0+(?= *(?:=|$))", r"\1"),  # "= 24.0"
]
SIGNS = str.maketrans("×·∗⋅•∙✕✖⨯÷∕⁄➗[]{}", "*********////()()")
PRODUCT = re.compile(r"(?<=[0-9]) *(?=\()|(?<=\))(?=[0-9(])")  # 4(1+2+3), without a sign
OPERATORS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv, ast.MatMult: mul}


def game_of_24(numbers, response):
    """True for a solution, False for what certainly is none, None for what cannot be read.

    (1, 2, 3, 4):  "(1+2+3)×4", "4(1+2+3) = 6*4 = 24" -> True
        "4*6", "1+2+3+4", "24", "1, 2, 3, 4" -> False
        "1*2*3*4 or 4!", "99**98**97", "1*2*3*4 = 25" (which side is meant?) -> None
    """
    text = undressed(LABEL.sub("", undressed(response)))
    for pattern, plain in EQUATION:
        text = re.sub(pattern, plain, text.strip())
    text = text.translate(SIGNS)
    if re.fullmatch(r"[0-9,;()= ]+", text) and not PRODUCT.search(text):
        return False  # numbers alone
    if not numbers or not re.fullmatch(r"[0-9+\-*/()= ]{1,200}", text):  # also limits the depth
        return None
    try:
        sides = [evaluated(side) for side in re.split("=+", PRODUCT.sub("@", text))]
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError):
        return None
    values = {value for value, _ in sides}
    found = {value for value, used in sides if used == sorted(numbers)}
    if not found:
        return False if len(values) == 1 else None  # "1+2 = 3+3 = 6*4 = 24" are steps
    return values == {24} or (None if 24 in found else False)


def evaluated(text):
    """(value, the sorted numbers it uses) of an expression. Python parses it, but never runs it.

    "4@(1+2+3)" -> (24, [1, 2, 3, 4]): @ is a product without a sign. SyntaxError for any other
    operator, and for "8/4@(1+2)", which may be 6 or 2/3.
    """
    used = []

    def value_of(node):
        if isinstance(node, ast.Constant):
            used.append(node.value)
            return Fraction(node.value)
        if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
            raise SyntaxError("only + - * / on whole numbers")
        quotient = isinstance(getattr(node.left, "op", 0), ast.Div)
        bare = node.left.col_offset == node.col_offset  # it is not in parentheses
        if isinstance(node.op, ast.MatMult) and quotient and bare:
            raise SyntaxError("the product may belong to the denominator")
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))

    value = value_of(ast.parse(text.strip(), mode="eval").body)
    return value, sorted(used)


def numbers_to_use(question):
    """The numbers of the gold ("1 1 1 8", "8*(1+1+1)"), or the question's only four in a row."""
    sides = undressed(question.answer).split("=")
    found = max((re.findall(r"[0-9]{1,9}", side) for side in sides), key=len)
    if len(found) < 2:
        number, gap = r"(?<![\w.])[0-9]{1,9}(?!\w|\.[0-9])", r"(?:\s*,)?\s+(?:and\s+)?|,"
        runs = re.findall(rf"{number}(?:(?:{gap}){number}){{3,}}", folded(question.question))
        found = re.findall("[0-9]+", " ".join(set(runs)))
        found = found if len(found) == 4 else []
    return [int(number) for number in found]
