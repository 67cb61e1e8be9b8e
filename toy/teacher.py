"""The teacher: an engine of rules that plays all modules of the flow. The toy learns from its texts.

It reads the same prompts as a language model, and answers each one by rules, from the question's steps
(questions.py). With blind=None its plans are perfect. With a random.Random they have the right sub-goal but
a random tool: the toy learns every format and sub-goal, but not which tool does what, because that is what
Flow-GRPO should teach. A wrong tool fails by itself: a search for "value of 37 * 12" finds nothing,
"capital = France" is a NameError, base_generator makes things up.
"""

import re

import executor
import planner
import verifier
from cli.flags import TOY_TOOLS
from models.completion import Completion
from toy.questions import FACTS

STEP = re.compile(r"Sub-goal: (.*)\nCommand: .*\nResult: (.*)")
READ = {  # what to look for -> the pattern that finds it in a passage of the corpus
    "atomic number": r"atomic number (\d+)",
    "symbol": r"symbol (\w+)",
    "capital": r"capital is (.+?)\.",
    "continent": r"continent of (.+?)\.",
}
SKILLS = {
    "arithmetic": "Objective: a number.\nSkills: calculation.",
    "fact": "Objective: a fact.\nSkills: looking it up.",
    "fact_math": "Objective: a number.\nSkills: looking up a fact, then calculation.",
    "compare": "Objective: yes or no.\nSkills: looking up two facts, then comparing.",
    "unknown": "Objective: unknown.\nSkills: none of these tools knows it.",
}
WHY = {"value": "Justification: A calculation comes next.", "fact": "Justification: A fact comes next."}
CHECKS = {
    "error": "Explanation: The last step failed.\nConclusion: CONTINUE",
    "missing": "Explanation: Something is still missing.\nConclusion: CONTINUE",
    "complete": "Explanation: Every part is answered.\nConclusion: STOP",
}
FOUND, END = "The results hold the answer.\n<answer>", "</answer>"
UNKNOWN = "The results do not hold the answer.\n<answer> unknown</answer>"


class Teacher:
    """The engine, for questions from questions.make(). `examples` collects all (prompt, text)."""

    def __init__(self, made, blind=None):
        self.made = {question["question"]: question for question in made}
        self.blind, self.examples = blind, []

    def __call__(self, prompts, temperature=0.0, max_new_tokens=None):
        texts = [self.answer(prompt) for prompt in prompts]
        self.examples += zip(prompts, texts)
        return [Completion(text, [], []) for text in texts]

    def answer(self, prompt):
        found = re.search(r"\nQuestion: (.*)\n", prompt)
        if not found:
            return self.invent(prompt)
        if prompt.startswith(executor.PROMPT[:40]):
            return self.command(prompt)
        question = self.made[found[1]]
        if prompt.startswith(planner.ANALYSIS_PROMPT[:40]):
            return SKILLS[question["kind"]]
        steps = STEP.findall(prompt.split("\nMemory:\n")[1])
        known = self.known(question, steps)
        if prompt.startswith(planner.PROMPT[:40]):
            return self.plan(question, known)
        if prompt.startswith(verifier.PROMPT[:40]):
            if steps[-1][1].startswith("Error:"):
                return CHECKS["error"]
            return CHECKS["complete" if len(known) == len(question["steps"]) else "missing"]
        return conclude(question, known)

    def sub_goal(self, question, known):
        """(what to find next, the sub-goal for it). If nothing is left to find, the last step again."""
        what, whom = question["steps"][min(len(known), len(question["steps"]) - 1)]
        return what, f"Find the {what} of {whom.format(*known)}"

    def known(self, question, steps):
        """The values found so far, true or made up; steps: (sub-goal, result) of each step in memory."""
        known = []
        if question["kind"] == "unknown":
            return known
        for sub_goal, result in steps:
            if len(known) < len(question["steps"]):
                what, wanted = self.sub_goal(question, known)
                if sub_goal == wanted and not result.startswith("Error:"):
                    value = self.read(what, result)
                    known += [value] if value else []
        return known

    def read(self, what, result):
        """The value in a result, or None."""
        invented = re.search(r"I think it is (.+)\.", result)
        found = invented or re.search(READ.get(what, r"(.+)"), result)
        return found and found[1]

    def plan(self, question, known):
        what, sub_goal = self.sub_goal(question, known)
        before = question["steps"][len(known) - 1]
        context = f"The {before[0]} of {before[1].format(*known)} is {known[-1]}." if known else "none"
        right = "python_coder" if what == "value" else "wikipedia_search"
        tool = self.blind.choice(sorted(TOY_TOOLS)) if self.blind else right
        return f"{WHY.get(what, WHY['fact'])}\nContext: {context}\nSub-goal: {sub_goal}\nTool: {tool}"

    def command(self, prompt):
        what, whom = re.search(r"\nSub-goal: Find the ([a-z ]+) of (.+)\n", prompt).groups()
        if "\npython_coder: " in prompt:
            name = what.split()[-1]
            return f'python_coder(code="{name} = {whom}; print({name})")'
        described = [name for name in ("wikipedia_search", "base_generator") if f"\n{name}: " in prompt]
        if not described:
            raise ValueError("the teacher knows no call of this tool: write it in toy/teacher.py: command")
        [tool] = described
        return f'{tool}(query="{what} of {whom}")'

    def invent(self, query):
        """base_generator's answer: a random value of the right kind, as a small model would make it up."""
        what = query.split(" of ")[0]
        values = [value for (name, _), value in FACTS.items() if name == what]
        return f"I think it is {self.blind.choice(values or [str(n) for n in range(1000)])}."


def conclude(question, known):
    """The generator's text, from the values found."""
    if len(known) < len(question["steps"]):
        return UNKNOWN
    answer = known[-1]
    if question["kind"] == "compare":
        answer = "yes" if known[0] == known[1] else "no"
    return f"{FOUND} {answer}{END}"
