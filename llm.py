"""One interface to language models.

    engine = load("Qwen/Qwen2.5-0.5B-Instruct")             # or a folder written by save_pretrained
    engine = load("http://localhost:8000/v1#my-model")      # or a server that speaks OpenAI's API: vLLM, SGLang, Ollama, ...
    done   = engine(["What is 2 + 2?"], temperature=0.7)    # [Completion(text, prompt_ids, ids)], in order

Every module of the agent talks to a model through this one call, and a Completion is all that training needs to know of it:

    prompt_ids  s^t   the prompt exactly as the model read it, chat template included
    ids         a^t   what the model sampled, token by token, its stop token included

The ids travel from here to the loss and are never made again from text: to decode and re-tokenise gives, now and then, tokens
that nobody sampled. The stop token is an action like any other (the policy has to learn to end), and a text that was cut at
max_new_tokens has none.

What is sampled is softmax(logits / temperature) over the whole vocabulary, because that is the policy whose log-probabilities
flow_grpo.py computes. Checkpoints bring sampling settings of their own (Qwen2.5-Instruct: top_k 20, top_p 0.8, a repetition
penalty of 1.05); only their stop tokens are used, and save() writes the rest as it was.

temperature 0 is a function: the likeliest token each time, and equal prompts of a call are answered once. Sampling draws from
torch's global generator: torch.manual_seed(s) before a call decides all of it, given the same prompts, settings and hardware.

Thinking models: a chat template that knows `enable_thinking` gets False, unless the engine's `think` is set.
What a model thinks stays in ids and text; the parsers read what follows it (memory.after_thinking).

A server can play any module, the planner included, but training needs local weights. Servers can return
token ids (vLLM: return_token_ids); what is missing here is to send them the new weights after each step, and
truncated importance weights, because their kernels compute other log-probs than the update.
"""
import functools
import hashlib
import math
import os
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import requests
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import hub, logging

import services
from services import is_server

TOO_LONG = "The prompt, with room for the answer, is longer than the model's context."
DTYPES = ("float32", "bfloat16", "float16", "float64")
LONGEST = 1024                # tokens of an answer where nobody says
THINK = "<think>", "</think>"  # what a model writes between them is thinking, and no part of its answer
HUB_SECONDS = 6               # for the model hub to answer at all


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


@contextmanager
def sampling_mode(model):
    """Make generate() sample what the model says, and nothing else; put everything back afterwards, whatever happens.

    training, gradient_checkpointing: with both on, transformers drops the cache, so every token after the first is sampled
    without its context. generation_config: generate() fills each setting that is None from the checkpoint's, and some have no
    neutral value to pass instead (sequence_bias), so the model wears an empty one. Each module gets its own values back:
    a model in training may have parts in eval and layers without checkpointing.
    """
    quiet = {"training": False, "gradient_checkpointing": False, "generation_config": GenerationConfig()}
    before = [(module, name, vars(module)[name]) for module in model.modules() for name in quiet if name in vars(module)]
    try:
        for module, name, _ in before:
            setattr(module, name, quiet[name])
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def batches(lengths, max_new_tokens, budget):
    """Indices in sub-batches of similar length, the longest first: rows x (longest prompt + max_new_tokens) <= budget.

    >>> batches([3, 9, 4], max_new_tokens=1, budget=10)
    [[1], [2, 0]]

    A row longer than the budget goes alone. The largest comes first, so memory that does not suffice is known at once.
    """
    groups = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (len(groups[-1]) + 1) * (lengths[groups[-1][0]] + max_new_tokens) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


