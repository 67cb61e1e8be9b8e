"""The warm start of a pretrained model: it learns the flow's formats, and nothing about which tool does what.

    python experiments/warm.py --model runs/SmolLM2-135M-Instruct --roles planner --out runs/warm
    python experiments/warm.py --model runs/SmolLM2-135M-Instruct --roles all --out runs/warm-all

A small instruct model writes no plan that can be parsed, so all its groups are flat and Flow-GRPO learns
nothing. Here it imitates a few hundred texts of the teacher, who knows every format, but picks its tools
blindly (wordings.py). The prompts go through the model's own chat template and tokenizer, and the loss is the
cross-entropy of the completions' tokens alone. It ends at the first check in which nine tenths of the plans
that it samples for held-out questions parse, and, with all roles, nine tenths of its calls, too.

--roles planner    the other modules are the toy, which knows one grammar: so the questions are the toy's
--roles all        the model learns all modules, in many wordings; base_generator stays as it came
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import executor
import generator
import planner
import solve
import verifier
from experiments import wordings
from experiments.router import with_tool
from flow_grpo import Action, update
from models.loading import load_engine
from scale.checkpoints import forget, last_checkpoint, load_state, save
from scale.command_line import TOY, TOY_TOOLS
from scale.files import replace_file
from scale.masters import MasterAdamW
from tools import toolbox
from toy.questions import for_flow
from toy.teacher import Teacher

PROMPTS = {"analysis": planner.ANALYSIS_PROMPT, "planner": planner.PROMPT, "executor": executor.PROMPT,
           "verifier": verifier.PROMPT, "generator": generator.PROMPT}
SHARES = {  # examples of each role in a step
    "planner": {"planner": 9},
    "all": {"planner": 3, "executor": 2, "verifier": 2, "generator": 1, "analysis": 1},
}
ENOUGH = 0.9  # of the plans, and of the calls, that have to parse


def questions_for(roles, n, seed, avoid=()):
    """The questions of the warm start, with their steps. None names what is held out."""
    if roles == "all":
        return wordings.training(n, seed, avoid)
    made = [one for one in wordings.of_the_toy() if one["question"] not in avoid]
    return random.Random(f"warm {seed}").sample(made, n)


def teacher_for(roles):
    """The toy's executor only reads the toy's sub-goals: there the toy's own teacher teaches."""
    return wordings.Linguist if roles == "all" else Teacher


def role_of(prompt):
    return next((role for role, text in PROMPTS.items() if prompt.startswith(text[:40])), "base_generator")


def quietly(flows, turn, module):
    """solve.evaluate() shows no bar where a watch is given."""


def examples(teacher, made, tools):
    """{role: [(prompt, text)]} of the teacher's flows on these questions, with real tools."""
    solve.evaluate(for_flow(made), teacher, teacher, tools, watch=quietly)
    found = {role: [] for role in PROMPTS}
    for prompt, text in dict.fromkeys(teacher.examples):
        if (role := role_of(prompt)) in found:
            found[role].append((prompt, text))
    return found


def batch_of(found, shares, rng):
    """The examples of one step: [(prompt, text)]. The plans get the tools in turn, whatever they plan, so
    that no step teaches one tool more than another."""
    batch = []
    for role, number in shares.items():
        chosen = rng.sample(found[role], number)
        if role == "planner":
            tools = [sorted(TOY_TOOLS)[n % len(TOY_TOOLS)] for n in range(number)]
            rng.shuffle(tools)
            chosen = [(prompt, with_tool(text, tool)) for (prompt, text), tool in zip(chosen, tools)]
        batch += chosen
    return batch


def actions_of(engine, batch):
    """The examples as Actions: in the loss are the tokens of each text and its stop token, and no others."""
    encode, end = engine.tokenizer.encode, [engine.tokenizer.eos_token_id]
    return [Action(engine.encode(prompt), encode(text, add_special_tokens=False) + end, n)
            for n, (prompt, text) in enumerate(batch)]


def learn(engine, optimizer, batch, token_budget):
    """One step of cross-entropy, the mean over examples of the mean over tokens: its value before the step.

    At ρ = 1 the gradient of Flow-GRPO's objective with A = 1 is that of the log-likelihood."""
    actions = actions_of(engine, batch)
    ones = torch.ones(len(actions))
    report = update(engine.model, None, optimizer, actions, ones, temperature=1.0, beta=0,
                    token_budget=token_budget)
    return report["entropy"]  # of on-policy tokens it estimates the entropy; here it is the mean -log π


