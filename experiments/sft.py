"""Offline supervised fine-tuning of the planner, to compare with Flow-GRPO: the paper's Table 3.

    python experiments/sft.py --traces perfect --out runs/sft    imitate a planner that makes no mistake
    python experiments/sft.py --traces own --out runs/sft        imitate the untrained planner's successes
    python experiments/sft.py --traces foreign --out runs/sft    imitate a teacher with words of its own
    python experiments/sft.py --traces own --model WARM --fixed WARM --roles all --out runs/sft

The first three learn in the second toy's world; with --roles, questions and teacher are those of smollm.py.

Rollouts are collected once, before any learning, on the questions that Flow-GRPO would take. The right ones
are kept, and the planner takes as many optimiser steps on them, each on as many rollouts. The loss needs no
code: at ρ = 1 the gradient of Flow-GRPO's objective with A = 1 is that of the log-likelihood. So the two
differ in whose actions are learned, in when these were made, and in that here no rollout is called worse
than another.
"""

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from logbook import endings

endings.without_traceback(__name__)

import torch

import solve
from cli.command_line import HOPS, TOY, TOY_TOOLS, rollout_settings
from experiments.wordings import asked, teacher_for
from fast import logps
from flow_grpo import Action, log_probs, update
from logbook.records import record_of
from models.completion import Completion
from models.loading import load_engine
from rewards.metrics import accuracy_line
from scale import adapters, sharding
from scale.passes import Passes
from tools import toolbox
from toy.hops.questions import World, for_flow, splits
from toy.hops.teacher import GOAL, TOOLS, Teacher
from train import questions_of

FOREIGN = "Look up the figure for "  # in the place of GOAL, "Find the number of "


class Foreigner(Teacher):
    """The second toy's teacher with sub-goals in words of its own, which the toy's executor has never read.

    It reads every prompt in the toy's words, as its own have been replaced by them, and the other way round
    for what it writes. If it plays all modules, they understand each other."""

    def answer(self, prompt):
        texts = super().answer(prompt.replace(FOREIGN, GOAL))
        return tuple(text.replace(GOAL, FOREIGN) for text in texts)


class Perfect:
    """A teacher, with the right tools, as an engine whose texts are also the planner's token ids."""

    def __init__(self, teacher, engine):
        self.teacher, self.engine = teacher, engine

    def __call__(self, prompts, **settings):
        encode, end = self.engine.tokenizer.encode, [self.engine.tokenizer.eos_token_id]
        texts = [completion.text for completion in self.teacher(prompts)]
        return [Completion(text, self.engine.encode(prompt), encode(text, add_special_tokens=False) + end)
                for prompt, text in zip(prompts, texts)]


def collect(planner, fixed, tools, questions, args):
    """[[the right rollouts]], for `--steps` batches of the questions that train.py would take."""
    batches = []
    for step in range(1, args.steps + 1):
        torch.manual_seed(args.seed * 1_000_003 + step)
        distinct = questions_of(step, questions, args.questions, args.seed)
        batch = [question for question in distinct for _ in range(args.group_size)]
        metrics, rollouts = solve.evaluate(batch, planner, fixed, tools, **rollout_settings(args))
        batches.append([rollout for rollout in rollouts if rollout.right])
        print(f"batch {step}/{args.steps}: {accuracy_line(metrics, len(batch))}", flush=True)
    return batches


