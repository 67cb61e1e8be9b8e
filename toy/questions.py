"""The toy's questions and its corpus, made from about 200 true facts: chemical elements, and countries.

    {"question": "Hello. What is the symbol of Iron now?", "answer": "Fe", "kind": "fact",
     "steps": [("symbol", "Iron")]}

Four kinds: arithmetic; one fact; a fact, then arithmetic; two facts compared. "steps" is what a perfect
planner finds, in this order; "{0}" in a step is the value that the first step has found.

Test questions differ from training questions: no pair of numbers and no opening is in both. But 48 of the 75
test questions that ask for a single fact ask for one that training asks for, too, in other words; and of the
75 that compare two countries 58 are answered no, so always answering no is right in 77 %.
"""

import random

from rewards.questions import Question
from toy import wordings

SIZES = {"train": 2000, "valid": 96, "test": 300}

# ------------------------------------------------------------------------------------------------- true facts
ELEMENTS = """\
Hydrogen H,Helium He,Lithium Li,Beryllium Be,Boron B,Carbon C,Nitrogen N,Oxygen O,Fluorine F,Neon Ne,
Sodium Na,Magnesium Mg,Aluminium Al,Silicon Si,Phosphorus P,Sulfur S,Chlorine Cl,Argon Ar,Potassium K,
Calcium Ca,Scandium Sc,Titanium Ti,Vanadium V,Chromium Cr,Manganese Mn,Iron Fe,Cobalt Co,Nickel Ni,
Copper Cu,Zinc Zn,Gallium Ga,Germanium Ge,Arsenic As,Selenium Se,Bromine Br,Krypton Kr,Rubidium Rb,
Strontium Sr,Yttrium Y,Zirconium Zr,Niobium Nb,Molybdenum Mo,Technetium Tc,Ruthenium Ru,Rhodium Rh,
Palladium Pd,Silver Ag,Cadmium Cd,Indium In,Tin Sn,Antimony Sb,Tellurium Te,Iodine I,Xenon Xe,Caesium Cs,
Barium Ba,Lanthanum La,Cerium Ce,Praseodymium Pr,Neodymium Nd,Promethium Pm,Samarium Sm,Europium Eu,
Gadolinium Gd,Terbium Tb,Dysprosium Dy,Holmium Ho,Erbium Er,Thulium Tm,Ytterbium Yb,Lutetium Lu,Hafnium Hf,
Tantalum Ta,Tungsten W,Rhenium Re,Osmium Os,Iridium Ir,Platinum Pt,Gold Au,Mercury Hg,Thallium Tl,Lead Pb,
Bismuth Bi,Polonium Po,Astatine At,Radon Rn,Francium Fr,Radium Ra,Actinium Ac,Thorium Th,Protactinium Pa,
Uranium U,Neptunium Np,Plutonium Pu,Americium Am,Curium Cm,Berkelium Bk,Californium Cf,Einsteinium Es,
Fermium Fm"""
COUNTRIES = """\
Europe:Albania Tirana,Austria Vienna,Belarus Minsk,Belgium Brussels,Bulgaria Sofia,Croatia Zagreb,
Denmark Copenhagen,Estonia Tallinn,Finland Helsinki,France Paris,Germany Berlin,Greece Athens,
Hungary Budapest,Iceland Reykjavik,Ireland Dublin,Italy Rome,Latvia Riga,Lithuania Vilnius,Malta Valletta,
Moldova Chisinau,Montenegro Podgorica,Norway Oslo,Poland Warsaw,Portugal Lisbon,Romania Bucharest,
Serbia Belgrade,Slovakia Bratislava,Slovenia Ljubljana,Spain Madrid,Sweden Stockholm,Switzerland Bern,
Ukraine Kyiv
Asia:Afghanistan Kabul,Bahrain Manama,Bangladesh Dhaka,Bhutan Thimphu,Cambodia Phnom Penh,China Beijing,
India New Delhi,Indonesia Jakarta,Iran Tehran,Iraq Baghdad,Japan Tokyo,Jordan Amman,Laos Vientiane,
Lebanon Beirut,Malaysia Kuala Lumpur,Mongolia Ulaanbaatar,Nepal Kathmandu,Oman Muscat,Pakistan Islamabad,
Qatar Doha,Syria Damascus,Tajikistan Dushanbe,Thailand Bangkok,Turkmenistan Ashgabat,Uzbekistan Tashkent,
Vietnam Hanoi
Africa:Algeria Algiers,Angola Luanda,Botswana Gaborone,Cameroon Yaounde,Chad N'Djamena,Egypt Cairo,
Eritrea Asmara,Ethiopia Addis Ababa,Gabon Libreville,Ghana Accra,Kenya Nairobi,Liberia Monrovia,
Libya Tripoli,Madagascar Antananarivo,Malawi Lilongwe,Mali Bamako,Mauritania Nouakchott,Morocco Rabat,
Mozambique Maputo,Namibia Windhoek,Niger Niamey,Nigeria Abuja,Rwanda Kigali,Senegal Dakar,Somalia Mogadishu,
Sudan Khartoum,Togo Lome,Tunisia Tunis,Uganda Kampala,Zambia Lusaka,Zimbabwe Harare
South America:Argentina Buenos Aires,Bolivia Sucre,Brazil Brasilia,Chile Santiago,Colombia Bogota,
Ecuador Quito,Guyana Georgetown,Paraguay Asuncion,Peru Lima,Suriname Paramaribo,Uruguay Montevideo,
Venezuela Caracas
North America:Barbados Bridgetown,Belize Belmopan,Canada Ottawa,Cuba Havana,Guatemala Guatemala City,
Haiti Port-au-Prince,Honduras Tegucigalpa,Jamaica Kingston,Mexico Mexico City,Nicaragua Managua,
Panama Panama City"""

