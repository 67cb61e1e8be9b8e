"""The warm start of a pretrained planner: it learns the format of a plan, and not which tool does what.

    python experiments/warm.py --model runs/SmolLM2-135M-Instruct --out runs/warm

A small instruct model writes no plan that can be parsed, so all its groups are flat and Flow-GRPO learns
nothing. Here it imitates a few hundred plans of the toy's teacher (toy/teacher.py), which picks its tools
blindly; the toy plays all other modules. Each plan is shown with each tool, so the model learns to ignore the
sub-goal when it names the tool. The prompts go through the model's own chat template and tokenizer, and the
loss is the cross-entropy of the plans' tokens alone. The learning rate falls to 0 in a straight line, so that
the last few examples do not tip the balance between the tools. At the end a check on other questions says if
nine tenths of the sampled plans parse and all tools are about equally likely.

Questions come in many wordings (wordings.py). A planner that is warm-started in one wording copies it into
every plan.
"""

import argparse
import random
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from logbook import endings

endings.without_traceback(__name__)

import torch

import planner
import solve
from cli.command_line import TOY, TOY_TOOLS
from experiments import wordings
from fast import logps
from flow_grpo import Action, log_probs, token_logps, update
from models.loading import load_engine
from scale import sharding
from scale.passes import Passes
from tools import toolbox
from toy.questions import for_flow
from toy.teacher import Teacher

ROLLOUTS, PLANS, CHECKED = 400, 8, 24  # of the teacher; plans of a step; questions of the check
ENOUGH = 0.9  # share of the sampled plans that should parse
BLIND = 0.07  # how far the share of each tool may be from a third


def quietly(rollouts, turn, module):
    """solve.evaluate() shows no bar where a watch is given."""


def examples(teacher, fixed, made, tools):
    """[(prompt, plan)]: what the teacher read and wrote in rollouts on these questions, with real tools."""
    solve.evaluate(for_flow(made), teacher, fixed, tools, watch=quietly)
    return list(dict.fromkeys(teacher.examples))


def actions_of(engine, plans):
    """The plans as Actions: in the loss are the tokens of each text and its stop token, and no others.

    A plan comes three times, once with each tool: so it teaches that all are equally likely, whatever is
    planned. The three are the turns of one rollout, and weigh as much as one text together."""
    encode, end = engine.tokenizer.encode, [engine.tokenizer.eos_token_id]
    texts = [(n, prompt, f"{plan.rpartition('Tool: ')[0]}Tool: {tool}")
             for n, (prompt, plan) in enumerate(plans) for tool in sorted(TOY_TOOLS)]
    return [Action(engine.encode(prompt), encode(text, add_special_tokens=False) + end, n, A=1.0)
            for n, prompt, text in texts]


def learn(engine, optimizer, actions, token_budget=4096):
    """One step of cross-entropy, the mean over examples, texts and tokens: -log π a token before the step.

    At ρ = 1 the gradient of Flow-GRPO's objective with A = 1 is that of the log-likelihood."""
    passes = Passes(engine.model, None, token_budget=token_budget, **logps.scoring(log_probs, engine.model))
    rollouts = range(1 + max(action.rollout for action in actions))
    report = update(passes, optimizer, actions, rollouts, temperature=1.0)
    return report["entropy"]  # of on-policy tokens it estimates the entropy; here it is the mean -log π


@torch.no_grad()
def probabilities(engine, planned, temperature=0.7):
    """{tool: the probability with which a sampled plan names it}, the mean over these rollouts."""
    encode = partial(engine.tokenizer.encode, add_special_tokens=False)
    means = dict.fromkeys(sorted(TOY_TOOLS), 0.0)
    for rollout in planned:
        before = engine.decode(rollout.actions[0].ids).rpartition("Tool:")[0] + "Tool:"
        prompt_ids = rollout.actions[0].prompt_ids + encode(before)
        logps = [token_logps(engine.model, [Action(prompt_ids, encode(f" {tool}"), 0)], temperature).sum()
                 for tool in means]
        for tool, share in zip(means, torch.stack(logps).softmax(0).tolist()):
            means[tool] += share / len(planned)
    return means


def check(engine, made, tools, fixed):
    """{"plans": share of the sampled plans that parse, tool: its probability in those}"""
    torch.manual_seed(0)
    settings = {"max_turns": 1, "max_new_tokens": 80, "watch": quietly}
    planned = solve.roll_out(for_flow(made), engine, fixed, tools, **settings)
    parsed = [rollout for rollout in planned if isinstance(rollout.plan, planner.Plan)]
    return {"plans": len(parsed) / len(planned)} | (probabilities(engine, parsed) if parsed else {})


def good_enough(numbers):
    """Do the plans parse, and are the tools still blind?"""
    blind = all(abs(numbers.get(tool, 1) - 1 / len(TOY_TOOLS)) <= BLIND for tool in TOY_TOOLS)
    return numbers["plans"] >= ENOUGH and blind


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    add = parser.add_argument
    add("--model", required=True, help="folder or hub name of an instruct model")
    add("--steps", type=int, default=40, help="steps: as few as suffice")
    add("--lr", type=float, default=1.5e-4, help="learning rate of AdamW at the first step")
    add("--device", help="cuda, mps or cpu; None: the first there is")
    add("--dtype", help="float32, bfloat16, ...; None: bfloat16 on cuda, float32 elsewhere")
    add("--seed", type=int, default=0, help="decides everything random")
    add("--out", type=Path, required=True, help="the run's folder: best/ is the checkpoint")
    args = parser.parse_args()
    engine, toy = load_engine(args.model, args.device, args.dtype), load_engine(str(TOY), args.device)
    sharding.shard(engine.model)  # in bfloat16 it trains float32 masters
    optimizer, tools = sharding.adamw(engine.model, args.lr), toolbox(TOY_TOOLS, TOY / "corpus.jsonl")
    made = wordings.training(ROLLOUTS, args.seed)
    found = examples(Teacher(made, blind=random.Random(args.seed)), toy, made, tools)
    for step in range(1, args.steps + 1):
        plans = random.Random(f"{args.seed} {step}").sample(found, PLANS)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - (step - 1) / args.steps)
        print(f"step {step}/{args.steps} | loss {learn(engine, optimizer, actions_of(engine, plans)):.3f}",
              flush=True)
    sharding.gather(engine.model)
    others = wordings.training(CHECKED, 1_000 + args.seed, [one["question"] for one in made])
    numbers = check(engine, others, tools, toy)
    print(" | ".join(f"{name} {value:.3g}" for name, value in numbers.items()))
    if not good_enough(numbers):
        print("Not as it should be: try more --steps")
    engine.save(args.out / "best")


if __name__ == "__main__":
    main()
