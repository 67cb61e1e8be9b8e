"""The second toy's world: made-up things whose numbers are found by following sources, and questions on them.

    {"question": "Tell me the number of Bavok plus 17.", "answer": "47", "kind": "plus", "names": ["Bavok"],
     "added": 17}

What leads to a thing's number is drawn for each thing, and nothing but the result of a step shows it:

    w   wikipedia_search finds the number, or what follows
    b   "The number of Bavok is at https://hops.org/217", or two sources that contradict each other and the
        address of a page that settles it: web_search reads the page
    p   "The number of Bavok is 7 * 4.": python_coder calculates it
    bw  the page says "It is filed as Tirun.": the number is found under this name
    wg  wikipedia_search does not know an old name; base_generator, a model of its own, knows the new one

A path is a string of these letters, such as "wbw": search, read the page, search for the name that it says.
Three kinds of questions: the number of one thing; the same, plus a number; the sum of two things' numbers.
They need two to five calls.

No thing of a test question is in a training question, nor is any name, page or number that leads to it.
"""

import random
from itertools import cycle, islice

from rewards.questions import Question
from toy import wordings

SIZES = {"train": 2000, "valid": 96, "test": 300}
MAX_TURNS = 5
KINDS = ("one", "plus", "sum")


def made_up(n):
    """n different names of two syllables, always the same ones."""
    rng, names = random.Random(0), {}
    while len(names) < n:
        first, second = rng.choices("BDFGKLMNRTVZ")[0], rng.choices("bdfgklmnrtvz")[0]
        a, b = rng.choices("aeiou", k=2)
        names[first + a + second + b + rng.choice("klmnrs")] = None
    return list(names)


NAMES = made_up(840)
NAMES, OLD_NAMES = NAMES[:640], NAMES[640:]
NEW_NAMES = NAMES[: len(OLD_NAMES)]  # those that old names may have
URLS = [f"https://hops.org/{n}" for n in range(101, 401)]

# {number of calls: the paths of a thing, and how often each is drawn}
PATHS = {1: {"w": 1}, 2: {"wb": 1, "wp": 1},
         3: {"wbw": 1, "wbp": 1, "wgw": 5},
         4: {"wbwb": 1, "wbwp": 1, "wgwb": 4, "wgwp": 4}}
THINGS = {"train": {1: 120, 2: 135, 3: 135, 4: 90}, "test": {1: 20, 2: 20, 3: 22, 4: 16}}
# {kind: the numbers of calls of its things, and how often each is drawn}
CALLS = {"one": {(2,): 2, (3,): 4, (4,): 4}, "plus": {(1,): 1, (2,): 2, (3,): 4, (4,): 2},
         "sum": {(1, 1): 4, (1, 2): 2, (2, 1): 2, (2, 2): 3, (1, 3): 3, (3, 1): 3}}
# Of the training questions half are sums: they are the last to be answered right, and a group whose rollouts
# are all wrong teaches nothing. Half have an old name (paths of 3 and 4 calls): with fewer, some planners
# unlearn base_generator before it pays off (experiments/RESULTS.md, section 1).
TRAIN_KINDS = ("one", "sum", "plus", "sum")
TRAIN_CALLS = {"one": {(2,): 1, (3,): 6, (4,): 3}, "plus": {(1,): 1, (2,): 1, (3,): 6, (4,): 2},
               "sum": {(1, 1): 4, (1, 2): 2, (2, 1): 2, (2, 2): 2, (1, 3): 5, (3, 1): 5}}


def draw(weights, rng):
    return rng.choices(list(weights), list(weights.values()))[0]


def in_turn(weights, n):
    """n of the keys, in turn, each as often as its weight says."""
    return list(islice(cycle([key for key, weight in weights.items() for _ in range(weight)]), n))


