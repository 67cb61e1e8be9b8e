"""The teacher of the second toy: an engine of rules that plays all modules of the flow.

It reads the memory in its prompts as any model must: what the results say of each name, and which pointer is
still to be followed. With blind=None its plans are perfect. With a random.Random, sub-goal, context and tool
are each drawn by chance among what is plausible: the names of the question and of the results, the last
result's address or product, the four tools. The toy learns formats and words from such plans; what to do is
left to Flow-GRPO.
"""

import re

import executor
import generator
import planner
import verifier
from models.completion import Completion

TOOLS = {"base_generator": 5, "python_coder": 7, "wikipedia_search": 9, "web_search": 7}  # how often drawn
STEP = re.compile(r"Tool: (.*)\nSub-goal: (.*)\nCommand: (.*)\nResult: ((?:.*\n  )*.*)")
SKILLS = {
    "one": "Objective: a number.\nSkills: following the sources.",
    "plus": "Objective: a sum.\nSkills: following the sources, then calculation.",
    "sum": "Objective: a sum.\nSkills: following the sources of two numbers, then calculation.",
}
WHY = "Justification: The next step."
CHECKS = {
    "missing": "Explanation: The number is not found yet.\nConclusion: CONTINUE",
    "complete": "Explanation: The number is found.\nConclusion: STOP",
}
FOUND, END = "The results hold the number.\n<answer>", "</answer>"
UNKNOWN = "The results do not hold the number.\n<answer> unknown</answer>"
GOAL = "Find the number of "
GUESS, RENAMED = "I think it is {}.", "It is now called {}."

NAME = r"([A-Z][a-z]+)"
PASSAGE = re.compile(rf"\[\d\] {NAME}: The number of {NAME} is (.*)")
PAGE = re.compile(r"\[1\] passage 1 of 1 \(\S+\): (.*)")
READ = {  # what a source says of a number -> the pattern that finds it
    "url": r"at (https\S+)$|, but see (https\S+)$",
    "product": r"(\d+ \* \d+)\.$",
    "value": r"(\d+)\.$",
}


def status(text):
    """What a source says of a number, as (kind, value): "is at https://..." -> ("url", "https://...")."""
    for kind, pattern in READ.items():
        if found := re.search(pattern, text):
            return kind, found[1] or found[2]
    return None


class Memory:
    """What is known of each name, read from the memory in a prompt. known: {name: (kind, value)}.

    last: the kind of what the last result said ("" for nothing); pointer: its address or product.
    """

    def __init__(self, prompt):
        self.known, self.last, self.pointer, self.goal = {}, "", "", ""
        for _, goal, _, result in STEP.findall(prompt.split("\nMemory:\n")[1]):
            self.goal, self.last, self.pointer = goal.removeprefix(GOAL), "", ""
            self.read(self.goal, result)

    def read(self, goal, result):
        said = {}
        for name, _, text in PASSAGE.findall(result):
            found = status(text)
            if found and said.get(name, ("",))[0] != "url":  # an address settles what sources contradict
                said[name] = found
        if found := PAGE.search(result):
            filed = re.search(rf"filed as {NAME}", found[1])
            said[goal] = ("name", filed[1]) if filed else status(found[1])
        elif found := re.search(rf"now called {NAME}\.", result):
            said[goal] = "name", found[1]
        elif found := re.fullmatch(r"(?:I think it is )?(\d+)\.?", result):
            said[goal] = "value", found[1]
        elif result.startswith("Error: no passage"):
            said[goal] = "unknown", ""
        self.known |= said
        if said:
            self.last, value = list(said.values())[0]
            self.pointer = next((value for kind, value in said.values() if kind in ("url", "product")), "")

    def resolve(self, name):
        """(the name that stands for this one now, what is known of it): old and filed names are followed.

        Of names that lead back to themselves, which a module has made up, nothing is known."""
        seen = set()
        while self.known.get(name, ("",))[0] == "name":
            if name in seen:
                return name, None
            seen.add(name)
            name = self.known[name][1]
        return name, self.known.get(name)


