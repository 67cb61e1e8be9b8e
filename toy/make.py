"""toy.py makes toy/: a tiny language model that plays every module, ~200 true facts to look up, and questions about them.

    python toy.py            remake everything into toy/ (it says how long it takes, and checks itself)

toy/ is an ordinary checkpoint folder (a Qwen2 of about a million parameters, its tokenizer, a chat template), an ordinary corpus and
ordinary JSONL questions. solve.py and train.py use it by default, through exactly the code that runs a 7B, and nothing imports this file.

How can a million parameters play planner, executor, verifier and generator? Two things make the prompts of those modules short for
it. Every constant piece of a prompt is one token of its vocabulary (a 300-word instruction costs it one token), and every number
below 1 000 is one token. What is left is 30-120 tokens, in which it must find and copy the right ones.

    teacher   an engine of rules that plays all modules in real flows (solve.rollout, real tools), but picks its tools *blindly*
    warm start  random-sequence copying first, then supervised learning of every module's words in the teacher's flows

So the model knows all formats, sub-goals and facts to look for, but not which tool does what. Wrong tools fail by themselves (a
search for "value of 37 * 12" finds nothing, "capital = France" is a NameError, base_generator makes things up), and choosing is left to
Flow-GRPO. No two numbers that meet in a test question, and none of its openings, are in a training question.
But 48 of the 75 test questions that ask for a single fact ask for one that training asks for, too, in other
words; and of the 75 that compare two countries 58 are answered no, so always answering no is right in 77 %.
"""

import argparse
import json
import random
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import executor
import generator
import planner
import solve
import tools as toolset
import verifier
from memory import Memory, Step
from models.completion import Completion
from models.loading import load_engine
from models.local import HF
from rewards.metrics import accuracy_line
from rewards.questions import Question
from scale import command_line

TOY = Path(__file__).parent
TOOLS = {name: toolset.TOOLS[name] for name in command_line.TOY_TOOLS}

