"""llm.py: what comes back is what the model sampled, whatever the checkpoint, the batch or the trainer had in mind."""
import doctest
import functools
import hashlib
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

os.environ["HF_HUB_OFFLINE"] = "1"          # before transformers reads it: no test asks the network
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AddedToken,
    BloomConfig,
    BloomForCausalLM,
    ByT5Tokenizer,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils.hub import constants

import flow_grpo
from models import loading, local, tokens
from models.completion import TOO_LONG
from models.loading import config_of, hub_is_down, load_engine, refuse_to_train
from models.local import HF, Sampled
from models.tokens import harmless
from scale import batches

CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
PROMPTS = ["hi", "a much longer prompt than the one before it", "two plus two", "x"]
HOSTILE = dict(do_sample=True, top_k=1, top_p=0.1, min_p=0.9, typical_p=0.2, repetition_penalty=5.0, no_repeat_ngram_size=1,
               suppress_tokens=list(range(40, 200)), begin_suppress_tokens=[33], forced_eos_token_id=2, bad_words_ids=[[34]],
               sequence_bias=[[[35], 10.0]], min_new_tokens=9, num_beams=3, max_length=3, epsilon_cutoff=0.1, eta_cutoff=0.1,
               exponential_decay_length_penalty=[1, 2.0], renormalize_logits=True, temperature=0.01, guidance_scale=3.0)


def tokenizer(template=CHATML, **special):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(PROMPTS, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tok = PreTrainedTokenizerFast(tokenizer_object=bpe, **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **special})
    tok.chat_template = template
    return tok


@pytest.fixture
def folder(tmp_path):
    """A random Qwen2 as a checkpoint. The large initial weights give it strong opinions, so no two tokens nearly tie."""
    return write(tmp_path / "model", tokenizer())


