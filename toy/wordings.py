"""Many ways to ask the toy's questions, for its warm start, so that it can read ones that it has
never seen.

    ask("atomic number", "iron", "plus", 17, rng) -> "Hey, add 17 to the proton count of iron"
    unknown("iron", rng)                          -> "What is the smell of iron"

The questions of training and test (questions.py) have few wordings. A model that has read these
alone looks for words at fixed places. Here a question has a lead, a core and an end, each drawn
from many (wordings.txt), and chance puts other words around and between."""

import re
from pathlib import Path


def phrases():
    """{section: its phrases} of wordings.txt, where | separates them."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    sections = re.findall(r"\[(.*)\]\n([^\[]*)", text)
    return {name: [" ".join(part.split()) for part in body.split("|")] for name, body in sections}


PHRASES = phrases()
COMMON = PHRASES["common"]


def ask(what, name, op, n, rng):
    """A question for the number of a name, or for the result of an operation on it."""
    drawn = lambda *sections: rng.choice(sum(map(PHRASES.get, sections), []))
    noun = drawn("named").format(a=drawn(what), x=name)
    form = rng.random()
    if op:
        if form < 0.1:
            noun = drawn(f"{what}: direct").format(x=name)
        more = [f"{op} {n}"] if f"{op} {n}" in PHRASES else []  # "double", "triple"
        text = f"{drawn('compute')} {drawn(op, *more).format(a=noun, n=n)}"
    elif form < 0.5:
        text = f"{drawn('leads')} {noun}"
    elif form < 0.8:
        text = drawn(f"{what}: direct").format(x=name)
    else:
        text = f"{drawn('indirect leads')} {drawn(f'{what}: indirect').format(x=name)}"
    return scattered(f"{text} {drawn('ends')}", rng)


def unknown(name, rng):
    """A question that the toy cannot answer: about what no passage says, or about nothing."""
    drawn, form = lambda section: rng.choice(PHRASES[section]), rng.random()
    if form < 0.4:
        text = f"{drawn('leads')} {drawn('named').format(a=drawn('unknown'), x=name)}"
    elif form < 0.6:
        text = f"{rng.choice('who what how when where why'.split())} {drawn('verbs')} {name}"
    else:
        text = " ".join(rng.choices(COMMON, k=rng.randrange(2, 9)))
        text += rng.choice(["", "", f" {name}"])
    return scattered(text, rng)


def scattered(text, rng):
    """The text with other words around and between its words, but none beside a number."""
    words = text.split()
    for _ in range(rng.choice([0, 0, 0, 1, 2, 3])):
        place = rng.randrange(len(words) + 1)
        if not re.search(r"[\d+*-]", " ".join(words[max(0, place - 1) : place + 1])):
            words.insert(place, rng.choice(COMMON))
    words = clause(rng, 0.3) + words + clause(rng, 0.2)
    text = " ".join(words)
    if rng.random() < 0.7:
        text = text[0].upper() + text[1:]
    return text + rng.choice(["?", "?", "?", ".", "", "!"])


def clause(rng, share):
    """Some random words, or with the probability 1 - share none."""
    words = rng.choices(COMMON, k=rng.randrange(1, 9)) if rng.random() < share else []
    return [*words[:-1], words[-1] + rng.choice(["", ",", ".", ":", "?", "!"])] if words else []