class Teacher:
    """The engine, for questions of a world. `examples` collects all (prompt, text) of the modules.

    made: from world.questions(). renamed: world.renamed, which base_generator knows.
    guided: the share of plans that are perfect although the examples show blind ones. So the other modules,
    and the blind planner, also learn from memories that blind plans hardly ever reach.
    """

    def __init__(self, made, renamed, blind=None, guided=0.0):
        self.made, self.renamed = {question["question"]: question for question in made}, renamed
        self.blind, self.guided, self.examples = blind, guided, []

    def __call__(self, prompts, temperature=0.0, max_new_tokens=None):
        texts = []
        for prompt in prompts:
            found = re.search(r"\nQuestion: (.*)\n", prompt)
            text, example = self.answer(prompt, found[1]) if found else (self.invent(prompt), None)
            texts.append(text)
            if example:  # none of base_generator, which is another model
                self.examples.append((prompt, example))
        return [Completion(text, [], []) for text in texts]

    def answer(self, prompt, question):
        """(what is done, what is to be learnt from it), of a module with this question in its prompt."""
        if prompt.startswith(executor.PROMPT[:40]):
            return 2 * (command(prompt),)
        question = self.made[question]
        if prompt.startswith(planner.ANALYSIS_PROMPT[:40]):
            return 2 * (SKILLS[question["kind"]],)
        memory = Memory(prompt)
        if prompt.startswith(planner.PROMPT[:40]):
            if self.blind is None:
                return 2 * (self.perfect(question, memory),)
            plan = self.drawn(question, memory)
            return self.perfect(question, memory) if self.blind.random() < self.guided else plan, plan
        answer = conclusion(question, memory)
        if prompt.startswith(verifier.PROMPT[:40]):
            return 2 * (CHECKS["complete" if answer else "missing"],)
        assert prompt.startswith(generator.PROMPT[:40])
        return 2 * (f"{FOUND} {answer}{END}" if answer else UNKNOWN,)

    def perfect(self, question, memory):
        for name in question["names"]:
            name, known = memory.resolve(name)
            kind, value = known or ("", "")
            if kind != "value":
                tool = {"": "wikipedia_search", "url": "web_search", "product": "python_coder",
                        "unknown": "base_generator"}[kind]
                return plan(value or "none", name, tool)
        return plan(*last_step(question, memory), "python_coder")

    def drawn(self, question, memory):
        """A plan drawn by chance among what is plausible."""
        names = dict.fromkeys(question["names"])
        names |= dict.fromkeys(value for kind, value in memory.known.values() if kind == "name")
        goals = {}  # (context, goal): how often it is drawn; a name whose number is known, less often
        for name in names:
            known = memory.resolve(name)[1]
            goals[memory.pointer or "none", name] = 1 if known and known[0] == "value" else 3
        if question["kind"] != "one" and (step := last_step(question, memory)):
            goals[step] = 3
        context, goal = self.blind.choices(list(goals), list(goals.values()))[0]
        if self.blind.random() < 0.1:
            context = "none"
        return plan(context, goal, self.blind.choices(list(TOOLS), list(TOOLS.values()))[0])

    def invent(self, query):
        """base_generator's answer: the new name of an old one, or else a guess."""
        name = query.removeprefix("number of ")
        if name in self.renamed:
            return RENAMED.format(self.renamed[name])
        return GUESS.format(self.blind.randrange(2, 450) if self.blind else 1)


def plan(context, goal, tool):
    return f"{WHY}\nContext: {context}\nSub-goal: {GOAL}{goal}\nTool: {tool}"


def last_step(question, memory):
    """(context, goal) of the sum that ends a question, or None while a number is missing."""
    known = [memory.resolve(name)[1] for name in question["names"]]
    if any(found is None or found[0] != "value" for found in known):
        return None
    values = [value for _, value in known]
    added = str(question["added"])
    terms, goal = (values, question["names"]) if question["kind"] == "sum" else (
        [*values, added], [*question["names"], added])
    return " + ".join(terms), " plus ".join(goal)


def command(prompt):
    """The executor's call: its arguments are the context and the goal."""
    context = re.search(r"\nContext: (.*)\n", prompt)[1]
    goal = re.search(rf"\nSub-goal: {GOAL}(.*)\n", prompt)[1]
    if "\npython_coder: " in prompt:
        return f'python_coder(code="number = {context}; print(number)")'
    if "\nweb_search: " in prompt:
        return f'web_search(url="{context}", query="number of {goal}")'
    tool = "wikipedia_search" if "\nwikipedia_search: " in prompt else "base_generator"
    return f'{tool}(query="number of {goal}")'


def conclusion(question, memory):
    """The number that answers the question, if the last result holds it; else None."""
    complete = memory.last == "value" and (question["kind"] == "one" or " plus " in memory.goal)
    return memory.known.get(memory.goal, ("", None))[1] if complete else None
