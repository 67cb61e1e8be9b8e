"""Does the toy's world need a planner? Rules in its place pick the tool, with everything else perfect.

    python toy/routers.py                  a minute
    python toy/routers.py --out routers.csv

A router picks the tool of each plan without reading any result:

    frequent   the tool that a perfect planner uses most often
    bm25       the tool whose description is nearest to the sub-goal, by bm25
    sub-goal   the tool that is most often right after the sub-goal's first three words
    question   the tool that is most often right for the question's first three words
    sequence   for each kind of question the sequence of tools, one for each turn, that is right most often
    table      for each kind of question, turn and sub-goal the tool, so that most questions are right

A kind of question is what can be read off its text: an atomic number or a calling code, with an operation or
without. A sub-goal is one of three: the name in the question, another name, the operation at the end. One more rule
reads what the routers do not:

    result     the tool that is most often right after a last result of this kind: a number, an address, ...

The rest of each plan is that of a perfect planner, which reads the memory. So these rules are stronger than a real
router. All of them are fitted to the training questions, and measured on the test questions.
"""

import argparse
import csv
import itertools
import re
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import planner
import solve
from tools import TOOLS
from toy.make import MAX_TURNS, TOY, quick_python
from toy.questions import World, for_flow, splits
from toy.teacher import TOOLS as TOY_TOOLS
from toy.teacher import Known, Teacher
from world.ranking import ranked, words_of
from world.toolbox import choose

LETTERS = {"w": "wikipedia_search", "b": "web_search", "p": "python_coder", "g": "base_generator"}
GOALS = "name", "other name", "operation"
# (turn, goal) that a perfect planner can reach in MAX_TURNS turns
PLACES = [(1, "name"), (2, "name"), (2, "operation"), *((3, goal) for goal in GOALS)]
ROUTERS = "frequent", "bm25", "sub-goal", "question", "sequence", "table"


def finishes(path, tool_at):
    """Do the tools of tool_at(turn, goal) answer a question of this path, if everything else is perfect?

    A wrong tool costs a turn. Two of them do more: base_generator makes a number up, which the verifier believes; and
    a search shows again what it has shown, so what was read since must be read again.
    """
    steps, done = path.replace("+", "p"), 0
    for turn in range(1, MAX_TURNS + 1):
        goal = goal_at(path, done)
        letter = tool_at(turn, goal)
        if letter == "g" and path.startswith("wg") and goal == "name":
            done = 2
        elif letter == steps[done]:
            done += 1
        elif letter == "g":
            return False
        elif letter == "w" and goal != "operation":
            done = steps.rfind("w", 0, done) + 1
        if done == len(steps):
            return True
    return False


def goal_at(path, done):
    """What a perfect planner looks for after so many steps of a path: one of GOALS."""
    if path[done] == "+":
        return "operation"
    return "other name" if "bw" in path[: done + 1] else "name"


def best(paths, places):
    """{place: letter}: of all such tables, the one that is right for most of these paths. {path: how many}."""
    tables = (dict(zip(places, letters)) for letters in itertools.product(LETTERS, repeat=len(places)))
    turns_only = places == list(range(1, MAX_TURNS + 1))
    tool_at = lambda table: lambda turn, goal: table[turn] if turns_only else table.get((turn, goal), "w")
    return max(tables, key=lambda table: sum(n for path, n in paths.items() if finishes(path, tool_at(table))))


class Routed:
    """An engine for the planner: another engine's plans, with the tool that rule(prompt, plan) picks."""

    def __init__(self, engine, tools, rule):
        self.engine, self.tools, self.rule = engine, tools, rule

    def __call__(self, prompts, **settings):
        completions = []
        for prompt, completion in zip(prompts, self.engine(prompts, **settings)):
            plan = planner.parse(completion.text, self.tools)
            tool = self.rule(prompt, plan)
            text = f"Context: {plan.context}\nSub-goal: {plan.sub_goal}\nTool: {tool}"
            completions.append(replace(completion, text=text))
        return completions


