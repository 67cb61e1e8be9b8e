"""How much accuracy does a toy keep when somebody edits a few words of a prompt?

    python experiments/prompt_edits.py --model toy runs/toy-seed0/best --out prompt-edits.csv
    python experiments/prompt_edits.py --model toy/hops runs/hops-seed0/step-150 --fixed toy/hops

Each constant line of a prompt is one token of the toy's vocabulary, and falls apart into words when it is
edited. The toy has read both in its warm start (toy/pieces.py), but none of these edits. An edit is made in
all prompts that have the text, as it would be in the source, and in those of all modules.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from logbook import endings

endings.without_traceback(__name__)

import torch

import solve
from cli.flags import HOPS, TOY, TOY_TOOLS
from experiments import figures
from models.loading import load_engine
from rewards.questions import read_questions
from tools import TOOLS
from toy.hops.make import load_modules
from world.toolbox import choose

EDITS = {  # name -> (what stands in the prompt, what takes its place)
    "none": ("", ""),
    "planner.PROMPT: its first sentence": (
        "You are the planner of a small team that answers a question step by step. "
        "For each step that you plan, an executor calls one tool.",
        "You are a planning agent. An executor will call exactly one tool for every step that you propose."),
    "planner.PROMPT: a rule reworded": (
        "If a step failed, change the sub-goal or the tool.",
        "Never repeat a failed step: try something different."),
    "planner.PROMPT: a rule added": (
        "- Build on the results in memory.",
        "- Prefer the cheapest tool that is good enough.\n- Build on the results in memory."),
    "planner.ANALYSIS_PROMPT: a line": (
        "- the skills and the tools from the list that may help;",
        "- which abilities and which of the tools could be useful;"),
    "executor.PROMPT: its first line": (
        "Write the call and nothing else: the tool's name with literal arguments,",
        "Reply with the bare call only, i.e. the name of the tool and literal arguments,"),
    "verifier.PROMPT: when to stop": (
        "Say STOP if the results in memory answer every part of the question "
        "and do not contradict each other.",
        "Choose STOP as soon as everything that was asked can be answered from the memory without doubt."),
    "generator.PROMPT: what to rely on": (
        "Rely on the results in its memory.", "Use only what the memory holds and add nothing of your own."),
    "tool description: python_coder": (
        "Runs Python code and returns what it prints.",
        "Executes a Python script and hands back its output."),
    "tool description: wikipedia_search": (
        "Searches Wikipedia and returns the best matching passages.",
        "Looks up Wikipedia articles; gives you the paragraphs that fit best."),
    "tool limits: base_generator": (
        "May hallucinate. Use it for reasoning and general knowledge",
        "Often wrong! Only good for common sense"),
    "memory label: Command": ("\nCommand: ", "\nTool call: "),
    "memory label: Result": ("\nResult: ", "\nOutcome: "),
    "error text: nothing found": ("Error: no passage matches", "Error: the search found nothing for"),
}


class Edited:
    """An engine whose prompts have been edited."""

    def __init__(self, engine, old, new):
        self.engine, self.old, self.new = engine, old, new

    def __call__(self, prompts, **settings):
        edited = [prompt.replace(self.old, self.new) if self.old else prompt for prompt in prompts]
        return self.engine(edited, **settings)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", nargs="+", default=[str(TOY)], help="planners")
    parser.add_argument("--fixed", default=str(TOY), help="the toy that plays the other modules")
    parser.add_argument("--limit", type=int, default=300, help="test questions")
    parser.add_argument("--out", help="CSV file")
    args = parser.parse_args()
    hops = Path(args.fixed).resolve() == HOPS.resolve()
    names = [*TOY_TOOLS, "web_search"] if hops else TOY_TOOLS
    tools = choose(TOOLS, names, Path(args.fixed) / "corpus.jsonl")
    questions = read_questions(Path(args.fixed) / "test.jsonl")[: args.limit]
    modules, rows = load_modules() if hops else {"default": load_engine(args.fixed)}, []
    for name in args.model:
        policy, unedited = load_engine(name), None
        for edit, (old, new) in EDITS.items():
            torch.manual_seed(0)
            fixed = {module: Edited(engine, old, new) for module, engine in modules.items()}
            metrics, _ = solve.evaluate(questions, Edited(policy, old, new), fixed, tools,
                                        max_turns=5 if hops else 2)
            accuracy = metrics["accuracy"]
            unedited = unedited or accuracy
            rows.append({"planner": name, "edit": edit, "questions": len(questions),
                         "accuracy": f"{accuracy:.4f}"})
            print(f"{name}  {edit:38} {accuracy:.3f}, {accuracy / unedited:.2f} of the first", flush=True)
    if args.out:
        figures.write(args.out, rows)


if __name__ == "__main__":
    main()
