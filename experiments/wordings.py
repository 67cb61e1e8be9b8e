"""Questions in many wordings, for a pretrained model that learns in the toy's world (smollm.py).

    {"question": "Which city is the capital of Norway?", "answer": "Oslo", "kind": "fact",
     "steps": [("capital", "Norway")]}

The toy's questions have one grammar (toy/questions.py). A pretrained model that is warm-started in it copies
its phrases into every plan. So here the same facts and calculations are put in a few dozen wordings.
freely.jsonl has questions written by hand, in no wording that is here.
"""

import random
from collections import Counter

from toy.questions import COUNTRIES, ELEMENTS, OPERATORS, make, splits

# No training question names these: at commit 80a4902 questions about them were a test of their own.
HELD_OUT = {name for name, _ in ELEMENTS[3::8]} | {name for name, *_ in COUNTRIES[3::8]}
MIX = {"fact_math": 3, "arithmetic": 2, "fact": 1, "compare": 1}  # of the questions of Flow-GRPO

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


def spread(questions):
    """The same questions in the same order, but each kind evenly spread over it (edits/kinds-spread.diff)."""
    seen, places = Counter(), []
    for question in questions:
        seen[question.kind] += 1
        places.append(seen[question.kind])
    shares = [(place - 0.5) / seen[question.kind] for place, question in zip(places, questions)]
    return [questions[i] for i in sorted(range(len(questions)), key=shares.__getitem__)]
