"""train.py: Flow-GRPO in the flow. Questions -> rollouts -> rewards -> advantages -> update -> log -> save.

    python train.py                                     the toy, on a laptop: learns which tool does what
    python train.py --model Qwen/Qwen2.5-7B-Instruct    chooses data, judge and memory plan, and says which
    python train.py --model Qwen/Qwen2.5-7B-Instruct --data my_questions.jsonl --corpus my_passages.jsonl
    python train.py --resume runs/toy-seed0             goes on where a run stopped

Each step takes `--questions` questions and runs each `--group-size` times through the flow (solve.py), with
the planner as it is at this moment. Each rollout gets one reward: 1 if its answer is right, else 0. The
reward is compared within its group, and all turns of the rollout share the resulting advantage.
flow_grpo.update() then moves the planner. One frozen copy of the model plays all other modules and is π_ref.

Everything random in step n is drawn from (seed, n), so a run that was stopped and resumed ends like a run
that was not. What else a training needs is in scale/: the command line, the memory plan and the models
(setup.py), the run's folder (run.py, log.py, checkpoints.py), Ctrl-C (stopping.py), several GPUs (ranks.py).
"""
import random
import time
from functools import partial

import tools as toolset
from scale import command_line

if __name__ == "__main__":
    # --help and typos are answered before torch is imported, which takes seconds.
    command_line.before_imports(command_line.train_arguments, toolset.TOOLS)

import torch

import solve
from flow_grpo import Action, advantages, update
from models.cast import load_engines, show_engines
from models.completion import outage
from scale import advice, ranks, setup
from scale.checkpoints import last_checkpoint, load_state, open_folder
from scale.log import NO_UPDATE, say, step_row
from scale.masters import MasterAdamW
from scale.run import Run
from scale.stopping import Stopping
from toy import pieces


def train(args, policy, fixed, reference, tools, judge, train_questions, valid, test, state):
    """The whole run. state: None, or trainer.pt of the checkpoint to resume from."""
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = ranks.sharded(MasterAdamW, weights, lr=args.lr, device=args.optimizer_device)
    run, stopping = Run(args, policy, optimizer, state), Stopping()
    graded = partial(graded_rollouts, args, policy, fixed, tools, judge)
    try:
        if run.step == 0 and (test or valid):
            run.log_evaluation("test" if test else "valid", graded(test or valid, 1, args.seed))
        if valid and run.due() and not run.log.evaluated("valid", run.step):
            validate_and_save(run, valid, graded)  # the run was stopped before it did that

        while run.step < args.steps and not stopping.requested():
            step, seed, start = run.step + 1, args.seed * 1_000_003 + run.step + 1, time.perf_counter()
            questions = questions_of(step, train_questions, args.questions, args.seed)
            rollouts = graded(questions, args.group_size, seed)
            middle = time.perf_counter()

            groups, usable = with_outcome(rollouts, args.group_size)
            rewards = [rollout.reward for rollout in usable]
            A, flat = advantages(rewards, groups)
            learned = NO_UPDATE
            if A.any() or (args.beta and run.moved):  # before the policy has moved, the KL has no gradient
                actions, local = local_actions(usable, groups, len(questions))
                learned = update(
                    policy.model, reference.model, optimizer, actions, A[local],
                    temperature=args.temperature, clip_low=args.clip_low, clip_high=args.clip_high,
                    beta=args.beta, minibatches=args.minibatches, token_budget=args.token_budget,
                    token_mean=args.token_mean, seed=seed)
                say(advice.smaller_budget(args.token_budget, int(learned["token_budget"])))
                args.token_budget = int(learned["token_budget"])

            row = step_row(step, rollouts, usable, len(questions), flat, learned, tools)
            run.log_step(row, rollouts, (middle - start, time.perf_counter() - middle))
            if run.due():
                validate_and_save(run, valid, graded)
        if run.step >= args.steps and test:
            run.log_evaluation("test", graded(test, 1, args.seed))
    except Down as why:
        raise SystemExit(f"train.py: {run.stop(f'{why}, after step {run.step}.', 'Mend that, then go on')}")
    run.end()


