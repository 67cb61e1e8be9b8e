"""Server, the engine for servers with OpenAI's chat API: vLLM, llama.cpp, Ollama, OpenAI, ...

    engine = Server("http://localhost:8000/v1#my-model")   # a server with one model needs no name
    completions = engine(["What is 2 + 2?"])               # texts only: no prompt_ids, no ids

world/services.py retries what may work later (429, 5xx, a dropped connection, a broken answer). If
a request fails for good, Completion.error says why, and no rollout takes that for an answer. An
empty text is no answer either, unless the model really said nothing. Nor is the answer to a prompt
that the server has cut without saying so: is_whole().

The key is OPENAI_API_KEY. It is sent over https or to this machine only, never in the clear. A
server may sample with the checkpoint's settings (top-k, a repetition penalty), so it cannot be the
policy in training.
"""

import json
import math
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import urlsplit

import torch

from models.chat import after_thinking, defuse, plain_thoughts
from models.completion import NEW_TOKENS, TOO_LONG, Completion, for_each
from world import services
from world.mistakes import Mistake
from world.text import printable, truncate, visible

# Fields that a server may refuse. They are left out then; max_tokens is renamed. If an error names
# several, the first in this order goes: Claude takes temperature or top_p, not both.
REFUSABLE = "chat_template_kwargs", "reasoning_effort", "top_p", "seed", "max_tokens", "temperature"
# What servers write if a prompt, with room for its answer, does not fit. Nothing else means that:
# an exhausted quota, too, has a maximum that is exceeded.
OVERFLOW = re.compile(
    r"(?i)context.?(length|size|window|limit)|context the overflows"  # nearly all; LM Studio
    r"|(prompt|input|request)\b.{0,60}\btoo (long|large)"  # Claude, Ollama; Groq
    r"|(model|allowed) length|input token count|`inputs`"  # vLLM, SGLang, Gemini, TGI
)
# A 400 that any prompt would have met: the account is used up, or the model is not loaded yet.
# Others answer 402, 429 or 503 then.
UNPAID = re.compile(r"quota|billing|credit|balance|spend|payment", re.IGNORECASE)
LOADING = re.compile(r"model .{0,60}\b(un)?load|\bload.{0,60} model", re.IGNORECASE)
MESSAGE = re.compile(
    r'"(?:message|msg|detail|error|raw)"\s*:\s*"((?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*)'
)
CODE = re.compile(r'"(?:code|type|param|loc|finish_reason)"\s*:\s*("[^"\\]*"|\[[^]]*\])')
# Values of finish_reason, in small letters. All others mean a text that is not whole.
WHOLE = "stop", "eos", "eos_token", "end_turn", "stop_sequence", "tool_calls"
FAILED = re.compile("error|abort|cancel|resource")
# At least one token, for any tokenizer: a word (of Hebrew to Malayalam with its signs, which are no
# letters), or six letters of a script without spaces
WORD = re.compile(r"[\u0e00-\u1aff\u3000-\uffff]{1,6}|[\w\u0590-\u0dff]+")