def seen(prompt, plan):
    """{rule: what it looks at} in a planner's prompt and a perfect plan."""
    question = re.search(r"\nQuestion: (.*)\n", prompt)[1]
    turn = len(re.findall(r"^Step \d+$", prompt.split("\nMemory:\n")[1], re.MULTILINE)) + 1
    operation = re.search(r" (plus|minus|times) ", plan.sub_goal)
    name = plan.sub_goal.split(" of ")[1]
    goal = "operation" if operation else "name" if re.search(rf"\b{name}\b", question) else "other name"
    return {"frequent": (), "sub-goal": tuple(words_of(plan.sub_goal)[:3]), "question": tuple(words_of(question)[:3]),
            "sequence": (kind_of(question), turn), "table": (kind_of(question), turn, goal),
            "result": Known(prompt).last if turn > 1 else ""}  # fmt: skip


def kind_of(question):
    return "number" if "number" in question else "code", bool(re.search(r" (plus|minus|times|[-+*]) ", question))


def rules(train, tools, counts):
    """{name: rule(prompt, plan)}. counts[name][what it looks at][tool]: how often a perfect planner uses it."""

    def most_frequent(name):
        return lambda prompt, plan: max(counts[name].get(seen(prompt, plan)[name], counts["frequent"][()]).items(),
                                        key=lambda pair: pair[1])[0]  # fmt: skip

    def nearest(prompt, plan):
        described = [(planner.describe(name, tool),) for name, tool in tools.items()]
        return list(tools)[(ranked(described, plan.sub_goal, 1) or [0])[0]]

    paths = defaultdict(Counter)
    for row in train:
        paths[kind_of(row["question"])][row["kind"]] += 1
    turns = list(range(1, MAX_TURNS + 1))
    letters = {"sequence": {(kind, turn): letter for kind in paths for turn, letter in best(paths[kind], turns).items()},
               "table": {(kind, *place): letter for kind in paths for place, letter in best(paths[kind], PLACES).items()}}  # fmt: skip

    def fitted(name):
        return lambda prompt, plan: LETTERS[letters[name].get(seen(prompt, plan)[name], "w")]

    made = {name: most_frequent(name) for name in ("frequent", "sub-goal", "question", "result")}
    return made | {"bm25": nearest, "sequence": fitted("sequence"), "table": fitted("table")}


def measure():
    """{rule: accuracy} on the test questions, "perfect" for a perfect planner."""
    tools, world = choose(TOOLS, list(TOY_TOOLS), TOY / "corpus.jsonl"), World()
    tools["python_coder"] = replace(tools["python_coder"], run=quick_python)
    made, known, counts = splits(world), world.known(), defaultdict(lambda: defaultdict(Counter))

    def count(prompt, plan):
        for name, key in seen(prompt, plan).items():
            counts[name][key][plan.tool] += 1
        return plan.tool

    teacher = Teacher(made["train"], known)
    solve.roll_out(for_flow(made["train"]), Routed(teacher, tools, count), teacher, tools, MAX_TURNS)
    fitted = rules(made["train"], tools, counts)
    perfect = {"perfect": lambda prompt, plan: plan.tool}
    teacher, accuracies = Teacher(made["test"], known), {}
    for name, rule in (perfect | {name: fitted[name] for name in (*ROUTERS, "result")}).items():
        metrics, _ = solve.evaluate(
            for_flow(made["test"]), Routed(teacher, tools, rule), teacher, tools, max_turns=MAX_TURNS
        )
        accuracies[name] = metrics["accuracy"]
        print(f"{name:10} {metrics['accuracy']:.3f}", flush=True)
    return accuracies


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="CSV file with a row for each rule")
    args = parser.parse_args()
    accuracies = measure()
    if args.out:
        with open(args.out, "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["rule", "accuracy"])
            rows.writerows((name, f"{accuracy:.4f}") for name, accuracy in accuracies.items())


if __name__ == "__main__":
    main()
