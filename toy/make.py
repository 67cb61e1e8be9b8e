"""Make the toy, in this folder: a tiny language model that plays every module, its questions, its corpus.

    python toy/make.py             remake everything, then check it
    python toy/make.py --check     check the toy that is there
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from tokenizers import AddedToken
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

import planner
import solve
from models.loading import load_engine
from models.local import HF
from rewards.metrics import accuracy_line
from tools import TOOLS
from toy import wordings
from toy.pieces import NAMES, NUMBERS, edited, prompt_pieces
from toy.questions import LONG, PATHS, URLS, WORDINGS, WORDS, World, for_flow, operation, splits
from toy.teacher import GUESS, NEXT, Teacher, analysis, goal_of
from toy.teacher import TOOLS as TOY_TOOLS
from world.toolbox import choose

TOY = Path(__file__).parent
CHAT = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_TURNS = 3
WORLDS = 128  # of the warm start


def make_tokenizer(texts, pieces, size=1200):
    """A byte-level BPE like Qwen2's, learnt from `texts`, in which each piece is one token."""
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    empty = Qwen2Tokenizer(**special, extra_special_tokens=["<|im_start|>"])
    tokenizer = empty.train_new_from_iterator([texts], vocab_size=size, min_frequency=2, show_progress=False)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.chat_template = CHAT
    return tokenizer


def make_model(tokenizer, width, layers=4):
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.generation_config.max_new_tokens = 64
    return model


# ---------------------------------------------------------------------------------------------- the examples
def quick_python(code):
    """What the sandbox prints for the teacher's programs, without starting one: a test compares the two."""
    value = re.fullmatch(r"number = (.*); print\(number\)", code)[1]
    if found := re.fullmatch(r"(\d+) ([-+*]) (\d+)", value):
        a, sign, b = int(found[1]), found[2], int(found[3])
        return str({"+": a + b, "-": a - b, "*": a * b}[sign])
    if value.isdigit():
        return value
    if value == "none":
        return "Error: NameError: name 'none' is not defined (line 1)"
    return "Error: SyntaxError: invalid syntax (line 1)"


def freely(what, name, op, n, rng):
    """A question's wording in the warm start: mostly free."""
    if rng.random() < 0.4:
        return WORDINGS["train"](what, name, op, n, rng)
    return wordings.ask(what, typed(name, rng), op, n, rng)


def typed(name, rng):
    """A name as people may type it."""
    return name if rng.random() < 0.75 else rng.choice([name.lower(), name.capitalize()])


def unknowns(n, rng):
    """n questions that nothing here can answer."""
    texts = {wordings.unknown(typed(rng.choice(NAMES), rng), rng) for _ in range(n)}
    return [{"kind": "unknown", "question": text, "answer": "unknown", "name": "", "what": "", "op": "", "n": 0}
            for text in sorted(texts)]  # fmt: skip


