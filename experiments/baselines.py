"""What Flow-GRPO is compared with on the toy: supervised fine-tuning, and a monolithic policy.

    python experiments/baselines.py sft own runs/sft-own          imitate its own right rollouts
    python experiments/baselines.py sft perfect runs/sft-perfect  imitate a planner without mistakes
    python experiments/baselines.py perfect runs/perfect          that planner's own answers
    python experiments/baselines.py warm runs/monolith            warm-start a monolithic policy
    python experiments/baselines.py monolith --model runs/monolith --out runs/monolith-seed0 ...
    python experiments/baselines.py last-turn --seed 1 ...        only last plans get the reward's A

The last two commands are train.py with all of its flags, and one function of it exchanged. Routers,
which pick the tools by a rule, are in toy/routers.py.

Supervised: as many rollouts as train.py would sample are collected once, with the questions that it
would take. The planner then takes as many optimiser steps on the right ones as train.py would. The
loss needs no code: at ρ = 1 the gradient of Flow-GRPO's objective with A = 1 is that of the
log-likelihood. So they differ in when the plans were made, and in that here none is pushed down.

A monolith (such as ToRL's) thinks, calls tools and answers in one growing text. In each turn it
reads everything that it has written, with the results, and writes a step with a call, or the
answer. All of that is trained. No other module plays a part, except base_generator."""

import argparse
import json
import random
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import executor
import generator
import planner
import solve
import train
from fast import trees
from flow_grpo import distribution, update
from memory import Memory, Step
from models import local
from models.completion import Completion
from planner import Plan, Unparsed
from record.flags import TOY
from record.folder import append
from record.metrics import accuracy_line, summary
from record.rollouts import record_of
from rewards.grade import grade
from tools import choose, run_calls
from toy import make, teacher
from toy.questions import World, for_flow, splits
from toy.teacher import Known, Teacher
from world.text import indented

DEFAULTS = train.TOY
ALL_ACTIONS = train.actions_of


# ------------------------------------------------------------------------------------- supervised
class Perfect:
    """The toy's teacher as a planner: its texts are also token ids, which can be imitated."""

    def __init__(self, teacher, engine):
        self.teacher, self.engine = teacher, engine

    def __call__(self, prompts, **how):
        encode, texts = self.engine.chat.encode, [c.text for c in self.teacher(prompts)]
        return [
            Completion(text, encode(prompt), teacher.ids_of(self.engine, text))
            for prompt, text in zip(prompts, texts, strict=True)
        ]


def collect(planner, fixed, tools, questions, steps, seed):
    """The right rollouts of all that train.py would sample in so many steps."""
    found = []
    for step in range(1, steps + 1):
        torch.manual_seed(seed * 1_000_003 + step)
        some = train.questions_of(step, questions, DEFAULTS["questions"], seed)
        copies = [question for question in some for _ in range(DEFAULTS["group_size"])]
        rollouts = solve.roll_out(copies, planner, fixed, tools, max_turns=make.MAX_TURNS["test"])
        found += [rollout for rollout in rollouts if rollout.right]
        print(f"batch {step}/{steps} | {accuracy_line(summary(rollouts), len(copies))}", flush=True)
    return found


def imitate(model, rollouts, steps, lr, seed):
    """Take as many optimiser steps as train.py, each on a random part as large as a mini-batch."""
    adamw = partial(torch.optim.AdamW, weight_decay=0.0, fused=True)
    optimizer, rng = adamw(model.parameters(), lr=lr), random.Random(seed)
    size = DEFAULTS["questions"] * DEFAULTS["group_size"] // DEFAULTS["minibatches"]
    for step in range(1, steps * DEFAULTS["minibatches"] + 1):
        batch = rng.sample(rollouts, min(size, len(rollouts)))
        actions = train.actions_of(batch, torch.ones(len(batch)))
        settings = dict(temperature=1.0, clip=(0.2, 0.3), beta=0, minibatches=1, rows=trees.rows)
        metrics = update(model, None, optimizer, actions, range(len(batch)), **settings)
        if step % 20 == 0:
            print(f"step {step} | -log π a token {metrics['entropy']:.4f}", flush=True)