def imitate(engine, batches, args):
    """Supervised learning on random samples of the rollouts, each as large as a mini-batch of Flow-GRPO.

    With --in-order: on one collected batch after the other; an empty one becomes a sample."""
    rollouts = [rollout for batch in batches for rollout in batch]
    print(f"{len(rollouts)} rollouts to imitate", flush=True)
    how = logps.scoring(log_probs, engine.model)
    sharding.shard(engine.model)  # in bfloat16 it trains float32 masters
    passes = Passes(engine.model, None, token_budget=args.token_budget, **how)
    optimizer, rng = sharding.adamw(engine.model, args.lr), random.Random(args.seed)
    size = args.questions * args.group_size // args.minibatches
    for step in range(1, args.steps * args.minibatches + 1):
        collected = batches[(step - 1) // args.minibatches] if args.in_order else []
        batch = collected or rng.sample(rollouts, min(size, len(rollouts)))
        turns = [(i, turn) for i, rollout in enumerate(batch) for turn in rollout.actions]
        actions = [Action(turn.prompt_ids, turn.ids, i, A=1.0) for i, turn in turns]
        report = update(passes, optimizer, actions, range(len(batch)), temperature=1.0)
        if step % 8 == 0:
            numbers = f"-log π a token {report['entropy']:.4f} | gradient {report['grad_norm']:.2f}"
            print(f"step {step} | {numbers}", flush=True)
    sharding.gather(engine.model)


def world_of(args):
    """(tools, the questions to learn from, the test questions, the class of the teacher)"""
    if args.roles:
        return toolbox(TOY_TOOLS, TOY / "corpus.jsonl"), asked(), [], teacher_for(args.roles)
    made = splits(World(0))
    teacher = Foreigner if args.traces == "foreign" else Teacher
    return toolbox(list(TOOLS), HOPS / "corpus.jsonl"), made["train"], made["test"], teacher


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    add = parser.add_argument
    add("--traces", required=True, choices=["perfect", "own", "foreign"], help="whose rollouts are imitated")
    add("--steps", type=int, default=50, help="batches of rollouts, as train.py's --steps")
    add("--questions", type=int, default=16, help="questions a batch")
    add("--group-size", type=int, default=8, help="rollouts a question")
    add("--minibatches", type=int, default=4, help="optimiser steps for each batch")
    add("--in-order", action="store_true",
        help="a step imitates one batch, as it was collected: its prompts are much the same, which is faster")
    add("--max-turns", type=int, default=5, help="turns of a rollout")
    add("--lr", type=float, default=4e-4, help="learning rate of AdamW")
    add("--lora", type=int, help="train adapters of this rank (needs peft); None: all weights")
    add("--model", default=str(HOPS), help="the planner that learns")
    add("--fixed", default=str(HOPS), help="the model of all other modules")
    add("--roles", choices=["planner", "all"], help="questions and teacher of smollm.py; None: the toy's own")
    add("--temperature", type=float, default=0.7, help="of the planner's sampling")
    add("--max-new-tokens", type=int, help="longest completion of a module; None: the checkpoint's, or 1024")
    add("--token-budget", type=int, default=16384, help="tokens of a micro-batch: bounds memory")
    add("--dtype", help="float32, bfloat16, ...; None: bfloat16 on cuda, float32 elsewhere")
    add("--seed", type=int, default=0, help="decides everything random")
    add("--out", type=Path, required=True,
        help="folder: best/ is the checkpoint, questions-0.jsonl a teacher's test rollouts")
    args = parser.parse_args()
    engine, fixed = (load_engine(name, dtype=args.dtype) for name in (args.model, args.fixed))
    engine = adapters.adapted(engine, args.lora)[0] if args.lora else engine
    tools, made, tested, teacher = world_of(args)
    planner = engine if args.traces == "own" else Perfect(teacher(made + tested), engine)
    others = planner.teacher if args.traces == "foreign" else fixed
    imitate(engine, collect(planner, others, tools, for_flow(made), args), args)
    engine.save(args.out / "best")
    if args.traces != "own" and tested:  # how far the teacher's own plans get with the fixed modules
        torch.manual_seed(args.seed)
        settings = rollout_settings(args)
        metrics, rollouts = solve.evaluate(for_flow(tested), planner, fixed, tools, **settings)
        print(f"the teacher's plans: {accuracy_line(metrics, len(rollouts))}")
        records = "".join(json.dumps(record_of(rollout)) + "\n" for rollout in rollouts)
        (args.out / "questions-0.jsonl").write_text(records, encoding="utf-8")


if __name__ == "__main__":
    main()
