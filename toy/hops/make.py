"""Make the second toy, in this folder: its questions, its corpus with pages, and its two models.

    python toy/hops/make.py             remake everything, then check it
    python toy/hops/make.py --check     check the toy that is there
    python toy/hops/make.py --base runs/toy-64 --out runs/hops-64     from another first toy

The model of all modules starts from the first toy (toy/), which can copy and knows most pieces of the
prompts. It gets more tokens (pieces.py), and learns from a teacher's rollouts (teacher.py) in worlds that are
drawn anew, so that it cannot learn what leads to a thing's number by its name.

base_generator/ is another model, and a smaller one: it knows the new names of old things by heart. The
planner, a copy of the first, does not, so it has to ask.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from logbook import endings

endings.without_traceback(__name__)

import torch
from tokenizers import AddedToken
from tqdm import tqdm

import solve
import tools as toolset
from cli.watching import trace
from models.loading import load_engine
from models.local import HF
from rewards.metrics import accuracy_line
from toy import pieces
from toy.hops.pieces import prompt_pieces
from toy.hops.questions import (
    KINDS, MAX_TURNS, NAMES, OLD_NAMES, URLS, World, for_flow, splits)
from toy.hops.teacher import GOAL, GUESS, RENAMED, TOOLS, WHY, Teacher
from toy.make import TOY, learn_step, make_model, make_tokenizer, warm_start, write_files, write_rows
from toy.edits import edited
from toy.pieces import NUMBERS
from world.toolbox import choose

HOPS = Path(__file__).parent
BASE_GENERATOR = HOPS / "base_generator"
WORLDS = 128  # of the warm start


def make_files(folder):
    """Write corpus.jsonl, the questions, and train.json, which names tools, corpus and base_generator."""
    world = World(0)
    write_files(folder, world.rows, splits(world))
    settings = {"tools": list(TOOLS), "corpus": "./toy/hops/corpus.jsonl",
                "base_generator": "./toy/hops/base_generator"}
    (folder / "train.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def quick_python(code):
    """What the sandbox prints for the teacher's programs, without starting one: a test compares the two."""
    value = re.fullmatch(r"number = (.*); print\(number\)", code)[1]
    if product := re.fullmatch(r"(\d+) \* (\d+)", value):
        return str(int(product[1]) * int(product[2]))
    if re.fullmatch(r"\d+ \+ \d+", value):
        return str(sum(map(int, value.split(" + "))))
    if value == "none":
        return "Error: NameError: name 'none' is not defined (line 1)"
    return "Error: SyntaxError: invalid syntax (line 1)"


def worlds(rollouts, seed, kinds, guided):
    """Yield (tools, questions, blind teacher) of each of the WORLDS of a warm start; `rollouts` in all."""
    rng = random.Random(seed)
    for n in tqdm(range(WORLDS), desc="the teacher's rollouts", mininterval=10):
        world = World(f"warm start {seed} {n}")
        with tempfile.TemporaryDirectory() as folder:
            corpus = Path(folder) / "corpus.jsonl"
            write_rows(corpus, world.rows)
            tools = choose(toolset.TOOLS, list(TOOLS), corpus)
            tools["python_coder"] = replace(tools["python_coder"], run=quick_python)
            made = world.questions(rollouts // WORLDS, "train", seed=rng.random(), noise=True, kinds=kinds)
            yield tools, for_flow(made), Teacher(made, world.renamed, blind=rng, guided=rng.choice(guided))


def teachers_examples(rollouts, seed, kinds=KINDS, guided=(0.3, 0.9)):
    """[(prompt, text)] of all modules, from `rollouts` rollouts of the blind teacher.

    guided: of each world one of these, see Teacher."""
    examples = []
    for tools, questions, teacher in worlds(rollouts, seed, kinds, guided):
        with torch.no_grad():
            solve.roll_out(questions, teacher, teacher, tools, MAX_TURNS)
        examples += teacher.examples
    return examples


def adds_two(prompt, text):
    """Is this a plan whose context is a sum of two numbers from memory?"""
    return bool(re.match(rf"{WHY}\nContext: \d+ \+ \d+\n", text))


def copies_from_memory(prompt, text):
    """Is this a plan with an address, numbers or a name that only the memory holds? Few plans are."""
    found = re.match(rf"{WHY}\nContext: (.*)\nSub-goal: {GOAL}(.*)\n", text)
    return bool(found) and (found[1] != "none" or found[2] not in prompt.split("\nMemory:\n")[0])


def make_engine(base, rollouts, steps, copy_steps, rate, seed):
    """The engine: a checkpoint with more tokens, warm-started on `rollouts` rollouts of the blind teacher."""
    engine = load_engine(base)
    tokenizer, model = engine.tokenizer, engine.model
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in prompt_pieces()])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    examples = teachers_examples(rollouts, seed)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    known, rng = pieces.prompt_pieces() | prompt_pieces(), random.Random(seed)

    def encoded(examples):
        return [(engine.chat.encode(edited(prompt, known, rng)), encode(text) + [tokenizer.eos_token_id])
                for prompt, text in examples]

    pairs = encoded(examples)
    words = [encode(text)[0] for text in (*NUMBERS, *(f" {name}" for name in (*NAMES, *OLD_NAMES)), *URLS)]
    size = sum(p.numel() for p in model.parameters()) / 1e6
    lengths = sorted(len(s) for s, _ in pairs)
    print(f"{size:.2f} M parameters, {len(tokenizer)} tokens, {len(pairs)} examples, "
          f"prompts of {lengths[len(lengths) // 2]} tokens in the median, {lengths[-1]} at most", flush=True)
    hard = [pair for pair, example in zip(pairs, examples) if copies_from_memory(*example)]
    adding = teachers_examples(rollouts, seed + 1, kinds=["sum"], guided=[1.0])
    sums = encoded(example for example in adding if adds_two(*example))
    sources = {"rollouts": (pairs, 4), "plans": (hard, 2), "sums": (sums, 1)}
    warm_start(engine, sources, words, steps, copy_steps, random.Random(seed), rate=rate)
    return engine


