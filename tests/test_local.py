"""models/local.py and fast/: what is sampled is what is scored; sharing changes no result."""

import json
import math
import shutil
from collections import Counter

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_chat import CHATML, tokenizer
from test_flow_grpo import SIZE, score
from transformers import AutoModelForCausalLM

import flow_grpo
from fast import prefix, trees
from flow_grpo import Action, distribution
from models import local
from models.completion import TOO_LONG, outage
from models.local import fingerprint, headline, ignores_padding, load, sample, sampling_mode, save

TINY = SIZE | dict(vocab_size=99, max_position_embeddings=256, pad_token_id=0, bos_token_id=1)
TINY |= dict(eos_token_id=2, initializer_range=0.3)  # large: no two tokens nearly tie
A, B = list(range(3, 43)), list(range(50, 80))
PROMPTS = {
    "equal": [A] * 6,
    "one": [A],
    "distinct": [A, B, A[::-1]],
    "pairs": [A, B, A, B, A],
    "prefixes of others": [A, A[:-1], A + [7], A[:-3], A + [7, 8, 9]],
    "no prefix": [[1] + A, [2] + A, B] * 2,
    "ragged": [A + [44] * n + B[:n] for n in (0, 1, 2, 5, 9)] * 2,
    "one token": [[5], [5], [6]],
}
PERIOD = ["linear_attention", "full_attention"]
WINDOWS = ["sliding_attention", "full_attention"]
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16)
DELTA |= dict(linear_value_head_dim=16, head_dim=16, layer_types=PERIOD)
ONLY = {  # families whose configuration has other names for TINY's
    "Mamba": dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, initializer_range=0.3),
    "GPTNeo": dict(vocab_size=99, hidden_size=32, num_layers=2, num_heads=4, initializer_range=0.3)
    | dict(attention_types=[[["global", "local"], 1]], max_position_embeddings=256),
    "Mpt": dict(vocab_size=99, d_model=32, n_layers=2, n_heads=4, initializer_range=0.3),
    "Bloom": dict(vocab_size=99, hidden_size=32, n_head=4, n_layer=2, initializer_range=0.3),
    "OPT": dict(vocab_size=99, hidden_size=32, ffn_dim=64, num_hidden_layers=2, init_std=0.3)
    | dict(num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=256),
}
PREFIX, COPIES, ROWS = (1, 39), (5, 57), (10, 58)  # sampling's first call
FAMILIES = {  # {kind: (changes, what is shared, may its rows be trees)}
    "Qwen2": ({}, PREFIX, True),
    "Qwen3": (dict(head_dim=8), PREFIX, True),
    "GPT2": (dict(n_positions=256), PREFIX, True),
    "Mistral": (dict(sliding_window=16), COPIES, True),
    "Gemma3Text": (dict(sliding_window=16, head_dim=8, layer_types=WINDOWS), COPIES, True),
    "GPTNeo": (dict(window_size=16), COPIES, False),
    "Lfm2": (dict(layer_types=["conv", "full_attention"]), ROWS, False),
    "Mamba": (dict(state_size=8), ROWS, False),
    "Bloom": ({}, ROWS, False),
    "Mpt": ({}, ROWS, False),
}
MORE = {  # the rest of the table, in .ci/run
    "Llama": ({}, PREFIX, True),
    "Phi3": ({}, PREFIX, True),
    "Olmo2": ({}, PREFIX, True),
    "Granite": (dict(logits_scaling=3.0), PREFIX, True),
    "Cohere": (dict(logit_scale=0.3), PREFIX, True),
    "GPTNeoX": ({}, PREFIX, True),
    "OPT": ({}, PREFIX, True),
    "Mixtral": (dict(num_local_experts=4, num_experts_per_tok=2), PREFIX, True),
    "Qwen3Moe": (dict(head_dim=8) | EXPERTS, PREFIX, True),
    "GptOss": (
        dict(head_dim=8, sliding_window=16, num_local_experts=4, num_experts_per_tok=2),
        COPIES,
        False,
    ),
    "Gemma2": (dict(sliding_window=16, head_dim=8), COPIES, False),
    "Qwen3Next": (dict(layer_types=PERIOD, head_dim=8) | EXPERTS, ROWS, False),
    "FalconH1": (dict(mamba_d_ssm=32) | MAMBA | dict(mamba_d_head=8), ROWS, False),
    "Bamba": (MAMBA | dict(attn_layer_indices=[1]), ROWS, False),
    "GraniteMoeHybrid": (
        MAMBA | dict(layer_types=["mamba", "attention"], shared_intermediate_size=32),
        ROWS,
        False,
    ),
    "Qwen3_5Text": (DELTA, ROWS, False),
}
families = pytest.mark.parametrize(
    "kind", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in MORE)]
)
FAMILIES |= MORE


