"""Offline supervised fine-tuning of the planner, to set beside Flow-GRPO: the paper's Table 3.

    python plots/sft.py --traces perfect --out runs/sft        imitate a planner that always chooses the right tool
    python plots/sft.py --traces own --out runs/sft            imitate the untrained planner where it was right

As many flows are collected as Flow-GRPO would roll out, on the same questions, once, before any learning; those that ended well are kept;
and the planner takes as many optimiser steps on them, each on as many flows. The loss needs no code of its own: at ρ = 1 the gradient
of Flow-GRPO's objective with A = 1 is that of the log-likelihood. So supervised learning differs from Flow-GRPO in whose actions are
learnt from, when they were made, and that no rollout is ever called worse than another.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import solve
from flow_grpo import Action, update
from models.completion import Completion
from models.loading import load_engine
from rewards.metrics import accuracy_line
from rewards.questions import read_questions
from scale import command_line
from scale.masters import MasterAdamW
from toy import make as toy
from train import questions_of


class Perfect:
    """toy.py's teacher with the right tools, as an engine whose words are also token ids of the planner that is to learn them."""

    def __init__(self, made, engine):
        self.teacher, self.engine = toy.Teacher(made), engine

    def __call__(self, prompts, **settings):
        encode = lambda text: self.engine.tokenizer.encode(text, add_special_tokens=False) + [self.engine.tokenizer.eos_token_id]
        said = self.teacher(prompts)
        return [Completion(one.text, self.engine.encode(asked), encode(one.text)) for asked, one in zip(prompts, said)]


def collect(planner, fixed, tools, questions, args):
    """The flows that ended well, of `--steps` batches of the questions that train.py would take."""
    flows = []
    for step in range(1, args.steps + 1):
        torch.manual_seed(args.seed * 1_000_003 + step)
        batch = [question for question in questions_of(step, questions, args.questions, args.seed) for _ in range(args.group_size)]
        metrics, done = solve.evaluate(batch, planner, fixed, tools, max_turns=args.max_turns)
        flows += [flow for flow in done if flow.reward]
        print(f"batch {step}/{args.steps}: {accuracy_line(metrics, len(batch))}", flush=True)
    return flows


def imitate(engine, flows, args):
    """Steps of supervised learning on random samples of the flows, each as large as one of Flow-GRPO's mini-batches."""
    optimizer, rng = MasterAdamW(list(engine.model.parameters()), lr=args.lr), random.Random(args.seed)
    size = args.questions * args.group_size // args.minibatches
    for step in range(1, args.steps * args.minibatches + 1):
        batch = rng.sample(flows, min(size, len(flows)))
        actions = [Action(said.prompt_ids, said.ids, i) for i, flow in enumerate(batch) for said in flow.actions]
        learned = update(engine.model, None, optimizer, actions, torch.ones(len(batch)), temperature=1.0, beta=0)
        if step % 8 == 0:
            print(f"step {step} | -log π a token {learned['entropy']:.4f} | gradient {learned['grad_norm']:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--traces", required=True, choices=["perfect", "own"], help="whose flows are imitated")
    add("--steps", type=int, default=24, help="batches of flows, as train.py's --steps")
    add("--questions", type=int, default=12, help="questions a batch")
    add("--group-size", type=int, default=8, help="flows a question")
    add("--minibatches", type=int, default=4, help="optimiser steps for each batch")
    add("--max-turns", type=int, default=3, help="turns of a flow")
    add("--lr", type=float, default=3e-4, help="learning rate of AdamW")
    add("--seed", type=int, default=0, help="decides everything random")
    add("--out", type=Path, required=True, help="folder: best/ is the checkpoint, questions-0.jsonl the perfect planner's test flows")
    args = parser.parse_args()
    engine, fixed = load_engine(str(command_line.TOY)), load_engine(str(command_line.TOY))
    tools = solve.toolset.toolbox(command_line.TOY_TOOLS, command_line.TOY / "corpus.jsonl")
    test = toy.questions(toy.SIZES["test"], True, seed=1)
    valid = toy.questions(toy.SIZES["valid"], False, seed=2)
    made = toy.questions(toy.SIZES["train"], False, seed=3, avoid={question["question"] for question in valid})
    planner = Perfect(made + test, engine) if args.traces == "perfect" else engine
    flows = collect(planner, fixed, tools, read_questions(command_line.TOY / "train.jsonl"), args)
    print(f"{len(flows)} flows ended well")
    imitate(engine, flows, args)
    engine.save(args.out / "best")
    if args.traces == "perfect":  # how far the best plans get in this world
        torch.manual_seed(args.seed)
        metrics, flows = solve.evaluate(toy.ask(test), planner, fixed, tools, max_turns=args.max_turns)
        print(f"the perfect planner: {accuracy_line(metrics, len(flows))}")
        (args.out / "questions-0.jsonl").write_text("".join(json.dumps(flow.record()) + "\n" for flow in flows), encoding="utf-8")


if __name__ == "__main__":
    main()
