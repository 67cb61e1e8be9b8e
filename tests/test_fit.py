"""scale/fit.py: the prediction is what autograd and a dry run show, and the plan fits the card.

Measured peaks: bench/memory.py, which takes too long for a test.
"""
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, GPT2Config, Qwen2Config, Qwen2ForCausalLM, Qwen3Config

from bench import memory as bench
from scale import fit

ROOT = Path(__file__).parents[1]
CARD = 1.0737e9               # bytes of a "GB" on the box of a card
SETTINGS = dict(dtype=torch.bfloat16, max_new_tokens=1024, gradient_checkpointing=True)
# FakeTensor runs of the 7B in bfloat16: rows, prompt, plan, checkpointing, GB beyond weights and gradients
KNOWN = [(1, 4096, 1024, True, 2.75), (2, 4096, 1024, True, 5.50), (4, 4096, 1024, True, 10.99),
         (8, 4096, 1024, True, 21.99), (4, 4096, 2048, True, 13.27), (1, 18432, 2048, True, 11.95),
         (1, 4096, 1024, False, 37.10)]


@functools.cache
def of(name):
    return fit.shapes(bench.config(name))


def predict(name="7b", **changes):
    return fit.predict(of(name), **SETTINGS | {"token_budget": 16384} | changes)


def plan(gigabytes, host=128, given=(), name="7b", **changes):
    shapes = of(name)  # counted once, not in each call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "shapes", lambda config: shapes)
        return fit.plan(None, gigabytes * CARD, host * 1e9, given, **SETTINGS | changes)


# The prediction

@pytest.mark.parametrize("name, parameters", [
    ("32b", 32_763_876_352), ("14b", 14_770_033_664), ("7b", 7_615_616_512), ("3b", 3_085_938_688),
    ("1.5b", 1_543_714_304), ("0.5b", 494_032_768)])
def test_the_parameters_of_the_public_models_are_counted_exactly(name, parameters):
    assert of(name)["parameters"] == parameters


def test_heads_of_another_size_than_hidden_size_by_heads_are_counted_too():
    qwen3 = Qwen3Config(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                        head_dim=128, num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True)
    assert fit.shapes(qwen3)["parameters"] == 596_049_920


def test_embeddings_and_head_are_the_root_group_and_tied_ones_count_once():
    assert of("7b")["root"] == 2 * 152064 * 3584 and of("0.5b")["root"] == 151936 * 896


@pytest.mark.parametrize("settings, weights, moments, gradients, frozen, gathered, host", [
    ({}, 4, 8, 4, 2, 2, 0),                                   # float32 shards; bfloat16 for the rollouts
    ({"ranks": 4}, 1, 2, 1, 2, 2, 0),                         # the frozen copy plays modules: it is whole
    ({"ranks": 4, "frozen": 1 / 4}, 1, 2, 1, 0.5, 2, 0),      # it is π_ref alone
    ({"ranks": 4, "frozen": 0}, 1, 2, 1, 0, 2, 0),
    ({"optimizer_device": "cpu"}, 2, 0, 2, 2, 0, 12),         # nothing is sharded
    ({"optimizer_device": "cpu", "ranks": 4}, 0.5, 0, 0.5, 2, 2, 12),
    ({"dtype": torch.float32}, 4, 8, 4, 4, 0, 0),             # plain
    ({"dtype": torch.float32, "ranks": 2}, 2, 4, 2, 4, 4, 0)])
def test_bytes_of_a_weight_are_those_of_the_way_to_train(settings, weights, moments, gradients, frozen,
                                                         gathered, host):
    parts, P = predict(**settings).parts, 7_615_616_512
    names = "weights", "moments", "gradients", "frozen copy", "gathered", "host: optimizer"
    assert [parts[name] / P for name in names] == [weights, moments, gradients, frozen, gathered, host]


@pytest.mark.parametrize("ranks", [1, 4])
def test_adapters_and_their_base_are_whole_on_every_card(ranks):
    parts, P, A = predict(lora=32, ranks=ranks).parts, 7_615_616_512, 80_740_352
    assert (parts["weights"], parts["moments"], parts["gradients"]) == (2 * P + 4 * A, 8 * A, 4 * A)
    assert (parts["frozen copy"], parts["gathered"]) == (0, 0)


