"""Many ways to ask the toy's questions, for its warm start, so that it reads ones that it has never seen.

    ask("fact", {"a": "atomic number", "x": "Iron"}, rng) -> "Hey, how many protons has Iron please"

The questions that it is trained and tested on (questions.py) have a dozen wordings. A model that has read
these alone looks for words at fixed places, and misreads "How many protons does gold have?". Here a question
has a lead, a core and an end, each drawn from many, and chance puts other words around and between.
"""

import re

COMMON = """
a about actually after again all also am an and another answer any anyone are as at be because before being
best big book brother but by can case check class come could curious day dear did do does doing done down
each early else end ever every exactly exam example explain eye far few fill first for friend from game
geography get girl given go good got guess had hand has have he heard hello help her here hey hi him his
homework how however idea if in instead into is it its just kids kind know last late later learn least less
lesson let life like list little long look lot made make man many map maths may maybe me mean might mind
more most much must my name near need never new next nice night no note nothing now of off oh ok old on once
one only or other our out over own paper part people place plain plan play point put question quick quiz
read really remember right said same say school science see seem she should show simple since sister small
so some someone something son soon still study such sure table take talk teacher test than thanks that the
their them then there these they thing think this those though time to today told too true try two under
until up upon us use very want was way we week well went were what when where which while who whole why will
wish with without wonder wondering word work world would write wrong year yes yet you your
""".split()

LEADS = ["what is", "what's", "tell me", "give me", "find", "find me", "i need", "i want to know",
         "please find", "look up", "please look up", "can you find", "could you tell me", "do you know",
         "i am looking for", "name", "state", "write down", "let me know", "show me", "i would like to know",
         "would you tell me", "can you say", "i must know", "help me with", "what would be",
         "i was asked for", "we need", "get me", "remind me of", "i wonder about", "could you give me",
         "please give me", "what might be", ""]
INDIRECT = ["tell me", "i want to know", "do you know", "let me know", "can you say", "could you tell me",
            "please say", "i wonder", "i would like to know", "find out", "can you find out",
            "do you remember", "i need to know", "please tell me", "explain", "i forgot", "i can't remember",
            "we have to say", "someone asked me", ""]
COMPUTE = ["compute", "calculate", "work out", "evaluate", "please compute", "can you calculate",
           "figure out", "could you work out", "what do you get for", "how much is",
           "what does one get from", "solve", "please work out", "i have to calculate", "how much makes"]
ENDS = ["", "", "", "", "please", "for me", "thanks", "now", "today", "if you can", "if you know it",
        "exactly", "again", "quickly", "in one word", "do you know", "can you tell", "thank you", "then"]