def tiny(kind="Qwen2", **changes):
    torch.manual_seed(0)
    settings = ONLY.get(kind, TINY) | FAMILIES[kind][0] | changes
    config = getattr(transformers, f"{kind}Config")(**settings)
    return AutoModelForCausalLM.from_config(config).eval()


def complete(
    model, prompts, temperature=0.8, tokens=12, stops=(2, 5, 6, 7), plain=False, how=distribution
):
    with sampling_mode(model):
        prefill = None if plain else prefix.prefill
        return sample(model, prompts, list(stops), temperature, tokens, how, prefill)


def watching():
    """distribution(), and a function that finds in its results what has been sampled."""
    seen = []

    def watched(logits, temperature):
        seen.append(distribution(logits, temperature))
        return seen[-1]

    def sampled(completions):
        return [seen[t][n, i].item() for n, c in enumerate(completions) for t, i in enumerate(c)]

    return watched, sampled


# --------------------------------------------------------------------------- sampled = scored
@families
def test_the_policy_that_samples_is_the_policy_that_is_scored(kind):
    model, prompts = tiny(kind), PROMPTS["ragged"]
    shared = FAMILIES[kind][1] != ROWS
    for plain in (False, True) if shared else (False,):  # where nothing is shared: equal
        torch.manual_seed(0)
        watched, sampled = watching()
        completions = complete(model, prompts, stops=range(2, 99, 4), plain=plain, how=watched)
        actions = [Action(prompt, ids, 0) for prompt, ids in zip(prompts, completions)]
        rows = flow_grpo.padded if plain else trees.rows
        scored = score(model, actions, rows, 0.8).tolist()
        assert scored == pytest.approx(sampled(completions), abs=1e-4)
        assert len({len(ids) for ids in completions}) > 1


def test_threads_serve_a_large_model_though_a_small_one_is_loaded_beside_it(tmp_path, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local, "THREADS", 2)
    monkeypatch.setattr(local, "WIDTHS", set())
    names = [write(tmp_path / str(width), hidden_size=width) for width in (32, 512)]
    found = []
    for name in [*names, names[0]]:
        load(name, distribution, "cpu")
        found.append(torch.get_num_threads())
    torch.set_num_threads(before)
    assert found == [1, 2, 2]


@pytest.mark.parametrize("kind", [kind for kind, row in FAMILIES.items() if row[1] != ROWS])
def test_prompts_that_are_read_in_chunks_change_no_token(kind, monkeypatch):
    model, found = tiny(kind), []
    for chunk in (10**6, 7):
        monkeypatch.setattr(prefix, "CHUNK", chunk)
        for name in ("ragged", "no prefix", "distinct", "one"):
            torch.manual_seed(0)
            found.append(complete(model, PROMPTS[name], 0.7))
    assert found[:4] == found[4:]


def test_no_more_columns_than_a_chunk_are_computed_at_a_time(monkeypatch):
    monkeypatch.setattr(prefix, "CHUNK", 7)
    for name in ("equal", "distinct", "one"):  # shared or not
        model = tiny()
        shapes = watched_calls(model)
        complete(model, PROMPTS[name])
        assert max(columns for _, columns in shapes) <= 7, name


@families
def test_sharing_changes_no_greedy_token(kind):
    model = tiny(kind)
    shapes = watched_calls(model)
    shared = complete(model, PROMPTS["ragged"], temperature=0)
    assert shapes[0] == FAMILIES[kind][1]
    assert prefix.in_parts(model) == (shapes[0] != ROWS)
    assert trees.are_right(model) == FAMILIES[kind][2]
    assert shared == complete(model, PROMPTS["ragged"], temperature=0, plain=True)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_that_share_a_beginning_complete_as_each_alone(name, monkeypatch):
    monkeypatch.setattr(prefix, "SAVED_TOKENS", 1)
    model, prompts = tiny(), PROMPTS[name]
    alone = [complete(model, [prompt], temperature=0)[0] for prompt in prompts]
    assert complete(model, prompts, temperature=0) == alone


