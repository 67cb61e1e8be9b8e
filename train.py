"""train.py: Flow-GRPO in the flow. Questions -> rollouts -> reward -> advantages -> update -> log -> save.

    python train.py                                        the toy, on a laptop: a planner learns which tool does what
    python train.py --model Qwen/Qwen2.5-7B-Instruct       data, judge and memory plan are chosen; the first lines say how
    python train.py --model Qwen/Qwen2.5-7B-Instruct --data my_questions.jsonl --corpus my_passages.jsonl
    python train.py --resume runs/toy-seed0                go on where a run stopped

Each step takes `--questions` questions and runs each of them `--group-size` times through the live flow (flow.py), with the planner
as it is at this moment. Every rollout is marked once (tasks.py), the mark is compared within its group and broadcast to all turns of
the rollout, and flow_grpo.update() moves the planner. One frozen copy of the model plays all other modules and is π_ref as well.

The command line is in settings.py, a run's folder in checkpoint.py; one that exists is never written over.
Everything random in step n is drawn from (seed, n), also after --resume. Several GPUs are parallel.py's, adapters
lora.py's, the float32 masters optimizer.py's, memory fit.py's: here all that is a line each.
"""

import os
import random
import signal
import time
from pathlib import Path

import tools as toolset
from scale import command_line

if __name__ == "__main__":
    command_line.before_imports(command_line.train_arguments, toolset.TOOLS)  # typos and --help do not wait for torch

import torch

import solve
from benchmarks import training
from flow_grpo import Action, advantages, update
from models.completion import NEW_TOKENS, outage
from models.loading import config_of, load_engine, pick_device, pick_dtype, refuse_to_train
from rewards.metrics import accuracy_line, calls_line, summary
from rewards.questions import prose_warning, read_questions
from scale import adapters, advice, fit, ranks
from scale.checkpoints import checkpoints, forget, load_state, new_folder, save, write_settings
from scale.log import Log
from scale.masters import MasterAdamW
from world import services

POISONED = 3  # steps in a row without a usable gradient, after which the run ends
COLUMNS = "kl clip entropy ratio_min ratio_max sampling_gap grad_norm skipped halved loss".split()  # of update()
NOTHING_LEARNED = dict.fromkeys(COLUMNS, 0.0) | {"ratio_min": 1.0, "ratio_max": 1.0}  # a step without gradient


class Down(Exception):
    """A model server or a judge that stays down: the run ends here, with a checkpoint."""


def marked_rollouts(questions, copies, seed, args, policy, fixed, tools, judge):
    """solve.evaluate() of each question so many times, each rank its share: all flows, the copies of a question together.

    Down if most of them did not come to an end: to go on would use up the questions, and learn from (or count) what happened to come through."""
    torch.manual_seed(seed + 7_919 * ranks.RANK)
    asked = [question for question in ranks.share(questions) for _ in range(copies)]
    flows = solve.evaluate(asked, policy, fixed, tools, judge, **solve.flow_settings(args))[1] if asked else []
    groups = [flows[i : i + copies] for i in range(0, len(flows), copies)]
    flows = [flow for group in ranks.together(groups, len(questions)) for flow in group]
    down = [flow.failed for flow in flows if outage(flow.failed)]
    if 2 * len(down) > len(flows):
        raise Down(f"{len(down)} of {len(flows)} rollouts did not come to an end ({down[0]})")
    return flows


