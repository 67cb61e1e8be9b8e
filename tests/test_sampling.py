"""fast/sampling.py: sharing prefixes and leaving early change the work, and no token or log-prob."""

import pytest
import torch
import transformers

from fast import sampling
from fast.sampling import Sampler, in_parts, sample

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


def plainly(model, prompts, stops, numbers, temperature, max_new_tokens):
    """The completions of one call of generate() for each prompt: nothing is shared, and no row can leave."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "in_parts", lambda model: False)
        return [sample(model, [prompt], stops, [row], temperature, max_new_tokens)[0]
                for prompt, row in zip(prompts, numbers)]


def same(some, others, temperature):
    assert [ids for ids, _ in some] == [ids for ids, _ in others]
    for (ids, logps), (_, expected) in zip(some, others):
        assert len(logps) == (len(ids) if temperature else 0)
        torch.testing.assert_close(torch.tensor(logps), torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
def test_prompts_that_share_a_beginning_complete_as_each_alone(prompts, temperature, monkeypatch):
    monkeypatch.setattr(sampling, "SAVED_TOKENS", 1)
    monkeypatch.setattr(sampling, "LEAVING", (1, 0))
    numbers = draws(len(prompts), 20 if temperature else 0)
    model, settings = tiny(), ([2, 5, 6, 7, 8, 9], numbers, temperature, 20)
    same(sample(model, prompts, *settings), plainly(model, prompts, *settings), temperature)


def test_a_shared_prefix_and_a_prompts_copies_are_computed_once():
    model = tiny()
    shapes = watched(model)
    prompts = [A + B, A + B, A + B[:20], A + B[:20], A + [1], A + [1]]
    sample(model, prompts, [], draws(6), 1.0, 3)
    assert shapes == [(1, 40), (3, 29), (6, 1), (6, 1), (6, 1)]  # prefix; rests; last tokens; two new tokens
    shapes.clear()
    sample(model, [A] * 6, [], draws(6), 1.0, 3)
    assert shapes == [(1, 39), (6, 1), (6, 1), (6, 1)]
    shapes.clear()
    sample(model, [A + B, A + [1], A[:20] + B], [], draws(3), 1.0, 2)  # saves less than it costs
    assert shapes == [(3, 70), (3, 1)]


def test_finished_rows_leave_and_the_others_go_on_as_if_they_had_never_been_there():
    model, prompts, stops = tiny(), [A] * 24, list(range(90, 99))
    shapes = watched(model)
    settings = (stops, draws(24, 60), 3.0, 60)
    parts = sample(model, prompts, *settings)
    rows = [n for n, _ in shapes[1:]]
    assert rows == sorted(rows, reverse=True) and len(set(rows)) > 2  # they only leave
    live = [sum(len(ids) >= t for ids, _ in parts) for t in range(1, len(rows) + 1)]
    assert all(n <= k <= n + max(3, n) for n, k in zip(live, rows)) and live[-1] > 0
    same(parts, plainly(model, prompts, *settings), 3.0)
    assert {len(ids) for ids, _ in parts if ids[-1] not in stops} <= {60}


def test_log_probs_equal_those_of_a_fresh_forward_pass():
    model, prompts = tiny(), PROMPTS["ragged"] * 2
    for prompt, (ids, logps) in zip(prompts, sample(model, prompts, [2, 5, 6], draws(20), 0.7, 30)):
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        fresh = (logits / 0.7).log_softmax(-1)[range(len(ids)), ids]
        torch.testing.assert_close(torch.tensor(logps), fresh, atol=1e-4, rtol=0)


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


@pytest.mark.parametrize("parts, kind, settings", [
    (True, "Llama", TINY), (True, "Mistral", TINY | dict(sliding_window=None)),
    (True, "GPT2", SMALL | dict(n_embd=32, n_head=4, n_positions=256)),
    (False, "Mistral", TINY | dict(sliding_window=16)),
    (False, "Gemma2", TINY | dict(sliding_window=16, head_dim=8)),
    (False, "Qwen3Next", TINY | dict(layer_types=PERIOD, num_experts=4, num_experts_per_tok=2, head_dim=8)),
    (False, "Mamba", SMALL | dict(hidden_size=32, state_size=8)),
    (False, "Bloom", SMALL | dict(hidden_size=32, n_head=4)),
    (False, "Mpt", dict(vocab_size=99, d_model=32, n_layers=2, n_heads=4, initializer_range=0.3)),
    (False, "Phi3", TINY | dict(rope_parameters=LONGROPE, pad_token_id=0, eos_token_id=2, bos_token_id=1))])
def test_a_cache_that_cannot_be_cut_is_left_to_one_call_of_generate_and_all_are_right(parts, kind, settings):
    model = tiny(kind, "LMHeadModel" if kind == "GPT2" else "ForCausalLM", **settings)
    prompts, shapes = PROMPTS["ragged"][:6], watched(model)
    settings = ([2, 5, 6, 7, 8, 9], draws(6), 0.8, 12)
    completions = sample(model, prompts, *settings)
    assert in_parts(model) == parts and shapes[0] == ((1, 39) if parts else (6, 58))
    same(completions, plainly(model, prompts, *settings), 0.8)


def test_a_model_that_computes_nan_is_an_error_and_no_sample():
    model = tiny()
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="nan"):
        sample(model, [A], [2], draws(1), 1.0, 4)


def test_bfloat16_shares_and_leaves_too():
    model = tiny().bfloat16()
    shapes = watched(model)
    completions = sample(model, [A] * 16, [2, 5, 6, 7, 8, 9], draws(16), 1.0, 30)
    assert shapes[0] == (1, 39) and shapes[-1][0] < 16
    for ids, logps in completions:
        logits = model(torch.tensor([A + ids])).logits[0, len(A) - 1 : -1].float()
        fresh = logits.log_softmax(-1)[range(len(ids)), ids]
        # Logits are near 10 here, where bfloat16 numbers are 1/16 apart. Another token is 1 and more away.
        torch.testing.assert_close(torch.tensor(logps), fresh, atol=0.4, rtol=0)