# {what is asked: its names, direct questions, indirect questions}. {x}: an element, a country, or a thing
# of the second toy.
ASKED = {
    "atomic number": (
        ["atomic number", "number of protons", "proton number", "element number", "nuclear charge",
         "proton count", "place in the periodic table", "position in the periodic table",
         "number in the periodic table", "ordinal number", "atomic no.", "Z", "Z value",
         "number of electrons"],
        ["how many protons does {x} have", "how many protons has {x}", "how many protons are in {x}",
         "how many protons are there in an atom of {x}", "how many electrons does an atom of {x} have",
         "which number does {x} have in the periodic table", "which element number is {x}",
         "where does {x} stand in the periodic table", "at which place in the periodic table is {x}",
         "what number is {x} in the periodic table", "which atomic number does {x} have",
         "what element number is {x}", "how many protons does one atom of {x} contain",
         "{x} has how many protons", "what number is {x}"],
        ["how many protons {x} has", "how many protons an atom of {x} has", "which element number {x} is",
         "which number {x} has in the periodic table", "where in the periodic table {x} is",
         "what number {x} has", "how many protons there are in {x}", "how many protons a {x} atom has"]),
    "symbol": (
        ["symbol", "chemical symbol", "abbreviation", "short form", "chemical sign", "letters", "short name",
         "chemical abbreviation", "letter or letters", "element symbol"],
        ["how is {x} abbreviated", "how do chemists write {x}", "which letters stand for {x}",
         "what stands for {x} in the periodic table", "which symbol does {x} have",
         "what symbol is used for {x}", "how is {x} written in chemistry", "how do you abbreviate {x}",
         "by which letters is {x} known", "what is {x} called in short", "which letters mean {x}",
         "how do i write {x} in a formula"],
        ["how {x} is abbreviated", "how chemists write {x}", "which letters stand for {x}",
         "how to abbreviate {x}", "which symbol {x} has", "how {x} is written in the periodic table",
         "what {x} is in short"]),
    "capital": (
        ["capital", "capital city", "seat of government", "main city", "capital town",
         "seat of the government"],
        ["which city is the capital of {x}", "what city is the capital of {x}",
         "what is {x}'s capital called", "from which city is {x} governed",
         "in which city does the government of {x} sit", "which city is {x}'s capital",
         "where is the government of {x}", "which capital does {x} have",
         "what do you call the capital of {x}", "which town governs {x}",
         "where does the president of {x} live"],
        ["which city is the capital of {x}", "which city governs {x}", "what the capital of {x} is called",
         "from which city {x} is governed", "which capital {x} has", "where the government of {x} sits"]),
    "continent": (
        ["continent", "part of the world", "home continent", "continent name"],
        ["on which continent is {x}", "which continent is {x} on", "what continent is {x} in",
         "where is {x}", "where in the world is {x}", "to which continent does {x} belong",
         "what continent does {x} belong to", "in which part of the world is {x}",
         "on what continent does {x} lie", "where does {x} lie", "which continent has {x} in it",
         "where on earth is {x}", "{x} is on which continent"],
        ["on which continent {x} is", "which continent {x} is on", "where {x} is", "where {x} lies",
         "to which continent {x} belongs", "in which part of the world {x} is", "what continent {x} is in"]),
    "number": (
        ["number", "number", "assigned number", "official number", "listed number", "own number"],
        ["which number does {x} have", "what number does {x} have", "which number has {x}",
         "{x} has which number", "what number is {x}", "under which number is {x} known",
         "which number was given to {x}", "which number stands for {x}", "what number do you find for {x}",
         "what number goes with {x}"],
        ["which number {x} has", "what number {x} has", "which number was given to {x}",
         "which number {x} got", "what number stands for {x}", "which number is that of {x}",
         "what number goes with {x}"]),
}
NAMED = ["the {a} of {x}", "the {a} of {x}", "{x}'s {a}", "the {a} for {x}", "{a} of {x}", "{a} for {x}",
         "{x} {a}", "the {a} that {x} has", "{x}: {a}", "the {a} belonging to {x}", "{a} {x}",
         "the {a} of the one called {x}"]
SUMS = {
    "+": ["{a} + {b}", "{a} + {b}", "{a} plus {b}", "{a} plus {b}", "the sum of {a} and {b}",
          "{a} and {b} together", "{b} added to {a}", "{a} increased by {b}", "the total of {a} and {b}",
          "{a} and {b} more", "adding {a} and {b}", "{a} with {b} added"],
    "-": ["{a} - {b}", "{a} - {b}", "{a} minus {b}", "{a} minus {b}", "{a} less {b}", "{b} taken from {a}",
          "{b} subtracted from {a}", "the difference of {a} and {b}", "{a} reduced by {b}",
          "the difference between {a} and {b}", "{a} without {b}", "{b} less than {a}"],
    "*": ["{a} * {b}", "{a} * {b}", "{a} times {b}", "{a} times {b}", "{a} multiplied by {b}", "{a} x {b}",
          "the product of {a} and {b}", "{b} times {a}", "{a} multiplied with {b}", "{a} taken {b} times"],
    "/": ["{a} / {b}", "{a} divided by {b}", "{a} over {b}", "the quotient of {a} and {b}"],
}
DO = {
    "+": ["add {b} to {a}", "add {a} and {b}", "sum up {a} and {b}"],
    "-": ["subtract {b} from {a}", "take {b} from {a}", "take away {b} from {a}"],
    "*": ["multiply {a} by {b}", "multiply {a} with {b}", "multiply {a} and {b}"],
    "/": ["divide {a} by {b}"],
}
SAME = ["{x} and {y} are on the same continent", "{x} and {y} share a continent",
        "{x} lies on the continent of {y}", "{x} is on the same continent as {y}",
        "{x} and {y} belong to one continent", "{x} is on {y}'s continent",
        "{x} and {y} have the same continent", "{x} and {y} lie in the same part of the world",
        "{x} belongs to the same continent as {y}", "{x} and {y} are in the same part of the world"]
