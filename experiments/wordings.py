"""Questions and sub-goals in many wordings, from which a pretrained model learns the flow's formats.

    {"question": "Which city is the capital of Norway?", "answer": "Oslo", "kind": "fact",
     "steps": [("capital", "Norway")]}

The toy's questions have one grammar (toy/questions.py). A pretrained model that is warm-started in it copies
its phrases into every plan. So here the same facts and calculations are put in a few dozen wordings, and
Linguist, the toy's teacher, has several for each sub-goal, call and invented answer.

Four sets of questions are held out, and reported apart:

    toy       the 300 test questions of the toy
    free      freely.jsonl, written by hand, in no wording that is here
    facts     in these wordings, about elements and countries that no training question names
    numbers   in these wordings, with numbers larger than any in training
"""

import random
import re
from collections import Counter

from toy.questions import COUNTRIES, ELEMENTS, FACTS, OPERATORS, calculate, make, splits
from toy.teacher import Teacher

HELD_OUT = {name for name, _ in ELEMENTS[3::8]} | {name for name, *_ in COUNTRIES[3::8]}
MIX = {"fact_math": 3, "arithmetic": 2, "fact": 1, "compare": 1}  # of the questions of Flow-GRPO
SETS = ("toy", "free", "facts", "numbers")

WORDINGS = {
    "arithmetic": [
        "What is {e}?", "How much is {e}?", "Compute {e}.", "{e} = ?", "Please work out {e} for me.",
        "Could you calculate {e}?", "Give me the result of {e}.", "Tell me what {e} comes to.",
        "I need the value of {e}.",
    ],
    "+": ["What is the sum of {a} and {b}?", "Add {b} to {a}."],
    "-": ["What is {b} less than {a}?", "Subtract {b} from {a}."],
    "*": ["Multiply {a} by {b}.", "What is {b} times {a}?"],
    "atomic number": [
        "What is the atomic number of {x}?", "Which atomic number does {x} have?", "{x}: atomic number?",
        "How many protons does an atom of {x} have?", "Tell me the atomic number of the element {x}.",
        "At which place in the periodic table does {x} stand?",
    ],
    "symbol": [
        "What is the symbol of {x}?", "How do chemists abbreviate {x}?", "Chemical symbol for {x}?",
        "Which letters stand for {x} in the periodic table?", "I need the symbol of the element {x}.",
    ],
    "capital": [
        "What is the capital of {x}?", "Which city is the capital of {x}?", "{x}: capital?",
        "Name the capital city of {x}.", "In which city does the government of {x} sit?",
    ],
    "continent": [
        "On which continent is {x}?", "Which continent does {x} belong to?", "{x} lies on which continent?",
        "Tell me the continent of {x}.",
    ],
    "fact_math": [
        "What is the atomic number of {x} {o}?", "Take the atomic number of {x} {o}.",
        "How much is the atomic number of {x} {o}?", "Compute {x}'s atomic number {o}.",
        "The number of protons in {x} {o}: how much is that?",
    ],
    "+ fact": ["Add {b} to the atomic number of {x}."],
    "- fact": ["Subtract {b} from the atomic number of {x}."],
    "* fact": ["What is {b} times the atomic number of {x}?"],
    "compare": [
        "Are {x} and {y} on the same continent?", "Is {x} on the same continent as {y}?",
        "Do {x} and {y} share a continent?", "{x} and {y}: the same continent, yes or no?",
        "Tell me whether {x} and {y} lie on one continent.",
    ],
}
SUB_GOALS = {
    "fact": [
        "Find the {what} of {whom}", "Look up the {what} of {whom}", "Find out the {what} of {whom}",
        "Get the {what} of {whom}", "Learn the {what} of {whom}", "Determine the {what} of {whom}",
    ],
    "value": [
        "Find the value of {whom}", "Calculate {whom}", "Compute {whom}", "Work out {whom}",
        "Determine how much {whom} is",
    ],
}
INVENTED = ["I think it is {value}.", "The {what} of {whom} is {value}.", "{value}.", "It is {value}."]


def worded(made, rng):
    """This question in one of the wordings; a quarter of them in lower case, as people type."""
    what, whom = made["steps"][0]
    kind = what if made["kind"] == "fact" else made["kind"]
    words, templates = {"x": whom}, list(WORDINGS[kind])
    if kind in ("arithmetic", "fact_math"):
        a, op, b = made["steps"][-1][1].split()
        shown = rng.choice([op, OPERATORS[op]])
        templates += WORDINGS[op if kind == "arithmetic" else f"{op} fact"]
        words |= {"a": a, "b": b, "e": f"{a} {shown} {b}", "o": f"{shown} {b}"}
    if kind == "compare":
        words["y"] = made["steps"][1][1]
    text = rng.choice(templates).format(**words)
    return made | {"question": text.lower() if rng.random() < 0.25 else text}


def names_held_out(made):
    return any(whom in HELD_OUT for _, whom in made["steps"])