# ---------------------------------------------------------------------------------------------------------------- true facts
ELEMENTS = """Hydrogen H,Helium He,Lithium Li,Beryllium Be,Boron B,Carbon C,Nitrogen N,Oxygen O,Fluorine F,Neon Ne,Sodium Na,
Magnesium Mg,Aluminium Al,Silicon Si,Phosphorus P,Sulfur S,Chlorine Cl,Argon Ar,Potassium K,Calcium Ca,Scandium Sc,Titanium Ti,
Vanadium V,Chromium Cr,Manganese Mn,Iron Fe,Cobalt Co,Nickel Ni,Copper Cu,Zinc Zn,Gallium Ga,Germanium Ge,Arsenic As,Selenium Se,
Bromine Br,Krypton Kr,Rubidium Rb,Strontium Sr,Yttrium Y,Zirconium Zr,Niobium Nb,Molybdenum Mo,Technetium Tc,Ruthenium Ru,
Rhodium Rh,Palladium Pd,Silver Ag,Cadmium Cd,Indium In,Tin Sn,Antimony Sb,Tellurium Te,Iodine I,Xenon Xe,Caesium Cs,Barium Ba,
Lanthanum La,Cerium Ce,Praseodymium Pr,Neodymium Nd,Promethium Pm,Samarium Sm,Europium Eu,Gadolinium Gd,Terbium Tb,Dysprosium Dy,
Holmium Ho,Erbium Er,Thulium Tm,Ytterbium Yb,Lutetium Lu,Hafnium Hf,Tantalum Ta,Tungsten W,Rhenium Re,Osmium Os,Iridium Ir,
Platinum Pt,Gold Au,Mercury Hg,Thallium Tl,Lead Pb,Bismuth Bi,Polonium Po,Astatine At,Radon Rn,Francium Fr,Radium Ra,Actinium Ac,
Thorium Th,Protactinium Pa,Uranium U,Neptunium Np,Plutonium Pu,Americium Am,Curium Cm,Berkelium Bk,Californium Cf,Einsteinium Es,
Fermium Fm"""
COUNTRIES = """Europe:Albania Tirana,Austria Vienna,Belarus Minsk,Belgium Brussels,Bulgaria Sofia,Croatia Zagreb,Denmark Copenhagen,
Estonia Tallinn,Finland Helsinki,France Paris,Germany Berlin,Greece Athens,Hungary Budapest,Iceland Reykjavik,Ireland Dublin,
Italy Rome,Latvia Riga,Lithuania Vilnius,Malta Valletta,Moldova Chisinau,Montenegro Podgorica,Norway Oslo,Poland Warsaw,
Portugal Lisbon,Romania Bucharest,Serbia Belgrade,Slovakia Bratislava,Slovenia Ljubljana,Spain Madrid,Sweden Stockholm,
Switzerland Bern,Ukraine Kyiv
Asia:Afghanistan Kabul,Bahrain Manama,Bangladesh Dhaka,Bhutan Thimphu,Cambodia Phnom Penh,
China Beijing,India New Delhi,Indonesia Jakarta,Iran Tehran,Iraq Baghdad,Japan Tokyo,Jordan Amman,Laos Vientiane,Lebanon Beirut,
Malaysia Kuala Lumpur,Mongolia Ulaanbaatar,Nepal Kathmandu,Oman Muscat,Pakistan Islamabad,Qatar Doha,Syria Damascus,
Tajikistan Dushanbe,Thailand Bangkok,Turkmenistan Ashgabat,Uzbekistan Tashkent,Vietnam Hanoi
Africa:Algeria Algiers,Angola Luanda,Botswana Gaborone,Cameroon Yaounde,Chad N'Djamena,Egypt Cairo,Eritrea Asmara,Ethiopia Addis Ababa,
Gabon Libreville,Ghana Accra,Kenya Nairobi,Liberia Monrovia,Libya Tripoli,Madagascar Antananarivo,Malawi Lilongwe,Mali Bamako,
Mauritania Nouakchott,Morocco Rabat,Mozambique Maputo,Namibia Windhoek,Niger Niamey,Nigeria Abuja,Rwanda Kigali,Senegal Dakar,
Somalia Mogadishu,Sudan Khartoum,Togo Lome,Tunisia Tunis,Uganda Kampala,Zambia Lusaka,Zimbabwe Harare
South America:Argentina Buenos Aires,Bolivia Sucre,Brazil Brasilia,Chile Santiago,Colombia Bogota,Ecuador Quito,Guyana Georgetown,
Paraguay Asuncion,Peru Lima,Suriname Paramaribo,Uruguay Montevideo,Venezuela Caracas
North America:Barbados Bridgetown,Belize Belmopan,Canada Ottawa,Cuba Havana,Guatemala Guatemala City,Haiti Port-au-Prince,
Honduras Tegucigalpa,Jamaica Kingston,Mexico Mexico City,Nicaragua Managua,Panama Panama City"""

ELEMENTS = [line.split() for line in ELEMENTS.replace("\n", "").split(",")]  # [name, symbol], in the order of their numbers
COUNTRIES = [
    (*pair.split(" ", 1), continent)  # (country, capital, continent)
    for continent, pairs in (line.split(":") for line in re.sub(r",\n", ",", COUNTRIES).split("\n"))
    for pair in pairs.split(",")
]
FACTS = {  # (what, of whom) -> the true value
    **{("atomic number", name): str(z) for z, (name, _) in enumerate(ELEMENTS, 1)},
    **{("symbol", name): symbol for name, symbol in ELEMENTS},
    **{("capital", country): capital for country, capital, _ in COUNTRIES},
    **{("continent", country): continent for country, _, continent in COUNTRIES},
}
READ = {  # how a value is read off a passage of the corpus
    "atomic number": r"atomic number (\d+)",
    "symbol": r"symbol (\w+)",
    "capital": r"capital is (.+?)\.",
    "continent": r"continent of (.+?)\.",
}


def element_text(name, symbol, z):
    return f"{name} is a chemical element with the symbol {symbol} and atomic number {z}."


def country_text(name, capital, continent):
    return f"{name} is a country on the continent of {continent}. Its capital is {capital}."


def corpus():
    for z, (name, symbol) in enumerate(ELEMENTS, 1):
        yield {"title": name, "text": element_text(name, symbol, z)}
    for country, capital, continent in COUNTRIES:
        yield {"title": country, "text": country_text(country, capital, continent)}