def watched_calls(model):
    """[(rows, tokens)] of each call of the model from here on."""
    shapes = []
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    return shapes


def test_a_shared_prefix_and_a_prompts_copies_are_computed_once():
    model = tiny()
    shapes = watched_calls(model)
    prompts = [A + B, A + B, A + B[:20], A + B[:20], A + [1], A + [1]]
    complete(model, prompts, 1.0, 3, stops=[])
    # the prefix; the rests; the last tokens; two new tokens
    assert shapes == [(1, 40), (3, 29), (6, 1), (6, 1), (6, 1)]
    shapes.clear()
    complete(model, [A + B, A + [1], A[:20] + B], 1.0, 2, stops=[])  # saves less than it costs
    assert shapes == [(3, 70), (3, 1)]


FEW = dict(vocab_size=6, initializer_range=0.07)  # 5 tokens and a stop token: 1 + 5 * 6 completions
STOP, NUMBER, HEAT = 5, 4000, 0.7


@torch.no_grad()
def exact(model, prompt):
    """{completion of at most two tokens: its probability} at temperature HEAT."""

    def next_token(ids):
        return (model(torch.tensor([ids])).logits[0, -1].double() / HEAT).softmax(-1).tolist()

    first = next_token(prompt)
    after = {a: next_token(prompt + [a]) for a in range(STOP)}
    two = {(a, b): first[a] * p for a in after for b, p in enumerate(after[a])}
    return {(STOP,): first[STOP]} | two


@pytest.mark.parametrize("plain", [True, False])
def test_what_is_sampled_is_the_softmax_at_the_temperature_whatever_the_checkpoint_says(plain):
    model = tiny(**FEW)
    settings = dict(top_k=2, top_p=0.5, repetition_penalty=1.5, temperature=0.1)
    model.generation_config = transformers.GenerationConfig(do_sample=True, **settings)
    expected = {ids: NUMBER * p for ids, p in exact(model, [1, 2, 3]).items()}
    assert min(expected.values()) > 5  # or the statistic would have another distribution
    torch.manual_seed(1)
    completions = complete(model, [[1, 2, 3]] * NUMBER, HEAT, 2, [STOP], plain)
    seen = Counter(map(tuple, completions))
    k = len(expected) - 1  # degrees of freedom
    # Wilson and Hilferty's limit of χ², 3.72 deviations: exceeded in 1 of 10 000 samples
    limit = k * (1 - 2 / (9 * k) + 3.72 * math.sqrt(2 / (9 * k))) ** 3
    assert set(seen) <= set(expected)
    assert sum((seen[ids] - n) ** 2 / n for ids, n in expected.items()) < limit


def test_every_token_can_be_sampled_of_more_than_the_50_of_transformers_default():
    model = tiny(vocab_size=99, initializer_range=0.01)  # nearly uniform: some 40 of each
    torch.manual_seed(0)
    assert {token for [token] in complete(model, [[1, 2, 3]] * 4000, 1.0, 1, [])} == {*range(99)}


def bfloat16_fails():
    """torch's reason if, under this ATEN_CPU_CAPABILITY, it has no bfloat16 attention here.

    The lengths are those of the test's prompts and trees: torch takes another kernel from 64 on."""
    try:
        for length in (len(A), 64, len(A) + 16 * 30):
            q = torch.ones(1, 1, length, 32, dtype=torch.bfloat16)
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    except RuntimeError as why:
        return str(why)
    return ""


@pytest.mark.skipif(bool(bfloat16_fails()), reason=bfloat16_fails())
def test_bfloat16_is_scored_as_it_was_sampled():
    model, (watched, sampled) = tiny().bfloat16(), watching()
    completions = complete(model, [A] * 16, 1.0, 30, how=watched)
    scored = score(model, [Action(A, ids, 0) for ids in completions], trees.rows, 1.0).tolist()
    # Logits are near 10 here, where bfloat16 numbers are 1/16 apart. Another token is 1 and more
    # away.
    assert scored == pytest.approx(sampled(completions), abs=0.4)


