"""The second toy: does a planner beat every router? Its questions, with rules in the place of the planner.

    python experiments/hops.py                        routers with perfect sub-goals: a minute
    python experiments/hops.py --planner toy/hops --seed 1      the same tools in this planner's plans

A router picks the tool of each plan without reading the memory:

    frequent   the tool that a perfect planner uses most often
    bm25       the tool whose description is nearest to the sub-goal, by bm25
    sub-goal   the tool that is most often right after the sub-goal's first three words
    question   the tool that is most often right for the question's first three words
    sequence   for each kind of question the sequence of tools, one for each turn, that is right most often
    plan       a tool for each kind of question, turn and sub-goal (the first thing, the second, a new name,
               the sum), so that as many training questions as possible are right

Two rules read the memory, and so are no routers. They tell what can be had by the choice of the tool alone:

    context    the tool that is most often right for such a context: an address, a calculation, or none (the
               context line repeats what the last result said)
    result     the tool that is most often right after a last result that shows such a thing (an address, a
               product, ...: planning.SITUATIONS), and for such a sub-goal (a sum, or not)

Justification, context and sub-goal are those of a perfect planner, which reads the memory. So these routers
are stronger than a router can be: without a planner nobody tells them what to look for. All tables count a
perfect planner's tools on the 2 000 training questions. With --planner, a model writes the plans, and only
their tools are replaced.
"""

import argparse
import itertools
import random
import re
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import planner
import solve
import tools as toolset
from experiments import figures
from experiments.planning import situation
from models.loading import load_engine
from rewards.metrics import accuracy_line
from toy.hops.make import HOPS, load_modules, quick_python
from toy.hops.questions import KINDS, MAX_TURNS, World, for_flow, splits
from toy.hops.teacher import GOAL, STEP, TOOLS, Teacher
from world.ranking import ranked, words_of
from world.toolbox import choose

LETTERS = {"w": "wikipedia_search", "b": "web_search", "p": "python_coder", "g": "base_generator"}
ROUTERS = ("frequent", "bm25", "sub-goal", "question", "sequence", "plan")
ROUTES = ("none", *ROUTERS, "context", "result")
GOALS = ("first", "second", "new", "sum")  # what a sub-goal asks for
RESTARTS = 20  # of the search for the table of "plan"


def needed(question):
    """The tools that a perfect planner uses, as letters: for each name, and for the sum: ("wbp", "p")."""
    return (*question["paths"], *("p" * (question["kind"] != "one")))


def finishes(paths, tool_at):
    """Do the tools that tool_at(turn, goal) picks find the number, if all else in the plans is perfect?

    A tool that does not fit costs a turn. Two of them do more: base_generator makes a number up, which the
    verifier believes; and a search shows again what it has shown, so what was read since must be read again.
    """
    left, step = list(paths), 0  # step: of left[0]
    for turn in range(MAX_TURNS):
        letter = tool_at(turn, goal_at(left[0], step, first=len(left) == len(paths)))
        if letter == left[0][step]:
            step += 1
        elif letter == "g":
            return False
        elif letter == "w":
            step = left[0].rfind("w", 0, step) + 1
        if step == len(left[0]):
            left, step = left[1:], 0
        if not left:
            return True
    return False


def goal_at(path, step, first):
    """What a perfect planner's sub-goal asks for: one of GOALS. first: is this the first thing's path?"""
    if path == "p":
        return "sum"
    if "g" in path[:step] or "bw" in path[: step + 1]:  # an old name, or a page that says another one
        return "new"
    return "first" if first else "second"


def goal_in(plan, question):
    """The same, from a plan and the text of its question."""
    name = plan.sub_goal.removeprefix(GOAL)
    if " plus " in name:
        return "sum"
    if name not in question:
        return "new"
    before = question.partition(name)[0]
    second = kind_of(question) == "sum" and before.endswith((" and ", "plus the number of "))
    return "second" if second else "first"


def best_sequence(made):
    """The sequence of tools that is right for most of these questions."""
    counts = Counter(map(needed, made))
    score = lambda sequence: sum(n for paths, n in counts.items()
                                 if finishes(paths, lambda turn, goal: sequence[turn]))
    return max(itertools.product(LETTERS, repeat=MAX_TURNS), key=score)


def best_table(made, seed=0):
    """{(turn, goal): tool}: one place after the other is changed as long as more of these questions are
    right. That is the best of RESTARTS such searches, but perhaps not the best table."""
    rng, counts = random.Random(seed), Counter(map(needed, made))

    def score(table):
        tool_at = lambda turn, goal: table[turn, goal]
        return sum(n for paths, n in counts.items() if finishes(paths, tool_at))

    def climbed():
        table = {place: rng.choice(list(LETTERS)) for place in itertools.product(range(MAX_TURNS), GOALS)}
        reached, before = score(table), -1
        while reached > before:
            before = reached
            for place in rng.sample(list(table), len(table)):
                table = max(({**table, place: letter} for letter in LETTERS), key=score)
            reached = score(table)
        return table
    return max((climbed() for _ in range(RESTARTS)), key=score)


def state(prompt):
    """(the question's text, the turn) of a planner's prompt."""
    question, memory = re.search(r"\nQuestion: (.*)\n", prompt)[1], prompt.split("\nMemory:\n")[1]
    return question, len(re.findall(r"^Step \d+$", memory, re.MULTILINE)) + 1


