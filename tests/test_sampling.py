"""Two ways to sample: models/local.py's sample(), the plain one, and fast/sampling.py's have the same result.

And what fast/sampling.py shares, and which rows leave early, changes the work, and no token or log-prob."""

import math
from collections import Counter

import pytest
import torch
import transformers

from fast import sampling
from fast.sampling import Sampler, in_parts, sample
from models import local
from models.state import sampling_mode

TINY = dict(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3)
A, B = list(range(3, 43)), list(range(50, 80))
PROMPTS = {
    "equal": [A] * 6, "one": [A], "distinct": [A, B, A[::-1]], "pairs": [A, B, A, B, A],
    "prefixes of others": [A, A[:-1], A + [7], A[:-3], A + [7, 8, 9]],
    "one token more": [A + [i] for i in (1, 2, 44)] * 2, "no prefix": [[1] + A, [2] + A, B] * 2,
    "ragged": [A + [44] * n + B[:n] for n in (0, 1, 2, 5, 9)] * 2, "one token": [[5], [5], [6]]}


def tiny(kind="Qwen2", head="ForCausalLM", **settings):
    """A random model; its large initial weights have no two tokens nearly tie."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings or TINY)
    model = getattr(transformers, kind + head)(config).eval()
    model.generation_config = transformers.GenerationConfig()  # as sampling_mode() leaves it
    return model


def draws(n, tokens=30):
    return list(torch.rand(n, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


def watched(model):
    """[(rows, tokens)] of each call of the model from here on."""
    shapes = []
    hook = lambda _, args: shapes.append(tuple(args[0].shape))
    model.get_input_embeddings().register_forward_pre_hook(hook)
    return shapes


def plainly(model, prompts, stops, temperature, max_new_tokens, numbers):
    """The completions of one call of generate() for each prompt: nothing is shared, and no row can leave."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "in_parts", lambda model: False)
        return [sample(model, [prompt], stops, temperature, max_new_tokens, [row])[0]
                for prompt, row in zip(prompts, numbers)]


def same(some, others, temperature):
    assert [ids for ids, _ in some] == [ids for ids, _ in others]
    for (ids, logps), (_, expected) in zip(some, others):
        assert len(logps) == (len(ids) if temperature else 0)
        torch.testing.assert_close(torch.tensor(logps), torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name, temperature", [*((name, 0.8) for name in PROMPTS), ("pairs", 0.0)])
def test_prompts_that_share_a_beginning_complete_as_each_alone(name, temperature, monkeypatch):
    monkeypatch.setattr(sampling, "SAVED_TOKENS", 1)
    monkeypatch.setattr(sampling, "LEAVING", (1, 0))
    prompts = PROMPTS[name]
    numbers = draws(len(prompts), 12 if temperature else 0)
    model, settings = tiny(), ([2, 5, 6, 7, 8, 9], temperature, 12, numbers)
    same(sample(model, prompts, *settings), plainly(model, prompts, *settings), temperature)


def test_a_shared_prefix_and_a_prompts_copies_are_computed_once():
    model = tiny()
    shapes = watched(model)
    prompts = [A + B, A + B, A + B[:20], A + B[:20], A + [1], A + [1]]
    sample(model, prompts, [], 1.0, 3, draws(6))
    assert shapes == [(1, 40), (3, 29), (6, 1), (6, 1), (6, 1)]  # prefix; rests; last tokens; two new tokens
    shapes.clear()
    sample(model, [A] * 6, [], 1.0, 3, draws(6))
    assert shapes == [(1, 39), (6, 1), (6, 1), (6, 1)]
    shapes.clear()
    sample(model, [A + B, A + [1], A[:20] + B], [], 1.0, 2, draws(3))  # saves less than it costs
    assert shapes == [(3, 70), (3, 1)]


def test_finished_rows_leave_and_the_others_go_on_as_if_they_had_never_been_there():
    model, prompts, stops = tiny(), [A] * 24, list(range(90, 99))
    shapes = watched(model)
    settings = (stops, 3.0, 60, draws(24, 60))
    parts = sample(model, prompts, *settings)
    rows = [n for n, _ in shapes[1:]]
    assert rows == sorted(rows, reverse=True) and len(set(rows)) > 2  # they only leave
    live = [sum(len(ids) >= t for ids, _ in parts) for t in range(1, len(rows) + 1)]
    assert all(n <= k <= n + max(3, n) for n, k in zip(live, rows)) and live[-1] > 0
    same(parts, plainly(model, prompts, *settings), 3.0)
    assert {len(ids) for ids, _ in parts if ids[-1] not in stops} <= {60}


def test_a_rows_number_decides_its_token_as_the_cumulated_probabilities_say():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    for number, token in [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2**-53, 4)]:
        sampler = Sampler(0.5, torch.tensor([[number]], dtype=torch.float64), 3)
        sampler.rows = torch.tensor([0])
        scores = sampler(torch.zeros(1, 3), p.log() * 0.5)  # temperature 0.5
        assert scores.argmax() == token
        assert sampler.logps[0, 0].item() == pytest.approx(p[0, token].log().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_that_was_rounded_to_one_takes_no_token_without_probability(dtype):
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    sampler = Sampler(1.0, torch.ones(1, 1, dtype=dtype), 3)
    sampler.rows = torch.tensor([0])
    assert sampler(torch.zeros(1, 3), p.log()).argmax() == 4 and sampler.logps.isfinite().all()


SMALL = dict(vocab_size=99, num_hidden_layers=2, initializer_range=0.3)
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
                factor=4.0, original_max_position_embeddings=64)
