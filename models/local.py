"""HF, the engine of a local transformers model: it encodes prompts, samples, decodes, records log-probs.

    engine = HF(model, tokenizer)
    completions = engine(["What is 2 + 2?"], temperature=0.7, max_new_tokens=256)      # in the prompts' order

What is sampled is softmax(logits / temperature) over the whole vocabulary, because that is the policy whose
log-probs flow_grpo.py computes. Checkpoints bring sampling settings with them (Qwen2.5-Instruct: top_k 20,
top_p 0.8, a repetition penalty of 1.05); only their stop tokens are used, and save() keeps the rest.

Temperature 0 takes the likeliest token each time. Above it, each prompt gets random numbers of its own before
anything is sampled. They come from torch's global generator: torch.manual_seed(s) before a call decides the
samples, given the same prompts, settings and hardware. How prompts are batched changes nothing but rounding;
in half precision that can decide between two tokens of nearly equal probability.

Thinking models: a chat template that knows `enable_thinking` gets False, unless the engine's `think` is set.
The thinking stays in ids and text; the parsers read what follows it (tokens.after_thinking).
"""

import functools
import math
import os
from contextlib import contextmanager

import torch
from transformers import GenerationConfig

from fast.sampling import sample
from models.batches import in_memory
from models.completion import NEW_TOKENS, TOO_LONG, Completion, once_each
from models.tokens import THINK, control_ids, defuse


@contextmanager
def sampling_mode(model):
    """Make generate() sample from the model's softmax and nothing else; restore all settings afterwards.

    training, gradient_checkpointing: if both are on, transformers drops the cache, and every token after the
    first is sampled without its context. generation_config: generate() takes each setting that is None from
    the checkpoint, and some (sequence_bias) have no neutral value that could be passed, so the model gets an
    empty one. Each module gets its own values back, because a model in training may have parts in eval.
    """
    sampling = {"training": False, "gradient_checkpointing": False, "generation_config": GenerationConfig()}
    before = [(m, name, vars(m)[name]) for m in model.modules() for name in sampling if name in vars(m)]
    try:
        for module, name, _ in before:
            setattr(module, name, sampling[name])
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def weights_of(model):
    """{name: tensor}: the model's state_dict(), which itself would release gathered weights (sharding.py)."""
    buffers = {f"{prefix}.{name}".removeprefix("."): buffer for prefix, module in model.named_modules()
               for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set}
    return dict(model.named_parameters(remove_duplicate=False)) | buffers