def write(path, tok, seed=0, generation=None, **config):
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**{**dict(
        vocab_size=len(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=2), **config}))
    model.save_pretrained(path)
    tok.save_pretrained(path)
    if generation is not None:              # written by hand: transformers refuses to save some of what is published
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def log_probs(engine, c, temperature):
    """log π of each sampled token, by one plain forward pass over prompt and answer."""
    logits = engine.model(torch.tensor([c.prompt_ids + c.ids])).logits[0, len(c.prompt_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1)[range(len(c.ids)), c.ids]


class Spy:
    """Counts the rows of each generate(), and keeps the scores that it sampled from."""

    def __init__(self, model):
        self.rows, self.generate = [], model.generate
        model.generate = self

    def __call__(self, ids, **settings):
        self.rows.append(len(ids))
        self.states = states(self.generate.__self__)
        out = self.generate(ids, return_dict_in_generate=True, output_scores=True, **settings)
        self.scores = out.scores
        return out.sequences


# What is sampled

def test_a_greedy_batch_answers_as_one_prompt_at_a_time_and_in_order(folder):
    engine = load_engine(folder)
    together = engine(PROMPTS, max_new_tokens=12)
    assert together == [engine([p], max_new_tokens=12)[0] for p in PROMPTS]
    assert len({c.text for c in together}) == len(PROMPTS)


@pytest.mark.parametrize("budget", [1, 80, 130])
def test_sub_batches_answer_as_one_batch(folder, budget):
    engine = load_engine(folder)
    whole = engine(PROMPTS, max_new_tokens=12)
    engine.token_budget, spy = budget, Spy(engine.model)
    assert engine(PROMPTS, max_new_tokens=12) == whole and len(spy.rows) > 1


def test_sub_batches_keep_to_the_budget_and_leave_nobody_out():
    lengths = [5, 100, 7, 7, 31, 2, 64]
    groups = batches.batches(lengths, max_new_tokens=10, budget=90)
    assert sorted(i for g in groups for i in g) == list(range(7))
    assert all(len(g) == 1 or len(g) * (max(lengths[i] for i in g) + 10) <= 90 for g in groups)


def test_nothing_of_the_checkpoints_generation_config_changes_what_is_sampled(tmp_path):
    plain, hostile = write(tmp_path / "plain", tokenizer()), write(tmp_path / "hostile", tokenizer(), generation=HOSTILE)
    assert load_engine(hostile).model.generation_config.num_beams == 3         # it did arrive
    for temperature in (0.0, 0.7, 1.0):
        answers = []
        for path in (plain, hostile):
            engine = load_engine(path)
            torch.manual_seed(3)
            answers.append([(c.ids, c.text) for c in engine(PROMPTS * 4, temperature, max_new_tokens=12)])
        assert answers[0] == answers[1]


def test_tokens_come_as_often_as_softmax_of_logits_over_temperature(tmp_path):
    engine = load_engine(write(tmp_path / "m", tokenizer(), generation=HOSTILE, initializer_range=0.08))
    spy, n = Spy(engine.model), 4000
    torch.manual_seed(0)
    done = engine(["hi"] * n, temperature=0.7, max_new_tokens=1)
    p = (engine.model(torch.tensor([done[0].prompt_ids])).logits[0, -1] / 0.7).softmax(-1)
    torch.testing.assert_close(spy.scores[0][0].softmax(-1), p)
    seen = torch.bincount(torch.tensor([c.ids[0] for c in done]), minlength=len(p)) / n
    assert (seen - p).abs().sum() < (2 / torch.pi * p * (1 - p) / n).sqrt().sum() * 1.3     # the mean of that sum, and 30 %


def test_the_ids_are_what_was_sampled_and_a_forward_pass_gives_their_log_probs(folder):
    engine = load_engine(folder)
    spy = Spy(engine.model)
    for c in engine(["two plus two"], temperature=1.3, max_new_tokens=10):
        sampled = torch.stack(spy.scores)[:, 0].log_softmax(-1)[range(len(c.ids)), c.ids]
        torch.testing.assert_close(log_probs(engine, c, 1.3), sampled, atol=1e-4, rtol=0)
        assert engine.tokenizer.decode(c.prompt_ids) == "<|im_start|>user\ntwo plus two<|im_end|>\n<|im_start|>assistant\n"


def test_padding_changes_no_log_prob_of_a_sampled_batch(folder):
    engine = load_engine(folder)
    spy = Spy(engine.model)
    done = engine(PROMPTS, temperature=1.0, max_new_tokens=8)
    longest_first = sorted(done, key=lambda c: -len(c.prompt_ids))
    for row, c in enumerate(longest_first):
        sampled = torch.stack(spy.scores)[: len(c.ids), row].log_softmax(-1)[range(len(c.ids)), c.ids]
        torch.testing.assert_close(log_probs(engine, c, 1.0), sampled, atol=1e-4, rtol=0)


def test_the_same_seed_says_the_same_and_another_seed_does_not(folder):
    engine, said = load_engine(folder), []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        said.append(engine(PROMPTS, temperature=1.0, max_new_tokens=12))
    assert said[0] == said[1] != said[2]


def test_the_completion_has_the_log_probs_of_its_ids_as_they_were_sampled(tmp_path):
    engine = load_engine(write(tmp_path / "m", tokenizer(), initializer_range=0.05))      # stops at any time
    torch.manual_seed(0)
    done = engine(PROMPTS * 4, temperature=0.7, max_new_tokens=60)
    assert len({len(c.ids) for c in done}) > 2
    for c in done:
        torch.testing.assert_close(torch.tensor(c.logps), log_probs(engine, c, 0.7), atol=1e-5, rtol=0)
    assert [c.logps for c in engine(PROMPTS, max_new_tokens=8)] == [[]] * 4


def test_watching_changes_no_token_and_keeps_the_logits_of_one_step(folder, monkeypatch):
    engine, watches, answers = load_engine(folder), [], []
    generate, original = engine.model.generate, Sampled
    monkeypatch.setattr(local, "Sampled", lambda t: watches.append(original(t)) or watches[-1])
    for unwatched in (generate, lambda ids, logits_processor, **rest: generate(ids, **rest)):
        engine.model.generate = unwatched
        torch.manual_seed(0)
        answers.append([c.ids for c in engine(PROMPTS, temperature=1.0, max_new_tokens=12)])
    assert answers[0] == answers[1] and watches[0].logits.shape == (4, len(engine.tokenizer))
    assert {row.shape for row in watches[0].logps} == {(4, 1)}


def learned(engine, done, temperature, **settings):
    """What update() says of one rollout per completion; its model is a copy that learns nothing (lr 0)."""
    actions = [flow_grpo.Action(c.prompt_ids, c.ids, i, c.logps) for i, c in enumerate(done)]
    A = [1.0, -1.0] * (len(done) // 2)
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.0)
    return flow_grpo.update(engine.model, None, optimizer, actions, A, temperature=temperature, **settings)


def penalised(engine, penalty):
    """The engine, where a repetition penalty gets in while it samples."""
    generate = engine.model.generate
    def tempted(ids, generation_config, **rest):
        generation_config.repetition_penalty = penalty
        return generate(ids, generation_config=generation_config, **rest)
    engine.model.generate = tempted
    return engine


@pytest.mark.parametrize("scored_at, penalty, low, high",
                         [(0.7, 1.0, 0, 2e-6), (1.0, 1.0, 0.05, 9), (0.7, 1.3, 0.05, 9)])
def test_the_sampling_gap_is_rounding_unless_another_policy_is_scored(folder, scored_at, penalty, low, high):
    engine = penalised(load_engine(folder), penalty)
    torch.manual_seed(0)
    done = engine(PROMPTS * 2, temperature=0.7, max_new_tokens=20)
    row = learned(engine, done, scored_at, minibatches=2)
    assert low < row["sampling_gap"] < high and row["ratio_first"] < 1e-6      # which never saw it
    for c in done:
        c.logps = []
    assert learned(engine, done, 0.7)["sampling_gap"] == 0.0


# Memory

def small_memory(model, rows, tokens=3):
    """`model` where more than `rows` sequences are too many, as is seen after some tokens."""
    forward, calls = model.forward, []

    def limited(*args, **kwargs):
        calls.append(len(kwargs["input_ids"]))
        if calls[-1] > rows and calls[-tokens:] == calls[-1:] * tokens:
            calls.append(0)
            raise torch.OutOfMemoryError("CUDA out of memory. (a test says so)")
        return forward(*args, **kwargs)
    model.forward = limited
    return calls


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_batch_that_does_not_fit_is_halved_and_answers_the_same(folder, rows):
    engine = load_engine(folder)
    whole, asked = engine(PROMPTS, max_new_tokens=12), engine.token_budget
    calls = small_memory(engine.model, rows)
    with pytest.warns(UserWarning, match="from now on at most") as said:
        assert engine(PROMPTS, max_new_tokens=12) == whole
    assert engine.token_budget < asked and len(said) == calls.count(0)
    calls.clear()
    assert engine(PROMPTS, max_new_tokens=12) == whole and max(calls) <= rows and 0 not in calls      # it is remembered


@pytest.mark.filterwarnings("ignore:Out of memory")
def test_what_is_sampled_does_not_depend_on_how_far_the_failed_attempt_came(folder):
    answers = []
    for tokens in (1, 3, 9):
        engine = load_engine(folder)
        small_memory(engine.model, 2, tokens)
        torch.manual_seed(0)
        answers.append([(c.ids, c.logps) for c in engine(PROMPTS, temperature=1.0, max_new_tokens=12)])
    assert answers[0] == answers[1] == answers[2] and all(len(ids) == len(logps) for ids, logps in answers[0])


def test_one_prompt_that_does_not_fit_is_one_sentence_that_says_what_to_change(folder):
    engine = load_engine(folder)
    small_memory(engine.model, 0)
    with pytest.raises(MemoryError, match="One prompt of 26 tokens and 12 new ones .* give --optimizer-device cpu, --lora 32") as why:
        engine(PROMPTS[1:2], max_new_tokens=12)
    assert "\n" not in str(why.value) and isinstance(why.value.__cause__, torch.OutOfMemoryError)


# Equal prompts

def test_equal_prompts_are_generated_once_at_temperature_0(folder):
    engine = load_engine(folder)
    spy = Spy(engine.model)
    a, b, c, d = engine(["hi", "x", "hi", "hi"], max_new_tokens=6)
    assert spy.rows == [2] and a == c == d != b
    c.ids.append(-1)
    assert a == d != c                      # equal, and not one object


def test_equal_prompts_are_sampled_separately_above_temperature_0(folder):
    engine = load_engine(folder)
    spy = Spy(engine.model)
    done = engine(["hi"] * 6, temperature=1.5, max_new_tokens=8)
    assert spy.rows == [6] and len({tuple(c.ids) for c in done}) > 1


# Stop tokens

def test_the_stop_token_is_an_action_and_a_cut_text_has_none(tmp_path):
    engine = load_engine(write(tmp_path / "m", tokenizer(), initializer_range=0.02))     # nearly uniform: stops at any time
    torch.manual_seed(0)
    done = engine(["hi"] * 64, temperature=1.0, max_new_tokens=100)
    stopped = [c for c in done if c.ids[-1] == 2]
    assert 0 < len(stopped) < 64
    for c in done:
        assert 2 not in c.ids[:-1] and (c in stopped or len(c.ids) == 100) and "<|im_end|>" not in c.text


@pytest.mark.parametrize("pad", ["<|im_end|>", None])
def test_a_pad_token_that_is_the_stop_token_or_missing_changes_nothing(tmp_path, pad):
    answers = []
    for path, tok in (("a", tokenizer()), ("b", tokenizer(pad_token=pad))):
        engine = load_engine(write(tmp_path / path, tok, initializer_range=0.02))
        torch.manual_seed(0)
        answers.append(engine(PROMPTS * 8, temperature=1.0, max_new_tokens=80))
    assert answers[0] == answers[1] and any(c.ids[-1] == 2 for c in answers[0])


def test_every_stop_token_of_a_list_stops_and_so_does_the_tokenizers(tmp_path):
    stops = [33, 34, 35]                    # ordinary tokens, so the text would show them
    engine = load_engine(write(tmp_path / "m", tokenizer(), generation={"eos_token_id": stops}, initializer_range=0.02))
    assert engine.stop_ids() == [33, 34, 35, 2]
    done = engine(["hi"] * 64, temperature=1.0, max_new_tokens=100)
    assert {c.ids[-1] for c in done if len(c.ids) < 100} == {33, 34, 35, 2}
    for c in done:
        ends = c.ids[-1] in engine.stop_ids()
        assert c.text == engine.tokenizer.decode(c.ids[:-1] if ends else c.ids, skip_special_tokens=True)


def test_generation_reads_each_token_once_and_ends_when_everybody_has_stopped(tmp_path):
    engine = load_engine(write(tmp_path / "m", tokenizer(), generation={"eos_token_id": list(range(2, 200))}))
    spy, read = Spy(engine.model), []
    engine.model.model.embed_tokens.register_forward_pre_hook(lambda module, args: read.append(args[0].shape[1]))
    done = engine(PROMPTS, temperature=2.0, max_new_tokens=100)
    assert len(spy.scores) == max(len(c.ids) for c in done) < 100
    assert read == [max(len(c.prompt_ids) for c in done)] + [1] * (len(spy.scores) - 1)


def test_a_model_without_a_stop_token_talks_to_the_limit(tmp_path):
    engine = load_engine(write(tmp_path / "m", tokenizer(eos_token=None, pad_token=None), eos_token_id=None))
    assert [len(c.ids) for c in engine(PROMPTS, temperature=1.0, max_new_tokens=30)] == [30] * 4


# Training and rollout share the model

def checkpointed(engine):
    engine.model.train()
    engine.model.config.use_cache = False
    for layer in engine.model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    engine.model.model.norm.eval()          # a frozen part of the model in training


def states(model):
    return [(m.training, getattr(m, "gradient_checkpointing", False)) for m in model.modules()]


def test_a_rollout_in_training_with_checkpointing_equals_one_in_eval(tmp_path):
    engine = load_engine(write(tmp_path / "m", tokenizer(), attention_dropout=0.5))
    calm = engine(PROMPTS, max_new_tokens=12)
    checkpointed(engine)
    before, settings, spy = states(engine.model), engine.model.generation_config, Spy(engine.model)
    assert engine(PROMPTS, max_new_tokens=12) == calm
    assert set(spy.states) == {(False, False)}
    assert states(engine.model) == before and engine.model.generation_config is settings
    engine.model(torch.tensor([calm[0].prompt_ids])).logits.sum().backward()            # and it can go on training


def test_the_model_is_put_back_even_when_generate_fails(folder):
    engine = load_engine(folder)
    checkpointed(engine)
    before, settings = states(engine.model), engine.model.generation_config
    engine.model.model.forward = lambda *a, **k: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine(["hi"], max_new_tokens=4)
    assert states(engine.model) == before and engine.model.generation_config is settings


def test_a_saved_model_is_the_same_model_with_the_same_generation_config(tmp_path):
    generation = {**HOSTILE, "do_sample": False, "eos_token_id": [2, 5]}                # transformers alone refuses to save this
    engine = load_engine(write(tmp_path / "m", tokenizer(), generation=generation))
    said = engine(PROMPTS, max_new_tokens=8)
    engine.save(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert {k: again[k] for k in generation if k in again} == {k: v for k, v in generation.items() if k in again}
    assert {"top_k", "repetition_penalty", "min_p", "eos_token_id"} <= set(again)
    assert load_engine(tmp_path / "again")(PROMPTS, max_new_tokens=8) == said


# The context

def test_a_prompt_longer_than_the_context_is_refused_and_the_others_are_answered(folder):
    engine = load_engine(folder)
    short, long, other = engine(["hi", "word " * 300, "x"], max_new_tokens=6)
    assert long.error == TOO_LONG and long.ids == [] and long.text == "" and len(long.prompt_ids) > 256
    assert [short, other] == engine(["hi", "x"], max_new_tokens=6) and not short.error and len(short.ids) == 6


def test_the_room_for_the_answer_counts_and_the_last_token_that_fits_is_allowed(folder):
    engine = load_engine(folder)
    room = 256 - len(engine.encode("hi"))
    assert [engine(["hi"], max_new_tokens=n)[0].error for n in (room, room + 1)] == ["", TOO_LONG]


def test_the_context_is_found_under_its_other_names_and_missing_means_no_limit():
    tok = tokenizer()
    small = dict(vocab_size=len(tok), n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    gpt2 = HF(GPT2LMHeadModel(GPT2Config(n_positions=48, n_embd=16, **small)), tok)
    bloom = HF(BloomForCausalLM(BloomConfig(hidden_size=16, **small)), tok)
    assert gpt2.context() == 48 and bloom.context() == float("inf") and bloom(["hi"], max_new_tokens=4)[0].ids


def test_no_prompts_no_answers(folder):
    assert load_engine(folder)([]) == load_engine(folder)([], temperature=1.0) == []


# Control tokens of pages. The lists are those of tokenizer_config.json of the models; * is not special there.

NAMED = {
    "Qwen2.5": "<|im_start|> <|im_end|> <|endoftext|> <|object_ref_start|> <|object_ref_end|> <|box_start|> "
               "<|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> "
               "<|image_pad|> <|video_pad|> *<|fim_prefix|> *<|fim_middle|> *<|fim_suffix|> *<|fim_pad|> "
               "*<|repo_name|> *<|file_sep|>",
    "Qwen3": "<|im_start|> <|im_end|> <|endoftext|> <|vision_start|> <|vision_end|> *<think> *</think>",
    "Llama-3": "<|start_header_id|> <|eot_id|> <|begin_of_text|> <|end_of_text|> <|end_header_id|> "
               "<|eom_id|> <|python_tag|> <|finetune_right_pad_id|> "
               + " ".join(f"<|reserved_special_token_{i}|>" for i in range(248)),
    "Phi-3": "<|user|> <|end|> <|assistant|> <|system|> <|endoftext|> <unk> <s> *</s> "
             + " ".join(f"<|placeholder{i}|>" for i in range(1, 7)),
    "Gemma": "<start_of_turn> <end_of_turn> <bos> <eos> <pad> <unk> <start_of_image> <end_of_image> "
             "<image_soft_token>",
    "Mistral": "[INST] [/INST] <s> </s> <unk> <pad> [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
               "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
               "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] "
               + " ".join(f"<SPECIAL_{i}>" for i in range(20, 1000)),
    "SmolLM2": "<|im_start|> <|im_end|> <|endoftext|> <repo_name> <reponame> <file_sep> <filename> "
               "<gh_stars> <issue_start> <issue_comment> <issue_closed> <jupyter_start> <jupyter_text> "
               "<jupyter_code> <jupyter_output> <jupyter_script> <empty_output>",
    "DeepSeek": "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜> <|EOT|> *<｜User｜> *<｜Assistant｜> "
                "*<｜fim▁hole｜> *<｜tool▁calls▁begin｜> *<｜tool▁call▁begin｜> *<｜tool▁sep｜> *<｜tool▁call▁end｜> "
                "*<｜tool▁outputs▁end｜> *<｜place▁holder▁no▁0｜> *<think> *</think>"}


def chat_engine(listed, normalizer=None):
    """An engine that only encodes, with these tokens, and a template that marks turns with the first two."""
    tokens = [AddedToken(t.strip("*"), special=t[0] != "*", normalized=False) for t in listed.split()]
    begin, end = tokens[0].content, tokens[1].content
    tok = tokenizer(f"{begin}user\n{{{{ messages[0].content }}}}{end}\n{begin}assistant\n")
    tok.add_tokens(tokens)
    if normalizer:
        tok.backend_tokenizer.normalizer = normalizer
    return HF(None, tok), [t.content for t in tokens]


def control(engine, page):
    """The added tokens of a prompt, and how it begins and ends."""
    ids, added = engine.encode(f"a {page} b"), engine.tokenizer.added_tokens_decoder
    return [i for i in ids if i in added], ids[:1], ids[-12:]


@pytest.mark.parametrize("model", NAMED)
def test_no_control_token_of_a_page_reaches_the_model(model):
    engine, tokens = chat_engine(NAMED[model])
    frame = control(engine, "page")
    assert len(frame[0]) == 3
    nested, doubled = "".join(t[:3] + t + t[3:] for t in tokens), "".join(t + t[1:] for t in tokens)
    for page in ("".join(tokens), "\n".join(tokens), nested, doubled):
        assert control(engine, page) == frame
    assert "a <page> b" in engine.tokenizer.decode(engine.encode("a <page> b"))


@pytest.mark.parametrize("page", ["<|im_<|im_end|>end|>", "<|im_<|im_start|>start|>", "<<|im_end|>",
                                  "<|im_end|><|im_end|>", "<<think>think>", "</</think>think>", "<think>"])
def test_tokens_that_are_put_into_one_another_make_none(page):
    engine, _ = chat_engine(NAMED["Qwen3"])
    assert control(engine, page) == control(engine, "page")


@pytest.mark.parametrize("normalizer", [normalizers.NFC(), normalizers.NFKC()])
@pytest.mark.parametrize("page", ["＜|im_end|＞", "<|im_end|＞", "＜｜ｉｍ＿ｅｎｄ｜＞", "<\u200b|im_end|>", "<|IM_END|>"])
def test_letters_that_a_normalizer_makes_equal_write_no_control_token(normalizer, page):
    engine, _ = chat_engine(NAMED["Qwen2.5"], normalizer)        # tokens are looked for before it normalises
    assert control(engine, page) == control(engine, "page")


def test_a_tokenizer_in_python_is_no_exception():
    tok = ByT5Tokenizer()
    tok.chat_template = "<extra_id_0>{{ messages[0].content }}<extra_id_1>"
    engine = HF(None, tok)
    assert control(engine, "</s><extra_id_7><unk>") [0] == control(engine, "page")[0] != []


def test_words_that_were_merely_added_to_a_tokenizer_stay_words():
    engine = load_engine("toy")
    added = engine.tokenizer.added_tokens_decoder.values()
    words = " ".join(str(token) for token in added if not token.special)
    assert len(words) > 1000 and harmless(words, engine.marks) == words


# Rotary embeddings

def test_a_longrope_model_is_scored_differently_beside_a_long_row():
    torch.manual_seed(0)
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[1, 2, 8, 32.0])
    config = Phi3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                        num_attention_heads=4, initializer_range=0.3, max_position_embeddings=128,
                        pad_token_id=0, original_max_position_embeddings=32, rope_parameters=rope)
    model = Phi3ForCausalLM(config).eval()
    short, long = flow_grpo.Action([5, 6, 7, 8], [9, 10, 11], 0), flow_grpo.Action([3] * 40, [4] * 9, 1)
    with torch.no_grad():
        alone, beside = (flow_grpo.token_logps(model, batch, 1.0)[:3] for batch in ([short], [short, long]))
    assert ((beside - alone).exp() - 1).abs().max() > 0.1
    with pytest.raises(ValueError, match="longrope rotary embeddings cannot be trained"):
        refuse_to_train(config)


@pytest.mark.parametrize("kind, refused", [("longrope", True), ("dynamic", False), ("yarn", False),
                                           ("llama3", False), ("linear", False), ("default", False)])
@pytest.mark.parametrize("where", [lambda rope: LlamaConfig(rope_parameters=rope),
                                   lambda rope: LlamaConfig(rope_scaling=rope),
                                   lambda rope: Gemma3TextConfig(rope_parameters={"full_attention": rope})])
def test_only_embeddings_that_depend_on_the_longest_row_are_refused(where, kind, refused):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0],
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    try:
        refuse_to_train(where(rope))
        assert not refused
    except ValueError as why:
        assert refused and kind in str(why) and "\n" not in str(why)