class World:
    """One drawing of all things: what leads to their numbers, and the numbers.

    rows: the corpus. things: {"train": {number of calls: [(name, number, path)]}, "test": ...}.
    renamed: {old name: new name}. It differs between worlds, so that a warm start in many of them teaches
    none; the base_generator that is made with the toy knows that of World(0)."""

    def __init__(self, seed):
        self.rng = random.Random(f"world {seed}")
        self.renamed = dict(zip(OLD_NAMES, random.Random(f"names {seed}").sample(NEW_NAMES, len(NEW_NAMES))))
        self.old = self.shuffled(OLD_NAMES)
        self.free = [name for name in self.shuffled(NAMES) if name not in NEW_NAMES]
        self.urls, self.rows, self.things = self.shuffled(URLS), [], {}
        for split, counts in THINGS.items():
            self.things[split] = {calls: [self.thing(path) for path in in_turn(PATHS[calls], number)]
                                  for calls, number in counts.items()}
        self.rng.shuffle(self.rows)

    def shuffled(self, values):
        return self.rng.sample(list(values), len(values))

    def thing(self, path):
        """(its name in questions, its number, its path); what leads to the number is added to the corpus."""
        if path.startswith("wg"):
            name = self.old.pop()
            return name, self.entry(self.renamed[name], path[3:]), path
        name = self.free.pop()
        return name, self.entry(name, path[1:]), path

    def entry(self, name, path):
        """Write what wikipedia_search finds for a name; return the number. path: what is left after it."""
        start = f"The number of {name} is"
        if not path or path[0] == "p":
            number, shown = self.number(path)
            self.rows.append({"title": name, "text": f"{start} {shown}."})
            return number
        url = self.urls.pop()
        number = self.page(url, path[1:])
        if path == "b" and self.rng.random() < 0.4:  # two sources: one of them is wrong
            wrong = self.rng.choice([n for n in range(2, 450) if n != number])
            first, second = self.shuffled([number, wrong])
            self.rows.append({"title": name, "text": f"{start} {first}."})
            self.rows.append({"title": name, "text": f"{start} {second}, but see {url}"})
        else:
            self.rows.append({"title": name, "text": f"{start} at {url}"})
        return number

    def page(self, url, path):
        """Write a page; return the number to which it leads. path: what is left after it."""
        if path and path[0] == "w":
            name = self.free.pop()
            text, number = f"It is filed as {name}.", self.entry(name, path[1:])
        else:
            number, shown = self.number(path)
            text = f"The number is {shown}."
        self.rows.append({"title": "Page", "text": text, "url": url})
        return number

    def number(self, path):
        """(a number, how a source writes it: with "p" as a product)"""
        if not path:
            number = self.rng.randrange(2, 450)
            return number, str(number)
        a, b = self.rng.randrange(2, 10), self.rng.randrange(3, 50)
        return a * b, f"{a} * {b}"

    def question(self, kind, split, rng, noise=False):
        """One question of this kind: a dict as at the top of the file, with the paths of its things."""
        calls = draw((CALLS if split == "test" else TRAIN_CALLS)[kind], rng)
        chosen = [rng.choice(self.things[split][number]) for number in calls]
        names = [name for name, _, _ in chosen]
        if len(set(names)) < len(names):
            return self.question(kind, split, rng, noise)
        added = rng.randrange(2, 100) if kind == "plus" else 0
        text = wording(kind, names, added, split == "test", rng, noise)
        answer = str(sum(number for _, number, _ in chosen) + added)
        return {"question": text, "answer": answer, "kind": kind, "names": names, "added": added,
                "paths": [path for _, _, path in chosen]}

    def questions(self, n, split, seed, avoid=(), noise=False, kinds=KINDS):
        """n different questions, of these kinds in turn. avoid: texts that must not be among them."""
        rng, found = random.Random(seed), {}
        while len(found) < n:
            made = self.question(kinds[len(found) % len(kinds)], split, rng, noise)
            if made["question"] not in found and made["question"] not in avoid:
                found[made["question"]] = made
        return list(found.values())


# --------------------------------------------------------------------------------------------------- wordings
OPENINGS = (["What is", "Tell me", "Find", "I need", "Give me", "I want to know", "Could you give me",
             "Can you find", "Do you know", "Please tell me", "Let me know", "Hello. What is"],
            ["Please give me", "I want to find", "Can you tell me", "Please let me know"])
CORES = {"one": ["the number of {x}"], "plus": ["the number of {x} plus {n}", "{n} plus the number of {x}"],
         "sum": ["the number of {x} plus the number of {y}", "the sum of the numbers of {x} and {y}"]}
ENDINGS = ["", "please", "now", "today", "for me"]
FILLERS = sorted({word.strip(".") for text in OPENINGS[0] + ENDINGS for word in text.split()})


def wording(kind, names, added, test, rng, noise):
    """The text of a question. noise, for the warm start: half of them are worded in other ways (wordings.py),
    and half of the other openings are random words."""
    x, y = names[0], names[-1]
    if noise and rng.random() < 0.5:
        words = {"a": "number", "x": x, "y": y, "sum": (0, "+", added)}
        return wordings.ask({"one": "fact", "plus": "fact_math"}.get(kind, kind), words, rng)
    opening = rng.choice(OPENINGS[test])
    if noise and rng.random() < 0.5:
        opening = " ".join(rng.choices(FILLERS, k=rng.randrange(1, 6)))
    core = rng.choice(CORES[kind]).format(x=x, y=y, n=added)
    return " ".join(part for part in (opening, core, rng.choice(ENDINGS)) if part) + rng.choice("?.")


def splits(world):
    """{"train": ..., "valid": ..., "test": ...}: the questions of the JSONL files."""
    valid = world.questions(SIZES["valid"], "train", seed=2)
    train = world.questions(SIZES["train"], "train", seed=3, avoid={made["question"] for made in valid},
                            kinds=TRAIN_KINDS)
    return {"train": train, "valid": valid, "test": world.questions(SIZES["test"], "test", seed=1)}


def for_flow(made):
    """The questions as the flow takes them: [Question]."""
    return [Question(row["question"], row["answer"], kind=row["kind"]) for row in made]
