"""The rules that decide, before any judge, whether an answer is right and so gets the reward 1.

One principle settles every doubtful case: AMBIGUITY IS WRONG. A policy finds whatever a reward forgives, so
the rules read the whole response. They search for nothing inside a sentence; they only remove an opening such
as "The answer is". What counts as right depends on the gold, the reference answer:

    a number   the same value, exactly: "1,234" = 1234, "3/4" = 0.75, "50%" = 0.5 but not 50; 3.14 is not
               3.14159. The unit may be missing; another unit is wrong, even if it converts. Number words are
               not read.
    a list     the same numbers in order: "3, 5", "(3, 5)" and "3 and 5" are one list. A comma before three
               digits groups thousands; within brackets it separates. "(0, 1)" and "[0, 1]" differ.
    an option  its letter, its text, or both when they agree. No response falls back to an option.
    a formula  the same characters, spaces and LaTeX dressing aside.
    a text     the same after normalise(), as the answer or as an alias.

decide() returns True (right), False (wrong), or None where only a judge can tell: the gold is a text or
formula and the response another one ("NYC" for "New York City"); the gold is a number or list and the
response is neither ("twenty-six" for "26"); the response names no option or several. Another number, another
option and an empty response are False. Without a judge only True is rewarded.

Dropped: symbolic algebra, rounding, unit conversion, partial credit.
"""

import ast
import re
import unicodedata
from fractions import Fraction
from operator import add, mul, sub, truediv

LIMIT = 2_000  # characters of a gold or a response; a longer response is wrong, so every check is fast
DIGITS = 600  # characters of a number, and its largest power of ten; Python's int() refuses 4300 digits
OPENING = re.compile(
    r"^(?:(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:(?:final|correct)\s+)?(?:answer|option|choice)"
    r"(?:\s+is\b|\s*[:=])\s*:?\s*(?=\S)|(?:option|choice|answer)\s+(?=\(?[a-z]\b))", re.I)
FORMULA = re.compile(r"[\\^=<>|{}_√∞π]|[+*]\s*[\w(]|[0-9a-z)]/[0-9(]|[0-9)]\(|^[\[(].*,.*[\])]$", re.S)
LETTERED = re.compile(r"[(\[]?([A-Za-z])(?:[)\].:]*|(?:\s?(?:[)\].:]+|-)\s?|\s)(?P<text>\S.*))", re.S)
WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = re.compile(rf"""(?P<sign>[-+]?)(?:(?P<money>(?:US)?\$|[€£¥])\s?)?(?:
      (?:(?P<mixed>[0-9]+)\s)?(?P<top>{WHOLE})\s?/\s?(?P<bottom>{WHOLE})                  # 3/4, 1 3/4
    | 10\^\{{?(?P<power>[-+]?[0-9]+)\}}?                                                  # 10^3
    | (?P<decimal>{WHOLE}(?:\.[0-9]*)?|\.[0-9]+)                                          # 1,234.5
      (?:[eE](?P<e>[-+]?[0-9]+)|\s?[×x*·]\s?10\^\{{?(?P<ten>[-+]?[0-9]+)\}}?)?            # e3, × 10^3
    )""", re.X)