def teachers_examples(rollouts, seed):
    """[(prompt, text)] of all modules, from `rollouts` rollouts of the blind teacher, in worlds drawn anew."""
    rng, examples = random.Random(seed), []
    for n in tqdm(range(WORLDS), desc="the teacher's rollouts", mininterval=10):
        world = World(f"warm start {seed} {n}")
        long = n % 4 == 3
        with tempfile.TemporaryDirectory() as folder:
            corpus = Path(folder) / "corpus.jsonl"
            write_rows(corpus, world.rows)
            tools = choose(TOOLS, list(TOY_TOOLS), corpus)
            tools["python_coder"] = replace(tools["python_coder"], run=quick_python)
            made = world.questions(rollouts // WORLDS, "train", rng.random(), PATHS | LONG if long else PATHS, (), freely)
            made += unknowns(rollouts // WORLDS // 12, rng)
            teacher = Teacher(made, world.known(), blind=rng, guided=rng.choice([0.3, 0.9]))
            solve.roll_out(for_flow(made), teacher, teacher, tools, 5 if long else MAX_TURNS)
        examples += teacher.examples
    return examples


def analyses(n, rng):
    """[(prompt, text)] of the analysis alone: freely worded questions are read there and nowhere else."""
    tools, asked = {name: TOOLS[name] for name in TOOLS if name in TOY_TOOLS}, unknowns(n // 5, rng)
    while len(asked) < n:
        what = rng.choice(list(WORDS))
        name = rng.choice([name for name in NAMES if (name[0].isupper()) == (what == "calling code")])
        op, number = operation(rng.randrange(1, 1000), rng) if rng.random() < 0.5 else ("", 0)
        text = freely(what, name, op, number, rng)
        asked.append({"question": text, "name": name, "what": what, "op": op, "n": number})
    return [(planner.analysis_prompt(row["question"], tools), analysis(row)) for row in asked]


def knowledge(n, rng):
    """[(prompt, text)] of base_generator: what it knows, and numbers that it makes up."""
    known, found = World().known(), []
    things = [thing for things in World().things.values() for thing in things]
    for _ in range(n):
        thing = rng.choice(things)
        query = f"{WORDS[thing.what]} of {thing.name}"
        if query not in known and rng.random() < 0.5:
            query = rng.choice(list(known))
        number = known.get(query) or rng.randrange(1, 1000)
        if rng.random() < 0.1:
            op, other = operation(thing.number, rng)
            query, number = f"{query} {op} {other}", rng.randrange(1, 1000)
        found.append((query, GUESS.format(number)))
    return found


def follows_memory(prompt, text):
    """Is this a plan with an address, numbers or a name that only the memory holds? Few plans are."""
    found = re.match(r"Justification: .*\nContext: (.*)\nSub-goal: Find the \w+ of (\w+)", text)
    return bool(found) and (found[1] != "none" or found[2] not in prompt.split("\nMemory:\n")[0])


# -------------------------------------------------------------------------------------------------- warm start
def copying(n, words, engine, rng):
    """Pairs (prompt ids, answer ids) in which the answer repeats the prompt, a random sequence of tokens."""
    template = engine.chat.encode("|")
    place = next(i for i in range(len(template)) if engine.tokenizer.decode(template[i]) == "|")
    for _ in range(n):
        sequence = rng.choices(words, k=rng.randrange(1, 16))
        yield template[:place] + sequence + template[place + 1 :], sequence + [engine.tokenizer.eos_token_id]


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


def warm_start(engine, sources, words, steps, copy_steps, rng, batch=64, rate=3e-3):
    """`copy_steps` steps of copying; then one batch of copying and those of the sources in turn.

    sources: {name: (examples, how many batches in turn)}.
    """
    optimizer = torch.optim.AdamW(engine.model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.05)
    order = ["copying"] + [name for name, (_, share) in sources.items() for _ in range(share)]
    pools, losses = {name: [] for name in sources}, {name: [0.0] for name in dict.fromkeys(order)}
    engine.model.train()
    for n in tqdm(range(1, steps + 1), desc="warm start", mininterval=10):
        name = "copying" if n <= copy_steps else order[n % len(order)]
        if name == "copying":
            chosen = list(copying(batch, words, engine, rng))
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


def make_files(folder):
    """Write corpus.jsonl and the questions."""
    world = World()
    write_rows(folder / "corpus.jsonl", world.rows)
    for name, made in splits(world).items():
        rows = ({key: row[key] for key in ("kind", "question", "answer")} for row in made)
        write_rows(folder / f"{name}.jsonl", ({"id": f"{name}-{n}"} | row for n, row in enumerate(rows)))


def make_engine(rollouts, steps, copy_steps, seed, width, layers, rate):
    rng = random.Random(seed)
    texts = [text for prompt, _ in analyses(20000, rng) for text in [prompt.split("Question: ")[1].split("\n")[0]]]
    pieces = prompt_pieces()
    editable = [piece for piece, may in pieces.items() if may]
    tokenizer = make_tokenizer(texts + list(pieces), pieces)
    engine = HF(make_model(tokenizer, width, layers), tokenizer)

    template = [{"role": "user", "content": "{}"}]
    template = tokenizer.apply_chat_template(template, tokenize=False, add_generation_prompt=True)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    def encoded(examples):
        return [(encode(template.replace("{}", edited(prompt, editable, rng))), encode(text) + [tokenizer.eos_token_id])
                for prompt, text in examples]  # fmt: skip

    examples = teachers_examples(rollouts, seed)
    pairs = encoded(examples)
    hard = [pair for pair, example in zip(pairs, examples) if follows_memory(*example)]
    sources = {"rollouts": (pairs, 4), "plans": (hard, 2), "analyses": (encoded(analyses(3 * rollouts, rng)), 2),
               "knowledge": (encoded(knowledge(rollouts, rng)), 2)}  # fmt: skip
    size = sum(p.numel() for p in engine.model.parameters()) / 1e6
    lengths = sorted(len(s) for s, _ in pairs)
    print(f"{size:.2f} M parameters, {len(tokenizer)} tokens, {len(pairs)} examples, "
          f"prompts of {lengths[len(lengths) // 2]} tokens in the median, {lengths[-1]} at most", flush=True)  # fmt: skip
    copied = [*NUMBERS, *(f" {name}" for name in NAMES), *URLS]
    words = [encode(text)[0] for text in copied]
    warm_start(engine, sources, words, steps, copy_steps, rng, rate=rate)
    return engine


def check(engine, folder=TOY):
    """Perfect plans must succeed with the toy's own modules, and its own planner must not."""
    tools, world = choose(TOOLS, list(TOY_TOOLS), TOY / "corpus.jsonl"), World()
    made = splits(world)
    known = world.known()
    answers = [completion.text for completion in engine(list(known))]
    knows = sum(text == GUESS.format(number) for text, number in zip(answers, known.values()))
    print(f"base_generator:  knows {knows} of {len(known)} numbers")
    torch.manual_seed(0)
    for name, turns in (("test", 3), ("long", 5)):
        perfect, rollouts = solve.evaluate(for_flow(made[name]), Teacher(made[name], known), engine, tools, max_turns=turns)
        print(f"perfect plans, {name}:   {accuracy_line(perfect, len(made[name]))}")
        for rollout in [rollout for rollout in rollouts if not rollout.right][:3]:
            print(rollout.question, rollout.answer, rollout.memory.render(), "\n")
    asked = [question for question in for_flow(made["test"][:96]) for _ in range(8)]
    blind, rollouts = solve.evaluate(asked, engine, engine, tools, max_turns=MAX_TURNS)
    some = [any(rollout.right for rollout in rollouts[i : i + 8]) for i in range(0, len(rollouts), 8)]
    print(f"the toy's plans: {accuracy_line(blind, len(asked))}")
    print(f"groups of 8 with a success: {sum(some)} of {len(some)}")


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    parser.add_argument("--rollouts", type=int, default=12800, help="rollouts of the teacher to learn from")
    parser.add_argument("--steps", type=int, default=5000, help="steps of the warm start")
    parser.add_argument("--drilling", type=int, default=600, help="how many of them only copy")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="decides everything random")
    parser.add_argument("--width", type=int, default=96, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=TOY, help="folder")
    parser.add_argument("--check", action="store_true", help="only check the toy that is there")
    args = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    if args.check:
        return check(load_engine(str(args.out)))
    args.out.mkdir(exist_ok=True, parents=True)
    make_files(args.out)
    engine = make_engine(args.rollouts, args.steps, args.drilling, args.seed, args.width, args.layers, args.rate)
    engine.save(args.out)
    minutes = (time.perf_counter() - start) / 60
    print(f"{args.out} is made: {minutes:.0f} minutes on {torch.get_num_threads()} thread(s)")
    check(engine)


if __name__ == "__main__":
    main()