# ----------------------------------------------------------------------------------------------------------------- questions
# A question is an opening, a core and an ending, between sentences that say nothing. (For training, for the test.)
OPENINGS = {
    "clause": (["Tell me", "I want to know", "Let me know", "Do you know", "Can you find", "Please tell me"], ["Can you tell me", "Please let me know"]),
    "thing": (["What is", "Tell me", "Find", "I need", "Give me", "I want to know", "Could you give me", "Can you find"], ["Please give me", "I want to find"]),
    "number": (["Compute", "Please calculate", "Can you compute", "Calculate"], ["Could you compute", "Please compute"]),
}
ENDINGS = (["", "", "", "for me", "please", "now", "if you can", "today"], ["", "for me now", "please, if you can", "for me today"])
CORES = {
    "arithmetic": ["{e}", "the value of {e}", "the result of {e}", "how much {e} is"],
    "fact": ["the {a} of {x}", "what the {a} of {x} is"],
    "fact_math": ["the {a} of {x} {o}", "how much the {a} of {x} {o} is", "the value of the {a} of {x} {o}"],
    "compare": ["whether {x} and {y} are on the same continent", "whether {x} lies on the continent of {y}",
                "whether {x} and {y} share a continent"],
}
AROUND = ["", "", "", "Please help me.", "A short question.", "Hello.", "I have a question for you.", "Here is one more.", "Thank you.",
          "Be careful.", "Only the answer, please.", "I do not know it.", "Take your time."]
OPERATORS = {"+": "plus", "-": "minus", "*": "times"}
FILLERS = sorted({word.strip(".") for text in AROUND + ENDINGS[0] + sum((train for train, _ in OPENINGS.values()), []) for word in text.split()})


def held_out(a, b):
    """Whether two numbers (or the places of two countries in the list) may only meet in a test question."""
    return (a + b) % 5 == 2


def wording(kind, words, test, rng, noise):
    """The question around its core. noise: half of the time the sentences around are random words, for the warm start: a model that
    has only met real sentences looks for its words at fixed distances."""
    around = lambda: rng.choice(AROUND) if not noise or rng.random() < 0.5 else " ".join(rng.choices(FILLERS, k=rng.randrange(9)))
    core = rng.choice(CORES[kind])
    form = "clause" if core.startswith(("how", "what", "whether")) else "thing"
    openings = OPENINGS[form][test] + (OPENINGS["number"][test] if form == "thing" and kind in ("arithmetic", "fact_math") else [])
    asked = f"{rng.choice(openings)} {core.format(**words)} {rng.choice(ENDINGS[test])}".strip()
    return " ".join(part for part in (around(), asked + rng.choice("?."), around()) if part)


def make(kind, test, rng, noise=False):
    """A question with the steps that answer it: {"question", "answer", "kind", "steps": [(what, of whom)]}; {0} is the last result.

    No two numbers that meet in a test question, and none of its openings and endings, are in a training question.
    """
    while True:
        words = {"a": "atomic number"}
        z, op = rng.randrange(1, len(ELEMENTS) + 1), rng.choice("+-*")
        if kind == "arithmetic":
            a, b = (rng.randrange(11, 100), rng.randrange(2, 10)) if op == "*" else (rng.randrange(11, 500), rng.randrange(2, 450))
            a, b = (max(a, b), min(a, b)) if op == "-" else (a, b)
            words["e"], steps, answer = f"{a} {op} {b}", [("value", f"{a} {op} {b}")], calculate(a, op, b)
        elif kind == "fact":
            a, b = (0, 2) if test else (0, 0)  # no numbers meet in these
            what, whom = rng.choice(list(FACTS))
            words, steps, answer = {"a": what, "x": whom}, [(what, whom)], FACTS[what, whom]
        elif kind == "fact_math":
            a, b = z, rng.randrange(2, 450) if op == "+" else rng.randrange(2, 10)
            words |= {"x": ELEMENTS[z - 1][0], "o": rng.choice([f"{op} {b}", f"{OPERATORS[op]} {b}"])}
            steps, answer = [("atomic number", words["x"]), ("value", "{0} " + f"{op} {b}")], calculate(a, op, b)
        else:
            a, b = rng.sample(range(len(COUNTRIES)), 2)
            # No use: the coin is tossed again for each pair, so 23 % are yes, as of all pairs. Tossed once,
            # before the loop, it would make as many yes as no, but other questions than the results are of.
            if (COUNTRIES[a][2] == COUNTRIES[b][2]) != (rng.random() < 0.5):
                continue
            words |= {"x": COUNTRIES[a][0], "y": COUNTRIES[b][0]}
            steps = [("continent", words["x"]), ("continent", words["y"])]
            answer = "yes" if COUNTRIES[a][2] == COUNTRIES[b][2] else "no"
        if held_out(a, b) == test and not answer.startswith("-"):
            return {"question": wording(kind, words, test, rng, noise), "answer": answer, "kind": kind, "steps": steps}


