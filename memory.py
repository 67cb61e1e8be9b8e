"""Memory: the one text that every module reads (AgentFlow §3.1).

AgentFlow's modules do not talk to each other. They read and extend one explicit record: what was planned in
each turn, which command was run, what came back, and what the verifier concluded. The paper's
M^{t+1} = f_mem(M^t, a^t, e^t, v^t) is `memory.steps.append(Step(...))`; v^t is added to the step once the
verifier has read it. No language model writes the memory, so equal turns give equal text, and nothing is
forgotten or invented.

Two rules keep it safe. It is bounded: render(budget) returns at most `budget` characters, and shortens the
oldest results first. It cannot be forged: a result that contains "Step 7" or "Tool:" is indented, so only
this file starts a line with a label.
"""

import dataclasses
from dataclasses import dataclass, field

from world.text import truncate

BUDGET = 8000  # characters of memory in a prompt, about 2 000 tokens
STUB = 80  # what is left of an old result when the memory is full


@dataclass
class Step:
    """One turn: the planner's action a^t, the executor's command, its result e^t and the verifier's v^t."""

    turn: int
    tool: str  # "" if the plan could not be parsed
    sub_goal: str
    command: str  # the executor's call, as it was parsed
    result: str
    error: bool = False  # a tool-calling error: no plan, no call, or a result that starts with "Error:"
    verdict: str = ""  # STOP or CONTINUE; "" before the verifier has read the step
    seconds: float = 0.0  # how long the tool ran; never rendered, so that equal turns give equal prompts

    def render(self):
        lines = [f"Step {self.turn}", f"Tool: {self.tool or '(none)'}"]
        lines += [f"Sub-goal: {self.sub_goal or '(none)'}", f"Command: {self.command or '(none)'}"]
        lines += [f"Result: {self.result}"]
        if self.verdict:
            lines.append(f"Verdict: {self.verdict}")
        return "\n".join("\n  ".join(line.splitlines()) for line in lines)


@dataclass
class Memory:
    """M: the question, its analysis and the steps so far."""

    question: str
    analysis: str = ""
    steps: list[Step] = field(default_factory=list)

    def render(self, budget=BUDGET):
        """The steps as text of at most `budget` characters.

        Results are shortened first, then commands, then sub-goals; of each, the oldest first.
        """
        steps = [dataclasses.replace(step) for step in self.steps]
        for name in ("result", "command", "sub_goal"):
            for step in steps:
                over = len(join(steps)) - budget
                if over <= 0:
                    break
                text = getattr(step, name)
                setattr(step, name, truncate(text, max(STUB, len(text) - over)))
        return truncate(join(steps), budget)


def join(steps):
    return "\n\n".join(step.render() for step in steps) or "No steps yet."
