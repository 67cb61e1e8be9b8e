"""train.py: Flow-GRPO in the flow. Questions -> rollouts -> reward -> advantages -> update -> log -> save.

    python train.py                                        the toy, on a laptop: a planner learns which tool does what
    python train.py --model Qwen/Qwen2.5-7B-Instruct --data my_questions.jsonl --corpus my_passages.jsonl
    python train.py --resume runs/toy-seed0                go on where a run stopped

Each step takes `--questions` questions and runs each of them `--group-size` times through the live flow (flow.py), with the planner
as it is at this moment. Every rollout is marked once (tasks.py), the mark is compared within its group and broadcast to all turns of
the rollout, and flow_grpo.update() moves the planner. One frozen copy of the model plays all other modules and is π_ref as well.

A run's folder stands in checkpoint.py; one that exists is never written over. Everything random in step n is drawn from (seed, n), also
after --resume. Several GPUs are parallel.py's, adapters lora.py's, the float32 masters optimizer.py's: here all that is a line each.
"""

import argparse
import json
import os
import random
import signal
import time
from pathlib import Path

import torch
from transformers import AutoConfig

import benchmarks
import fit
import llm
import lora
import parallel
import solve
import tasks
from checkpoint import TAKEN, Log, checkpoints, forget, load_state, new_folder, save, write_settings
from flow_grpo import Action, advantages, update
from optimizer import MasterAdamW

# The paper's settings, and what differs for the toy: a small model learns at a larger rate, from smaller batches. Its questions need
# one turn or two; with no turn to spare, each wrong tool costs the answer, and the reward can see it.
PAPER = {"lr": 1e-6, "steps": 32, "questions": 32, "minibatches": 1, "max_turns": 3, "data": None, "valid": None, "test": None, "every": 5}
TOY = {"lr": 2e-4, "steps": 60, "questions": 16, "minibatches": 4, "max_turns": 2, "every": 10}
POISONED = 3  # steps in a row without a usable gradient, after which the run ends
TOY |= {name: solve.TOY / f"{file}.jsonl" for name, file in (("data", "train"), ("valid", "valid"), ("test", "test"))}


class Down(Exception):
    """A model server or a judge that stays down: the run ends here, with a checkpoint."""


def marked_rollouts(questions, copies, seed, args, policy, fixed, tools, judge):
    """solve.evaluate() of each question so many times, each rank its share: all flows, the copies of a question together.

    Down if most of them did not come to an end: to go on would use up the questions, and learn from (or count) what happened to come through."""
    torch.manual_seed(seed + 7_919 * parallel.RANK)
    asked = [question for question in parallel.share(questions) for _ in range(copies)]
    flows = solve.evaluate(asked, policy, fixed, tools, judge, **solve.flow_settings(args))[1] if asked else []
    groups = [flows[i : i + copies] for i in range(0, len(flows), copies)]
    flows = [flow for group in parallel.together(groups, len(questions)) for flow in group]
    down = [flow.failed for flow in flows if llm.outage(flow.failed)]
    if 2 * len(down) > len(flows):
        raise Down(f"{len(down)} of {len(flows)} rollouts did not come to an end ({down[0]})")
    return flows


