"""Does the toy's world need a planner? Rules in its place pick the tool, with everything else
perfect.

    python toy/routers.py
    python toy/routers.py --out routers.csv

A router picks the tool of each plan without reading any result:

    frequent   the tool that a perfect planner uses most often
    bm25       the tool whose description is nearest to the sub-goal, by bm25
    sub-goal   the tool that is most often right after the sub-goal's first three words
    question   the tool that is most often right for the question's first three words
    sequence   for each kind of question the sequence of tools, one a turn, that is right most often
    table      for each kind of question, turn and sub-goal the tool: the best of all such tables

A kind of question is what can be read off its text: an atomic number or a calling code, with an
operation or without. A sub-goal is one of three: the name in the question, another name, the
operation at the end. One more rule reads what the routers do not:

    result     the tool that is most often right after such a last result: a number, an address ...

The rest of each plan is that of a perfect planner, which reads the memory. So these rules are
stronger than a real router. All of them are fitted to the training questions, and measured on the
test questions."""

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
from record.metrics import share
from tools import choose
from toy.make import TOY, quick_python
from toy.questions import World, for_flow, splits
from toy.teacher import TOOLS as TOY_TOOLS
from toy.teacher import Known, Teacher
from world.search import ranked, words_of

LETTERS = {"w": "wikipedia_search", "b": "web_search", "p": "python_coder", "g": "base_generator"}
TURNS = [1, 2, 3]
PLACES = [(1, "name"), (2, "name"), (2, "operation")]
PLACES += [(3, goal) for goal in ("name", "other name", "operation")]


def finishes(path, tool_at):
    """Do the tools of tool_at(turn, goal) answer a question of this path, if everything else is
    perfect?

    A wrong tool costs a turn. Two of them do more: base_generator makes a number up, which the
    verifier believes; and a search shows again what it has shown, so what was read since must be
    read again."""
    steps, done = path.replace("+", "p"), 0
    for turn in TURNS:
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
    """What a perfect planner looks for after so many steps of a path."""
    if path[done] == "+":
        return "operation"
    return "other name" if "bw" in path[: done + 1] else "name"


def best(paths, places):
    """{place: letter}: the table that is right most often. paths: {path: how many}."""
    rows = itertools.product(LETTERS, repeat=len(places))
    tables = [dict(zip(places, row, strict=True)) for row in rows]
    by_turn = places == TURNS

    def right(table):
        tool_at = lambda turn, goal: table[turn] if by_turn else table[turn, goal]
        return sum(n for path, n in paths.items() if finishes(path, tool_at))

    return max(tables, key=right)


class Routed:
    """An engine for the planner: another's plans, with the tool that rule(prompt, plan) picks."""

    def __init__(self, engine, tools, rule):
        self.engine, self.tools, self.rule = engine, tools, rule

    def __call__(self, prompts, **settings):
        completions = self.engine(prompts, **settings)
        plans = [planner.parse(completion.text, self.tools) for completion in completions]
        texts = [
            f"Context: {plan.context}\nSub-goal: {plan.sub_goal}\nTool: {self.rule(prompt, plan)}"
            for prompt, plan in zip(prompts, plans, strict=True)
        ]
        return [replace(c, text=text) for c, text in zip(completions, texts, strict=True)]


def kind_of(question):
    return "number" in question, bool(re.search(r" (plus|minus|times|[-+*]) ", question))


def seen(prompt, plan):
    """{rule: what it looks at} in a planner's prompt and a perfect plan."""
    question = re.search(r"\nQuestion: (.*)\n", prompt)[1]
    turn = len(re.findall(r"^Step \d+$", prompt.split("\nMemory:\n")[1], re.MULTILINE)) + 1
    goal = "name" if plan.sub_goal.split(" of ")[1] in question else "other name"
    goal = "operation" if re.search(" (plus|minus|times) ", plan.sub_goal) else goal
    openings = {"sub-goal": plan.sub_goal, "question": question}
    looked_at = {name: tuple(words_of(text)[:3]) for name, text in openings.items()}
    looked_at |= {"frequent": (), "result": Known(prompt).last if turn > 1 else ""}
    kind = kind_of(question)
    return looked_at | {"sequence": (kind, turn), "table": (kind, turn, goal)}


def rules(train, tools, counts):
    """{name: rule(prompt, plan)}. counts[name][what it sees][tool]: a perfect planner's choices."""
    paths, tables = defaultdict(Counter), {"sequence": {}, "table": {}}
    for row in train:
        paths[kind_of(row["question"])][row["kind"]] += 1
    for kind, some in paths.items():
        by_turn, by_place = best(some, TURNS), best(some, PLACES)
        tables["sequence"] |= {(kind, turn): tool for turn, tool in by_turn.items()}
        tables["table"] |= {(kind, *place): tool for place, tool in by_place.items()}

    def frequent(name):
        usual = counts["frequent"][()]
        return lambda *state: counts[name].get(seen(*state)[name], usual).most_common(1)[0][0]

    def fitted(name):
        return lambda *state: LETTERS[tables[name].get(seen(*state)[name], "w")]

    def nearest(prompt, plan):
        described = [planner.describe(name, tool) for name, tool in tools.items()]
        return list(tools)[ranked(described, plan.sub_goal, 1)[0]]

    return {
        "perfect": lambda prompt, plan: plan.tool,
        "frequent": frequent("frequent"),
        "bm25": nearest,
        "sub-goal": frequent("sub-goal"),
        "question": frequent("question"),
        "sequence": fitted("sequence"),
        "table": fitted("table"),
        "result": frequent("result"),
    }


def measure():
    """{rule: accuracy} on the test questions, "perfect" for a perfect planner."""
    tools, world = choose(list(TOY_TOOLS), TOY / "corpus.jsonl"), World()
    tools["python_coder"] = replace(tools["python_coder"], run=quick_python)
    made, counts, accuracies = splits(world), defaultdict(lambda: defaultdict(Counter)), {}

    def count(prompt, plan):
        for name, key in seen(prompt, plan).items():
            counts[name][key][plan.tool] += 1
        return plan.tool

    def accuracy(questions, rule):
        teacher = Teacher(questions, world.known())
        engine = Routed(teacher, tools, rule)
        rollouts = solve.roll_out(for_flow(questions), engine, teacher, tools, max_turns=3)
        return share(rollout.right for rollout in rollouts)

    accuracy(made["train"], count)
    for name, rule in rules(made["train"], tools, counts).items():
        accuracies[name] = accuracy(made["test"], rule)
        print(f"{name:10} {accuracies[name]:.3f}", flush=True)
    return accuracies


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="CSV file with a row for each rule")
    args = parser.parse_args()
    accuracies = measure()
    if args.out:
        with open(args.out, "w", newline="") as file:
            csv.writer(file).writerows([("rule", "accuracy"), *accuracies.items()])


if __name__ == "__main__":
    main()
