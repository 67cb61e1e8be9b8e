"""SmolLM2 in the toy's own task: three turns and all nine kinds of question, in three stages.

    pip install gguf accelerate peft
    python experiments/pretrained.py warm --dtype bfloat16
    python experiments/curriculum.py --dtype bfloat16 --seeds 1        again: goes on

A stage begins with the planner of the one before it, which is its π_ref, too:

    stage   questions                      turns   what is learnt there
    two     lead to a page or a            2       that wikipedia_search comes first; it ends while
            calculation                            the second turn still tries each tool
    three   or to a search that finds      2       which tool the result calls for, base_generator
            nothing                                among them
    all     the toy's                      3       chains of three calls

Each order avoids what went wrong with another. All kinds at once: base_generator, asked in the
first turn, is right where a search finds nothing, and the planner asks for nothing else. Two kinds
to the end: they never need base_generator, so it is no longer tried, and what is not tried is not
learnt."""

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments import pretrained
from experiments.pretrained import RECIPE, flags_of, folder_of, go_on, solved
from experiments.study import curve_of, put, refuse_mixed
from flow_grpo import distribution
from models import local
from record.flags import TOY
from toy.make import public, write_rows
from toy.questions import World
from world.mistakes import Mistake

STAGES = {  # {name: (kinds of question or "", the toy's; how many; turns; steps; not the recipe's)}
    "two": ("wb wp", 300, 2, 20, ""),
    "three": ("wb wp wg", 298, 2, 40, "--questions 6 --lr 3e-4"),
    "all": ("", 0, 3, 30, "--questions 8 --minibatches 2 --lr 4e-4 --beta 0.05"),
}
TESTED = 150  # of the toy's test questions


def train(stage, start, out, seed, args):
    """Train the planner in the folder `start`, as far as it is not done; the folder of the new
    planner, with its adapters merged."""
    kinds, number, turns, steps, flags = STAGES[stage]
    whole, beside = out / "whole", out / "whole-part"
    script, data = [ROOT / "train.py"], f"{TOY}/train.jsonl"
    if kinds:  # as many questions of each kind in a step
        script, data = [pretrained.__file__, "train"], args.folder / f"{stage}.jsonl"
        rows = World().questions(number, "train", seed=5, paths=dict.fromkeys(kinds.split(), 1))
        write_rows(data, public(rows))
    new = [*RECIPE, *flags.split(), *flags_of(args), "--max-turns", turns, "--model", start]
    new += ["--data", data, "--valid", "none", "--seed", seed]
    go_on(script, new, steps, out)
    if not whole.exists():
        engine = local.load(str(out / f"step-{steps}"), distribution, args.device, args.dtype)
        local.save(engine.model.merge_and_unload(), engine.tokenizer, beside)
        beside.rename(whole)
    return whole


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
    add("--device", help="cuda, mps or cpu (default: the first there is)")
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
