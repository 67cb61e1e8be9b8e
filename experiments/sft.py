"""Offline supervised fine-tuning of the planner, to compare with Flow-GRPO: the paper's Table 3.

    python experiments/sft.py --traces perfect --out runs/sft    imitate a planner that makes no mistake
    python experiments/sft.py --traces own --out runs/sft        imitate the untrained planner's successes
    python experiments/sft.py --traces foreign --out runs/sft    imitate a teacher with words of its own

Rollouts are collected once, before any learning, on the questions that Flow-GRPO would take. The right ones
are kept, and the planner takes --steps x 4 optimiser steps on them, each on as many rollouts as a mini-batch
of Flow-GRPO. The loss needs no code: at ρ = 1 the gradient of Flow-GRPO's objective with A = 1 is that of the
log-likelihood. So the two differ in whose actions are learned, in when these were made, and in that here no
rollout is called worse than another.
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
import tools as toolset
from cli.flags import FOR_HOPS
from fast import logps
from flow_grpo import Action, log_probs, update
from logbook.records import record_of
from models.completion import Completion
from models.loading import load_engine
from rewards.metrics import accuracy_line
from scale import sharding
from scale.passes import Passes
from toy.hops.make import HOPS, load_modules
from toy.hops.questions import MAX_TURNS, World, for_flow, splits
from toy.hops.teacher import GOAL, TOOLS, Teacher
from train import questions_of
from world.toolbox import choose

QUESTIONS, GROUP, MINIBATCHES = FOR_HOPS["questions"], 8, FOR_HOPS["minibatches"]
FOREIGN = "Look up the figure for "  # in the place of GOAL, "Find the number of "


class Foreigner(Teacher):
    """The second toy's teacher with sub-goals in words of its own, which the toy's executor has never read.

    It reads every prompt in the toy's words, as its own have been replaced by them, and the other way round
    for what it writes. If it plays all modules, they understand each other."""

    def answer(self, prompt, question):
        texts = super().answer(prompt.replace(FOREIGN, GOAL), question)
        return tuple(text.replace(GOAL, FOREIGN) for text in texts)


class Perfect:
    """A teacher, with the right tools, as an engine whose texts are also the planner's token ids."""

    def __init__(self, teacher, engine):
        self.teacher, self.engine = teacher, engine

    def __call__(self, prompts, **settings):
        chat, encode = self.engine.chat, self.engine.tokenizer.encode
        end = [self.engine.tokenizer.eos_token_id]
        texts = [completion.text for completion in self.teacher(prompts)]
        return [Completion(text, chat.encode(prompt), encode(text, add_special_tokens=False) + end)
                for prompt, text in zip(prompts, texts)]


def collect(planner, fixed, tools, questions, steps, seed):
    """The right rollouts, of `steps` batches of the questions that train.py would take."""
    found = []
    for step in range(1, steps + 1):
        torch.manual_seed(seed * 1_000_003 + step)
        distinct = questions_of(step, questions, QUESTIONS, seed)
        batch = [question for question in distinct for _ in range(GROUP)]
        metrics, rollouts = solve.evaluate(batch, planner, fixed, tools, max_turns=MAX_TURNS)
        found += [rollout for rollout in rollouts if rollout.right]
        print(f"batch {step}/{steps}: {accuracy_line(metrics, len(batch))}", flush=True)
    return found


def imitate(engine, rollouts, steps, seed):
    """Supervised learning on random samples of the rollouts, each as large as a mini-batch of Flow-GRPO."""
    print(f"{len(rollouts)} rollouts to imitate", flush=True)
    passes = Passes(engine.model, None, *logps.scoring(log_probs, engine.model))
    optimizer, rng = sharding.adamw(engine.model, FOR_HOPS["lr"]), random.Random(seed)
    size = QUESTIONS * GROUP // MINIBATCHES
    for step in range(1, steps * MINIBATCHES + 1):
        batch = rng.sample(rollouts, min(size, len(rollouts)))
        turns = [(i, turn) for i, rollout in enumerate(batch) for turn in rollout.plans]
        actions = [Action(turn.prompt_ids, turn.ids, i, A=1.0) for i, turn in turns]
        report = update(passes, optimizer, actions, range(len(batch)), temperature=1.0)
        if step % 8 == 0:
            numbers = f"-log π a token {report['entropy']:.4f} | gradient {report['grad_norm']:.2f}"
            print(f"step {step} | {numbers}", flush=True)


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    add = parser.add_argument
    add("--traces", required=True, choices=["perfect", "own", "foreign"], help="whose rollouts are imitated")
    add("--steps", type=int, default=50, help="batches of rollouts, as train.py's --steps")
    add("--seed", type=int, default=0, help="decides everything random")
    add("--out", type=Path, required=True,
        help="folder: best/ is the checkpoint, questions-0.jsonl a teacher's test rollouts")
    args = parser.parse_args()
    engine, fixed, world = load_engine(str(HOPS), dtype="float32"), load_modules(), World(0)
    tools, made = choose(toolset.TOOLS, list(TOOLS), HOPS / "corpus.jsonl"), splits(world)
    kind = Foreigner if args.traces == "foreign" else Teacher
    teacher = kind(made["train"] + made["test"], world.renamed)
    planner = engine if args.traces == "own" else Perfect(teacher, engine)
    others = teacher if args.traces == "foreign" else fixed
    found = collect(planner, others, tools, for_flow(made["train"]), args.steps, args.seed)
    imitate(engine, found, args.steps, args.seed)
    engine.save(args.out / "best")
    if args.traces != "own":  # how far the teacher's own plans get with the fixed modules
        torch.manual_seed(args.seed)
        tested = for_flow(made["test"])
        metrics, rollouts = solve.evaluate(tested, planner, fixed, tools, max_turns=MAX_TURNS)
        print(f"the teacher's plans: {accuracy_line(metrics, len(rollouts))}")
        records = "".join(json.dumps(record_of(rollout)) + "\n" for rollout in rollouts)
        (args.out / "questions-0.jsonl").write_text(records, encoding="utf-8")


if __name__ == "__main__":
    main()
