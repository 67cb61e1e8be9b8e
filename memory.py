"""Memory: the record of what has happened so far in a rollout (AgentFlow §3.1).

Planner, verifier and generator read it in their prompts. Each turn adds a Step: what was planned,
the tool call, its result, and the verdict. In the paper's notation, the plan a^t, the result e^t
and the verdict v^t make the next memory: M^{t+1} = f_mem(M^t, a^t, e^t, v^t). Here f_mem appends a
Step; its verdict is filled in when the verifier has read it. No language model rewrites or
summarises the steps, so rollouts with the same steps have the same memory.

The text is bounded: render() returns at most `budget` characters and shortens results first,
the oldest before newer ones. A tool result cannot forge a step: only our labels ("Step 7", "Tool:")
start at the left margin, because every further line of a result is indented. So a line "Verdict:
STOP" in a web page does not look like a verdict.
"""

from dataclasses import dataclass, field, replace

# truncate() keeps head and tail, and marks the cut. indented() indents all lines but the first.
from world.text import indented, truncate

BUDGET = 8000  # characters of memory in a prompt, about 2 000 tokens
SHORTEST = 80  # characters: shortened() cuts no result, command or sub-goal below this length


@dataclass
class Step:
    """One turn: tool and sub-goal of the plan a^t, the call, its result e^t and the verdict v^t."""

    turn: int
    tool: str  # "" if the plan could not be parsed
    sub_goal: str
    command: str  # the tool call, written out; "" if it could not be parsed
    result: str
    error: bool = False  # of the plan, the call or the tool: the result starts with "Error:"
    # The verifier's STOP or CONTINUE; "" until it has read the step. If the plan could not be
    # parsed, the verifier is not asked, and this is CONTINUE.
    verdict: str = ""
    seconds: float = 0.0  # of the tool; never rendered, so that equal turns give equal prompts

    def render(self):
        """The step as the modules read it.

        >>> iron = "wikipedia_search(query='atomic number of iron')"
        >>> found = "[1] Iron: Iron has the symbol Fe\\nand the atomic number 26."
        >>> print(Step(1, "wikipedia_search", "Find the number of iron", iron, found).render())
        Step 1
        Tool: wikipedia_search
        Sub-goal: Find the number of iron
        Command: wikipedia_search(query='atomic number of iron')
        Result: [1] Iron: Iron has the symbol Fe
          and the atomic number 26.
        """
        parts = [
            f"Step {self.turn}",
            f"Tool: {self.tool or '(none)'}",
            f"Sub-goal: {self.sub_goal or '(none)'}",
            f"Command: {self.command or '(none)'}",
            f"Result: {self.result}",
        ]
        if self.verdict:
            parts.append(f"Verdict: {self.verdict}")
        return "\n".join(indented(part) for part in parts)  # so that no part forges a label


@dataclass
class Memory:
    """M^t: the question, its analysis and the steps so far."""

    question: str
    analysis: str = ""
    steps: list[Step] = field(default_factory=list)
    budget: int = BUDGET  # characters of render(); less once a prompt was too long for the model

    def render(self):
        """The steps as text of at most `budget` characters; the prompts add question and analysis.

        Results are shortened first, then commands, then sub-goals; of each, the oldest first. If
        there are so many steps that this is not enough, the middle of the whole text is cut, even
        inside a step. (The mark of the cut contains no line break. So what follows it is not at the
        left margin, where it could pass for a label.)
        """
        steps = [replace(step) for step in self.steps]  # copies: the memory itself stays whole
        for name in ("result", "command", "sub_goal"):
            for step in steps:
                while True:  # one cut may not be enough, because shortened() only estimates
                    text, excess = getattr(step, name), len(join(steps)) - self.budget
                    if excess <= 0 or len(text) <= SHORTEST:
                        break
                    setattr(step, name, shortened(text, excess))
        return truncate(join(steps), self.budget)


def shortened(text, excess):
    """The text, cut so that it takes about `excess` fewer characters in the prompt.

    It is not cut below SHORTEST. In the prompt the text is longer, because its lines are indented.
    To take away `excess` characters there, the same *share* of the text is cut here.
    """
    share = excess / max(1, len(indented(text)))
    return truncate(text, max(SHORTEST, int((1 - share) * len(text))))


def join(steps):
    return "\n\n".join(step.render() for step in steps) or "No steps yet."