def train_step(step, batch, args, policy, fixed, reference, optimizer, tools, judge=None, moved=True):
    """One step of Flow-GRPO on a batch of questions: ({column: value} for the log, [Flow]).

    moved: is the policy no longer the reference? Only then has a step without any advantage a gradient, the KL's."""
    start, seed = time.perf_counter(), args.seed * 1_000_003 + step
    flows = marked_rollouts(batch, args.group_size, seed, args, policy, fixed, tools, judge)
    metrics = summary(flows)

    # A rollout without an outcome leaves its group. Groups are by the question's place in the batch, never by its text.
    kept = [(i // args.group_size, flow) for i, flow in enumerate(flows) if not flow.failed and not flow.undecided]
    A, flat = advantages([flow.reward for _, flow in kept], [group for group, _ in kept])
    own = ranks.share(range(len(batch)))
    mine = [k for k, (group, _) in enumerate(kept) if group in own]  # update() numbers this rank's rollouts anew, from 0
    actions = [Action(a.prompt_ids, a.ids, i, a.logps) for i, k in enumerate(mine) for a in kept[k][1].actions]
    middle = time.perf_counter()
    learned = NOTHING_LEARNED
    if A.any() or (args.beta and moved):
        learned = update(
            policy.model, reference.model, optimizer, actions, A[mine], temperature=args.temperature,
            clip_low=args.clip_low, clip_high=args.clip_high, beta=args.beta, minibatches=args.minibatches,
            token_budget=args.token_budget, token_mean=args.token_mean, seed=seed)
        args.token_budget = int(learned["token_budget"])  # smaller from now on if the memory was short
    plans = [len(said.ids) for _, flow in kept for said in flow.actions]
    row = {"step": step, "reward": sum(flow.reward for _, flow in kept) / max(1, len(kept)), "turns": metrics["turns"], "errors": metrics["errors"]}
    row |= {"flat": flat, "groups": len(batch), "failed": metrics["failed"], "undecided": metrics["undecided"], "plan_tokens": sum(plans) / max(1, len(plans))}
    row |= {name: learned[name] for name in COLUMNS}
    for name in [*tools, "unreadable"]:
        row[name], row[f"{name}_errors"], _ = metrics["calls"].get(name, (0, 0, 0.0))
    return row, flows, middle - start, time.perf_counter() - middle


def show(row, steps, rolling, learning):
    """The aligned line of a step: the reward first, then what can go wrong."""
    line = f"step {row['step']:3d}/{steps} | reward {row['reward']:.2f} | turns {row['turns']:.2f} | errors {row['errors']:4.0%}"
    line += f" | flat groups {row['flat']:2d}/{row['groups']} | kl {row['kl']:.4f} | clip {row['clip']:4.1%} | {rolling:.1f}s + {learning:.1f}s"
    line += "".join(f" | {name} {row[name]}" for name in ("failed", "undecided") if row[name])
    return line + (f" | skipped updates {row['skipped']:.0f}" if row["skipped"] else "")


def questions_of(step, questions, number, seed):
    """The questions of a step: all of them once in a new order each epoch. A function of the step, so a resumed run goes on exactly."""
    batch = []
    while len(batch) < number:
        epoch, place = divmod((step - 1) * number + len(batch), len(questions))
        order = list(range(len(questions)))
        random.Random(f"{seed}-{epoch}").shuffle(order)
        batch += [questions[i] for i in order[place : place + number - len(batch)]]
    return batch


# --------------------------------------------------------------------------------------------------------------------- the loop
def train(args, policy, fixed, reference, tools, judge, train_questions, valid, test, state):
    """The whole run; state is None, or trainer.pt of the checkpoint to go on from."""
    run, step, best, poisoned, moved, rows = Path(args.out), 0, -1.0, 0, False, []
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = ranks.sharded(MasterAdamW, weights, lr=args.lr, device=args.optimizer_device)
    if state:
        step, best, moved = state["step"], state["best"], bool(state["optimizer"]["state"])
        ranks.load(optimizer, state.pop("optimizer"))  # pop: 91 GB of a 7B are not kept twice
    log, stopping = Log(run, step), Stopping()

    def held_out(name, questions):
        flows = marked_rollouts(questions, 1, args.seed, args, policy, fixed, tools, judge)
        metrics, columns = summary(flows), ("accuracy", "turns", "errors", "failed", "undecided")
        log.row("evals.csv", {"step": step, "questions": name} | {key: metrics[key] for key in columns})
        say(f"{name} after step {step}: {accuracy_line(metrics, len(questions))}")
        say(f"calls   {calls_line(metrics)}" if name == "test" or step == 0 else "")
        say(advice.failures(flows))
        if metrics["failed"] == len(flows):
            raise SystemExit(f"train.py: {stop(f'no rollout of {name} ended.', 'Mend that, then go on')}")
        say(advice.unparsed(flows) if step == 0 else "")
        return metrics["accuracy"]

    def save_step():
        nonlocal best
        accuracy = held_out("valid", valid) if valid else -1.0
        if accuracy > best:
            best = accuracy
            save(run / "best", policy, None, step, best, args)
        save(run / f"step-{step}", policy, optimizer, step, best, args)  # after best/, which it counts on
        forget(run, args.keep)

    def stop(why, then):
        """A checkpoint of now, without marking --valid, so that a run that was stopped ends like one that was not; and what to say."""
        if step and not (run / f"step-{step}").exists():
            save(run / f"step-{step}", policy, optimizer, step, best, args)
        return f"{why} {then} with: python train.py --resume {run}"

    due = lambda: step and (step % args.every == 0 or step == args.steps)
    try:
        if step == 0 and (test or valid):
            held_out("test" if test else "valid", test or valid)
        if valid and due() and not log.marked(step):  # the run ended while --valid was marked
            save_step()
        while step < args.steps and not ranks.any_rank(stopping.asked):
            batch = questions_of(step + 1, train_questions, args.questions, args.seed)
            row, flows, *seconds = train_step(
                step + 1, batch, args, policy, fixed, reference, optimizer, tools, judge, moved)
            step, moved = step + 1, moved or not (row["grad_norm"] == 0 or row["skipped"] == args.minibatches)
            rows.append(row)
            log.row("log.csv", row)
            log.flows(step, flows)
            say(show(row, args.steps, *seconds))
            say(advice.failures(flows))
            say(advice.flat_steps(rows, flows, args.temperature))
            poisoned = poisoned + 1 if row["skipped"] == args.minibatches or row["failed"] == len(flows) else 0
            if poisoned == POISONED:
                raise SystemExit(f"train.py: {stop(advice.poisoned(row, args), 'Or go on')}")
            if due():
                save_step()
        if step >= args.steps and test:
            held_out("test", test)
    except Down as why:
        raise SystemExit(f"train.py: {stop(f'{why}, after step {step}.', 'Mend that, then go on')}")
    if step < args.steps:
        say(stop(f"Stopped after step {step}.", "Go on"))
    elif rows and all(row["failed"] == args.questions * args.group_size for row in rows):
        raise SystemExit("train.py: every rollout failed, and nothing was learnt")
    elif not moved:
        say(f"Done, but nothing was learnt: no step had a gradient, and {run} holds the model that came in.")
    else:
        say(f"Done. Try: python solve.py --model {run}/{'best' if valid else f'step-{step}'}")


def say(text):
    if text and ranks.RANK == 0:
        print(text, flush=True)


class Stopping:
    """Ctrl-C and SIGTERM: finish the step, save, leave. A second Ctrl-C leaves at once; a second SIGTERM does not, because
    a cluster's scheduler and torchrun both send one."""

    def __init__(self):
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number, frame):
        if not self.asked:
            say("\nStopping after this step, with a checkpoint. Ctrl-C again leaves at once.")
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def load_questions(args):
    """Training, validation and test questions; [] for a set that is "none".

    Without --valid, up to 64 of --data are held out, and what is nearly one of them is not trained on."""
    if command_line.named_set(args.data):
        questions = training.training(args.data, args.limit or 1000, args.seed)
    else:
        questions = read_questions(args.data)[: args.limit]
    others = [read_questions(path) if path and path != "none" else [] for path in (args.valid, args.test)]
    if args.valid:
        return questions, *others
    if len(questions) < 2:
        raise ValueError(f"{args.data} has too few questions to hold some out: give --valid FILE.jsonl or none, "
                         "or more questions")
    train, valid, note = training.held_out(questions, min(64, len(questions) // 2), args.seed)
    say(note and f"data    {note}")
    return train, valid, others[1]


def plan_memory(args):
    """Choose how to train within the memory that is there, before anything large is downloaded; ValueError if
    nothing fits."""
    device = pick_device(args.device)
    if device.type == "cpu" and args.device is None and not Path(args.model).is_dir():
        raise ValueError(f"there is no GPU here, and {args.model} is not in a folder here: train it on a machine with "
                         "a GPU, or give --device cpu to download it and train on the CPU all the same")
    config = config_of(args.model)
    refuse_to_train(config)
    context, new = fit.context(config, args.max_new_tokens), args.max_new_tokens or NEW_TOKENS
    names = {getattr(args, name) for name in (*command_line.MODULES, "judge")} - {args.model, None}
    others = sum(fit.shapes(config_of(name))["parameters"] for name in names if not services.is_server(name))
    choices = "lora", "optimizer_device", "gradient_checkpointing"  # a resumed run keeps what it began with
    given = [name for name in choices if args.resume or getattr(args, name) is not None]
    gpu = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    memories = ranks.together([(gpu, fit.host_memory())], ranks.WORLD)
    gpu, host = map(min, zip(*memories))  # all ranks must choose the same
    changes, text = fit.plan(
        config, gpu, host, given, args.token_budget, prompt=max(1, min(4096, context - new)), others=others,
        dtype=pick_dtype(args.dtype, device), ranks=ranks.WORLD, beta=args.beta, max_new_tokens=new,
        lora=args.lora, optimizer_device=args.optimizer_device,
        gradient_checkpointing=gpu > 0 if args.gradient_checkpointing is None else args.gradient_checkpointing)
    for name, value in changes.items():
        setattr(args, name, value)
    if args.gradient_checkpointing is None:
        args.gradient_checkpointing = device.type == "cuda"
    args.lr = args.lr if args.lr is not None else 1e-5 if args.lora else 1e-6
    say(f"memory  {text}")
    if args.lora:
        adapters.peft()  # or a sentence, before the weights are downloaded


def show_choices(args, train_questions, valid, test):
    """The rest of the first lines: what is learnt from what, and who grades."""
    here = f"{Path.cwd()}{os.sep}"
    copy = " (the frozen copy)" if args.judge == args.model else ""
    judge = f"{(args.judge or '').removeprefix(here)}{copy}, for answers that the rules cannot read"
    part = f"adapters of rank {args.lora}" if args.lora else "all weights"
    say(f"data    {args.data.removeprefix(here)}: {len(train_questions)} questions to train on, {len(valid)} to choose best/, "
        f"{len(test)} to test")
    say(f"judge   {judge if args.judge else 'none: an answer that the rules cannot read is not right'}")
    say("" if args.judge else prose_warning(train_questions))
    say(f"learn   {part}, lr {args.lr:g}, {args.steps} steps of {args.questions} questions x {args.group_size} "
        f"rollouts, at most {args.max_turns} turns")


def load_models(args, checkpoint):
    """(policy, reference, {name: engine} for the fixed modules): one frozen copy of the model is π_ref and, by default, plays all the
    fixed modules. With adapters there is no second copy: the policy's own weights, the adapters off, are both."""
    if args.lora:
        torch.manual_seed(args.seed)  # the adapters begin with random numbers
        base = load_engine(args.model, args.device, args.dtype, args.think)
        policy, frozen = adapters.adapted(base, args.lora, checkpoint)
        return policy, policy, {args.model: frozen}
    policy = load_engine(checkpoint or args.model, args.device, args.dtype, args.think)
    frozen = load_engine(args.model, args.device, args.dtype, args.think)
    frozen.model.requires_grad_(False)
    return policy, frozen, {args.model: frozen}


def main():
    args, checkpoint = command_line.train_arguments(toolset.TOOLS), None
    try:
        if args.resume:
            checkpoint = (checkpoints(args.resume) or [None])[-1]
        args.device = ranks.start(args.device)
        plan_memory(args)
        questions = load_questions(args)
        show_choices(args, *questions)
        tools, cache = solve.load_tools(args)
        state = load_state(checkpoint) if checkpoint else None
        if pick_device(args.device).type != "cuda":
            fit.bound_host_memory()
        policy, reference, loaded = load_models(args, checkpoint)
        fixed, judge = solve.load_engines(args, loaded, cache)
        left_out, args.tools = toolset.left_out(args.tools), list(tools)
        if ranks.RANK == 0:
            if args.resume:
                write_settings(args, Path(args.out))  # --steps may be new
            else:
                new_folder(args)
        ranks.wait()
    except (ValueError, OSError) as why:
        command_line.leave(2, f"train.py: {why}")
    if args.gradient_checkpointing:
        policy.model.activation_checkpointing_enable()
    say(f"{solve.show_engines(policy, fixed, judge, tools, left_out)}\nrun     {args.out}")
    try:
        train(args, policy, fixed, reference, tools, judge, *questions, state)
        ranks.wait()  # nobody leaves while another still reads from it
        ranks.stop()  # and not after an error: it might wait for those who wait for us, and torchrun ends them only when we are gone
    except MemoryError as why:
        raise SystemExit(f"train.py: {why}")
    except OSError as why:
        raise SystemExit(f"train.py: could not write to {args.out} ({why}); the last checkpoint is untouched. Free some disk, then --resume.")


if __name__ == "__main__":
    main()
