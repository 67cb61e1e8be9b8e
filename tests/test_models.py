"""models/: a completion is what the model sampled, whatever checkpoint, batch or trainer bring along."""

import doctest
import hashlib
import itertools
import json
import os
import socket
import time
from contextlib import nullcontext
from http.server import SimpleHTTPRequestHandler

import pytest
import tokenizers
import torch
import transformers
from conftest import serving
from safetensors.torch import load_file, save_file
from test_flow_grpo import in_memory
from torch.utils.checkpoint import checkpoint
from transformers import AddedToken, Gemma3TextConfig, GPT2Config, LlamaConfig
from transformers.utils.hub import constants

import flow_grpo
import generator
from models import loading, local, tokens
from models.chat import Chat
from models.completion import TOO_LONG
from models.loading import config_of, hub_is_down, load_engine, refuse_to_train
from models.local import HF
from models.tokens import control_ids, defuse, spans
from scale import fit
from scale.passes import Passes

CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
PROMPTS = ["hi", "a much longer prompt than the one before it", "two plus two", "x"]
HOSTILE = dict(
    do_sample=True, top_k=1, top_p=0.1, min_p=0.9, typical_p=0.2, temperature=0.01, repetition_penalty=5.0,
    no_repeat_ngram_size=1, suppress_tokens=list(range(40, 200)), begin_suppress_tokens=[33],
    bad_words_ids=[[34]], sequence_bias=[[[35], 10.0]], min_new_tokens=9, max_length=3, forced_eos_token_id=2,
    num_beams=3, epsilon_cutoff=0.1, eta_cutoff=0.1, exponential_decay_length_penalty=[1, 2.0],
    renormalize_logits=True, guidance_scale=3.0)


def tokenizer(template=CHATML, **special):
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(PROMPTS, tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **special}
    tok = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **special)
    tok.chat_template = template
    return tok


def write(path, tok, seed=0, generation=None, **config):
    """A random Qwen2 as a checkpoint. Its large initial weights have no two tokens nearly tie."""
    torch.manual_seed(seed)
    config = dict(vocab_size=len(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                  initializer_range=0.3, eos_token_id=2) | config
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config)).save_pretrained(path)
    tok.save_pretrained(path)
    if generation is not None:  # by hand: transformers refuses to save some of what is published
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "model", tokenizer())


@pytest.fixture
def engine(folder):
    return load_engine(folder)


@pytest.fixture
def made(tmp_path):
    """made(tokenizer, **settings of write): an engine. With initializer_range 0.02 it stops at any time."""
    def make(tok=None, name="m", **settings):
        return load_engine(write(tmp_path / name, tok or tokenizer(), **settings))
    return make