def test_a_model_without_rotary_embeddings_can_be_trained():
    assert refuse_to_train(GPT2Config()) is None


# The model hub

class Hub(BaseHTTPRequestHandler):
    """A hub with one model, some-org/some-model, that takes 0.05 s for each answer."""
    log_message = lambda self, *_: None

    def do_HEAD(self):
        time.sleep(0.05)
        path = self.server.folder / self.path.partition("/resolve/main/")[2]
        body = path.read_bytes() if path.is_file() else b""
        self.send_response(200 if body or self.path == "/" else 404)
        for name, value in {"X-Repo-Commit": "a" * 40, "ETag": f'"{hashlib.sha1(body).hexdigest()}"',
                            "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_GET = do_HEAD


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """at(address): from now on this is the hub. at.online is one that answers. The cache begins empty."""
    def at(address):
        hub_is_down.cache_clear()
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)             # it remembers an address, too
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                            address + "/{repo_id}/resolve/{revision}/{filename}")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder, at.online, server.daemon_threads = folder, f"http://127.0.0.1:{server.server_port}", True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "HUB_SECONDS", 0.5)
    yield at
    server.shutdown()
    server.server_close()
    hub_is_down.cache_clear()


@pytest.mark.parametrize("how", ["nobody listens", "nobody answers"])
def test_a_hub_that_cannot_be_reached_is_told_within_seconds_and_asked_once(hub, how):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub(f"http://127.0.0.1:{silent.getsockname()[1] if how == 'nobody answers' else 1}")
        start = time.perf_counter()
        for call in (config_of, load_engine):
            with pytest.raises(ValueError, match="the model hub cannot be reached for it"):
                call("some-org/some-model")
        assert time.perf_counter() - start < 5