SCALE = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SPELLINGS = """km, kilometer, kilometers, kilometre, kilometres; m, meter, meters, metre, metres
mm, millimeters, millimetres; cm, centimeters, centimetres; mile, miles, mi; foot, feet, ft; inch, inches
m^2, square meters; kW; kJ; Hz; eV; MeV; mol; kg, kilogram, kilograms, kilogramme, kilogrammes
g, gram, grams; lb, lbs; tonne, tonnes; km^2, square kilometers; L, liter, liters, litre, litres
year, years, yr; month, months; week, weeks; day, days; cm^2; cm^3; W, watts; h, hour, hours, hr, hrs
min, minute, minutes, mins; second, seconds, sec, secs; dollar, dollars, USD, US$, $; euro, euros, EUR, €
pound, pounds; £, GBP, pounds sterling; yen, JPY, ¥; cents; degree, degrees, °; V, volts
°C, degrees Celsius; °F, degrees Fahrenheit; km/h, kilometers per hour; mph, miles per hour
m/s, meters per second; m/s^2; m^3, cubic meters; N, newtons; J, joules"""
UNITS = {name: unit.split(", ")[0] for unit in re.split("; |\n", SPELLINGS) for name in unit.split(", ")}
FOLDED = {name.lower(): unit for name, unit in UNITS.items() if len(name) > 1}  # "KM", but never n for N
ALIKE = {"pound", "£"}, {"pound", "lb"}  # "pound" is money or weight
DOUBTED = {"degree", "°C"}, {"degree", "°F"}  # "degree" may mean either: for the judge
NOT_NOUNS = set("""times plus minus versus less always does was has perhaps cos dozens hundreds thousands
millions billions trillions halves thirds quarters fourths fifths sixths sevenths eighths ninths tenths
hundredths thousandths""".split())
LATEX = [
    (r"\\(?:text|mathrm|mbox)\{([^{}]*)\}", r"\1"), (r"\\(?:left|right)(?![a-z])|\\[,;!]", ""),
    (r"\{,\}", ","), (r"\\([%${}])", r"\1"), (r"\^\{?\\circ\}?", "°"), (r"\\(?:times|cdot)(?![a-z])", "×"),
    (r"\\[dt]frac", r"\\frac"), (r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}")]
WRAPPED = re.compile(r"""\${1,2}([^$]+)\${1,2}|\\\((.+)\\\)|\\\[(.+)\\\]|\\boxed\{(.+)\}|\*\*([^*]+)\*\*|"""
                     r"""\*([^*]+)\*|`([^`]+)`|"([^"]+)"|“([^”]+)”|'([^']+)'""", re.S)


def is_right(question, response):
    """Is this response, the final answer alone, right by the rules? Never raises, and is always fast.

    gold "26": "26", "26.0", "26 protons", "The answer is 26." -> True;  "not 26", "about 26" -> False
    gold "B" of ("London", "Paris"): "B", "(b)", "B) Paris", "Paris" -> True;  "B) London", "A or B" -> False
    gold "Paris": "paris.", "The Paris" -> True;  "not Paris", "Paris or London" -> False
    """
    return decide(question, response) is True


def decide(question, response):
    """True or False where the rules can tell; None where only a judge could.

    gold "26": "26" -> True;  "27", "26%" -> False;  "26 or 27", "twenty-six", "about 26" -> None
    gold "B" of ("London", "Paris"): "B" -> True;  "A", "London" -> False;  "A or B", "B) London" -> None
    gold "Paris": "paris." -> True;  "London", "not Paris" -> None
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
    """The numbers of a Game of 24: from the gold ("1 1 1 8", "(1+1+1)*8"), or if it is "24", the question."""
    found = re.findall(r"[0-9]{1,9}", question.answer.split("=")[0])
    if len(found) < 2:
        run = re.search(r"[0-9]{1,9}(?:(?:\s*,\s*(?:and\s)?|\s+)\s*[0-9]{1,9})+", question.question)
        found = re.findall("[0-9]+", run[0]) if run else []
    return [int(number) for number in found]


def named_option(text, choices):
    """The index of the option that a text names; None for none or several, as "B) London" where B is Paris.

    Options with the same text (gpqa: "A. 200 mL", "B. 200 mL") count as the first of them. Where options
    differ only in case ("q/L^2", "q/l^2"), a text names the one that it equals exactly.
    """
    labels = [re.fullmatch(r"\(?([A-Za-z])\s?[.):]\s*(.+)", choice.strip(), re.S) for choice in choices]
    if all(label and ord(label[1].upper()) == 65 + i for i, label in enumerate(labels)):
        choices = [label[2] for label in labels]  # the options have letters already
    named = set()
    for reading in readings(text):
        m = LETTERED.fullmatch(reading)
        letter = ord(m[1].upper()) - 65 if m else len(choices)
        after = letter < len(choices) and m["text"]  # the Paris of "A Paris", which is option A, not "Paris"
        equal = {i for i, choice in enumerate(choices) if undressed(choice) == reading}
        named |= equal or {
            i for i, choice in enumerate(choices)
            if undressed(choice).lower() == reading.lower() or (not after and same(choice, reading))}
        if letter < len(choices) and (not after or same(choices[letter], after)):
            named.add(letter)
    named = {choices.index(choices[i]) for i in named}
    return named.pop() if len(named) == 1 else None


def same(gold, response, question=""):
    """True if both are equal; False for different quantities; None for texts that may mean the same."""
    expected = quantities(gold)
    if expected is not None:
        given = quantities(response)
        return None if given is None else equal_quantities(expected, given, question)
    gold_text, text = undressed(gold), undressed(response)
    if FORMULA.search(gold_text):
        return "".join(gold_text.split()) == "".join(text.split()) or None
    doubt = response.rstrip().endswith("?") and not gold.rstrip().endswith("?")  # "Paris?"
    gold_text, text = normalise(gold_text), normalise(text)
    return gold_text == text != "" and not doubt or None  # normalise("!!!") is "": nothing to compare


def equal_quantities(expected, given, question):
    """Compare two results of quantities(). A gold without a unit has those that the question names."""
    (brackets, golds), (given_brackets, values) = expected, given
    if len(values) != len(golds) or (brackets and given_brackets not in ("", brackets)):
        return False
    in_question = {FOLDED[word] for word in re.findall(r"\w+", question.lower()) if word in FOLDED}
    verdicts = []
    for (gold, gold_unit), (value, unit) in zip(golds, values):
        units = {gold_unit} if gold_unit else in_question if unit in UNITS else set()
        verdicts.append(gold == value and same_unit(units, unit))
    return False if False in verdicts else None if None in verdicts else True


def same_unit(expected, unit):
    """Is it one of the expected units? True if either side has none; None if UNITS does not know a unit."""
    if not unit or not expected or unit in expected or any({other, unit} in ALIKE for other in expected):
        return True
    doubt = unit not in UNITS or any(other not in UNITS or {other, unit} in DOUBTED for other in expected)
    return None if doubt else False


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

    "1,234" -> (1234, "")    "\\frac{3}{4}" -> (3/4, "")    "50%" -> (1/2, "")    "1.5 × 10^3" -> (1500, "")
    "26 protons" -> (26, "protons")    "$5 million" -> (5000000, "dollar")
    "1 234", "1,23", "- 3", "not 26", "26 or 27", "2026-01-05", "3x" -> None
    """
    text = re.sub(r"(?<=[0-9])\\frac", r" \\frac", text)
    text = re.sub(r"\\frac\{(-?[0-9]+)\}\{([0-9]+)\}", r"\1/\2", text)
    m = NUMBER.match(text) if len(text) <= DIGITS else None
    power = int(m["e"] or m["ten"] or m["power"] or 0) if m else 0
    if m is None or abs(power) > DIGITS:
        return None
    if m["top"]:
        top, bottom = Fraction(m["top"].replace(",", "")), Fraction(m["bottom"].replace(",", ""))
        if bottom == 0 or (m["mixed"] and top >= bottom):
            return None
        value = int(m["mixed"] or 0) + top / bottom
    else:
        value = Fraction((m["decimal"] or "1").replace(",", "").rstrip(".")) * Fraction(10) ** power
    value, rest = -value if m["sign"] == "-" else value, text[m.end():]
    if scale := re.match(rf"\s({'|'.join(SCALE)})\b", rest):
        value, rest = value * SCALE[scale[1]], rest[scale.end():]
    if re.fullmatch(r"\s?(?:%|percent|per cent|pct)", rest):
        return None if m["money"] else (value / 100, "")
    money, unit = UNITS[m["money"]] if m["money"] else "", unit_of(rest)
    return None if unit is None or (money and unit and money != unit) else (value, unit or money)


def unit_of(rest):
    """The unit after a number; "" if nothing follows; None for a text that may change the number."""
    word, spaced = rest.strip(), rest[:1].isspace()
    if not word:
        return ""
    if unit := UNITS.get(word) or FOLDED.get(word.lower()):
        return unit if spaced or len(word) > 1 or not word.isalpha() else None  # 5m is algebra
    noun = re.fullmatch("[a-z]{3,}s|people|children|men|women", word) and word not in NOT_NOUNS
    return word if spaced and noun else None  # a lower-case plural, as in "26 protons"


def normalise(text):
    """The text without case, accents, punctuation and articles. Signs that change a number stay.

    "The Beyoncé  Show!" -> "beyonce show"      "U.S." -> "us"      "well-known" -> "well known"
    "-3.5 °C" -> "-3.5 °c"      "Hepatitis A" -> "hepatitis a" (no word follows)      "C++" -> "c++"
    """
    text = unicodedata.normalize("NFKD", plain_characters(text).casefold())
    text = unicodedata.normalize("NFKC", re.sub("[\u0300-\u036f]", "", text))  # Latin only: が is not か
    text = text.translate(str.maketrans({"ø": "o", "ł": "l", "đ": "d", "æ": "ae", "œ": "oe", "&": " and "}))
    text = re.sub(r"^(\W*)an?\s+(?=\S)|\bthe\s+(?=\S)", r"\1", text)  # not the A of "A) Paris"
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))|\.(?![0-9])|['’‘`´]|\*\*", "", text)
    text = re.sub(r"(?<=[^\W\d_]{2})!|(?<!\w)!", " ", text)  # "Jeopardy!", but not 5! or n!
    text = "".join(c for c in text if unicodedata.category(c) != "Cf")  # invisible
    text = "".join(c if unicodedata.category(c)[0] in "LMNS" or c in ".+-*/#%!" else " " for c in text)
    return " ".join(re.sub(r"(?<=\S)-|-(?!\S)", " ", text).split())  # removes hyphens, keeps minus signs


def readings(response):
    """Two readings: the undressed response, and that without an opening as "The answer is" or "x = "."""
    text = undressed(response)
    return [text, undressed(re.sub(r"^[A-Za-z]\s*=\s*(?=[^=]+$)", "", OPENING.sub("", text)))]


def undressed(text):
    """The text without LaTeX, markdown, quotes and a final full stop: "**$\\boxed{5}$.**" -> "5"."""
    text = " ".join(plain_characters(text).split())
    for pattern, plain in LATEX:
        text = re.sub(pattern, plain, text)
    for _ in range(4):
        text = re.sub(r"(?<!\.)\.$", "", text.strip())
        m = WRAPPED.fullmatch(text)
        text = m[m.lastindex] if m else text
    return text


def plain_characters(text):
    """Unicode's NFKC, but 10³ becomes 10^3 and not 103, and 1½ becomes 1 1/2 and not 11/2."""
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda m: "^" + unicodedata.normalize("NFKC", m[0]).replace("−", "-"), text)
    text = unicodedata.normalize("NFKC", re.sub("(?<=[0-9])(?=[¼-¾⅐-⅞])", " ", text))
    return text.translate(str.maketrans("−–‐⁄", "---/"))