PERIOD = ["linear_attention", "full_attention"]


FAMILIES = [
    (True, "Llama", TINY), (True, "Mistral", TINY | dict(sliding_window=None)), (True, "Qwen2", TINY),
    (True, "Qwen3", TINY | dict(head_dim=8)), (True, "Gemma", TINY | dict(head_dim=8)),
    (True, "GPT2", SMALL | dict(n_embd=32, n_head=4, n_positions=256)),
    (False, "Mistral", TINY | dict(sliding_window=16)),
    (False, "Gemma2", TINY | dict(sliding_window=16, head_dim=8)),
    (False, "Qwen3Next", TINY | dict(layer_types=PERIOD, num_experts=4, num_experts_per_tok=2, head_dim=8)),
    (False, "Mamba", SMALL | dict(hidden_size=32, state_size=8)),
    (False, "Bloom", SMALL | dict(hidden_size=32, n_head=4)),
    (False, "Mpt", dict(vocab_size=99, d_model=32, n_layers=2, n_heads=4, initializer_range=0.3)),
    (False, "Phi3", TINY | dict(rope_parameters=LONGROPE, pad_token_id=0, eos_token_id=2, bos_token_id=1))]
LIKE_OTHERS = "Llama", "Gemma", "Gemma2", "Mpt"  # their caches and masks are like those of others in the list
families = pytest.mark.parametrize("parts, kind, settings", [
    pytest.param(*row, marks=[pytest.mark.exhaustive] * (row[1] in LIKE_OTHERS)) for row in FAMILIES])


def family(kind, settings):
    return tiny(kind, "LMHeadModel" if kind == "GPT2" else "ForCausalLM", **settings)


@families
def test_a_cache_that_cannot_be_cut_is_left_to_one_call_of_generate(parts, kind, settings):
    model = family(kind, settings)
    shapes = watched(model)
    sample(model, PROMPTS["ragged"][:6], [2], 0.8, 1, draws(6))
    assert in_parts(model) == parts and shapes[0] == ((1, 39) if parts else (6, 58))


def test_a_model_that_computes_nan_is_an_error_and_no_sample():
    model = tiny()
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="nan"):
        sample(model, [A], [2], 1.0, 4, draws(1))


def test_bfloat16_shares_and_leaves_too():
    model = tiny().bfloat16()
    shapes = watched(model)
    completions = sample(model, [A] * 16, [2, 5, 6, 7, 8, 9], 1.0, 30, draws(16))
    assert shapes[0] == (1, 39) and shapes[-1][0] < 16
    for ids, logps in completions:
        logits = model(torch.tensor([A + ids])).logits[0, len(A) - 1 : -1].float()
        fresh = logits.log_softmax(-1)[range(len(ids)), ids]
        # Logits are near 10 here, where bfloat16 numbers are 1/16 apart. Another token is 1 and more away.
        torch.testing.assert_close(torch.tensor(logps), fresh, atol=0.4, rtol=0)


# ---- the plain way and the fast one ------------------------------------------------------------------------
def plain(*batch_and_draws):
    return local.sample(*batch_and_draws[:-1])  # generate() draws its own numbers


both = pytest.mark.parametrize("way", [plain, sampling.sample], ids=["plain", "fast"])


