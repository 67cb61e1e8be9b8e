"""The rules that decide, before any judge, whether an answer is right and so gets the reward 1.

No judge corrects a True, and a policy finds whatever a reward forgives. So True is only for what is
certainly the same, False only for what is certainly different, and all else is None: a judge
decides, and without a judge it counts as wrong. Rules search for nothing inside a sentence. They
compare with the gold, which is

    a number   the same value and unit: "1,234 km" = "1234 km", "3/4" = 0.75. Another whole number
               is wrong.
    a list     the same numbers, order and brackets: "(2,7)" = "(2, 7)", "3 and 5" = "3, 5".
    an option  its letter, its text, or both when they agree. No response falls back to an option.
    a date     the same day: "2018-03-29" = "March 29, 2018" = "29 March 2018".
    a text     the same words and signs. "Paris" = "paris", but "CO" is not "Co". Of yes and no, and
               of true and false, the other one is wrong.
    a game     of 24: any expression of value 24 from the question's numbers (kind "gameof24").

Dropped, since a judge does it better: other units, percentages as numbers, rounding, algebra,
number words, abbreviations, accents, other spellings, partial credit.
"""

import contextlib
import re
from datetime import datetime
from fractions import Fraction
from string import ascii_uppercase

from rewards.game24 import game_of_24, numbers_to_use
from rewards.plain import folded, undressed

LIMIT = 2_000  # characters of a gold or a response; a longer response is wrong: every check is fast
LETTERED = re.compile(r"[(\[]?([A-Za-z])[)\].:]*(?:\s(.+))?", re.S)  # "B", "(b)", "B. Paris"
NUMBER = re.compile(
    r"""(?x) (?P<sign>[-+]?) (?P<currency>[$€£¥]?) (?P<digits>
        [0-9]+/[1-9][0-9]*                                  # 3/4
      | (?!0[0-9]) (?=\.?[0-9])                             # not 007, a code
        (?:[1-9][0-9]{0,2}(?:[, ][0-9]{3})+|[0-9]+)?        # 1,234 or 1 234
        (?:\.0{0,2}|\.[0-9]*[1-9])?                         # 0.5; not 3.10
        (?:e[-+][0-9]{1,3})?                                # 1e-05, as JSON writes it
    ) (?P<unit>\ ?%|\ [^\W\d_]+)?                          # 5%, 5 km
    """
)
DATES = "%Y-%m-%d", "%B %d, %Y", "%B %d %Y", "%d %B %Y"


def decide(question, response):
    """True or False where the rules can tell; None where only a judge could. Never raises.

    gold "26": "26.0", "The answer is 26." -> True;  "27" -> False;  "26 or 27", "about 26" -> None
    gold "B" of ("London", "Paris"): "(b)", "B) Paris", "Paris" -> True;  "A" -> False;
        "B) London" -> None
    gold "Paris": "paris.", "The Paris" -> True;  "London", "not Paris" -> None, never False
    every gold: "" and a response of more than LIMIT characters -> False
    """
    if len(response) > LIMIT or not folded(response).strip():
        return False
    response = response.strip()
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


def named_option(text, choices):
    """The index of the option that a text names; None for none or several.

    "B) London" names two where B is Paris. Options with the same text (gpqa: "A. 200 mL",
    "B. 200 mL") count as the first of them.
    """
    options = unlettered(choices)
    m = LETTERED.fullmatch(undressed(text))
    letter, after = (m[1].upper(), m[2]) if m else ("", "")
    named = {
        options.index(option)
        for own, option in zip(ascii_uppercase, options, strict=False)
        if same(option, text) or (own == letter and (not after or same(option, after)))
    }
    return named.pop() if len(named) == 1 else None


def unlettered(choices):
    """The options without their letters, if all have them: ["A. 0.9", "(B) 2"] -> ["0.9", "2"]"""
    pairs = zip(ascii_uppercase, choices, strict=False)
    found = [re.fullmatch(rf"\(?{own}[.):]\s*(.+)", text.strip(), re.S) for own, text in pairs]
    return [match[1] for match in found] if all(found) else choices


OPPOSITES = {"yes", "no"}, {"true", "false"}


def same(gold, response):
    """True if both are certainly the same, False for two different whole numbers or for opposites,
    else None."""
    if gold == response:
        return True
    gold, response = undressed(gold), undressed(response)
    if {gold.lower(), response.lower()} in OPPOSITES:
        return False
    if any(read(gold) and read(gold) == read(response) for read in (words, date, quantities)):
        return True
    expected, given = quantity(gold), quantity(response)
    if expected and given and expected[1] == given[1]:
        whole = expected[0].denominator == given[0].denominator == 1
        rounded = re.search("[0-9]e", gold + " " + response)  # 6.02e+23, like 0.33 for 1/3
        return False if whole and not rounded else None
    return None


def words(text):
    """The words of a text. A leading The does not count, nor does the case of words like Paris.

    "The Blue Whale" -> ["blue", "whale"]    "CO" -> ["CO"]    "5 Mol" -> ["5", "Mol"]
    """
    tokens = re.sub(r" ([-+*/^=<>≤≥→]) ", r"\1", text).split()  # "x + 1" is "x+1"
    if not re.search("[0-9]", text):  # beside a number, a word may be a unit: its case counts
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
    """A list of numbers with its brackets, or None.

    "3, 5 and 7" -> ("", [3, 5, 7])    "26" -> ("", [26])    (with the units of the numbers)
    """
    brackets = text[:1] + text[-1:]
    brackets, inside = (brackets, text[1:-1]) if brackets in ("()", "[]", "{}") else ("", text)
    if not brackets and quantity(text):
        return "", [quantity(text)]  # 1,234 is one number
    inside = re.sub(",? and ", ", ", inside)
    found = [quantity(item) for item in inside.split(", " if ", " in inside else ",")]
    return None if None in found else (brackets, found)


def quantity(text):
    """(value, unit) of a text that is one number, or None.

    "1,234", "1 234" -> (1234, "")    "1e-05" -> (1/100000, "")    "$5 million" -> (5, "$ million")
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
