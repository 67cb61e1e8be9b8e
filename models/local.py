"""HF, the engine of a local transformers model: it encodes prompts, samples, decodes, records log-probs.

    engine = HF(model, tokenizer)
    completions = engine(["What is 2 + 2?"], temperature=0.7, max_new_tokens=256)      # in the prompts' order

What is sampled is softmax(logits / temperature) over the whole vocabulary, because that is the policy whose
log-probs flow_grpo.py computes. Checkpoints bring sampling settings with them (Qwen2.5-Instruct: top_k 20,
top_p 0.8, a repetition penalty of 1.05); only their stop tokens are used, and save() keeps the rest.

Temperature 0 takes the likeliest token each time. How prompts are batched changes nothing but rounding; in
half precision that can decide between two tokens of nearly equal probability. Sampling draws from torch's
global generator: torch.manual_seed(s) before a call decides the samples, given the same prompts, settings and
hardware.

Thinking models: a chat template that knows `enable_thinking` gets False, unless the engine's `think` is set.
The thinking stays in ids and text; the parsers read what follows it (tokens.after_thinking).
"""

import functools
import math
import os
from contextlib import contextmanager

import torch
from transformers import GenerationConfig

from models.completion import NEW_TOKENS, TOO_LONG, Completion, once_each
from models.tokens import THINK, defuse
from scale.batches import in_memory


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


class HF:
    """A transformers model with its tokenizer, called with prompts.

    token_budget: tokens of a batch at most (a 7B's cache is 57 KB a token: 3.8 GB for the default). If memory
    is short, it is halved for all later calls, too (scale/batches.py). think: let the model think, if it can.
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
        completions = [Completion("", self.encode(prompt), []) for prompt in prompts]
        for c in completions:
            c.error = TOO_LONG if len(c.prompt_ids) + max_new_tokens > self.context() else ""

        def complete(batch):
            rows = self.generate([c.prompt_ids for c in batch], temperature, max_new_tokens)
            for c, (ids, logps) in zip(batch, rows):
                c.ids, c.text, c.logps = ids, self.decode(ids, c.prompt_ids), logps

        valid = [c for c in completions if not c.error]
        prompt_length = lambda c: len(c.prompt_ids)
        _, self.token_budget, _ = in_memory(complete, valid, prompt_length, self.token_budget, max_new_tokens)
        return completions

    def generate(self, prompts, temperature, max_new_tokens):
        """Sample one batch: token lists in, [(ids, log π of each)] out.

        Not in torch.inference_mode(): its tensors could stay in the model's buffers (dynamic rotary
        embeddings) and break the update. transformers' generate() itself uses no_grad().
        """
        stops = self.stop_ids()
        pad = stops[0] if stops else 0  # any id will do: it is masked on the left and cut off on the right
        P, device = max(map(len, prompts)), self.model.device
        ids = torch.tensor([[pad] * (P - len(s)) + s for s in prompts], device=device)  # (N, P)
        mask = torch.tensor([[0] * (P - len(s)) + [1] * len(s) for s in prompts], device=device)  # (N, P)
        # top_k 0 is the whole vocabulary; the default would be 50. At temperature 0 none of these is read.
        sampling = dict(temperature=float(temperature), top_k=0, top_p=1.0) if temperature != 0 else {}
        settings = GenerationConfig(
            do_sample=temperature != 0, **sampling, num_beams=1, repetition_penalty=1.0, use_cache=True,
            max_new_tokens=max_new_tokens, eos_token_id=stops or None, pad_token_id=pad)
        watch = SampledLogps(temperature)
        with sampling_mode(self.model):
            out = self.model.generate(ids, attention_mask=mask, generation_config=settings,
                                      logits_processor=[watch] if temperature != 0 else [])  # (N, P + T)
        rows = [upto_stop(row, stops) for row in out[:, P:].tolist()]
        return [(row, logps[:len(row)]) for row, logps in zip(rows, watch.rows(out))]

    @functools.cached_property
    def control_tokens(self):
        """{id: text} of all control tokens. all_special_tokens alone has only 3 of SmolLM2's 17."""
        added = {i: str(token) for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return added | dict(zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens))

    def encode(self, prompt):
        """The prompt as one user message in the checkpoint's chat template, up to where the answer begins."""
        message = {"role": "user", "content": defuse(prompt, tuple(self.control_tokens.values()))}
        settings = dict(add_generation_prompt=True, return_dict=True, enable_thinking=self.think)
        return list(self.tokenizer.apply_chat_template([message], **settings)["input_ids"])

    def decode(self, ids, prompt_ids=()):
        """The text of a completion, without its control tokens.

        The stop token is always left out, and <think> always stays, whatever the tokenizer calls special. If
        the template opens the thinking (R1: the prompt ends with "<think>"), the text gets a <think>, too.
        """
        ids = ids[:-1] if ids and ids[-1] in self.stop_ids() else ids
        ids = [i for i in ids if self.control_tokens.get(i) in (None, *THINK)]
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
            model.save_pretrained(folder, state_dict=weights)
        model.generation_config.to_json_file(os.path.join(folder, "generation_config.json"))
        self.tokenizer.save_pretrained(folder)


def upto_stop(ids, stops):
    """The sampled tokens: all up to and including the first stop token. The rest is padding.

    >>> upto_stop([5, 6, 2, 2, 2], stops=[2])
    [5, 6, 2]
    """
    end = next((j + 1 for j, i in enumerate(ids) if i in stops), len(ids))
    return ids[:end]


class SampledLogps:
    """A logits processor that changes nothing and records the log-prob of each sampled token.

    It holds the logits of one step until the next call shows which tokens were sampled from them. So it keeps
    N x T numbers, where generate()'s output_logits would keep N x T x V. update() compares them with the
    log-probs that it computes (sampling_gap).
    """

    def __init__(self, temperature):
        self.temperature, self.logits, self.logps = temperature, None, []

    def __call__(self, ids, logits):  # (N, tokens so far), (N, V)
        if self.logits is not None:
            logps = (self.logits / self.temperature).log_softmax(-1)
            self.logps.append(logps.gather(-1, ids[:, -1:]))  # (N, 1)
        self.logits = logits
        return logits

    def rows(self, ids):
        """[log-probs] of each row that generate() returned, padding included; empty at temperature 0."""
        self(ids, None)
        return torch.cat(self.logps, 1).tolist() if self.logps else [[] for _ in ids]
