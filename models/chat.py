"""Chat: text to the ids that a checkpoint reads, and the ids that it writes to text.

    chat = Chat(tokenizer, model.generation_config)
    chat.encode("What is 2 + 2?")      # one user message, in the checkpoint's chat template
    chat.decode(ids, prompt_ids)       # the text of a completion
    chat.stops                         # the tokens that end a completion
"""

import functools

from models.tokens import THINK, control_ids, defuse, is_character


class Chat:
    """generation_config: the checkpoint's, for its stop tokens. think: let the model think, if it can."""

    def __init__(self, tokenizer, generation_config=None, think=False):
        self.tokenizer, self.generation_config, self.think = tokenizer, generation_config, think

    def encode(self, prompt):
        """The ids of the prompt, as one user message, up to where the answer begins.

        defuse(): no text in the prompt, such as a web page, becomes a control token. Thinking models: a
        template that knows enable_thinking gets `think`."""
        message = {"role": "user", "content": defuse(prompt, self.tokenizer, self.control)}
        settings = dict(add_generation_prompt=True, return_dict=True, enable_thinking=self.think)
        return list(self.tokenizer.apply_chat_template([message], **settings)["input_ids"])

    def decode(self, ids, prompt_ids=()):
        """The text of a completion, without its special tokens.

        The stop token is always left out, and <think> always stays, whatever the tokenizer calls special: the
        parsers read what follows the thinking (tokens.after_thinking). If the template opens the thinking
        (R1: the prompt ends with "<think>"), the text gets a <think>, too.
        """
        ids = ids[:-1] if ids and ids[-1] in self.stops else ids
        special = self.special_tokens
        ids = [i for i in ids if i not in special or special[i] in THINK]
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        opened = self.tokenizer.decode(list(prompt_ids[-16:])).rstrip().endswith(THINK[0])
        return f"{THINK[0]}\n{text}" if opened else text

    @functools.cached_property
    def stops(self):
        """The tokens that end a completion: the checkpoint's (one, several or none) and the tokenizer's."""
        eos = getattr(self.generation_config, "eos_token_id", None)
        stops = [*(eos if isinstance(eos, (list, tuple)) else [eos]), self.tokenizer.eos_token_id]
        return list(dict.fromkeys(i for i in stops if i is not None))

    @functools.cached_property
    def special_tokens(self):
        """{id: text} of all special tokens. all_special_tokens alone has only 3 of SmolLM2's 17."""
        added = {i: str(token) for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        added |= dict(zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens))
        return {i: text for i, text in added.items() if not is_character(text)}

    @functools.cached_property
    def control(self):
        """{id: text} of the tokens that a prompt's text must not become."""
        return control_ids(self.tokenizer)
