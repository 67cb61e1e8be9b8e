"""Make the toy, in this folder: a tiny language model that plays every module, its questions, its corpus.

    python toy/make.py             remake everything (half an hour on one core), then check it
    python toy/make.py --check     check the toy that is there
    python toy/make.py --width 64 --out runs/toy-64     a smaller model, for experiments/study.py

toy/ is an ordinary checkpoint folder (a Qwen2 of about a million parameters, its tokenizer, a chat template),
an ordinary corpus and ordinary JSONL questions. It is the default of solve.py and train.py, whose code treats
it like a 7B.

A million parameters can play planner, executor, verifier and generator for two reasons: the prompts are only
some tens of tokens long for this model (pieces.py), and its warm start has two stages:

    copying        the answer repeats a random sequence from the prompt: numbers are then copied right
    supervision    the answers of all modules in real rollouts (solve.py, real tools), written by a teacher
                   that knows every format and sub-goal, but picks its tools at random (teacher.py)
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from logbook import endings

endings.without_traceback(__name__)

import torch
import torch.nn.functional as F
from tokenizers import AddedToken
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

import executor
import generator
import solve
from cli.flags import TOY_TOOLS
from cli.watching import trace
from memory import Memory, Step
from models.loading import load_engine
from models.local import HF
from rewards.metrics import accuracy_line
from tools import TOOLS
from toy.edits import edited
from toy.pieces import NUMBERS, prompt_pieces
from toy.questions import (
    COUNTRIES, ELEMENTS, FACTS, corpus, country_text, for_flow, make, questions, splits)
from toy.teacher import SKILLS, Teacher, conclude
from world.toolbox import choose

TOY = Path(__file__).parent
CHAT = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(texts, pieces):
    """A byte-level BPE like Qwen2's, in which each word of `texts` and each piece is one token.

    The texts are sorted, because the order of a set changes between runs.
    """
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    empty = Qwen2Tokenizer(**special, extra_special_tokens=["<|im_start|>"])
    settings = {"vocab_size": 6000, "min_frequency": 2, "show_progress": False}
    tokenizer = empty.train_new_from_iterator([sorted(set(texts))], **settings)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.chat_template = CHAT
    return tokenizer


def make_model(tokenizer, width):
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.max_new_tokens = 64
    return model


# ------------------------------------------------------------------------------------------------- warm start
def copying(n, words, engine, rng, digits=None):
    """Pairs (prompt ids, answer ids) in which the answer repeats the prompt, a random sequence of tokens.

    digits: {number: its digits}, tokens; in a tenth of the prompts numbers are written so, as in "17*23"."""
    template = engine.chat.encode("|")
    place = next(i for i in range(len(template)) if engine.tokenizer.decode(template[i]) == "|")
    for _ in range(n):
        sequence = rng.choices(words, k=rng.randrange(1, 16))
        read = sequence
        if digits and rng.random() < 0.1:
            read = [i for token in sequence for i in digits.get(token, [token])]
        prompt_ids = template[:place] + read + template[place + 1 :]
        yield prompt_ids, sequence + [engine.tokenizer.eos_token_id]


def comparisons(n, rng):
    """Pairs (prompt, text) of the generator alone, for memories with two made-up facts, because many examples
    are needed to learn whether two words are equal."""
    continents = sorted({continent for *_, continent in COUNTRIES})
    for _ in range(n):
        question = make("compare", False, rng, noise=True)
        known = rng.choices(continents, k=2) if rng.random() < 0.6 else 2 * rng.choices(continents)
        steps = []
        for (what, whom), continent, verdict in zip(question["steps"], known, ("CONTINUE", "STOP")):
            call = executor.Call("wikipedia_search", {"query": f"{what} of {whom}"})
            result = f"[1] {whom}: {country_text(whom, rng.choice(COUNTRIES)[1], continent)}"
            sub_goal = f"Find the {what} of {whom}"
            steps.append(Step(len(steps) + 1, call.tool, sub_goal, str(call), result, verdict=verdict))
        memory = Memory(question["question"], SKILLS["compare"], steps)
        yield generator.prompt(memory.question, memory.analysis, memory.render()), conclude(question, known)


def learn_step(model, optimizer, batch):
    """One step of supervised learning, on the cross-entropy of the answers' tokens; returns the loss.

    batch: [(prompt ids, answer ids)].
    """
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


def warm_start(engine, sources, words, steps, copy_steps, rng, batch=64, rate=2e-3, digits=None):
    """`copy_steps` steps of copying; then, of each eight batches, one of copying and seven from the sources.

    sources: {name: (examples, how many of the eight batches)}.
    """
    optimizer = torch.optim.AdamW(engine.model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.05)
    order = ["copying"] + [name for name, (_, share) in sources.items() for _ in range(share)]
    pools, losses = {name: [] for name in sources}, {name: [0.0] for name in dict.fromkeys(order)}
    engine.model.train()
    for n in tqdm(range(1, steps + 1), desc="warm start", mininterval=10):
        name = "copying" if n <= copy_steps else order[n % len(order)]
        if name == "copying":
            chosen = list(copying(batch, words, engine, rng, digits))
        else:
            if not pools[name]:  # 50 batches, each of examples of similar length, in random order
                drawn = rng.choices(sources[name][0], k=batch * 50)
                drawn.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
                pools[name] = [drawn[i : i + batch] for i in range(0, len(drawn), batch)]
                rng.shuffle(pools[name])
            chosen = pools[name].pop()
        losses[name].append(learn_step(engine.model, optimizer, chosen))
        schedule.step()
        if n % 250 == 0:
            means = [f"{name} {sum(values[-50:]) / len(values[-50:]):.4f}" for name, values in losses.items()]
            tqdm.write(f"step {n:5d}/{steps} | {' | '.join(means)}")
    engine.model.eval()


# ------------------------------------------------------------------------------------------------------- main
def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_files(folder, passages, questions_of):
    """Write corpus.jsonl and a file of questions for each of train, valid and test."""
    folder.mkdir(exist_ok=True)
    write_rows(folder / "corpus.jsonl", passages)
    for name, made in questions_of.items():
        rows = ({key: row[key] for key in ("kind", "question", "answer")} for row in made)
        write_rows(folder / f"{name}.jsonl", ({"id": f"{name}-{n}"} | row for n, row in enumerate(rows)))


def make_files(folder):
    write_files(folder, corpus(), splits())


def make_engine(rollouts, steps, copy_steps, seed, width):
    """The toy's engine: a new tokenizer, and a model warm-started on `rollouts` of the blind teacher."""
    made = questions(rollouts, False, seed=seed + 10, noise=True)
    teacher = Teacher(made, blind=random.Random(seed))
    tools = choose(TOOLS, TOY_TOOLS, TOY / "corpus.jsonl")
    metrics, _ = solve.evaluate(for_flow(made), teacher, teacher, tools)
    print(f"the blind teacher: {accuracy_line(metrics, rollouts)}")

    texts = [text for pair in teacher.examples for text in pair]
    texts += [row["question"] for row in questions(2000, True, seed=seed + 11)]  # their words become tokens
    pieces, rng = prompt_pieces(), random.Random(seed)
    # Qwen2's tokenizer splits numbers into digits, so they are added as pieces.
    tokenizer = make_tokenizer(texts + [f" {fact}" for fact in FACTS.values()], [*pieces, *NUMBERS])
    engine = HF(make_model(tokenizer, width), tokenizer)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    def pairs(examples):
        return [(engine.chat.encode(edited(prompt, pieces, rng)), encode(text) + [tokenizer.eos_token_id])
                for prompt, text in examples]

    sources = {"rollouts": (pairs(teacher.examples), 6)}
    sources["comparisons"] = (pairs(comparisons(2 * rollouts, random.Random(seed))), 1)
    names = [word for row in [*ELEMENTS, *COUNTRIES] for word in row]
    names += [name.lower() for name, *_ in [*ELEMENTS, *COUNTRIES]]
    words = [encode(number)[0] for number in NUMBERS] + 2 * [i for name in names for i in encode(f" {name}")]
    digits = {encode(number)[0]: encode(number.strip()) for number in NUMBERS[:100]}  # {" 17": ["1", "7"]}
    words += 2 * [i for number in range(10) for i in digits[encode(f" {number}")[0]]]
    size = sum(p.numel() for p in engine.model.parameters()) / 1e6
    print(f"{size:.2f} M parameters, {len(tokenizer)} tokens, {len(teacher.examples)} examples")
    lengths = sorted(len(s) for s, _ in sources["rollouts"][0])
    print(f"prompts of {lengths[len(lengths) // 2]} tokens in the median, {lengths[-1]} at most", flush=True)
    warm_start(engine, sources, words, steps, copy_steps, rng, digits=digits)
    return engine