# ------------------------------------------------------------------------------------ the engine
TEXTS = ["hi", "a much longer prompt than the one before it", "two plus two", "x"]
HOSTILE = dict(do_sample=True, top_k=1, top_p=0.1, min_p=0.9, temperature=0.01, num_beams=3)
HOSTILE |= dict(repetition_penalty=5.0, suppress_tokens=[*range(40, 200)], min_new_tokens=9)
HOSTILE |= dict(forced_eos_token_id=2, sequence_bias=[[[35], 10.0]])  # as some are published


def write(folder, template=CHATML, generation=None, extra=0, kind="Qwen2", **config):
    """A random model as a checkpoint; `extra` rows of its head have no token."""
    tok = tokenizer(template)
    model = tiny(kind, **dict(vocab_size=len(tok) + extra) | config)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    if generation:  # by hand: transformers refuses to save some of what is published
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


def test_the_checkpoints_settings_decide_nothing_and_are_saved_as_they_came(tmp_path):
    plain = load(write(tmp_path / "a"), distribution)
    hostile = load(write(tmp_path / "b", generation=HOSTILE), distribution)
    results = []
    for engine in (plain, hostile):
        torch.manual_seed(0)
        results.append([c.ids for c in engine(TEXTS * 2, temperature=1.0, max_new_tokens=8)])
    assert results[0] == results[1]
    save(hostile.model, hostile.tokenizer, tmp_path / "c")
    saved = json.loads((tmp_path / "c/generation_config.json").read_text())
    assert all(saved[name] == value for name, value in HOSTILE.items())


def test_a_batch_answers_as_one_prompt_at_a_time_and_in_order(tmp_path):
    engine = load(write(tmp_path / "m"), distribution)
    alone = [engine([text], max_new_tokens=6)[0].ids for text in TEXTS]
    for engine.sampling_tokens in (1, 60, 10_000):
        assert [c.ids for c in engine(TEXTS, max_new_tokens=6)] == alone
    longest = max(len(engine.chat.encode(text)) for text in TEXTS) + 6
    engine.sampling_tokens, engine.row_tokens = 2 * (longest + 100), 100
    shapes = watched_calls(engine.model)
    assert [c.ids for c in engine(TEXTS, max_new_tokens=6)] == alone
    assert max(rows for rows, _ in shapes) == 2  # a row takes as much as a hundred tokens more


def test_a_batch_that_memory_does_not_hold_is_halved_from_then_on(tmp_path, monkeypatch):
    engine, sizes = load(write(tmp_path / "m"), distribution), []
    alone = [engine([text], max_new_tokens=6)[0].ids for text in TEXTS]

    def small(model, prompts, *settings):
        sizes.append(len(prompts))
        if len(prompts) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. (a test)")
        return sample(model, prompts, *settings)

    monkeypatch.setattr(local, "sample", small)
    most = 1
    for _ in range(2):
        assert [c.ids for c in engine(TEXTS, max_new_tokens=6)] == alone
    assert sizes == [4, 2, 1, 1, 1, 1] + [1] * 4
    most = 0  # not even one
    with pytest.raises(torch.OutOfMemoryError):
        engine(TEXTS, max_new_tokens=6)


def test_greedy_copies_are_computed_once_and_sampled_ones_differ(tmp_path):
    engine = load(write(tmp_path / "m"), distribution)
    shapes = watched_calls(engine.model)
    greedy = engine(["hi"] * 8, max_new_tokens=4)
    assert max(rows for rows, _ in shapes) == 1 and len({tuple(c.ids) for c in greedy}) == 1
    assert len({tuple(c.ids) for c in engine(["hi"] * 8, 1.0, 4)}) > 1


def test_the_stop_token_is_part_of_the_ids_and_a_cut_completion_has_none(tmp_path):
    engine = load(write(tmp_path / "m", initializer_range=0.02), distribution)  # stops at any time
    torch.manual_seed(0)
    completions = engine(["x"] * 64, temperature=1.0, max_new_tokens=60)
    ended = [c for c in completions if not c.cut]
    assert 0 < len(ended) < 64
    assert all((c.ids[-1] in engine.chat.stops) != c.cut for c in completions)
    assert not any(stop in c.ids[:-1] for c in completions for stop in engine.chat.stops)
    assert not any("<|im_end|>" in c.text for c in completions)


def test_a_prompt_without_room_for_its_answer_is_refused_and_the_others_are_answered(tmp_path):
    engine = load(write(tmp_path / "m"), distribution)
    short, long = engine(["x", "x" * 240], max_new_tokens=20)
    assert (short.error, long.error) == ("", TOO_LONG) and short.ids and not long.ids


