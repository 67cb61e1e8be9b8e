"""models.local"""

import functools
import math
import os
from contextlib import contextmanager

import torch
from transformers import GenerationConfig

from models.completion import NEW_TOKENS, TOO_LONG, Completion, distinct, in_order
from models.tokens import THINK, harmless, marks_of
from scale.batches import in_memory


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
        max_new_tokens = max_new_tokens or self.model.generation_config.max_new_tokens or NEW_TOKENS
        asked = distinct(prompts, temperature)
        done = [Completion("", self.encode(prompt), []) for prompt in asked]

        for c in done:
            c.error = TOO_LONG if len(c.prompt_ids) + max_new_tokens > self.context() else ""
        fits = [c for c in done if not c.error]

        def answer(batch):
            rows = self.generate([c.prompt_ids for c in batch], temperature, max_new_tokens)
            for c, (ids, logps) in zip(batch, rows):
                c.ids, c.text, c.logps = ids, self.decode(ids, c.prompt_ids), logps

        length = lambda c: len(c.prompt_ids)
        _, self.token_budget, _ = in_memory(answer, fits, length, self.token_budget, max_new_tokens)
        return in_order(prompts, asked, done, temperature)

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
        answers = [upto_stop(row, stops) for row in out[:, P:].tolist()]
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

    def save(self, folder, model=None, weights=None):
        """Write a folder that load_engine(), vLLM or transformers can read, generation_config unchanged. An
        adapters.Policy gives the model below its adapters, and the merged weights."""
        model = model or self.model
        with sampling_mode(model):  # transformers refuses to save some published generation_configs
            model.save_pretrained(folder, state_dict=weights)
        model.generation_config.to_json_file(os.path.join(folder, "generation_config.json"))
        self.tokenizer.save_pretrained(folder)


def upto_stop(ids, stops):
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