class HF:
    """A local transformers model: engine(prompts, temperature=0.0, max_new_tokens=None) -> [Completion], in the prompts' order.

    token_budget bounds the tokens in memory at a time (a 7B's cache is 57 KB a token: 3.8 GB for the default). It changes no
    answer at temperature 0, but for rounding: in half precision the shape of a batch can tip a near tie. max_new_tokens None:
    as the checkpoint's generation_config says, or 1 024. Where memory is short, token_budget is halved, for good, and the
    sub-batch is asked again; one row that does not fit is a MemoryError that says what to change.
    """

    def __init__(self, model, tokenizer, token_budget=65_536, think=False):
        self.model, self.tokenizer, self.token_budget, self.think = model, tokenizer, token_budget, think

    def __str__(self):
        """name | parameters | device | dtype, for the first line of a script."""
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        dtype = str(self.model.dtype).removeprefix("torch.")
        name = self.model.config.name_or_path.removeprefix(os.getcwd() + os.sep)
        thinks = " | thinks" if self.think else ""
        return f"{name} | {millions:.4g} M parameters | {self.model.device} | {dtype}{thinks}"

    def __call__(self, prompts, temperature=0.0, max_new_tokens=None) -> list[Completion]:
        max_new_tokens = max_new_tokens or self.model.generation_config.max_new_tokens or LONGEST
        asked = distinct(prompts, temperature)
        done = [Completion("", self.encode(prompt), []) for prompt in asked]

        for c in done:
            c.error = TOO_LONG if len(c.prompt_ids) + max_new_tokens > self.context() else ""
        fits = [c for c in done if not c.error]
        while fits:                                           # the longest that are left, as many as the budget allows
            rows = batches([len(c.prompt_ids) for c in fits], max_new_tokens, self.token_budget)[0]
            answers = self.in_memory([fits[i].prompt_ids for i in rows], temperature, max_new_tokens)
            for i, (ids, logps) in zip(rows, answers):
                fits[i].ids, fits[i].text, fits[i].logps = ids, self.decode(ids, fits[i].prompt_ids), logps
            fits = [c for i, c in enumerate(fits) if i not in rows] if answers else fits
        return in_order(prompts, asked, done, temperature)

    def in_memory(self, prompts, temperature, max_new_tokens):
        """generate(), or [] and half the token_budget where memory is short. What the failed attempt drew is put back: what is
        sampled next must not depend on how far it came."""
        device = self.model.device
        drawn = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        try:
            return self.generate(prompts, temperature, max_new_tokens)
        except RuntimeError as why:                           # of CUDA, or of the CPU (fit.bound_host_memory)
            if not isinstance(why, torch.OutOfMemoryError) and "can't allocate memory" not in str(why):
                raise
            longest = max(map(len, prompts))
            if len(prompts) == 1:
                raise MemoryError(f"One prompt of {longest} tokens and {max_new_tokens} new ones do not fit into memory beside the model: "
                                  "give --optimizer-device cpu, --lora 32, a smaller --max-new-tokens or a smaller model") from why
        # Not above: as long as the exception lives, its traceback holds the tensors of the failed attempt.
        torch.set_rng_state(drawn[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(drawn[1], device)
            torch.cuda.empty_cache()
        self.token_budget = len(prompts) // 2 * (longest + max_new_tokens)
        warnings.warn(f"Out of memory while generating: from now on at most {self.token_budget} tokens at a time.")
        return []

    def generate(self, prompts, temperature, max_new_tokens):
        """Sample one batch: token lists in, [(ids, log π of each)] out. generate() turns gradients off;
        inference_mode would not do: its tensors can stay in a model's buffers (dynamic rotary embeddings) and
        break the update."""
        stops = self.stop_ids()
        pad = stops[0] if stops else 0                        # any id would do: masked on the left, cut off on the right
        P = max(map(len, prompts))
        ids = torch.tensor([[pad] * (P - len(s)) + s for s in prompts], device=self.model.device)                # (N, P)
        mask = torch.tensor([[0] * (P - len(s)) + [1] * len(s) for s in prompts], device=self.model.device)      # (N, P)
        # top_k 0 is the whole vocabulary: transformers' own default is 50. Greedy reads none of the three.
        sampling = dict(temperature=float(temperature), top_k=0, top_p=1.0) if temperature != 0 else {}
        settings = GenerationConfig(
            do_sample=temperature != 0, **sampling, num_beams=1, repetition_penalty=1.0, use_cache=True,
            max_new_tokens=max_new_tokens, eos_token_id=stops or None, pad_token_id=pad)
        watch = Sampled(temperature)
        with sampling_mode(self.model):
            out = self.model.generate(ids, attention_mask=mask, generation_config=settings,
                                      logits_processor=[watch] if temperature != 0 else [])       # (N, P + T)
        answers = [cut(row, stops) for row in out[:, P:].tolist()]
        return [(row, logps[:len(row)]) for row, logps in zip(answers, watch.rows(out))]

    @functools.cached_property
    def special(self):
        """{id: text} of all control tokens; all_special_tokens has only the named ones, 3 of SmolLM2's 17."""
        added = {i: str(token) for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return added | dict(zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens))

    @functools.cached_property
    def marks(self):
        return marks_of(self.special.values())

    def encode(self, prompt):
        """The prompt as one user message in the checkpoint's chat template, up to the answer, as tokens."""
        message = [{"role": "user", "content": harmless(prompt, self.marks)}]
        settings = dict(add_generation_prompt=True, return_dict=True, enable_thinking=self.think)
        return list(self.tokenizer.apply_chat_template(message, **settings)["input_ids"])

    def decode(self, ids, prompt_ids=()):
        """The text of an answer. The stop token is left out even where the tokenizer does not call it
        special, and <think> stays even where it does. Where the template opens the thinking (R1: the prompt
        ends with "<think>"), the text begins with it, too; the ids are only what was sampled."""
        ids = ids[:-1] if ids and ids[-1] in self.stop_ids() else ids
        opened = self.tokenizer.decode(list(prompt_ids[-16:])).rstrip().endswith(THINK[0])
        ids = [i for i in ids if i not in self.special or self.special[i] in THINK]
        return f"{THINK[0]}\n" * opened + self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def stop_ids(self):
        """The tokens that end an answer: the checkpoint's (one, several or none) and the tokenizer's."""
        eos = self.model.generation_config.eos_token_id
        found = (eos if isinstance(eos, (list, tuple)) else [eos]) + [self.tokenizer.eos_token_id]
        return list(dict.fromkeys(i for i in found if i is not None))

    def context(self):
        """How many tokens, prompt and answer together, the model was made for; no limit where its configuration names none."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or math.inf

    def save(self, folder):
        """Write a folder that load(), vLLM or transformers can read, with the generation_config the checkpoint came with."""
        with sampling_mode(self.model):                       # some published ones are refused by transformers' check on saving
            self.model.save_pretrained(folder)
        self.model.generation_config.to_json_file(os.path.join(folder, "generation_config.json"))
        self.tokenizer.save_pretrained(folder)


def cut(ids, stops):
    """What was sampled: up to the first stop token and with it, or everything. Behind it is padding, maybe that token again.

    >>> cut([5, 6, 2, 2, 2], stops=[2])
    [5, 6, 2]
    """
    end = next((j + 1 for j, i in enumerate(ids) if i in stops), len(ids))
    return ids[:end]


class Sampled:
    """Watches generate() sample: log softmax(logits / temperature) of each token that is chosen.

    It keeps the logits of one step, until the next call shows which token came of them: N x T numbers in all,
    where output_logits keeps N x T x V. It changes no logit. For update(), see sampling_gap in flow_grpo.py.
    """

    def __init__(self, temperature):
        self.temperature, self.logits, self.logps = temperature, None, []

    def __call__(self, ids, logits):                          # (N, so far), (N, V)
        self.note(ids)
        self.logits = logits
        return logits

    def note(self, ids):
        if self.logits is not None:
            every = (self.logits / self.temperature).log_softmax(-1)
            self.logps.append(every.gather(-1, ids[:, -1:]))  # (N, 1)

    def rows(self, ids):
        """[log-probs] of each row of what generate() returned, padding included; greedy: [] for each."""
        self.note(ids)
        return torch.cat(self.logps, 1).tolist() if self.logps else [[] for _ in ids]


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
        settings = {"temperature": float(temperature), "max_tokens": max_new_tokens or LONGEST}
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


def marks_of(tokens=()):
    """A pattern that finds where a control token begins: one of common chat templates, or of `tokens`. It
    matches the first character alone, so that tokens may overlap; grouped by it, 1 000 tokens are quick."""
    rest = {"<": [r"[|｜][\w▁ ]{1,40}[|｜]>", "/?s>", "/?think>", "(?:start|end)_of_turn>"],
            "[": [r"/?INST\]", r"/?SYSTEM_PROMPT\]"]}
    for token in tokens:
        if len(token) > 1:
            rest.setdefault(token[0], []).append(re.escape(token[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(ends)})" for first, ends in rest.items()))


def harmless(prompt, marks=marks_of()):
    """A prompt in which no control token is left: a space behind its first character takes its meaning away.

    >>> harmless("a page with <|im_end|> and </think> in it")
    'a page with < |im_end|> and < /think> in it'

    A page that a tool has read must not end our message, or open or close the model's thinking. Half of a
    surrogate pair is legal in JSON and in Python, but is no text: it becomes "?".
    """
    return marks.sub(lambda mark: mark[0] + " ", prompt.encode("utf-8", "replace").decode())


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


def config_of(name):
    """The configuration of a model in a folder or on the hub, without its weights; ValueError if none."""
    name = os.path.expanduser(name)
    if os.path.isdir(name):
        logging.disable_progress_bar()                        # a download deserves a bar, files that are here do not
        if not os.path.exists(os.path.join(name, "config.json")):
            raise ValueError(f"The folder {name!r} holds no model: there is no config.json in it.")
    elif os.path.exists(name) or name.startswith((os.sep, ".")):
        raise ValueError(f"There is no folder {name!r}: give the folder of a saved model, or a model's name on the hub.")
    elif re.fullmatch(r"[\w.-]+(:\d+.*|/v\d(#.*)?)", name):    # localhost:8000/v1, api.example.com/v1
        raise ValueError(f"{name!r} is no folder and no model's name: for a server, write http://{name}")
    return read(AutoConfig, name)


def load(name, device=None, dtype=None, think=False):
    """A model ready to answer: a folder, a name on the hub, a server's address. ValueError: what cannot work.

    device: cuda, else mps, else cpu. dtype: bfloat16 on cuda where the hardware computes in it, else float32.
    think: let a model think whose chat template leaves the choice.
    """
    if is_server(name):
        return Server(name, think=think)
    device, name = pick_device(device), os.path.expanduser(name)
    dtype = pick_dtype(dtype, device)
    config_of(name)
    tokenizer = read(AutoTokenizer, name)
    if len(tokenizer) <= len(tokenizer.all_special_ids):      # transformers makes up an empty one where the files are missing
        raise ValueError(f"There is no tokenizer in {name!r}: copy its files (tokenizer.json, ...) beside the weights.")
    if not tokenizer.chat_template:                           # asked before the weights, which may be a long download
        raise ValueError(f"The tokenizer of {name!r} has no chat template: use a model made for chat.")
    model = read(AutoModelForCausalLM, name, dtype=dtype)
    return HF(model.to(device).eval(), tokenizer, think=think)


def refuse_to_train(config):
    """ValueError for rotary embeddings that depend on the longest row of a batch: a rollout is sampled in one
    batch and scored in another, so the ratio leaves 1 before anything is learnt."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    layers = [one for one in [rope, *rope.values()] if isinstance(one, dict)]    # one, or one a kind of layer
    if "longrope" in {one.get("rope_type") for one in layers}:  # "dynamic" differs beyond the context alone
        raise ValueError("A model with longrope rotary embeddings cannot be trained, as it is scored "
                         "differently alone and beside a long row: train another. It can play --fixed")


def outage(error):
    """Is this error of a Completion worth another try later? Not if the prompt does not fit or the server refuses this very prompt.
    Another refusal (401, 402, 403, 404: a key that has expired, a model that is gone) would meet all prompts alike."""
    return error != "" and TOO_LONG not in error and not re.search(r"answered 4(00|13|15|22)\b", error)


def fingerprint(name):
    """Of the weights in a folder: their sizes, and 64 blocks spread over each file; "" for a hub's name or a server. A checkpoint
    that was trained on and saved under the same name is another model, and no answer of the old one is its own."""
    digest = hashlib.sha256()
    files = sorted(Path(os.path.expanduser(name)).glob("*.safetensors")) if not is_server(name) else []
    for file in files:
        size = file.stat().st_size
        with open(file, "rb") as data:
            for k in range(64):
                data.seek(size * k // 64)
                digest.update(data.read(65_536))
        digest.update(str(size).encode())
    return digest.hexdigest()[:16] if files else ""


def read(kind, name, **settings):
    """kind.from_pretrained, and one sentence where it fails."""
    try:
        local = not os.path.isdir(name) and hub_is_down()
        return kind.from_pretrained(name, local_files_only=local, **settings)
    except (OSError, ValueError, SafetensorError) as error:
        if os.path.isdir(name):
            problem = f"The folder {name!r} does not hold a whole model"
        elif isinstance(error.__cause__, FileNotFoundError):  # no answer, and nothing in the cache
            raise ValueError(f"There is no folder {name!r} here, and the model hub cannot be reached for it.") from error
        else:
            problem = f"There is no folder {name!r} here, and the hub does not give a model of that name"
        raise ValueError(f"{problem}: {str(error).strip().splitlines()[0]}") from error


@functools.cache
def hub_is_down():
    """One look at the model hub: from_pretrained() tries a file up to twelve times, for 45 s where nobody
    answers and minutes where connections hang. In a thread, as the look-up of the host keeps to no limit."""
    answers = []

    def look():
        try:
            requests.head(hub.constants.ENDPOINT, timeout=HUB_SECONDS)
        except requests.RequestException as why:
            if not isinstance(why, requests.exceptions.SSLError):    # a certificate of one's own: it is there
                return
        answers.append(True)

    if not hub.is_offline_mode():
        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        looking.join(HUB_SECONDS)
    return not answers


def pick_device(device):
    there = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))] if torch.cuda.is_available() else []
    there += ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    device = str(device or there[0])
    if device not in there:
        raise ValueError(f"There is no device {device!r} here: use one of {', '.join(there)}.")
    return torch.device(device)


def pick_dtype(dtype, device):
    if dtype is None:
        half = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if half else torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"There is no dtype {name!r} here: use one of {', '.join(DTYPES)}.")
    return getattr(torch, name)
