"""How much accuracy does the toy keep when a few words of a prompt are edited?

    python experiments/prompt_edits.py --model toy runs/toy-seed0/best --out edits.csv

Each constant line of a prompt is one token for the toy, and falls apart into words when it is
edited. The toy has read edited lines in its warm start, but none of these. An edit is made for all
modules, as it would be in the source."""

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import solve
from benchmarks.questions import read_questions
from record.flags import TOY
from record.metrics import summary

EDITS = {  # name: (what is in the prompts, what takes its place)
    "none": ("", ""),
    "planner: its first sentence": (
        "You are the planner of a small team that answers a question step by step.",
        "You are a planning agent. Help to answer this question.",
    ),
    "planner: a rule reworded": (
        "If a step failed, change the sub-goal or the tool.",
        "Never repeat a failed step: try something different.",
    ),
    "planner: a rule added": (
        "- Build on the results in memory.",
        "- Prefer the cheapest tool that is good enough.\n- Build on the results in memory.",
    ),
    "planner: its last line": ("\nNext step:\n", "\nPlan of the next step:\n"),
    "analysis: a line": (
        "- the skills and the tools from the list that may help;",
        "- which abilities and which of the tools could be useful;",
    ),
    "executor: its first line": (
        "Write the call and nothing else: the tool's name with literal arguments,",
        "Reply with the bare call only, i.e. the name of the tool and literal arguments,",
    ),
    "verifier: when to stop": (
        "Say STOP if the results in memory answer every part of the question",
        "Choose STOP as soon as everything that was asked can be answered from the memory",
    ),
    "generator: what to rely on": (
        "Rely on the results in its memory.",
        "Use only what the memory holds and add nothing of your own.",
    ),
    "description of python_coder": (
        "Runs Python code and returns what it prints.",
        "Executes a Python script and hands back its output.",
    ),
    "description of wikipedia_search": (
        "Searches Wikipedia and returns the best matching passages.",
        "Looks up Wikipedia articles; gives you the paragraphs that fit best.",
    ),
    "description of web_search": (
        "Reads one public web page and returns the passages nearest to a query.",
        "Opens a page of the web and quotes what it says about a query.",
    ),
    "limits of base_generator": (
        "May hallucinate. Use it for reasoning and general knowledge",
        "Often wrong! Only good for common sense",
    ),
    "memory label Command": ("\nCommand: ", "\nTool call: "),
    "memory label Result": ("\nResult: ", "\nOutcome: "),
    "error of wikipedia_search": (
        "Error: no passage matches",
        "Error: the search found nothing for",
    ),
}


class Edited:
    """An engine that reads edited prompts. found: was there anything to edit?"""

    def __init__(self, engine, old, new):
        self.engine, self.old, self.new, self.found = engine, old, new, False

    def __call__(self, prompts, **how):
        self.found |= any(self.old in prompt for prompt in prompts)
        return self.engine([prompt.replace(self.old, self.new) for prompt in prompts], **how)


def accuracy(questions, policy, fixed, tools, old, new):
    """The accuracy with one edit. ValueError if no prompt has its text."""
    torch.manual_seed(0)
    edited = {name: Edited(engine, old, new) for name, engine in fixed.items()}
    planner = Edited(policy, old, new)
    rollouts = solve.roll_out(questions, planner, edited, tools, max_turns=3)
    if not any(engine.found for engine in [planner, *edited.values()]):
        raise ValueError(f"no prompt has the text {old!r}: the code has changed")
    return summary(rollouts)["accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", default=[TOY], help="planners")
    parser.add_argument("--data", default=f"{TOY}/test.jsonl", help="questions")
    parser.add_argument("--limit", type=int, help="only the first so many")
    parser.add_argument("--out", required=True, help="CSV file")
    args = parser.parse_args()
    questions, loaded = read_questions(args.data)[: args.limit], {}
    with open(args.out, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["planner", "edit", "questions", "accuracy"])
        for name in args.model:
            flags = solve.flags(["--model", name, "--fixed", TOY, "--judge", "none"])
            policy = solve.engine_of(name, flags, loaded)
            tools, cache = solve.load_tools(flags)
            fixed, _ = solve.load_cast(flags, loaded, tools, cache, say=lambda *_: None)
            for edit, (old, new) in EDITS.items():
                share = accuracy(questions, policy, fixed, tools, old, new)
                table.writerow([name, edit, len(questions), f"{share:.4f}"])
                print(f"{name}  {edit:34} {share:.3f}", flush=True)


if __name__ == "__main__":
    main()
