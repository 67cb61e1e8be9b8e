"""The rules that decide, before any judge, whether an answer is right and so gets the reward 1.

No judge corrects a True, and a policy finds whatever a reward forgives. So True is only for what is certainly
the same, False only for what is certainly different, and all else is None: a judge decides, and without a
judge it counts as wrong. Rules search for nothing inside a sentence. They compare with the gold, which is

    a number   the same value: "1,234" = 1234, "3/4" = 0.75, "50%" = 0.5. The unit may be missing. In doubt:
               another unit, one that only the response has (unless "how many" asks for it), a rounded
               value, "1,5" for 1.5, "3.1" for "3.10" (a version?), "7" for "007".
    a list     the same numbers in order: "3, 5", "(3, 5)", "3 and 5". In doubt: other brackets or order.
    an option  its letter, its text, or both when they agree. No response falls back to an option.
    a text     the same words, signs or date. Case counts in symbols ("CO", "mW"), not in words ("paris");
               accents, commas and hyphens may be missing in names ("Sao Paulo") and nowhere else.

Dropped: symbolic algebra, unit conversion, number words, partial credit."""

import ast
import contextlib
import re
import unicodedata
from datetime import datetime
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from operator import add, mul, sub, truediv

LIMIT = 2_000  # characters of a gold or a response; a longer response is wrong, so every check is fast
DIGITS = 600  # characters of a number, and its largest power of ten; Python's int() refuses 4300 digits
OPENING = re.compile(
    r"^(?:(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:(?:final|correct)\s+)?(?:answer|option|choice)"
    r"(?:\s+is\b|\s*[:=])\s*:?\s*(?=\S)|(?:option|choice|answer)\s+(?=\(?[a-z]\b))", re.I)
LETTERED = re.compile(r"[(\[]?([A-Za-z])(?:[)\].:]*|(?:\s?(?:[)\].:]+|-)\s?|\s)(?P<text>\S.*))", re.S)
NUMBER = re.compile(r"""(?P<sign>[-+]?)(?:(?P<money>(?:US)?\$|[€£¥])\s?)?(?:
      (?:(?P<mixed>[0-9]+)\s)?(?P<top>[0-9]+)\s?/\s?(?P<bottom>0*[1-9][0-9]*)              # 3/4, 1 3/4
    | 10\^\{?(?P<power>[-+]?[0-9]+)\}?                                                     # 10^3
    | (?P<decimal>(?:[0-9]{1,3}(?:(?:,[0-9]{3})+|(?:\ [0-9]{3})+)(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)
      (?:[eE](?P<e>[-+]?[0-9]+)|\s?[×x*·]\s?10\^\{?(?P<ten>[-+]?[0-9]+)\}?)?               # e3, × 10^3
    )""", re.X)
SCALE = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SPELLINGS = """km, kilometer, kilometers, kilometre, kilometres; m, meter, meters, metre, metres; cm; mm
mile, miles; foot, feet, ft; inch, inches; kg, kilogram, kilograms; g, gram, grams; lb, lbs; L, liters, litres
years, year; months, month; weeks, week; days, day; h, hour, hours, hrs; min, minute, minutes, mins
s, second, seconds, sec; m^2, square meters; km^2, square kilometers; km/h; m/s; V, volts; W, watts
dollar, dollars, $; USD, US$; euro, euros, EUR, €; pound, pounds; £, GBP; yen, JPY, ¥; %, percent
°, degree, degrees; °C, degrees Celsius; °F, degrees Fahrenheit"""
UNITS = {name: unit.split(", ")[0] for unit in re.split("; |\n", SPELLINGS) for name in unit.split(", ")}
DATES = "%Y-%m-%d", "%B %d, %Y", "%B %d %Y", "%d %B %Y", "%b %d, %Y", "%d %b %Y"
RAISED = {"<super>": "^", "<sub>": "_", "<fraction>": " ", "<circle>": " ", "<font>": "\\"}  # Unicode's tags
ACCENT = r"(?<=\w)[\u0300-\u0307\u0309-\u036f](?=\w)|(?<=\w\w)[\u0300-\u0307\u0309-\u036f]"  # but ¨
HARMLESS = [  # what may differ between two texts: articles, full stops of abbreviations, spaces, commas
    (r"^(?:[Tt]he|THE) (?=.*[^\W\d_]{3})", ""), (r"^(?:a|[Aa]n) (?!few|little|bit|lot|positive|negative|"
     r"major|minor|sharp|flat|second|third|quarter|half|\w+th\b)(?=[a-z]{3})", ""),
    (r"\b(?:[A-Z]\. ?)+(?=[A-Z]\.)", lambda m: re.sub("[. ]", "", m[0])),  # J. R. R. Tolkien, U.S.
    (r"\b([A-Z]{2,}|St|Mt|Dr|Mr|Mrs|Jr|Sr)\.(?![^\s,])", r"\1"), (r"^([A-Z].*[^\W\d_]{3})!$", r"\1"),
    (r"\s*([=<>≤≥≠→|])\s*", r"\1"), (r"(?<=\S)\s([-+*/×·^])\s(?=\S)", r"\1"), (r", (?=and\b)", " ")]
