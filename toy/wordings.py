"""Many ways to ask the toy's questions, for its warm start, so that it can read ones that it has never seen.

    ask("atomic number", "iron", "plus", 17, rng) -> "Hey, add 17 to the proton count of iron please"
    unknown("iron", rng)                          -> "What is the smell of iron"

The questions of training and test (questions.py) have few wordings. A model that has read these alone
looks for words at fixed places. Here a question has a lead, a core and an end, each drawn from many, and
chance puts other words around and between.
"""

import re


def phrases(text):
    """The phrases of a text, which | separates."""
    return [" ".join(phrase.split()) for phrase in text.split("|")]


COMMON = """
a about actually after again all also am an and another any anyone are as ask at be because before being
best big book but by can case check class come could curious day dear did do does doing done each else ever
every exactly exam explain far few find first for friend from game geography get girl give go good got guess
had hand has have he hello help her here hey hi him his homework how however i idea if in is it its just kids
kind know last later learn least lesson let life like list little long look made make man many map maths may
maybe me mean mind more most much my name near need never new next nice no note now of off oh ok old on once
one only or other our out over paper people phone place plain please point put question quick quiz read
really remember right same say school science see seem she should show simple since sister small so some
something soon still study such sure table take talk teacher tell test than thanks that the their them then
there these they thing think this those time to today together told too true try two under until up us use
very want was way we week well went were what when where which while who why will wish with without wonder
word work world would write year yes yet you your
""".split()
LEADS = phrases("""what is | what's | tell me | give me | find | i need | i want to know | look up | can you
    find | could you tell me | do you know | i am looking for | name | state | show me | i would like to know
    | can you say | help me with | what would be | we need | could you give me | please give me | | """)
INDIRECT = phrases("""tell me | i want to know | do you know | let me know | can you say | could you tell me
    | i wonder | i would like to know | find out | do you remember | please tell me | i forgot | someone
    asked me | """)
COMPUTE = phrases("""compute | calculate | work out | what do you get for | how much is | figure out | what
    is | can you calculate | what's | tell me | i need | give me | find | what does one get from | | """)
ENDS = phrases("""| | | please | for me | thanks | now | today | if you can | exactly | again | do you
    know""")

NAMED = phrases("""the {a} of {x} | the {a} of {x} | {x}'s {a} | the {a} for {x} | {a} of {x} | {a} for {x}
    | {x} {a} | the {a} that {x} has | {x}: {a} | the {a} in {x} | {a} {x} | the {a} used in {x}""")