def cast():
    """(the toy, its tools, its questions as {split: dicts}, the perfect planner)"""
    engine, world = local.load(TOY, distribution, "cpu"), World()
    tools, made = choose(list(teacher.TOOLS), f"{TOY}/corpus.jsonl"), splits(world)
    plans = Perfect(Teacher(made["train"] + made["test"], world.known()), engine)
    return engine, tools, made, plans


def perfect(args):
    """Write the perfect planner's answers to the test questions, as solve.py --out does."""
    engine, tools, made, planner = cast()
    questions = for_flow(made["test"])
    rollouts = solve.roll_out(questions, planner, engine, tools, max_turns=make.MAX_TURNS["test"])
    append(args.out / "questions-0.jsonl", map(record_of, rollouts))
    print(accuracy_line(summary(rollouts), len(questions)))


def sft(args):
    engine, tools, made, planner = cast()
    policy = engine if args.traces == "own" else planner
    found = collect(policy, engine, tools, for_flow(made["train"]), args.steps, args.seed)
    if not found:
        raise ValueError("no rollout was right, so there is nothing to imitate")
    print(f"{len(found)} rollouts to imitate")
    imitate(engine.model, found, args.steps, args.lr, args.seed)
    save(engine, args.out)


def save(engine, folder):
    """A folder for solve.py --model; the toy plays the other modules."""
    local.save(engine.model, engine.tokenizer, folder)
    settings = {"fixed": TOY, "tools": list(teacher.TOOLS)}
    settings |= {"judge": "none", "corpus": f"{TOY}/corpus.jsonl"}
    (folder / "train.json").write_text(json.dumps(settings))


# --------------------------------------------------------------------------------------- monolith
PROMPT = "Tools:\n{tools}\nQuestion: {question}\n\nMemory:\n{so_far}"
CALL = "\nCommand:"


def parse(text, tools):
    """A step as a monolith wrote it: (its thought, the tool, the call or an Unparsed)."""
    thought, _, command = text.partition(CALL)
    tool = command.partition("(")[0].strip()
    if tool not in tools:
        return thought, "", Unparsed(f"no line 'Command: ...' that calls {', '.join(tools)}.")
    return thought, tool, executor.parse(command, tool, tools[tool])


def roll_out(
    questions,
    policy,
    fixed,
    tools,
    judge=None,
    max_turns=3,
    temperature=0.7,
    max_new_tokens=None,
    trained=(),
):
    """In the place of solve.roll_out(): up to max_turns steps of a monolith, then its answer."""
    rollouts = [solve.Rollout(question, Memory(question.question)) for question in questions]
    so_far = {id(rollout): "" for rollout in rollouts}
    engines = fixed if isinstance(fixed, dict) else {"default": fixed}
    limit = {"max_new_tokens": max_new_tokens}
    ask_model = partial(engines.get("base_generator", engines["default"]), **limit)
    fill = partial(PROMPT.format, tools=planner.describe_all(tools))
    prompt = lambda r: fill(question=indented(r.question.question), so_far=so_far[id(r)])
    for turn in range(1, max_turns + 2):
        live = [rollout for rollout in rollouts if not rollout.stopped and not rollout.failed]
        prompts, acting = list(map(prompt, live)), []
        written = policy(prompts, temperature=temperature, **limit) if live else []
        for rollout, c in zip(live, written, strict=True):
            rollout.add_output(turn, "planner", c.text, c.tokens, 0.0, c.cut, len(c.ids))
            if c.error:
                rollout.failed = f"monolith: {c.error}"
                continue
            rollout.sampled.append(c)
            if "<answer>" in c.text or turn > max_turns:
                rollout.answer, rollout.stopped = generator.parse(c.text, c.cut), True
                continue
            thought, tool, rollout.call = parse(c.text, tools)
            rollout.plans.append(Plan("", thought, tool))
            acting.append((rollout, c.text))
        calls, states = [r.call for r, _ in acting], [r.state for r, _ in acting]
        results = run_calls(calls, states, tools, ask_model)
        for (rollout, text), result in zip(acting, results, strict=True):
            plan, call = rollout.plans[-1], str(rollout.call)
            step = Step(turn, plan.tool, plan.sub_goal, call, result.text, result.error)
            rollout.memory.steps.append(step)
            rollout.add_output(turn, plan.tool, result.text, result.tokens, result.seconds)
            so_far[id(rollout)] += f"{text}\nResult: {indented(result.text)}\n\n"
            rollout.failed = result.failed
    grade(rollouts, judge)
    return rollouts


