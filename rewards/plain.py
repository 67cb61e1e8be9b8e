"""An answer as plain text, so that the same answer is the same text however it is written.

undressed(r"The answer is **$10{,}000$**.") -> "10,000"
"""

import re
import unicodedata

# Marks that nobody sees. A direction override (U+202E) stays: it shows another text. Joiners stay
# before letters of other scripts and before emoji, where they mean something.
INVISIBLE = re.compile(
    "[\u00ad\u061c\u200b\u200e\u200f\u202a-\u202c\u2060\u2066-\u2069\ufeff]"
    "|[\u200c\u200d](?![\u0600-\U0010ffff])"
)
FULL_WIDTH = re.compile("[\u3000\uff01-\uffee]")
HYPHENS = re.compile("[\u2010-\u2013\u2212\ufe63]")  # also U+2011, which breaks no line, and minus

# LaTeX that changes no value. "{,}" stays where it may be a decimal comma, and a final "\!", which
# may be a factorial.
LATEX = [
    (r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\{([^{}]*)\}", r"\1"),
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?=\\?[()\[\]{}|])", ""),
    (r"(?<=[0-9,])\\!(?=[0-9])", ""),
    (r"(?<=[0-9])\{,\}(?=[0-9]{3}(?![0-9]))", ","),
    (r"(?<=[0-9,])\\[,:; ]", " "),
    (r"\\([%${}])", r"\1"),
    (r"\\[cdt]frac", r"\\frac"),
    (r"\\frac *([0-9]|(?<= )[a-zA-Z]|\\[a-zA-Z]+)", r"\\frac{\1}"),  # \frac43, \frac\pi 2
    (r"(\\frac\{(?:[^{}]|\{[^{}]*\})*\}) *([0-9a-zA-Z]|\\[a-zA-Z]+)", r"\1{\2}"),
]

# What models put around an answer: an opening, and a wrapper (math, markdown, quotes).
OPENING = re.compile(
    r"(?i)^(?:(?:the )?(?:final |correct )?(?:answer|option|choice)(?: is:?|:) "
    r"|(?:option|choice) (?=\(?[a-z]\b))"
)
WRAPPED = re.compile(
    r"""(?s)\${1,2}([^$]+)\${1,2}|\\\((.+)\\\)|\\\[(.+)\\\]|\\boxed\{(.+)\}"""
    r"""|\*\*((?:(?!\*\*).)+)\*\*|\*([^*]+)\*|`([^`]+)`|"([^"]+)"|“([^”]+)”"""
)


def folded(text):
    r"""The text with one spelling of each character, and without marks that nobody sees.

    "e\u0301" -> "é"    "１２" -> "12"    "Pa\u200bris" -> "Paris"    "x\u2011ray" -> "x-ray"
    """
    text = HYPHENS.sub("-", text)
    text = FULL_WIDTH.sub(lambda m: unicodedata.normalize("NFKC", m[0]), INVISIBLE.sub("", text))
    return unicodedata.normalize("NFC", text)


def undressed(text):
    """The text folded, without LaTeX, markdown, quotes, "The answer is" and a final full stop.

    "**$5$.**" -> "5"
    """
    text = folded(text).translate(str.maketrans("’\t", "'\n"))
    for pattern, plain in LATEX:
        text = re.sub(pattern, plain, text)
    text = "\n".join(" ".join(line.split()) for line in text.splitlines())  # "1\n234" is not 1 234
    for _ in range(4):  # they may be nested
        text = re.sub(r"(?<=[^.])\.$", "", OPENING.sub("", text.strip(), count=1))
        m = WRAPPED.fullmatch(text)
        text = m[m.lastindex] if m else text
    return text
