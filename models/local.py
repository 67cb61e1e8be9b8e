"""Local models: load() one, sample() from it, save() it. Engine calls it with prompts.

    engine = load("Qwen/Qwen2.5-0.5B-Instruct", distribution)     # a folder, or a name on the hub
    completions = engine(["What is 2 + 2?"], temperature=0.7)      # [Completion], in their order

    prompt -> chat.encode() -> ids of s^t -> sample() -> ids of a^t -> chat.decode() -> text

distribution(logits, temperature) is flow_grpo's, which says what is sampled and what is scored. The
folders of this project import none of the nine scripts at the top, so it is handed in. So is
`prefill`, a faster way to begin: fast/prefix.py computes once what the prompts of a batch share.

Temperature 0 takes the likeliest token each time. Above it, the random numbers come from torch's
global generator: torch.manual_seed(s) before a call decides the samples, given the same prompts,
settings and hardware.
"""

import hashlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedConfig
from transformers.utils import cached_file, logging

from models.chat import Chat
from models.completion import NEW_TOKENS, TOO_LONG, Completion, for_each, is_server
from world.mistakes import Mistake
from world.text import printable

TOKENS = 65_536  # of a sampling batch: the cache of a 7B is 57 KB a token, so this is 3.8 GB
THREADS = torch.get_num_threads()
WIDTHS = set()  # hidden sizes of the models on the CPU


class MicroBatch(NamedTuple):
    """What the model reads at once in an update: actions as rows of tokens (flow_grpo.padded())."""

    actions: list  # [flow_grpo.Action], the K action tokens in this order
    x: torch.Tensor  # (B, L) the tokens, on the CPU, padded on the right
    place: torch.Tensor  # (K,) where each action token is predicted: an index into x.flatten()
    settings: dict  # {name: tensor} of more arguments for the model; {} for one action a row


# ------------------------------------------------------------------------------------------- load
def load(
    name: str,
    distribution: Callable,
    device: str | None = None,
    dtype: str | None = None,
    think: bool = False,
    prefill: Callable | None = None,
    trainable: bool = False,
) -> "Engine":
    """The Engine of a folder or of a name on the hub. Mistake says why there is none.

    device, dtype: names; None: the best for this machine, see pick_device() and pick_dtype().
    think: let models think whose chat template leaves the choice. prefill: see sample(). A
    checkpoint with adapters is loaded as its base model with them; trainable: to train them on."""
    given, device = name, pick_device(device)
    name = base_of(given) or given
    if os.path.isdir(name):
        logging.disable_progress_bar()  # a download shows its progress; a folder needs none
    try:
        # before the weights, a long download
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        settings = dict(dtype=pick_dtype(dtype, device), output_loading_info=True)
        settings |= dict(config=load_config(name), trust_remote_code=False)
        model, report = AutoModelForCausalLM.from_pretrained(name, **settings)
    except Mistake:
        raise
    except (OSError, ValueError) as why:
        raise Mistake(f"there is no model {name!r} that can be loaded: {headline(why)}") from why
    except ImportError as why:
        raise Mistake(f"{name!r} needs a package: {' '.join(str(why).split())}") from why
    if not tokenizer.chat_template:
        raise Mistake(f"{name!r} has no chat template: use a model made for chat")
    if lacking := report["missing_keys"]:  # transformers fills them with random numbers
        raise Mistake(f"the weights of {name!r} are not whole: {min(lacking)} is missing")
    model = model.to(device).eval()
    model.published, _ = PreTrainedConfig.get_config_dict(name)  # as it is now: see save()
    if hasattr(model, "is_quantized"):  # it was
        model._weight_conversions = None  # with them, save() would quantise again
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        WIDTHS.add(model.config.get_text_config().hidden_size)
        # the threads of a small product only wait for each other
        torch.set_num_threads(1 if max(WIDTHS) < 512 else THREADS)
    forbid_ids_without_token(model, tokenizer)
    engine = Engine(model, tokenizer, distribution, given, think=think, prefill=prefill)
    for remark in filter(None, engine.chat.remarks()):
        print(printable(remark), file=sys.stderr)
    # with the token that sample() pads with, and with another one
    if not all(ignores_padding(model, pad) for pad in (*engine.chat.stops[:1], 7)):
        why = "computes nan, or reads the padding of a batch as if it were text"
        raise Mistake(f"{name!r} {why}: use another model, or a server's address")
    if name != given:
        seen = Path(given, "base.txt")
        if seen.exists() and seen.read_text() not in ("", fingerprint(name)):  # "": not known
            raise Mistake(f"{given} has adapters for other weights than {name} now has")
        settings = dict(is_trainable=trainable, autocast_adapter_dtype=False)
        engine.model = peft().PeftModel.from_pretrained(model, given, **settings)
    return engine


