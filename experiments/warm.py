"""The warm start of a pretrained model: it learns the flow's formats, and nothing about which tool does what.

    python experiments/warm.py --model runs/SmolLM2-135M-Instruct --roles planner --out runs/warm
    python experiments/warm.py --model runs/SmolLM2-135M-Instruct --roles all --out runs/warm-all

A small instruct model writes no plan that can be parsed, so all its groups are flat and Flow-GRPO learns
nothing. Here it imitates a few hundred texts of the teacher, who knows every format, but picks its tools
blindly (wordings.py). The prompts go through the model's own chat template and tokenizer, and the loss is the
cross-entropy of the completions' tokens alone. The learning rate falls to 0 in a straight line, so that the
last few examples do not tip the balance between the tools. A check on held-out questions then says if nine
tenths of the sampled plans parse and all tools are about equally likely; with all roles, if nine tenths of
the calls parse, too, and eight tenths of the answers are right when the plans are perfect.

Questions come in many wordings. A planner that is warm-started in one wording copies it into every plan.

--roles planner    the other modules are the toy: sub-goals are in its words, "Find the capital of Norway"
--roles all        the model learns all modules, and sub-goals in many words; base_generator stays as it came
"""

import argparse
import json
import random
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from logbook import endings

endings.without_traceback(__name__)

import torch

import executor
import generator
import planner
import solve
import verifier
from cli.command_line import TOY, TOY_TOOLS
from experiments import wordings
from experiments.router import with_tool
from fast import logps
from flow_grpo import Action, log_probs, token_logps, update
from logbook.checkpoints import forget, last_checkpoint, load_state, restore, save
from models.loading import load_engine
from scale import sharding
from scale.passes import Passes
from tools import toolbox
from toy.questions import for_flow
from world.files import replace_file

PROMPTS = {"analysis": planner.ANALYSIS_PROMPT, "planner": planner.PROMPT, "executor": executor.PROMPT,
           "verifier": verifier.PROMPT, "generator": generator.PROMPT}
SHARES = {  # examples of each role in a step
    "planner": {"planner": 8},
    "all": {"planner": 4, "executor": 3, "verifier": 3, "generator": 2, "analysis": 1},
}
ENOUGH = {"plans": 0.9, "calls": 0.9, "right": 0.8}  # the numbers of check() that should be reached
BLIND = 0.07  # how far the share of each tool may be from a third


def role_of(prompt):
    return next((role for role, text in PROMPTS.items() if prompt.startswith(text[:40])), "base_generator")


def quietly(rollouts, turn, module):
    """solve.evaluate() shows no bar where a watch is given."""


def examples(teacher, fixed, made, tools):
    """{role: [(prompt, text)]}: what the teacher wrote in rollouts on these questions, with real tools.

    fixed: the other modules; the teacher again, if the model is to learn them, too."""
    solve.evaluate(for_flow(made), teacher, fixed, tools, watch=quietly)
    found = {role: [] for role in PROMPTS}
    for prompt, text in dict.fromkeys(teacher.examples):
        if (role := role_of(prompt)) in found:
            found[role].append((prompt, text))
    return found


def batch_of(found, shares, rng):
    """The examples of one step: [(prompt, [text])]. A plan comes three times, once with each tool: so it
    teaches that all are equally likely, whatever is planned."""
    batch = []
    for role, number in shares.items():
        for prompt, text in rng.sample(found[role], number):
            texts = [with_tool(text, tool) for tool in sorted(TOY_TOOLS)] if role == "planner" else [text]
            batch.append((prompt, texts))
    return batch


def actions_of(engine, batch):
    """The examples as Actions: in the loss are the tokens of each text and its stop token, and no others. The
    texts of an example are the turns of one rollout, and weigh as much as one text together."""
    encode, end = engine.tokenizer.encode, [engine.tokenizer.eos_token_id]
    return [Action(engine.encode(prompt), encode(text, add_special_tokens=False) + end, n, A=1.0)
            for n, (prompt, texts) in enumerate(batch) for text in texts]


def learn(engine, optimizer, batch, token_budget):
    """One step of cross-entropy, the mean over examples, texts and tokens: -log π a token before the step.

    At ρ = 1 the gradient of Flow-GRPO's objective with A = 1 is that of the log-likelihood."""
    how = logps.scoring(log_probs, engine.model)
    passes = Passes(engine.model, None, token_budget=token_budget, **how)
    report = update(passes, optimizer, actions_of(engine, batch), range(len(batch)), temperature=1.0)
    return report["entropy"]  # of on-policy tokens it estimates the entropy; here it is the mean -log π


@torch.no_grad()
def probabilities(engine, planned, temperature):
    """{tool: the probability with which a sampled plan names it}, the mean over these plans."""
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