ARE_SAME = ["are {x} and {y} on the same continent", "do {x} and {y} share a continent",
            "is {x} on {y}'s continent", "is {x} on the same continent as {y}",
            "do {x} and {y} belong to one continent", "{x} and {y}: same continent",
            "does {x} lie on the continent of {y}", "are {x} and {y} on one continent",
            "do {x} and {y} have the same continent", "does {x} belong to the same continent as {y}",
            "are {x} and {y} in the same part of the world", "{x} and {y}, one continent or two",
            "are both {x} and {y} on one continent", "{y} and {x}: do they share a continent"]
# What the toy does not know.
UNKNOWN = ["population", "area", "size", "flag", "president", "language", "money", "king",
           "highest mountain", "colour", "melting point", "boiling point", "price", "weight", "density",
           "discoverer", "smell", "age", "climate", "neighbours", "history", "longest river",
           "national animal", "anthem", "mass", "temperature", "hardness"]


def lead(leads, core, rng):
    return f"{rng.choice(leads)} {core}".strip()


def ask(kind, words, rng):
    """One question of this kind. words: a (what is asked), x, y (of whom), sum (number, operator, number)."""
    if kind == "arithmetic":
        text = calculation(*words["sum"], rng)
    elif kind == "sum":
        text = calculation(noun(words, rng), "+", noun(words | {"x": words["y"]}, rng), rng)
    elif kind == "fact_math":
        text = calculation(noun(words, rng), *words["sum"][1:], rng)
    elif kind == "compare":
        if rng.random() < 0.6:
            text = rng.choice(ARE_SAME).format(**words)
        else:
            text = lead(INDIRECT, f"{rng.choice(['whether', 'if'])} {rng.choice(SAME).format(**words)}", rng)
    else:
        _, direct, indirect = ASKED.get(words["a"], ([], [], []))
        form = rng.random() if direct else 0
        if form < 0.5:
            text = lead(LEADS, noun(words, rng), rng)
        elif form < 0.8:
            text = rng.choice(direct).format(**words)
        else:
            text = lead(INDIRECT, rng.choice(indirect).format(**words), rng)
    return scattered(f"{text} {rng.choice(ENDS)}".strip(), rng)


def noun(words, rng):
    names = ASKED.get(words["a"], ([words["a"]],))[0]
    return rng.choice(NAMED).format(a=rng.choice([words["a"], *names]), x=words["x"])


def calculation(a, op, b, rng):
    if rng.random() < 0.2:
        return lead(["", "", "please", "can you", "now"], rng.choice(DO[op]).format(a=a, b=b), rng)
    return lead(LEADS[:8] + COMPUTE + [""], rng.choice(SUMS[op]).format(a=a, b=b), rng)


def scattered(text, rng):
    """The text with other words around and between its words, but not inside of a calculation."""
    words = text.split(" ")
    if rng.random() < 0.5:
        for _ in range(rng.randrange(1, 4)):
            places = [i for i in range(len(words) + 1) if not touches_number(words[max(0, i - 1) : i + 1])]
            if places:
                words.insert(rng.choice(places), rng.choice(COMMON))
    if rng.random() < 0.35:
        words = clause(rng) + words
    if rng.random() < 0.2:
        words += clause(rng)
    text = " ".join(words)
    if rng.random() < 0.2:
        text = re.sub(r"(?<=\d) ([-+*/x]) (?=\d)", r"\1", text)  # 17*23
    return (text[0].upper() + text[1:] if rng.random() < 0.7 else text) + rng.choice(["?", "?", "?", ".",
                                                                                      "", "!"])


def touches_number(words):
    return any(character.isdigit() or character in "+-*/" for word in words for character in word)


def clause(rng):
    words = rng.choices(COMMON, k=rng.randrange(1, 9))
    words[-1] += rng.choice(["", ",", ".", ":", "?", "!"])
    return words


def unknown(rng, names):
    """(a question that the toy cannot answer, its steps): about what no passage says, or about nothing."""
    if rng.random() < 0.6:
        what, whom = rng.choice(UNKNOWN), rng.choice(names)
        return ask("fact", {"a": what, "x": whom}, rng), [(what, whom)]
    return scattered(" ".join(rng.choices(COMMON, k=rng.randrange(3, 12))), rng), [("answer", "it")]
