"""train.py --rehearse: what kills a long run, met in minutes.

A night ends at its largest batch, at its first checkpoint or when it is resumed. train() takes a
real step of two questions and saves it. largest() makes the largest batches that a step can bring,
of random tokens: completions up to the limit after the longest prompts, and an update of such
plans. whole_run() says what a run would cost, and a new process resumes for another step.
"""

import os
import random
import sys
import time
from functools import partial
from math import ceil

import torch

from models.local import Engine, sample
from scale import sharded

LONGEST = 4_096  # tokens of a prompt: question, analysis, tools and a full memory take some 3,500
DOLLARS = 2.5  # an hour, of an H100


def largest(args, policy, frozen, learn, Action):
    """Sample, and update, at full size: lines with the seconds and the peak memory of each.

    learn: flow_grpo.update(), with everything but the actions. Action: flow_grpo.Action."""
    limit = policy.new_tokens(args.max_new_tokens)
    length = max(1, min(LONGEST, policy.context() - limit))
    lines = []
    for name, engine in (("planner", policy), ("frozen", frozen)):
        if isinstance(engine, Engine):
            rows = min(rollouts_at_once(args), engine.rows(length + limit))
            prompts = random_prompts(rows, length, policy)
            settings = [], args.temperature, limit, engine.distribution, engine.prefill
            with engine.sampling():
                seconds, peak = measured(partial(sample, engine.model, prompts, *settings))
            each = f"{1000 * seconds / limit:.0f} ms a token of the batch, prefill included"
            lines.append(f"largest {name}: {rows} x ({length} + {limit}) tokens: {each}{peak}")
    number = max(2, 2 * args.token_budget // (length + limit)) * sharded.WORLD
    plans = random_prompts(number, length + limit, policy)
    actions = [Action(ids[:length], ids[length:], n, A=(-1.0) ** n) for n, ids in enumerate(plans)]
    settings = dict(temperature=args.temperature, token_budget=args.token_budget)
    seconds, peak = measured(lambda: learn(actions, range(number), **settings))
    what = f"{number} x ({length} + {limit}) tokens"
    return [*lines, f"largest update: {what}: {seconds:.1f} s{peak}"]


def rollouts_at_once(args):
    """The rollouts of a step of the whole run, on each card."""
    return ceil(args.rehearse["questions"] * args.group_size / sharded.WORLD)


def random_prompts(number, length, policy):
    """Token lists of this length. All begin alike, like prompts with the same instructions."""
    dice, ids = random.Random(0), sorted({*policy.tokenizer.get_vocab().values()})
    shared = dice.choices(ids, k=length // 2)
    return [shared + dice.choices(ids, k=length - length // 2) for _ in range(number)]


def measured(work):
    """(the seconds that work() takes, the peak of the card's memory as text)"""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start, peak = time.perf_counter(), ""
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        peak = f", peak {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB"
    return time.perf_counter() - start, peak


def whole_run(args, policy, rollout_seconds, update_seconds):
    """What the whole run would take, from a step of two questions. A batch of rollouts takes as
    long whatever its size, up to what fits; an update grows with the questions."""
    steps, questions = args.rehearse["steps"], args.rehearse["questions"]
    limit = policy.new_tokens(args.max_new_tokens)
    fits = policy.rows(min(LONGEST, policy.context() - limit) + limit)
    batches = ceil(rollouts_at_once(args) / fits)
    seconds = batches * rollout_seconds + questions / args.questions * update_seconds
    hours = steps * seconds / 3600
    return (
        f"the whole run: {steps} steps of {questions} questions, about {seconds:.0f} s each: "
        f"{hours:.1f} hours, {hours * DOLLARS:.0f} dollars at {DOLLARS:.2f} an hour"
    )


def second_step(words):
    """This process becomes a second step, resumed with these words."""
    os.execv(sys.executable, [sys.executable, sys.argv[0], *words, "--steps", "2"])