def calculate(a, op, b):
    return str({"+": a + b, "-": a - b, "*": a * b}[op])


def questions(n, test, seed, avoid=(), noise=False):
    """n different questions, the four kinds in turn."""
    rng, made = random.Random(seed), {}
    while len(made) < n:
        question = make(list(CORES)[len(made) % len(CORES)], test, rng, noise)
        if question["question"] not in made and question["question"] not in avoid:
            made[question["question"]] = question
    return list(made.values())


# ------------------------------------------------------------------------------------------------------------------- teacher
STEP = re.compile(r"Sub-goal: (.*)\nCommand: .*\nResult: (.*)")
SKILLS = {
    "arithmetic": "Objective: a number.\nSkills: calculation.",
    "fact": "Objective: a fact.\nSkills: looking it up.",
    "fact_math": "Objective: a number.\nSkills: looking up a fact, then calculation.",
    "compare": "Objective: yes or no.\nSkills: looking up two facts, then comparing.",
}
WHY = {"value": "Justification: A calculation comes next.", "fact": "Justification: A fact comes next."}
CHECKS = {
    "error": "Explanation: The last step failed.\nConclusion: CONTINUE",
    "missing": "Explanation: Something is still missing.\nConclusion: CONTINUE",
    "done": "Explanation: Every part is answered.\nConclusion: STOP",
}
CONCLUSIONS = ("The results hold the answer.\n<answer>", "The results do not hold the answer.\n<answer> unknown</answer>", "</answer>")


class Teacher:
    """An engine of rules that plays every module through the very prompts a language model gets. made: questions from make();
    blind: a random.Random that picks the tools, or None for the right ones. `seen` collects (prompt, text), the warm start's data."""

    def __init__(self, made, blind=None):
        self.made, self.blind, self.seen = {q["question"]: q for q in made}, blind, []

    def __call__(self, prompts, temperature=0.0, max_new_tokens=None):
        texts = [self.answer(prompt) for prompt in prompts]
        self.seen += zip(prompts, texts)
        return [Completion(text, [], []) for text in texts]

    def answer(self, prompt):
        asked = re.search(r"\nQuestion: (.*)\n", prompt)
        if not asked:
            return self.invent(prompt)
        if prompt.startswith(executor.PROMPT[:40]):
            return self.command(prompt)
        question = self.made[asked[1]]
        if prompt.startswith(planner.ANALYSIS_PROMPT[:40]):
            return SKILLS[question["kind"]]
        steps = STEP.findall(prompt.split("\nMemory:\n")[1])
        known = self.known(question, steps)
        if prompt.startswith(planner.PROMPT[:40]):
            return self.plan(question, known)
        if prompt.startswith(verifier.PROMPT[:40]):
            done = "done" if len(known) == len(question["steps"]) else "missing"
            return CHECKS["error" if steps[-1][1].startswith("Error:") else done]
        return self.conclude(question, known)

    def sub_goal(self, question, known):
        """What is to be found next (or once more, if nothing is left to find), and the words for it."""
        what, whom = question["steps"][min(len(known), len(question["steps"]) - 1)]
        return what, f"Find the {what} of {whom.format(*known)}"

    def known(self, question, steps):
        """The values of the steps that have been answered so far, true or made up."""
        known = []
        for sub_goal, result in steps:
            if len(known) < len(question["steps"]):
                what, wanted = self.sub_goal(question, known)
                if sub_goal == wanted and not result.startswith("Error:"):
                    invented = re.search(r"I think it is (.+)\.", result)
                    found = invented or re.search(READ.get(what, r"(.+)"), result)
                    known += [found[1]] if found else []
        return known

    def plan(self, question, known):
        what, sub_goal = self.sub_goal(question, known)
        before = question["steps"][len(known) - 1]
        context = f"The {before[0]} of {before[1].format(*known)} is {known[-1]}." if known else "none"
        right = "python_coder" if what == "value" else "wikipedia_search"
        tool = self.blind.choice(sorted(TOOLS)) if self.blind else right
        return f"{WHY.get(what, WHY['fact'])}\nContext: {context}\nSub-goal: {sub_goal}\nTool: {tool}"

    def command(self, prompt):
        what, whom = re.search(r"\nSub-goal: Find the ([a-z ]+) of (.+)\n", prompt).groups()
        if "\npython_coder: " in prompt:
            name = what.split()[-1]
            return f'python_coder(code="{name} = {whom}; print({name})")'
        tool = "wikipedia_search" if "\nwikipedia_search: " in prompt else "base_generator"
        return f'{tool}(query="{what} of {whom}")'

    def invent(self, query):
        """What base_generator says: made up, as a small model without tools would."""
        what = query.split(" of ")[0]
        values = [value for (name, _), value in FACTS.items() if name == what] or [str(n) for n in range(1000)]
        return f"I think it is {self.blind.choice(values)}."

    def conclude(self, question, known):
        if len(known) < len(question["steps"]):
            return CONCLUSIONS[1]
        answer = known[-1]
        if question["kind"] == "compare":
            answer = "yes" if known[0] == known[1] else "no"
        return f"{CONCLUSIONS[0]} {answer}{CONCLUSIONS[2]}"