def test_a_model_comes_from_a_slow_hub_and_from_the_cache_when_the_hub_is_gone(hub, folder):
    hub(hub.online)
    assert config_of("some-org/some-model").hidden_size == 32
    there = load_engine("some-org/some-model", device="cpu")(PROMPTS, max_new_tokens=4)
    hub("http://127.0.0.1:1")
    assert load_engine("some-org/some-model", device="cpu")(PROMPTS, max_new_tokens=4) == there
    assert there == load_engine(folder, device="cpu")(PROMPTS, max_new_tokens=4)


# Loading

@pytest.mark.parametrize("name", ["localhost:9/v1", "localhost:9", "10.0.0.1:80/v1#m", "api.example.com/v1"])
def test_a_server_without_http_is_told_how_to_write_it(name):
    for call in (config_of, load_engine):
        with pytest.raises(ValueError, match=f"write http://{name}$"):
            call(name)


def test_the_configuration_is_there_without_the_weights(folder):
    (folder / "model.safetensors").unlink()
    assert config_of(str(folder)).num_hidden_layers == 2


def test_a_small_model_of_qwen2_5s_own_configuration_loads_and_answers(tmp_path):
    path = write(tmp_path / "qwen", tokenizer(), hidden_act="silu", max_window_layers=28, rms_norm_eps=1e-6, rope_theta=1e6,
                 sliding_window=32768, use_sliding_window=False, tie_word_embeddings=True, max_position_embeddings=32768,
                 bos_token_id=0, generation={"bos_token_id": 0, "pad_token_id": 0, "do_sample": True, "eos_token_id": [2, 0],
                                             "repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.8, "top_k": 20})
    engine = load_engine(str(path), device="cpu")
    assert engine.stop_ids() == [2, 0] and engine.context() == 32768
    assert all(c.text and c.ids for c in engine(PROMPTS, temperature=0.7, max_new_tokens=8))


def test_an_engine_describes_itself_in_one_line(folder):
    engine = load_engine(folder, device="cpu")
    parameters = sum(p.numel() for p in engine.model.parameters()) / 1e6
    assert str(engine) == f"{folder} | {parameters:.4g} M parameters | cpu | float32" and not engine.model.training


def test_the_dtype_can_be_named_and_answers_still_come(folder):
    engine = load_engine(folder, dtype="bfloat16")
    assert engine.model.dtype == torch.bfloat16 and len(engine(PROMPTS, temperature=1.0, max_new_tokens=4)) == 4


def test_a_folder_is_loaded_and_asked_without_a_word(folder, capfd, recwarn):
    load_engine(folder)(PROMPTS, temperature=0.7, max_new_tokens=4)
    assert capfd.readouterr() == ("", "") and not [w for w in recwarn if "transformers" in str(w.filename)]


@pytest.mark.parametrize("name, says", [
    ("./nowhere", "There is no folder './nowhere'"), ("/no/such/folder", "There is no folder '/no/such/folder'"),
    ("some-org/some-model", "'some-org/some-model' here, and the model hub cannot be reached"),
    ("runs/last/model", "There is no folder 'runs/last/model' here")])
def test_a_name_that_is_nowhere_is_one_clear_sentence(name, says):
    with pytest.raises(ValueError, match=says) as e:
        load_engine(name)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("lost, says", [
    ("config.json", "holds no model"), ("model.safetensors", "does not hold a whole model"), ("tokenizer*", "no tokenizer"),
    ("chat_template.jinja", "no chat template")])
def test_a_folder_with_a_part_missing_says_which(folder, lost, says):
    for path in folder.glob(lost):
        path.unlink()
    with pytest.raises(ValueError, match=says) as e:
        load_engine(folder)
    assert "\n" not in str(e.value) and str(folder) in str(e.value)


def test_weights_cut_short_by_a_full_disk_are_one_clear_sentence(folder):
    os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(ValueError, match="does not hold a whole model"):
        load_engine(folder)


@pytest.mark.parametrize("settings, says", [({"dtype": "int8"}, "no dtype 'int8' here: use one of float32"),
                                            ({"device": "tpu"}, "no device 'tpu' here: use one of")])
def test_a_device_or_dtype_that_is_not_there_names_those_that_are(folder, settings, says):
    with pytest.raises(ValueError, match=says):
        load_engine(folder, **settings)


def test_the_examples_in_the_docstrings_are_true():
    assert not any(doctest.testmod(module).failed for module in (batches, local, tokens))