def headline(why):
    """The first line of an error of transformers, and the second if the first ends with a colon."""
    lines = [line.strip() for line in str(why).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def load_config(name):
    """The model's configuration. FP8 and MXFP4 weights are loaded as ordinary numbers: a training
    step is smaller than the gap between two quantised ones.

    Mistake if they are quantised in another way (GPTQ, AWQ, bitsandbytes)."""
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    for part in (config, config.get_text_config()):
        if quantised := getattr(part, "quantization_config", None):
            if (method := quantised.get("quant_method")) not in ("fp8", "mxfp8", "mxfp4"):
                cure = "use the model it was made of, or serve it and give the server's address"
                raise Mistake(f"{name!r} is quantised ({method}): {cure}")
            quantised["dequantize"] = True
    return config


def base_of(name: str) -> str | None:
    """The base model of a checkpoint with adapters; None for any other model."""
    config = Path(name) / "adapter_config.json"
    if not config.exists():
        return None
    base = json.loads(config.read_text())["base_model_name_or_path"]
    if is_server(base):  # a folder must not choose who gets our key
        raise Mistake(f"{name}: its base model is said to be a server, {base}")
    return base


def peft():
    """The optional package peft. Its import takes two seconds."""
    try:
        import peft
    except ImportError as why:
        raise Mistake("adapters need the package peft: pip install peft") from why
    # peft 0.21 reads an attribute that transformers 5.23 has renamed
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
    return peft


def pick_device(device: str | None) -> torch.device:
    """The torch.device of that name; None: cuda if there is one, else cpu. (Nothing was tried on
    mps, where starting an operation takes long for a model as small as the toy.)"""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def pick_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
    """The torch.dtype of that name; None: bfloat16 on a GPU that computes in it, else float32."""
    half = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return getattr(torch, dtype or ("bfloat16" if half else "float32"))


def forbid_ids_without_token(model, tokenizer):
    """Vocabularies are often padded: some rows of the head have no token. Were such an id sampled,
    it would be scored and trained on, but missing in the text. So their probability is 0. (Their
    logits are finite, so that π log π is 0, too.)"""
    head, known = model.get_output_embeddings(), {*tokenizer.get_vocab().values()}
    unknown = [i for i in range(len(head.weight)) if i not in known]
    if unknown:
        ids = torch.tensor(unknown, device=model.device)
        head.register_forward_hook(lambda _, states, logits: logits.index_fill(-1, ids, -1e4))


@torch.no_grad()
def ignores_padding(model, pad=7):
    """Does a short row get the same logits alone as beside a longer one, but for rounding?

    Not with a recurrent layer that reads the padding as if it were text (RecurrentGemma, MiniMax).
    pad: the token to pad with. Some tokens cannot show it, because their embedding is 0."""
    short, long = [5, 3, 4], [5, 3, 4, 6, 7, 5, 8, 3, 9, 4, 6, 3] * 3

    def logits(prompts):  # of four tokens after the first prompt
        ids, mask = left_padded(prompts, pad, model.device)
        settings = dict(max_new_tokens=4, pad_token_id=pad, output_logits=True)
        with sampling_mode(model):
            out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **settings)
        found = torch.stack([logits[0] for logits in out.logits])
        return found[found != -math.inf]

    alone, beside = logits([short]), logits([short, long])
    return bool((alone - beside).norm() <= torch.finfo(model.dtype).eps ** 0.6 * alone.norm())