@pytest.mark.parametrize("page", ["~ no spelling of it helps", "#"])
def test_a_prompt_that_cannot_be_sent_fails_alone(page, tmp_path):
    refuses = "{% if '#' in messages[0].content %}{{ raise_exception('no #') }}{% endif %}"
    engine = load(write(tmp_path / "m", template=refuses + CHATML), distribution)
    backend = engine.tokenizer.backend_tokenizer
    backend.normalizer = tokenizers.normalizers.Replace("~", "<|im_end|>")
    engine.tokenizer.add_tokens(
        [tokenizers.AddedToken("<|im_end|>", special=True, normalized=True)]
    )
    good, bad = engine(["x", f"a {page}"], temperature=1.0, max_new_tokens=2)
    assert (good.error, bad.ids) == ("", []) and good.ids
    assert bad.error.startswith("the prompt was not sent: ") and not outage(bad.error)


def test_half_of_a_surrogate_pair_is_a_question_mark(tmp_path):
    engine = load(write(tmp_path / "m"), distribution)
    text = "\ud83d x \udc00<|im_end|>\udfff"
    [completion] = engine([text], max_new_tokens=2)
    assert "? x ?< |im_end|>?" in engine.tokenizer.decode(completion.prompt_ids)


def test_a_limit_that_leaves_no_room_for_any_prompt_is_one_sentence(tmp_path):
    engine = load(write(tmp_path / "m"), distribution)
    for limit in (256, 300):
        with pytest.raises(
            ValueError, match=f"^--max-new-tokens {limit} leaves no room .* in the 256 tokens"
        ):
            engine(["x"], max_new_tokens=limit)
    assert engine(["x"], max_new_tokens=255)[0].error == TOO_LONG


LONGROPE = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4)
LONGROPE |= dict(original_max_position_embeddings=64, rope_theta=1e4, factor=4.0)
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)


