"""The toy's world: true facts that are found by following sources, and questions about them.

    {"question": "Tell me the calling code of Norway plus 17.", "answer": "64", "kind": "wb+",
     "name": "Norway", "what": "calling code", "op": "plus", "n": 17}

facts.csv has the facts: the atomic numbers of elements, which also go by their Italian (or
Esperanto) names, and the calling codes of countries, which are those of their cities, too. What
leads to a name's number is drawn at random for each name, and only the result of a step shows what
comes next:

    w   wikipedia_search finds the number, or what leads to it
    b   "The calling code of Norway is at https://facts.org/217", or two sources that contradict
        each other and the address of a page that settles it: web_search reads the page
    p   "The calling code of Norway is 40 + 7.": python_coder calculates it
    bw  the page says "It is filed as Oslo.": the number is found under this name
    wg  wikipedia_search finds nothing, but base_generator knows the number. It knows no other:
        elsewhere it makes a number up
    +   "plus 17" at the end: python_coder calculates it

A path is a string of these letters, such as "wbw": search, read the page, search for the name that
it says. No name of a test question is in a training question, nor is any name or page that leads to
its number."""

import csv
import random
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from benchmarks.questions import Question

SIZES = {"train": 2000, "valid": 96, "test": 300, "long": 200}
FACTS = Path(__file__).with_name("facts.csv")
WORDS = {"atomic number": "number", "calling code": "code"}  # as sub-goals and queries say it
URLS = [f"https://facts.org/{n}" for n in range(101, 351)]
SIGNS = {"plus": "+", "minus": "-", "times": "*"}

TEST_PAIRS = 32  # of the 100 pairs of names of elements, and of the 135 of countries
# The paths of a pair's two names, in turn. "f": a page says that this name is filed as the other
# one
PAIRS = "f-w wb-wp f-w wg-wbp f-w wg-wb wbp-wp f-w f-wb wp-wg f-w wb-wg f-wp wbp-wb wp-wbp wg-w"
PAIRS = [pair.split("-") for pair in PAIRS.split()]
# {the path of a question: how often it is drawn}
PATHS = {"wb": 1, "wp": 1, "wbw": 2, "wbp": 1, "wg": 2, "w+": 1, "wb+": 3, "wp+": 3, "wg+": 3}
LONG = {"wbw+": 1, "wbp+": 1, "wbwb": 1, "wbwp": 1, "wbwb+": 1, "wbwp+": 1}


def facts():
    """[(what, number, [name, other name])], all true."""
    with open(FACTS, encoding="utf-8") as file:
        return [(what, int(number), names) for what, number, *names in list(csv.reader(file))[1:]]


def made_up(rng):
    """The same names in other pairs, with random numbers."""
    for what in WORDS:
        names = [name for kind, _, pair in facts() if kind == what for name in pair]
        rng.shuffle(names)
        for pair in zip(names[::2], names[1::2], strict=True):
            yield what, rng.randrange(2, 1000), list(pair)


@dataclass(frozen=True)
class Thing:
    """A name of which questions ask the number. what: a key of WORDS."""

    name: str
    what: str
    number: int
    path: str

    @property
    def goal(self):
        """What sub-goals look for: "code of Norway"."""
        return f"{WORDS[self.what]} of {self.name}"


