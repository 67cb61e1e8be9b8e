"""The teacher: an engine of rules that plays all modules of the flow. The toy learns from its
texts.

It reads the memory in its prompts as any model must: what the results say of each name, and which
address or calculation is still to be followed. With blind=None its plans are perfect. With a
random.Random, sub-goal, context and tool are each drawn by chance among what is plausible: the
names of the question and of the results, the last result's address or calculation, the four tools.
The toy learns formats and words from such plans; what to do is left to Flow-GRPO."""

import re

import executor
import generator
import planner
import verifier
from models.completion import Completion
from toy.questions import SIGNS, WORDS

# {tool: how often it is drawn}
TOOLS = {"base_generator": 7, "python_coder": 7, "wikipedia_search": 8, "web_search": 7}
NO_OBJECTIVE = "Objective: unknown.\nSkills: none of these tools."
FOLLOWING = "Skills: following the sources"
WHY = "Justification: The next step."
MISSING = "Explanation: The answer is not found yet.\nConclusion: CONTINUE"
COMPLETE = "Explanation: The answer is found.\nConclusion: STOP"
FOUND, END = "The results hold the answer.\n<answer>", "</answer>"
UNKNOWN = "The results do not hold the answer.\n<answer> unknown</answer>"
ANSWER = "answer"  # what a sub-goal looks for if the question cannot be answered
GUESS = "I think it is {}."  # base_generator's answers

STEP = re.compile(r"Sub-goal: Find the (.*)\nCommand: .*\nResult: ((?:.*\n  )*.*)")
PASSAGE = re.compile(r"\[\d\] (\w+): The [a-z ]+ of \w+ is (.*)")
PAGE = re.compile(r"\[1\] passage 1 of 1 \(\S+\): (.*)")
READ = {  # what a source says of a number -> the pattern that finds it
    "address": r"at (https\S+)$|, but see (https\S+)$",
    "calculation": r"(\d+ [-+*] \d+)\.$",
    "number": r"(\d+)\.$",
}
NEXT = {  # what is known of a name -> the tool that is right
    "": "wikipedia_search",
    "address": "web_search",
    "calculation": "python_coder",
    "nothing": "base_generator",
}


def status(text):
    """What a source says of a number, as (kind, value): "is at https://..." -> ("address", "https://...")."""
    for kind, pattern in READ.items():
        if found := re.search(pattern, text):
            return kind, found[1] or found[2]
    return None


def said(goal, result):
    """{goal: (kind, value)}: what a result says, of the goal or of other names."""
    word, found = goal.split(" of ")[0], {}
    for name, text in PASSAGE.findall(result):
        this, other = f"{word} of {name}", status(text)
        if other and found.get(this, ("",))[0] != "address":  # it settles what sources contradict
            found[this] = other
    if page := PAGE.search(result):
        filed = re.search(r"filed as (\w+)", page[1])
        found[goal] = ("name", f"{word} of {filed[1]}") if filed else status(page[1])
    elif number := re.fullmatch(r"(?:I think it is )?(-?\d+)\.?", result):
        found[goal] = "number", number[1]
    elif result.startswith("Error: no passage"):
        found[goal] = "nothing", ""
    return found


class Known:
    """What is known of each goal, such as "code of Norway", read from the memory in a prompt.

    goals: {goal: (kind, value)}. Of the last step: goal, the kind of what its result said ("" for
    nothing), and the address or calculation in it."""

    def __init__(self, prompt):
        self.goals, self.goal, self.last, self.pointer = {}, "", "", ""
        for self.goal, result in STEP.findall(prompt.split("\nMemory:\n")[1]):
            found = said(self.goal, result)
            self.goals |= found
            self.last = list(found.values())[0][0] if found else ""
            pointers = [v for kind, v in found.values() if kind in ("address", "calculation")]
            self.pointer = pointers[0] if pointers else ""

    def resolve(self, goal):
        """(the goal that stands for this one now, kind, value): a name that is filed as another is
        followed.

        Of names that lead back to themselves nothing is known."""
        seen = set()
        while self.goals.get(goal, ("",))[0] == "name" and goal not in seen:
            seen.add(goal)
            goal = self.goals[goal][1]
        kind, value = self.goals.get(goal, ("", ""))
        return (goal, "", "") if kind == "name" else (goal, kind, value)


