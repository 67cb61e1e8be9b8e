"""models.completion"""

import re
from dataclasses import dataclass, field, replace

TOO_LONG = "The prompt, with room for the answer, is longer than the model's context."
NEW_TOKENS = 1024                # tokens of an answer where nobody says


@dataclass
class Completion:
    text: str                 # decoded, special tokens removed
    prompt_ids: list[int]     # s^t exactly as the model read it
    ids: list[int]            # a^t exactly as sampled: the stop token included, absent if the text was cut at max_new_tokens
    error: str = ""           # why there is no text, e.g. TOO_LONG; ids is then empty
    usage: int = 0            # tokens, prompt and answer, as a server counted them
    logps: list[float] = field(default_factory=list, compare=False)   # log π of ids as sampled; greedy: none

    @property
    def tokens(self):
        return self.usage or len(self.prompt_ids) + len(self.ids)


def distinct(prompts, temperature):
    """What really has to be asked: at temperature 0 equal prompts have one answer; above it each copy is a sample of its own."""
    return list(dict.fromkeys(prompts)) if temperature == 0 else list(prompts)


def in_order(prompts, asked, done, temperature):
    """A Completion for each prompt again, none of them sharing its lists with another."""
    answer = dict(zip(asked, done))
    if temperature != 0:
        return done
    return [replace(c, prompt_ids=c.prompt_ids[:], ids=c.ids[:], logps=[]) for c in map(answer.get, prompts)]


class Cached:
    """An engine that remembers what it answered at temperature 0, in a services.Cache: the judge's verdicts cost nothing twice."""

    def __init__(self, engine, cache):
        self.engine, self.cache = engine, cache

    def __str__(self):
        return str(self.engine)

    def __call__(self, prompts, temperature=0.0, max_new_tokens=None):
        settings = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        if temperature != 0:
            return self.engine(prompts, **settings)
        key = ("engine", str(self.engine), str(max_new_tokens))
        known = {prompt: self.cache.get(*key, prompt) for prompt in prompts}
        new = [prompt for prompt, text in known.items() if text is None]
        answers = dict(zip(new, self.engine(new, **settings))) if new else {}
        for prompt, said in answers.items():
            if not said.error:
                self.cache.put(said.text, *key, prompt)
        return [answers[prompt] if prompt in answers else Completion(known[prompt], [], []) for prompt in prompts]


def outage(error):
    """Is this error of a Completion worth another try later? Not if the prompt does not fit or the server refuses this very prompt.
    Another refusal (401, 402, 403, 404: a key that has expired, a model that is gone) would meet all prompts alike."""
    return error != "" and TOO_LONG not in error and not re.search(r"answered 4(00|13|15|22)\b", error)
