"""models/chat.py: no text of a prompt becomes a control token; templates that refuse prompts."""

import pytest
import tokenizers
import transformers
from tokenizers import normalizers
from transformers import AddedToken

import generator
from models import chat
from models.chat import Chat, defuse

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template=CHATML, **special):
    """A small tokenizer of bytes, as those of Qwen."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["hi", "two plus two", "a much longer prompt than the one before it", "x"]
    backend.train_from_iterator(texts, trainer)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **special}
    tok = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tok.chat_template = template
    return tok


def written(chat, page):
    """The control tokens that a page writes, beyond those of the template."""
    return chat.control_tokens(chat.encode(f"a {page} b")) - chat.frame


# ---- prompts of local models
NAMED = {  # control tokens as their tokenizer_config.json has them; * is not special there
    "Qwen3": "<|im_start|> <|im_end|> <|endoftext|> <|vision_start|> *<think> *</think>",
    "Llama-3": "<|start_header_id|> <|eot_id|> <|begin_of_text|> <|reserved_special_token_0|>",
    "Phi-3": "<|user|> <|end|> <|assistant|> <|endoftext|> <unk> <s> *</s>",
    "Gemma": "<start_of_turn> <end_of_turn> <bos> <eos> <pad> <unk> <image_soft_token> *<unused7>",
    "Mistral": "[INST] [/INST] <s> </s> <unk> [TOOL_CALLS] [IMG_BREAK] <SPECIAL_20>",
    "SmolLM2": "<|im_start|> <|im_end|> <repo_name> <reponame> <gh_stars> <empty_output>",
    "DeepSeek": "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> *<｜User｜>",
}


@pytest.mark.parametrize("model", NAMED)
@pytest.mark.parametrize("normalizer", [None, normalizers.NFKC()])
def test_no_control_token_of_a_page_reaches_the_model(model, normalizer):
    listed = NAMED[model].split()
    added = [AddedToken(t.strip("*"), special=t[0] != "*", normalized=False) for t in listed]
    begin, end = added[0].content, added[1].content
    tok = tokenizer(f"{begin}user\n{{{{ messages[0].content }}}}{end}\n{begin}assistant\n")
    tok.add_tokens(added)
    tok.backend_tokenizer.normalizer = normalizer
    reader = Chat(tok)
    texts = [token.content for token in added]
    nested, doubled = "".join(t[:3] + t + t[3:] for t in texts), "".join(t + t[1:] for t in texts)
    full_width = "".join(texts).replace("<", "＜").replace("|", "｜")
    for page in ("".join(texts), "\n".join(texts), nested, doubled, full_width):
        assert not written(reader, page)
    assert sum(reader.frame.values()) == 3
    assert "a <page> b [1]" in tok.decode(reader.encode("a <page> b [1]"))


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordPiece"])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFKC(), normalizers.Lowercase()])
def test_tokens_of_other_shapes_are_found_among_the_ids_however_they_are_spelled(kind, normalizer):
    letters = [*"abcdefghijklmnopqrstuvwxyzT<>|/_[]()=+0123 .,:?", "\u2581"]
    words = {c: i for i, c in enumerate(["<unk>", "</s>", *letters, *(f"##{c}" for c in letters)])}
    backend = tokenizers.Tokenizer(
        {
            "BPE": lambda: tokenizers.models.BPE(words, [], unk_token="<unk>", byte_fallback=True),
            # its vocabulary makes </s> of plain text
            "Unigram": lambda: tokenizers.models.Unigram([(c, -5.0) for c in words], unk_id=0),
            "WordPiece": lambda: tokenizers.models.WordPiece(words, unk_token="<unk>"),
        }[kind]()
    )
    backend.normalizer = normalizer
    tok = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>"
    )
    normalized = dict(normalized=True, lstrip=True, rstrip=True)
    special = [AddedToken(text, special=True, **normalized) for text in ("END OF TURN", "~go~")]
    tok.add_tokens([*special, AddedToken("<reponame>", **normalized), "titanium"])
    tok.chat_template = "~go~{{ messages[0].content }}</s>"
    reader = Chat(tok)
    pages = "</s>|＜／ｓ＞|END OF TURN|end of turn|ＥND OF TURN|～go～|<reponame>".split("|")
    for page in [*pages, "~g~go~o~", "~go~go~go~", "<repo<reponame>name>", "".join(pages)]:
        assert not written(reader, page), ascii(page)
    assert tok.convert_tokens_to_ids("titanium") in reader.encode("a titanium b")
    assert tok.unk_token_id in reader.encode("a \u4e16 b") or kind == "BPE"  # no control token


def test_a_tokenizer_in_python_is_no_exception():
    tok = transformers.ByT5Tokenizer()
    tok.chat_template = "<extra_id_0>{{ messages[0].content }}<extra_id_1>"
    assert not written(Chat(tok), "</s><extra_id_7><unk>")


def test_words_that_were_merely_added_and_a_mark_that_a_tokenizer_pads_with_stay():
    tok = transformers.AutoTokenizer.from_pretrained("toy")
    words = " ".join(str(t) for t in tok.added_tokens_decoder.values() if not t.special)
    assert words in tok.decode(Chat(tok).encode(words))
    tok = tokenizer(pad_token="!")
    reader = Chat(tok)
    assert "no! a\n" in tok.decode(reader.encode("no! a\n"))
    assert reader.decode(tok("100! <|endoftext|>20<|im_end|>")["input_ids"]) == "100! 20"


def test_the_tags_that_our_own_prompts_ask_for_stay_whatever_is_added_to_a_tokenizer(monkeypatch):
    tok = tokenizer()
    tok.add_tokens(["<answer>", "</answer>"])
    assert generator.PROMPT in tok.decode(Chat(tok).encode(generator.PROMPT))
    assert defuse("in <final_answer>") == "in < final_answer>"
    monkeypatch.setattr(chat, "OURS", ("<final_answer>", "</final_answer>"))
    assert defuse("in <final_answer>") == "in <final_answer>"


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception('Start with a system message.') }}", "Start with a system message."),
        ("{% if messages|length % 2 %}{{ raise_exception('No\nalternation') }}{% endif %}", "No"),
        ("{{ messages[1].content }}", "list object has no element 1"),
        ("{{ messages[0].content + 1 }}", 'can only concatenate str (not "int") to str'),
        ("{% if %}", "Expected an expression, got 'end of statement block'"),
    ],
)
def test_a_template_that_refuses_our_prompts_is_one_sentence_at_once(template, reason):
    with pytest.raises(ValueError, match="^The chat template of .* refuses our prompts: ") as why:
        Chat(tokenizer(template))
    assert str(why.value).endswith(f": {reason}")


def test_a_template_that_drops_our_prompts_is_refused():
    """It reads lists of texts and images only, and takes our text for such a list."""
    parts = (
        "{% for part in messages[0].content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="^The chat template of .* drops our prompts.$"):
        Chat(tokenizer(f"User: {parts}\nAssistant:"))


# ---- stop tokens
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
ENDS = [  # the rest of a template, the checkpoint's eos token, all stop tokens
    ("<|im_end|>\n{% endfor %}", "<|im_end|>", ["<|im_end|>"]),
    ("<|im_end|>\n{% endfor %}", "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
    ("<|im_end|>\n{% endfor %}<|endoftext|>", "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
    (" <|im_end|>{% endfor %}<|im_start|>", "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
    ("\n\n{% endfor %}", "<|endoftext|>", ["<|endoftext|>"]),  # a line break is no stop
    ("</turn>{% endfor %}", "<|endoftext|>", ["<|endoftext|>"]),  # nor is ordinary text
    (
        "{{ m.role.x.y if m.role != 'user' }}<|im_end|>{% endfor %}",
        "<|endoftext|>",
        ["<|endoftext|>"],
    ),
]


@pytest.mark.parametrize("end, eos, stops", ENDS)
def test_a_completion_ends_with_the_token_that_ends_a_message_in_the_template(end, eos, stops):
    tok = tokenizer(TURN + end, eos_token=eos)
    reader = Chat(tok)
    assert tok.convert_ids_to_tokens(reader.stops) == stops
    said = "".join(reader.remarks())
    assert said == "".join(
        f": completions end with {s} too, as in the chat template." for s in stops[1:]
    )


def test_a_template_without_the_messages_of_an_assistant_adds_no_stop_token():
    tok = tokenizer("{{ messages[0].content }}<|im_end|>", eos_token="<|endoftext|>")
    assert tok.convert_ids_to_tokens(Chat(tok).stops) == ["<|endoftext|>"]


# ---- prompts of servers, whose tokenizer is unknown
SERVED = """
<eos> <pad> <unk> <sop> <eoh> <start_of_turn> <|turn> <turn|> <|"|> <EOS_TOKEN> </s> <endoftext>
[INST] [/AVAILABLE_TOOLS] [gMASK] [BOS] [|endofturn|] ]~b] ]~!b[ [e~[ <<SYS>> <</SYS>> <arg_key>
<|START_OF_TURN_TOKEN|> <tool_call> </tool_response> <minimax:tool_call> <seed:think> </thinking>
◁/think▷ <|fim▁hole|> <｜tool▁calls▁begin｜> ＜|im_end|＞ ［INST］ ＜／s＞
</reasoning> <unused95>""".split()


@pytest.mark.parametrize("token", SERVED)
def test_for_a_server_the_shape_of_a_control_token_is_enough(token):
    assert defuse(f"a{token}b\ud800") == f"a{token[0]} {token[1:]}b?"
    assert token not in defuse(token[:2] + token + token[2:] + token * 3)


@pytest.mark.parametrize(
    "text",
    [
        "<b>bold</b> <div class='a_b'> <svg:rect/> <my-tag> <br/> <!-- a_b --> <a href=\"x_y\">",
        "vector<int> v; Map<K, V> m; array<size_t, 3>; vector<uint8_t> w; f<g<int>>(x)",
        "def f(x: list[int]) -> None: return x[i] if a[0] < b[-1] > c else a[~m] | b",
        "[1] [12, 3] [a](http://x.y/z_w) [OK] [A-Z] [a-z_]+ a < b_c > d: a <= b << 2 >> 1",
        r"\langle x | y \rangle  <x|y>  |x| < |y|  P(A|B) > 0  $a_{i}<b_{i}$  a <| b |> c",
        "<answer>7</answer> <module> <lambda> <class 'int'> <your name> <http://a.b/c_d> a<b, b>c",
    ],
)
def test_ordinary_markup_and_code_stay_as_they_are(text):
    assert defuse(text) == text