# ----------------------------------------------------------------------------------------- sample
def sample(
    model,
    prompts: list[list[int]],
    stops: list[int],
    temperature: float,
    max_new_tokens: int,
    distribution: Callable,
    prefill: Callable | None = None,
) -> list[list[int]]:
    """Complete prompts, given as token lists: the ids of each completion, up to its stop token.

    The policy is distribution() over the whole vocabulary, and nothing else: call this in
    sampling_mode(), which hides the checkpoint's own settings. stops: the tokens that end a
    completion. prefill: None, or fast.prefix.prefill: it computes once what the prompts share."""
    pad = stops[0] if stops else 0  # any token: the mask hides it on the left, upto_stop() drops it
    if prefill:
        ids, mask, cache = prefill(model, prompts, pad)
    else:
        ids, mask, cache = *left_padded(prompts, pad, model.device), None
    log_pi = lambda ids, logits: distribution(logits, temperature or 1.0)
    out = model.generate(
        ids,  # (B, P) padded on the left, because generate() goes on at the right end of each row
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        # no top_k, top_p here: what is scored would differ, so edit distribution(), which does both
        # no stop_strings: padding after them would count as sampled; add a token to chat.stops
        **(dict(do_sample=True, top_k=0, top_p=1.0) if temperature else {}),
        eos_token_id=stops or None,
        pad_token_id=pad,
        logits_processor=LogitsProcessorList([log_pi]),  # generate() draws from softmax(log π) = π
        synced_gpus=False,  # with several GPUs: each has all weights here, and generates on its own
    )
    return [upto_stop(new, stops) for new in out[:, ids.shape[1] :].tolist()]