def check(engine, teacher, made, tools, roles, fixed, max_new_tokens=80):
    """What the model can do on held-out questions: {name: number}.

    plans: share of its sampled plans that parse; then the probability of each tool in them; calls: share of
    calls that parse; right: accuracy of the other modules, given perfect plans; verdicts: share of theirs
    that are as the teacher's."""
    torch.manual_seed(0)
    settings = {"max_turns": 2, "max_new_tokens": max_new_tokens, "watch": quietly}
    batch = for_flow(made)
    planned = solve.roll_out(batch, engine, fixed, tools, **settings | {"max_turns": 1})
    parsed = [rollout for rollout in planned if not isinstance(rollout.plan, str)]
    numbers = {"plans": len(parsed) / len(planned)}
    numbers |= probabilities(engine, parsed, 0.7) if parsed else {}
    numbers["calls"] = sum(not isinstance(rollout.call, str) for rollout in parsed) / max(1, len(parsed))
    if roles == "all":
        metrics, rollouts = solve.evaluate(batch, teacher(made), fixed, tools, **settings)
        steps = [(step, len(one["steps"])) for rollout, one in zip(rollouts, made)
                 for step in rollout.memory.steps]
        enough = [step.turn >= needed and not step.error for step, needed in steps]
        stops = [(step.verdict == "STOP") == stop for (step, _), stop in zip(steps, enough)]
        perfect = sum(step.command != "" for step, _ in steps) / len(steps)
        numbers |= {"perfect plans' calls": perfect, "verdicts": sum(stops) / len(stops),
                    "right": metrics["accuracy"]}
    return numbers


def good_enough(numbers):
    """Does everything parse that has to, and are the tools still blind?"""
    enough = all(numbers[name] >= least for name, least in ENOUGH.items() if name in numbers)
    return enough and all(abs(numbers.get(tool, 1) - 1 / len(TOY_TOOLS)) <= BLIND for tool in TOY_TOOLS)


def line_of(numbers):
    return " | ".join(f"{name} {value:.3g}" for name, value in numbers.items())


def warm_start(args):
    """Learn for --steps steps, then check; after a kill, go on from the last checkpoint."""
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = last_checkpoint(args.out)
    engine = load_engine(str(checkpoint or args.model), args.device, args.dtype)
    state = load_state(checkpoint)
    sharding.shard(engine.model)  # in bfloat16 it trains float32 masters
    optimizer = sharding.adamw(engine.model, args.lr)
    if checkpoint:
        restore(checkpoint, optimizer)
    sharding.gather(engine.model)
    tools, teacher = toolbox(TOY_TOOLS, TOY / "corpus.jsonl"), wordings.teacher_for(args.roles)
    made = wordings.training(args.rollouts, args.seed)
    held_out = wordings.training(args.check, 1_000 + args.seed, [one["question"] for one in made])
    fixed = engine if args.roles == "all" else load_engine(str(TOY), args.device)
    blind = teacher(made, blind=random.Random(args.seed))
    found = examples(blind, blind if args.roles == "all" else fixed, made, tools)
    args.fixed, args.tools, args.corpus = str(TOY), TOY_TOOLS, str(TOY / "corpus.jsonl")
    for step in range(state["step"] + 1 if state else 1, args.steps + 1):
        start = time.process_time()
        batch = batch_of(found, SHARES[args.roles], random.Random(f"{args.seed} {step}"))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - (step - 1) / args.steps)
        with sharding.released(engine.model):
            loss = learn(engine, optimizer, batch, args.token_budget)
        seconds = time.process_time() - start
        print(f"step {step}/{args.steps} | loss {loss:.3f} | {seconds:.1f} CPU s", flush=True)
        if step % args.every == 0 and step < args.steps:
            save(args.out / f"step-{step}", engine, optimizer, step, 0, args)
            forget(args.out, 1)
    numbers = check(engine, teacher, held_out, tools, args.roles, fixed)
    print(line_of(numbers) + ("" if good_enough(numbers) else "\nNot as it should be: try more --steps"))
    replace_file(args.out / "formats.json", json.dumps(numbers, indent=1))
    save(args.out / "best", engine, None, args.steps, numbers["plans"], args)


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    add = parser.add_argument
    add("--model", required=True, help="folder or hub name of an instruct model")
    add("--roles", choices=["planner", "all"], default="all", help="the modules that learn their formats")
    add("--rollouts", type=int, default=400, help="rollouts of the blind teacher to learn from")
    add("--steps", type=int, default=90, help="steps")
    add("--every", type=int, default=10, help="steps between two checkpoints")
    add("--check", type=int, default=24, help="held-out questions of a check")
    add("--lr", type=float, default=1.5e-4, help="learning rate of AdamW at the first step")
    add("--token-budget", type=int, default=4096, help="tokens of a micro-batch: bounds memory")
    add("--device", help="cuda, mps or cpu; None: the first there is")
    add("--dtype", help="float32, bfloat16, ...; None: bfloat16 on cuda, float32 elsewhere")
    add("--seed", type=int, default=0, help="decides everything random")
    add("--out", type=Path, required=True, help="the run's folder: best/ is the checkpoint")
    args = parser.parse_args()
    args.executor = args.verifier = args.generator = None
    warm_start(args)


if __name__ == "__main__":
    main()
