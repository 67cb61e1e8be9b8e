"""Load the engine that a name stands for, or raise one sentence that says why there is none.

    engine = load_engine("Qwen/Qwen2.5-0.5B-Instruct")           # on the hub, or a folder
    engine = load_engine("http://localhost:8000/v1#my-model")    # a server: vLLM, SGLang, Ollama, ...
    completions = engine(["What is 2 + 2?"], temperature=0.7)    # [Completion], in the prompts' order

All modules call their models in this one way. A server can play any module, but training needs local
weights. To sample training rollouts from a server that returns token ids (vLLM: return_token_ids), two things
are missing: sending it the new weights after each step, and truncated importance weights, because its kernels
compute other log-probs than the update.
"""

import functools
import hashlib
import os
import pickle
from pathlib import Path

import requests
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import hub, logging

from models.local import HF
from models.names import check_dtype, check_model
from models.server import Server
from fast.upcast import upcast
from world.services import is_server

HUB_SECONDS = 6  # after which a hub that has not answered is taken to be down


def load_engine(name, device=None, dtype=None, think=False, plain=False):
    """The engine of a folder, a name on the hub or a server's address. ValueError says why there is none.

    device None: cuda, else mps, else cpu. dtype None: bfloat16 on a GPU that computes in it, else float32.
    think: let models think whose chat template leaves the choice. plain: a local model without fast/.
    """
    if is_server(name):
        return Server(name, think=think)
    name, device = os.path.expanduser(name), pick_device(device)
    dtype = pick_dtype(dtype, device)
    config_of(name)
    tokenizer = from_pretrained(AutoTokenizer, name)  # before the weights, which may be a long download
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # without its files transformers makes an empty one
        raise ValueError(f"There is no tokenizer in {name!r}: "
                         "copy its files (tokenizer.json, ...) beside the weights.")
    if not tokenizer.chat_template:
        raise ValueError(f"The tokenizer of {name!r} has no chat template: use a model made for chat.")
    model, report = from_pretrained(AutoModelForCausalLM, name, dtype=dtype, output_loading_info=True)
    if lacking := sorted(report["missing_keys"]):  # transformers fills them with random numbers
        raise ValueError(f"The weights of {name!r} are not whole: {len(lacking)} are missing, such as "
                         f"{lacking[0]}.")
    model = model.to(device).eval()
    if not plain:
        upcast(model)  # for a CPU that is slow in bfloat16
    engine = HF(model, tokenizer, think=think, plain=plain)
    refuse_nan(engine, name)
    return engine


@torch.no_grad()
def refuse_nan(engine, name):
    """ValueError if the model computes nan, on the start of a prompt. Greedy decoding would not show it."""
    ids = torch.tensor([engine.chat.encode("What is 2 + 2?")[:16]], device=engine.model.device)
    try:
        logits = engine.model(ids, use_cache=False).logits
    except (IndexError, RuntimeError) as why:  # more tokens than embeddings, no token at all, ...
        raise ValueError(f"The model {name!r} cannot read a prompt: {first_line(why)}") from why
    if logits.isnan().any():
        raise ValueError(f"The model {name!r} computes nan: its weights are damaged, or too large for "
                         f"{engine.model.dtype}: give another --dtype")


def config_of(name):
    """The configuration of a model in a folder or on the hub; no weights are loaded. ValueError if none."""
    check_model(name)
    name = os.path.expanduser(name)
    if os.path.isdir(name):
        logging.disable_progress_bar()  # a download shows its progress, a local folder does not
        if os.path.exists(os.path.join(name, "adapter_config.json")):  # transformers would load their base
            raise ValueError(f"The folder {name!r} holds adapters at its top: merge them into their model "
                             "first.")
    config = from_pretrained(AutoConfig, name)
    if "/" in str(getattr(config, "_attn_implementation", None)):
        raise ValueError(f"{name!r} names a kernel on the hub, {config._attn_implementation}: code that a "
                         "model brings along is not run here")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name!r} is a model of type {config.model_type!r}, which does not continue a text "
                         "from left to right: use a causal language model made for chat.")
    if config.model_type == "rwkv":
        raise ValueError(f"{name!r} is an RWKV, which transformers lets read the padding of a batch as if it "
                         "were text: use another model, or serve it and give the server's address.")
    return config