class World:
    """What leads to each name's number, drawn by chance.

    rows: the corpus. things: {"train": [Thing], "test": ...}. World(0) has the true facts, and is
    that of the files. In all others names and numbers are shuffled: a warm start in many of these
    cannot teach what leads to a name's number, nor the number."""

    def __init__(self, seed=0):
        self.rng, self.rows = random.Random(f"world {seed}"), []
        self.urls, self.things = self.rng.sample(URLS, len(URLS)), {"test": [], "train": []}
        drawn = list(made_up(self.rng) if seed else facts())
        for what in WORDS:
            pairs = [pair for pair in drawn if pair[0] == what]
            self.rng.shuffle(pairs)
            self.things["test"] += self.drawn(pairs[:TEST_PAIRS])
            self.things["train"] += self.drawn(pairs[TEST_PAIRS:])
        self.rng.shuffle(self.rows)

    def drawn(self, pairs):
        """The Things of these pairs of names."""
        things = []
        for (what, number, names), (path, other_path) in zip(pairs, cycle(PAIRS)):
            name, other = self.rng.sample(names, 2)
            self.add(Thing(other, what, number, other_path))
            if path == "f":
                text = f"The {what} of {name} is at {self.urls[-1]}"
                self.rows.append({"title": name, "text": text})
                self.add_page(f"It is filed as {other}.")
                path = f"wb{other_path}"
            else:
                self.add(Thing(name, what, number, path))
            things += [Thing(name, what, number, path), Thing(other, what, number, other_path)]
        return things

    def add(self, thing):
        """Add to the corpus what leads to a thing's number, according to its path."""
        if thing.path == "wg":
            return
        start, shown = f"The {thing.what} of {thing.name} is", str(thing.number)
        if thing.path.endswith("p"):
            shown = calculation(thing.number, self.rng)
        texts = [f"{start} {shown}."]
        if "b" in thing.path:
            texts = [f"{start} at {self.urls[-1]}"]
            if self.rng.random() < 0.4:  # two sources, of which one is wrong
                near = range(max(2, thing.number - 40), min(1000, thing.number + 40))
                wrong = self.rng.choice([n for n in near if n != thing.number])
                one, two = self.rng.sample([thing.number, wrong], 2)
                texts = [f"{start} {one}.", f"{start} {two}, but see {self.urls[-1]}"]
            self.add_page(f"The {WORDS[thing.what]} is {shown}.")
        self.rows += [{"title": thing.name, "text": text} for text in texts]

    def add_page(self, text):
        self.rows.append({"title": "Page", "text": text, "url": self.urls.pop()})

    def all_things(self):
        return self.things["train"] + self.things["test"]

    def known(self):
        """{query: number}: what base_generator knows."""
        return {thing.goal: thing.number for thing in self.all_things() if thing.path == "wg"}

    def questions(self, n, split, seed, paths=PATHS, avoid=(), word=None):
        """n different questions about the things of a split, as dicts. avoid: texts that must not
        be among them. word(what, name, op, n, rng): their wording."""
        rng, found, word, deck = random.Random(seed), {}, word or WORDINGS[split], []
        while len(found) < n:
            deck = deck or rng.sample(list(paths), sum(paths.values()), counts=list(paths.values()))
            path = deck.pop()
            kind = path.removesuffix("+"), rng.choice(list(WORDS))  # independent of each other
            things = [each for each in self.things[split] if (each.path, each.what) == kind]
            thing = rng.choice(things)
            op, number = operation(thing.number, rng) if path.endswith("+") else ("", 0)
            answer = operate(thing.number, SIGNS[op], number) if op else thing.number
            text = word(thing.what, thing.name, op, number, rng)
            if text not in found and text not in avoid:
                row = {"kind": path, "question": text, "answer": str(answer), "name": thing.name}
                found[text] = row | {"what": thing.what, "op": op, "n": number}
        return list(found.values())


def calculation(number, rng):
    """A number as a product, a sum or a difference: 47 -> "40 + 7"."""
    factors = [n for n in range(2, number // 2 + 1) if number % n == 0]
    if factors and rng.random() < 0.7:
        n = rng.choice(factors)
        return f"{n} * {number // n}"
    n = rng.randrange(1, 100)
    if n < number and (number + n > 999 or rng.random() < 0.5):
        return f"{number - n} + {n}"
    return f"{number + n} - {n}"


def operate(a, sign, b):
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def operation(number, rng):
    """An operation on a number, with a result from 1 to 999: ("plus", 17)."""
    while True:
        op, n = rng.choice(list(SIGNS)), rng.randrange(2, 100)
        n = n % 8 + 2 if op == "times" else n
        if 0 < operate(number, SIGNS[op], n) < 1000:
            return op, n


# ----------------------------------------------------------------------------------------- wordings
STARTS = ["What is", "Tell me", "Find", "I need", "Give me", "I want to know", "Could you give me"]
STARTS += ["Can you find", "Do you know", "Please tell me", "Let me know", "Hello. What is"]
OPENINGS = {
    "train": STARTS,
    "test": ["Please give me", "I want to find", "Can you tell me", "Please let me know"],
}
ENDINGS = ["", "please", "now", "today", "for me"]


def worded(openings):
    """A function that words a question with one of these openings."""

    def word(what, name, op, n, rng):
        end = f" {rng.choice([op, SIGNS[op]])} {n}" if op else ""
        text = f"{rng.choice(openings)} the {what} of {name}{end} {rng.choice(ENDINGS)}"
        return text.strip() + rng.choice("?.")

    return word


WORDINGS = {split: worded(openings) for split, openings in OPENINGS.items()}


def splits(world):
    """{"train": ..., "valid": ..., "test": ..., "long": ...}: the questions of the JSONL files."""
    valid = world.questions(SIZES["valid"], "train", seed=2)
    texts = {question["question"] for question in valid}
    return {
        "train": world.questions(SIZES["train"], "train", seed=3, avoid=texts),
        "valid": valid,
        "test": world.questions(SIZES["test"], "test", seed=1),
        "long": world.questions(SIZES["long"], "test", seed=4, paths=LONG),
    }


def for_flow(made):
    """The questions as the flow takes them: [Question]."""
    return [Question(row["question"], row["answer"], kind=row["kind"]) for row in made]