@families
def test_the_plain_way_and_the_fast_one_have_the_same_greedy_tokens(parts, kind, settings):
    model, settings = family(kind, settings), (list(range(2, 99, 4)), 0.0, 12, draws(10, 0))
    by_generate = plain(model, PROMPTS["ragged"], *settings)
    assert by_generate == sample(model, PROMPTS["ragged"], *settings)
    assert len({len(ids) for ids, _ in by_generate}) > 1 and not any(logps for _, logps in by_generate)


@families
def test_log_probs_are_those_of_a_forward_pass_of_each_row_alone(parts, kind, settings):
    are_those_of_a_forward_pass(family(kind, settings), sample)


def test_log_probs_of_the_plain_way_are_those_of_a_forward_pass_too():
    are_those_of_a_forward_pass(tiny(), plain)


def are_those_of_a_forward_pass(model, way, temperature=0.8):
    torch.manual_seed(0)
    rows = way(model, PROMPTS["ragged"][:6], [2, 5, 6, 7, 8, 9], temperature, 12, draws(6))
    for prompt, (ids, logps) in zip(PROMPTS["ragged"], rows):
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        alone = (logits / temperature).log_softmax(-1)[range(len(ids)), ids]
        torch.testing.assert_close(torch.tensor(logps), alone, atol=1e-4, rtol=0)


FEW = TINY | dict(vocab_size=6, initializer_range=0.07)  # 5 tokens and a stop token: 1 + 5 * 6 completions
STOP, NUMBER, HEAT = 5, 4000, 0.7


@torch.no_grad()
def exact(model, prompt):
    """{completion of at most two tokens: its probability} at temperature HEAT."""
    def next_token(ids):
        return (model(torch.tensor([ids])).logits[0, -1].double() / HEAT).softmax(-1).tolist()
    first = next_token(prompt)
    two = {(a, b): first[a] * p for a in range(STOP) for b, p in enumerate(next_token(prompt + [a]))}
    return {(STOP,): first[STOP]} | two


def chi_square(way, model, prompt, temperature):
    """(Σ (seen - expected)^2 / expected over the completions, its limit in one of 10 000 correct samples)."""
    expected = {ids: NUMBER * p for ids, p in exact(model, prompt).items()}
    assert min(expected.values()) > 5  # or the statistic would have another distribution
    torch.manual_seed(1)
    numbers = list(torch.rand(NUMBER, 2, dtype=torch.float64))
    with sampling_mode(model):
        rows = way(model, [prompt] * NUMBER, [STOP], temperature, 2, numbers)
    seen = Counter(tuple(ids) for ids, _ in rows)
    assert set(seen) <= set(expected)
    k = len(expected) - 1  # degrees of freedom; the limit is Wilson and Hilferty's, 3.72 standard deviations
    limit = k * (1 - 2 / (9 * k) + 3.72 * math.sqrt(2 / (9 * k))) ** 3
    return sum((seen[ids] - n) ** 2 / n for ids, n in expected.items()), limit


@both
def test_either_way_samples_the_softmax_at_the_temperature(way):
    model = tiny(**FEW)
    model.generation_config = transformers.GenerationConfig(top_k=2, top_p=0.5, repetition_penalty=1.5)
    found, limit = chi_square(way, model, [1, 2, 3], HEAT)
    assert found < limit


def top_k(model):
    """The model keeps its five likeliest tokens."""
    def without_the_least(_, args, out):
        out.logits = out.logits.masked_fill(out.logits == out.logits.min(-1, keepdim=True)[0], -1e9)
    model.register_forward_hook(without_the_least)


def penalty(model):
    """The model divides the logit of the token that it read last by 3."""
    def penalised(_, args, settings, out):
        last = settings["input_ids"][:, -1:, None]
        out.logits[:, -1:] = out.logits[:, -1:].scatter(-1, last, out.logits[:, -1:].gather(-1, last) / 3)
    model.register_forward_hook(penalised, with_kwargs=True)


@pytest.mark.parametrize("temperature, change", [(0.8, None), (1.0, None), (HEAT, top_k), (HEAT, penalty)])
def test_another_temperature_or_a_part_of_the_softmax_would_be_noticed(monkeypatch, temperature, change):
    model, changed = tiny(**FEW), tiny(**FEW)
    if change:
        change(changed)
    right = exact(model, [1, 2, 3])
    monkeypatch.setitem(globals(), "exact", lambda *_: right)
    found, limit = chi_square(sample, changed, [1, 2, 3], temperature)
    assert found > 1.5 * limit