def make_base_generator(steps, seed):
    """A small model that knows the new names of World(0), and makes up a number for everything else."""
    rng, renamed = random.Random(seed), World(0).renamed
    answers = {old: RENAMED.format(new) for old, new in renamed.items()}
    answers |= {name: GUESS.format(rng.randrange(2, 450)) for name in NAMES}
    for _ in range(2000):
        names = rng.sample([*NAMES, *OLD_NAMES], 2)
        answers[" plus ".join([names[0], rng.choice([names[1], str(rng.randrange(2, 100))])])] = (
            GUESS.format(rng.randrange(2, 900)))
    words = ["user\n", "number of", " plus", "assistant\n"]
    words += [text.partition(" {")[0] for text in (RENAMED, GUESS)]
    names = [f" {name}" for name in (*NAMES, *OLD_NAMES)]
    tokenizer = make_tokenizer([], [*words, *names, *NUMBERS])
    engine = HF(make_model(tokenizer, width=32), tokenizer)

    def pairs(names):
        return [(engine.chat.encode(f"number of {name}"),
                 tokenizer.encode(answers[name], add_special_tokens=False) + [tokenizer.eos_token_id])
                for name in names]

    single, sums = pairs([*NAMES, *OLD_NAMES]), pairs(name for name in answers if " plus " in name)
    optimizer = torch.optim.AdamW(engine.model.parameters(), 3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in tqdm(range(1, steps + 1), desc="base_generator", mininterval=10):
        loss = learn_step(engine.model, optimizer, rng.sample(single, 112) + rng.sample(sums, 16))
        schedule.step()
        if step % 500 == 0:
            tqdm.write(f"step {step:5d}/{steps} | {loss:.4f}")
    engine.model.eval()
    return engine


def load_modules(engine=None):
    """{module: engine} for solve.roll_out(): the toy, or `engine`, plays all but base_generator."""
    return {"default": engine or load_engine(str(HOPS)), "base_generator": load_engine(str(BASE_GENERATOR))}


def check(engine):
    """Perfect plans must succeed with the toy's own modules, and its own planner must not."""
    tools, world = choose(toolset.TOOLS, list(TOOLS), HOPS / "corpus.jsonl"), World(0)
    test, modules = splits(world)["test"], load_modules(engine)
    prompts = [f"number of {name}" for name in (*OLD_NAMES, *NAMES)]
    answers = [completion.text for completion in modules["base_generator"](prompts)]
    knows = sum(text == RENAMED.format(world.renamed[old]) for old, text in zip(OLD_NAMES, answers))
    guesses = sum(text.startswith(GUESS.split("{")[0]) for text in answers[len(OLD_NAMES) :])
    print(f"base_generator:  knows {knows} of {len(OLD_NAMES)} old names, "
          f"and makes a number up for {guesses} of {len(NAMES)} others")
    torch.manual_seed(0)
    teacher = Teacher(test, world.renamed)
    perfect, rollouts = solve.evaluate(for_flow(test), teacher, modules, tools, max_turns=MAX_TURNS)
    print(f"perfect plans:   {accuracy_line(perfect, len(test))}")
    for rollout in [rollout for rollout in rollouts if not rollout.right][:5]:
        print(trace(rollout), f"(wrong: {rollout.question.answer})\n")
    asked = [question for question in for_flow(test[:96]) for _ in range(16)]
    blind, rollouts = solve.evaluate(asked, engine, modules, tools, max_turns=MAX_TURNS)
    some = [any(rollout.right for rollout in rollouts[i : i + 16]) for i in range(0, len(rollouts), 16)]
    print(f"the toy's plans: {accuracy_line(blind, len(asked))}")
    print(f"groups of 16 with a success: {sum(some)} of {len(some)}")
    if perfect["accuracy"] < 0.97 or blind["accuracy"] > 0.10 or sum(some) < len(some) / 3:
        raise SystemExit("toy/hops/make.py: the check failed: perfect plans must reach 0.97, blind ones at "
                         "most 0.10, with a success in a third of the groups of 16")


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    parser.add_argument("--rollouts", type=int, default=12800, help="rollouts of the teacher to learn from")
    parser.add_argument("--steps", type=int, default=4000, help="steps of the warm start")
    parser.add_argument("--drilling", type=int, default=120, help="how many of them only copy")
    parser.add_argument("--knowing", type=int, default=3000, help="steps of base_generator's training")
    parser.add_argument("--base", default=str(TOY), help="the checkpoint to start from")
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="decides everything random")
    parser.add_argument("--out", type=Path, default=HOPS,
                        help="folder; toy/hops/ alone gets a base_generator, and is checked")
    parser.add_argument("--check", action="store_true", help="only check the toy that is there")
    args = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    if args.check:
        return check(load_engine(str(args.out)))
    make_files(args.out)
    if args.out == HOPS:
        make_base_generator(args.knowing, args.seed).save(BASE_GENERATOR)
    engine = make_engine(args.base, args.rollouts, args.steps, args.drilling, args.rate, args.seed)
    engine.save(args.out)
    minutes = (time.perf_counter() - start) / 60
    print(f"{args.out} is made: {minutes:.0f} minutes on {torch.get_num_threads()} thread(s)")
    if args.out == HOPS:
        check(engine)


if __name__ == "__main__":
    main()
