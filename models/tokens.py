"""Tokens with a meaning: control tokens in a prompt are defused, and a completion's thinking is dropped.

A prompt may hold a web page. Its text must not end our message, begin another one, call a tool, or open or
close the model's thinking. So both engines defuse() each prompt before the chat template is applied. The
tokenizer of a server is unknown: there the shape of the text decides. A local tokenizer has the last word:
the text is changed until it encodes it without any control token. A thinking model writes
<think>...</think> before its answer; all parsers call after_thinking() to drop that part.
"""

import re
import unicodedata

THINK = "<think>", "</think>"
# Tags that our own prompts ask for (generator.py): they stay. If a PROMPT of yours has other tags, add them.
OURS = "<answer>", "</answer>"

# What control tokens look like, and other text hardly ever does: bars, an underscore, capitals in brackets,
# or a name like eos. Not each <name>: HTML, generic types (vector<int>) and citations ([1]) must stay as they
# are, because one space changes what a program prints. Of each shape only the first character is matched, the
# rest is a look-ahead of bounded length: so tokens may overlap, and the time is linear.
SHAPE = re.compile(r"""
      <(?=  \|(?=\S)[^\n<>|]{1,60}(?<=\S)\|>                    # <|im_end|>, and with spaces between words
          | \|[^\s<>|]{1,60}>  |  /?[^\s<>|]{1,60}\|>           # <|turn>  <turn|>
          | \[(?=[^\W\d])[^\s<>|[\]]{1,60}\]>                    # <[end_of_sentence]>
          | /?(?:\w{1,20}:)?(?:                                 # an optional prefix, as in <seed:eos>:
                (?=[^\W_]\w{0,60}_)\w{2,60}(?<!_t)>             # <tool_call> <EOS_TOKEN>; not C's <size_t>
              | (?:s|(?i:think|pad|unk|mask|sep|cls|[bes]o[a-z]))>                # </s> <unk> <bos> <eot>
              | (?:start|begin|end)-?of-?\w{1,20}>  )           # <endoftext>
          | </?[A-Z_]{3,60}>>  )                                # <<SYS>>
    | >(?=  >[A-Z_]{3,60}<<  )                                  # >>QUESTION<<
    | \[(?= \|/?[^\W\d][\w /:-]{0,60}\|\]                       # [|endofturn|]
          | /?[a-z]?[A-Z]{2}[A-Z\d_]{1,60}\]                    # [INST] [/TOOL_CALLS] [gMASK]
          | \w{1,3}~\[  )                                       # [e~[
    | \](?= ~!?\w{1,3}[\]\[]  )                                 # ]~b]  ]~!b[
    """, re.VERBOSE)
# A token that was added to a local tokenizer, but is not special: control if it is in brackets or bars, such
# as Qwen3's <tool_call>. Others are words of somebody's field, runs of spaces, or the toy's pieces.
BRACKETED = re.compile(r"\s*[][<>{}|].*[^\W\d_].*[][<>{}|]\s*", re.DOTALL)


def defuse(prompt, tokenizer=None, control=()):
    """The prompt without control tokens: a space after the first character makes each one ordinary text.

    >>> defuse("a page with <|im_end|> and </think> in it")
    'a page with < |im_end|> and < /think> in it'

    tokenizer: a local one, which must encode the result without any id of control, its control_ids(). A token
    that a space does not break (its normaliser may drop spaces) becomes "?". So does half of a surrogate
    pair, which JSON and Python allow but tokenizers do not.
    """
    text = prompt.encode("utf-8", "replace").decode()
    found = [match.span() for match in SHAPE.finditer(folded(text))]
    text = edited(text, [span for span in found if not text.startswith(OURS, span[0])], spaced)
    for attempt in range(10 if control else 0):
        found = spans(text, tokenizer, control)
        if not found:
            break
        text = edited(text, found, spaced if attempt < 3 else lambda token: "?")
    else:
        if control:
            raise ValueError("a prompt holds a control token in each spelling that was tried; it is not sent")
    return text


def folded(text):
    """The text with full-width and similar characters as the plain ones, position by position: ＜ -> <."""
    if text.isascii():
        return text
    plain = {c: unicodedata.normalize("NFKC", c) for c in set(text)}
    return "".join(plain[c] if len(plain[c]) == 1 else c for c in text)


def spaced(token):
    """A space after the first visible character: "<eos>" -> "< eos>"."""
    start = len(token) - len(token.lstrip())
    return f"{token[:start + 1]} {token[start + 1:]}"


def edited(text, spans, edit):
    """The text with edit() of each span, [(start, end)], in its place."""
    parts, last = [], 0
    for start, end in spans:
        parts += text[last:start], edit(text[start:end])
        last = end
    return "".join(parts) + text[last:]


def is_character(text):
    """Is a token a single letter or mark? A tokenizer may use one as its padding, but it is ordinary text."""
    return len(text) <= 1 and text.isascii()


def control_ids(tokenizer):
    """{id: text} of the tokens that no prompt may write: the special ones, and those in brackets.

    Not the token for unknown characters, if it has no other meaning, and no single letter or mark."""
    added = {i: (str(token), token.special) for i, token in tokenizer.added_tokens_decoder.items()}
    added |= {i: (text, True) for i, text in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens)}
    meanings = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "sep", "cls")]
    unknown = {getattr(tokenizer, "unk_token_id", None)} - set(meanings)
    return {i: text for i, (text, special) in added.items()
            if (special or BRACKETED.fullmatch(folded(text))) and i not in unknown and text not in OURS
            and text.strip() and not is_character(text)}


def spans(text, tokenizer, control):
    """Where the tokenizer reads a control token in this text: [(start, end)], in order."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    ids = encoded["input_ids"]
    if tokenizer.is_fast:
        return [span for i, span in zip(ids, encoded["offset_mapping"]) if i in control]
    if not (tokens := {control[i] for i in ids if i in control}):
        return []
    literal = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    # A tokenizer in Python has no offsets. If it normalised what it read, each character is a place.
    return [match.span() for match in literal.finditer(text)] or [(i, i + 1) for i in range(len(text))]


def after_thinking(text):
    """The text after the last </think>; None if the thinking never ends.

    "<think>6 * 7 ...</think>\\n\\n42" -> "42"        "42" -> "42"        "<think>6 * 7 is" -> None
    """
    rest = text.rpartition(THINK[1])[2]
    return None if THINK[0] in rest else rest.strip()