def training(n, seed, avoid=()):
    """n different questions of the four kinds, none about a held-out element or country. avoid: texts.

    Half of the comparisons are answered yes: in the toy's questions a guess of "no" is right in 77 %."""
    rng, found = random.Random(f"worded {seed}"), {}
    while len(found) < n:
        made = worded(make(("arithmetic", "fact", "fact_math", "compare")[len(found) % 4], False, rng), rng)
        guessed = made["kind"] == "compare" and made["answer"] != ("yes", "no")[len(found) // 4 % 2]
        if not guessed and not names_held_out(made) and made["question"] not in {*found, *avoid}:
            found[made["question"]] = made
    return list(found.values())


def of_the_toy():
    """The toy's training questions, without those about a held-out element or country."""
    return [made for made in splits()["train"] if not names_held_out(made)]


def asked():
    """The questions of Flow-GRPO: the toy's, and as many in other wordings.

    MIX keeps both tools about equally often right: with four equal kinds, two of three steps are a search,
    and the planner learns to search always before it learns to tell the sub-goals apart. And four of seven
    have two steps, so they need the right tool in both turns. With a turn to spare, either tool soon does."""
    made, rng = of_the_toy(), random.Random("asked")
    made += training(len(made), seed=7)
    kinds = {kind: [one for one in made if one["kind"] == kind] for kind in MIX}
    n = min(len(kinds[kind]) // share for kind, share in MIX.items())
    chosen = [one for kind, share in MIX.items() for one in rng.sample(kinds[kind], share * n)]
    return rng.sample(chosen, len(chosen))


def spread(order, kinds):
    """The same order of questions, but each kind evenly spread over it (edits/kinds-spread.diff)."""
    seen, place = Counter(), {}
    for i in order:
        seen[kinds[i]] += 1
        place[i] = seen[kinds[i]]
    return sorted(order, key=lambda i: (place[i] - 0.5) / seen[kinds[i]])


def facts(n=120, seed=0):
    """Questions about held-out elements and countries alone: a fact, a fact with arithmetic, a comparison."""
    rng, found = random.Random(f"facts {seed}"), {}
    while len(found) < n:
        made = worded(make(("fact", "fact_math", "fact", "compare")[len(found) % 4], False, rng), rng)
        if all(whom in HELD_OUT for what, whom in made["steps"] if what != "value"):
            found[made["question"]] = made
    return list(found.values())


def numbers(n=100, seed=0):
    """Calculations with numbers of four digits. In training they have three at most."""
    rng, found = random.Random(f"numbers {seed}"), {}
    while len(found) < n:
        op, (name, _) = rng.choice("+-*"), rng.choice(ELEMENTS[10:])
        a, b = sorted((rng.randrange(1000, 10_000), rng.randrange(1000, 10_000)), reverse=True)
        a, b = (a, rng.randrange(12, 100)) if op == "*" else (a, b)
        steps, kind = [("value", f"{a} {op} {b}")], "arithmetic"
        if name not in HELD_OUT and len(found) % 2:
            a, op, b, kind = int(FACTS["atomic number", name]), "+", a, "fact_math"
            steps = [("atomic number", name), ("value", f"{{0}} + {b}")]
        made = {"answer": calculate(a, op, b), "kind": kind, "steps": steps}
        made = worded(made, rng)
        found[made["question"]] = made
    return list(found.values())


def teacher_for(roles):
    """The class of the teacher. Beside the toy (roles "planner") it is the toy's own, because the toy's
    executor reads no other sub-goals."""
    return Linguist if roles == "all" else Teacher


class Linguist(Teacher):
    """The toy's teacher (toy/teacher.py), who writes each sub-goal, call and made-up answer in several ways.

    Which way is decided by the question, so the teacher recognises its own sub-goal in memory."""

    def __init__(self, made, blind=None):
        super().__init__(made, blind)
        self.meaning, self.invented = {}, {}  # {sub-goal: (what, whom)}, {made-up answer: the value in it}

    def sub_goal(self, question, known):
        what, text = super().sub_goal(question, known)
        whom = text.removeprefix(f"Find the {what} of ")
        forms = SUB_GOALS["value" if what == "value" else "fact"]
        text = random.Random(question["question"] + whom).choice(forms).format(what=what, whom=whom)
        self.meaning[text] = what, whom
        return what, text

    def read(self, what, result):
        return self.invented.get(result) or super().read(what, result)

    def command(self, prompt):
        what, whom = self.meaning[re.search(r"\nSub-goal: (.+)\n", prompt)[1]]
        if "\npython_coder: " in prompt:
            return f'python_coder(code="print({whom if what == "value" else f"{what} of {whom}"})")'
        if "\nwikipedia_search: " in prompt:
            return f'wikipedia_search(query="{what} of {whom}")'
        return f'base_generator(query="What is the {what} of {whom}?")'

    def invent(self, query):
        what, whom = re.match(r"What is the ([a-z ]+) of (.+)\?$", query).groups()
        values = [value for (name, _), value in FACTS.items() if name == what]
        value = self.blind.choice(values or [str(n) for n in range(1000)])
        text = self.blind.choice(INVENTED).format(what=what, whom=whom, value=value)
        self.invented[text] = value
        return text
