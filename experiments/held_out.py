"""Answer the held-out sets of wordings.py with one planner and one model for all other modules.

    python experiments/held_out.py --model runs/warm/best --fixed toy --out runs/answers
    python experiments/held_out.py --model perfect --fixed runs/warm/best --out runs/perfect
    python experiments/held_out.py --model runs/warm/best --route bm25 --sets toy free --out runs/routed

Each set becomes a JSONL of whole rollouts in --out. The same command goes on after a kill. A planner may be
a model, "perfect" (the teacher with the right tools), or a model whose tools a router picks (router.py).
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from logbook import endings

endings.without_traceback(__name__)

import torch

import solve
from cli.command_line import TOY, TOY_TOOLS, is_toy
from cli.progress import Progress
from experiments import wordings
from experiments.router import ROUTES, router
from logbook.records import Trial
from models.completion import Cached
from rewards.metrics import accuracy_line, summary
from scale import adapters
from tools import toolbox
from toy.questions import for_flow, splits
from world.services import Cache

FREE = ROOT / "experiments" / "freely.jsonl"


def freely():
    """The questions of freely.jsonl, with their steps."""
    return [json.loads(line) for line in FREE.read_text(encoding="utf-8").splitlines()]


def made_of(name):
    """The questions of one of wordings.SETS, with their steps."""
    if name == "toy":
        return splits()["test"]
    return {"free": freely, "facts": wordings.facts, "numbers": wordings.numbers}[name]()


def planner_for(args, engine, tools, made):
    """The engine that plans: a model, the perfect teacher of the questions `made`, or a routed model."""
    teacher = wordings.teacher_for("planner" if is_toy(args.fixed) else "all")
    if args.model == "perfect":
        return teacher(made)
    if args.route == "none":
        return engine
    training = wordings.training(1000, 0)
    return router(args.route, engine, tools, training, teacher(training))


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    add = parser.add_argument
    add("--model", required=True, help='the planner: a folder, a hub name, or "perfect"')
    add("--fixed", default=str(TOY), help="the model of all other modules")
    add("--route", choices=["none", *ROUTES], default="none", help="what picks the tools; none: the planner")
    add("--sets", nargs="+", choices=wordings.SETS, default=wordings.SETS, help="sets of questions")
    add("--limit", type=int, help="questions of each set at most")
    add("--max-turns", type=int, default=2, help="turns of a rollout at most")
    add("--max-new-tokens", type=int, default=80, help="longest completion of a module")
    add("--temperature", type=float, default=0.7, help="of the planner's sampling")
    add("--batch", type=int, default=64, help="questions in lock-step")
    add("--cache", help="SQLite file of what the fixed modules answered: other planners ask much the same")
    add("--seed", type=int, default=0, help="decides what is sampled")
    add("--device", help="cuda, mps or cpu; None: the first there is")
    add("--dtype", help="float32, bfloat16, ...; None: bfloat16 on cuda, float32 elsewhere")
    add("--out", type=Path, required=True, help="the run's folder")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tools, loaded = toolbox(TOY_TOOLS, TOY / "corpus.jsonl"), {}
    for name in {args.fixed, args.model} - {"perfect"}:
        loaded[name] = adapters.load(name, args.device, args.dtype)
    fixed = Cached(loaded[args.fixed], Cache(args.cache)) if args.cache else loaded[args.fixed]
    rollout = {name: getattr(args, name) for name in ("max_turns", "max_new_tokens", "temperature")}
    for name in args.sets:
        made = made_of(name)[: args.limit]
        policy = planner_for(args, loaded.get(args.model), tools, made)

        trial = Trial(name, for_flow(made), args.batch, args.seed, args.out / f"{name}.jsonl")
        trial.resume()
        with Progress(len(made), name, len(trial.rollouts)) as progress:
            for seed, questions in trial.batches():
                torch.manual_seed(seed)
                rollouts = solve.evaluate(questions, policy, fixed, tools, watch=progress, **rollout)[1]
                if trial.add(rollouts):
                    progress.next_batch(trial.rollouts)
        print(f"{name}: {accuracy_line(summary(trial.rollouts), len(made))}", flush=True)


if __name__ == "__main__":
    main()
