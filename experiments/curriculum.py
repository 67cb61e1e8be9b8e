"""SmolLM2 in the toy's own task: three turns and all nine kinds of question, in three stages.

    pip install gguf accelerate peft
    python experiments/pretrained.py warm --dtype bfloat16
    python experiments/curriculum.py --dtype bfloat16 --seeds 1        again: goes on

A stage begins with the planner of the one before it, which is its π_ref, too:

    stage   questions (a path each)        turns   what is learnt there
    two     lead to a page (wb) or a       2       that wikipedia_search comes first; it ends while
            calculation (wp)                       the second turn still tries each tool
    four    or to a search that finds      3       which tool each result calls for; it ends when
            nothing (wg), or to a page             most rollouts are right
            that names a name (wbw)
    all     the toy's                      3       longer paths, such as wbp and wg+

Each order avoids what went wrong with another. All paths at once: base_generator, asked in the
first turn, is right where a search finds nothing, and the planner asks for nothing else. A long
stage without a path: the tool that only this path needs is no longer tried there, and what is not
tried is not learnt. At temperature 1 instead of 0.7, more is tried."""

import argparse
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments import pretrained
from experiments.pretrained import RECIPE, flags_of, folder_of, go_on, solved
from experiments.study import curve_of, put, refuse_mixed
from flow_grpo import distribution
from models import local
from record.flags import TOY
from record.folder import rows_of
from toy.make import public, write_rows
from toy.questions import World
from world.mistakes import Mistake

# {name: (paths of its questions, or "" for the toy's; how many; turns; steps: at least, at most;
# flags that differ from the recipe's)}
STAGES = {
    "two": ("wb wp", 300, 2, (20, 20), ""),
    "four": (
        "wb wp wg wbw",
        300,
        3,
        (20, 60),
        "--questions 8 --minibatches 2 --lr 3e-4 --temperature 1.0",
    ),
    "all": ("", 0, 3, (30, 30), "--questions 8 --minibatches 2 --lr 4e-4 --beta 0.05"),
}
BLOCK, ENOUGH = 5, 0.8  # a stage ends after a block of steps with this mean reward
TESTED = 150  # of the toy's test questions


def train(stage, start, out, seed, args):
    """Train the planner in the folder `start`, as far as it is not done; the folder of the new
    planner, with its adapters merged."""
    kinds, number, turns, (steps, most), flags = STAGES[stage]
    whole, beside = out / "whole", out / "whole-part"
    script, data = [ROOT / "train.py"], f"{TOY}/train.jsonl"
    if kinds:  # as many questions of each kind in a step
        script, data = [pretrained.__file__, "train"], args.folder / f"{stage}.jsonl"
        rows = World().questions(number, "train", seed=5, paths=dict.fromkeys(kinds.split(), 1))
        write_rows(data, public(rows))
    new = [*RECIPE, *flags.split(), *flags_of(args), "--max-turns", turns, "--model", start]
    new += ["--data", data, "--valid", "none", "--seed", seed]
    go_on(script, new, steps, out)
    while steps < most and reward(out, steps) < ENOUGH:
        steps += BLOCK
        go_on(script, new, steps, out)
    if not whole.exists():
        engine = local.load(str(out / f"step-{steps}"), distribution, args.device, args.dtype)
        local.save(engine.model.merge_and_unload(), engine.tokenizer, beside)
        beside.rename(whole)
    return whole


def reward(out, steps):
    """The mean reward of the last block of so many steps. (log.csv has more of them if the command
    was killed, and begins again with the first block.)"""
    rows = rows_of(out / "log.csv")[steps - BLOCK : steps]
    return fmean(float(row["reward"]) for row in rows)


def tested(planner, model, out, args):
    """The rows of a planner: of each kind of question, how many it gets right in three turns."""
    how = ["--data", f"{TOY}/test.jsonl", "--limit", TESTED, *flags_of(args), "--max-turns", 3]
    rollouts = solved(out, "--model", model, *how)
    asked = Counter(rollout.kind for rollout in rollouts)
    right = Counter(rollout.kind for rollout in rollouts if rollout.right)
    row = {"model": args.folder.name, "planner": planner}
    return [row | {"kind": kind, "n": n, "right": right[kind]} for kind, n in asked.items()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", default="smollm2", help="one that pretrained.py has warm-started")
    add("--seeds", type=int, default=1, help="(default: 1)")
    add("--device", help="cuda, mps or cpu (default: cuda if there is one, else cpu)")
    add("--dtype", help="float32 or bfloat16 (default: bfloat16 on cuda, float32 elsewhere)")
    args = parser.parse_args()
    args.folder = folder = folder_of(args.model)
    if not (folder / "warm").exists():
        raise Mistake(f"first run pretrained.py warm --model {args.model}")
    after = [f"seed {s}, after the stage {name}" for s in range(args.seeds) for name in STAGES]
    refuse_mixed("curriculum", folder.name, ["warm-started", *after])
    rows, logs = tested("warm-started", folder / "warm", folder / "three-turns-warm", args), []
    for seed in range(args.seeds):
        model = folder / "warm"
        for stage in STAGES:
            out = folder / f"curriculum{seed}" / stage
            model = train(stage, model, out, seed, args)
            logs += curve_of(f"{folder.name}-{stage}, seed {seed}", out / "log.csv")
            if stage != "two":
                name = f"seed {seed}, after the stage {stage}"
                rows += tested(name, model, out.with_name(f"test-{stage}"), args)
    put("curriculum", ["model", "planner"], rows)
    put("pretrained-log", ["run"], logs)


if __name__ == "__main__":
    try:
        main()
    except Mistake as why:
        raise SystemExit(f"curriculum.py: {why}") from None