class Server:
    """A model server, called with prompts. url: http://host:8000/v1#model.

    at_once: requests at a time. seconds: how long to wait for an answer: long, because a server of
    one's own may answer one request after the other. think: let the model think, if the server
    hands that on to the chat template.
    """

    fingerprint = ""  # of the weights, which a server does not show

    def __init__(self, url: str, at_once: int = 64, seconds: float = 600, think: bool = False):
        url, _, name = url.partition("#")
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query:
            raise Mistake("A server's address holds no key and no ?: set OPENAI_API_KEY instead.")
        self.url = url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
        self.host, self.at_once, self.seconds, self.think = parts.netloc, at_once, seconds, think
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        key = os.environ.get("OPENAI_API_KEY") if local or parts.scheme == "https" else None
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.refused, self.lock = set(), threading.Lock()  # refused: some of REFUSABLE
        # The longest prompt that was read whole, in words and tokens (any server reads 1,000), the
        # shortest that was cut, in words, and what is left of one, in tokens
        self.longest_whole, self.most_tokens, self.shortest_cut, self.left = 0, 1000, math.inf, None
        self.asking = threading.Lock()  # whether a prompt was cut
        self.session = services.session(tries=6)
        self.session.trust_env = not local  # a proxy would see the key, and this machine needs none
        self.name = name or self.only_model()

    def only_model(self):
        """The name of the only model that is served. Mistake if the server does not run."""
        names = lambda data: [str(model["id"]) for model in data["data"]]
        settings = dict(seconds=10, headers=self.headers, read=names)
        try:
            with services.session(tries=1) as session:
                session.trust_env = self.session.trust_env
                served = services.api(session, "GET", f"{self.url}/models", **settings)
        except services.ServiceError as why:
            advice = f"start the server, correct its address, or name a model: {self.url}#MODEL"
            raise Mistake(f"{why}: {advice}.") from why
        if len(served) != 1:
            names = shown(", ".join(served) or "no model")
            raise Mistake(f"{self.host} serves {names}: name one, as in {self.url}#MODEL.")
        return served[0]

    def __str__(self):
        thinks = " | thinks" if self.think else ""
        return f"{shown(self.name)} | a server at {self.host}{thinks}"

    def __call__(
        self, prompts: list[str], temperature: float = 0.0, max_new_tokens: int | None = None
    ) -> list[Completion]:
        """[Completion] of the prompts, in their order. At temperature 0, equal ones are sent once.

        Above it, each request has a seed of its own, drawn from torch. So torch.manual_seed decides
        the samples of a server, too, if it takes seeds."""
        distinct = list(prompts) if temperature else list(dict.fromkeys(prompts))
        same = {
            "model": self.name,
            "temperature": float(temperature),
            "max_tokens": max_new_tokens or NEW_TOKENS,
            "chat_template_kwargs": {"enable_thinking": self.think, "thinking": self.think},
        }
        if not self.think:  # Ollama, LM Studio and hosted models read this instead
            same["reasoning_effort"] = "none"
        bodies = [{"messages": [{"role": "user", "content": defuse(p)}], **same} for p in distinct]
        for body in bodies if temperature else ():
            body |= {"top_p": 1.0, "seed": torch.randint(2**31, ()).item()}
        with ThreadPoolExecutor(self.at_once) as pool:
            completions = list(pool.map(self.request, bodies))
        return for_each(prompts, distinct, completions)

    def request(self, body: dict) -> Completion:
        """The Completion of one request; if the request fails, a Completion with its error.

        If the server refuses a field, the request is repeated without it, or with its newer name.
        What has helped is remembered.
        """
        refused, url = set(self.refused), f"{self.url}/chat/completions"
        settings = dict(seconds=self.seconds, again=4, headers=self.headers)
        settings["read"] = lambda data: (self.completion(data, body), data)
        post = lambda sent: services.api(self.session, "POST", url, json=sent, **settings)
        answered, tries = None, 9  # of a minute each: an account may be allowed few requests
        while True:
            sent = {field: value for field, value in body.items() if field not in refused}
            if "max_tokens" in refused:  # by OpenAI's newer models
                sent["max_completion_tokens"] = body["max_tokens"]
            try:
                answered = answered or post(sent)
                completion, data = answered
                whole = self.is_whole(data, sent, post)
            except services.ServiceError as why:
                if why.status in (429, 529) and "insufficient_quota" not in why.body and tries:
                    tries -= 1
                    continue
                field = refused_field(why, sent)
                if not field:
                    return Completion("", [], [], self.error(why))
                refused.add(field)
                answered = None
            else:
                self.remember(refused)
                return completion if whole else replace(completion, text="", error=TOO_LONG)

    def is_whole(self, data, sent, post):
        """Did the server read all of the prompt? data: its answer to `sent`, which `post` sends.

        A server that cuts prompts counts what is left, so a longer one has no more tokens. So the
        prompt is sent twice more, behind one word and behind 65, which are in no cache. This is
        rare: only if the server counts more tokens than of any whole prompt, or fewer than words (a
        word has at least one). The latter may also mean that it does not count the tokens in its
        cache (Ollama and others): then the words decide, once a prompt with no fewer was whole, or
        one with no more was cut.
        """
        prompt, tokens = sent["messages"][0]["content"], count(data, "usage", "prompt_tokens")
        words = len(WORD.findall(prompt))
        whole = lambda: words <= tokens <= self.most_tokens or tokens < words <= self.longest_whole
        if not tokens or whole():
            return True
        with self.asking:  # one at a time: most prompts are known by then
            cut = words >= self.shortest_cut if tokens < words else tokens == self.left
            if whole() or cut:
                return whole()
            counts = []
            for more in (1, 65):
                uncached = " ".join(os.urandom(4).hex() for _ in range(more))
                longer = {"role": "user", "content": f"{uncached} {prompt}"}
                try:
                    _, data = post(sent | {"messages": [longer]})
                except services.ServiceError as why:
                    if self.error(why) != TOO_LONG:
                        raise
                    return True  # this server refuses what it cannot read
                counts.append(count(data, "usage", "prompt_tokens") or 0)
            if words < counts[0] <= counts[1] - 64:
                self.longest_whole = max(self.longest_whole, words)
                self.most_tokens = max(self.most_tokens, counts[0])
                return True
            self.shortest_cut, self.left = min(self.shortest_cut, words), max(tokens, counts[0])
            return False

    def remember(self, refused):
        """Do without these fields from now on. The user is told once."""
        with self.lock:
            for field in refused - self.refused - {"max_tokens"}:
                sentence = f"{self.host} refuses the field {field}: its own setting counts."
                print(sentence, file=sys.stderr)
            self.refused |= refused

    def completion(self, data, body):
        """The Completion in a server's answer to a body.

        ValueError if the answer holds an error: services.api() repeats the request then.
        """
        choice, tokens = data["choices"][0], count(data, "usage", "completion_tokens")
        message, reason = choice["message"], str(choice.get("finish_reason") or "stop").lower()
        if data.get("error") or choice.get("error") or FAILED.search(reason):
            raise ValueError(reason)
        content, calls = message.get("content") or "", message.get("tool_calls")
        if not content and calls and calls[0].get("function"):  # models/calls.py reads them
            content = json.dumps({"tool_calls": calls})
        if isinstance(content, list):  # Mistral's thinking models: only the texts are the answer
            content = "".join(part["text"] for part in content if part["type"].endswith("text"))
        # A server that quotes the key sends it into no prompt, file or terminal.
        text = plain_thoughts(services.without_whole_keys(content))
        full = re.search("length|max_", reason) or (tokens or 0) >= body["max_tokens"]
        cut = bool(full) or reason not in WHOLE
        seen = re.search(r"[^\s\x00-\x1f\x7f-\x9f]", visible(text))
        elsewhere = [name for name in message if message[name] and name not in ("role", "content")]
        said_nothing = None, *range(1, 17)  # tokens of a stop, perhaps with an empty thought
        problem = ""
        if full and not after_thinking(text):
            problem = "its thinking used up all tokens: raise --max-new-tokens"
        elif not seen and elsewhere:
            problem = f"all that it wrote is in {', '.join(elsewhere)}"
        elif text.strip() and not seen:
            problem = "it wrote control characters"
        elif not seen and (cut or "content" not in message or tokens not in said_nothing):
            problem = f"it wrote nothing, and finish_reason is {reason}"
        error = f"{self.host} answered without a text: {shown(problem)}" if problem else ""
        text, total = "" if error else text, count(data, "usage", "total_tokens") or 0
        return Completion(text, [], [], error, usage=total, cut=cut)

    def error(self, why):
        """The error of a Completion. why: services.ServiceError.

        The server's message is shown, but not for 401, which is about the key alone.
        """
        message, codes = messages_of(why.body), " ".join(CODE.findall(why.body))
        if why.status in (200, 400, 413, 422, 500) and OVERFLOW.search(f"{codes} {message}"):
            return TOO_LONG
        if why.status == 400 and any(p.search(f"{codes} {message}") for p in (UNPAID, LOADING)):
            return f"{self.host} refuses every prompt: {shown(message)}"  # an outage
        if why.status == 200 and (message or FAILED.search(codes)):
            message = message or f"finish_reason {codes}"
            return f"{self.host} answered with an error: {shown(message)}"
        if why.status == 401 and not self.headers:
            kept = "is not sent over http" if os.environ.get("OPENAI_API_KEY") else "is not set"
            return f"{why}: OPENAI_API_KEY {kept}"
        return f"{why}: {shown(message)}" if message and why.status != 401 else str(why)