# {what is asked: (its names, direct questions, indirect questions)}
ASKED = {
    "atomic number": tuple(map(phrases, ("""
    atomic number | atomic number | number of protons | proton number | element number | nuclear charge |
    proton count | place in the periodic table | position in the periodic table | number | atomic no. |
    number in the periodic table | number of electrons | count of protons | Z
    """, """
    how many protons does {x} have | how many protons has {x} | how many protons are in {x} | how many protons
    are there in an atom of {x} | how many electrons does an atom of {x} have | which number does {x} have in
    the periodic table | which element number is {x} | what number is {x} | where does {x} stand in the
    periodic table | at which place in the periodic table is {x} | what number is {x} in the periodic table |
    which atomic number does {x} have | {x} has how many protons | how many protons does the nucleus of {x}
    contain | how many protons does a {x} atom have
    """, """
    how many protons {x} has | how many protons an atom of {x} has | which element number {x} is | which
    number {x} has in the periodic table | where in the periodic table {x} is | what number {x} has | how many
    protons there are in {x} | what the atomic number of {x} is
    """))),
    "calling code": tuple(map(phrases, ("""
    calling code | calling code | country code | dialling code | dial code | dialing code | phone code |
    telephone code | international code | code | phone prefix | prefix | country calling code | international
    calling code | telephone prefix | phone number prefix | international prefix
    """, """
    which code does {x} have | what code do i dial for {x} | how do i call {x} | what do i dial for {x} |
    which code do i need to call {x} | what is the code to call {x} | which prefix do i dial for {x} | what do
    you dial to call someone in {x} | which number do i dial before a number in {x} | what code must i dial to
    phone {x} | {x} has which calling code | which country code does {x} use | what are the first digits of a
    phone number in {x} | how do you reach {x} by phone | if i phone {x} what do i dial first | what code does
    {x} use | which calling code belongs to {x}
    """, """
    which code {x} has | which code i need for {x} | what to dial for {x} | what i dial to call {x} | how to
    call {x} | which prefix {x} has | what the calling code of {x} is | which code to dial for {x} | what
    number i dial to reach {x}
    """))),
}  # fmt: skip
SUMS = {
    "plus": phrases("""{a} + {n} | {a} plus {n} | the sum of {a} and {n} | {a} and {n} together | {n} added to
    {a} | {a} increased by {n} | {n} more than {a} | {n} plus {a} | {n} + {a} | the total of {a} and {n} | add
    {n} to {a} | add {a} and {n} | take {a} and add {n} | {a} with {n} added"""),
    "minus": phrases("""{a} - {n} | {a} minus {n} | {a} less {n} | {n} taken from {a} | {n} subtracted from
    {a} | the difference of {a} and {n} | {a} reduced by {n} | {n} less than {a} | subtract {n} from {a} |
    take {n} from {a} | take {n} away from {a} | take {a} and subtract {n} | take away {n} from {a}"""),
    "times": phrases("""{a} * {n} | {a} times {n} | {a} multiplied by {n} | {a} x {n} | the product of {a} and
    {n} | {n} times {a} | multiply {a} by {n} | multiply {a} with {n} | take {a} and multiply it by {n} |
    {n} * {a}"""),
}
FACTORS = {
    2: phrases("twice {a} | double {a} | the double of {a} | {a} doubled | two times {a}"),
    3: phrases("triple {a} | three times {a} | {a} tripled"),
}
# What the toy does not know.
UNKNOWN = phrases("""population | area | size | flag | president | language | money | king | highest mountain
    | colour | melting point | boiling point | price | weight | density | discoverer | smell | age | climate |
    neighbours | history | longest river | national animal | anthem | mass | temperature | symbol | capital |
    continent | currency | weather | distance | height | meaning | use | food | time""")
VERBS = "discovered won wrote painted made is was invented sells loves has".split()


def ask(what, name, op, n, rng):
    """A question for the number of a name, or for the result of an operation on it."""
    named, direct, indirect = ASKED[what]
    noun = rng.choice(NAMED).format(a=rng.choice(named), x=name)
    form = rng.random()
    if op:
        if form < 0.1:
            noun = rng.choice(direct).format(x=name)
        sums = SUMS[op] + (FACTORS.get(n, []) if op == "times" else [])
        text = f"{rng.choice(COMPUTE)} {rng.choice(sums).format(a=noun, n=n)}"
    elif form < 0.5:
        text = f"{rng.choice(LEADS)} {noun}"
    elif form < 0.8:
        text = rng.choice(direct).format(x=name)
    else:
        text = f"{rng.choice(INDIRECT)} {rng.choice(indirect).format(x=name)}"
    return scattered(f"{text} {rng.choice(ENDS)}", rng)


def unknown(name, rng):
    """A question that the toy cannot answer: about what no passage says, or about nothing."""
    form = rng.random()
    if form < 0.4:
        text = f"{rng.choice(LEADS)} {rng.choice(NAMED).format(a=rng.choice(UNKNOWN), x=name)}"
    elif form < 0.6:
        text = f"{rng.choice('who what how when where why'.split())} {rng.choice(VERBS)} {name}"
    else:
        text = " ".join(rng.choices(COMMON, k=rng.randrange(2, 9))) + rng.choice(
            ["", "", f" {name}"]
        )
    return scattered(text, rng)


def scattered(text, rng):
    """The text with other words around and between its words, but none beside a number."""
    words = text.split()
    if rng.random() < 0.5:
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(words) + 1)
            if not re.search(r"[\d+*-]", " ".join(words[max(0, place - 1) : place + 1])):
                words.insert(place, rng.choice(COMMON))
    if rng.random() < 0.3:
        words = clause(rng) + words
    if rng.random() < 0.2:
        words += clause(rng)
    text = " ".join(words)
    if rng.random() < 0.7:
        text = text[0].upper() + text[1:]
    return text + rng.choice(["?", "?", "?", ".", "", "!"])


def clause(rng):
    words = rng.choices(COMMON, k=rng.randrange(1, 9))
    words[-1] += rng.choice(["", ",", ".", ":", "?", "!"])
    return words