def test_the_adapters_of_rank_32_are_the_80_million_weights_that_peft_makes():
    parts = predict(lora=32).parts
    assert parts["gradients"] == 4 * 80_740_352 and parts["frozen copy"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_layer_keeps_is_what_autograd_saves(dtype):
    config = Qwen2Config(hidden_size=64, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=500, tie_word_embeddings=False)
    small, model, saved = fit.shapes(config), Qwen2ForCausalLM(config).to(dtype), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(torch.zeros(1, 256, dtype=torch.long), use_cache=False)
    real = sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in weights) / 256
    last = (4 + dtype.itemsize) * small["d"]                  # the norm behind the layers feeds no linear
    kept, _ = fit.layer(*(small[name] for name in "dfqk"), dtype.itemsize, None)
    assert small["layers"] * kept + last == pytest.approx(real, rel=0.03)


@pytest.mark.parametrize("rows, prompt, new, checkpointing, real", KNOWN)
def test_activations_of_a_7b_are_a_dry_runs_within_15_percent(rows, prompt, new, checkpointing, real):
    guess = max(fit.activations(of("7b"), rows * (prompt + new), rows * new, 2, checkpointing, None)) / 1e9
    assert guess == pytest.approx(real, rel=0.15)


@pytest.mark.parametrize("name, ranks, prompt, new, real", [
    ("7b", 1, 4096, 1024, 28.94), ("7b", 8, 4096, 1024, 9.63), ("0.5b", 1, 448, 64, 3.11),
    ("0.5b", 8, 448, 64, 1.39)])
def test_an_update_of_sharded_weights_is_a_dry_runs_within_15_percent(name, ranks, prompt, new, real):
    """FakeTensor runs of fully_shard on a group of processes that is not there, in bfloat16 with gradient
    checkpointing: GB without moments. Four layers are enough for every kind of buffer. There the root of the
    frozen copy was sharded again before the backward pass."""
    sizes = list(fit.QWEN[name])
    sizes[2] = 4
    few = fit.shapes(fit.qwen(*sizes))
    got = fit.predict(few, **SETTINGS | {"max_new_tokens": new}, token_budget=prompt + new, prompt=prompt,
                      ranks=ranks, context=0, frozen=1 / ranks)
    guess = got.phases["update"] - got.parts["moments"] - got.parts["masks"]
    assert (guess - (2 * few["root"] if ranks > 1 else 0)) / 1e9 == pytest.approx(real, rel=0.15)


def test_other_architectures_have_a_prediction_too():
    shapes = fit.shapes(GPT2Config(n_embd=64, n_layer=2, n_head=2))
    got = fit.predict(shapes, dtype=torch.float32, token_budget=512, max_new_tokens=64, prompt=128,
                      gradient_checkpointing=False)
    assert got.gpu > 3 * got.parts["weights"] > 0


def test_a_7b_fits_on_one_card_of_80_gb_with_its_optimizer_on_the_host():
    got = predict(optimizer_device="cpu")
    assert 45e9 < got.gpu < 0.9 * fit.CARDS[80] and got.host == 14 * 7_615_616_512


def test_a_7b_with_adapters_fits_on_one_card_of_24_gb_and_with_all_weights_on_eight_of_80():
    assert predict(lora=32, token_budget=5120).gpu < 24e9
    assert predict(ranks=8).gpu < 0.9 * fit.CARDS[80] < predict(ranks=2).gpu


def test_without_a_frozen_copy_many_cards_need_less_and_as_pi_ref_alone_it_is_a_part_in_the_rollouts():
    phases = lambda frozen: predict(ranks=8, frozen=frozen).phases
    assert phases(1)["generate"] - phases(0)["generate"] == 2 * 7_615_616_512
    assert phases(1 / 8)["generate"] - phases(0)["generate"] == 2 * 7_615_616_512 / 8
    assert phases(0)["update"] < phases(1 / 8)["update"] < phases(1)["update"]


