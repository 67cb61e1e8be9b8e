"""The model card of a checkpoint: README.md beside the weights, with the facts of the run, ready for a hub.

    write(folder, run)      README.md of one checkpoint, when it is saved
    rewrite(run)            of all checkpoints of a run, when the test after the last step is known

A card is made to be published. Everything in it is a number, a commit, the name of a tool or of a GPU, or a
name that is public already: of a model on the hub, of a named training set, of the toy. Any other name (a
path, the address of a server) appears as "a local folder", "a local file" or "a server". No other text of the
run goes into it, so none can break the YAML at its top either.
"""
import csv
import json
import re
from pathlib import Path

import torch

from benchmarks.training import TRAINING
from rewards.metrics import interval, markdown
from scale import ranks
from world.files import replace_file
from world.services import is_server

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)  # OWNER/NAME or NAME
TAGS = ["agentflow", "flow-grpo", "grpo", "reinforcement-learning", "tool-use"]
SETTINGS = ("lr", "beta", "clip_low", "clip_high", "minibatches", "token_mean", "temperature", "max_turns",
            "max_new_tokens", "dtype", "seed")

INTRODUCTION = """\
The planner of an [AgentFlow](https://arxiv.org/abs/2510.05592) agent: it reads a question, the tools and what
has happened so far, and writes one plan with one tool. It was trained while the whole agent answered
questions, by the code of nano-agentflow, which also runs it:

    python solve.py --model FOLDER_OR_NAME --fixed MODEL_OF_THE_OTHER_MODULES "a question"
"""
WHAT_IT_IS_NOT = """\
* Not a chat model, and not an agent: it writes plans in the format of one agent. That agent's executor,
  verifier, generator and tools are not in it; beside others it may do worse.
* Not the paper's checkpoint, and not a reproduction of the paper's results.
* Not an average: one run, one seed. The intervals (95 %, Wilson's) are those of the number of questions, and
  do not cover what another seed or other questions would change.
* The validation questions chose which step became best/, so the accuracy on them is flattering. Where a
  model grades answers (the judge), it can be wrong.
* Nothing was done for safety. The licence of the base model holds for these weights, too.
"""


def write(folder, run):
    """Write README.md into a checkpoint that has its train.json. run: the folder of args.json, evals.csv."""
    settings, checkpoint = (json.loads(file.read_text(encoding="utf-8"))
                            for file in (Path(run) / "args.json", Path(folder) / "train.json"))
    replace_file(Path(folder) / "README.md",
                 text(settings, evaluations(run), checkpoint["step"], checkpoint.get("hardware")))


def rewrite(run):
    """Write the card of each checkpoint of a run again: evals.csv has more rows now."""
    for file in Path(run).glob("*/train.json") if ranks.RANK == 0 else ():
        write(file.parent, run)


def evaluations(run):
    """The rows of evals.csv as [(step, questions, accuracy, n)]; [] before the first evaluation."""
    path = Path(run) / "evals.csv"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [(int(row["step"]), row["questions"], float(row["accuracy"]), int(row["n"]))
            for row in csv.DictReader(lines)]