# ----------------------------------------------------------------------------------------------------------------- tokenizer
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def constants():
    """The constant pieces of all prompts and answers, each to be one token, in a fixed order. A piece ends before the space that
    leads to its variable, so that a copied word is the same token (with its space in front) wherever it stands."""
    prompts = [planner.ANALYSIS_PROMPT, planner.PROMPT, executor.PROMPT, verifier.PROMPT, generator.PROMPT]
    pieces = ["user\n", "assistant\n"] + [piece for prompt in prompts for piece in re.split(r"{\w+}", prompt)]
    pieces += [planner.describe(name, tool) for name, tool in TOOLS.items()]
    pieces += ["No steps yet.", "\nSub-goal:", "\nCommand:", "\nResult:", "\nVerdict: CONTINUE", "\nVerdict: STOP", "\nContext:", "\nTool:"]
    pieces += [f"{gap}Step {n}\nTool:" for n in range(1, 11) for gap in ("", "\n\n")]
    pieces += [f" {name}" for name in TOOLS]
    pieces += [f"{start}{name}({key}={quote}" for name, tool in TOOLS.items() for key in tool.arguments
               for start, quote in (("", '"'), (" ", "'"), (" ", '"'))]  # as the executor writes it, as memory shows it
    pieces += ['")', "')", ')")', ")')", "; print("]
    pieces += [*SKILLS.values(), *WHY.values(), *CHECKS.values(), *CONCLUSIONS, " Find the", "I think it is", " I think it is", "\nContext: none"]
    pieces += [" Error: NameError: name '", "' is not defined (line 1)", " Error: SyntaxError: invalid syntax (line 1)",
               " Error: no passage matches '", " [1]", "'. Try other or fewer words.", " is a chemical element with the symbol", " and atomic number",
               " is a country on the continent of", ". Its capital is"]
    return list(dict.fromkeys(piece.rstrip(" ") for piece in pieces if piece.strip()))


def make_tokenizer(texts):
    """Qwen2's own kind of byte-level BPE, in which every word of `texts` is one token; so are the constants and the numbers below 1 000.

    Qwen2's splits digits, so the numbers are added tokens. Added tokens have a fixed order: sets change theirs between runs.
    """
    empty = Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=["<|im_start|>"])
    tokenizer = empty.train_new_from_iterator([sorted(set(texts))], vocab_size=6000, min_frequency=2, show_progress=False)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in constants() + [f" {n}" for n in range(1000)]])
    tokenizer.chat_template = CHAT
    return tokenizer


