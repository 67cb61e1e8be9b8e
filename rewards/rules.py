"""Questions, and the rules that say whether an answer is right: the outcome reward R in {0, 1}.

A task file is JSONL, one question a line; only the first two keys are needed, unknown ones are ignored:

    {"question": "Capital of France?", "answer": "Paris", "aliases": ["Paris, France"], "choices": [], "id": "7", "kind": ""}

An answer that is a worked solution as in GSM8K, with a last line "#### 29", stands for that line's 29.

One principle decides every doubtful case: AMBIGUITY IS WRONG. A policy finds whatever a reward forgives, so a response is read
whole or not at all. Nothing is searched for inside a sentence; only an opening such as "The answer is" is set aside. By gold:

    a number   by value, exactly: "1,234" = 1234, "3/4" = 0.75, "50%" = 0.5 but not 50; 3.14 is not 3.14159.
               A unit may be left out; a different one is wrong, even if it converts. Words ("twenty-six") are not read.
    a list     "3, 5", "(3, 5)" and "3 and 5" are one list, in order. A comma before three digits groups thousands, except
               in brackets, where it separates. Two kinds of brackets ("(0, 1)", "[0, 1]") differ.
    an option  a letter, the option's text, or both when they agree. Never a fallback option.
    a formula  character by character, spaces and LaTeX dressing aside.
    a text     equal after normalise(), to the answer or to an alias.

The rules know when they do not know. decide() has three values: True, False, and None where only a judge could tell: a gold text
or formula that the response does not equal ("NYC" for "New York City", "2x" for "x+x"), a gold number or list and a response that
is none ("twenty-six" for "26"), options and a response that names no single one of them ("the capital of France"). A readable
different number, another option, an empty response are False: no judge is asked. mark() is the reward without a judge: decide()
is True. So None costs a rollout nothing but the chance that a judge would have forgiven it.

Dropped: symbolic algebra, rounding, unit conversion, partial credit.
"""

import ast
import re
import unicodedata
from collections import Counter
from fractions import Fraction
from operator import add, mul, sub, truediv


LIMIT = 2_000     # characters of a gold or a response: a longer one is not an answer, and this bounds the work below
DIGITS = 600      # characters of a number, and its largest power of ten: far below where Python's int() refuses
ASIDE = re.compile(r"(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:(?:final|correct)\s+)?(?:answer|option|choice)"
                   r"(?:\s+is\b|\s*[:=])\s*:?\s*(?=\S)|(?:option|choice|answer)\s+(?=\(?[a-z]\b)", re.I)
MATH = re.compile(r"[\\^=<>|{}_√∞π]|[+*]\s*[\w(]|[0-9a-z)]/[0-9(]|[0-9)]\(|^[\[(].*,.*[\])]$", re.S)
WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = re.compile(rf"""(?P<sign>[-+]?)(?:(?P<money>(?:US)?\$|[€£¥])\s?)?(?:
      (?:(?P<mixed>[0-9]+)\s)?(?P<top>{WHOLE})\s?/\s?(?P<bottom>{WHOLE})                  # 3/4, 1 3/4
    | 10\^\{{?(?P<power>[-+]?[0-9]+)\}}?                                                  # 10^3
    | (?P<decimal>{WHOLE}(?:\.[0-9]*)?|\.[0-9]+)                                          # 1,234.5
      (?:[eE](?P<e>[-+]?[0-9]+)|\s?[×x*·]\s?10\^\{{?(?P<ten>[-+]?[0-9]+)\}}?)?            # e3, × 10^3
    )""", re.X)
SCALE = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
UNITS = {name: line.split(", ")[0] for line in (          # spellings of one unit; its first name stands for all
    "km, kilometer, kilometers, kilometre, kilometres", "m, meter, meters, metre, metres", "cm, centimeters, centimetres",
    "mm, millimeters, millimetres", "mile, miles, mi", "foot, feet, ft", "inch, inches", "kg, kilogram, kilograms, kilogramme, kilogrammes",
    "g, gram, grams", "lb, lbs", "tonne, tonnes", "L, liter, liters, litre, litres", "year, years, yr", "month, months", "week, weeks", "day, days",
    "h, hour, hours, hr, hrs", "min, minute, minutes, mins", "second, seconds, sec, secs", "dollar, dollars, USD, US$, $", "euro, euros, EUR, €",
    "pound, pounds", "£, GBP, pounds sterling", "yen, JPY, ¥", "cents", "degree, degrees, °", "°C, degrees Celsius", "°F, degrees Fahrenheit",
    "km/h, kilometers per hour", "mph, miles per hour", "m/s, meters per second", "m/s^2", "m^2, square meters", "km^2, square kilometers",
    "cm^2", "cm^3", "m^3, cubic meters", "N, newtons", "J, joules", "kJ", "W, watts", "kW", "V, volts", "Hz", "eV", "MeV", "mol"
    ) for name in line.split(", ")}