def first_line(error):
    """What an error says, on one line: those of transformers may have a hundred."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def from_pretrained(kind, name, **settings):
    """kind.from_pretrained(name); an error becomes a ValueError of one sentence."""
    try:
        local = not os.path.isdir(name) and hub_is_down()
        # Code that a model brings along is not run, and nobody is asked whether to run it.
        return kind.from_pretrained(name, local_files_only=local, trust_remote_code=False, **settings)
    except pickle.UnpicklingError as error:
        raise ValueError(f"The weights of {name!r} are no plain tensors: they would run code while they are "
                         "read, or are damaged. Take a model that is saved as safetensors") from error
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RuntimeError, ImportError,
            SafetensorError, StrictDataclassError) as error:
        reason = first_line(error)
        nowhere = f"There is no folder {name!r} here"
        if "trust_remote_code" in str(error):
            problem = f"{name!r} brings Python code of its own, which is not run here: use another model."
        elif isinstance(error, ImportError):  # a quantized model needs a package
            problem = f"{name!r} cannot be loaded: {reason}"
        elif os.path.isdir(name):
            problem = f"The folder {name!r} does not hold a whole model: {reason}"
        elif isinstance(error.__cause__, FileNotFoundError):  # the hub is down, and nothing is in the cache
            problem = f"{nowhere}, and the model hub cannot be reached for it."
        else:
            problem = f"{nowhere}, and the hub does not give a model of that name: {reason}"
        raise ValueError(problem) from error


@functools.cache
def hub_is_down():
    """Does the model hub give no answer within HUB_SECONDS? Found out once; then only local files are read.

    Without this, from_pretrained() tries each file up to twelve times: 45 s if nothing listens, minutes if
    connections hang. Only the look-up of the hub's name has no limit but the system's own.
    """
    if hub.is_offline_mode():
        return True
    try:
        requests.head(hub.constants.ENDPOINT, timeout=HUB_SECONDS)
    except requests.RequestException as why:
        # with an SSLError, requests distrusts the certificate of a hub that answers
        return not isinstance(why, requests.exceptions.SSLError)
    return False


def pick_device(device):
    """The torch.device of that name; None: the fastest that this machine has."""
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    available = ["cuda", *gpus] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
    available.append("cpu")
    device = str(device or available[0])
    if device not in available:
        raise ValueError(f"There is no device {device!r} here: use one of {', '.join(available)}.")
    return torch.device(device)


def pick_dtype(dtype, device):
    """The torch.dtype of that name; None: bfloat16 on a GPU that computes in it, else float32."""
    if dtype is None:
        half = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if half else torch.float32
    return getattr(torch, check_dtype(dtype))


def refuse_to_train(config):
    """ValueError if the rotary embeddings of a row depend on the longest row of its batch (longrope).

    A rollout is sampled in one batch and scored in another, so its ratio ρ would leave 1 before anything is
    learnt. "dynamic" ones depend on it only beyond the context, which no rollout reaches.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *rope.values()]  # one for all layers, or one for each kind of layer
    if any(isinstance(kind, dict) and kind.get("rope_type") == "longrope" for kind in kinds):
        raise ValueError("A model with longrope rotary embeddings cannot be trained, as it is scored "
                         "differently alone and beside a long row: train another. It can play --fixed")


def fingerprint(name):
    """A hash of the weights in a folder: of each file's size and of 64 blocks spread over it.

    It tells two models apart that were saved in the same folder, one after the other: a run must not mix
    their answers. "" for a name on the hub and for a server.
    """
    files = sorted(Path(os.path.expanduser(name)).glob("*.safetensors"))  # none for a server
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        with open(file, "rb") as data:
            for k in range(64):
                data.seek(size * k // 64)
                digest.update(data.read(65_536))
        digest.update(str(size).encode())
    return digest.hexdigest()[:16] if files else ""
