"""train.py trains the planner: questions -> rollouts -> rewards -> advantages -> update -> log -> save.

    python train.py                                     the toy, on a laptop: learns which tool does what
    python train.py --model Qwen/Qwen2.5-7B-Instruct    chooses data, judge and GPU memory settings
    python train.py --model Qwen/Qwen2.5-7B-Instruct --data my_questions.jsonl --corpus my_passages.jsonl
    python train.py --resume runs/toy-seed0             continues a run that was stopped
    python train.py --plain                             without fast/ (slower)

Each training step takes `--questions` questions and runs each of them `--group-size` times through the flow
(solve.py), with the planner as it is now. Each rollout gets one reward: 1 if its answer is right, else 0. The
rewards of a question are normalised (eq. 7): this gives each rollout an advantage A, and each of its turns
gets this A. flow_grpo.update() then changes the planner, in `--minibatches` optimiser steps. By default, a
frozen copy of the model (or the model with its adapters off) plays all other modules and is π_ref. The
optimiser is AdamW. Unless flags say otherwise, the toy takes 60 training steps of 16 questions x 8 rollouts,
at most two turns, four mini-batches, learning rate 2e-4. (cli/flags.py has all defaults; docs/benchmarks.md
compares those of real models with the paper's.)

All random numbers of a step come from its number and --seed. So a run that is stopped and resumed on the same
machine gives the same result as one that was never stopped (on a GPU, unless rounding changes a token). The
rest of a training run is in cli/ (flags, the first lines of a run), logbook/ (the run's folder, resuming,
Ctrl-C) and scale/ (GPU memory, several GPUs).

With several GPUs, each process (a "rank") rolls out its share of a step's questions, with random numbers of
its own; then the ranks exchange their rollouts, and update() divides each mini-batch among them. Without
torchrun there is one rank, and it does all questions.
"""

from cli import early

# Before torch, which is slow to import: --help and mistakes in the command line end here
early.check(__name__, "train.py")

import functools
import math
import random

import torch

import solve
from cli import command_line, setup
from cli.progress import Progress
from fast import logps as fast_logps
from flow_grpo import Action, advantages, log_probs, token_logps, update
from logbook.run import stop_if_down, training_run
from scale import ranks
from scale.lockstep import make_passes
from tools import TOOLS


def train(args, cast, reference, optimizer, data, state):
    """Train for args.steps steps; evaluate and save in between.

    cast: who plays what, a named tuple (policy, fixed, tools, judge). data: the questions, a named tuple
    (train, valid, test). reference: the engine of π_ref, or None. state: what a checkpoint restores, or None.

    `run` (logbook/run.py) keeps the books: run.steps() counts the steps, run.updating() times an update (and
    lets `passes` prepare it and clean up), run.log_step() and run.log_evaluation() write the log, run.save()
    writes checkpoints; run.due() and run.lacks() say what is still to do.
    """
    passes = passes_of(args, cast.policy, reference)  # computes log π of micro-batches, for update()

    with training_run(args, cast.policy, optimizer, state) as run:
        evaluate_first(run, cast, data)

        for step in run.steps():  # the numbers of those that are left, until Ctrl-C
            seed = args.seed * 1_000_003 + step  # differs for each --seed and step, up to a million steps
            questions = questions_of(step, data.train, args.questions, args.seed)
            rollouts = graded_rollouts(args, cast, questions, args.group_size, seed)

            usable, groups = with_outcome(rollouts, args.group_size)  # neither failed nor undecided
            rewards = [rollout.reward for rollout in usable]  # 1 or 0, unless you edit rewards/grade.py
            A, flat = advantages(rewards, groups)
            actions = actions_of(usable, A)

            with run.updating(passes):
                metrics = update(
                    passes, optimizer, actions, groups,
                    temperature=args.temperature, clip=(args.clip_low, args.clip_high), beta=args.beta,
                    minibatches=args.minibatches, token_mean=args.token_mean, seed=seed)

            # Prints a line; writes log.csv and rollouts.jsonl. Three steps in a row in which all rollouts
            # failed, or all mini-batches were skipped, end the run.
            run.log_step(step, rollouts, usable, groups, flat, metrics)
            if run.due():  # every --every steps, and after the last
                validate_and_save(run, cast, data.valid)
        evaluate_last(run, cast, data)


def passes_of(args, policy, reference):
    """The forward passes that give update() log π of each token, in micro-batches that fit into memory.

    With --plain they are flow_grpo.token_logps(), else those of fast/logps.py: the same numbers, up to
    rounding, in less time and memory. make_passes() makes a Passes (scale/passes.py), or its drop-in for
    several GPUs and sharded weights."""
    model, frozen = policy.model, reference.model if reference else None  # the engines' transformers models
    if args.plain:
        return make_passes(model, frozen, token_logps, token_budget=args.token_budget)
    # cut: how to split a mini-batch into micro-batches. plain: is compared with fast_token_logps on a few
    # tokens, so that an edit of token_logps() is not overlooked
    fast_token_logps, cut = fast_logps.scoring(log_probs, model, frozen, plain=token_logps)
    return make_passes(model, frozen, fast_token_logps, cut, token_budget=args.token_budget)


