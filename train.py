"""train.py: Flow-GRPO in the flow. Questions -> rollouts -> rewards -> advantages -> update -> log -> save.

    python train.py                                     the toy, on a laptop: learns which tool does what
    python train.py --model Qwen/Qwen2.5-7B-Instruct    chooses data, judge and memory plan, and prints them
    python train.py --model Qwen/Qwen2.5-7B-Instruct --data my_questions.jsonl --corpus my_passages.jsonl
    python train.py --resume runs/toy-seed0             goes on where a run stopped
    python train.py --plain                             what the nine scripts say, without fast/: slower

Each step takes `--questions` questions and runs each of them `--group-size` times through the flow
(solve.py), with the planner as it is now. Each rollout gets one reward: 1 if its answer is right, else 0.
Compared with the other rewards of its question, the reward becomes the advantage of all turns of the rollout.
flow_grpo.update() then changes the planner. A frozen copy of the model plays all other modules and is π_ref.

All random numbers of step n come from (seed, n), so a run that is stopped and resumed ends as if it had never
been stopped. What else a training run needs: cli/ (flags, the first lines of a run), logbook/ (the run's
folder, resuming, Ctrl-C), scale/ (the memory plan, several GPUs).
"""
import math
import random

from logbook import endings

endings.without_traceback(__name__)

import tools as toolset
from cli import command_line

if __name__ == "__main__":
    # --help and mistakes are answered before torch is imported, which takes seconds. main() parses again.
    with endings.errors_leave("train.py"):
        args = command_line.train_arguments(toolset.TOOLS)
        command_line.before_imports(args, toolset.toolbox(args.tools, args.corpus))

import torch

import solve
from cli import setup, toy_warning
from cli.cast import load_engines, show_engines
from fast import logps
from flow_grpo import Action, advantages, log_probs, token_logps, update
from logbook.checkpoints import last_checkpoint, load_state, open_folder
from logbook.log import NO_UPDATE, say, step_row
from logbook.run import Down, training_run
from models.completion import outage
from scale import laps, ranks
from scale.passes import Passes


def train(args, cast, reference, optimizer, train_questions, valid, test, state):
    """The whole run. cast: (the engine that is trained, {module: engine} for the others, tools, judge);
    reference: the engine of π_ref, or None; state: of the checkpoint to resume from, or None."""
    policy, _, tools, _ = cast
    models = policy.model, reference and reference.model
    # How log-probs are computed: as flow_grpo.py says, or with the same result in less time and memory.
    how = {"token_logps": token_logps} if args.plain else logps.scoring(log_probs, *models)
    passes = Passes(*models, token_budget=args.token_budget, **how)

    with training_run(args, policy, optimizer, state) as run:
        if run.step == 0 and (test or valid):  # what the untrained planner can do
            log_accuracy(run, cast, "test" if test else "valid", test or valid)
        if run.due() and valid and not run.log.evaluated("valid", run.step):
            validate_and_save(run, cast, valid)  # a resumed run that was stopped before its validation

        for step in run.steps():
            seed = args.seed * 1_000_003 + step
            questions = questions_of(step, train_questions, args.questions, args.seed)
            rollouts = graded_rollouts(args, cast, questions, args.group_size, seed)

            groups, usable = with_outcome(rollouts, args.group_size)
            rewards = [rollout.reward for rollout in usable]
            A, flat = advantages(rewards, groups)

            report = NO_UPDATE
            if A.any() or (args.beta and run.moved):  # while π_θ = π_ref, the KL has no gradient either
                actions, places = local_actions(usable, groups, len(questions))
                with run.updating(passes, usable, groups, A):
                    report = update(
                        passes, optimizer, actions, A[places], [groups[i] for i in places],
                        temperature=args.temperature, clip=(args.clip_low, args.clip_high), beta=args.beta,
                        minibatches=args.minibatches, token_mean=args.token_mean, seed=seed)

            row = step_row(step, rollouts, usable, len(questions), flat, report, tools)
            run.log_step(row, rollouts, report)
            if run.due():
                validate_and_save(run, cast, valid)
        if run.step >= args.steps and test:
            log_accuracy(run, cast, "test", test)


