"""The constant pieces of all prompts, which are tokens of the toy's vocabulary.

Each constant line of a prompt is one token of the toy's vocabulary, and so is each number below 1 000. A
prompt is then only some tens of tokens long, among which the model finds and copies the right ones. A line
that is edited falls apart into its words; edits.py says how the toy learns to read that, too.
"""

import re

import executor
import generator
import planner
import tools as toolset
import verifier
from cli.flags import TOY_TOOLS
from memory import Step
from toy import teacher

PROMPTS = {
    "planner.ANALYSIS_PROMPT": planner.ANALYSIS_PROMPT,
    "planner.PROMPT": planner.PROMPT,
    "executor.PROMPT": executor.PROMPT,
    "verifier.PROMPT": verifier.PROMPT,
    "generator.PROMPT": generator.PROMPT,
}
NUMBERS = [f" {n}" for n in range(1000)]


def lines(text):
    """A constant text in pieces: its lines, each with the line breaks around it."""
    return re.findall(r"\n*[^\n]+\n*", text)


def step_pieces(turn, verdict="CONTINUE"):
    """The labels of a step in memory: ["Step 1\\nTool: ", "\\nSub-goal: ", ..., "\\nVerdict: CONTINUE"]."""
    step = Step(turn, tool="\0", sub_goal="\0", command="\0", result="\0", verdict=verdict)
    return step.render().split("\0")


def prompt_pieces():
    """{piece: where it comes from}, in the order of the vocabulary. The space before a variable belongs to
    the variable, not to the piece, so that a word has one token wherever it is copied to."""
    tools = {name: toolset.TOOLS[name] for name in TOY_TOOLS if name in toolset.TOOLS}
    found = [("user\n", "the chat template"), ("assistant\n", "the chat template")]
    found += [(line, where) for where, prompt in PROMPTS.items()
              for piece in re.split(r"{\w+}", prompt) for line in lines(piece)]
    found += [(f"{name}:", "a tool's name") for name in tools]
    found += [(line, f"tools.TOOLS[{name!r}]") for name, tool in tools.items()
              for line in lines(planner.describe(name, tool).removeprefix(f"{name}:"))]
    labels = ["No steps yet.", *step_pieces(1)[1:], step_pieces(1, "STOP")[-1], "\nContext:", "\nTool:"]
    labels += [f"{gap}{step_pieces(n)[0]}" for n in range(1, 11) for gap in ("", "\n\n")]
    found += [(piece, "memory.Step.render") for piece in labels]
    found += [(f" {name}", "a tool's name") for name in tools]
    for name, tool in tools.items():  # a call as the executor writes it, and as memory shows it
        for key in tool.arguments:
            calls = [f'{name}({key}="', f" {name}({key}='", f' {name}({key}="']
            found += [(piece, "a call") for piece in calls]
    texts = ['")', "')", ')")', ")')", "; print("]
    texts += [*teacher.SKILLS.values(), *teacher.WHY.values(), *teacher.CHECKS.values()]
    texts += [teacher.FOUND, teacher.UNKNOWN, teacher.END]
    texts += [" Find the", "I think it is", " I think it is", "\nContext: none"]
    found += [(piece, "toy/teacher.py") for piece in texts]
    errors = [" Error:", " NameError: name '", "' is not defined (line 1)"]
    errors += [" SyntaxError: invalid syntax (line 1)"]
    errors += [" no passage matches '", "'. Try other or fewer words."]
    found += [(piece, "an error") for piece in errors]
    results = [" [1]"]
    results += [" is a chemical element with the symbol", " and atomic number"]
    results += [" is a country on the continent of", ". Its capital is"]
    found += [(piece, "a tool's result") for piece in results]
    unique = {}
    for piece, where in found:
        if piece.strip():
            unique.setdefault(piece.rstrip(" "), where)
    return unique
