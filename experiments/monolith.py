"""The other design, for the paper's Figure 8b: one policy thinks, calls tools and answers in one context.

    python experiments/monolith.py --out runs/monolith       warm-start one from toy/hops/

roll_out() has the signature of solve.roll_out(), so one import (edits/monolith.diff) makes train.py train a
monolith, such as ToRL's: same questions, tools, rewards and update. Each turn the policy reads everything
that it has written so far, with the results, and writes a step with a tool call, or the answer. All that it
writes is its action and is trained. There is no verifier, executor or generator; `fixed` plays base_generator
only.

Its warm start is like that of the second toy (toy/hops/make.py): plans drawn at random, in worlds drawn anew.
"""

import argparse
import random
import re
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from logbook import endings

endings.without_traceback(__name__)

import torch

import executor
import generator
import planner
import verifier
from memory import Memory, Step
from models.completion import Completion
from models.loading import load_engine
from solve import Rollout
from tools import run_calls
from toy.hops.make import HOPS, adds_two, copies_from_memory, worlds
from toy.hops.questions import KINDS, MAX_TURNS, NAMES, URLS
from toy.make import warm_start
from toy.pieces import NUMBERS
from world.text import indented

PROMPT = "Tools:\n{tools}\nQuestion: {question}\n\nMemory:\n{so_far}"
CALL = "\nCommand:"


def prompt(question, tools, so_far):
    return PROMPT.format(tools=planner.describe_all(tools), question=indented(question), so_far=so_far)


def parse(text, tools):
    """A step as the policy wrote it: (thought, tool, call); the call is an Unparsed if it has none."""
    thought, _, command = text.partition(CALL)
    tool = command.partition("(")[0].strip()
    if tool not in tools:
        reason = f"no line '{CALL.strip()} ...' with a call of one of: {', '.join(tools)}."
        return thought, "", planner.Unparsed(reason)
    return thought, tool, executor.parse(command, tool, tools[tool])


def roll_out(questions, policy, fixed, tools, max_turns=3, temperature=0.7, max_new_tokens=None,
             watch=None):
    """solve.roll_out() for a monolith: up to max_turns steps, then the answer. Returns [Rollout]."""
    rollouts = [Rollout(question, Memory(question.question)) for question in questions]
    contexts = {id(rollout): "" for rollout in rollouts}
    base_generator = fixed.get("base_generator", fixed["default"])
    greedy = partial(base_generator, temperature=0.0, max_new_tokens=max_new_tokens)
    for turn in range(1, max_turns + 2):
        if watch:
            watch(rollouts, turn, "policy")
        live = [rollout for rollout in rollouts if not rollout.stopped and not rollout.failed]
        prompts = [prompt(rollout.question.question, tools, contexts[id(rollout)]) for rollout in live]
        start = time.perf_counter()
        completions = policy(prompts, temperature=temperature, max_new_tokens=max_new_tokens) if live else []
        seconds = time.perf_counter() - start
        acting = []
        for rollout, completion in zip(live, completions):
            rollout.add_output(turn, "policy", completion.text, completion.tokens, seconds)
            if completion.error:
                rollout.failed = f"policy: {completion.error}"
                continue
            rollout.plans.append(completion)
            if "<answer>" in completion.text or turn > max_turns:
                rollout.answer, rollout.stopped = generator.parse(completion.text), True
            else:
                acting.append((rollout, completion.text, *parse(completion.text, tools)))
        results = run_calls([call for *_, call in acting], tools, greedy)
        for (rollout, text, thought, tool, call), result in zip(acting, results):
            step = Step(turn, tool, thought, str(call), result.text, result.error, "", result.seconds)
            rollout.memory.steps.append(step)
            contexts[id(rollout)] += f"{text}\nResult: {indented(result.text)}\n\n"
    return rollouts


class Writer:
    """The second toy's teacher as a monolith: an engine that writes the plan and its call, or the answer.

    It shows the context to the teacher as the memory of the flow, in the prompts of the flow's modules, and
    puts what they write into one text. `examples` collects [(prompt, text)]: with a blind teacher, the plans
    are those that it draws at random."""

    def __init__(self, teacher, tools):
        self.teacher, self.tools, self.examples = teacher, tools, []

    def __call__(self, prompts, **settings):
        return [Completion(self.answer(prompt), [], []) for prompt in prompts]

    def answer(self, prompt):
        question, so_far = re.search(r"\nQuestion: (.*)\n\nMemory:\n((?s:.*))", prompt).groups()
        memory = so_far.replace("Sub-goal: ", "Tool: any\nSub-goal: ")  # the flow's steps have such a line
        state = question, self.tools, "", memory
        verdict, _ = self.teacher.answer(verifier.prompt(*state), question)
        if so_far.count("\nResult: ") == MAX_TURNS or verifier.parse(verdict):
            texts = self.teacher.answer(generator.prompt(question, "", memory), question)
        else:
            plans = self.teacher.answer(planner.prompt(*state), question)
            texts = [self.with_call(question, plan) for plan in plans]
        done, learnt = texts  # they differ where a perfect plan is carried out and a random one learnt
        self.examples.append((prompt, learnt))
        return done

    def with_call(self, question, text):
        """A plan, and in the place of its last line, the tool, the call that the executor makes of it."""
        plan, thought = planner.parse(text, self.tools), text.rpartition("\n")[0]
        tool = self.tools[plan.tool]
        prompt = executor.prompt(question, plan.context, plan.sub_goal, plan.tool, tool)
        call, _ = self.teacher.answer(prompt, question)
        return f"{thought}{CALL} {executor.parse(call, plan.tool, tool)}"


def examples(rollouts, seed, kinds=KINDS, guided=(0.3, 0.9)):
    """[(prompt, text)] that a monolith would read and write in the blind teacher's rollouts."""
    found = []
    for tools, questions, teacher in worlds(rollouts, seed, kinds, guided):
        writer = Writer(teacher, tools)
        roll_out(questions, writer, {"default": teacher}, tools, MAX_TURNS)
        found += writer.examples
    return found


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    parser.add_argument("--rollouts", type=int, default=12800, help="rollouts of the teacher to learn from")
    parser.add_argument("--steps", type=int, default=2000, help="steps of 64 examples")
    parser.add_argument("--seed", type=int, default=0, help="decides everything random")
    parser.add_argument("--out", required=True, help="folder of the checkpoint")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    engine = load_engine(str(HOPS))
    encode = partial(engine.tokenizer.encode, add_special_tokens=False)
    end = [engine.tokenizer.eos_token_id]
    encoded = lambda pairs: [(engine.chat.encode(prompt), encode(text) + end) for prompt, text in pairs]
    found = examples(args.rollouts, args.seed)
    hard = [pair for pair in found if copies_from_memory(*pair)]
    sums = [pair for pair in examples(args.rollouts, args.seed + 1, ["sum"], [1.0]) if adds_two(*pair)]
    sources = {"rollouts": (encoded(found), 4), "plans": (encoded(hard), 2), "sums": (encoded(sums), 1)}
    words = [encode(text)[0] for text in (*NUMBERS, *(f" {name}" for name in NAMES), *URLS)]
    warm_start(engine, sources, words, args.steps, 0, random.Random(args.seed))
    engine.save(args.out)


if __name__ == "__main__":
    main()