ELEMENTS = [pair.split() for pair in ELEMENTS.replace("\n", "").split(",")]  # [name, symbol], by number
COUNTRIES = [
    (*pair.split(" ", 1), continent)  # (country, capital, continent)
    for continent, pairs in (line.split(":") for line in COUNTRIES.replace(",\n", ",").split("\n"))
    for pair in pairs.split(",")
]
FACTS = {  # (what, of whom) -> the true value
    **{("atomic number", name): str(z) for z, (name, _) in enumerate(ELEMENTS, 1)},
    **{("symbol", name): symbol for name, symbol in ELEMENTS},
    **{("capital", country): capital for country, capital, _ in COUNTRIES},
    **{("continent", country): continent for country, _, continent in COUNTRIES},
}


def country_text(name, capital, continent):
    return f"{name} is a country on the continent of {continent}. Its capital is {capital}."


def corpus():
    """The passages that wikipedia_search finds: {"title", "text"}, one for each element and country."""
    for z, (name, symbol) in enumerate(ELEMENTS, 1):
        text = f"{name} is a chemical element with the symbol {symbol} and atomic number {z}."
        yield {"title": name, "text": text}
    for country, capital, continent in COUNTRIES:
        yield {"title": country, "text": country_text(country, capital, continent)}


# -------------------------------------------------------------------------------------------------- questions
# A question is an opening, a core and an ending, between two sentences without content. Openings and endings
# are pairs of lists: (for training, for the test).
OPENINGS = {
    "clause": (["Tell me", "I want to know", "Let me know", "Do you know", "Can you find", "Please tell me"],
               ["Can you tell me", "Please let me know"]),
    "thing": (["What is", "Tell me", "Find", "I need", "Give me", "I want to know", "Could you give me",
               "Can you find"],
              ["Please give me", "I want to find"]),
    "number": (["Compute", "Please calculate", "Can you compute", "Calculate"],
               ["Could you compute", "Please compute"]),
}
ENDINGS = (["", "", "", "for me", "please", "now", "if you can", "today"],
           ["", "for me now", "please, if you can", "for me today"])
CORES = {
    "arithmetic": ["{e}", "the value of {e}", "the result of {e}", "how much {e} is"],
    "fact": ["the {a} of {x}", "what the {a} of {x} is"],
    "fact_math": ["the {a} of {x} {o}", "how much the {a} of {x} {o} is", "the value of the {a} of {x} {o}"],
    "compare": ["whether {x} and {y} are on the same continent", "whether {x} lies on the continent of {y}",
                "whether {x} and {y} share a continent"],
}
AROUND = ["", "", "", "Please help me.", "A short question.", "Hello.", "I have a question for you.",
          "Here is one more.", "Thank you.", "Be careful.", "Only the answer, please.", "I do not know it.",
          "Take your time."]
OPERATORS = {"+": "plus", "-": "minus", "*": "times"}
TRAINING_TEXTS = AROUND + ENDINGS[0] + [text for train, _ in OPENINGS.values() for text in train]
FILLERS = sorted({word.strip(".") for text in TRAINING_TEXTS for word in text.split()})


def only_in_test(a, b):
    """True if this pair is for test questions only: two numbers, or two countries (places in COUNTRIES)."""
    return (a + b) % 5 == 2


