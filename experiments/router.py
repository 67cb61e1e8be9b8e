"""How much of the planner's skill is routing? A router learns nothing from rewards: it only picks the tool.

The warm-started planner writes the plans, and a rule replaces the tool in each:

    bm25     the tool whose description is nearest to the sub-goal, by bm25
    word     the tool that is most often right for sub-goals with this first word
    words    the same, for their first three words ("Find the value", "Find the capital")

The last two count the perfect planner's tools on 1 000 questions like those of training. So they are told for
each step what is right; Flow-GRPO is told only whether the answer at the end was.
"""

import re
from collections import Counter, defaultdict
from dataclasses import replace

import planner
from world.ranking import ranked, words_of

OPENINGS = {"word": 1, "words": 3}  # words of the sub-goal that are looked at
ROUTES = ("bm25", *OPENINGS)


def nearest(sub_goal, tools):
    """The name of the tool whose description shares the most telling words with the sub-goal."""
    names = list(tools)
    order = ranked([(planner.describe(name, tool),) for name, tool in tools.items()], sub_goal, 1)
    return names[order[0]] if order else names[0]


def opening(sub_goal, number):
    return tuple(words_of(sub_goal)[:number])


def most_often_right(made, teacher, number):
    """{opening of a sub-goal: the tool that most often was right}; (): the most frequent tool of all.

    teacher: a perfect one for the questions `made`."""
    right = defaultdict(Counter)
    for question in made:
        known = []
        for _ in question["steps"]:
            plan = teacher.plan(question, known)
            sub_goal, tool = re.search(r"Sub-goal: (.+)\nTool: (.+)", plan).groups()
            known.append("1")  # any value: an opening holds none
            for key in ((), opening(sub_goal, number)):
                right[key][tool] += 1
    return {key: counts.most_common(1)[0][0] for key, counts in right.items()}


def with_tool(plan, tool):
    """The same plan with another tool in its last line."""
    return f"{plan.rpartition('Tool: ')[0]}Tool: {tool}"


class Routed:
    """An engine for the planner: another engine's plans, with the tool that choose(prompt, plan) picks.

    A plan that does not parse stays as it is: it names no tool that could be replaced."""

    def __init__(self, engine, tools, choose):
        self.engine, self.tools, self.choose = engine, tools, choose

    def __call__(self, prompts, **settings):
        return [self.routed(prompt, done) for prompt, done in zip(prompts, self.engine(prompts, **settings))]

    def routed(self, prompt, completion):
        plan = planner.parse(completion.text, self.tools)
        if isinstance(plan, str):
            return completion
        tool = self.choose(prompt, plan)
        return replace(completion, text=f"Context: {plan.context}\nSub-goal: {plan.sub_goal}\nTool: {tool}")


def router(route, engine, tools, made, teacher):
    """The Routed engine of one of ROUTES."""
    if route == "bm25":
        return Routed(engine, tools, lambda prompt, plan: nearest(plan.sub_goal, tools))
    number = OPENINGS[route]
    table = most_often_right(made, teacher, number)
    return Routed(engine, tools, lambda prompt, plan: table.get(opening(plan.sub_goal, number), table[()]))
