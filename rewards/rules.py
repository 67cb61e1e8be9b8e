"""The rules that decide, before any judge, whether an answer is right and so gets the reward 1.

No judge corrects a True, and a policy finds whatever a reward forgives. So True is only for what is certainly
the same, False only for what is certainly different, and all else is None: a judge decides, and without a
judge it counts as wrong. Rules search for nothing inside a sentence. They compare with the gold, which is

    a number   the same value and unit: "1,234 km" = "1234 km", "3/4" = 0.75. Another whole number is wrong.
    a list     the same numbers in the same order and brackets: "(2,7)" = "(2, 7)", "3 and 5" = "3, 5".
    an option  its letter, its text, or both when they agree. No response falls back to an option.
    a date     the same day: "2018-03-29" = "March 29, 2018" = "29 March 2018".
    a text     the same words and signs. "Paris" = "paris", but "CO" is not "Co".

Dropped, since a judge does it better: other units, percentages as numbers, rounding, algebra, number words,
abbreviations, accents, other spellings, partial credit."""

import ast
import contextlib
import re
from datetime import datetime
from fractions import Fraction
from operator import add, mul, sub, truediv
from string import ascii_uppercase

LIMIT = 2_000  # characters of a gold or a response; a longer response is wrong, so every check is fast
# What models put around an answer: an opening, a wrapper (math, markdown, quotes), LaTeX without a value.
OPENING = re.compile(r"^(?:(?:the )?(?:final |correct )?(?:answer|option|choice)(?: is:?|:) "
                     r"|(?:option|choice) (?=\(?[a-z]\b))", re.I)
WRAPPED = re.compile(r"""\${1,2}([^$]+)\${1,2}|\\\((.+)\\\)|\\\[(.+)\\\]|\\boxed\{(.+)\}"""
                     r"""|\*\*((?:(?!\*\*).)+)\*\*|\*([^*]+)\*|`([^`]+)`|"([^"]+)"|“([^”]+)”""", re.S)
LATEX = [(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1"), (r"\\(?:left|right)(?=\\?[()\[\]{}|])", ""),
         (r"\\([%${}])", r"\1"), (r"\\[dt]frac", r"\\frac")]
LETTERED = re.compile(r"[(\[]?([A-Za-z])[)\].:]*(?:\s(.+))?", re.S)  # an option: "B", "(b)", "B. Paris"
NUMBER = re.compile(r"""(?P<sign>[-+]?) (?P<currency>[$€£¥]?) (?P<digits>
        [0-9]+/[1-9][0-9]*                                                     # 3/4
      | (?!0[0-9]) (?=\.?[0-9])                                                # not 007, a code
        (?:[1-9][0-9]{0,2}(?:[, ][0-9]{3})+|[0-9]+)? (?:\.0{0,2}|\.[0-9]*[1-9])?  # 1,234.5; not 3.10
    ) (?P<unit>\ ?%|\ [^\W\d_]+)?""", re.X)                                    # "5%", "5 km"
EQUALS_24 = re.compile(r"\s*=\s*24$|^24\s*=\s*")
DATES = "%Y-%m-%d", "%B %d, %Y", "%B %d %Y", "%d %B %Y"


def decide(question, response):
    """True or False where the rules can tell; None where only a judge could. Never raises, always fast.

    gold "26": "26.0", "The answer is 26." -> True;  "27" -> False;  "26 or 27", "about 26" -> None
    gold "B" of ("London", "Paris"): "(b)", "B) Paris", "Paris" -> True;  "A" -> False;  "B) London" -> None
    gold "Paris": "paris.", "The Paris" -> True;  "London", "not Paris" -> None, never False
    every gold: "" and a response of more than LIMIT characters -> False
    """
    response = response.strip()
    if not response or len(response) > LIMIT:
        return False
    if question.kind == "gameof24":
        return game_of_24(numbers_to_use(question), response)
    golds = [gold.strip() for gold in (question.answer, *question.aliases) if gold.strip()]
    if question.choices:
        named, *options = (named_option(text, question.choices) for text in (response, *golds))
        verdicts = {None if None in (named, option) else named == option for option in options}
    else:
        verdicts = {same(gold, response) for gold in golds}
    if True in verdicts:
        return True
    return None if None in verdicts else False


def game_of_24(numbers, response):
    """True for an expression of value 24 from exactly these numbers, each once, + - * / and parentheses.

    (1, 2, 3, 4), "(1+2+3)×4 = 24" -> True;  "4*6", "1*2*3*4 or 4!", "99**98**97" -> False
    """
    text = undressed(response)
    for sign, plain in (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("\n", " ")):
        text = text.replace(sign, plain)
    for _ in range(3):  # fractions of four numbers nest at most three deep
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
    text = re.sub(r"(?<=[0-9)\]])\s*[xX]\s*(?=[0-9(\[])", "*", text)
    text = EQUALS_24.sub("", text.translate(str.maketrans("×·∗⋅÷[]", "****/()")))
    if not re.fullmatch(r"[0-9+\-*/() ]{1,200}", text):  # the length also limits the depth
        return False
    try:
        expression = ast.parse(text.strip(), mode="eval").body
        used = [node.value for node in ast.walk(expression) if isinstance(node, ast.Constant)]
        return value_of(expression) == 24 and sorted(used) == sorted(numbers)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError):
        return False