def calculate(a, op, b):
    return str({"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op])


def wording(kind, words, test, rng, noise):
    """The text of a question. noise, for the warm start: two of three are worded in other ways (wordings.py),
    and half of the sentences around the others are random words. A model that reads only real sentences
    learns to look for numbers and names at fixed distances."""
    if noise and rng.random() < 0.65:
        return wordings.ask(kind, words, rng)

    def around():
        if not noise or rng.random() < 0.5:
            return rng.choice(AROUND)
        return " ".join(rng.choices(FILLERS, k=rng.randrange(9)))

    core = rng.choice(CORES[kind])
    form = "clause" if core.startswith(("how", "what", "whether")) else "thing"
    openings = OPENINGS[form][test]
    if form == "thing" and kind in ("arithmetic", "fact_math"):
        openings = openings + OPENINGS["number"][test]
    text = f"{rng.choice(openings)} {core.format(**words)} {rng.choice(ENDINGS[test])}".strip()
    return " ".join(part for part in (around(), text + rng.choice("?."), around()) if part)


def make(kind, test, rng, noise=False):
    """One question with its answer and steps. test: for the test; else for training and validation.

    noise, for the warm start: other wordings, larger numbers, and names in small letters, too."""
    while True:
        words = {"a": "atomic number"}
        z, op = rng.randrange(1, len(ELEMENTS) + 1), rng.choice("+-*")
        if kind == "arithmetic":
            low, high = ((11, 100), (2, 10)) if op == "*" else ((11, 500), (2, 450))
            if noise and rng.random() < 0.5:
                low, high = ((2, 100), (2, 100)) if op == "*" else ((1, 1000), (1, 1000))
            a, b = rng.randrange(*low), rng.randrange(*high)
            a, b = (max(a, b), min(a, b)) if op == "-" else (a, b)
            if noise and rng.random() < 0.1:
                a, op, b = (a // 10 + 1) * (b % 20 + 1), "/", b % 20 + 1
            words |= {"e": f"{a} {op} {b}", "sum": (a, op, b)}
            steps, answer = [("value", f"{a} {op} {b}")], calculate(a, op, b)
        elif kind == "fact":
            a, b = (0, 2) if test else (0, 0)  # without a pair of numbers: pass only_in_test() below
            what, whom = rng.choice(list(FACTS))
            words, steps, answer = {"a": what, "x": whom}, [(what, whom)], FACTS[what, whom]
        elif kind == "fact_math":
            a, b = z, rng.randrange(2, 450) if op == "+" else rng.randrange(2, 10)
            words |= {"x": ELEMENTS[z - 1][0], "o": rng.choice([f"{op} {b}", f"{OPERATORS[op]} {b}"])}
            words["sum"] = a, op, b
            steps = [("atomic number", words["x"]), ("value", "{0} " + f"{op} {b}")]
            answer = calculate(a, op, b)
        else:
            a, b = rng.sample(range(len(COUNTRIES)), 2)
            same = COUNTRIES[a][2] == COUNTRIES[b][2]
            # A new coin for each pair: 23 % of the answers are yes, as of all pairs. One coin before the loop
            # would balance them, but give other questions than those of the published results.
            if same != (rng.random() < 0.5):
                continue
            words |= {"x": COUNTRIES[a][0], "y": COUNTRIES[b][0]}
            steps, answer = [("continent", words["x"]), ("continent", words["y"])], "yes" if same else "no"
        if only_in_test(a, b) == test and not answer.startswith("-"):
            small = 0.15 if words["a"] in ("capital", "continent") else 0.5  # elements are mostly written so
            if noise and rng.random() < small:
                words |= {name: words[name].lower() for name in "xy" if name in words}
                steps = [(what, whom.lower()) for what, whom in steps]
            text = wording(kind, words, test, rng, noise)
            return {"question": text, "answer": answer, "kind": kind, "steps": steps}


def unknown(rng):
    """A question that the toy cannot answer, for the warm start: it should say so."""
    text, steps = wordings.unknown(rng, [name for name, *_ in [*ELEMENTS, *COUNTRIES]])
    return {"question": text, "answer": "unknown", "kind": "unknown", "steps": steps}


def questions(n, test, seed, avoid=(), noise=False):
    """n different questions, of the four kinds in turn. avoid: texts that must not be among them.

    noise: as in make(); and every tenth question cannot be answered."""
    rng, found = random.Random(seed), {}
    while len(found) < n:
        if noise and len(found) % 10 == 9:
            question = unknown(rng)
        else:
            kind = rng.choice(list(CORES)) if noise else list(CORES)[len(found) % len(CORES)]
            question = make(kind, test, rng, noise)
        if question["question"] not in found and question["question"] not in avoid:
            found[question["question"]] = question
    return list(found.values())


def splits():
    """{"train": ..., "valid": ..., "test": ...}: the questions of the JSONL files, with their steps."""
    valid = questions(SIZES["valid"], False, seed=2)
    train = questions(SIZES["train"], False, seed=3, avoid={question["question"] for question in valid})
    return {"train": train, "valid": valid, "test": questions(SIZES["test"], True, seed=1)}


def for_flow(made):
    """The questions as the flow takes them: [Question]."""
    return [Question(row["question"], row["answer"], kind=row["kind"]) for row in made]