class Teacher:
    """The engine, for questions of a world. `examples` collects all (prompt, text) of the modules.

    made: from world.questions(). known: world.known(), what base_generator knows. guided: the share
    of plans that are perfect although the examples show blind ones. So the other modules, and the
    blind planner, also learn from memories that blind plans hardly ever reach."""

    def __init__(self, made, known, blind=None, guided=0.0):
        self.made, self.known = {question["question"]: question for question in made}, known
        self.blind, self.guided, self.examples = blind, guided, []

    def __call__(self, prompts, temperature=0.0, max_new_tokens=None):
        texts = []
        for prompt in prompts:
            if question := re.search(r"\nQuestion: (.*)\n", prompt):
                text, example = self.answer(prompt, self.made[question[1]])
                self.examples.append((prompt, example))
            else:
                text = self.generate(prompt)
            texts.append(text)
        return [Completion(text, [], []) for text in texts]

    def answer(self, prompt, question):
        """(what is done, what is to be learnt), of a module with this question in its prompt."""
        is_of = lambda module: prompt.startswith(module.PROMPT[:40])
        if is_of(executor):
            return 2 * (command(prompt),)
        if prompt.startswith(planner.ANALYSIS_PROMPT[:40]):
            return 2 * (analysis(question),)
        known = Known(prompt)
        if is_of(planner):
            if self.blind is None:
                return 2 * (perfect(question, known),)
            plan = self.drawn(question, known)
            return perfect(question, known) if self.blind.random() < self.guided else plan, plan
        answer = conclusion(question, known)
        if is_of(verifier):
            return 2 * (COMPLETE if answer else MISSING,)
        assert is_of(generator)
        return 2 * (f"{FOUND} {answer}{END}" if answer else UNKNOWN,)

    def drawn(self, question, known):
        """A plan drawn by chance among what is plausible."""
        names = [value for kind, value in known.goals.values() if kind == "name"]
        # (context, goal): how often it is drawn; a name whose number is known, less often
        goals = {}
        for goal in dict.fromkeys([goal_of(question), *names]):
            goals[known.pointer or "none", goal] = 1 if known.resolve(goal)[1] == "number" else 3
        if step := last_step(question, known):
            goals[step] = 3
        context, goal = self.blind.choices(list(goals), list(goals.values()))[0]
        if self.blind.random() < 0.1:
            context = "none"
        return plan(context, goal, self.blind.choices(list(TOOLS), list(TOOLS.values()))[0])

    def generate(self, query):
        """base_generator's answer: a number that it knows, or else a guess."""
        guess = lambda: self.blind.randrange(1, 1000) if self.blind else 1
        return GUESS.format(self.known.get(query) or guess())


def ids_of(engine, text):
    """The ids of a text as an answer of this model, with its stop token."""
    return [*engine.tokenizer.encode(text, add_special_tokens=False), engine.chat.stops[0]]


def goal_of(question):
    return f"{WORDS[question['what']]} of {question['name']}" if question["what"] else ANSWER


def analysis(question):
    if not question["what"]:
        return NO_OBJECTIVE
    objective = f"Objective: the {question['what']} of {question['name']}"
    if not question["op"]:
        return f"{objective}.\n{FOLLOWING}."
    return f"{objective} {question['op']} {question['n']}.\n{FOLLOWING}, then calculation."


def perfect(question, known):
    goal, kind, value = known.resolve(goal_of(question))
    if kind != "number":
        return plan(value or "none", goal, NEXT[kind])
    return plan(*(last_step(question, known) or ("none", goal)), "python_coder")


def last_step(question, known):
    """(context, goal) of a question's last operation, or None while the number is missing."""
    goal = goal_of(question)
    _, kind, value = known.resolve(goal)
    if not question["op"] or kind != "number":
        return None
    op, n = question["op"], question["n"]
    return f"{value} {SIGNS[op]} {n}", f"{goal} {op} {n}"


def plan(context, goal, tool):
    return f"{WHY}\nContext: {context}\nSub-goal: Find the {goal}\nTool: {tool}"


def command(prompt):
    """The executor's call: its arguments are the context and the goal."""
    context = re.search(r"\nContext: (.*)\n", prompt)[1]
    goal = re.search(r"\nSub-goal: Find the (.*)\n", prompt)[1]
    if "\npython_coder: " in prompt:
        return f'python_coder(code="number = {context}; print(number)")'
    if "\nweb_search: " in prompt:
        return f'web_search(url="{context}", query="{goal}")'
    tool = "wikipedia_search" if "\nwikipedia_search: " in prompt else "base_generator"
    return f'{tool}(query="{goal}")'


def conclusion(question, known):
    """The number that answers the question, if the last result holds it; else None."""
    complete = not question["op"] or f" {question['op']} " in known.goal
    if known.last == "number" and complete and question["what"]:
        return known.goals.get(known.goal, ("", None))[1]