def count(data, *path):
    """The count of tokens at this path of a server's answer; None if there is no sensible one.

    count({"usage": {"total_tokens": 7}}, "usage", "total_tokens") -> 7
    """
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data if type(data) is int and 0 <= data < 10**12 else None


def refused_field(why, sent):
    """The field of a request that its refusal names, if there is something to do; else None."""
    error = f"{messages_of(why.body)} {CODE.findall(why.body)}"
    if why.status not in (400, 422, 500) or OVERFLOW.search(error):
        return None
    # vLLM may name chat_template_kwargs without its last word, others what reasoning_effort means
    named = lambda field: (
        re.search(rf"\b{field.removesuffix('_kwargs')}(_kwargs)?\b", error)
        or (field == "reasoning_effort" and re.search("(?i)reasoning|thinking", error))
    )
    some = REFUSABLE[:2] if why.status == 500 else REFUSABLE  # a crash may quote any setting
    return next((field for field in some if field in sent and named(field)), None)


def messages_of(body):
    """The messages of an error in JSON, of any shape, of which the end may be missing.

    Of an error in plain text: the start of its first line. Nothing else of a server's error is
    looked at, because it may hold the prompt.
    """
    found = dict.fromkeys(json.loads(f'"{text}"', strict=False) for text in MESSAGE.findall(body))
    if not found and body.strip()[:1] not in "{[<":  # "" is in it, too
        return body.strip().splitlines()[0][:200]
    return ": ".join(text for text in found if text)


def shown(text):
    """What a server wrote, for a terminal: no key, no control character, one short line."""
    return truncate(printable(" ".join(services.without_keys(text).split())), 200)