def check(engine, teacher, made, tools, roles, fixed, max_new_tokens=80):
    """What the model can do on held-out questions: {name: number}.

    plans: share of its sampled plans that parse; the share of each tool in them; calls: share of calls that
    parse; right: accuracy of the modules that are not trained, given perfect plans; verdicts: share of theirs
    that are as the teacher's."""
    torch.manual_seed(0)
    settings = {"max_turns": 2, "max_new_tokens": max_new_tokens, "watch": quietly}
    batch = for_flow(made)
    planned = solve.rollout(batch, engine, fixed, tools, **settings | {"max_turns": 1})
    plans = [flow.plan for flow in planned if flow.actions]
    chosen = Counter(plan.tool for plan in plans if not isinstance(plan, str))
    numbers = {"plans": sum(chosen.values()) / len(plans)}
    numbers |= {tool: chosen[tool] / max(1, sum(chosen.values())) for tool in sorted(TOY_TOOLS)}
    called = [flow.call for flow in planned if not isinstance(flow.plan, str)]
    numbers["calls"] = sum(not isinstance(call, str) for call in called) / max(1, len(called))
    if roles == "all":
        metrics, flows = solve.evaluate(batch, teacher(made), fixed, tools, **settings)
        steps = [(step, len(one["steps"])) for flow, one in zip(flows, made) for step in flow.memory.steps]
        enough = [step.turn >= needed and not step.error for step, needed in steps]
        stops = [(step.verdict == "STOP") == stop for (step, _), stop in zip(steps, enough)]
        perfect = sum(step.command != "" for step, _ in steps) / len(steps)
        numbers |= {"perfect plans' calls": perfect, "verdicts": sum(stops) / len(stops),
                    "right": metrics["accuracy"]}
    return numbers


def good_enough(numbers, roles):
    return numbers["plans"] >= ENOUGH and (roles == "planner" or numbers["calls"] >= ENOUGH)


def line_of(numbers):
    return " | ".join(f"{name} {value:.3g}" for name, value in numbers.items())


def warm_start(args):
    """Learn until the formats are known; after a kill, go on from the last check."""
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = last_checkpoint(args.out)
    engine = load_engine(str(checkpoint or args.model), args.device, args.dtype)
    optimizer, state = MasterAdamW(engine.model.parameters(), lr=args.lr), load_state(checkpoint)
    if state:
        optimizer.load_state_dict(state["optimizer"])
    tools, teacher = toolbox(TOY_TOOLS, TOY / "corpus.jsonl"), teacher_for(args.roles)
    made = questions_for(args.roles, args.flows, args.seed)
    held_out = questions_for(args.roles, args.check, 1_000 + args.seed, [one["question"] for one in made])
    found = examples(teacher(made, blind=random.Random(args.seed)), made, tools)
    fixed = engine if args.roles == "all" else load_engine(str(TOY), args.device)
    args.fixed, args.tools, args.corpus = str(TOY), TOY_TOOLS, str(TOY / "corpus.jsonl")
    file, step = args.out / "formats.json", state["step"] if state else 0
    numbers = json.loads(file.read_text()) if file.exists() else {}
    numbers = numbers if numbers.get("step") == step else {}  # a kill came between check and checkpoint
    while step < args.steps and not (numbers and good_enough(numbers, args.roles)):
        step, start = step + 1, time.process_time()
        batch = batch_of(found, SHARES[args.roles], random.Random(f"{args.seed} {step}"))
        loss = learn(engine, optimizer, batch, args.token_budget)
        seconds = time.process_time() - start
        print(f"step {step}/{args.steps} | loss {loss:.3f} | {seconds:.1f} CPU s", flush=True)
        if step % args.every == 0 or step == args.steps:
            numbers = {"step": step} | check(engine, teacher, held_out, tools, args.roles, fixed)
            print(line_of(numbers), flush=True)
            replace_file(file, json.dumps(numbers, indent=1))
            save(args.out / f"step-{step}", engine, optimizer, step, numbers["plans"], args)
            forget(args.out, 1)
    save(args.out / "best", engine, None, step, numbers["plans"], args)


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    add = parser.add_argument
    add("--model", required=True, help="folder or hub name of an instruct model")
    add("--roles", choices=["planner", "all"], default="all", help="the modules that learn their formats")
    add("--flows", type=int, default=120, help="flows of the blind teacher to learn from")
    add("--steps", type=int, default=60, help="steps at most")
    add("--every", type=int, default=10, help="steps between two checks")
    add("--check", type=int, default=24, help="held-out questions of a check")
    add("--lr", type=float, default=5e-5, help="learning rate of AdamW")
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