class Writer:
    """The toy's teacher as a monolith: writes a plan and its call, or the answer."""

    def __init__(self, teacher, tools, max_turns):
        self.teacher, self.tools, self.max_turns = teacher, tools, max_turns

    def __call__(self, prompts, **how):
        return [Completion(self.write(prompt), [], []) for prompt in prompts]

    def write(self, prompt):
        made = self.teacher.made[re.search(r"\nQuestion: (.*)\n", prompt)[1]]
        known, blind = Known(prompt), self.teacher.blind
        if answer := teacher.conclusion(made, known):
            done = learnt = f"{teacher.FOUND} {answer}{teacher.END}"
        elif prompt.count("\nResult: ") == self.max_turns:
            done = learnt = teacher.UNKNOWN
        else:
            done = self.with_call(made["question"], teacher.perfect(made, known))
            learnt = self.with_call(made["question"], self.teacher.drawn(made, known))
            done = done if blind.random() < self.teacher.guided else learnt
        self.teacher.examples.append((prompt, learnt))
        return done

    def with_call(self, question, text):
        """A plan, with its call in the place of its tool."""
        plan = planner.parse(text, self.tools)
        call = teacher.command(executor.prompt(question, plan, self.tools[plan.tool]))
        return f"{text.rpartition('Tool:')[0].rstrip()}{CALL} {call}"


def teach(questions, blind, _, tools, max_turns):
    """In the place of solve.roll_out() in toy/make.py: the teacher's examples are a monolith's."""
    roll_out(questions, Writer(blind, tools, max_turns), blind, tools, max_turns=max_turns)


def warm(args):
    engine, rng = local.load(TOY, distribution, "cpu"), random.Random(args.seed)
    torch.manual_seed(args.seed)
    solve.roll_out = teach
    examples = make.rollout_examples(args.rollouts, rng)
    pairs = [(engine.chat.encode(s), teacher.ids_of(engine, a)) for s, a in examples]
    make.learn(engine, make.batches_of([(pairs, 1, False)], rng), args.steps, 2e-3)
    save(engine, args.out)


def last_actions(rollouts, A):
    """In the place of train.actions_of(): the earlier plans of a rollout get A = 0. So T_i and what
    the KL acts on are those of Flow-GRPO."""
    actions = ALL_ACTIONS(rollouts, A)
    last = {action.rollout: action.turn for action in actions}
    return [replace(a, A=a.A * (a.turn == last[a.rollout])) for a in actions]


def main():
    if sys.argv[1:2] == ["monolith"]:
        solve.roll_out = roll_out
        return train.train(train.settings(train.given(sys.argv[2:])))
    if sys.argv[1:2] == ["last-turn"]:
        train.actions_of = last_actions
        return train.train(train.settings(train.given(sys.argv[2:])))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = "sft, perfect, warm, ..."
    commands = parser.add_subparsers(required=True, metavar=names, dest="command")
    add = commands.add_parser("sft").add_argument
    add("traces", choices=["own", "perfect"], help="whose rollouts are imitated")
    add("out", type=Path, help="the checkpoint's folder")
    add("--steps", type=int, default=DEFAULTS["steps"], help="batches of rollouts")
    add("--lr", type=float, default=DEFAULTS["lr"])
    add("--seed", type=int, default=0)
    commands.add_parser("perfect").add_argument("out", type=Path, help="a new folder")
    add = commands.add_parser("warm").add_argument
    add("out", type=Path, help="the checkpoint's folder")
    add("--rollouts", type=int, default=6400, help="of the teacher")
    add("--steps", type=int, default=2000, help="of 32 examples")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True)  # FileExistsError: it would be overwritten
    {"sft": sft, "perfect": perfect, "warm": warm}[args.command](args)


if __name__ == "__main__":
    main()