LATEX = [
    (r"\\(?:text|mathrm|mbox)\{([^{}]*)\}", r"\1"), (r"\\(?:left|right)(?![a-z])", ""), (r"\\[,;:]", " "),
    (r"(?<=[0-9])\{,\}(?=[0-9]{3})", ","), (r"\\([%${}])", r"\1"), (r"\^\{?\\circ\}?", "°"),
    (r"\\times(?![a-z])", "×"), (r"\\cdot(?![a-z])", "·"), (r"\\[dt]frac", r"\\frac"),
    (r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}"), (r"(?<=[0-9])\\frac", r" \\frac"),
    (r"(?<![\w^/)}])\\frac\{(-?[0-9]+)\}\{([0-9]+)\}(?![\w\\({])", r"\1/\2"),
    (r"(?<=[A-Za-z)])_(?:\{([0-9]+)\}|([0-9]))(?![0-9])", r"\1\2")]
WRAPPED = re.compile(r"""\${1,2}([^$]+)\${1,2}|\\\((.+)\\\)|\\\[(.+)\\\]|\\boxed\{(.+)\}|\*\*([^*]+)\*\*|"""
                     r"""\*([^*]+)\*|`([^`]+)`|"([^"]+)"|“([^”]+)”|'([^']+)'""", re.S)


def is_right(question, response):
    """Is this response, the final answer alone, right by the rules? Never raises, and is always fast."""
    return decide(question, response) is True


def decide(question, response):
    """True or False where the rules can tell; None where only a judge could.

    gold "26": "26.0", "The answer is 26." -> True;  "27" -> False;  "26 or 27", "about 26" -> None
    gold "B" of ("London", "Paris"): "(b)", "B) Paris", "Paris" -> True;  "A" -> False;  "B) London" -> None
    gold "Paris": "paris.", "The Paris" -> True;  "London", "not Paris" -> None, never False
    every gold: "" and a response of more than LIMIT characters -> False
    """
    if question.kind == "gameof24":
        return game_of_24(numbers_to_use(question), response)
    response = response.strip()
    if not response or len(response) > LIMIT or len(plain_characters(response)) > LIMIT:  # ﷺ becomes 18
        return False
    golds = [gold.strip() for gold in (question.answer, *question.aliases) if gold.strip()]
    if question.choices:
        named, *options = (named_option(text, question.choices) for text in (response, *golds))
        return None if named is None else named in options
    verdicts = [{same(gold, reading, question.question) for reading in readings(response)} for gold in golds]
    if response in golds or any(True in verdict for verdict in verdicts):
        return True
    return False if all(False in verdict for verdict in verdicts) else None


def game_of_24(numbers, response):
    """Is this an expression of value 24 from exactly these numbers, each once, + - * / and parentheses?

    (1, 2, 3, 4), "(1+2+3)×4 = 24" -> True;  "4*6", "1*2*3*4 or 4!", "99**98**97" -> False
    """
    if len(response) > LIMIT:
        return False
    text = readings(response)[-1].replace("\\div", "/")
    for _ in range(3):  # fractions of four numbers nest at most three deep
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
    text = re.sub(r"(?<=[0-9)\]])\s*[xX]\s*(?=[0-9(\[])", "*", text)
    text = text.translate(str.maketrans("×·∗⋅÷[]", "****/()"))
    text = re.sub(r"\s*=\s*24$|^24\s*=\s*", "", text)
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
    found = re.findall(r"[0-9]{1,9}", re.sub(r"\s*=\s*24\s*$|^\s*24\s*=\s*", "", question.answer))
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
    labels = [re.fullmatch(r"\(?([A-Za-z])\s?[.):]\s*(.+)", choice.strip(), re.S) for choice in choices]
    if all(label and ord(label[1].upper()) == 65 + i for i, label in enumerate(labels)):
        choices = [label[2] for label in labels]  # the options have letters already
    named = set()
    for reading in readings(text):
        m = LETTERED.fullmatch(reading)
        letter = ord(m[1].upper()) - 65 if m else len(choices)
        after = letter < len(choices) and m["text"]  # the Paris of "A Paris", which is option A, not "Paris"
        named |= {i for i, choice in enumerate(choices)
                  if undressed(choice) == reading or (not after and same(choice, reading))}
        if letter < len(choices) and (not after or same(choices[letter], after)):
            named.add(letter)
    named = {choices.index(choices[i]) for i in named}
    return named.pop() if len(named) == 1 else None