def left_padded(
    prompts: list[list[int]], pad: int, device: torch.device, shared: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) of the prompts, (N, P). The padding comes after their `shared` first tokens,
    which must be equal."""
    P = max(map(len, prompts))
    gaps = [P - len(prompt) for prompt in prompts]
    ids = [[*s[:shared], *[pad] * gap, *s[shared:]] for s, gap in zip(prompts, gaps, strict=True)]
    mask = [[1] * shared + [0] * gap + [1] * (P - shared - gap) for gap in gaps]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def upto_stop(ids: list[int], stops: list[int]) -> list[int]:
    """The sampled tokens: all up to and including the first stop token. The rest is padding.

    >>> upto_stop([5, 6, 2, 2, 2], stops=[2])
    [5, 6, 2]
    """
    end = next((j + 1 for j, i in enumerate(ids) if i in stops), len(ids))
    return ids[:end]


class Engine:
    """A transformers model with its tokenizer, called with prompts.

    sampling_tokens: the most tokens of a batch, prompts and completions together; each row counts
    row_tokens more (scale/fit.py). Both bound the memory. They decide which rows are sampled
    together, and so each row's random numbers; greedy texts change by rounding alone. adapters:
    False switches the adapters of the model off: π_ref and the frozen modules, in the memory of
    the policy."""

    def __init__(
        self, model, tokenizer, distribution, name="", *, think=False, prefill=None, adapters=True
    ):
        self.model, self.tokenizer, self.distribution = model, tokenizer, distribution
        self.think, self.prefill, self.adapters = think, prefill, adapters
        self.chat = Chat(tokenizer, model.generation_config, think)
        self.sampling_tokens, self.row_tokens = TOKENS, 0
        self.name = name or model.config.name_or_path
        self.fingerprint = fingerprint(self.name)

    def __call__(
        self, prompts: list[str], temperature: float = 0.0, max_new_tokens: int | None = None
    ) -> list[Completion]:
        """[Completion] of the prompts, in their order.

        At temperature 0, equal prompts are answered once. Above it they never are: the rollouts of
        a group must be able to differ. max_new_tokens None: as many as the checkpoint's
        generation_config says, or else NEW_TOKENS. A prompt without room for them is TOO_LONG."""
        limit, context = self.new_tokens(max_new_tokens), self.context()
        if limit >= context:
            why = f"leaves no room for a prompt in the {context} tokens of {self.name}"
            raise Mistake(f"--max-new-tokens {limit} {why}")
        encoded = {prompt: self.prepare(prompt, limit) for prompt in set(prompts)}
        distinct = list(prompts) if temperature else list(dict.fromkeys(prompts))
        completions = [replace(encoded[prompt]) for prompt in distinct]
        left = [c for c in completions if not c.error]
        left.sort(key=lambda c: len(c.prompt_ids), reverse=True)  # similar lengths: little padding
        with self.sampling():
            while left:
                longest = len(left[0].prompt_ids) + limit
                batch = left[: self.rows(longest)]
                settings = self.chat.stops, temperature, limit, self.distribution, self.prefill
                try:
                    sampled = sample(self.model, [c.prompt_ids for c in batch], *settings)
                except torch.OutOfMemoryError:
                    if len(batch) == 1:
                        raise
                    # half as many rows, from now on
                    self.sampling_tokens = len(batch) // 2 * (longest + self.row_tokens)
                    continue
                for c, ids in zip(batch, sampled, strict=True):
                    c.ids, c.text = ids, self.chat.decode(ids, c.prompt_ids)
                    c.cut = not ids or ids[-1] not in self.chat.stops
                left = left[len(batch) :]
        return for_each(prompts, distinct, completions)

    def rows(self, tokens: int) -> int:
        """How many rows of so many tokens make a batch."""
        return max(1, self.sampling_tokens // (tokens + self.row_tokens))

    def prepare(self, prompt, limit):
        """The Completion of a prompt before anything is sampled, or with the error why not."""
        try:
            ids = self.chat.encode(prompt)
        except ValueError as why:
            return Completion("", [], [], error=f"the prompt was not sent: {why}")
        return Completion("", ids, [], TOO_LONG if len(ids) + limit > self.context() else "")

    def new_tokens(self, given: int | None) -> int:
        """The most tokens of a completion: those given, the checkpoint's, or NEW_TOKENS."""
        return given or self.model.generation_config.max_new_tokens or NEW_TOKENS

    @contextmanager
    def sampling(self):
        """The model as this engine samples from it: sampling_mode(), with adapters on or off."""
        adapters_off = nullcontext() if self.adapters else self.model.disable_adapter()
        with sampling_mode(self.model), adapters_off:
            yield

    def context(self) -> int | float:
        """The most tokens of prompt and answer together; infinite where the model names none.

        With longrope (Phi-3), a row longer than the original context changes the positions of all
        rows in its batch: they would not be scored as they were sampled. So no row gets longer.
        (Dynamic NTK does the same, but only beyond max_position_embeddings.)"""
        config = self.model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            return rope["original_max_position_embeddings"]
        return getattr(config, "max_position_embeddings", None) or math.inf

    def __str__(self):
        """name | parameters | device | dtype, for the first lines of a run."""
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        dtype = str(self.model.dtype).removeprefix("torch.")
        thinks = " | thinks" if self.think else ""
        return f"{self.name} | {millions:.4g} M parameters | {self.model.device} | {dtype}{thinks}"


# ------------------------------------------------------------------------- the state of the model
@contextmanager
def sampling_mode(model):
    """Hide the checkpoint's settings of sampling from generate(); restore them after.

    generation_config: generate() takes each setting that it is not given from the checkpoint (for
    Qwen2.5-Instruct: top_k 20, top_p 0.8, a repetition penalty of 1.05). Some have no neutral value
    that could be passed (sequence_bias), so the model gets an empty one.
    training, gradient_checkpointing: if both are on, transformers drops the cache, and every token
    after the first is sampled without its context. Each module gets its own values back, because a
    model in training may have parts in eval. (vars(): only what the module itself has set.)

    Not in torch.inference_mode(): its tensors could stay in the model's buffers (dynamic rotary
    embeddings) and break the update. generate() itself uses no_grad().
    """
    neutral = {"training": False, "gradient_checkpointing": False}
    neutral["generation_config"] = GenerationConfig()
    each = [vars(module) for module in model.modules()]
    before = [{name: own[name] for name in neutral if name in own} for own in each]
    try:
        for own in each:
            own.update({name: neutral[name] for name in neutral if name in own})
        yield
    finally:
        for own, values in zip(each, before, strict=True):
            own.update(values)


