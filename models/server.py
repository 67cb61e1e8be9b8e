"""Server, the engine for servers with OpenAI's chat API: vLLM, SGLang, llama.cpp, Ollama, OpenAI, ...

    engine = Server("http://localhost:8000/v1#my-model")       # a server with one model needs no name
    completions = engine(["What is 2 + 2?"])                   # texts only: prompt_ids and ids are empty

world/services.py retries, with growing pauses, what may work later (429, 5xx, a dropped connection, a broken
answer). If a request fails for good, Completion.error says why, and no rollout takes that for an answer.

The key is OPENAI_API_KEY. It is sent over https or to this machine only, never in the clear. A server may
sample with the checkpoint's settings (top-k, a repetition penalty), so it cannot be the policy in training.
"""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from models.completion import NEW_TOKENS, TOO_LONG, Completion, once_each
from models.tokens import defuse
from world import services
from world.text import printable, truncate

# The kinds of servers (owned_by in their list of models) that pass chat_template_kwargs to the chat template.
# Others do not get this field, because some (OpenAI) refuse unknown fields.
TEMPLATE_SERVERS = ("vllm", "sglang", "llamacpp")
# What servers write if a prompt, with room for its answer, does not fit. Nothing else means that: an
# exhausted quota, too, has a maximum that is exceeded.
OVERFLOW = re.compile("|".join([
    "context_length_exceeded", "exceed_context_size_error",  # the codes of OpenAI and llama.cpp
    "(maximum|model's) context length",  # OpenAI, vLLM, SGLang: "This model's maximum context length is"
    "maximum model length", "too long to fit into the model",  # vLLM
    r"\) exceeds the maximum allowed length",  # SGLang: "Input length (9 tokens) exceeds the maximum allowed"
    "exceeds? (the )?(max |available )?context (size|length|window|limit)",  # llama.cpp, Ollama, Anthropic
    "prompt (is )?too long",  # Anthropic, Ollama
    "`inputs` must have less than", r"`inputs` tokens \+ `max_new_tokens` must be",  # TGI
    "exceeds the maximum number of tokens allowed",  # Gemini: "The input token count (9) exceeds"
]), re.IGNORECASE)
MESSAGE = re.compile(r'"(?:message|msg|detail|error)"\s*:\s*"((?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*)')
CODE = re.compile(r'"(?:code|type)"\s*:\s*"([^"\\]*)"')
# A 400 that any prompt would have met: the account is used up. Others answer 402 or 429 then.
UNPAID = re.compile(r"quota|billing|credit|balance|spend|payment", re.IGNORECASE)
SHOWN = 8  # models of a server that a sentence names