def check(engine, test):
    """Two checks of the toy. Its fixed modules must answer right when the plans are perfect. Its own planner
    must write plans that can be parsed, but pick its tools blindly."""
    tools, test_questions = choose(TOOLS, TOY_TOOLS, TOY / "corpus.jsonl"), for_flow(test)
    torch.manual_seed(0)
    perfect, rollouts = solve.evaluate(test_questions, Teacher(test), engine, tools)
    print(f"perfect plans:   {accuracy_line(perfect, len(test))}")
    for rollout in [rollout for rollout in rollouts if not rollout.right][:5]:
        print(trace(rollout), f"(wrong: {rollout.question.answer})\n")
    blind, _ = solve.evaluate(test_questions, engine, engine, tools)
    print(f"the toy's plans: {accuracy_line(blind, len(test))}")
    if perfect["accuracy"] < 0.97 or blind["accuracy"] > 0.55 or blind["errors"] < 0.15:
        raise SystemExit("toy/make.py: the check failed: perfect plans must reach 0.97, "
                         "blind ones stay below 0.55 with 15 % errors or more")


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    parser.add_argument("--rollouts", type=int, default=16000, help="rollouts of the teacher to learn from")
    parser.add_argument("--steps", type=int, default=5500, help="steps of the warm start")
    parser.add_argument("--drilling", type=int, default=1000, help="how many of them only copy")
    parser.add_argument("--seed", type=int, default=0, help="decides everything random")
    parser.add_argument("--width", type=int, default=128, help="hidden size of the model")
    parser.add_argument("--out", type=Path, default=TOY, help="folder; toy/ alone is checked, too")
    parser.add_argument("--check", action="store_true", help="only check the toy that is there")
    args = parser.parse_args()
    start, test = time.perf_counter(), questions(300, True, seed=1)
    torch.manual_seed(args.seed)
    if args.check:
        return check(load_engine(str(args.out)), test)
    make_files(args.out)
    engine = make_engine(args.rollouts, args.steps, args.drilling, args.seed, args.width)
    engine.save(args.out)
    minutes = (time.perf_counter() - start) / 60
    print(f"{args.out} is made: {minutes:.0f} minutes on {torch.get_num_threads()} thread(s)")
    if args.out == TOY:
        check(engine, test)


if __name__ == "__main__":
    main()
