"""The other design: one policy that thinks, calls tools and answers in one growing context (ToRL and its kin), for the paper's Figure 8b.

    python plots/monolith.py --out runs/monolith       warm-start one from toy/, on what the blind teacher says in its flows

rollout() has the signature of flow.rollout(), so one import turns train.py and solve.py into a monolith's: same questions, same tools,
same marks, same update. Each turn the policy reads everything so far and writes a step, tool call included, or the answer. All that it
writes is its action and is trained; nobody checks, nobody else writes calls or answers. `fixed` plays base_generator only.
"""

import argparse
import random
import sys
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import executor
import generator
import planner
import solve
from memory import Memory, Step
from models.loading import load_engine
from scale import command_line
from solve import Flow, complete
from tools import run_calls
from toy import make as toy

PROMPT = "Tools:\n{tools}\nQuestion: {question}\n\n{so_far}"
CALL = "\nCommand:"


def prompt(flow, tools, so_far):
    return PROMPT.format(tools=planner.describe_all(tools), question=flow.question.question, so_far=so_far)


def parse(text, tools):
    """What the policy wrote, if it is a step: (thought, tool, call), the call a sentence that says why nobody can read it if so."""
    thought, _, command = text.partition(CALL)
    tool = command.partition("(")[0].strip()
    if tool not in tools:
        return thought, "", f"no line '{CALL.strip()} ...' with a call of one of: {', '.join(tools)}."
    return thought, tool, executor.parse(command, tool, tools[tool])


def rollout(questions, policy, fixed, tools, max_turns=3, temperature=0.7, max_new_tokens=None, watch=None):
    """flow.rollout() for a monolith: up to max_turns steps, then it must answer. Returns [Flow]; Flow.actions holds all it wrote."""
    flows = [Flow(question, Memory(question.question)) for question in questions]
    so_far = {id(flow): "" for flow in flows}
    sampled = partial(policy, temperature=temperature, max_new_tokens=max_new_tokens)
    greedy = partial(fixed["base_generator"], temperature=0.0, max_new_tokens=max_new_tokens)
    for turn in range(1, max_turns + 2):
        if watch:
            watch(flows, turn, "policy")
        live = [flow for flow in flows if not flow.stopped and not flow.failed]
        acting = []
        for flow, said in complete(sampled, live, turn, "policy", lambda f, budget: prompt(f, tools, so_far[id(f)])):
            flow.actions.append(said)
            if "<answer>" in said.text or turn > max_turns:
                flow.answer, flow.stopped = generator.parse(said.text), True
            else:
                acting.append((flow, said.text, *parse(said.text, tools)))
        results = run_calls([call for *_, call in acting], tools, greedy)
        for (flow, text, thought, tool, call), result in zip(acting, results):
            step = Step(turn, tool, thought, str(call), result.text, result.error, "", result.seconds)
            flow.memory.steps.append(step)
            so_far[id(flow)] += f"{text}\nResult: {result.text}\n\n"
    return flows


def examples(flows, tools):
    """What a monolith would have read and said in the teacher's flows: [(prompt, text)]."""
    for flow in flows:
        said, so_far = {(word["turn"], word["module"]): word["text"] for word in flow.outputs}, ""
        for step in flow.memory.steps:
            thought = said[step.turn, "planner"].partition("\nTool:")[0]  # the call says which tool it is
            text = f"{thought}{CALL} {said[step.turn, 'executor']}"
            yield prompt(flow, tools, so_far), text
            so_far += f"{text}\nResult: {step.result}\n\n"
        yield prompt(flow, tools, so_far), next(text for (_, module), text in said.items() if module == "generator")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--flows", type=int, default=4000, help="flows of the blind teacher to learn from")
    parser.add_argument("--steps", type=int, default=800, help="steps of 64 examples")
    parser.add_argument("--seed", type=int, default=0, help="decides everything random")
    parser.add_argument("--out", required=True, help="folder of the checkpoint")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng, engine = random.Random(args.seed), load_engine(str(command_line.TOY))
    tools = solve.toolset.toolbox(command_line.TOY_TOOLS, command_line.TOY / "corpus.jsonl")
    made = toy.questions(args.flows, False, seed=args.seed + 10, noise=True)
    teacher = toy.Teacher(made, blind=random.Random(args.seed))
    flows = solve.evaluate(toy.ask(made), teacher, teacher, tools)[1]
    encode = lambda text: engine.tokenizer.encode(text, add_special_tokens=False)
    pairs = [(engine.encode(asked), encode(text) + [engine.tokenizer.eos_token_id]) for asked, text in examples(flows, tools)]
    numbers = [encode(f" {n}")[0] for n in range(1000)]
    toy.warm_start(engine, {"flows": (pairs, 7)}, numbers, args.steps, 0, rng)
    engine.save(args.out)


if __name__ == "__main__":
    main()
