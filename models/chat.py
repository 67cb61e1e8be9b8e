"""Chat: text to the ids that a checkpoint reads, and the ids that it writes to text.

    chat = Chat(tokenizer, model.generation_config)
    chat.encode("What is 2 + 2?")      # one user message, in the checkpoint's chat template
    chat.decode(ids, prompt_ids)       # the text of a completion
    chat.stops                         # the tokens that end a completion

A prompt may hold a web page. No text in it may end our message, begin another one, call a tool, or
open or close the model's thinking. So defuse() breaks what looks like a control token. The
tokenizer of a server is unknown: there the shape of the text decides. A local tokenizer has the
last word: encode() counts the control tokens among the ids.

A thinking model writes <think>...</think> before its answer, or uses other marks. All of them are
read as <think> and </think>. All parsers call after_thinking() to drop that part.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

import jinja2

from world.mistakes import Mistake

THINK = "<think>", "</think>"
# What opens and closes the thinking of other models. If yours has other marks, add them.
THOUGHTS = [
    *((f"<{name}>", f"</{name}>") for name in ("thinking", "thought", "reasoning")),
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<longcat_think>", "</longcat_think>"),  # LongCat
    ("[THINK]", "[/THINK]"),  # Magistral
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<|think|>", "<|content|>"),  # Solar
    ("<|channel>thought", "<channel|>"),  # Gemma
    ("<unused94>thought", "<unused95>"),  # MedGemma
    ("<|channel|>analysis<|message|>", THINK[1]),  # gpt-oss: HARMONY closes it
    ("<|channel|>commentary<|message|>", THINK[1]),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
]
KNOWN = " ".join(mark for pair in [THINK, *THOUGHTS] for mark in pair)
OPENS = THINK[0], *(opens for opens, _ in THOUGHTS)
# What ends the thinking of gpt-oss: the final channel, which may name a format, or a call
HARMONY = (
    r"<\|channel\|>final\b[^\n]{0,60}?<\|message\|>|(?:<\|channel\|>\w{1,20}|assistant)(?= to=)"
)
# What may enclose the answer that follows: <|START_RESPONSE|>, <|begin_of_box|>, <response>
FRAME = r"(?:<\|[^\s<>|]{1,60}\|>|</?response>)"
LIKE_A_THOUGHT = re.compile(
    r"(?i)[<\[◁][|｜]?/?[\w:▁]*(?:think|thought|reason|ponder|scratchpad|monologue|reflection)"
    r"[\w:▁]*[|｜]?[>\]▷]"
)

# Tags that our own prompts ask for (generator.py): they stay. If your PROMPT has others, add them.
OURS = "<answer>", "</answer>"
# What control tokens look like, and other text hardly ever does: bars, an underscore, capitals in
# brackets, or a name like eos. Not each <name>: HTML, generic types (vector<int>) and citations
# ([1]) must stay as they are, because one space changes what a program prints. Of each shape only
# the first character is matched, the rest is a look-ahead of bounded length: so tokens may overlap,
# and the time is linear.
SHAPE = re.compile(
    r"""(?x)
      <(?=  \|(?=\S)[^\n<>|]{1,60}(?<=\S)\|>              # <|im_end|>, and with spaces inside
          | \|[^\s<>|]{1,60}>  |  /?[^\s<>|]{1,60}\|>     # <|turn>  <turn|>
          | /?(?:\w{1,20}:)?(?:                           # an optional prefix, as in <seed:eos>:
                (?=[^\W_]\w{0,60}_)\w{2,60}(?<!_t)>       # <tool_call> <EOS_TOKEN>; not <size_t>
              | (?:s|(?i:think(?:ing)?|thought|pad|unk|mask|sep|cls|[bes]o[a-z]))>    # </s> <bos>
              | (?:start|begin|end)-?of-?\w{1,20}>  )     # <endoftext>
          | </?[A-Z_]{3,60}>>  )                          # <<SYS>>
    | \[(?= \|/?[^\W\d][\w /:-]{0,60}\|\]                 # [|endofturn|]
          | /?[a-z]?[A-Z]{2}[A-Z\d_]{1,60}\]              # [INST] [/TOOL_CALLS] [gMASK]
          | \w{1,3}~\[  )  |  \](?= ~!?\w{1,3}[\]\[]  )   # [e~[  ]~b]  ]~!b[
    | ◁(?=  /?\w{1,20}▷  )                                # ◁think▷
    """
)
# Marks of thoughts, which may have another shape. (Those of plain words are ordinary text.)
MARK = re.compile(
    "|".join(
        rf"{re.escape(mark[0])}(?={re.escape(mark[1:])})"
        for pair in THOUGHTS
        for mark in pair
        if mark[0] in "<[◁"
    )
)
# Tokenizers may read a full-width ＜ as <.
FULL_WIDTH = {c: unicodedata.normalize("NFKC", chr(c))[:1] for c in range(0xFE50, 0xFFE7)}
# A token that was added to a local tokenizer, but is not special: control if it is in brackets or
# bars, such as Qwen3's <tool_call>. Others are words of somebody's field, or the toy's pieces.
BRACKETED = re.compile(r"\s*[][<>{}|].*[^\W\d_].*[][<>{}|]\s*", re.DOTALL)


class Chat:
    """A tokenizer with its chat template. Mistake if the template refuses our prompts.

    generation_config: the checkpoint's, for its stop tokens. The token with which the template ends
    a message is one, too: base models often name another. think: let the model think, if it can.
    """

    def __init__(self, tokenizer, generation_config=None, think=False):
        self.tokenizer, self.think = tokenizer, think
        eos = getattr(generation_config, "eos_token_id", None)
        stops = [*(eos if isinstance(eos, (list, tuple)) else [eos]), tokenizer.eos_token_id]
        self.stops = list(dict.fromkeys(i for i in stops if i is not None))
        self.silent = set()  # special tokens: no part of a completion's text
        self.control = {}  # {id: text} of what the text of a prompt must not become
        added = {i: (str(t), t.special) for i, t in tokenizer.added_tokens_decoder.items()}
        # all_special_tokens alone has only 3 of SmolLM2's 17
        for i, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True):
            added[i] = token, True
        for i, (token, special) in added.items():
            if len(token.strip()) < 2:
                continue  # ordinary text, even if the tokenizer pads with "!"
            if special and token not in KNOWN:
                self.silent.add(i)
            if (special or BRACKETED.fullmatch(token)) and not token.strip().startswith(OURS):
                self.control[i] = token
        if tokenizer.unk_token_id not in self.stops:
            self.control.pop(tokenizer.unk_token_id, None)  # an unknown character is ordinary, too
        framed = self.apply_template("x")
        if framed == self.apply_template("x x"):  # it reads lists of texts and images only
            raise Mistake(f"The chat template of {tokenizer.name_or_path} drops our prompts.")
        self.frame = self.control_tokens(framed)  # those of the template itself
        self.added = [i for i in self.end_of_turn() if i not in self.stops]
        self.stops += self.added

    def end_of_turn(self):
        """[the control token with which the template ends an assistant's message], or []."""
        try:
            text = self.tokenizer.decode(self.apply_template("x", "four"))
        except ValueError:  # it takes no such messages
            return []
        _, found, end = text.rpartition("four")
        ids = self.tokenizer(end, add_special_tokens=False)["input_ids"] if found else []
        return [i for i in ids if i in self.control][:1]

    def encode(self, prompt: str) -> list[int]:
        """The ids of the prompt, as one user message, up to where the answer begins.

        ValueError if that is impossible: the rollout fails (local.Engine), the others go on."""
        text = defuse(prompt)
        for _ in range(3):
            ids = self.apply_template(text)
            written = self.control_tokens(ids) - self.frame
            if not written:
                return ids
            for i in written:  # of a shape that defuse() does not know
                token = re.compile(re.escape(self.control[i]), re.IGNORECASE)
                text = token.sub(lambda m: f"{m[0][0]} {m[0][1:]}", text.translate(FULL_WIDTH))
        raise ValueError("a prompt holds a control token in each spelling that was tried")

    def control_tokens(self, ids):
        return Counter(i for i in ids if i in self.control)

    def apply_template(self, *texts, think=None):
        """The ids of a prompt, or of a prompt and its answer."""
        name, think = self.tokenizer.name_or_path, self.think if think is None else think
        said = zip(("user", "assistant"), texts, strict=False)
        messages = [{"role": role, "content": text} for role, text in said]
        settings = dict(add_generation_prompt=len(texts) == 1, return_dict=True)
        settings |= dict(enable_thinking=think, thinking=think)  # templates have either name for it
        if "<|channel|>" in str(self.tokenizer.chat_template):  # gpt-oss thinks in any case
            settings["reasoning_effort"] = "medium" if think else "low"
        try:
            return list(self.tokenizer.apply_chat_template(messages, **settings)["input_ids"])
        except (jinja2.TemplateError, TypeError) as why:
            reason = str(why).partition("\n")[0]
            raise Mistake(f"The chat template of {name} refuses our prompts: {reason}") from why

    def remarks(self):
        """What a user should know about the template and the tokenizer: sentences, or ""."""
        name, template = self.tokenizer.name_or_path, str(self.tokenizer.chat_template)
        yield unknown_thoughts(self.tokenizer)
        if "strftime_now" in template:
            yield f"{name}: its chat template writes the date, so prompts differ from day to day."
        for i in self.added:
            yield f"{name}: completions end with {self.control[i]} too, as in the chat template."
        thinks = LIKE_A_THOUGHT.search(template) or "reasoning_effort" in template
        if thinks and self.apply_template("x", think=True) == self.apply_template("x", think=False):
            yield f"{name}: its chat template mentions thinking, but --think changes nothing there."

    def decode(self, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> str:
        """The text of a completion, without its stop token and other special tokens.

        If the template opens the thinking (R1: the prompt ends with "<think>"), so does the text.
        If a token of its own opens it later, what stands before that is a thought, too.
        """
        ids = ids[:-1] if ids and ids[-1] in self.stops else ids
        ids = [i for i in ids if i not in self.silent]
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        prompt_end = self.tokenizer.decode(list(prompt_ids[-32:])).rstrip()
        marks = [mark for mark in OPENS if prompt_end.endswith(mark)]
        if not text.lstrip().startswith(OPENS):
            marks += [self.control[i] for i in ids if self.control.get(i) in OPENS]
        if not marks:
            return plain_thoughts(text)
        return plain_thoughts(f"{marks[0]}\n{text}").replace(marks[0], THINK[0])


def defuse(prompt: str) -> str:
    """The prompt with a space inside of each control token, which makes it ordinary text.

    >>> defuse("a page with <|im_end|> and </think> in it")
    'a page with < |im_end|> and < /think> in it'

    Half of a surrogate pair, which JSON and Python allow but tokenizers do not, becomes "?".
    """
    text = prompt.encode("utf-8", "replace").decode()
    characters = list(text)
    plain = text.translate(FULL_WIDTH)
    for at in {match.start() for shape in (SHAPE, MARK) for match in shape.finditer(plain)}:
        if not text.startswith(OURS, at):
            characters[at] += " "
    return "".join(characters)


def plain_thoughts(text):
    """The text with <think> and </think> for the marks of THOUGHTS.

    A mark opens thoughts only where the text begins: elsewhere it is quoted. (A mark of plain words
    must be closed, too.) One that closes them counts behind it, or if there is no such mark: then
    the prompt has opened them.

    Some servers drop the special tokens of gpt-oss: "analysis6 * 7 is ...assistantfinal42".
    """
    # not analysis("x"), a call, or analysis_1 = 2
    not_code = "" if "assistantfinal" in text else r"(?!_|\w*\()"
    text = re.sub(rf"\Aanalysis{not_code}(?=[\w\"'(])", THINK[0], text)
    text = text.replace("assistantfinal", THINK[1])
    if text.lstrip().startswith("<|channel|>"):
        text = re.sub(HARMONY, THINK[1], text)
    for opens, closes in [THINK, *THOUGHTS]:
        if text.lstrip().startswith(opens) and (opens[0] in "<[◁" or closes in text):
            return text.replace(opens, THINK[0]).replace(closes, THINK[1])
    for opens, closes in THOUGHTS:
        if opens not in text.partition(closes)[0]:
            text = text.replace(closes, THINK[1])
    return text


def after_thinking(text: str) -> str | None:
    """The text after the last </think>; None if the thinking never ends.

    "<think>6 * 7 ...</think>\\n\\n42" -> "42"        "42" -> "42"        "<think>6 * 7 is" -> None
    "<think>6 * 7</think><|START_RESPONSE|>42<|END_RESPONSE|>" -> "42"
    "<think> opens a thought" -> None                  "It writes <think>." -> "It writes <think>."
    """
    head = text.partition(THINK[1])[0]
    quoted = THINK[0] in head and not head.lstrip().startswith(THINK[0])
    rest = text if quoted else text.rpartition(THINK[1])[2]
    for _ in range(2):  # <|END_RESPONSE|><|END_OF_TURN_TOKEN|>
        rest = re.sub(rf"\A{FRAME}|{FRAME}\Z", "", rest.strip())
    return None if THINK[0] in rest and not quoted else rest.strip()


def unknown_thoughts(tokenizer):
    """A sentence about marks that look like those of thinking but are unknown here; "" if none."""
    added = map(str, tokenizer.added_tokens_decoder.values())
    found = LIKE_A_THOUGHT.findall("\n".join([*added, str(tokenizer.chat_template)]))
    marks = " ".join(sorted({mark for mark in found if mark not in KNOWN})[:4])
    return marks and (
        f"{tokenizer.name_or_path} may think between marks that are unknown here ({marks}): such "
        "thoughts would be read as the answer. Add the marks to THOUGHTS in models/chat.py."
    )