@pytest.mark.parametrize("name, less, more", [
    ("token_budget", 32768, 65536), ("max_new_tokens", 1024, 16384), ("lora", 8, 64),
    ("generate_budget", 1 << 18, 1 << 21), ("prompt", 1024, 32768)])
def test_more_of_anything_is_never_less_memory(name, less, more):
    for settings in ({}, {"gradient_checkpointing": False}, {"optimizer_device": "cpu"}):
        assert predict(**settings | {name: less}).gpu <= predict(**settings | {name: more}).gpu
    phase = "generate" if name == "generate_budget" else "update"
    assert predict(**{name: less}).phases[phase] < predict(**{name: more}).phases[phase]


def test_checkpointing_the_host_adapters_and_more_gpus_each_save_memory():
    assert predict().gpu < predict(gradient_checkpointing=False).gpu
    assert predict(lora=32).gpu < predict(optimizer_device="cpu").gpu < predict().gpu
    assert predict(ranks=8).gpu < predict(ranks=4).gpu < predict(ranks=2).gpu < predict().gpu


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2", "FalconMamba"])
def test_a_model_without_attention_has_a_plan_too(kind):
    size = dict(hidden_size=64, num_hidden_layers=2, vocab_size=99, state_size=8)
    heads = dict(num_heads=8, head_dim=16, n_groups=1) if kind == "Mamba2" else {}
    config = getattr(transformers, f"{kind}Config")(**size, **heads)
    changes, text = fit.plan(config, 0, 4e9, **SETTINGS)
    assert changes["token_budget"] == 16384 and "of 4 GB" in text


# The plan

@pytest.mark.parametrize("gigabytes, host, changes, text", [
    (200, 128, {"token_budget": 16384}, r"^153\.1 of 215 GB on the GPU, 15 of 128 GB on the host$"),
    (80, 128, {"optimizer_device": "cpu", "token_budget": 16384},
     r"with --optimizer-device cpu \(without: 153 GB\)$"),
    (80, 64, {"lora": 32, "token_budget": 16384}, "with --lora 32"),      # the optimizer's state needs 91 GB
    (48, 128, {"lora": 32, "token_budget": 16384}, r"^29\.9 of 52 GB .* with --lora 32 \(without: 153 GB\)$"),
    (24, 128, {"lora": 32, "token_budget": 5120}, "with --lora 32 --token-budget 5120"),
    (21, 128, {"lora": 32, "token_budget": 5120}, "that may not suffice, since a tenth should stay free$")])
def test_a_7b_is_trained_in_the_first_way_that_fits_the_card(gigabytes, host, changes, text):
    chosen, line = plan(gigabytes, host)
    assert chosen == changes and re.search(text, line)


@pytest.mark.parametrize("gigabytes", [24, 48, 80])
def test_what_is_planned_leaves_a_tenth_of_the_card_free_and_full_training_would_not(gigabytes):
    chosen, _ = plan(gigabytes)
    assert predict(**chosen, generate_budget=1).gpu <= 0.9 * gigabytes * CARD < predict(generate_budget=1).gpu


@pytest.mark.parametrize("given, settings, changes", [
    (["optimizer_device"], {"optimizer_device": "cpu"}, {"token_budget": 16384}),
    (["lora"], {"lora": 8}, {"token_budget": 16384}),
    ([], {"token_budget": 6000}, {"optimizer_device": "cpu", "token_budget": 6000})])
def test_what_the_user_chose_stays(given, settings, changes):
    assert plan(80, given=given, **settings)[0] == changes


def test_other_models_beside_it_count():
    assert plan(80, others=7_615_616_512)[0]["optimizer_device"] == "cpu"
    assert plan(80, others=2 * 7_615_616_512)[0]["lora"] == 32


@pytest.mark.parametrize("gigabytes, settings, error", [
    (8, {}, "it needs 21 GB of memory on the GPU even with --lora 32 --token-budget 5120, and 9 are free: "
            "use a smaller model, a shorter --max-new-tokens, or a larger machine (python -m scale.fit "),
    (40, {"given": ["optimizer_device"], "optimizer_device": "cpu"},
     "--token-budget 5120, and 43 are free: use a smaller model, a shorter --max-new-tokens, or a larger "),
    (80, {"host": 60, "given": ["optimizer_device"], "optimizer_device": "cpu"},
     "it needs 50 GB of memory on the GPU and 107 on the host even with --token-budget 5120, and 86 and 60 "
     "are free")])