ALIKE = {"pound", "£"}, {"pound", "lb"}                         # of money or of weight: both are called so
DOUBTED = {"degree", "°C"}, {"degree", "°F"}                   # one of them says less
FOLDED = {name.lower(): unit for name, unit in UNITS.items() if len(name) > 1}   # "KM"; but never n for N
NOT_NOUNS = set("times plus minus versus less always does was has perhaps cos dozens hundreds thousands millions billions trillions halves "
                "thirds quarters fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths".split())


def is_right(question, response: str) -> bool:
    """R by the rules alone: is this response, the final answer alone, right? Never raises, and answers at once.

    gold "26": "26", "26.0", "26 protons", "The answer is 26." -> True;  "not 26", "about 26", "26 or 27", "" -> False
    gold "B" of ("London", "Paris"): "B", "(b)", "B) Paris", "Paris", "option B" -> True;  "B) London", "A or B" -> False
    gold "Paris": "paris.", "The Paris" -> True;  "not Paris", "Paris or London" -> False
    """
    return decide(question, response) is True


def decide(question, response: str) -> bool | None:
    """True or False where the rules can tell, None where only a judge could: they could not read the response in the gold's kind.

    gold "26": "26" -> True;  "27", "26%" -> False;  "26 or 27", "twenty-six", "about 26" -> None
    gold "B" of ("London", "Paris"): "B" -> True;  "A", "London" -> False;  "A or B", "B) London", "the capital of France" -> None
    gold "Paris": "paris." -> True;  "London", "not Paris" -> None;  for every gold, "" and an endless response -> False
    """
    if question.kind == "gameof24":
        return game_of_24(_numbers_of(question), response)                       # an expression has the value 24, or it has not
    response = response.strip()
    if not response or len(response) > LIMIT or len(_characters(response)) > LIMIT:   # one ﷺ unfolds to eighteen
        return False
    golds = [gold for gold in (answer.strip() for answer in (question.answer, *question.aliases)) if gold]
    if question.choices:
        picked = _option(response, question.choices)
        return None if picked is None else picked in [_option(gold, question.choices) for gold in golds]
    verdicts = [{_same(gold, reading, question.question) for reading in _readings(response)} for gold in golds]
    if response in golds or any(True in verdict for verdict in verdicts):
        return True
    return False if all(False in verdict for verdict in verdicts) else None      # one gold of words is enough to need a judge


def normalise(text) -> str:
    """Text for comparing: no case, accents, punctuation or articles, single spaces; whatever changes a number or a formula stays.

    "The Beyoncé  Show!" -> "beyonce show"      "U.S." -> "us"      "well-known" -> "well known"      "-3.5 °C" -> "-3.5 °c"
    "Hepatitis A" -> "hepatitis a" (an article comes before a word)     "C++" -> "c++"
    """
    text = unicodedata.normalize("NFKD", _characters(text).casefold())
    text = unicodedata.normalize("NFKC", re.sub("[\u0300-\u036f]", "", text))    # Latin accents only: が is not か
    text = text.translate({ord("ø"): "o", ord("ł"): "l", ord("đ"): "d", ord("æ"): "ae", ord("œ"): "oe", ord("&"): " and "})
    text = re.sub(r"^(\W*)an?\s+(?=\S)|\bthe\s+(?=\S)", r"\1", text)             # before punctuation goes: the A of "A) Paris" is none
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))|\.(?![0-9])|['’‘`´]|\*\*", "", text)
    text = re.sub(r"(?<=[^\W\d_]{2})!|(?<!\w)!", " ", text)                      # "Jeopardy!", but not 5! or n!
    kinds = ((c, unicodedata.category(c)) for c in text)
    text = "".join(c if kind[0] in "LMNS" or c in ".+-*/#%!" else "" if kind == "Cf" else " " for c, kind in kinds)
    return " ".join(re.sub(r"(?<=\S)-|-(?!\S)", " ", text).split())              # a hyphen goes, a sign stays


def number(text) -> Fraction | None:
    """The value of a text that is one number, with or without a currency, percent sign or unit; None for anything else.

    "1,234" -> 1234    "−3" -> -3    "3/4", "\\frac{3}{4}" -> 3/4    "50%" -> 1/2    "€3.50" -> 7/2    "1.5 × 10^3" -> 1500
    "26 protons" -> 26    "$5 million" -> 5000000    but "1 234", "1,23", "- 3", "not 26", "26 or 27", "2026-01-05", "3x" -> None
    """
    quantity = _quantity(_tidy(text)) if len(text) <= LIMIT else None
    return quantity and quantity[0]


def game_of_24(numbers, response) -> bool:
    """Is this one expression of value 24 that uses exactly these numbers, each once, with + - * / and parentheses?

    (1, 2, 3, 4), "(1+2+3)×4 = 24" -> True;  "4*6", "1*2*3*4 or 4!", "99**98**97" -> False
    """
    if len(response) > LIMIT:
        return False
    text = _readings(response)[-1].replace("\\div", "/")
    for _ in range(3):                                   # three numbers can hang below one another
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
    text = re.sub(r"(?<=[0-9)\]])\s*[xX]\s*(?=[0-9(\[])", "*", text).translate(str.maketrans("×·∗⋅÷[]", "****/()"))
    text = re.sub(r"\s*=\s*24$|^24\s*=\s*", "", text)
    if len(text) > 200 or not re.fullmatch(r"[0-9+\-*/() ]+", text):             # 200 characters bound the depth too
        return False
    used = []
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body, used)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError):
        return False
    return value == 24 and Counter(used) == Counter(int(n) for n in numbers)