def same(gold, response, question=""):
    """True if both are equal; False for different quantities; None for texts that may mean the same."""
    expected = None if re.match("0[0-9]", undressed(gold)) else quantities(gold)  # 007 is a code
    given = quantities(response)
    if expected is None or given is None:
        return None if expected else same_text(gold, response)
    (brackets, golds), (given_brackets, values) = expected, given
    fractions = "/" in gold and "/" in response and undressed(gold) != undressed(response)  # 6/8 time
    verdicts = {equal_quantity(*pair, question) for pair in zip(golds, values)}
    if len(golds) == len(values) and verdicts == {True} and given_brackets in (brackets, brackets or "()"):
        return None if fractions else True
    return False if verdicts == {False} and len(golds) == len(values) == 1 else None  # 1,5 may be 1.5


def equal_quantity(gold, given, question):
    """Compare two results of quantity(): "5 km" is 5; perhaps it is 5000 m or 5.01 km; it is not 6."""
    (a, expected), (b, unit) = gold, given
    counted = [UNITS.get(noun, noun) for noun in re.findall(r"how many (\w+)", question, re.I)]
    named = any(word in question for word in ("percent", "%", *SCALE))  # 5 may be 5%, or 5 million
    certain = unit == expected or not (unit and expected) and (
        not named if "%" in (unit, expected) else counted == [unit or expected] or expected in UNITS.values())
    low, high = sorted((abs(a), abs(b)))
    if a == b or not certain or named or high == 1000 * low or (expected != unit) and "%" in (expected, unit):
        return a == b and certain or None
    if a.denominator == b.denominator == 1 or high - low > high / 100 or a * b < 0:
        return False
    endless = any(10**DIGITS % number.denominator for number in (a, b))  # -1/3 is -0.3333333333, or -0.33?
    return endless and high - low < high / 10**9 or None


@lru_cache(100)
def quantities(text):
    """A number or a list of numbers, or None: "(3, 5 km)" -> ("()", [(3, ""), (5, "km")])"""
    text = undressed(text)
    brackets = text[:1] + text[-1:] if text[:1] + text[-1:] in ("()", "[]", "{}") else ""
    comma = "," if brackets else r",(?![0-9]{3}(?![0-9]))"
    items = re.split(rf"\s*(?:;|{comma}(?:\s*and\b)?|\band\b)\s*", text[1:-1].strip() if brackets else text)
    found = [quantity(item) for item in items]
    return None if None in found else (brackets, found)


def quantity(text):
    """(value, unit) of an undressed text that is one number, or None.

    "1,234", "1 234" -> (1234, "")    "\\frac{3}{4}" -> (3/4, "")    "50%" -> (1/2, "%")
    "26 protons" -> (26, "protons")    "$5 million" -> (5000000, "dollar")    "1.5 × 10^3" -> (1500, "")
    "1,23", "- 3", "not 26", "26 or 27", "2026-01-05", "3x", "3.10" -> None
    """
    m = NUMBER.match(text) if len(text) <= DIGITS else None
    power = int(m["e"] or m["ten"] or m["power"] or 0) if m else 0
    if m is None or abs(power) > DIGITS or (m["mixed"] and int(m["top"]) >= int(m["bottom"])):
        return None
    whole = re.sub("[, ]", "", m["mixed"] or m["decimal"] or ("0" if m["top"] else "1"))
    value = Fraction(whole.rstrip(".")) + Fraction(int(m["top"] or 0), int(m["bottom"] or 1))
    value, rest = value * Fraction(10) ** power * (-1 if m["sign"] == "-" else 1), text[m.end():]
    if re.search(r"\.[0-9]*[1-9]0+$", m[0]) and not m["money"] and not rest:
        return None  # 3.10 may be a version: later than 3.9
    if scale := re.match(rf"\s({'|'.join(SCALE)})\b", rest):
        value, rest = value * SCALE[scale[1]], rest[scale.end():]
    money, word = UNITS[m["money"]] if m["money"] else "", rest.strip()
    word = word.lower() if word.istitle() and len(word) > 3 else word  # "Miles", but not "Mm"
    unit = UNITS.get(word, word)
    known = word in UNITS and not re.fullmatch("[A-Za-z]", rest)  # 5 m, 5km; but 5m is algebra
    known = known or re.fullmatch("(?: (?:[a-z]{2,}s|people|children))?", rest)  # 26 protons
    if not known or money and unit not in ("", money):
        return None
    return (value / 100 if unit == "%" else value), unit or money