def train_step(step, batch, args, policy, fixed, reference, optimizer, tools, judge=None):
    """One step of Flow-GRPO on a batch of questions: ({column: value} for the log, [Flow])."""
    start, seed = time.perf_counter(), args.seed * 1_000_003 + step
    flows = marked_rollouts(batch, args.group_size, seed, args, policy, fixed, tools, judge)
    metrics = solve.summary(flows)

    # A rollout without an outcome leaves its group. Groups are by the question's place in the batch, never by its text.
    kept = [(i // args.group_size, flow) for i, flow in enumerate(flows) if not flow.failed and not flow.undecided]
    A, flat = advantages([flow.reward for _, flow in kept], [group for group, _ in kept])
    own = parallel.share(range(len(batch)))
    mine = [k for k, (group, _) in enumerate(kept) if group in own]  # update() numbers this rank's rollouts anew, from 0
    actions = [Action(said.prompt_ids, said.ids, i) for i, k in enumerate(mine) for said in kept[k][1].actions]
    middle = time.perf_counter()
    learned = update(
        policy.model, reference.model, optimizer, actions, A[mine],
        temperature=args.temperature, clip_low=args.clip_low, clip_high=args.clip_high, beta=args.beta, minibatches=args.minibatches,
        token_budget=args.token_budget, token_mean=args.token_mean, seed=seed, all_reduce=parallel.add_up if parallel.WORLD > 1 else None,
    )
    args.token_budget = int(learned["token_budget"])  # smaller from now on if the memory was short
    plans = [len(said.ids) for _, flow in kept for said in flow.actions]
    row = {"step": step, "reward": sum(flow.reward for _, flow in kept) / max(1, len(kept)), "turns": metrics["turns"], "errors": metrics["errors"]}
    row |= {"flat": flat, "groups": len(batch), "failed": metrics["failed"], "undecided": metrics["undecided"], "plan_tokens": sum(plans) / max(1, len(plans))}
    row |= {name: learned[name] for name in ("kl", "clip", "entropy", "ratio_min", "ratio_max", "grad_norm", "skipped", "halved", "loss")}
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
    run, step, best, poisoned = Path(args.out), 0, -1.0, 0
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = parallel.sharded(MasterAdamW, weights, lr=args.lr, device=args.optimizer_device)
    if state:
        step, best = state["step"], state["best"]
        parallel.load(optimizer, state.pop("optimizer"))  # pop: 91 GB of a 7B are not kept twice
    log, stopping = Log(run, step), Stopping()

    def held_out(name, questions):
        flows = marked_rollouts(questions, 1, args.seed, args, policy, fixed, tools, judge)
        metrics = solve.summary(flows)
        row = {key: metrics[key] for key in ("accuracy", "turns", "errors", "failed", "undecided")}
        log.row("evals.csv", {"step": step, "questions": name} | row)
        say(f"{name} after step {step}: {solve.show(metrics, len(questions))}")
        if name == "test":
            say(f"calls   {solve.show_calls(metrics)}")
        return metrics["accuracy"]

    def mark_valid():
        nonlocal best
        accuracy = held_out("valid", valid)
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
        if step == 0:
            held_out("test", test)
        if due() and not log.marked(step):  # the run ended while --valid was marked
            mark_valid()
        while step < args.steps and not parallel.any_rank(stopping.asked):
            batch = questions_of(step + 1, train_questions, args.questions, args.seed)
            row, flows, *seconds = train_step(step + 1, batch, args, policy, fixed, reference, optimizer, tools, judge)
            step += 1
            log.row("log.csv", row)
            log.flows(step, flows)
            say(show(row, args.steps, *seconds))
            poisoned = poisoned + 1 if row["skipped"] == args.minibatches or row["failed"] == len(flows) else 0
            if poisoned == POISONED:
                why = f"the last {POISONED} steps taught nothing: gradients that are not finite or far too large, or prompts that do not fit the model."
                raise SystemExit(f"train.py: {stop(why, 'Begin anew with a lower --lr or --max-new-tokens, or go on')}")
            if due():
                mark_valid()
        if step >= args.steps:
            held_out("test", test)
    except Down as why:
        raise SystemExit(f"train.py: {stop(f'{why}, after step {step}.', 'Mend that, then go on')}")
    say(f"Done. Try: python solve.py --model {run}/best" if step >= args.steps else stop(f"Stopped after step {step}.", "Go on"))


def say(text):
    if parallel.RANK == 0:
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


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=solve.Help)
    add = parser.add_argument
    default = lambda name: f"{PAPER[name]}; the toy {TOY[name] if not isinstance(TOY[name], Path) else 'its own'}"
    # what is trained, on what
    add("--model", default=str(solve.TOY), help="folder or hub name of the planner")
    add("--data", help=f"training questions, JSONL, or nq, deepmath or nq+deepmath by name (default: {default('data')})")
    add("--limit", type=int, default=None, help="questions of --data at most; None: all of a file, 1000 of a named set")
    add("--valid", help="questions that choose best/, JSONL (default: 64 held out from --data; the toy its own)")
    add("--test", help="questions marked before and after, JSONL (default: those of --valid; the toy its own)")
    # the modules that are not trained, and the tools
    solve.add_engines(add)
    # the flow
    add("--max-turns", type=int, help=f"turns of a flow in training (default: {default('max_turns')})")
    add("--temperature", type=float, default=0.7, help="of the planner's sampling, in rollouts and in the ratio")
    add("--max-new-tokens", type=int, default=None, help="longest answer of a module; None: the checkpoint's, or 1024")
    # the objective
    add("--steps", type=int, help=f"optimisation steps (default: {default('steps')})")
    add("--questions", type=int, help=f"questions a step (default: {default('questions')})")
    add("--group-size", type=int, default=8, help="G, rollouts per question; their mean is the baseline")
    add("--lr", type=float, help=f"learning rate of AdamW (default: {default('lr')})")
    add("--beta", type=float, default=0.001, help="weight of the KL to the untrained planner; 0 frees a forward pass")
    add("--clip-low", type=float, default=0.2, help="the ratio is clipped below 1 - this")
    add("--clip-high", type=float, default=0.3, help="the ratio is clipped above 1 + this")
    add("--minibatches", type=int, help=f"optimiser steps per batch of rollouts; above 1 the ratio leaves 1 (default: {default('minibatches')})")
    add("--token-mean", action="store_true", help="the released code's mean over all tokens, in place of the three nested means")
    # the machine and the run
    add("--token-budget", type=int, default=16384, help="tokens of a micro-batch: bounds memory, changes nothing else")
    add("--lora", type=int, default=None, metavar="RANK", help="train adapters of this rank instead of all weights: one copy for all roles (needs peft)")
    add("--optimizer-device", default=None, choices=["cpu"], help="cpu: float32 masters and moments in the host's memory; None: beside the weights")
    add("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=None, help="less memory, a third more time; None: on cuda")
    add("--device", default=None, help="cuda, mps or cpu; None: the first there is")
    add("--dtype", default=None, help="float32, bfloat16, ...; None: bfloat16 on cuda, float32 elsewhere")
    add("--seed", type=int, default=0, help="decides everything random")
    add("--every", type=int, help=f"save and mark --valid every so many steps (default: {default('every')})")
    add("--out", default=None, help="the run's folder, which must not exist; None: runs/MODEL-seedN")
    add("--keep", type=int, default=None, help="checkpoints step-N to keep, the newest, and best/; None: all")
    add("--resume", default=None, metavar="RUN", help="go on with the run in this folder, with its settings (only --steps may be given anew)")
    return parser


def settle(args):
    """Fill in what depends on the model, and refuse what cannot work (ValueError: one sentence)."""
    toy = Path(args.model).resolve() == solve.TOY.resolve()
    given = args.data is not None
    for name, value in PAPER.items():
        if getattr(args, name) is None and not (given and name in ("valid", "test")):
            setattr(args, name, TOY[name] if toy else value)
    if not args.data:
        raise ValueError("--data is needed: nq+deepmath, or FILE.jsonl with one {\"question\": ..., \"answer\": ...} a line")
    if args.group_size < 2:
        raise ValueError(f"--group-size {args.group_size} has no baseline: use 2 or more")
    for name in ("limit", "lora", "keep", "steps", "questions", "minibatches", "max_turns", "every", "token_budget", "max_new_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} does nothing: use 1 or more")
    for name, low, high in (("lr", 0, 1), ("beta", 0, 1e6), ("clip_low", 0, 1), ("clip_high", 0, 1e6)):
        if not low <= getattr(args, name) <= high:  # nor nan
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} cannot work: use {low} to {high:g}")
    if not 1e-3 <= args.temperature < 1e6:
        raise ValueError(f"--temperature {args.temperature} does not sample, and a group of equal rollouts teaches nothing: use e.g. 0.7")
    if llm.is_server(args.model):
        raise ValueError("--model must be local weights, a folder or a hub name: a server gives no tokens to train on. It can play --fixed")
    solve.settle_engines(args)
    for name in ("model", "fixed", "executor", "verifier", "generator", "judge"):
        if Path(getattr(args, name) or "").is_dir() and getattr(args, name):  # a checkpoint remembers them, and may be used from another folder
            setattr(args, name, str(Path(getattr(args, name)).resolve()))
    if args.corpus and Path(args.corpus).is_file():
        args.corpus = str(Path(args.corpus).resolve())
    args.out = args.out or f"runs/{Path(args.model).name}-seed{args.seed}"
    if Path(args.out).exists():  # told now, not after a 7B is loaded
        raise ValueError(TAKEN.format(args.out))


def resumed(parser, args):
    """The settings of the run in --resume, and its newest checkpoint: None if it was ended before the first one."""
    file = Path(args.resume) / "args.json"
    if not file.exists():
        raise ValueError(f"{args.resume} is not the folder of a run: name one, or leave --resume out")
    told = parser.parse_args(namespace=argparse.Namespace(**dict.fromkeys(vars(args))))  # what is there already gets no default
    given = [name for name, value in vars(told).items() if value is not None and name not in ("resume", "steps")]
    if given or (args.steps is not None and args.steps < 1):
        wrong = f"--{given[0].replace('_', '-')}" if given else f"--steps {args.steps}"
        raise ValueError(f"--resume goes on with the run's own settings: leave out {wrong}")
    try:
        settings = json.loads(file.read_text())
    except json.JSONDecodeError as why:
        raise ValueError(f"{file} is damaged ({why}): begin anew") from why
    return argparse.Namespace(**settings | {"out": args.resume, "steps": args.steps or settings["steps"]}), (checkpoints(args.resume) or [None])[-1]


def load_questions(args):
    """Training, validation and test questions. Without --valid, up to 64 of --data are held out, and what is nearly one of them is
    not trained on. Without --test, the questions that choose best/ are the test as well."""
    if set(str(args.data).split("+")) <= {*benchmarks.TRAINING, *benchmarks.BENCHMARKS}:  # a benchmark's name is refused, with the reason
        questions = benchmarks.training(str(args.data), args.limit or 1000, args.seed)
    else:
        questions = tasks.load(args.data)[: args.limit]
    if len(questions) < 2 and not args.valid:
        raise ValueError(f"{args.data} has too few questions to hold some out: give --valid FILE.jsonl, or 2 questions and more")
    if args.valid:
        train, valid = questions, tasks.load(args.valid)
    else:
        train, valid, note = benchmarks.held_out(questions, min(64, len(questions) // 2), args.seed)
        if note:
            say(f"data    {note}")
    return train, valid, tasks.load(args.test) if args.test else valid


def check_memory(args, free):
    """Say what the run will need of `free` bytes of GPU memory; ValueError, before anything is loaded, if that is not enough."""
    try:
        config = AutoConfig.from_pretrained(args.model)
    except (OSError, ValueError):
        return  # llm.load() says what is wrong with this model
    needed = fit.predict(
        config, dtype=llm.pick_dtype(args.dtype, llm.pick_device(args.device)), token_budget=args.token_budget, ranks=parallel.WORLD, beta=args.beta,
        max_new_tokens=args.max_new_tokens or llm.LONGEST, gradient_checkpointing=args.gradient_checkpointing is not False,
        optimizer_device=args.optimizer_device, lora=args.lora, generate_budget=1)  # generate() halves its batches by itself
    if advice := fit.advise(needed, 1.15 * free):  # 1.15: as far as the prediction has been off
        raise ValueError(advice)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed.host > there:
        raise ValueError(f"It needs {needed.host / 1e9:.0f} GB of the host's memory and there are {there / 1e9:.0f}: give --lora 32, a smaller model, or more memory")
    say(f"memory  {needed.gpu / 1e9:.0f} GB predicted of {free / 1e9:.0f} GB on the GPU, {needed.host / 1e9:.0f} GB of {there / 1e9:.0f} on the host")
    if advice := fit.advise(needed, 0.9 * free):
        say(f"memory  may not suffice, since a tenth should stay free. {advice}")


def load_models(args, checkpoint):
    """(policy, reference, {name: engine} for the fixed modules): one frozen copy of the model is π_ref and, by default, plays all the
    fixed modules. With adapters there is no second copy: the policy's own weights, the adapters off, are both."""
    if args.lora:
        torch.manual_seed(args.seed)  # the adapters begin with random numbers
        policy, frozen = lora.adapted(llm.load(args.model, args.device, args.dtype), args.lora, checkpoint)
        return policy, policy, {args.model: frozen}
    policy = llm.load(checkpoint or args.model, args.device, args.dtype)
    frozen = llm.load(args.model, args.device, args.dtype)
    frozen.model.requires_grad_(False)
    return policy, frozen, {args.model: frozen}


def main():
    parser = arguments()
    args, checkpoint = parser.parse_args(), None
    begun = args.resume is not None
    try:
        if begun:
            args, checkpoint = resumed(parser, args)
        else:
            settle(args)
        args.device = parallel.start(args.device)
        questions = load_questions(args)
        tools, cache = solve.load_tools(args)
        state = load_state(checkpoint) if checkpoint else None
        if llm.pick_device(args.device).type == "cuda":
            check_memory(args, torch.cuda.mem_get_info(args.device)[0])
        policy, reference, loaded = load_models(args, checkpoint)
        fixed, judge = solve.load_engines(args, loaded, cache)
        named, args.tools = args.tools is not None, list(tools)
        if parallel.RANK == 0:
            if begun:
                write_settings(args, Path(args.out))  # --steps may be new
            else:
                new_folder(args)
        parallel.wait()
    except (ValueError, OSError) as why:
        parser.exit(2, f"train.py: {why}\n")
    if policy.model.device.type == "cuda" if args.gradient_checkpointing is None else args.gradient_checkpointing:
        policy.model.activation_checkpointing_enable()
    say(f"{solve.show_engines(policy, fixed, judge, tools, named)}\nrun     {args.out}")
    try:
        train(args, policy, fixed, reference, tools, judge, *questions, state)
        parallel.wait()  # nobody leaves while another still reads from it
        parallel.stop()  # and not after an error: it might wait for those who wait for us, and torchrun ends them only when we are gone
    except MemoryError as why:
        raise SystemExit(f"train.py: {why}")
    except OSError as why:
        raise SystemExit(f"train.py: could not write to {args.out} ({why}); the last checkpoint is untouched. Free some disk, then --resume.")


if __name__ == "__main__":
    main()
