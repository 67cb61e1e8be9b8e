"""HF, the engine of a local transformers model: it encodes prompts, samples, decodes, records log-probs.

    engine = HF(model, tokenizer)
    completions = engine(["What is 2 + 2?"], temperature=0.7, max_new_tokens=256)      # in the prompts' order

    prompt -> encode() -> ids of s^t -> sample() -> ids of a^t, log π of each -> decode() -> text

sample() is the plain way, one call of transformers' generate() for a batch. fast/sampling.py has a sample()
with the same distribution in less time, which is used unless the engine is plain (--plain). To follow the
method, read sample(), answer() and encode(). sample_all(), with batches.py, is about memory; the rest, with
state.py, about the quirks of checkpoints.

What is sampled is softmax(logits / temperature) over the whole vocabulary, because that is the policy whose
log-probs flow_grpo.py computes. Temperature 0 takes the likeliest token each time. Above it, all random
numbers come from torch's global generator: torch.manual_seed(s) before a call decides the samples, given the
same prompts, settings and hardware.
"""

import functools
import math
import os

import torch

from fast import sampling
from models.batches import TokenBudget
from models.completion import NEW_TOKENS, TOO_LONG, Completion, once_each
from models.state import sampling_mode, weights_of
from models.tokens import THINK, control_ids, defuse


def sample(model, prompts, stops, draws, temperature, max_new_tokens):
    """Complete token lists: [(ids, log π of each)]. At temperature 0 there are no log-probs.

    stops: the tokens that end a completion; its ids end with the first of them.
    draws: random numbers for each prompt. Only the fast way uses them; generate() draws its own.
    """
    pad = stops[0] if stops else 0  # any token will do, as the mask hides it
    P = max(map(len, prompts))
    # (N, P); padded on the left, because generate() goes on at the right end of each row
    ids = torch.tensor([[pad] * (P - len(s)) + s for s in prompts], device=model.device)
    mask = torch.tensor([[0] * (P - len(s)) + [1] * len(s) for s in prompts], device=model.device)  # (N, P)
    how = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else {}

    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=max_new_tokens, eos_token_id=stops or None, pad_token_id=pad,
        return_dict_in_generate=True, output_scores=temperature != 0,
        synced_gpus=False,  # with several GPUs: each has all weights here, and generates on its own
        **how)

    new = out.sequences[:, P:]  # (N, T) the action tokens; a row that has ended is filled up with pad
    ends = torch.isin(new, torch.tensor(stops, dtype=torch.long, device=new.device)).long()
    written = ends.cumsum(1) - ends == 0  # (N, T) True up to and including the first stop token
    if not temperature:
        return [(row[kept].tolist(), []) for row, kept in zip(new, written)]
    logps = [scores.log_softmax(-1).gather(1, token[:, None])  # (N, 1); scores (N, V): logits / temperature
             for scores, token in zip(out.scores, new.T)]
    return [(row[kept].tolist(), logp[kept].tolist())
            for row, logp, kept in zip(new, torch.cat(logps, 1), written)]