def questions_of(step, questions, number, seed):
    """The questions of one step, which depend on its number and the seed alone.

    Step after step, the questions are taken in a shuffled order; each epoch has an order of its own."""
    batch = []
    while len(batch) < number:
        epoch, place = divmod((step - 1) * number + len(batch), len(questions))
        order = list(range(len(questions)))
        random.Random(f"{seed}-{epoch}").shuffle(order)
        batch += [questions[i] for i in order[place : place + number - len(batch)]]
    return batch


def graded_rollouts(args, cast, questions, copies, seed):
    """Run each question `copies` times through the flow and grade the answers: [rollout], group after group.

    Each rank runs its share of the questions, and gets the rollouts of all ranks. Raises Down if a server was
    down for more than half of them: training on the few that came through would waste the questions."""
    torch.manual_seed(seed + 7_919 * ranks.RANK)
    local = [question for question in ranks.share(questions) for _ in range(copies)]
    settings = solve.rollout_settings(args)
    rollouts = solve.evaluate(local, *cast, **settings)[1] if local else []
    laps.lap("rest")  # for --profile: grading has ended
    groups = [rollouts[i : i + copies] for i in range(0, len(rollouts), copies)]
    rollouts = [rollout for group in ranks.together(groups, len(questions)) for rollout in group]
    down = [rollout.failed for rollout in rollouts if outage(rollout.failed)]
    if 2 * len(down) > len(rollouts):
        raise Down(f"{len(down)} of {len(rollouts)} rollouts did not come to an end ({down[0]})")
    return rollouts


def with_outcome(rollouts, group_size):
    """([group], [rollout]) of the rollouts with an outcome: those that neither failed nor are undecided.

    The group of a rollout is the number of its question in the batch, from 0; never the question's text."""
    places = [i for i, rollout in enumerate(rollouts) if not rollout.failed and not rollout.undecided]
    return [i // group_size for i in places], [rollouts[i] for i in places]


def local_actions(usable, groups, number):
    """What this rank learns from: (all turns of its rollouts, the places of these rollouts in `usable`).

    number: of all groups. Action.rollout numbers this rank's rollouts from 0, in the order of the places."""
    local_groups = ranks.share(range(number))
    places = [place for place, group in enumerate(groups) if group in local_groups]
    actions = [Action(turn.prompt_ids, turn.ids, i, turn.logps)
               for i, place in enumerate(places) for turn in usable[place].actions]
    return actions, places


def log_accuracy(run, cast, name, questions):
    """The accuracy on the questions of `name`, valid or test: one rollout each, sampled as in training. It is
    logged, too."""
    return run.log_evaluation(name, graded_rollouts(run.args, cast, questions, 1, run.args.seed))


def validate_and_save(run, cast, valid):
    """Save a checkpoint, and best/ if the accuracy on the validation questions is the highest so far."""
    run.save(log_accuracy(run, cast, "valid", valid) if valid else -math.inf)


def main():
    args = command_line.train_arguments(toolset.TOOLS)
    with endings.errors_leave("train.py"):
        checkpoint = last_checkpoint(args.resume) if args.resume else None
        args.device = ranks.start(args.device)
        setup.plan_memory(args)
        questions = setup.load_questions(args)
        setup.show_choices(args, *questions)
        setup.plan_disk(args)
        tools, cache = solve.load_tools(args)
        state = load_state(checkpoint)
        policy, reference, optimizer, loaded = setup.load_models(args, checkpoint)
        fixed, judge = load_engines(args, loaded, cache)
        left_out, args.tools = toolset.left_out(args.tools), list(tools)
        open_folder(args, state["step"] if state else 0)
    command_line.after_loading()
    say(f"{show_engines(policy, fixed, judge, tools, left_out)}\nrun     {args.out}")
    say(toy_warning.warning([policy, *fixed.values()], solve.example_prompts(), tools))
    train(args, (policy, fixed, tools, judge), reference, optimizer, *questions, state)


if __name__ == "__main__":
    main()
