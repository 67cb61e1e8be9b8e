"""models.server"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import torch

from models.completion import NEW_TOKENS, TOO_LONG, Completion, distinct, in_order
from models.tokens import harmless
from world import services


class Server:
    """A server that speaks OpenAI's chat API, called like HF. url: http://host:8000/v1#model; one model alone needs no name.

    A request that is refused for now (429, 5xx, a dropped connection, a broken answer) is repeated with growing pauses, by
    services.py. If it fails for good, Completion.error says why; nobody may take that for an answer. The key is
    OPENAI_API_KEY; it travels over https or to this machine, never in the clear. The settings that a server takes from the
    checkpoint (top-k, a repetition penalty) are its own: it is no policy to train.

    think goes to servers that name themselves vLLM, SGLang or llama.cpp (`owned_by` in their list of models):
    they pass it to the chat template. Others get no such field: some (OpenAI) refuse what they do not know.
    """

    def __init__(self, url, at_once=16, seconds=300, think=False):
        self.url, _, self.name = url.rstrip("/").partition("#")
        self.at_once, self.seconds = at_once, seconds
        self.url, parts, key = self.url.rstrip("/"), urlsplit(self.url), os.environ.get("OPENAI_API_KEY", "")
        if "@" in parts.netloc:
            raise ValueError("A server's address must hold no password: put the key into OPENAI_API_KEY.")
        self.host = parts.netloc
        here = parts.hostname in ("localhost", "127.0.0.1", "::1")
        self.headers = {"Authorization": f"Bearer {key}"} if key and (here or parts.scheme == "https") else {}
        self.session = services.session(tries=6)
        self.session.trust_env = not here  # a proxy has nothing to do with this machine, and would see the key
        self.think, self.extra = think, {}
        self.name = self.find(self.name)

    def find(self, name):
        """The name of the model, if need be of the one that is served; shows, before any work, that the server is there."""
        once = services.session(tries=1)
        once.trust_env = self.session.trust_env
        owners = lambda data: {str(model["id"]): model.get("owned_by") for model in data["data"]}
        try:
            served, _ = services.api(once, "GET", f"{self.url}/models", 10, headers=self.headers, read=owners)
        except services.Failed as why:
            if why.status is None:
                raise ValueError(f"{why}: start the model server, or correct its address.") from why
            if name:                              # it is there, but gives no list: transformers without a hub
                return name
            raise ValueError(f"{why} instead of its models: name it, as in {self.url}#MODEL.") from why
        if not name and len(served) != 1:
            names = ", ".join(served) or "no model"
            raise ValueError(f"{self.host} serves {names}: name one, as in {self.url}#MODEL.")
        name = name or next(iter(served))
        if served.get(name) in ("vllm", "sglang", "llamacpp"):
            self.extra = {"chat_template_kwargs": {"enable_thinking": self.think}}
        return name

    def __str__(self):
        return f"{self.name} | a server at {self.host}"

    def __call__(self, prompts, temperature=0.0, max_new_tokens=None) -> list[Completion]:
        asked = distinct(prompts, temperature)
        # A seed each, where the server takes one: torch.manual_seed decides here, too, and copies of a prompt still differ.
        seeds = torch.randint(2**31, (len(asked),)).tolist() if temperature != 0 else [None] * len(asked)
        settings = {"temperature": float(temperature), "max_tokens": max_new_tokens or NEW_TOKENS}
        with ThreadPoolExecutor(self.at_once) as pool:
            done = list(pool.map(lambda prompt, seed: self.one(prompt, seed, settings), asked, seeds))
        return in_order(prompts, asked, done, temperature)

    def one(self, prompt, seed, settings):
        """One request: the answer, or why there is none."""
        body = {"model": self.name, "messages": [{"role": "user", "content": harmless(prompt)}], **settings}
        body |= self.extra if seed is None else self.extra | {"seed": seed, "top_p": 1.0}
        try:
            (text, usage), _ = services.api(self.session, "POST", f"{self.url}/chat/completions", self.seconds, again=4, read=chat,
                                            json=body, headers=self.headers)
            return Completion(text, [], [], usage=usage)
        except services.Failed as why:
            long = re.search(r"context[ _](length|window|size)|too long|too many tokens|maximum", why.body, re.I)
            reason = re.search(r'"(?:message|detail)"\s*:\s*"([^"\\]{1,200})', why.body) if why.status in (400, 404, 422) else None
            reason = f"{why}: {reason[1]}" if reason else str(why)  # not of a 401: it may quote the key
            return Completion("", [], [], TOO_LONG if long and why.status in (400, 413, 422) else reason)


def chat(data):
    """(text, tokens) of a chat completion; a model that has nothing to say says null."""
    text, usage = data["choices"][0]["message"]["content"], (data.get("usage") or {}).get("total_tokens")
    return (text or "").strip("\0"), min(int(usage or 0), 10**9)
