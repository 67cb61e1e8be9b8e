"""Completion, an engine's answer to one prompt: all that training needs to know of it.

    prompt_ids  s^t   the prompt exactly as the model read it, chat template included
    ids         a^t   what the model sampled, token by token, its stop token included

The ids travel from the engine to the loss and are never made again from text: decoding and tokenising
again gives, now and then, tokens that nobody sampled. The stop token is an action like any other (the policy
has to learn to end), and a completion that was cut at max_new_tokens has none.
"""

import copy
import re
from dataclasses import dataclass, field

NEW_TOKENS = 1024  # the limit of a completion, unless the caller or the checkpoint sets one
TOO_LONG = "The prompt, with room for the answer, is longer than the model's context."


@dataclass
class Completion:
    text: str  # ids as text, without control tokens
    prompt_ids: list[int]  # a server gives neither these nor ids: both are empty
    ids: list[int]
    error: str = ""  # why there is no answer, e.g. TOO_LONG; text and ids are then empty
    usage: int = 0  # tokens, prompt and answer, as a server counted them
    logps: list[float] = field(default_factory=list, compare=False)  # log π of ids, if they were sampled

    @property
    def tokens(self):
        return self.usage or len(self.prompt_ids) + len(self.ids)


def outage(error):
    """Is this error of a Completion worth another try later?

    Not if the prompt is too long or the server refuses this very prompt (400, 413, 415, 422). Other refusals
    (401, 402, 403, 404: an expired key, a model that is gone) would meet every prompt, so they are outages.
    """
    return error != "" and TOO_LONG not in error and not re.search(r"answered 4(00|13|15|22)\b", error)


def once_each(answer, prompts, temperature):
    """answer(prompts) -> [Completion], but at temperature 0 equal prompts are answered once.

    Above temperature 0 each copy of a prompt is a sample of its own. No two completions share a list of ids.
    """
    if temperature != 0:
        return answer(list(prompts))
    distinct = list(dict.fromkeys(prompts))
    completions = dict(zip(distinct, answer(distinct)))
    return [copy.deepcopy(completions[prompt]) for prompt in prompts]


class Cached:
    """An engine with a services.Cache of its answers at temperature 0: a verdict of the judge is paid once.

    A cached Completion has a text and no ids. Errors are not cached.
    """

    def __init__(self, engine, cache):
        self.engine, self.cache = engine, cache

    def __str__(self):
        return str(self.engine)

    def __call__(self, prompts, temperature=0.0, max_new_tokens=None):
        settings = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        if temperature != 0:
            return self.engine(prompts, **settings)
        key = ("engine", str(self.engine), str(max_new_tokens))
        cached = {prompt: self.cache.get(*key, prompt) for prompt in prompts}
        missing = [prompt for prompt, text in cached.items() if text is None]
        new = dict(zip(missing, self.engine(missing, **settings))) if missing else {}
        for prompt, completion in new.items():
            if not completion.error:
                self.cache.put(completion.text, *key, prompt)
        return [new.get(prompt) or Completion(cached[prompt], [], []) for prompt in prompts]