class Server:
    """A model server, called with prompts. url: http://host:8000/v1#model. at_once: requests at a time.

    think: let the model think; needs one of TEMPLATE_SERVERS.
    """

    def __init__(self, url, at_once=16, seconds=300, think=False):
        url, _, name = url.partition("#")
        self.url, self.at_once, self.seconds, self.think = url.rstrip("/"), at_once, seconds, think
        parts = urlsplit(self.url)
        if "@" in parts.netloc:
            raise ValueError("A server's address must hold no password: put the key into OPENAI_API_KEY.")
        if parts.query:  # it would stand in args.json and in each checkpoint's train.json
            raise ValueError("A server's address must end with its path, such as /v1, and hold no \"?\": put "
                             "the key into OPENAI_API_KEY.")
        self.host, key = parts.netloc, os.environ.get("OPENAI_API_KEY", "")
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        key = key if local or parts.scheme == "https" else ""
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.session = services.session(tries=6)
        self.session.trust_env = not local  # a proxy would see the key, and this machine needs none
        self.extra = {}  # fields of a request that only TEMPLATE_SERVERS understand
        self.name = self.find(name)

    def find(self, name):
        """The model's name: the given one, or the only one served. ValueError if the server does not run."""
        session = services.session(tries=1)
        session.trust_env = self.session.trust_env
        # in http://localhost:8000 the path is missing that nearly all of these servers have
        urls = [self.url] if urlsplit(self.url).path else [f"{self.url}/v1", self.url]
        try:
            self.url, owners = self.first_list(session, urls)
        except services.ServiceError as why:
            self.url = urls[0]
            if why.status is None:
                raise ValueError(f"{why}: start the model server, or correct its address.") from why
            if not name:
                raise ValueError(f"{why} instead of its models: name it, as in {self.url}#MODEL.") from why
            return name  # the server runs but lists no models, like transformers' own server offline
        name = f"{name}:latest" if f"{name}:latest" in owners else name  # in Ollama's list
        if name not in owners and (name or len(owners) != 1):
            names = ", ".join(shown(other, 80) for other in list(owners)[:SHOWN]) or "no model"
            number = f"{len(owners)} models, such as " if len(owners) > SHOWN else ""
            serves = f"{self.host} serves {number}{names}" + (f", not {name}" if name else "")
            raise ValueError(f"{serves}: name one, as in {self.url}#MODEL.")
        name = name or next(iter(owners))
        if owners.get(name) in TEMPLATE_SERVERS:
            self.extra = {"chat_template_kwargs": {"enable_thinking": self.think}}
        return name

    def first_list(self, session, urls):
        """(url, {name of a model: the kind of server}) of the first of these urls that lists its models."""
        failures = []
        for url in urls:
            try:
                return url, services.api(session, "GET", f"{url}/models", 10, headers=self.headers,
                                         read=owners_of)
            except services.ServiceError as why:
                failures.append(why)
        raise failures[0]

    def __str__(self):
        return f"{shown(self.name, 200)} | a server at {self.host}"

    def __call__(self, prompts, temperature=0.0, max_new_tokens=None) -> list[Completion]:
        settings = {"temperature": float(temperature), "max_tokens": max_new_tokens or NEW_TOKENS}
        return once_each(lambda distinct: self.answer(distinct, settings), prompts, temperature)

    def answer(self, prompts, settings):
        """A Completion for each prompt. Above temperature 0 each request has a seed of its own, drawn from
        torch: if the server takes seeds, torch.manual_seed decides its samples, too, and copies of a prompt
        differ.
        """
        shared = {"model": self.name, **settings, **self.extra}
        bodies = [shared | {"messages": [{"role": "user", "content": defuse(prompt)}]} for prompt in prompts]
        if settings["temperature"] != 0:
            import torch  # not above: whether a server runs is found out before torch is imported

            for body, seed in zip(bodies, torch.randint(2**31, (len(bodies),)).tolist()):
                body.update(seed=seed, top_p=1.0)
        with ThreadPoolExecutor(self.at_once) as pool:
            return list(pool.map(self.request, bodies))

    def request(self, body):
        """The Completion of one request; if the request fails, a Completion with its error."""
        url = f"{self.url}/chat/completions"
        try:
            text, usage = services.api(self.session, "POST", url, self.seconds, again=4,
                                       read=text_and_usage, json=body, headers=self.headers)
            return Completion(text, [], [], usage=usage)
        except services.ServiceError as why:
            return Completion("", [], [], error_of(why))


def error_of(why):
    """The error of a Completion. why: services.ServiceError. Its message is shown where it helps: not
    for 401, which is about the key alone, nor for what was retried."""
    codes, message = message_of(why.body)
    if why.status in (400, 413, 422, 500) and OVERFLOW.search(f"{codes} {message}"):
        return TOO_LONG
    if why.status == 400 and UNPAID.search(f"{codes} {message}"):
        return f"{str(why).partition(' ')[0]} does not serve this account: {shown(message)}"  # an outage
    return f"{why}: {shown(message)}" if message and why.status in (400, 404, 422) else str(why)


def message_of(body):
    """(codes and types, message) of an error in JSON, of any shape, of which the end may be missing.

    Nothing else of a server's error is looked at, because it may hold the prompt."""
    found = MESSAGE.search(body)
    return " ".join(CODE.findall(body)), json.loads(f'"{found[1]}"', strict=False) if found else ""


def shown(text, length=200):
    """What a server wrote, for a terminal: no key, no control character, one line of this length."""
    return truncate(printable(" ".join(services.without_keys(text).split())), length)


def owners_of(data):
    """{name of a model: the kind of server} from a server's list of models."""
    return {str(model["id"]): model.get("owned_by") for model in data["data"]}


def text_and_usage(data):
    """(text, number of tokens) of a chat completion. null stands for an empty text.

    A server that quotes the key sends it into no prompt, file or terminal."""
    text, usage = data["choices"][0]["message"]["content"], (data.get("usage") or {}).get("total_tokens")
    text = services.without_whole_keys((text or "").strip("\0"))
    return text, max(0, min(int(usage or 0), 10**9))