class HF:
    """A transformers model with its tokenizer, called with prompts.

    token_budget: the most tokens of a batch. (A 7B's cache is 57 KB a token: 3.8 GB for the default.) If
    memory is short, it is halved for all later calls, too (batches.py). think: let the model think, if it
    can. plain: sample as sample() does, without fast/.
    """

    def __init__(self, model, tokenizer, token_budget=65_536, think=False, plain=False):
        self.model, self.tokenizer, self.think, self.plain = model, tokenizer, think, plain
        self.budget = TokenBudget(token_budget)

    def __call__(self, prompts, temperature=0.0, max_new_tokens=None) -> list[Completion]:
        """max_new_tokens None: the checkpoint's generation_config decides, or else NEW_TOKENS."""
        limit = max_new_tokens or self.model.generation_config.max_new_tokens or NEW_TOKENS
        # At temperature 0, equal prompts are answered once. Sampled ones never are: a group differs.
        return once_each(lambda distinct: self.answer(distinct, temperature, limit), prompts, temperature)

    def answer(self, prompts, temperature, max_new_tokens):
        """A Completion for each prompt. A prompt without room for max_new_tokens is TOO_LONG."""
        encoded = {prompt: self.encode(prompt) for prompt in set(prompts)}  # a group's is encoded once
        completions = [Completion("", list(encoded[prompt]), []) for prompt in prompts]
        for c in completions:
            if len(c.prompt_ids) + max_new_tokens > self.context():
                c.error = TOO_LONG
        valid = [c for c in completions if not c.error]
        samples = self.sample_all([c.prompt_ids for c in valid], temperature, max_new_tokens)
        for c, (ids, logps) in zip(valid, samples):
            c.ids, c.text, c.logps = ids, self.decode(ids, c.prompt_ids), logps
        return completions

    def sample_all(self, prompts, temperature, max_new_tokens):
        """sample() for any number of prompts, in batches that fit into memory."""
        sample_batch = sample if self.plain else sampling.sample
        stops = self.stop_ids()  # of the checkpoint's generation_config, which sampling_mode() takes away
        draws = torch.rand(len(prompts), max_new_tokens if temperature else 0, dtype=torch.float64)
        samples = {}  # {i: (ids, log π of each)}
        with sampling_mode(self.model):
            # `with attempt`: if memory is short, the rows of this batch come again in smaller batches
            for rows, attempt in self.budget.batches(range(len(prompts)), lambda i: len(prompts[i]),
                                                     extra=max_new_tokens):
                with attempt:
                    samples |= zip(rows, sample_batch(
                        self.model, [prompts[i] for i in rows], stops, [draws[i] for i in rows],
                        temperature, max_new_tokens))
        return [samples[i] for i in range(len(prompts))]

    def encode(self, prompt):
        """The prompt as one user message in the checkpoint's chat template, up to where the answer begins.

        defuse(): no text in the prompt, such as a web page, becomes a control token.
        """
        return self.chat(defuse(prompt, self.tokenizer, self.control))

    def chat(self, content):
        """The ids of a user message. Thinking models: a template that knows enable_thinking gets `think`."""
        message = {"role": "user", "content": content}
        settings = dict(add_generation_prompt=True, return_dict=True, enable_thinking=self.think)
        return list(self.tokenizer.apply_chat_template([message], **settings)["input_ids"])

    def decode(self, ids, prompt_ids=()):
        """The text of a completion, without its special tokens.

        The stop token is always left out, and <think> always stays, whatever the tokenizer calls special: the
        parsers read what follows the thinking (tokens.after_thinking). If the template opens the thinking
        (R1: the prompt ends with "<think>"), the text gets a <think>, too.
        """
        ids = ids[:-1] if ids and ids[-1] in self.stop_ids() else ids
        ids = [i for i in ids if self.special_tokens.get(i) in (None, *THINK)]
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        opened = self.tokenizer.decode(list(prompt_ids[-16:])).rstrip().endswith(THINK[0])
        return f"{THINK[0]}\n{text}" if opened else text

    # ---------------------------------------------------------------- what the checkpoint declares
    def stop_ids(self):
        """The tokens that end a completion: the checkpoint's (one, several or none) and the tokenizer's."""
        eos = self.model.generation_config.eos_token_id
        stops = [*(eos if isinstance(eos, (list, tuple)) else [eos]), self.tokenizer.eos_token_id]
        return list(dict.fromkeys(i for i in stops if i is not None))

    def context(self):
        """The largest number of tokens, prompt and answer together; infinite where the model names none."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or math.inf

    @functools.cached_property
    def special_tokens(self):
        """{id: text} of all special tokens. all_special_tokens alone has only 3 of SmolLM2's 17."""
        added = {i: str(token) for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return added | dict(zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens))

    @functools.cached_property
    def control(self):
        """{id: text} of the tokens that a prompt's text must not become."""
        return control_ids(self.tokenizer)

    def __str__(self):
        """name | parameters | device | dtype, for the first lines of a run."""
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        dtype = str(self.model.dtype).removeprefix("torch.")
        name = self.model.config.name_or_path.removeprefix(os.getcwd() + os.sep)
        thinks = " | thinks" if self.think else ""
        return f"{name} | {millions:.4g} M parameters | {self.model.device} | {dtype}{thinks}"

    def save(self, folder, model=None, weights=None):
        """Write a folder that load_engine(), vLLM or transformers can read, with the generation_config as it
        came. model, weights: from adapters.Policy, the model below the adapters and the merged weights."""
        model = model or self.model
        with sampling_mode(model):  # transformers refuses to save some published generation_configs
            model.save_pretrained(folder, state_dict=weights or weights_of(model))
        model.generation_config.to_json_file(os.path.join(folder, "generation_config.json"))
        self.tokenizer.save_pretrained(folder)