def _value(node, used):
    # Parsed, never evaluated: what is not listed here, ** and unary minus among it, is no move of this game.
    operators = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
    if isinstance(node, ast.Constant):
        used.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in operators:
        raise SyntaxError("only + - * / on whole numbers")
    return operators[type(node.op)](_value(node.left, used), _value(node.right, used))


def _numbers_of(question):
    # The gold is the numbers ("1 1 1 8") or a solution ("(1+1+1)*8"); a bare "24" leaves them to the question.
    found = re.findall(r"[0-9]{1,9}", question.answer.split("=")[0])
    run = re.search(r"[0-9]{1,9}(?:(?:\s*,\s*(?:and\s)?|\s+)\s*[0-9]{1,9})+", question.question)
    return [int(n) for n in (found if len(found) > 1 else re.findall("[0-9]+", run[0]) if run else [])]


def _option(text, choices):
    """The index of the one option a text names, or None: a letter and a text that disagree name none.

    Two options of one text (gpqa has "A. 200 mL" and "B. 200 mL") are one option, the first; of two that differ only in case or
    spelling ("q/L^2", "q/l^2") a text names the one it equals exactly.
    """
    labelled = [re.fullmatch(r"\(?([A-Za-z])\s?[.):]\s*(.+)", choice.strip(), re.S) for choice in choices]
    if all(m and ord(m[1].upper()) == 65 + i for i, m in enumerate(labelled)):
        choices = [m[2] for m in labelled]                                       # the options bring their own letters
    named = set()
    for reading in _readings(text):
        m = re.fullmatch(r"[(\[]?([A-Za-z])(?:[)\].:]*|(?:\s?(?:[)\].:]+|-)\s?|\s)(?P<text>\S.*))", reading, re.S)
        i = ord(m[1].upper()) - 65 if m else len(choices)
        labelled = i < len(choices) and m["text"]                                # then "A Paris" is not Paris after an article
        named |= {k for k, choice in enumerate(choices) if _tidy(choice) == reading} or {
            k for k, choice in enumerate(choices)
            if _tidy(choice).lower() == reading.lower() or (not labelled and _same(choice, reading))}
        if i < len(choices) and (not labelled or _same(choices[i], labelled)):
            named.add(i)
    named = {choices.index(choices[k]) for k in named}
    return named.pop() if len(named) == 1 else None


def _same(gold, response, question=""):
    """True, False for two different quantities, or None: words and formulas that differ may still mean the same."""
    expected = _quantities(gold)
    if expected is not None:
        given = _quantities(response)
        return None if given is None else _equal(expected, given, question)
    if MATH.search(_tidy(gold)):
        return "".join(_tidy(gold).split()) == "".join(_tidy(response).split()) or None
    a, b = normalise(_tidy(gold)), normalise(_tidy(response))
    asks = response.rstrip().endswith("?") and not gold.rstrip().endswith("?")   # "Paris?" is a doubt
    return a == b != "" and not asks or None                                     # of "!!!" nothing is left to compare


def _equal(expected, given, question):
    asked = {FOLDED[word] for word in re.findall(r"\w+", question.lower()) if word in FOLDED}
    if len(given[1]) != len(expected[1]) or (expected[0] and given[0] not in ("", expected[0])):
        return False
    verdicts = [gold == value and _one_unit(unit or (named in UNITS and asked), named)      # the question says km, the response miles
                for (gold, unit), (value, named) in zip(expected[1], given[1])]
    return False if False in verdicts else None if None in verdicts else True


def _one_unit(expected, named):
    """Do they mean one unit? expected: one, or a set of those that the question names. None where a unit is not listed above."""
    expected = {expected} if isinstance(expected, str) else expected or {""}
    if not named or expected & {"", named} or any({unit, named} in ALIKE for unit in expected):
        return True
    doubt = named not in UNITS or any(unit not in UNITS or {unit, named} in DOUBTED for unit in expected)
    return None if doubt else False


