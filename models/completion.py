"""Completion: what an engine returns for one prompt, and all that training needs of it.

    prompt_ids  s^t   the prompt exactly as the model read it, chat template included
    ids         a^t   what the model sampled, token by token, its stop token included

The loss gets the very ids that the engine sampled. They are never made again from text: decoding
and tokenising again gives, now and then, other tokens. The stop token is an action like any other,
since the policy has to learn to end; a completion that was cut at max_new_tokens has none.
"""

import re
from dataclasses import dataclass, replace


NEW_TOKENS = 1024  # the limit of a completion, unless the caller or the checkpoint sets one
TOO_LONG = "The prompt, with room for the answer, is longer than the model's context."
# the result of a call whose web service was down, or had too many requests
NO_SERVICE = re.compile(r"Error: (\S+) (?:cannot be reached|answered (?:40[123]|429|5\d\d))")


@dataclass
class Completion:
    text: str  # ids as text, without control tokens
    prompt_ids: list[int]  # a server gives neither these nor ids: both are empty
    ids: list[int]
    error: str = ""  # why there is no completion, e.g. TOO_LONG; text and ids are then empty
    usage: int = 0  # tokens of prompt and completion, as a server counted them
    cut: bool = False  # it did not end by itself, but at the limit of tokens

    @property
    def tokens(self) -> int:
        return self.usage or len(self.prompt_ids) + len(self.ids)


def for_each(prompts, distinct, completions):
    """The completions of the distinct prompts, for each prompt one of its own."""
    if len(distinct) == len(prompts):
        return completions
    answers = dict(zip(distinct, completions, strict=True))
    return [replace(answers[prompt]) for prompt in prompts]


def outage(error: str) -> bool:
    """Is this error of a Completion an outage, which any prompt would have met?

    Not if the prompt is too long or cannot be encoded, nor if the server refuses this very prompt
    (400, 413, 415, 422) or has no text for it. Other refusals (401, 402, 403, 404: an expired key,
    a model that is gone) are outages.
    """
    this_prompt = r"answered (4(00|13|15|22)\b|without a text)|prompt was not sent"
    return error != "" and TOO_LONG not in error and not re.search(this_prompt, error)


def servers_down(rollouts: list, tools: dict) -> str:
    """Why a run must stop, or "".

    An outage (or, of eight questions or more, any error but a prompt that is too long) hit more
    than half of the rollouts, or of those that needed the judge, if they are four or more: one may
    be hard to judge. Or a search service did not answer more than half of its calls, of ten or
    more. (A page that does not answer is no outage: another one may.)
    """
    asked = [r for r in rollouts if r.judged or r.undecided or r.failed.startswith("judge: ")]
    for some, what in (rollouts, "rollouts"), (asked, "rollouts that needed the judge"):
        failed = [r for r in some if r.failed and TOO_LONG not in r.failed]
        # what so many questions have met is no fault of theirs: a wrong name of the model, say
        many = len({r.question.question for r in failed}) >= 8
        down = [r.failed for r in failed if many or outage(r.failed)]
        if 2 * len(down) > len(some) and (some is rollouts or len(some) >= 4):
            return f"{len(down)} of {len(some)} {what} were aborted ({down[0]})"
    for name in (n for n, tool in tools.items() if tool.from_web and "url" not in tool.arguments):
        results = [step.result for r in rollouts for step in r.memory.steps if step.tool == name]
        down = [found[1] for found in map(NO_SERVICE.match, results) if found]
        if 2 * len(down) > len(results) >= 10:
            return f"{down[0]} did not answer {len(down)} of {len(results)} calls of {name}"
    return ""


def is_server(name: str) -> bool:
    """Is the name of a model the address of a server?"""
    return str(name).startswith(("http://", "https://"))
