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
import os
import re
import threading
from pathlib import Path

import requests
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import hub, logging

from models.local import HF
from models.server import Server
from world.services import is_server

DTYPES = ("float32", "bfloat16", "float16", "float64")
HUB_SECONDS = 6               # for the model hub to answer at all


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


def load_engine(name, device=None, dtype=None, think=False):
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