def test_where_nothing_fits_a_sentence_says_what_is_missing(gigabytes, settings, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        plan(gigabytes, **settings)


@pytest.mark.exhaustive
def test_the_table_says_what_plan_chooses_on_each_machine():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in fit.table(128).splitlines()]
    assert rows[0] == ["model", "cards", "24 GB", "40 GB", "48 GB", "80 GB", "141 GB"]
    assert [row[:2] for row in rows[2:6]] == [["0.5B", cards] for cards in "1248"] and len(rows) == 2 + 6 * 4
    words = {"lora": "lora", "optimizer_device": "host"}
    for row in rows[2:]:
        if row[0] in ("3B", "14B"):
            for box, text in zip(fit.CARDS, row[2:]):
                try:
                    changes, line = plan(fit.CARDS[box] / CARD, 128 * int(row[1]), name=row[0].lower(),
                                         ranks=int(row[1]))
                except ValueError:
                    changes, line = None, "may not suffice"
                found = "-" if "may not suffice" in line else words.get(next(iter(changes)), "all")
                assert text.split(" / ")[0] == found


def test_without_a_gpu_everything_is_in_the_hosts_memory_and_the_toy_keeps_its_settings():
    chosen, text = plan(0, 23, name="0.5b", dtype=torch.float32, gradient_checkpointing=False)
    assert chosen == {"gradient_checkpointing": True, "token_budget": 16384}
    assert text.startswith("14.7 of 23 GB, with --gradient-checkpointing")
    toy = fit.plan(AutoConfig.from_pretrained(ROOT / "toy"), 0, 4e9, prompt=1024,
                   **SETTINGS | {"dtype": torch.float32})
    assert toy[0] == {"token_budget": 16384}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux grants memory that it does not have")
@pytest.mark.exhaustive
def test_an_allocation_beyond_the_hosts_memory_fails_and_halves_the_batch():
    script = ("import torch\nfrom models import batches\nfrom scale import fit\n"
              "fit.host_memory = lambda: 1e9\nfit.bound_host_memory()\n"
              "budget = batches.TokenBudget(80)\n"
              "done = budget.retry(lambda: [torch.zeros(len(batch) * 10**8).sum().item()\n"  # 0.4 GB each
              "                             for batch in budget.batches([[1] * 10] * 8, len)])\n"
              "print((done, budget.tokens, budget.halved))")
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, capture_output=True,
                            text=True, timeout=60)
    assert result.stdout == "([0.0, 0.0, 0.0, 0.0], 20, 2)\n", result.stderr                # halved twice


def test_the_command_shows_the_plan_for_another_machines_card(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fit.py", "--model", str(ROOT / "toy"), "--gpu", "24"])
    fit.main()
    printed = capsys.readouterr().out
    assert re.fullmatch(r"memory  \d\.\d of 26 GB on the GPU, 0 of 128 GB on the host\n", printed)


@pytest.mark.parametrize("words, printed", [
    (["--gpu", "33", "--ranks", "8"], r"memory  \d\.\d of 33 GB on each of 8 GPUs, 0 of 128 GB .*\n"),
    (["--gpu", "0", "--host", "16"], r"memory  \d\.\d of 16 GB\n")])
def test_the_command_knows_several_cards_and_none(monkeypatch, capsys, words, printed):
    monkeypatch.setattr(sys, "argv", ["fit.py", "--model", str(ROOT / "toy"), *words])
    fit.main()
    assert re.fullmatch(printed, capsys.readouterr().out)


def test_the_command_refuses_what_fits_nowhere_and_leaves_with_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fit.py", "--model", str(ROOT / "toy"), "--gpu", "0.5"])
    with pytest.raises(SystemExit) as left:
        fit.main()
    assert left.value.code == 2 and "fit: it needs 1 GB of memory on the GPU" in capsys.readouterr().err
