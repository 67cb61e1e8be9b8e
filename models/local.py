"""HF, the engine of a local transformers model: prompts in, completions and their log-probs out.

    engine = HF(model, tokenizer)
    completions = engine(["What is 2 + 2?"], temperature=0.7, max_new_tokens=256)      # in the prompts' order

    prompt -> chat.encode() -> ids of s^t -> sample() -> ids of a^t, log π of each -> chat.decode() -> text

sample() is one call of transformers' generate() for a batch. chat.py is about chat templates and special
tokens, batches.py about memory, state.py about what checkpoints leave in a model.

What is sampled is softmax(logits / temperature) over the whole vocabulary, because that is the policy whose
log-probs flow_grpo.py computes. Temperature 0 takes the likeliest token each time. Above it, all random
numbers come from torch's global generator: torch.manual_seed(s) before a call decides the samples, given the
same prompts, settings and hardware (and, with --plain, the same batches).
"""

import math
import os

import torch

from fast import sampling
from models.batches import TokenBudget
from models.chat import Chat
from models.completion import NEW_TOKENS, TOO_LONG, Completion, once_each
from models.state import sampling_mode, save


def sample(model, token_lists, stops, temperature, max_new_tokens):
    """Complete prompts, given as token lists: [(ids, log π of each)]. At temperature 0, no log-probs.

    This is the definition. It runs with --plain; otherwise fast/sampling.py samples from the same
    distribution in less time. Call it in sampling_mode(), which hides the checkpoint's own settings.

    stops: the tokens that end a completion; its ids end with the first of them.
    """
    # which token does not matter: the mask hides it on the left, `written` drops it on the right
    pad = stops[0] if stops else 0
    P = max(map(len, token_lists))
    # (B, P); padded on the left, because generate() goes on at the right end of each row
    ids = torch.tensor([[pad] * (P - len(s)) + s for s in token_lists], device=model.device)
    mask = torch.tensor([[0] * (P - len(s)) + [1] * len(s) for s in token_lists],
                        device=model.device)  # (B, P)
    how = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else {}

    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=max_new_tokens, eos_token_id=stops or None, pad_token_id=pad,
        return_dict_in_generate=True, output_scores=temperature != 0,
        synced_gpus=False,  # with several GPUs: each has all weights here, and generates on its own
        **how)

    new = out.sequences[:, P:]  # (B, L) the action tokens; a row that has ended is filled up with pad
    ends = torch.isin(new, torch.tensor(stops, dtype=torch.long, device=new.device)).long()
    ended_before = ends.cumsum(1) - ends  # (B, L) how many stop tokens came before this one
    written = ended_before == 0  # True up to the first stop token, and there
    if not temperature:
        return [(row[kept].tolist(), []) for row, kept in zip(new, written)]
    # out.scores: for each new token (B, V), the logits, already divided by the temperature
    logps = [scores.log_softmax(-1).gather(1, token[:, None])  # (B, 1)
             for scores, token in zip(out.scores, new.T)]
    logps = torch.cat(logps, 1)  # (B, L)
    return [(row[kept].tolist(), logp[kept].tolist()) for row, logp, kept in zip(new, logps, written)]


class HF:
    """A transformers model with its tokenizer, called with prompts.

    token_budget: the most tokens of a batch. (The cache of Qwen2.5-7B is 57 KB a token: 3.8 GB for the
    default.) If memory runs out, it shrinks, also for all later calls (batches.py). think: let the model
    think, if it can. plain: sample as sample() does, without fast/.
    """

    def __init__(self, model, tokenizer, token_budget=65_536, think=False, plain=False):
        self.model, self.tokenizer, self.think, self.plain = model, tokenizer, think, plain
        self.chat = Chat(tokenizer, getattr(model, "generation_config", None), think)
        self.budget = TokenBudget(token_budget)

    def __call__(self, prompts, temperature=0.0, max_new_tokens=None) -> list[Completion]:
        """max_new_tokens None: the checkpoint's generation_config decides, or else NEW_TOKENS."""
        limit = max_new_tokens or getattr(self.model.generation_config, "max_new_tokens", None) or NEW_TOKENS
        # At temperature 0, equal prompts are answered once. Above it they never are: the rollouts of a group
        # must be able to differ.
        return once_each(lambda some: self.answer(some, temperature, limit), prompts, temperature)

    def answer(self, prompts, temperature, max_new_tokens):
        """A Completion of each prompt. A prompt without room for max_new_tokens is TOO_LONG."""
        encoded = {prompt: self.chat.encode(prompt) for prompt in set(prompts)}  # a group's is encoded once
        completions = [Completion("", list(encoded[prompt]), []) for prompt in prompts]
        for c in completions:
            if len(c.prompt_ids) + max_new_tokens > self.context():
                c.error = TOO_LONG
        valid = [c for c in completions if not c.error]
        token_lists = [c.prompt_ids for c in valid]
        # retry: sample_all(), again in smaller batches if memory runs out
        samples = self.budget.retry(self.sample_all, token_lists, temperature, max_new_tokens)
        for c, (ids, logps) in zip(valid, samples):
            c.ids, c.text, c.logps = ids, self.chat.decode(ids, c.prompt_ids), logps
        return completions

    def sample_all(self, token_lists, temperature, max_new_tokens):
        """sample() for any number of prompts, in batches that fit into memory."""
        # Draw the random numbers of all prompts before the batches are cut: so smaller batches do not change
        # a sample (apart from rounding). --plain ignores them, as generate() draws its own. float64, because
        # float32 is too coarse for a large vocabulary. Greedy decoding needs none.
        needed = max_new_tokens if temperature else 0
        draws = torch.rand(len(token_lists), needed, dtype=torch.float64)
        everything = range(len(token_lists))
        samples = {}  # {i: (ids, log π of each)}
        with sampling_mode(self.model):
            stops = self.chat.stops
            for rows in self.budget.batches(everything, lambda i: len(token_lists[i]), max_new_tokens):
                batch = [token_lists[i] for i in rows]
                if self.plain:
                    sampled = sample(self.model, batch, stops, temperature, max_new_tokens)
                else:
                    sampled = sampling.sample(self.model, batch, stops, temperature, max_new_tokens,
                                              draws=[draws[i] for i in rows])
                samples.update(zip(rows, sampled))
        return [samples[i] for i in everything]

    def context(self):
        """The largest number of tokens, prompt and answer together; infinite where the model names none."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or math.inf

    def __str__(self):
        """name | parameters | device | dtype, for the first lines of a run."""
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        dtype = str(self.model.dtype).removeprefix("torch.")
        name = self.model.config.name_or_path.removeprefix(os.getcwd() + os.sep)
        thinks = " | thinks" if self.think else ""
        return f"{name} | {millions:.4g} M parameters | {self.model.device} | {dtype}{thinks}"

    def save(self, folder):
        """Write a folder that load_engine(), vLLM or transformers can read."""
        save(self.model, self.tokenizer, folder)