def log_probs(engine, c, temperature):
    """log π of each sampled token, by one plain forward pass over prompt and answer."""
    logits = engine.model(torch.tensor([c.prompt_ids + c.ids])).logits[0, len(c.prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[range(len(c.ids)), c.ids]


class Spy:
    """Records the rows of each generate() and the model's state meanwhile."""

    def __init__(self, model):
        self.rows, self.generate = [], model.generate
        model.generate = self

    def __call__(self, ids, **settings):
        self.rows.append(len(ids))
        self.states = states(self.generate.__self__)
        return self.generate(ids, **settings)


# What is sampled

@pytest.mark.parametrize("budget", [1, 130, 65_536])
def test_a_greedy_batch_answers_as_one_prompt_at_a_time_and_in_order(engine, budget):
    alone = [engine([prompt], max_new_tokens=12)[0] for prompt in PROMPTS]
    engine.budget.tokens, spy = budget, Spy(engine.model)
    assert engine(PROMPTS, max_new_tokens=12) == alone and (len(spy.rows) > 1) == (budget < 65_536)
    assert len({c.text for c in alone}) == len(PROMPTS)


def test_batches_stay_within_the_budget_and_leave_no_row_out():
    lengths = [5, 100, 7, 7, 31, 2, 64]
    groups, _, _ = in_memory(list, range(7), lengths.__getitem__, 90, extra=10)
    assert sorted(i for rows in groups for i in rows) == list(range(7)) and len(groups) == 4
    assert all(len(rows) == 1 or len(rows) * (max(lengths[i] for i in rows) + 10) <= 90 for rows in groups)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nothing_of_the_checkpoints_generation_config_changes_what_is_sampled(made, temperature):
    hostile, answers = made(name="hostile", generation=HOSTILE), []
    assert hostile.model.generation_config.num_beams == 3
    for engine in (made(), hostile):
        torch.manual_seed(3)
        answers.append([(c.ids, c.text) for c in engine(PROMPTS * 4, temperature, max_new_tokens=12)])
    assert answers[0] == answers[1]


def test_tokens_come_as_often_as_softmax_of_logits_over_temperature(made):
    engine, n = made(generation=HOSTILE, initializer_range=0.08), 4000
    torch.manual_seed(0)
    completions = engine(["hi"] * n, temperature=0.7, max_new_tokens=1)
    p = (engine.model(torch.tensor([completions[0].prompt_ids])).logits[0, -1] / 0.7).softmax(-1)
    seen = torch.bincount(torch.tensor([c.ids[0] for c in completions]), minlength=len(p)) / n
    mean = (2 / torch.pi * p * (1 - p) / n).sqrt().sum()
    assert (seen - p).abs().sum() < mean * 1.3


def test_ids_and_log_probs_are_what_was_sampled_and_a_forward_pass_without_padding_finds_them_again(made):
    engine = made(initializer_range=0.05)
    torch.manual_seed(0)
    completions = engine(PROMPTS * 4, temperature=0.7, max_new_tokens=60)
    assert len({len(c.ids) for c in completions}) > 2
    for c in completions:
        torch.testing.assert_close(torch.tensor(c.logps), log_probs(engine, c, 0.7), atol=1e-4, rtol=0)
    read = engine.tokenizer.decode(completions[0].prompt_ids)
    assert read == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [c.logps for c in engine(PROMPTS, max_new_tokens=8)] == [[]] * 4


def penalise(model, penalty):
    """A repetition penalty gets in while the model samples."""
    generate = model.generate
    def penalised(ids, generation_config, **rest):
        generation_config.repetition_penalty = penalty
        return generate(ids, generation_config=generation_config, **rest)
    model.generate = penalised


@pytest.mark.parametrize("scored_at, penalty, low, high",
                         [(0.7, 1.0, 0, 1e-4), (1.0, 1.0, 0.05, 9), (0.7, 1.3, 0.05, 9)])
def test_the_sampling_gap_is_rounding_unless_another_policy_is_scored(engine, scored_at, penalty, low, high):
    penalise(engine.model, penalty)
    torch.manual_seed(0)
    completions = engine(PROMPTS * 2, temperature=0.7, max_new_tokens=20)
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.0)
    def update(temperature, logps):
        actions = [flow_grpo.Action(c.prompt_ids, c.ids, i, (-1.0) ** i, logps(c))
                   for i, c in enumerate(completions)]
        passes = Passes(engine.model, None, flow_grpo.token_logps)
        return flow_grpo.update(passes, optimizer, actions, range(8), temperature=temperature, minibatches=2)
    row = update(scored_at, lambda c: c.logps)
    assert low < row["sampling_gap"] < high and row["ratio_max"] < 1 + 1e-6
    assert update(0.7, lambda c: [])["sampling_gap"] == 0.0


# Memory

def small_memory(model, rows, tokens=3):
    """`model` where more than `rows` sequences are too many, as is seen after some tokens."""
    forward, calls = model.forward, []

    def limited(*args, **kwargs):
        calls.append(len(kwargs["input_ids"]))
        if calls[-1] > rows and calls[-tokens:] == calls[-1:] * tokens:
            calls.append(0)
            raise torch.OutOfMemoryError("CUDA out of memory. (a test)")
        return forward(*args, **kwargs)
    model.forward = limited
    return calls


@pytest.mark.parametrize("rows", [1, 3])
def test_a_batch_that_does_not_fit_is_halved_and_answers_the_same(engine, rows):
    whole, budget = engine(PROMPTS, max_new_tokens=12), engine.budget.tokens
    calls = small_memory(engine.model, rows)
    with pytest.warns(UserWarning, match="from here on batches of at most") as warnings:
        assert engine(PROMPTS, max_new_tokens=12) == whole
    assert engine.budget.tokens < budget and len(warnings) == calls.count(0)
    calls.clear()
    assert engine(PROMPTS, max_new_tokens=12) == whole and max(calls) <= rows and 0 not in calls  # remembered


@pytest.mark.filterwarnings("ignore:Out of memory")
def test_what_is_sampled_does_not_depend_on_how_far_the_failed_attempt_came(folder):
    samples = []
    for failed_after in (1, 3, 9):
        engine = load_engine(folder)
        small_memory(engine.model, 2, failed_after)
        torch.manual_seed(0)
        samples.append([(c.ids, c.logps) for c in engine(PROMPTS, temperature=1.0, max_new_tokens=12)])
    assert samples[0] == samples[1] == samples[2] and all(len(ids) == len(logps) for ids, logps in samples[0])


def test_a_seed_decides_what_is_sampled_whatever_the_batches(engine):
    samples = []
    for engine.budget.tokens in (65_536, 65_536, 200, 1):
        torch.manual_seed(0)
        samples.append(engine(PROMPTS * 2, temperature=1.0, max_new_tokens=8))
    assert samples[1:] == samples[:1] * 3 and samples[0] != engine(PROMPTS * 2, 1.0, max_new_tokens=8)


def test_one_prompt_that_does_not_fit_is_one_sentence(engine):
    small_memory(engine.model, 0)
    with pytest.raises(MemoryError, match="^one row of 26 tokens and 12 new ones does not fit") as why:
        engine(PROMPTS[1:2], max_new_tokens=12)
    assert "\n" not in str(why.value) and isinstance(why.value.__cause__, torch.OutOfMemoryError)


# Equal prompts

def test_equal_prompts_are_generated_once_at_temperature_0_and_separately_above_it(engine):
    spy = Spy(engine.model)
    a, b, c, d = engine(["hi", "x", "hi", "hi"], max_new_tokens=6)
    assert spy.rows == [2] and a == c == d != b
    c.ids.append(-1)
    assert a == d != c  # equal, and not one object
    samples = engine(["hi"] * 6, temperature=1.5, max_new_tokens=8)
    assert spy.rows == [2, 6] and len({tuple(c.ids) for c in samples}) > 1


# Stop tokens

@pytest.mark.parametrize("given, stops", [([2], [2]), ([33, 34, 35], [33, 34, 35, 2])])  # these have a text
def test_each_stop_token_is_an_action_without_a_text_and_a_cut_completion_has_none(made, given, stops):
    engine = made(generation={"eos_token_id": given}, initializer_range=0.02)
    assert engine.chat.stops == stops  # the checkpoint's and the tokenizer's
    torch.manual_seed(0)
    completions = engine(["hi"] * 64, temperature=1.0, max_new_tokens=100)
    stopped = [c for c in completions if c.ids[-1] in stops]
    assert 0 < len(stopped) < 64 and {c.ids[-1] for c in stopped} == set(stops)
    for c in completions:
        ids = c.ids[:-1] if c in stopped else c.ids
        assert not set(ids) & set(stops) and (c in stopped or len(ids) == 100)
        assert c.text == engine.tokenizer.decode(ids, skip_special_tokens=True) and "<|im_end|>" not in c.text


@pytest.mark.parametrize("pad", ["<|im_end|>", None])
def test_a_pad_token_that_is_the_stop_token_or_missing_changes_nothing(made, pad):
    samples = []
    for tok in (tokenizer(), tokenizer(pad_token=pad)):
        engine = made(tok, initializer_range=0.02)
        torch.manual_seed(0)
        samples.append(engine(PROMPTS * 4, temperature=1.0, max_new_tokens=80))
    assert samples[0] == samples[1] and any(c.ids[-1] == 2 for c in samples[0])


def test_generation_reads_each_token_once_and_ends_when_all_rows_have_stopped(made):
    engine = made(generation={"eos_token_id": list(range(2, 200))})
    spy, read = Spy(engine.model), []
    engine.model.model.embed_tokens.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    completions = engine(PROMPTS, temperature=2.0, max_new_tokens=100)
    longest = max(len(c.ids) for c in completions)
    assert spy.rows == [4] and read == [max(len(c.prompt_ids) for c in completions)] + [1] * (longest - 1)
    assert longest < 100


def test_a_model_without_a_stop_token_talks_to_the_limit(made):
    engine = made(tokenizer(eos_token=None, pad_token=None), eos_token_id=None)
    assert [len(c.ids) for c in engine(PROMPTS, temperature=1.0, max_new_tokens=30)] == [30] * 4


# Training and rollout share the model

def checkpointed(engine):
    engine.model.train()
    engine.model.config.use_cache = False
    for layer in engine.model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda f, *args: checkpoint(f, *args, use_reentrant=False)
    engine.model.model.norm.eval()  # a frozen part of the model in training
    return states(engine.model), engine.model.generation_config


def states(model):
    return [(m.training, getattr(m, "gradient_checkpointing", False)) for m in model.modules()]


def test_a_rollout_in_training_with_checkpointing_equals_one_in_eval(made):
    engine = made(attention_dropout=0.5)

    def completions():
        torch.manual_seed(0)
        return engine(PROMPTS, max_new_tokens=12), engine(PROMPTS[1:2] * 8, 1.0, max_new_tokens=12)  # shared

    in_eval, shared = completions()
    before, settings = checkpointed(engine)
    spy = Spy(engine.model)
    assert completions() == (in_eval, shared)
    assert set(spy.states) == {(False, False)}
    assert states(engine.model) == before and engine.model.generation_config is settings
    engine.model(torch.tensor([in_eval[0].prompt_ids])).logits.sum().backward()  # training can go on


def test_the_model_is_restored_even_when_generate_fails(engine):
    before, settings = checkpointed(engine)
    engine.model.model.forward = lambda *a, **k: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine(["hi"], max_new_tokens=4)
    assert states(engine.model) == before and engine.model.generation_config is settings


def test_a_saved_model_is_the_same_model_with_the_same_generation_config(made, tmp_path):
    generation = {**HOSTILE, "do_sample": False, "eos_token_id": [2, 5]}  # transformers refuses to save this
    engine = made(generation=generation)
    engine.save(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert all(generation[name] == again[name] for name in generation.keys() & again.keys())
    assert {"top_k", "repetition_penalty", "min_p", "eos_token_id"} <= set(again)
    assert load_engine(tmp_path / "again")(PROMPTS, max_new_tokens=8) == engine(PROMPTS, max_new_tokens=8)


# The context

def test_a_prompt_without_room_for_its_answer_is_refused_and_the_others_are_answered(engine):
    short, long, other = engine(["hi", "word " * 300, "x"], max_new_tokens=6)
    assert long.error == TOO_LONG and long.ids == [] and long.text == "" and len(long.prompt_ids) > 256
    assert [short, other] == engine(["hi", "x"], max_new_tokens=6) and not short.error and len(short.ids) == 6
    room = 256 - len(engine.chat.encode("hi"))
    assert [engine(["hi"], max_new_tokens=n)[0].error for n in (room, room + 1)] == ["", TOO_LONG]


def test_the_context_is_found_under_its_other_names_and_missing_means_no_limit():
    tok = tokenizer()
    small = dict(vocab_size=len(tok), n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    gpt2 = HF(transformers.GPT2LMHeadModel(GPT2Config(n_positions=48, n_embd=16, **small)), tok)
    bloom = HF(transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=16, **small)), tok)
    assert gpt2.context() == 48 and bloom.context() == float("inf") and bloom(["hi"], max_new_tokens=4)[0].ids


def test_no_prompts_no_answers(engine):
    assert engine([]) == engine([], temperature=1.0) == []


# Control tokens of pages: each shape in the tokenizer_config.json of these models; * is not special there.

NAMED = {
    "Qwen2.5": "<|im_start|> <|im_end|> <|endoftext|> <|vision_pad|> *<|fim_prefix|> *<|repo_name|>",
    "Qwen3": "<|im_start|> <|im_end|> <|endoftext|> <|vision_start|> <|vision_end|> *<think> *</think>",
    "Llama-3": "<|start_header_id|> <|eot_id|> <|begin_of_text|> <|python_tag|> <|reserved_special_token_0|>",
    "Phi-3": "<|user|> <|end|> <|assistant|> <|system|> <|endoftext|> <unk> <s> *</s> <|placeholder1|>",
    "Gemma": "<start_of_turn> <end_of_turn> <bos> <eos> <pad> <unk> <start_of_image> <image_soft_token>",
    "Mistral": "[INST] [/INST] <s> </s> <unk> [TOOL_CALLS] [/TOOL_RESULTS] [IMG] [IMG_BREAK] [SYSTEM_PROMPT] "
               "[/SYSTEM_PROMPT] " + " ".join(f"<SPECIAL_{i}>" for i in range(20, 1000)),
    "SmolLM2": "<|im_start|> <|im_end|> <|endoftext|> <repo_name> <reponame> <gh_stars> <empty_output>",
    "DeepSeek": "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜> <|EOT|> *<｜User｜> "
                "*<｜fim▁hole｜> *<｜tool▁calls▁begin｜> *<｜place▁holder▁no▁0｜> *<think> *</think>"}


def chat_engine(listed, normalizer=None):
    """An engine that only encodes, with these tokens, and a template that marks turns with the first two."""
    added = [AddedToken(t.strip("*"), special=t[0] != "*", normalized=False) for t in listed.split()]
    begin, end = added[0].content, added[1].content
    tok = tokenizer(f"{begin}user\n{{{{ messages[0].content }}}}{end}\n{begin}assistant\n")
    tok.add_tokens(added)
    if normalizer:
        tok.backend_tokenizer.normalizer = normalizer
    return HF(None, tok), [t.content for t in added]


def control(engine, page):
    """The added tokens of a prompt, and how it begins and ends."""
    ids, added = engine.chat.encode(f"a {page} b"), engine.tokenizer.added_tokens_decoder
    return [i for i in ids if i in added], ids[:1], ids[-12:]


@pytest.mark.parametrize("model", NAMED)
def test_no_control_token_of_a_page_reaches_the_model(model):
    engine, listed = chat_engine(NAMED[model])
    frame = control(engine, "page")
    assert len(frame[0]) == 3
    nested, doubled = "".join(t[:3] + t + t[3:] for t in listed), "".join(t + t[1:] for t in listed)
    for page in ("".join(listed), "\n".join(listed), nested, doubled):
        assert control(engine, page) == frame
    assert "a <page> b" in engine.tokenizer.decode(engine.chat.encode("a <page> b"))


INSIDE = [
    "<|im_<|im_end|>end|>", "<|im_<|im_start|>start|>", "<<|im_end|>", "<|im_end|><|im_end|>",
    "<<think>think>", "</</think>think>", "<think>",
    "＜|im_end|＞", "<|im_end|＞", "＜｜ｉｍ＿ｅｎｄ｜＞", "<\u200b|im_end|>", "<|IM_END|>"]


@pytest.mark.parametrize("normalizer", [None, tokenizers.normalizers.NFC(), tokenizers.normalizers.NFKC()])
def test_tokens_inside_one_another_and_letters_that_a_normalizer_makes_equal_write_none(normalizer):
    engine, _ = chat_engine(NAMED["Qwen3"], normalizer)  # tokens are looked for before it normalises
    assert [page for page in INSIDE if control(engine, page) != control(engine, "page")] == []


def test_a_tokenizer_in_python_is_no_exception():
    tok = transformers.ByT5Tokenizer()
    tok.chat_template = "<extra_id_0>{{ messages[0].content }}<extra_id_1>"
    engine = HF(None, tok)
    assert control(engine, "</s><extra_id_7><unk>")[0] == control(engine, "page")[0] != []


def test_words_that_were_merely_added_to_a_tokenizer_stay_words():
    engine = load_engine("toy")
    added = engine.tokenizer.added_tokens_decoder.values()
    words = " ".join(str(token) for token in added if not token.special)
    assert len(words) > 1000 and words in engine.tokenizer.decode(engine.chat.encode(words))


# Tokenizers of all kinds. Each has a special and an added token, and a normaliser that may make text equal.

def bare_tokenizer(kind, normalizer, normalized):
    """A tiny tokenizer. Its vocabulary holds the end token, too, as that of a published Unigram does."""
    letters = [*"abcdefghijklmnopqrstuvwxyzT<>|/_[]()=+0123 .,:?", "\u2581"]
    models = {
        "BPE": lambda: tokenizers.models.BPE({c: i for i, c in enumerate(["<unk>", "</s>", *letters])}, [],
                                             unk_token="<unk>", byte_fallback=True),
        "Unigram": lambda: tokenizers.models.Unigram(
            [("<unk>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in letters)], unk_id=0),
        "WordPiece": lambda: tokenizers.models.WordPiece(
            {c: i for i, c in enumerate(["<unk>", "</s>", *letters, *(f"##{c}" for c in letters)])},
            unk_token="<unk>")}
    backend = tokenizers.Tokenizer(models[kind]())
    backend.normalizer = normalizer
    tok = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    flags = dict(normalized=normalized, lstrip=True, rstrip=True)
    special = [AddedToken(text, special=True, **flags) for text in ("END OF TURN", "~go~", "\ue000")]
    tok.add_tokens([*special, AddedToken("<reponame>", **flags), AddedToken("titanium", **flags)])
    tok.chat_template = "~go~{{ messages[0].content }}</s>"
    return tok


NORMALIZERS = {
    "none": None, "NFKC": tokenizers.normalizers.NFKC(), "NFC": tokenizers.normalizers.NFC(),
    "lowercase": tokenizers.normalizers.Lowercase(), "BERT": tokenizers.normalizers.BertNormalizer(),
    "no spaces": tokenizers.normalizers.Replace(" ", ""),
    "Llama": tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("\u2581"),
                                              tokenizers.normalizers.Replace(" ", "\u2581")])}
PAGES = ["</s>", "＜/s＞", "＜／ｓ＞", "END OF TURN", "end of turn", "ＥND OF TURN", "~go~", "～go～",
         "<reponame>", "＜reponame＞", "<REPONAME>", "<repo<reponame>name>", "~g~go~o~", "~go~go~go~",
         "  ~go~  ", "\ue000", "<\u00adreponame>", "<re\x00poname>", "</s></s>", "< /s>", "~ go~"]


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordPiece"])
def test_no_tokenizer_reads_a_control_token_in_a_prompt_however_it_is_spelled(kind):
    for normalizer, normalized in itertools.product(NORMALIZERS, (False, True)):
        if (normalizer, normalized) == ("BERT", True):
            continue  # there tokenizers 0.23 itself panics at "＜/s＞"
        engine = HF(None, bare_tokenizer(kind, NORMALIZERS[normalizer], normalized))
        for page in [*PAGES, "".join(PAGES), " ".join(PAGES[::-1])]:
            found, frame = (([i for i in engine.chat.encode(prompt) if i in engine.chat.control])
                            for prompt in (f"a {page} b", "a b"))
            assert found == frame and len(frame) == 2, (normalizer, normalized, ascii(page))
        assert "titanium" in engine.tokenizer.decode(engine.chat.encode("a titanium b")).replace(" ", "")


def test_the_pages_above_hold_control_tokens_where_nothing_defuses_them():
    found = {kind: HF(None, bare_tokenizer(kind, NORMALIZERS["NFKC"], True)) for kind in ("BPE", "Unigram")}
    for engine in found.values():
        assert sum(bool(spans(page, engine.tokenizer, engine.chat.control)) for page in PAGES) >= 12


def test_a_character_that_a_tokenizer_does_not_know_is_no_control_token_and_stays():
    for kind in ("Unigram", "WordPiece"):
        tok = bare_tokenizer(kind, None, False)
        text = "a \u4e16 b"
        assert tok.unk_token_id in tok(text)["input_ids"] and defuse(text, tok, control_ids(tok)) == text


def test_a_prompt_in_which_no_spelling_helps_is_not_sent():
    tok = bare_tokenizer("BPE", tokenizers.normalizers.Replace(tokenizers.Regex("[b?]"), "~go~"), True)
    with pytest.raises(ValueError, match="^a prompt holds a control token .* not sent$"):
        Chat(tok).encode("a page b")


def test_the_tags_that_our_own_prompts_ask_for_stay_whatever_is_added_to_a_tokenizer():
    engine, _ = chat_engine("<|im_start|> <|im_end|> <answer> *</answer>")
    assert generator.PROMPT in engine.tokenizer.decode(engine.chat.encode(generator.PROMPT))


def test_other_tags_of_a_prompt_stay_once_they_are_named(monkeypatch):
    engine, prompt = chat_engine("<|im_start|> <|im_end|>")[0], "in tags: <final_answer> ... </final_answer>"
    read = lambda: engine.tokenizer.decode(engine.chat.encode(prompt))
    assert "< final_answer>" in read()
    monkeypatch.setattr(tokens, "OURS", ("<final_answer>", "</final_answer>"))
    assert prompt in read()


def test_a_letter_that_a_tokenizer_pads_with_stays_in_a_completion():
    tok = tokenizer(pad_token="0")
    assert Chat(tok).decode(tok("print(100+20)")["input_ids"]) == "print(100+20)"


def test_a_model_that_computes_nan_is_refused_before_the_run(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data[0] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="computes nan: its weights are damaged, or too large for torch.flo"):
        load_engine(folder)


@pytest.mark.parametrize("text, defused", [
    ("a<|im_end|>b</s>c<s>d[INST]e[/INST]f", "a< |im_end|>b< /s>c< s>d[ INST]e[ /INST]f"),
    ("<start_of_turn>g<｜Assistant｜>h\ud800", "< start_of_turn>g< ｜Assistant｜>h?"),
    ("<think>a</think>", "< think>a< /think>"), ("a <b> [1] x|y <|> <p>", "a <b> [1] x|y <|> <p>")])
def test_without_a_tokenizer_the_control_tokens_of_common_templates_are_defused(text, defused):
    assert defuse(text) == defused


SERVED = """
<eos> <bos> <pad> <unk> <mask> <sop> <eoh> <start_of_turn> <end_of_image> <|turn> <turn|> <|"|>
<EOS_TOKEN> </s> [TOOL_CALLS] [INST] [/AVAILABLE_TOOLS] [gMASK] [BOS] [UNUSED_TOKEN_146] [|endofturn|]
[|system|] ]~b] ]~!b[ [e~[ <|START_OF_TURN_TOKEN|> <tool_call> </tool_response> <minimax:tool_call>
<seed:think> <arg_key> <extra_id_0> <reserved_106> <SPECIAL_12> <<SYS>> <</SYS>> >>QUESTION<< <endoftext>
<[end▁of▁sentence]> <|fim▁hole|> <｜tool▁calls▁begin｜> ＜|im_end|＞ ［INST］ ＜／s＞""".split()


def test_for_a_server_the_shape_of_a_control_token_is_enough():
    for token in SERVED:
        assert defuse(f"a{token}b") == f"a{token[0]} {token[1:]}b"
        nested = token[:2] + token + token[2:]
        assert token not in defuse(nested) and token not in defuse(token * 3), token


@pytest.mark.parametrize("text", [
    "<b>bold</b> <div class='a_b'><h1>x</h1></div> <svg:rect/> <my-tag> <br/> <!-- a_b --> <a href=\"x_y\">",
    "vector<int> v; Map<K, V> m; array<size_t, 3>; vector<uint8_t> w; Foo<T> f; std::less<> g; f<g<int>>(x)",
    "def f(x: list[int], y: dict[str, int]) -> None: return x[i] if a[0] < b[-1] > c else a[~m] | b",
    "[1] [12, 3] [a](http://x.y/z_w) [A] [OK] [x, y] [A-Z] [a-z_]+ if a < b_c > d: a <= b >= c << 2 >> 1",
    r"\langle x | y \rangle  <x|y>  |x| < |y|  P(A|B) > 0  $a_{i}<b_{i}$  a <| b |> c  <class 'int'>",
    "<answer>7</answer> <module> <lambda> <stdin> <your name> <T_1, T_2> <http://a.b/c_d> a<b and b>c"])
def test_ordinary_markup_and_code_stay_as_they_are(text):
    assert defuse(text) == text


@pytest.mark.parametrize("page", ["<unused7>", *(
    pytest.param(page, marks=pytest.mark.exhaustive)
    for page in ("<", "<|", "[", "<_", "]~", "</", "<a:", ">>A", "<|a ", "[|a"))])
def test_defusing_takes_time_in_proportion_to_the_text_whatever_the_number_of_tokens(page):
    engine, _ = chat_engine("<|im_start|> <|im_end|> " + " ".join(f"<unused{i}>" for i in range(6242)))
    defuse("a", engine.tokenizer, engine.chat.control)
    start = time.perf_counter()
    defuse(page * (200_000 // len(page)), engine.tokenizer, engine.chat.control)
    assert time.perf_counter() - start < 20  # it takes 0.6 s; with a pattern of all tokens, 77 s


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "default"])
@pytest.mark.parametrize("config", [
    lambda rope: LlamaConfig(rope_parameters=rope), lambda rope: LlamaConfig(rope_scaling=rope),
    lambda rope: Gemma3TextConfig(rope_parameters={"full_attention": rope}), lambda rope: GPT2Config()])
def test_only_embeddings_that_depend_on_the_longest_row_are_refused(config, kind):
    config = config(dict(rope_type=kind, rope_theta=1e4, factor=2.0, short_factor=[1.0], long_factor=[1.0],
                         low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512))
    refused = kind == "longrope" and not isinstance(config, GPT2Config)
    with pytest.raises(ValueError, match="^A model with longrope.*$") if refused else nullcontext():
        refuse_to_train(config)


# The model hub

class Hub(SimpleHTTPRequestHandler):
    """A hub with one model, some-org/some-model, that takes 0.05 s for each answer."""

    def log_message(self, *_):
        pass

    def translate_path(self, path):
        return str(self.server.folder / (path.partition("/resolve/main/")[2] or path[1:]))

    def end_headers(self):
        time.sleep(0.05)
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", f'"{hashlib.sha1(self.path.encode()).hexdigest()}"')
        super().end_headers()


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """hub(address) sets the hub's address; hub.online is one that answers. The cache begins empty."""
    def at(address):
        hub_is_down.cache_clear()
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # it remembers an address, too
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                            address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "HUB_SECONDS", 0.5)
    with serving(Hub) as server:
        server.folder, at.online = folder, f"http://127.0.0.1:{server.server_port}"
        yield at
    hub_is_down.cache_clear()


@pytest.mark.parametrize("how", ["nobody listens", "nobody answers"])
def test_a_hub_that_cannot_be_reached_is_found_out_within_seconds_and_once(hub, how):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub(f"http://127.0.0.1:{silent.getsockname()[1] if how == 'nobody answers' else 1}")
        start = time.perf_counter()
        for call in (config_of, load_engine):
            with pytest.raises(ValueError, match="the model hub cannot be reached for it"):
                call("some-org/some-model")
        assert time.perf_counter() - start < 5


@pytest.mark.exhaustive
def test_a_model_comes_from_a_slow_hub_and_from_the_cache_when_the_hub_is_gone(hub, folder, monkeypatch):
    hub(hub.online)
    assert config_of("some-org/some-model").hidden_size == 32
    online = load_engine("some-org/some-model", device="cpu")(PROMPTS, max_new_tokens=4)
    hub("http://127.0.0.1:1")
    assert load_engine("some-org/some-model", device="cpu")(PROMPTS, max_new_tokens=4) == online
    assert load_engine(folder, device="cpu")(PROMPTS, max_new_tokens=4) == online
    hub(hub.online)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_is_down()  # as HF_HUB_OFFLINE=1 wants it


# Loading

@pytest.mark.parametrize("name, sentence", [
    ("./nowhere", "There is no folder './nowhere'"), ("/no/such", "There is no folder '/no/such'"),
    ("runs/last/model", "There is no folder 'runs/last/model': give"),
    ("some-org/some-model", "'some-org/some-model' here, and the model hub cannot be reached"),
    ("localhost:9", "write http://localhost:9$"), ("localhost:9/v1", "write http://localhost:9/v1$"),
    ("10.0.0.1:80/v1#m", "write http://10.0.0.1:80/v1#m$"), ("api.a.com/v1", "write http://api.a.com/v1$")])
@pytest.mark.parametrize("call", [config_of, load_engine])
def test_a_name_that_is_nowhere_is_one_clear_sentence(call, name, sentence):
    with pytest.raises(ValueError, match=sentence) as why:
        call(name)
    assert "\n" not in str(why.value)


@pytest.mark.parametrize("lost, size, sentence", [
    ("config.json", None, "holds no model"), ("model.safetensors", None, "does not hold a whole model"),
    ("model.safetensors", 1000, "does not hold a whole model"), ("tokenizer*", None, "no tokenizer"),
    ("chat_template.jinja", None, "no chat template")])
def test_a_folder_with_a_part_missing_or_cut_short_is_one_clear_sentence(folder, lost, size, sentence):
    for path in folder.glob(lost):
        os.truncate(path, size) if size else path.unlink()
    with pytest.raises(ValueError, match=sentence) as why:
        load_engine(folder)
    assert "\n" not in str(why.value) and str(folder) in str(why.value)


@pytest.mark.parametrize("settings, sentence", [
    ({"dtype": "int8"}, "no dtype 'int8' here: use one of float32"),
    ({"device": "tpu"}, "no device 'tpu' here: use one of")])
def test_a_device_or_dtype_that_does_not_exist_names_those_that_do(folder, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_engine(folder, **settings)


T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
BART = {"model_type": "bart", "is_encoder_decoder": True}
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}}
OWN_CODE = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.A", "AutoModelForCausalLM": "mine.B"}}