def ready_to_update(model) -> None:
    """Dropout off, because the model that is scored must be the one that sampled.

    transformers checkpoints a layer only if the layer's own `training` flag is set, but
    model.train() would also turn on dropout. So all modules are in eval mode, and only the layers
    to checkpoint get the flag. Layers of some families (OPT) call dropout themselves while it is
    set: their own rates become 0."""
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


@contextmanager
def without_head(model):
    """The model returns the states before its output layer (the head) in place of logits; yields
    the head, which makes logits of them.

    Some models bound or scale their logits behind the head (Gemma 2, Granite). These return their
    logits, and the head that is yielded changes nothing."""
    head = model.get_output_embeddings()
    if not hasattr(model, "head_is_last"):
        model.head_is_last = head_is_last(model, head)
    if not model.head_is_last:
        yield torch.nn.Identity()
        return
    model.set_output_embeddings(torch.nn.Identity())
    try:
        yield head
    finally:
        model.set_output_embeddings(head)


@torch.no_grad()
def head_is_last(model, head):
    """Are the model's logits head(states) to the last bit? Tried with four tokens."""
    ids = torch.arange(1, 5, device=model.device)[None]
    logits = model(ids, use_cache=False).logits
    model.set_output_embeddings(torch.nn.Identity())
    try:
        return torch.equal(head(model(ids, use_cache=False).logits), logits)
    except AttributeError:  # a model that looks at its head's weight (Mamba)
        return False
    finally:
        model.set_output_embeddings(head)


# ------------------------------------------------------------------------------------------- save
def save(model, tokenizer, folder: str | Path) -> None:
    """Write a folder that load(), vLLM or transformers can read; with adapters, as peft saves them.

    The published config.json's fields stay beside the new ones: transformers 5 writes rope_theta
    only into rope_parameters, where older readers do not look, and they would assume 10 000."""
    with sampling_mode(model):  # transformers refuses to save some published generation_configs
        model.save_pretrained(folder, state_dict=weights_of(model))
    tokenizer.save_pretrained(folder)
    if base := base_of(folder):
        Path(folder, "base.txt").write_text(fingerprint(base))
    if (config := Path(folder, "config.json")).exists():  # not with adapters
        model.generation_config.to_json_file(Path(folder, "generation_config.json"))
        written = json.loads(config.read_text())
        published = dict(getattr(model, "published", {}))
        if "text_config" not in written:  # of a model that also reads images, only the text's part
            published |= published.pop("text_config", {})
        for name in ("torch_dtype", "quantization_config"):
            published.pop(name, None)
        config.write_text(json.dumps(joined(published, written), indent=2))


def joined(old, new):
    """The entries of both dicts and of the dicts in them; where they differ, the new ones."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {name: joined(old.get(name), value) for name, value in new.items()}


def weights_of(model):
    """{name: tensor}: model.state_dict() itself would free weights gathered from other GPUs."""
    lost = dict(model.named_non_persistent_buffers(remove_duplicate=False))
    buffers = model.named_buffers(remove_duplicate=False)
    buffers = {name: buffer for name, buffer in buffers if name not in lost}
    return dict(model.named_parameters(remove_duplicate=False)) | buffers


def fingerprint(name: str) -> str:
    """A hash of the weights in a folder, or of those downloaded under a hub name: of each file's
    size and of 64 blocks spread over it. "" if there are none.

    It tells two models apart that were saved in the same folder, one after the other."""
    if not os.path.isdir(name):
        try:
            name = Path(cached_file(name, "config.json", local_files_only=True)).parent
        except OSError:  # it has not been downloaded
            return ""
    files = sorted(Path(name).glob("*model*.safetensors")) or sorted(Path(name).glob("*.bin"))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        with open(file, "rb") as data:
            for k in range(64):
                data.seek(size * k // 64)
                digest.update(data.read(65_536))
        digest.update(str(size).encode())
    return digest.hexdigest()[:16] if files else ""