def _quantities(text):
    """(brackets, [(value, unit), …]) of a number or a list of numbers, or None."""
    text = _tidy(text)
    brackets = text[:1] + text[-1:] if text[:1] + text[-1:] in ("()", "[]", "{}") else ""
    comma = "," if brackets else r",(?![0-9]{3}(?![0-9]))"
    items = re.split(rf"\s*(?:;|{comma}(?:\s*and\b)?|\band\b)\s*", text[1:-1].strip() if brackets else text)
    found = [_quantity(item) for item in items]
    return None if None in found else (brackets, found)


def _quantity(text):
    """(value, unit) of one number, or None."""
    text = re.sub(r"(?<=[0-9])\\frac", r" \\frac", text)
    text = re.sub(r"\\frac\{(-?[0-9]+)\}\{([0-9]+)\}", r"\1/\2", text)
    m = NUMBER.match(text) if len(text) <= DIGITS else None
    power = int(m["e"] or m["ten"] or m["power"] or 0) if m else 0
    if m is None or abs(power) > DIGITS:
        return None
    if m["top"]:
        top, bottom = (Fraction(m[name].replace(",", "")) for name in ("top", "bottom"))
        if bottom == 0 or (m["mixed"] and top >= bottom):
            return None
        value = int(m["mixed"] or 0) + top / bottom
    else:
        value = Fraction((m["decimal"] or "1").replace(",", "").rstrip(".")) * Fraction(10) ** power
    value, rest = -value if m["sign"] == "-" else value, text[m.end():]
    scale = re.match(rf"\s({'|'.join(SCALE)})\b", rest)
    if scale:
        value, rest = value * SCALE[scale[1]], rest[scale.end():]
    if re.fullmatch(r"\s?(?:%|percent|per cent|pct)", rest):
        return None if m["money"] else (value / 100, "")
    money, unit = UNITS[m["money"]] if m["money"] else "", _unit(rest)
    return None if unit is None or (money and unit and money != unit) else (value, unit or money)


def _unit(rest):
    """What follows a number, as one unit: "" for nothing, None for what is not a unit (and may change the number)."""
    word, spaced = rest.strip(), rest[:1].isspace()
    if not word:
        return ""
    if unit := UNITS.get(word) or FOLDED.get(word.lower()):
        return unit if spaced or len(word) > 1 or not word.isalpha() else None   # 5 m is a length, 5m is algebra
    counted = re.fullmatch("[a-z]{3,}s|people|children|men|women", word) and word not in NOT_NOUNS
    return word if spaced and counted else None                                  # a lower-case plural: the things counted


def _readings(response):
    # The response as it is, and without an opening such as "The answer is"; for a bare "x = 5", its right-hand side.
    text = _tidy(response)
    return [text, _tidy(re.sub(r"^[A-Za-z]\s*=\s*(?=[^=]+$)", "", ASIDE.sub("", text, count=1) if ASIDE.match(text) else text))]


def _characters(text):
    # Compatibility forms to plain ones, but first what NFKC would falsify: 10³ is not 103, 1½ is not 11/2.
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda m: "^" + unicodedata.normalize("NFKC", m[0]).replace("−", "-"), text)
    text = unicodedata.normalize("NFKC", re.sub("(?<=[0-9])(?=[¼-¾⅐-⅞])", " ", text))
    return text.translate(str.maketrans("−–‐⁄", "---/"))


def _tidy(text):
    # The same text without its dressing: LaTeX, markdown, quotes, a final full stop.
    text = " ".join(_characters(text).split())
    for pattern, plain in (
            (r"\\(?:text|mathrm|mbox)\{([^{}]*)\}", r"\1"), (r"\\(?:left|right)(?![a-z])|\\[,;!]", ""), (r"\{,\}", ","),
            (r"\\([%${}])", r"\1"), (r"\^\{?\\circ\}?", "°"), (r"\\(?:times|cdot)(?![a-z])", "×"),
            (r"\\[dt]frac", r"\\frac"), (r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}")):
        text = re.sub(pattern, plain, text)
    for _ in range(4):                                                           # "**$\boxed{5}$.**"
        text = re.sub(r"(?<!\.)\.$", "", text.strip())
        m = re.fullmatch(r"""\${1,2}([^$]+)\${1,2}|\\\((.+)\\\)|\\\[(.+)\\\]|\\boxed\{(.+)\}|\*\*([^*]+)\*\*|\*([^*]+)\*|`([^`]+)`"""
                         r"""|"([^"]+)"|“([^”]+)”|'([^']+)'""", text, re.S)
        text = m[m.lastindex] if m else text
    return text