# ---------------------------------------------------------------------------------------------------------------- warm start
def make_model(vocabulary, tokenizer):
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.max_new_tokens = 64
    return model


def drills(n, words, engine, rng):
    """Pairs (prompt ids, answer ids) in which the answer repeats a random sequence: induction, before any content."""
    wrap = engine.encode("|")
    cut = next(i for i in range(len(wrap)) if engine.tokenizer.decode(wrap[i]) == "|")
    for _ in range(n):
        sequence = rng.choices(words, k=rng.randrange(1, 16))
        yield wrap[:cut] + sequence + wrap[cut + 1 :], sequence + [engine.tokenizer.eos_token_id]


def comparisons(n, rng):
    """Pairs (prompt, text) of the generator alone, on memories that hold two made-up facts: to tell equal from different takes many."""
    continents = sorted({continent for *_, continent in COUNTRIES})
    for _ in range(n):
        question = make("compare", False, rng, noise=True)
        known = rng.choices(continents, k=2) if rng.random() < 0.6 else 2 * rng.choices(continents)
        steps = []
        for turn, ((what, whom), continent, verdict) in enumerate(zip(question["steps"], known, ("CONTINUE", "STOP")), 1):
            command = executor.Call("wikipedia_search", {"query": f"{what} of {whom}"})
            result = f"[1] {whom}: {country_text(whom, rng.choice(COUNTRIES)[1], continent)}"
            steps.append(Step(turn, command.tool, f"Find the {what} of {whom}", str(command), result, verdict=verdict))
        memory = Memory(question["question"], SKILLS["compare"], steps)
        yield generator.prompt(memory.question, memory.analysis, memory.render()), Teacher([]).conclude(question, known)


def learn_step(model, optimizer, batch):
    """One step of supervised learning: cross-entropy of the answers' tokens. batch: [(prompt ids, answer ids)]. Returns the loss."""
    T = max(len(s) + len(a) for s, a in batch)
    ids = torch.tensor([s + a + [0] * (T - len(s) - len(a)) for s, a in batch])  # (N, T)
    rows, columns = zip(*[(n, len(s) + j - 1) for n, (s, a) in enumerate(batch) for j in range(len(a))])
    hidden = model.model(ids, use_cache=False).last_hidden_state[list(rows), list(columns)]
    loss = F.cross_entropy(model.lm_head(hidden), torch.tensor([i for _, a in batch for i in a]))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def warm_start(engine, sources, words, steps, drilling, rng, batch=64, rate=2e-3):
    """Drill for `drilling` steps; then, of eight batches, one is a drill, and the others come from sources = {name: (examples, how many)}."""
    optimizer = torch.optim.AdamW(engine.model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.05)
    turn = ["drills"] + [name for name, (_, share) in sources.items() for _ in range(share)]
    pools, losses = {name: [] for name in sources}, {name: [0.0] for name in dict.fromkeys(turn)}
    engine.model.train()
    for n in tqdm(range(1, steps + 1), desc="warm start", mininterval=10):
        name = "drills" if n <= drilling else turn[n % len(turn)]
        if name == "drills":
            chosen = list(drills(batch, words, engine, rng))
        else:
            if not pools[name]:  # batches of equal-ish length, in random order
                drawn = sorted(rng.choices(sources[name][0], k=batch * 50), key=lambda pair: len(pair[0]) + len(pair[1]))
                pools[name] = [drawn[i : i + batch] for i in range(0, len(drawn), batch)]
                rng.shuffle(pools[name])
            chosen = pools[name].pop()
        losses[name].append(learn_step(engine.model, optimizer, chosen))
        schedule.step()
        if n % 250 == 0:
            tqdm.write(f"step {n:5d}/{steps} | " + " | ".join(f"{k} {sum(v[-50:]) / len(v[-50:]):.4f}" for k, v in losses.items()))
    engine.model.eval()


# ---------------------------------------------------------------------------------------------------------------------- main
SIZES = {"train": 2000, "valid": 96, "test": 300}