class Routed:
    """An engine for the planner: another engine's plans, with the tool that choose(prompt, plan) picks.

    A plan that does not parse stays as it is: it names no tool that could be replaced."""

    def __init__(self, engine, tools, choose):
        self.engine, self.tools, self.choose = engine, tools, choose

    def __call__(self, prompts, **settings):
        return [self.routed(prompt, done) for prompt, done in zip(prompts, self.engine(prompts, **settings))]

    def routed(self, prompt, completion):
        plan = planner.parse(completion.text, self.tools)
        if isinstance(plan, planner.Unparsed):
            return completion
        tool = self.choose(prompt, plan)
        return replace(completion, text=f"Context: {plan.context}\nSub-goal: {plan.sub_goal}\nTool: {tool}")


class Counted(Routed):
    """A perfect planner whose tools are counted: counts[key][tool], for each of keys(prompt, plan)."""

    def __init__(self, engine, tools):
        super().__init__(engine, tools, None)
        self.counts = defaultdict(Counter)

    def routed(self, prompt, completion):
        plan = planner.parse(completion.text, self.tools)
        for key in keys(prompt, plan).values():
            self.counts[key][plan.tool] += 1
        return completion


def nearest(sub_goal, tools):
    """The name of the tool whose description shares the most telling words with the sub-goal."""
    names = list(tools)
    order = ranked([(planner.describe(name, tool),) for name, tool in tools.items()], sub_goal, 1)
    return names[order[0]] if order else names[0]


def opening(text):
    """The first three words."""
    return tuple(words_of(text)[:3])


def keys(prompt, plan):
    """{route: what it looks at}"""
    address, calculation = "https:" in plan.context, bool(re.search(r"\d [*+] \d", plan.context))
    results = [result for *_, result in STEP.findall(prompt.split("\nMemory:\n")[1])]
    return {"frequent": (), "sub-goal": ("sub-goal", *opening(plan.sub_goal)),
            "question": ("question", *opening(state(prompt)[0])), "context": (address, calculation),
            "result": (situation(results, len(results)), " plus " in plan.sub_goal)}


def chooser(route, tools, train, counts):
    """choose(prompt, plan) of a route."""
    if route == "bm25":
        return lambda prompt, plan: nearest(plan.sub_goal, tools)
    if route == "sequence":
        sequences = {kind: best_sequence([row for row in train if row["kind"] == kind]) for kind in KINDS}
        print("sequences: " + ", ".join(f"{kind} {''.join(best)}" for kind, best in sequences.items()))

        def by_turn(prompt, plan):
            text, turn = state(prompt)
            return LETTERS[sequences[kind_of(text)][turn - 1]]
        return by_turn
    if route == "plan":
        tables = {kind: best_table([row for row in train if row["kind"] == kind]) for kind in KINDS}

        def by_plan(prompt, plan):
            text, turn = state(prompt)
            return LETTERS[tables[kind_of(text)][turn - 1, goal_in(plan, text)]]
        return by_plan
    most = lambda key: counts.get(key, counts[()]).most_common(1)[0][0]
    return lambda prompt, plan: most(keys(prompt, plan)[route])


def kind_of(text):
    """The kind of a question, from its words."""
    if "sum" in text or text.count("number of") == 2:
        return "sum"
    return "plus" if "plus" in text else "one"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--planner", help="a model that writes the plans; without it they are perfect")
    parser.add_argument("--route", nargs="+", choices=ROUTES, default=ROUTES)
    parser.add_argument("--seed", type=int, default=0, help="of what a model samples")
    parser.add_argument("--out", type=Path, help="CSV file with a row for each route")
    args = parser.parse_args()
    tools, world = choose(toolset.TOOLS, list(TOOLS), HOPS / "corpus.jsonl"), World(0)
    tools["python_coder"] = replace(tools["python_coder"], run=quick_python)
    made = splits(world)
    train, test = made["train"], made["test"]
    counted = Counted(Teacher(train, world.renamed), tools)
    solve.roll_out(for_flow(train), counted, Teacher(train, world.renamed), tools, MAX_TURNS)
    teacher = Teacher(test, world.renamed)  # without a model, it plays all modules
    policy, modules = (load_engine(args.planner), load_modules()) if args.planner else (teacher, teacher)
    rows = []
    for route in args.route:
        engine = policy
        if route != "none":
            engine = Routed(policy, tools, chooser(route, tools, train, counted.counts))
        torch.manual_seed(args.seed)
        metrics, rollouts = solve.evaluate(for_flow(test), engine, modules, tools, max_turns=MAX_TURNS)
        print(f"{route}: {accuracy_line(metrics, len(test))}", flush=True)
        kinds = {kind: [rollout.right for rollout in rollouts if rollout.question.kind == kind]
                 for kind in KINDS}
        rows.append({"planner": args.planner or "perfect", "route": route, "questions": len(test),
                     "accuracy": f"{metrics['accuracy']:.4f}"}
                    | {kind: f"{sum(right) / len(right):.4f}" for kind, right in kinds.items()})
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        figures.write(args.out, rows)


if __name__ == "__main__":
    main()
