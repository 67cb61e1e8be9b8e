"""The other design, for the paper's Figure 8b: one policy thinks, calls tools and answers in one context.

    python experiments/monolith.py --out runs/monolith       warm-start one from toy/

roll_out() has the signature of solve.roll_out(), so one import makes train.py train a monolith, such as
ToRL's: same questions, tools, rewards and update. Each turn the policy reads everything so far and writes a
step with a tool call, or the answer. All that it writes is its action and is trained. There is no verifier,
executor or generator; `fixed` plays base_generator only.
"""

import argparse
import random
import sys
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
from cli.command_line import TOY, TOY_TOOLS
from memory import Memory, Step
from models.loading import load_engine
from solve import Rollout, call_engine
from tools import run_calls, toolbox
from toy.make import warm_start
from toy.pieces import NUMBERS
from toy.questions import for_flow, questions
from toy.teacher import Teacher

PROMPT = "Tools:\n{tools}\nQuestion: {question}\n\n{so_far}"
CALL = "\nCommand:"


def prompt(rollout, tools, so_far):
    return PROMPT.format(tools=planner.describe_all(tools), question=rollout.question.question, so_far=so_far)


def parse(text, tools):
    """A step as the policy wrote it: (thought, tool, call); the call is the parse error if it has none."""
    thought, _, command = text.partition(CALL)
    tool = command.partition("(")[0].strip()
    if tool not in tools:
        return thought, "", f"no line '{CALL.strip()} ...' with a call of one of: {', '.join(tools)}."
    return thought, tool, executor.parse(command, tool, tools[tool])


def roll_out(batch, policy, fixed, tools, max_turns=3, temperature=0.7, max_new_tokens=None, watch=None):
    """solve.roll_out() for a monolith: up to max_turns steps, then the answer. Returns [Rollout]."""
    rollouts = [Rollout(question, Memory(question.question)) for question in batch]
    contexts = {id(rollout): "" for rollout in rollouts}
    sample = partial(policy, temperature=temperature, max_new_tokens=max_new_tokens)
    greedy = partial(fixed["base_generator"], temperature=0.0, max_new_tokens=max_new_tokens)
    to_read = lambda rollout, budget: prompt(rollout, tools, contexts[id(rollout)])
    for turn in range(1, max_turns + 2):
        if watch:
            watch(rollouts, turn, "policy")
        live = [rollout for rollout in rollouts if not rollout.stopped and not rollout.failed]
        acting = []
        for rollout, completion in call_engine(sample, live, turn, "policy", to_read):
            rollout.actions.append(completion)
            if "<answer>" in completion.text or turn > max_turns:
                rollout.answer, rollout.stopped = generator.parse(completion.text), True
            else:
                acting.append((rollout, completion.text, *parse(completion.text, tools)))
        results = run_calls([call for *_, call in acting], tools, greedy)
        for (rollout, text, thought, tool, call), result in zip(acting, results):
            step = Step(turn, tool, thought, str(call), result.text, result.error, "", result.seconds)
            rollout.memory.steps.append(step)
            contexts[id(rollout)] += f"{text}\nResult: {result.text}\n\n"
    return rollouts


def examples(rollouts, tools):
    """[(prompt, text)]: what a monolith would read and write in the teacher's rollouts."""
    for rollout in rollouts:
        texts, context = {(word["turn"], word["module"]): word["text"] for word in rollout.outputs}, ""
        for step in rollout.memory.steps:
            thought = texts[step.turn, "planner"].partition("\nTool:")[0]  # the call names the tool
            text = f"{thought}{CALL} {texts[step.turn, 'executor']}"
            yield prompt(rollout, tools, context), text
            context += f"{text}\nResult: {step.result}\n\n"
        answer = next(text for (_, module), text in texts.items() if module == "generator")
        yield prompt(rollout, tools, context), answer


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    parser.add_argument("--rollouts", type=int, default=4000,
                        help="rollouts of the blind teacher to learn from")
    parser.add_argument("--steps", type=int, default=800, help="steps of 64 examples")
    parser.add_argument("--seed", type=int, default=0, help="decides everything random")
    parser.add_argument("--out", required=True, help="folder of the checkpoint")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng, engine = random.Random(args.seed), load_engine(str(TOY))
    tools = toolbox(TOY_TOOLS, TOY / "corpus.jsonl")
    made = questions(args.rollouts, False, seed=args.seed + 10, noise=True)
    teacher = Teacher(made, blind=random.Random(args.seed))
    rollouts = solve.evaluate(for_flow(made), teacher, teacher, tools)[1]
    encode = lambda text: engine.tokenizer.encode(text, add_special_tokens=False)
    end = [engine.tokenizer.eos_token_id]
    pairs = [(engine.encode(prompt), encode(text) + end) for prompt, text in examples(rollouts, tools)]
    numbers = [encode(number)[0] for number in NUMBERS]
    warm_start(engine, {"rollouts": (pairs, 7)}, numbers, args.steps, 0, rng)
    engine.save(args.out)


if __name__ == "__main__":
    main()