def ask(made):
    return [Question(q["question"], q["answer"], kind=q["kind"]) for q in made]


def write(name, rows):
    TOY.mkdir(exist_ok=True)
    (TOY / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_files():
    """corpus.jsonl, and the train, valid and test questions. Returns the test questions with their steps."""
    write("corpus.jsonl", corpus())
    test = questions(SIZES["test"], True, seed=1)
    valid = questions(SIZES["valid"], False, seed=2)
    train = questions(SIZES["train"], False, seed=3, avoid={q["question"] for q in valid})
    for name, made in (("test", test), ("valid", valid), ("train", train)):
        write(f"{name}.jsonl", ({"id": f"{name}-{n}"} | {key: q[key] for key in ("kind", "question", "answer")} for n, q in enumerate(made)))
    return test


def make_engine(flows, steps, drilling, seed):
    """Tokenizer and model, warm-started on `flows` flows of the blind teacher."""
    tools = toolset.toolbox(list(TOOLS), TOY / "corpus.jsonl")
    made = questions(flows, False, seed=seed + 10, noise=True)
    teacher = Teacher(made, blind=random.Random(seed))
    metrics, _ = solve.evaluate(ask(made), teacher, teacher, tools)
    print(f"the blind teacher: {accuracy_line(metrics, flows)}")

    wordings = [question["question"] for question in questions(2000, True, seed=seed + 11)]  # so that their words are tokens
    tokenizer = make_tokenizer([text for pair in teacher.seen for text in pair] + wordings + [f" {fact}" for fact in FACTS.values()])
    engine = HF(make_model(len(tokenizer), tokenizer), tokenizer)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    learn = lambda pairs: [(engine.encode(prompt), encode(text) + [tokenizer.eos_token_id]) for prompt, text in pairs]
    sources = {"flows": (learn(teacher.seen), 6), "comparisons": (learn(comparisons(2 * flows, random.Random(seed))), 1)}
    names = [word for row in [*ELEMENTS, *COUNTRIES] for word in row]
    words = [encode(f" {n}")[0] for n in range(1000)] + 2 * [i for name in names for i in encode(f" {name}")]
    print(f"{sum(p.numel() for p in engine.model.parameters()) / 1e6:.2f} M parameters, {len(tokenizer)} tokens, {len(teacher.seen)} examples")
    warm_start(engine, sources, words, steps, drilling, random.Random(seed))
    return engine


def check(engine, test):
    """Do the parts do what README says? The fixed modules answer right when the plans are, and the planner knows everything but its tools."""
    tools = toolset.toolbox(list(TOOLS), TOY / "corpus.jsonl")
    torch.manual_seed(0)
    perfect, flows = solve.evaluate(ask(test), Teacher(test), engine, tools)
    print(f"perfect plans, toy modules: {accuracy_line(perfect, len(test))}")
    for flow in [flow for flow in flows if not flow.reward][:5]:
        print(solve.trace(flow), f"(wrong: {flow.question.answer})\n")
    blind, _ = solve.evaluate(ask(test), engine, engine, tools)
    print(f"toy plans, toy modules:     {accuracy_line(blind, len(test))}")
    if perfect["accuracy"] < 0.97 or blind["accuracy"] > 0.55 or blind["errors"] < 0.15:
        raise SystemExit("toy.py: the check failed: perfect plans must reach 0.97, blind ones stay below 0.55 with 15 % errors or more")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--flows", type=int, default=16000, help="flows of the teacher to learn from")
    parser.add_argument("--steps", type=int, default=4000, help="steps of the warm start")
    parser.add_argument("--drilling", type=int, default=750, help="how many of them are copying drills")
    parser.add_argument("--seed", type=int, default=0, help="decides everything random")
    parser.add_argument("--check", action="store_true", help="only check the toy that is there")
    args = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    if args.check:
        return check(load_engine(str(TOY)), questions(SIZES["test"], True, seed=1))
    test = make_files()
    engine = make_engine(args.flows, args.steps, args.drilling, args.seed)
    engine.save(TOY)
    check(engine, test)
    print(f"toy/ is made: {(time.perf_counter() - start) / 60:.0f} minutes on {torch.get_num_threads()} thread(s)")


if __name__ == "__main__":
    main()