@pytest.mark.parametrize(
    "kind, rope, context",
    [("Phi3", LONGROPE, 64), ("Qwen2", DYNAMIC, 64), ("Qwen2", DYNAMIC | {"factor": 8.0}, 100)],
)
def test_no_row_is_so_long_that_it_changes_the_positions_of_others(kind, rope, context, tmp_path):
    watched, sampled = watching()
    longest = dict(max_position_embeddings=256 if rope is LONGROPE else context)
    longest |= dict(rope_parameters=rope, original_max_position_embeddings=64)  # Phi-3's name
    engine = load(write(tmp_path / "m", kind=kind, **longest), watched, prefill=prefix.prefill)
    template = len(engine.chat.encode("x")) - 1
    room = context - template - 8
    prompts = ["x" * n for n in (1, room // 2, room - 1, room, room + 1, 2 * room)]
    completions = engine(prompts, temperature=1.0, max_new_tokens=8)
    assert [c.error for c in completions] == [""] * 4 + [TOO_LONG] * 2
    rows = sorted(completions[:4], key=lambda c: -len(c.prompt_ids))  # as they were sampled
    actions = [Action(c.prompt_ids, c.ids, 0) for c in rows]
    together = score(engine.model, actions, trees.rows, 1.0).tolist()
    alone = [score(engine.model, [action], temperature=1.0).tolist() for action in actions]
    found = pytest.approx(sampled([c.ids for c in rows]), abs=1e-4)
    assert together == found and sum(alone, []) == found


def test_ids_without_a_token_are_neither_sampled_nor_given_any_probability(tmp_path):
    engine = load(write(tmp_path / "m", extra=200), distribution)
    tokens = len(engine.tokenizer)
    torch.manual_seed(0)
    completions = engine(["x"] * 32, temperature=2.0, max_new_tokens=8)
    assert max(i for c in completions for i in c.ids) < tokens
    logits = engine.model(torch.tensor([[5, 6, 7]])).logits
    assert (distribution(logits, 1.0)[..., tokens:].exp() == 0).all()
    actions = [Action(c.prompt_ids, c.ids, 0) for c in completions]
    bare = tiny(vocab_size=tokens + 200)
    bare.load_state_dict(engine.model.state_dict())
    assert (score(engine.model, actions) > score(bare, actions)).all()  # shared among fewer


def test_rollouts_with_gradient_checkpointing_equal_those_in_eval(tmp_path):
    engine = load(write(tmp_path / "m"), distribution)
    expected = [c.ids for c in engine(TEXTS, max_new_tokens=12)]
    engine.model.activation_checkpointing_enable()
    engine.model.train()
    assert [c.ids for c in engine(TEXTS, max_new_tokens=12)] == expected
    assert all(module.training for module in engine.model.modules())  # put back


# -------------------------------------------------------------------------------- load and save
@pytest.mark.parametrize("computes, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_a_card_that_only_emulates_bfloat16_gets_float32(computes, dtype, monkeypatch):
    supported = lambda including_emulation=True: computes or including_emulation
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert local.pick_dtype(None, torch.device("cuda")) == dtype
    assert local.pick_dtype("float16", torch.device("cuda")) == torch.float16


def test_a_base_model_stops_where_its_chat_template_ends_a_message(tmp_path, capsys):
    name = write(tmp_path / "m", generation=dict(eos_token_id=0), initializer_range=0.02)
    file = tmp_path / "m/tokenizer_config.json"
    file.write_text(file.read_text().replace("<|im_end|>", "<|endoftext|>"))
    engine = load(name, distribution)
    assert "m: completions end with <|im_end|> too, as in the chat" in capsys.readouterr().err
    torch.manual_seed(0)
    completions = engine(["x"] * 64, temperature=1.0, max_new_tokens=60)
    assert {c.ids[-1] for c in completions if not c.cut} == {0, 2}
    assert not any(2 in c.ids[:-1] or "<|im_end|>" in c.text for c in completions)


def test_a_saved_model_is_the_same_model_and_keeps_the_published_configuration(tmp_path):
    source = write(tmp_path / "m", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    file = tmp_path / "m/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 5e5, "own": 1}))
    engine = load(source, distribution)
    save(engine.model, engine.tokenizer, tmp_path / "copy")
    written = json.loads((tmp_path / "copy/config.json").read_text())
    assert written["rope_theta"] == 5e5 and written["own"] == 1
    again = load(str(tmp_path / "copy"), distribution)
    assert all(
        torch.equal(one, other)
        for one, other in zip(engine.model.parameters(), again.model.parameters(), strict=True)
    )
    assert engine.fingerprint == again.fingerprint != ""
    (tmp_path / "copy/pytorch_model.bin").write_bytes(b"another format, which is not loaded")
    assert fingerprint(tmp_path / "copy") == again.fingerprint
    (tmp_path / "copy/model.safetensors").write_bytes(b"other weights")
    assert fingerprint(tmp_path / "copy") != again.fingerprint


def test_other_weights_under_the_same_name_on_the_hub_are_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr(transformers.utils.hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert fingerprint("some/model") == ""
    model, found = tmp_path / "models--some--model", []
    for commit, weights in {"a": b"1", "b": b"2", "c": b"2"}.items():  # c: another README
        (model / f"snapshots/{commit}").mkdir(parents=True)
        (model / f"snapshots/{commit}/config.json").write_text("{}")
        (model / f"snapshots/{commit}/model.safetensors").write_bytes(weights)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs/main").write_text(commit)
        found.append(fingerprint("some/model"))
    assert "" != found[0] != found[1] == found[2]


def test_an_error_that_only_announces_its_reason_is_shown_with_it():
    assert headline(OSError("a connection error when loading m:\n401 Unauthorized\nmore")) == (
        "a connection error when loading m: 401 Unauthorized"
    )
    assert headline(OSError("m is no folder\nIf this is private, log in")) == "m is no folder"


def quantise(folder, method):
    """Store the weights of a checkpoint as Qwen's FP8, or gpt-oss's MXFP4, checkpoints do."""
    weights = {}
    for name, w in load_file(folder / "model.safetensors").items():
        if method == "fp8" and name.endswith("_proj.weight"):
            blocks = w.unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
            scale = blocks.abs().amax((1, 3)) / 448
            w = (blocks / scale[:, None, :, None]).view_as(w).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = scale
        elif method == "mxfp4" and name.endswith("_proj"):
            rows = w.shape[0], w.shape[2], w.shape[1] // 32
            weights[f"{name}_blocks"] = torch.randint(256, (*rows, 16), dtype=torch.uint8)
            weights[f"{name}_scales"] = torch.randint(122, 127, rows, dtype=torch.uint8)
            continue
        weights[name] = w
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    how = {"quant_method": method, "weight_block_size": [16, 16]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": how}))


fp8 = pytest.mark.extras("accelerate")  # which transformers needs to load them


@pytest.mark.parametrize(
    "kind, method",
    [
        pytest.param("Qwen3", "fp8", marks=fp8),
        pytest.param("Qwen3Moe", "fp8", marks=fp8),
        ("GptOss", "mxfp4"),
    ],
)
def test_a_step_of_a_quantised_model_is_not_rounded_away_when_it_is_saved(kind, method, tmp_path):
    source = write(tmp_path / "m", kind=kind)
    names = set(load_file(tmp_path / "m/model.safetensors"))
    quantise(tmp_path / "m", method)
    engine = load(source, distribution)
    with torch.no_grad():
        for weight in engine.model.parameters():
            weight += 1e-6
    save(engine.model, engine.tokenizer, tmp_path / "copy")
    assert set(load_file(tmp_path / "copy/model.safetensors")) == names  # those of the family
    again = load(str(tmp_path / "copy"), distribution)
    pairs = zip(engine.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_a_model_whose_weights_stay_quantised_is_one_sentence(method, tmp_path):
    source, file = write(tmp_path / "m"), tmp_path / "m/config.json"
    how = {"quant_method": method, "bits": 4, "load_in_4bit": method == "bitsandbytes"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": how}))
    with pytest.raises(ValueError, match=rf"^'.*' is quantised \({method}\): use the model it"):
        load(source, distribution)


@pytest.mark.parametrize("kind, nested", [("Gemma3", True), ("Llama4", False)])
def test_the_published_configuration_of_a_text_model_within_another_is_kept(kind, nested, tmp_path):
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = getattr(transformers, f"{kind}Config")(
        text_config=TINY | dict(head_dim=8, intermediate_size_mlp=64, num_local_experts=2),
        vision_config=vision | dict(image_size=28, patch_size=14),
    )
    model = AutoModelForCausalLM.from_config(config)
    published = {"model_type": kind.lower(), "text_config": {"rope_theta": 7e5}}
    model.published = published | {"torch_dtype": "bfloat16"}
    save(model, tokenizer(), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    text = written["text_config"] if nested else written
    assert text["rope_theta"] == 7e5 and text["hidden_size"] == 32
    assert ("text_config" in written) == nested


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        (lambda folder: shutil.rmtree(folder), "there is no model"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat template"),
        (lambda folder: rewrite(folder, lambda weights: weights.popitem()), "not whole"),
        (lambda folder: rewrite(folder, lambda w: w["model.norm.weight"].fill_(math.nan)), "nan"),
    ],
)
def test_a_model_that_cannot_work_is_one_sentence(spoil, sentence, tmp_path):
    name = write(tmp_path / "m")
    spoil(tmp_path / "m")
    with pytest.raises(ValueError, match=sentence):
        load(name, distribution)


def test_code_in_a_checkpoint_is_not_run_nor_asked_for(monkeypatch, tmp_path):
    name = write(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    config |= {"model_type": "new", "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    (tmp_path / "m/evil.py").write_text("raise SystemExit('it has run')")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(ValueError, match="there is no model '.*' that can be loaded: "):
        load(name, distribution)


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@families
def test_models_that_mask_their_padding_are_accepted(kind):
    assert ignores_padding(tiny(kind))


SMALL = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1)
READERS = {
    "RecurrentGemma": SMALL | dict(intermediate_size=64, lru_width=32, head_dim=8, vocab_size=99),
    "MiniMax": TINY | dict(num_local_experts=2, layer_types=PERIOD, block_size=8),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_recurrent_layer_that_reads_the_padding_as_text_is_found(kind):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**READERS[kind])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    assert not ignores_padding(model)


@pytest.mark.parametrize("unseen", [0, 2, 7])
def test_a_padding_token_that_a_recurrent_layer_does_not_see_proves_nothing(unseen, tmp_path):
    """The embedding of a padding token is often 0. The engine pads with a stop token, here 2."""
    tok = tokenizer()
    config = transformers.RecurrentGemmaConfig(
        **READERS["RecurrentGemma"] | {"vocab_size": len(tok)}
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[unseen] = 0
    assert ignores_padding(model, pad=unseen)
    model.save_pretrained(tmp_path)
    tok.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="reads the padding of a batch"):
        load(str(tmp_path), distribution)