def hardware(device):
    """What trains here, for train.json: '8 x NVIDIA H100 80GB HBM3', 'CPU'."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return f"{ranks.WORLD} x {name}" if ranks.WORLD > 1 or device.type == "cuda" else name


def public(name, kind="folder"):
    """A name that may be published: 'Qwen/Qwen2.5-7B-Instruct', 'toy', 'a local folder', 'a server'."""
    if name in (None, "none"):
        return "none"
    if is_server(name):
        model = name.partition("#")[2]
        return f"{model} on a server" if HUB_NAME.fullmatch(model) else "a server"
    if re.fullmatch(r"\./toy(/[a-z]+\.jsonl)?", name):  # nano-agentflow's own
        return name[2:]
    return name if kind == "folder" and HUB_NAME.fullmatch(name) else f"a local {kind}"


def named_sets(data):
    """['nq', 'deepmath'] of 'nq+deepmath'; [] for a file."""
    names = data.split("+")
    return names if set(names) <= TRAINING.keys() else []


def versions(settings):
    """The commit of the code that made the run; if it was resumed with other code, each of them."""
    for record in settings.get("code", []):
        after = f" (after step {int(record['after step'])})" if record["after step"] else ""
        yield (record["commit"] or "no known commit") + after


def front_matter(settings):
    """The YAML at the top. JSON is YAML, and a JSON string ends where it should."""
    facts = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": TAGS}
    if HUB_NAME.fullmatch(settings["model"]):
        facts |= {"base_model": settings["model"], "base_model_relation": "finetune"}
    if names := named_sets(settings["data"]):
        facts["datasets"] = [TRAINING[name][0] for name in names]
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in facts.items())


def accuracies(rows, step):
    """Each evaluation that concerns this checkpoint, and the sentence of what training changed."""
    rows = {(questions, of_step): (accuracy, n) for of_step, questions, accuracy, n in rows
            if questions in ("test", "valid") and (of_step in (0, step) or questions == "test")}
    lines, sentences = [["questions", "weights", "accuracy", "95 % interval", "n"]], []
    for (questions, of_step), (accuracy, n) in rows.items():
        whose = {0: "untrained", step: "these"}.get(of_step, "NOT these, but those of the last step")
        lines.append([questions, f"{whose} (step {of_step})", *shown(accuracy, n).split(" ", 1), str(n)])
        if of_step == step > 0 and (questions, 0) in rows:
            before = shown(*rows[questions, 0])
            sentences.append(f"**{questions}, {n} questions: {before} before → {shown(accuracy, n)} after "
                             f"step {step}.**\n\n")
    return "".join(sentences) + (markdown(lines) if rows else "It was not evaluated.")


def shown(accuracy, n):
    """'0.340 [0.29, 0.40]'"""
    low, high = interval(accuracy, n)
    return f"{accuracy:.3f} [{low:.2f}, {high:.2f}]"


def made(settings, step, machine):
    """{fact: value} of how the checkpoint was made."""
    data, sets, lora = settings["data"], named_sets(settings["data"]), settings["lora"]
    limit = settings["limit"] or (1000 if sets else None)
    others = {module: public(settings[module]) for module in ("executor", "verifier", "generator")}
    return {
        "base model": public(settings["model"]),
        "trained": f"adapters of rank {lora}, merged into these weights" if lora else "all weights",
        "steps": f"{step} of {settings['steps']}, each of {settings['questions']} questions x "
                 f"{settings['group_size']} rollouts",
        "training questions": ("+".join(sets) or public(data, "file"))
        + (f", at most {limit}" if limit else ""),
        "validation questions": public(settings["valid"], "file") if settings["valid"]
        else "some of the training questions, held out",
        "test questions": public(settings["test"], "file"),
        "other modules": public(settings["fixed"]),
        **{module: name for module, name in others.items() if name != "none"},
        "judge": public(settings["judge"]),
        "tools": ", ".join(tool for tool in settings["tools"] if re.fullmatch(r"\w+", tool, re.ASCII)),
        "hardware": re.sub(r"[^\w .()/+-]", "", machine or "", flags=re.ASCII) or "not recorded",
        "code": "; ".join(versions(settings)) or "not recorded",
        "settings": ", ".join(f"{name} {settings[name]}" for name in SETTINGS
                              if re.fullmatch(r"[\w.+-]+", str(settings[name]), re.ASCII))}


def text(settings, rows, step, machine):
    """The card. settings: of args.json; rows: evaluations(); machine: of train.json; None: not recorded."""
    facts = "".join(f"* {name}: {value}\n" for name, value in made(settings, step, machine).items())
    return (f"---\n{front_matter(settings)}---\n"
            f"# A planner trained with Flow-GRPO, step {step}\n\n{INTRODUCTION}\n"
            f"## Accuracy\n\n{accuracies(rows, step)}\n\n"
            f"## How it was made\n\n{facts}\n"
            f"## What it is not\n\n{WHAT_IT_IS_NOT}")