@pytest.mark.parametrize("changes, sentence", [
    (T5, "is a model of type 't5', which does not continue a text"),
    (BART, "is a model of type 'bart', which does not continue a text"),
    (AWQ, "cannot be loaded: Loading an AWQ quantized model requires"),
    (OWN_CODE, "brings Python code of its own, which is not run here"),
    ({"model_type": "rwkv"}, "is an RWKV, which transformers lets read the padding")])
def test_a_model_that_cannot_serve_is_one_sentence_and_no_code_of_it_runs(folder, changes, sentence, capfd):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "mine.py").write_text("print('my code')")
    with pytest.raises(ValueError, match=sentence) as why:
        load_engine(folder)
    assert "\n" not in str(why.value) and len(str(why.value)) < 400
    out, _ = capfd.readouterr()
    assert "my code" not in out and "[y/N]" not in out


@pytest.mark.parametrize("changes", [{"num_attention_heads": 0}, {"hidden_act": "os.system"}])
def test_a_configuration_of_which_no_model_can_be_made_is_one_sentence(folder, changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match="config.json describes no model that could be made") as why:
        fit.shapes(config_of(folder))
    assert "\n" not in str(why.value)


def test_a_folder_that_lacks_some_weights_is_refused_and_none_are_made_up(folder):
    file = folder / "model.safetensors"
    weights = load_file(file)
    lost = next(name for name in weights if "mlp" in name)
    save_file({name: weight for name, weight in weights.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"1 are missing, such as {lost}"):
        load_engine(folder)


def test_the_configuration_is_read_without_the_weights(folder):
    (folder / "model.safetensors").unlink()
    assert config_of(str(folder)).num_hidden_layers == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_of_either_dtype_answers_and_describes_itself_in_one_line(folder, dtype):
    engine = load_engine(folder, "cpu", dtype)
    millions = sum(p.numel() for p in engine.model.parameters()) / 1e6
    assert str(engine) == f"{folder} | {millions:.4g} M parameters | cpu | {dtype}"
    assert not engine.model.training and len(engine(PROMPTS, temperature=1.0, max_new_tokens=4)) == 4


def test_a_folder_is_loaded_and_answers_without_a_word(folder, capfd, recwarn):
    load_engine(folder)(PROMPTS, temperature=0.7, max_new_tokens=4)
    assert capfd.readouterr() == ("", "") and not [w for w in recwarn if "transformers" in str(w.filename)]


def test_the_examples_in_the_docstrings_are_true():
    assert not any(doctest.testmod(module).failed for module in (local, tokens))