def value_of(node):
    """The value of a parsed expression. Python does not evaluate it: ** and unary minus are not allowed."""
    operators = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in operators:
        raise SyntaxError("only + - * / on whole numbers")
    return operators[type(node.op)](value_of(node.left), value_of(node.right))


def numbers_to_use(question):
    """The numbers of a Game of 24: those of the gold ("1 1 1 8"), or the question's only four in a row."""
    found = re.findall(r"[0-9]{1,9}", EQUALS_24.sub("", undressed(question.answer)))
    if len(found) < 2:
        number = r"(?<![\w.])[0-9]{1,9}(?!\w|\.[0-9])"
        runs = (rf"{number}(?:{gap}{number}){{3,}}" for gap in (r"\s+", r"\s*,\s*(?:and\s+)?"))
        found = re.findall("[0-9]+", " ".join({*re.findall("|".join(runs), question.question)}))
        found = found if len(found) == 4 else []
    return [int(number) for number in found]


def named_option(text, choices):
    """The index of the option that a text names; None for none or several, as "B) London" where B is Paris.

    Options with the same text (gpqa: "A. 200 mL", "B. 200 mL") count as the first of them.
    """
    labels = [re.fullmatch(rf"\(?{letter}[.):]\s(.+)", choice.strip(), re.S)
              for letter, choice in zip(ascii_uppercase, choices)]
    options = [label[1] for label in labels] if all(labels) else choices  # they may have letters already
    m = LETTERED.fullmatch(undressed(text))
    letter, after = (m[1].upper(), m[2]) if m else ("", "")
    named = {options.index(option) for own, option in zip(ascii_uppercase, options)
             if same(option, text) or (own == letter and (not after or same(option, after)))}
    return named.pop() if len(named) == 1 else None


def same(gold, response):
    """True if both are certainly the same, False for two different whole numbers, else None."""
    if gold == response:
        return True
    gold, response = undressed(gold), undressed(response)
    if any(read(gold) and read(gold) == read(response) for read in (words, date, quantities)):
        return True
    expected, given = quantity(gold), quantity(response)
    if expected and given and expected[1] == given[1]:
        whole = expected[0].denominator == given[0].denominator == 1
        return False if whole else None  # 0.33 may be 1/3, rounded
    return None


def words(text):
    """The words of a text. A leading The does not count, nor does the case of words like Paris.

    "The Blue Whale" -> ["blue", "whale"]    "CO" -> ["CO"]    "5 Mol" -> ["5", "Mol"]
    """
    tokens = re.sub(r" ([-+*/^=<>≤≥→]) ", r"\1", text).split()  # "x + 1" is "x+1"
    if not re.search("[0-9]", text):  # a unit or a symbol, where case counts, has a number beside it
        tokens = [token.lower() if is_word(token.rstrip(",")) else token for token in tokens]
    return tokens[1:] if tokens[:1] == ["the"] and len(tokens) > 1 else tokens


def is_word(token):
    """True for a word like Paris, False for a symbol like CO, Hf or mRNA."""
    return token == "No" or token.isalpha() and token.istitle() and len(token) > 2


def date(text):
    """The day of "March 29, 2018", "29 March 2018" or "2018-03-29"; None for any other text."""
    for shape in DATES:
        with contextlib.suppress(ValueError):
            return datetime.strptime(text, shape)
    return None


def quantities(text):
    """A list of numbers with its brackets, or None: "3, 5 and 7" -> ("", [3, 5, 7]), "26" -> ("", [26])."""
    brackets = text[:1] + text[-1:]
    brackets, inside = (brackets, text[1:-1]) if brackets in ("()", "[]", "{}") else ("", text)
    if not brackets and quantity(text):
        return "", [quantity(text)]  # 1,234 is one number
    inside = re.sub(",? and ", ", ", inside)
    found = [quantity(item) for item in inside.split(", " if ", " in inside else ",")]
    return None if None in found else (brackets, found)


def quantity(text):
    """(value, unit) of a text that is one number, or None.

    "1,234", "1 234" -> (1234, "")    "\\frac{3}{4}" -> (3/4, "")    "$5 million" -> (5, "$ million")
    "1,23", "0,500", "5.000" (5000 in German), "26 or 27", "2026-01-05", "3x", "6/8", "3.10" -> None
    """
    m = NUMBER.fullmatch(re.sub(r"^([-+]?)\\frac\{([0-9]+)\}\{([0-9]+)\}$", r"\1\2/\3", text))
    if m is None or len(text) > LIMIT:  # int() refuses thousands of digits
        return None
    digits = re.sub("[, ]", "", m["digits"])
    value = Fraction(digits)
    if "/" in digits and str(value) != digits:  # 6/8 may be a time signature, 12/10 a date
        return None
    unit = m["currency"] + (m["unit"] or "").replace(" %", "%")
    return (-value if m["sign"] == "-" else value), unit


def undressed(text):
    """The text without LaTeX, markdown, quotes, "The answer is" and a final full stop: "**$5$.**" -> "5"."""
    lines = text.translate(str.maketrans("−–’\t", "--'\n")).splitlines()
    text = "\n".join(" ".join(line.split()) for line in lines)  # lines "1" and "234" are not 1 234
    for pattern, plain in LATEX:
        text = re.sub(pattern, plain, text)
    for _ in range(4):  # they may be nested
        text = re.sub(r"(?<=[^.])\.$", "", OPENING.sub("", text.strip(), count=1))
        m = WRAPPED.fullmatch(text)
        text = m[m.lastindex] if m else text
    return text