def questions_of(step, questions, number, seed):
    """The questions of a step, which depend on step and seed alone: an epoch takes all in a new order."""
    batch = []
    while len(batch) < number:
        epoch, place = divmod((step - 1) * number + len(batch), len(questions))
        order = list(range(len(questions)))
        random.Random(f"{seed}-{epoch}").shuffle(order)
        batch += [questions[i] for i in order[place : place + number - len(batch)]]
    return batch


class Down(Exception):
    """A model server or a judge that stays down: the run ends, with a checkpoint."""


def graded_rollouts(args, policy, fixed, tools, judge, questions, copies, seed):
    """Run each question `copies` times through the flow and grade the answers: [rollout], group after group.

    Each rank runs its share of the questions. Down if more than half of the rollouts met a server that is
    down: to go on would use up questions, and learn from the rollouts that happened to come through."""
    torch.manual_seed(seed + 7_919 * ranks.RANK)
    local = [question for question in ranks.share(questions) for _ in range(copies)]
    settings = solve.flow_settings(args)
    rollouts = solve.evaluate(local, policy, fixed, tools, judge, **settings)[1] if local else []
    groups = [rollouts[i : i + copies] for i in range(0, len(rollouts), copies)]
    rollouts = [rollout for group in ranks.together(groups, len(questions)) for rollout in group]
    down = [rollout.failed for rollout in rollouts if outage(rollout.failed)]
    if 2 * len(down) > len(rollouts):
        raise Down(f"{len(down)} of {len(rollouts)} rollouts did not come to an end ({down[0]})")
    return rollouts


def with_outcome(rollouts, group_size):
    """([group], [rollout]) of the rollouts with an outcome: one that failed or is undecided leaves its group.

    A group is the place of its question in the batch, never the question's text."""
    pairs = [(i // group_size, rollout) for i, rollout in enumerate(rollouts)
             if not rollout.failed and not rollout.undecided]
    return [group for group, _ in pairs], [rollout for _, rollout in pairs]


def local_actions(usable, groups, number):
    """What this rank learns from: (all turns of its rollouts, the places of these rollouts in `usable`).

    number: of groups. Action.flow counts this rank's rollouts from 0."""
    own_groups = ranks.share(range(number))
    local = [k for k, group in enumerate(groups) if group in own_groups]
    actions = [Action(turn.prompt_ids, turn.ids, i, turn.logps)
               for i, k in enumerate(local) for turn in usable[k].actions]
    return actions, local


def validate_and_save(run, valid, graded):
    """A checkpoint, and best/ if the policy was never better on the validation questions."""
    accuracy = run.log_evaluation("valid", graded(valid, 1, run.args.seed)) if valid else -1.0
    run.save(accuracy)


def main():
    args = command_line.train_arguments(toolset.TOOLS)
    try:
        checkpoint = last_checkpoint(args.resume) if args.resume else None
        args.device = ranks.start(args.device)
        setup.plan_memory(args)
        questions = setup.load_questions(args)
        setup.show_choices(args, *questions)
        tools, cache = solve.load_tools(args)
        state = load_state(checkpoint)
        policy, reference, loaded = setup.load_models(args, checkpoint)
        fixed, judge = load_engines(args, loaded, cache)
        left_out, args.tools = toolset.left_out(args.tools), list(tools)
        open_folder(args)
    except (ValueError, OSError) as why:
        command_line.leave(2, f"train.py: {why}")
    say(f"{show_engines(policy, fixed, judge, tools, left_out)}\nrun     {args.out}")
    say(pieces.warning([policy, *fixed.values()]))
    try:
        train(args, policy, fixed, reference, tools, judge, *questions, state)
        ranks.wait()  # the others may still read from this rank
        ranks.stop()  # not after an error: it might wait for ranks that wait for this one
    except MemoryError as why:
        raise SystemExit(f"train.py: {why}: {advice.MEMORY}")
    except OSError as why:
        raise SystemExit(f"train.py: could not write to {args.out} ({why}); the last checkpoint is "
                         "untouched. Free some disk, then --resume.")


if __name__ == "__main__":
    main()