def same_text(gold, response):
    """True for the same date or the same words; else None: another text may mean the same."""
    gold, text = undressed(gold), undressed(response)
    ways = {False, gold.isascii() or text.isascii()}  # only one of them may have accents
    alike = gold == text or any(words(gold, loosely) == words(text, loosely) for loosely in ways)
    return alike or (date(gold) and date(gold) == date(text)) or None


def date(text):
    """The day of "March 29, 2018", "29 March 2018" or "2018-03-29"; None for any other text."""
    for shape in DATES if len(text) < 30 else ():
        with contextlib.suppress(ValueError):
            return datetime.strptime(text, shape)


def words(text, loosely):
    """The words of a text, and all else in it that may carry a meaning. Loosely: names without accents.

    "The Blue Whale" -> ["blue", "whale"]    "CO" -> ["CO"]    "sin x - cos x" -> ["sin", "x-cos", "x"]
    """
    name = loosely and text[:1].isupper() and not re.search(r"[^\w\s,.&'-]|(?<!\S)[a-z]\S{3}", text)
    if name or " " not in text:  # "Jean-Paul", "well-known", but not "man-eating shark"
        letters = r"[^\W\d_]{2}" if name else r"[^\W\d_]{4}"
        text = re.sub(f"(?<={letters})-(?={letters})", " ", text)
    for pattern, plain in HARMLESS + [(r",(?!\S)", "")] * name:
        text = re.sub(pattern, plain, text)
    if name and " " in text:  # a single word may be another word: Año, Ano
        text = re.sub(ACCENT, "", unicodedata.normalize("NFD", text))
    tokens, found = unicodedata.normalize("NFC", text).split(), []
    shortest = 4 if re.search(r"\d", text) else 2 if name and len(tokens) > 1 else 3  # 1 Gev is no gev
    for token in tokens:
        letters = re.sub(r"^[A-Z]'(?=[A-Z][a-z])|(?<=[^\W\d_])['-](?=[^\W\d_])|[,;:]$", "", token)
        cased = letters[1:].islower() and len(letters) >= shortest
        shouted = letters.isupper() and len(letters) > 4 and len(set(letters)) > 3  # not CCCCC
        plain = letters.isalpha() and (cased or shouted) or token in ("Yes", "YES", "No")
        found.append(token.lower() if plain else "and" if token == "&" else token)
    return found


def readings(response):
    """Two readings: the undressed response, and that without an opening as "The answer is" or "x = "."""
    text = undressed(response)
    return [text, undressed(re.sub(r"^x\s*=\s*(?=[^=]+$)", "", OPENING.sub("", text)))]


@lru_cache(100)
def undressed(text):
    """The text without LaTeX, markdown, quotes and a final full stop: "**$\\boxed{5}$.**" -> "5"."""
    text = " ".join(plain_characters(text).split())
    for pattern, plain in LATEX:
        text = re.sub(pattern, plain, text)
    for _ in range(4):
        text = re.sub(r"(?<!\.)(?<!\.[A-Z])\.$", "", text.strip())  # but "U.S."
        m = WRAPPED.fullmatch(text)
        text = m[m.lastindex] if m else text
    return text


def plain_characters(text):
    """Unicode's NFKC, but what is raised or lowered stays so: 10³ -> 10^3, 10₂ -> 10_2, 1½ -> 1 1/2."""
    runs = groupby(text, lambda c: RAISED.get(unicodedata.decomposition(c).split(" ")[0], ""))
    text = "".join(mark + unicodedata.normalize("NFKC", "".join(run)) for mark, run in runs)
    return text.translate(str.maketrans("−–‐⁄’‘′", "---/'''"))