class HF:
    """A transformers model with its tokenizer, called with prompts.

    token_budget: tokens of a batch at most (a 7B's cache is 57 KB a token: 3.8 GB for the default). If memory
    is short, it is halved for all later calls, too (batches.py). think: let the model think, if it can.
    """

    def __init__(self, model, tokenizer, token_budget=65_536, think=False):
        self.model, self.tokenizer, self.token_budget, self.think = model, tokenizer, token_budget, think

    def __str__(self):
        """name | parameters | device | dtype, for the first lines of a run."""
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        dtype = str(self.model.dtype).removeprefix("torch.")
        name = self.model.config.name_or_path.removeprefix(os.getcwd() + os.sep)
        thinks = " | thinks" if self.think else ""
        return f"{name} | {millions:.4g} M parameters | {self.model.device} | {dtype}{thinks}"

    def __call__(self, prompts, temperature=0.0, max_new_tokens=None) -> list[Completion]:
        """max_new_tokens None: the checkpoint's generation_config decides, or else NEW_TOKENS."""
        limit = max_new_tokens or self.model.generation_config.max_new_tokens or NEW_TOKENS
        return once_each(lambda distinct: self.answer(distinct, temperature, limit), prompts, temperature)

    def answer(self, prompts, temperature, max_new_tokens):
        """A Completion for each prompt. A prompt without room for max_new_tokens is TOO_LONG."""
        encoded = {prompt: self.encode(prompt) for prompt in dict.fromkeys(prompts)}
        completions = [Completion("", list(encoded[prompt]), []) for prompt in prompts]
        for c in completions:
            c.error = TOO_LONG if len(c.prompt_ids) + max_new_tokens > self.context() else ""

        numbers = max_new_tokens if temperature != 0 else 0
        draws = torch.rand(len(prompts), numbers, dtype=torch.float64)

        def complete(batch):
            rows = self.generate([c.prompt_ids for c, _ in batch], [u for _, u in batch],
                                 temperature, max_new_tokens)
            for (c, _), (ids, logps) in zip(batch, rows):
                c.ids, c.text, c.logps = ids, self.decode(ids, c.prompt_ids), logps

        valid = [(c, u) for c, u in zip(completions, draws) if not c.error]
        length = lambda item: len(item[0].prompt_ids)
        _, self.token_budget, _ = in_memory(complete, valid, length, self.token_budget, max_new_tokens)
        return completions

    def generate(self, prompts, draws, temperature, max_new_tokens):
        """Sample one batch: token lists in, [(ids, log π of each)] out. draws: each row's random numbers.

        Not in torch.inference_mode(): its tensors could stay in the model's buffers (dynamic rotary
        embeddings) and break the update. transformers' generate() itself uses no_grad().
        """
        stops = self.stop_ids()  # of the checkpoint's generation_config, which sampling_mode() takes away
        with sampling_mode(self.model):
            return sample(self.model, prompts, stops, draws, temperature, max_new_tokens)

    @functools.cached_property
    def special_tokens(self):
        """{id: text} of all special tokens. all_special_tokens alone has only 3 of SmolLM2's 17."""
        added = {i: str(token) for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return added | dict(zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens))

    @functools.cached_property
    def control(self):
        """{id: text} of the tokens that a prompt's text must not become."""
        return control_ids(self.tokenizer)

    @functools.cached_property
    def frame(self):
        """The control tokens of the chat template itself."""
        return [i for i in self.chat("x") if i in self.control]

    def encode(self, prompt):
        """The prompt as one user message in the checkpoint's chat template, up to where the answer begins."""
        ids = self.chat(defuse(prompt))
        if [i for i in ids if i in self.control] != self.frame:  # a token of another shape, or spelling
            ids = self.chat(defuse(prompt, self.tokenizer, self.control))
        return ids

    def chat(self, content):
        message = {"role": "user", "content": content}
        settings = dict(add_generation_prompt=True, return_dict=True, enable_thinking=self.think)
        return list(self.tokenizer.apply_chat_template([message], **settings)["input_ids"])

    def decode(self, ids, prompt_ids=()):
        """The text of a completion, without its special tokens.

        The stop token is always left out, and <think> always stays, whatever the tokenizer calls special. If
        the template opens the thinking (R1: the prompt ends with "<think>"), the text gets a <think>, too.
        """
        ids = ids[:-1] if ids and ids[-1] in self.stop_ids() else ids
        ids = [i for i in ids if self.special_tokens.get(i) in (None, *THINK)]
        opened = self.tokenizer.decode(list(prompt_ids[-16:])).rstrip().endswith(THINK[0])
        return f"{THINK[0]}\n" * opened + self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def stop_ids(self):
        """The tokens that end a completion: the checkpoint's (one, several or none) and the tokenizer's."""
        eos = self.model.generation_config.eos_token_id
        stops = [*(eos if isinstance(eos, (list, tuple)) else [eos]), self.tokenizer.eos_token_id]
        return list(dict.fromkeys(i for i in stops if i is not None))

    def context(self):
        """The largest number of tokens, prompt and answer together; infinite where the model names none."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or math.inf

    def save(self, folder, model=None, weights=None):
        """Write a folder that load_engine(), vLLM or transformers can read, with the generation_config as it
        came. model, weights: from adapters.Policy, the model below the adapters and the merged weights."""
        model = model or self.model
        with sampling_mode(model):  # transformers refuses to save some published generation_configs
            model.save_pretrained(folder, state_dict=weights or weights_of(model))
        model.generation_config.to_json_file(os.path.join(folder, "generation_config.json"))
        self.tokenizer.save_pretrained(folder)