def questions_of(step, questions, count, seed):
    """The `count` questions of a step; they depend on its number and the seed, and not on earlier steps.

    The questions are taken in a shuffled order, and shuffled again for each epoch. (A run may be shorter than
    an epoch: the toy's takes 960 of its 2 000 questions.)"""

    @functools.cache
    def shuffled(epoch):
        order = list(questions)
        random.Random(f"{seed}-{epoch}").shuffle(order)
        return order

    # Question n of the run is in epoch n // len(questions). A step may reach into the next epoch.
    numbers = range((step - 1) * count, step * count)
    return [shuffled(n // len(questions))[n % len(questions)] for n in numbers]


def graded_rollouts(args, cast, questions, group_size, seed):
    """Run each question `group_size` times through the flow and grade the answers: [Rollout], those of a
    question one after the other."""
    settings = command_line.rollout_settings(args)
    policy, fixed, tools, judge = cast
    share = ranks.share(questions)  # of this process; without torchrun, all of them
    batch = [question for question in share for _ in range(group_size)]
    # each process draws random numbers of its own: hence the rank, which is 0 without torchrun
    torch.manual_seed(seed + 7_919 * ranks.RANK)
    with Progress(len(batch)) as bar:
        rollouts = solve.roll_out_and_grade(batch, policy, fixed, tools, judge, watch=bar, **settings)
    rollouts = ranks.joined(rollouts, group_size, len(questions))  # with those of all other processes
    stop_if_down(rollouts)  # ends the run if a model server was down for most of them
    return rollouts


def with_outcome(rollouts, group_size):
    """(usable, groups). usable: the rollouts with an outcome, which neither failed nor are undecided.

    groups[i] is the group of usable[i]: the number of its question in the batch, from 0. (Not the question's
    text: a question that comes twice in a batch makes two groups.)

    The others have no outcome, mostly through no fault of the planner. If its plans are to blame (say, they
    make prompts too long), it does not learn to avoid this: so watch the number of failures in the log."""
    # The rollouts of a question are neighbours, so rollout n belongs to question n // group_size.
    numbers = [n for n, rollout in enumerate(rollouts) if not rollout.failed and not rollout.undecided]
    return [rollouts[n] for n in numbers], [n // group_size for n in numbers]


def actions_of(rollouts, A):
    """[Action]: what the planner wrote in all turns of these rollouts, as the engine sampled it, even if it
    could not be parsed. This is the broadcast of Flow-GRPO: each turn of rollout i gets A_i. For an advantage
    of each turn, see gigpo.diff in experiments/forks/."""
    return [Action(completion.prompt_ids, completion.ids, i, A[i].item(), completion.logps)
            for i, rollout in enumerate(rollouts) for completion in rollout.plans]


# ----------------------------------------------------------------------------------------------- evaluations
def evaluate_first(run, cast, data):
    """Before the first step of a new run: how good is the planner? On the test questions, if there are any.

    A resumed run may have been stopped after a step, and before its validation, which is done here."""
    if run.step == 0:  # the last finished step
        if data.test:
            accuracy_on(run, cast, "test", data.test)
        elif data.valid:
            accuracy_on(run, cast, "valid", data.valid)
    elif data.valid and run.lacks("valid"):
        validate_and_save(run, cast, data.valid)


def evaluate_last(run, cast, data):
    """The test, once all steps are done, of the weights after the last step, not of best/. (A finished run
    that is resumed has it already.)"""
    if data.test and run.step >= run.args.steps and run.lacks("test"):
        accuracy_on(run, cast, "test", data.test)


def accuracy_on(run, cast, name, questions):
    """Run the questions of `name`, valid or test, once each, sampled as in training. Returns the accuracy,
    and writes it to the log. The seed is always the same, so that evaluations differ by the planner alone."""
    return run.log_evaluation(name, graded_rollouts(run.args, cast, questions, 1, run.args.seed))


def validate_and_save(run, cast, valid):
    """Save a checkpoint, and best/ if it is the first or has a higher accuracy on the validation questions
    than those before. (The untrained planner does not compete: best/ may be worse than it.)"""
    accuracy = accuracy_on(run, cast, "valid", valid) if valid else -math.inf  # -inf: best/ is not written
    run.save(accuracy)


def main():
    args = command_line.train_arguments(TOOLS)
    # Loads the policy, and a frozen copy that is π_ref and plays the other modules (with --lora: the policy,
    # its adapters off). Makes the optimiser: AdamW, a constant --lr, no weight decay (others: docs/fork.md)
    cast, reference, optimizer, data, state = setup.begin(args, TOOLS)
    train(args, cast, reference, optimizer, data, state)


if __name__ == "__main__":
    main()
