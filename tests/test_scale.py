"""scale/: what fits, float32 masters, adapters, and several ranks that learn what one process does.

Two real processes (gloo) stand for two GPUs. Not covered here: NCCL, CUDA's streams, and how much a
card really holds (bench/card.py)."""

import csv
import faulthandler
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from multiprocessing import set_forkserver_preload
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_flow_grpo import T, lesson, tiny, with_advantages
from test_local import TINY, tokenizer
from torch.distributed.tensor import distribute_tensor
from torch.multiprocessing import start_processes
from transformers import AutoConfig, AutoModelForCausalLM

import flow_grpo
import solve
import train
from fast import trees
from flow_grpo import distribution
from memory import Memory
from models import local
from models.completion import Completion
from models.local import ready_to_update, sample, sampling_mode, save
from record import checkpoints
from scale import adapters, fit, sharded
from scale.masters import Masters
from world.mistakes import Mistake

TESTS = Path(__file__).parent
peft = pytest.mark.extras("peft")
QWEN_7B = dict(
    model_type="qwen2",
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    tie_word_embeddings=False,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
SHARED = dict(MOE, shared_expert_intermediate_size=16)


# ---------------------------------------------------------------------------------------- masters
ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0, fused=True)
OPTIMISERS = {
    "AdamW": ADAMW,
    "weight decay": partial(ADAMW, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-3),
}


def masters(make):
    """What makes our optimiser of a list of weights."""
    return lambda weights: Masters(dict(zip("abcdefg", weights)), make)


def steps(make, dtype, number=20):
    """(weights, optimizer) after some steps on made-up gradients; some weights get none."""
    r = torch.Generator().manual_seed(0)
    shapes = (20, 16), (16,), (3, 4, 5)
    start = [torch.randn(shape, generator=r).bfloat16() for shape in shapes]
    weights = [torch.nn.Parameter(values.to(dtype, copy=True)) for values in start]
    optimizer = make(weights)
    for step in range(number):
        for i, weight in enumerate(weights):
            slope = torch.randint(-99, 100, weight.shape, generator=r).to(dtype) / 64
            weight.grad = None if (step + i) % 3 == 0 else slope
        optimizer.step()
    return weights, optimizer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_any_optimiser_trains_weights_of_any_precision_as_it_trains_float32_copies(name, dtype):
    ours, optimizer = steps(masters(OPTIMISERS[name]), dtype)
    copies, reference = steps(OPTIMISERS[name], torch.promote_types(dtype, torch.float32))
    for key, weight, copy in zip("abc", ours, copies, strict=True):
        assert torch.equal(optimizer.masters[key], copy)
        assert torch.equal(weight, copy.to(dtype)) and weight.dtype == dtype
        state, wanted = optimizer.state_dict()[key], reference.state[copy]
        for each, value in wanted.items():
            assert state[each] is value is None or torch.equal(state[each], value)
        assert ("master" in state) == (dtype == torch.bfloat16)  # else no second copy of a weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_is_the_same_if_weights_and_gradients_cross_to_another_device(dtype, monkeypatch):
    wanted, reference = steps(masters(ADAMW), dtype)
    monkeypatch.setattr(Masters, "crosses", lambda *_: True)
    ours, optimizer = steps(masters(ADAMW), dtype)
    assert all(map(torch.equal, ours, wanted)) and optimizer.buffers
    assert all(torch.equal(optimizer.masters[key], reference.masters[key]) for key in "abc")


def test_a_schedule_of_the_learning_rate_reaches_every_weight():
    weights, optimizer = steps(masters(ADAMW), torch.bfloat16)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [weight.tolist() for weight in weights]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert [weight.tolist() for weight in weights] == before


def moved(make, dtype):
    """How weights of a language model's size move in 200 steps at the paper's learning rate."""
    r = torch.Generator().manual_seed(0)
    start, slope = torch.randn(2, 64, 64, generator=r).bfloat16() * 0.02
    weight = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = make([weight])
    for _ in range(200):
        weight.grad = (slope + 0.02 * torch.randn(64, 64, generator=r)).to(dtype)
        optimizer.step()
    return (weight.detach().float() - start.float()).flatten()


def test_bfloat16_weights_follow_the_float32_update_where_plain_adamw_loses_it():
    slow = partial(ADAMW, lr=1e-6)
    wanted, ours = moved(slow, torch.float32), moved(masters(slow), torch.bfloat16)
    plain = moved(slow, torch.bfloat16)
    cosine = lambda a: torch.nn.functional.cosine_similarity(a, wanted, dim=0)
    lost = lambda a: (a == 0).float().mean()
    assert cosine(ours) > 0.9 and cosine(plain) < 0.5
    assert lost(wanted) == 0 and lost(ours) < 0.3 and lost(plain) > 0.9


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_restored_optimizer_goes_on_to_the_bit(dtype, name, tmp_path):
    make = OPTIMISERS[name]
    weights, optimizer = steps(masters(make), dtype)
    saved = tmp_path / "step-3" / "trainer-0.pt"
    saved.parent.mkdir()
    torch.save({"ranks": 1, "step": 3, "state": optimizer.state_dict()}, saved)
    copies = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    restored = masters(make)(copies)
    checkpoints.restore(saved.parent, restored)
    for weight in weights + copies:
        weight.grad = torch.full_like(weight, 0.5)
    optimizer.step(), restored.step()
    for name, weight, copy in zip("abc", weights, copies, strict=True):
        assert torch.equal(weight, copy)
        assert torch.equal(optimizer.masters[name], restored.masters[name])
        kept = restored.state_dict()[name].values()
        assert not any(tensor.untyped_storage().filename for tensor in kept)  # not in the file


BROKEN = {  # {what: (a change of the saved data, why it is refused)}
    "another weight": (lambda s: s["state"].update(x=s["state"].pop("a")), "the weight a"),
    "a moment of one value": (
        lambda s: s["state"]["a"].update(exp_avg=torch.zeros(1)),
        "the moments of a are",
    ),
    "a moment of another type": (
        lambda s: s["state"]["b"].update(exp_avg_sq=torch.zeros(16).double()),
        "the moments of b are",
    ),
    "a master of another shape": (
        lambda s: s["state"]["c"].update(master=torch.zeros(5, 4, 3)),
        "the moments of c are",
    ),
    "a missing weight": (lambda s: s["state"].pop("b"), "only one of both has the weight b"),
    "a text": (lambda s: s["state"]["b"].update(exp_avg="0"), "does not fit this model"),
    "no state": (lambda s: s.pop("state"), "may be damaged .KeyError: 'state'.: if so, move"),
    "a missing moment": (lambda s: s["state"]["c"].pop("exp_avg"), "the moments of c are"),
    "another step": (lambda s: s.update(step=2), "is of step 2"),
    "a missing file": (lambda s: s.update(ranks=2), "has 1 of 2 files"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_does_not_fit_the_model_is_not_restored(what, tmp_path):
    """A fused step would write beyond a moment that is too short."""
    _, optimizer = steps(masters(ADAMW), torch.bfloat16)
    state = {name: dict(moments) for name, moments in optimizer.state_dict().items()}
    saved = {"ranks": 1, "step": 3, "state": state}
    change, why = BROKEN[what]
    change(saved)
    (tmp_path / "step-3").mkdir()
    torch.save(saved, tmp_path / "step-3" / "trainer-0.pt")
    with pytest.raises(Mistake, match=why):
        checkpoints.restore(tmp_path / "step-3", steps(masters(ADAMW), torch.bfloat16, 0)[1])


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_half_a_file_is_one_sentence(share, tmp_path):
    _, optimizer = steps(masters(ADAMW), torch.float32)
    file = tmp_path / "step-3" / "trainer-0.pt"
    file.parent.mkdir()
    torch.save({"ranks": 1, "step": 3, "state": optimizer.state_dict()}, file)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(
        Mistake, match=r"step-3/trainer-0.pt may be damaged .*: if so, move .*step-3 away"
    ):
        checkpoints.restore(file.parent, optimizer)


def test_moments_that_share_their_memory_are_copied(tmp_path):
    weights, optimizer = steps(masters(ADAMW), torch.float32)
    state = {name: dict(moments) for name, moments in optimizer.state_dict().items()}
    state["a"] |= {"exp_avg": torch.ones(()).expand(20, 16), "exp_avg_sq": torch.ones(16, 20).T}
    optimizer.load_state_dict(state)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state_dict()["a"][moment].stride() == (16, 1)


# ----------------------------------------------------------------------------------------- memory
@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A folder with the configuration of Qwen2.5-7B, and no weights."""
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return str(folder)


GIB = 2**30


@pytest.fixture
def plan(qwen, monkeypatch):
    of = fit.sizes(qwen)
    monkeypatch.setattr(fit, "sizes", lambda *_: of)
    monkeypatch.setattr(local, "peft", lambda: None)

    def plan(gpu, host=128, given=(), peft=True, **settings):
        monkeypatch.setattr(adapters, "installed", lambda: peft)
        return fit.choose(qwen, gpu * GIB, host * GIB, given, **settings)

    return plan


CHECKPOINTED = {"gradient_checkpointing": True, "token_budget": 16384}
HOST, LORA, ALL = {"optimizer_device": "cpu"}, {"lora": 32}, {"lora": 0}


@pytest.mark.parametrize(
    "machine, wanted",
    [
        (dict(gpu=190), CHECKPOINTED),
        (dict(gpu=190, adapters_first=True), LORA | CHECKPOINTED),
        (dict(gpu=190, adapters_first=True, peft=False), CHECKPOINTED),
        (dict(gpu=80), HOST | CHECKPOINTED),  # its masters and moments are in the host's memory
        (dict(gpu=80, ranks=2), HOST | CHECKPOINTED),
        (dict(gpu=80, ranks=8), CHECKPOINTED),
        (dict(gpu=80, host=90), LORA | CHECKPOINTED),
        (dict(gpu=80, given=ALL), ALL | HOST | CHECKPOINTED),
        (dict(gpu=24), LORA | CHECKPOINTED | {"token_budget": 4096}),
        (dict(gpu=0, host=500, itemsize=4), CHECKPOINTED | {"gradient_checkpointing": False}),
        (dict(gpu=0, host=205, itemsize=4, adapters_first=True), CHECKPOINTED),
        (dict(gpu=80, host=128, given=LORA), LORA | CHECKPOINTED),
        (dict(gpu=80, given={"token_budget": 99}), HOST | CHECKPOINTED | {"token_budget": 99}),
    ],
)
def test_a_7b_is_trained_in_the_first_way_that_fits_and_given_flags_stay(plan, machine, wanted):
    way, lines = plan(**machine)
    assert (way.pop("sampling_bytes", 0) > 0) == (machine["gpu"] > 0) and way == wanted


def test_the_plan_says_what_is_needed_and_what_the_first_choice_would_have_needed(plan):
    assert plan(80, peft=False)[1] == [
        "memory  80.0 GiB on each GPU and 128.0 GiB on the host are free",
        "        52.0 GiB on each GPU and 99.3 GiB on the host are needed for all weights, "
        "--optimizer-device cpu --gradient-checkpointing --token-budget 16384",
        "        137.2 GiB on each GPU and 14.2 GiB on the host would be needed for all weights, "
        "--gradient-checkpointing --token-budget 16384",
        "        24.9 GiB on each GPU and 14.2 GiB on the host would be needed for --lora 32: "
        "pip install peft",
    ]


@pytest.mark.parametrize(
    "machine, why",
    [
        (dict(gpu=16), r"needs 18\.\d GiB on each GPU .* even with --lora 32 .*a larger machine$"),
        (dict(gpu=40, peft=False), "even with all weights, .*, or install peft$"),
        (dict(gpu=80, host=90, given=ALL), r"needs 52\.0 .* and 99\.3 .*, or give --lora 32$"),
        (dict(gpu=40, peft=False, given=ALL), "even with all weights, .*, or give --lora 32$"),
        (dict(gpu=40, given=HOST), "even with all weights, .* --optimizer-device cpu, and"),
        (dict(gpu=0, host=20, itemsize=4), r"needs \d+\.\d GiB on the host even with --lora 32"),
    ],
)
def test_where_nothing_fits_one_sentence_says_what_is_missing(plan, machine, why):
    with pytest.raises(Mistake, match=why):
        plan(**machine)


def test_gathered_weights_and_activations_are_never_in_memory_together(plan):
    of, P = fit.sizes("any"), fit.sizes("any").weights
    one, four = (fit.needed(of, CHECKPOINTED, ranks, itemsize=2) for ranks in (1, 4))
    assert one.sampling == pytest.approx((2 + 2 + 12 + 2) * P + fit.FIXED)
    assert four.sampling == pytest.approx((16 / 4 + 2 + 2) * P + fit.FIXED)
    activations = 2 * 16384 * of.checkpointed
    assert one.update - one.sampling == pytest.approx(activations)
    assert four.update == pytest.approx((16 / 4 + 2) * P + fit.FIXED + activations + 2 * of.ends)


def test_a_frozen_copy_that_nobody_needs_takes_no_memory(plan):
    of = fit.sizes("any")
    with_it, without = (fit.needed(of, CHECKPOINTED, 1, 2, frozen=f).update for f in (True, False))
    assert with_it - without == 2 * of.weights


@pytest.mark.parametrize("size", [2, 4])
def test_a_sampling_batch_has_the_room_that_is_left(plan, size):
    of = fit.sizes("any")
    free = plan(200, given=LORA, itemsize=size)[0]["sampling_bytes"]
    taken = size * of.weights + 16 * of.adapters + fit.FIXED
    assert free == pytest.approx(0.8 * 200 * GIB - taken)
    model = SimpleNamespace(dtype=torch.bfloat16 if size == 2 else torch.float32)
    engine = SimpleNamespace(name="any", model=model)
    fit.give_room(engine, free)
    assert engine.sampling_tokens == pytest.approx(free / (size * 28_672), rel=1e-4)
    row = size * 256 * (6 * 3584 + 4 * 18944) + 18 * 152064  # a chunk in one layer, and logits
    assert engine.row_tokens == pytest.approx(row / (size * 28_672), abs=1)
    fit.give_room(engine, free, plain=True)  # prompts in one piece
    assert engine.sampling_tokens == pytest.approx(free / (size * (28_672 + of.prefill)), rel=1e-4)


def test_other_models_on_the_card_count_unless_they_are_served(plan):
    other, served = ["another 7B"], ["http://localhost:8000/v1"]
    assert "optimizer_device" in plan(190, others=other * 2)[0]
    assert "lora" in plan(72, others=other)[0] and "lora" not in plan(72, others=served)[0]


SHAPE = dict(hidden_size=256, intermediate_size=1408, num_attention_heads=4, num_hidden_layers=8)
SHAPE |= dict(num_key_value_heads=2, vocab_size=99)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no control groups")
def test_a_container_may_take_less_than_its_host_has(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    files = {"max": "8000000", "current": "5000000", "stat": "anon 1\ninactive_file 3000000\n"}
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    real = fit.Path
    moved = lambda path: tmp_path / real(path).name if "cgroup" in str(path) else real(path)
    monkeypatch.setattr(fit, "Path", moved)
    assert fit.free_memory(cpu) == (0, 6_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert fit.free_memory(cpu)[1] > 10**8  # nothing limits it but the host


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.extras("peft"))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind, head_dim", [("Qwen2", 64), ("Qwen3", 64), ("Qwen3", 128)])
def test_what_a_layer_keeps_is_at_least_what_autograd_saves_and_not_much_more(
    kind, head_dim, dtype, lora, tmp_path
):
    config = getattr(transformers, f"{kind}Config")(**SHAPE, head_dim=head_dim)
    config.save_pretrained(tmp_path)
    model, saved, kept = AutoModelForCausalLM.from_config(config).to(dtype), {}, []
    decoder, embeddings = model.model, model.get_input_embeddings()
    if lora:
        adapters.add(model, 8)
        embeddings.register_forward_hook(lambda module, ids, states: states.requires_grad_())
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def pack(tensor):
        kept.append(tensor)  # or another tensor might take its place
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder(torch.zeros(1, 256, dtype=torch.long), use_cache=False)
    real = sum(size for place, size in saved.items() if place not in weights) / 256
    assert real < fit.sizes(str(tmp_path)).kept * dtype.itemsize < 1.5 * real


@pytest.mark.parametrize("kind", ["Mamba", "GPT2", "Gemma3Text", "Qwen3Moe"])
def test_any_architecture_has_sizes(kind, tmp_path):
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    sizes = fit.sizes(str(tmp_path))
    assert sizes.weights == model.num_parameters() and sizes.kept > 0 < sizes.prefill


def test_a_model_that_is_not_there_and_one_that_holds_adapters_are_one_sentence(tmp_path):
    with pytest.raises(Mistake, match="there is no model 'no/where'"):
        fit.choose("no/where", 8e9, 8e9)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "a/base"}')
    with pytest.raises(Mistake, match="holds adapters: .* train its base, a/base"):
        fit.choose(str(tmp_path), 8e9, 8e9)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "http://x.y/v1"}')
    with pytest.raises(Mistake, match="said to be a server"):
        fit.choose(str(tmp_path), 8e9, 8e9)


def test_the_command_shows_the_plan(qwen, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", f"fit {qwen} --gpu 80 --ranks 8".split())
    runpy.run_path(fit.__file__, run_name="__main__")
    shown = capsys.readouterr().out
    assert "80.0 GiB on each GPU and 128.0 GiB on the host are free\n" in shown
    assert "needed for all weights, --gradient-checkpointing --token-budget 16384\n" in shown


# --------------------------------------------------------------------------------------- adapters
def write(folder, kind="Qwen2", **changes):
    """A random model as a checkpoint."""
    tok = tokenizer()
    torch.manual_seed(0)
    settings = TINY | dict(vocab_size=len(tok), max_position_embeddings=4096) | changes
    config = getattr(transformers, f"{kind}Config")(**settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tok.save_pretrained(folder)
    return str(folder)


@peft
@pytest.mark.parametrize(
    "kind, changes, layers",
    [
        ("Qwen2", {}, "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("Qwen3Moe", MOE, "q_proj k_proj v_proj o_proj"),
        ("Qwen2Moe", SHARED, "q_proj k_proj v_proj o_proj shared_expert_gate"),
        ("Mamba", {}, "in_proj"),
    ],
)
def test_adapters_are_on_the_linear_layers_that_they_can_serve(kind, changes, layers):
    config = getattr(transformers, f"{kind}Config")(**TINY | changes)
    model = AutoModelForCausalLM.from_config(config)
    counted = adapters.count(model, 4)
    model = adapters.add(model, 4)
    trained = {name: w for name, w in model.named_parameters() if w.requires_grad}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == {*layers.split()}
    assert counted == sum(weight.numel() for weight in trained.values())


@peft
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_its_adapters_a_policy_is_its_base_to_the_bit_and_saved_ones_are_the_policy(
    dtype, tmp_path
):
    base, how = write(tmp_path / "base", "Qwen3Moe", **MOE), (distribution, None, dtype)
    policy, plain = local.load(base, *how), local.load(base, *how)
    policy.model = adapters.add(policy.model, 4)
    frozen = adapters.without(policy)
    assert adapters.moved(policy, frozen) == dict(moved_max=0, moved_mean=0, moved_share=0)
    layers = [m for m in policy.model.modules() if hasattr(m, "lora_A")]
    assert {layer.scaling["default"] for layer in layers} == {2}  # alpha = 2 r, as docs/gpu.md says
    layers[0].lora_A["default"].weight.data.fill_(0.5)
    layers[0].lora_B["default"].weight.data[0] = 0.25  # r = 4: 2 x 4 x 0.5 x 0.25 in one row
    found, shape = adapters.moved(policy, frozen), layers[0].base_layer.weight.shape
    number = sum(layer.base_layer.weight.numel() for layer in layers)
    assert found["moved_max"] == pytest.approx(1, rel=0.01)
    assert found["moved_mean"] == pytest.approx(shape[1] / number, rel=0.01)
    assert found["moved_share"] == shape[1] / number
    for weight in policy.model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.3)
            assert weight.dtype == getattr(torch, dtype)
    texts = ["one", "two two"]
    answers = lambda engine: [c.ids for c in engine(texts, max_new_tokens=12)]
    assert answers(frozen) == answers(plain) != answers(policy)
    x = torch.tensor([[5, 6, 7]])
    with policy.model.disable_adapter():
        assert torch.equal(policy.model(x).logits, plain.model(x).logits)
    assert (frozen.name, frozen.fingerprint) == (plain.name, plain.fingerprint)
    assert adapters.moved(policy, frozen)["moved_share"] > 0.5
    save(policy.model, policy.tokenizer, tmp_path / "saved")
    again = local.load(str(tmp_path / "saved"), *how, trainable=True)
    assert answers(again) == answers(policy) and again.name == str(tmp_path / "saved")
    pairs = zip(policy.model.named_parameters(), again.model.named_parameters(), strict=True)
    for (name, weight), (other, copy) in pairs:
        assert name == other and torch.equal(weight, copy)
        assert weight.requires_grad == copy.requires_grad == ("lora_" in name)
    next(plain.model.parameters()).data += 1
    save(plain.model, plain.tokenizer, base)
    with pytest.raises(Mistake, match="saved has adapters for other weights than .*base now"):
        local.load(str(tmp_path / "saved"), *how)


# ------------------------------------------------------------------------------------------ ranks
def as_rank(rank, world, port, function, *arguments):
    """What torchrun does for a process, and the function."""
    faulthandler.dump_traceback_later(200, exit=True)  # ranks that wait would wait for an hour
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    sharded.RANK, sharded.WORLD = rank, world  # as they are read from the environment
    function(*arguments)


def ranks(world, function, *arguments):
    """function(*arguments) in so many processes. They are forks of one process that has imported
    these files, because importing torch takes longer than what a rank does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # where the forks find these files
        set_forkserver_preload(["test_scale"])
        start_processes(
            as_rank, (world, port, function, *arguments), nprocs=world, start_method="forkserver"
        )


class Recorder(Masters):
    """Remembers the gradients it got, whole."""

    gradients = ()

    def step(self):
        grads = [weight.grad for weight in self.weights.values()]
        whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
        self.gradients = *self.gradients, torch.cat([grad.flatten() for grad in whole])
        super().step()


def learn(
    dtype=torch.float32,
    beta=0.1,
    rollouts=7,
    A=None,
    whole=False,
    top_k=False,
    older=False,
    **settings,
):
    """One update: the gradients of its steps, its metrics, and the weights after it.

    older: an older policy sampled every other action."""
    model, reference = tiny().to(dtype), tiny(1).to(dtype)
    model.activation_checkpointing_enable()
    ready_to_update(model)
    several = sharded.WORLD > 1
    if several and not whole:
        sharded.shard(model)
    optimizer = Recorder(dict(model.named_parameters()), partial(ADAMW, lr=1e-4))
    actions, advantages = lesson()
    actions = possible(actions) if top_k else actions
    actions = with_advantages([a for a in actions if a.rollout < rollouts], A or advantages)
    if older:
        replayed = list(trees.rows(tiny(2), actions[::2], 10**6))
        flow_grpo.score_old(tiny(2), replayed, temperature=T)
    how = dict(temperature=T, beta=beta, max_grad_norm=1e6, rows=trees.rows, token_budget=30)
    how |= dict(clip=(0.2, 0.3), minibatches=1)
    how |= settings | dict(ranks=sharded if several else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow_grpo, "distribution", top_20 if top_k else distribution)
        metrics = flow_grpo.update(model, reference, optimizer, actions, range(rollouts), **how)
    sharded.gather(model)
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    return optimizer.gradients, metrics, weights.clone()


def top_20(logits, temperature):
    """A distribution() in which most tokens are impossible."""
    least = logits.topk(20).values[..., -1:]
    return distribution(logits.masked_fill(logits < least, -torch.inf), temperature)


def possible(actions):
    """The actions, with tokens that top_20() allows in the place of others."""
    model, found = tiny(), []
    for action in actions:
        ids = []
        for token in action.ids:
            best = model(torch.tensor([action.prompt_ids + ids])).logits[0, -1].topk(20).indices
            ids.append(token if token in best else best[token % 20].item())
        found.append(replace(action, ids=ids))
    return found


LESSONS = {
    "KL, two mini-batches": dict(minibatches=2),
    "no KL, three mini-batches": dict(beta=0, minibatches=3, token_mean=True),
    "whole weights": dict(minibatches=2, whole=True),
    "one rollout": dict(rollouts=1, A=[1.0], minibatches=2),
    "nothing to learn": dict(beta=0, A=[0.0] * 7),
    "bfloat16": dict(dtype=torch.bfloat16, minibatches=2),
    "top-k, one rank has nothing": dict(rollouts=1, A=[1.0], beta=0, top_k=True),
    "top-k": dict(minibatches=2, beta=0, top_k=True),
    "plans of an older policy": dict(minibatches=2, older=True),
}


def sampled(prompts):
    """Greedy completions of a model with gathered weights."""
    model = tiny().float()
    if sharded.WORLD > 1:
        sharded.shard(model)
        sharded.gather(model)
    with sampling_mode(model):
        return sample(model, prompts, [], 0, 6, distribution) if prompts else []


PROMPTS = [[5, 6, 7, i] * 20 for i in range(4)]


def seed_of_rollouts():
    """The seed with which this rank samples a step's rollouts."""
    seeds, args = [], SimpleNamespace(max_turns=1, max_new_tokens=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "roll_out", lambda *_, **__: seeds.append(torch.initial_seed()) or [])
        train.rollouts_of(["a", "b"], 4, args, (), 0.7, seed=5)
    return seeds[0]


def lessons(folder):
    """All of the above, on this rank."""
    sharded.start("cpu")
    found = {name: learn(**lesson) for name, lesson in LESSONS.items()}
    found["seed"] = seed_of_rollouts()
    found["sampled"] = sampled(PROMPTS if sharded.RANK else [])  # the other rank does not call it
    torch.save(found, folder / str(sharded.RANK))
    sharded.stop()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    ranks(2, lessons, folder)
    return [torch.load(folder / rank, weights_only=False) for rank in "01"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LESSONS)
def test_two_ranks_learn_what_one_process_learns(two, name):
    (gradients, metrics, weights), other = two[0][name], two[1][name]
    assert metrics == other[1] and torch.equal(weights, other[2])
    assert all(torch.equal(x, y) for x, y in zip(gradients, other[0], strict=True))
    alone, wanted, trained = learn(**LESSONS[name])
    rounding = 0.05 if "bfloat16" in name else 1e-5
    assert metrics == pytest.approx(wanted, rel=rounding, abs=rounding / 100)
    for x, y in zip(gradients, alone, strict=True):
        assert (x.float() - y.float()).norm() <= rounding * y.float().norm()
    # Adam divides the gradient by itself: where it is near 0, rounding decides where a weight goes
    assert (weights - trained).abs().float().mean() <= rounding * 1e-4
    assert (len(gradients) > 0) == (name != "nothing to learn") and not metrics["skipped"]


def test_what_fills_a_rank_up_has_every_field_of_an_action_and_no_weight(monkeypatch):
    (sampled, *_), _ = lesson()
    sampled = replace(sampled, A=2.0, turn=3, weight=0.5, logp_old=torch.ones(len(sampled.ids)))
    batches = list(trees.rows(tiny(), [sampled], 10**6))
    monkeypatch.setattr(sharded, "exchanged", lambda item: [item, (len(batches) + 2, None)])
    *same, one, two = sharded.even(batches)
    assert same == batches and one.actions == two.actions
    [filler] = one.actions
    assert filler.logp_old.tolist() == [0] * len(sampled.ids)
    without = dict(A=0.0, weight=0.0, logp_old=None)
    assert replace(filler, logp_old=None) == replace(sampled, **without)


@pytest.mark.exhaustive
def test_each_rank_samples_with_a_seed_of_its_own(two):
    assert two[0]["seed"] == seed_of_rollouts() != two[1]["seed"]


@pytest.mark.exhaustive
def test_a_rank_samples_alone_from_gathered_weights(two):
    assert two[0]["sampled"] == [] and two[1]["sampled"] == sampled(PROMPTS)


def moments(folder, before=None):
    """Save what three steps make of masters and moments; or those that `before` ranks saved."""
    sharded.start("cpu")
    model, r = tiny().bfloat16(), torch.Generator().manual_seed(0)
    # fewer rows than ranks, as the gate of a shared expert has: some ranks have none of it
    model.gate = torch.nn.Linear(8, 1, dtype=torch.bfloat16)
    if sharded.WORLD > 1:
        sharded.shard(model)
    optimizer = Masters(dict(model.named_parameters()), ADAMW)
    if before:
        checkpoints.restore(folder / f"by-{before}" / "step-1", optimizer)
    for weight in [] if before else [*model.parameters()] * 3:
        weight.grad = torch.randn(weight.shape, generator=r).bfloat16()
        if sharded.WORLD > 1:
            weight.grad = distribute_tensor(weight.grad, weight.device_mesh, weight.placements)
        optimizer.step()
    out = folder / (f"{before}-to-{sharded.WORLD}" if before else f"by-{sharded.WORLD}") / "step-1"
    out.mkdir(parents=True, exist_ok=True)
    state = {"ranks": sharded.WORLD, "step": 1, "state": optimizer.state_dict()}
    torch.save(state, out / f"trainer-{sharded.RANK}.pt")
    sharded.stop()


def joined(folder):
    """{(weight, moment): the whole tensor}, of the files of all ranks."""
    files = sorted(folder.glob("step-1/trainer-*.pt"))
    first, *others = (torch.load(file)["state"] for file in files)
    parts = lambda name, key: [first[name][key], *(state[name][key] for state in others)]
    return {
        (name, key): torch.cat(parts(name, key)) if value.ndim else value
        for name, state in first.items()
        for key, value in state.items()
    }


@pytest.mark.exhaustive
def test_another_number_of_ranks_goes_on_with_the_same_masters_and_moments(tmp_path):
    for world in 1, 2:
        ranks(world, moments, tmp_path)
    for before, world in (2, 1), (1, 2), (2, 3):
        ranks(world, moments, tmp_path, before)
        wanted, found = joined(tmp_path / f"by-{before}"), joined(tmp_path / f"{before}-to-{world}")
        assert wanted.keys() == found.keys() and {"master", "exp_avg"} < {k for _, k in found}
        assert all(torch.equal(wanted[each], found[each]) for each in wanted)
        assert len([*tmp_path.glob(f"{before}-to-{world}/step-1/*")]) == world


# ----------------------------------------------------------------------------------- a whole run
def roll_out(questions, policy, *cast, **settings):
    """The question and how often it came before decide the rollout, on whatever rank."""
    rollouts, copies = [], Counter()
    for question in questions:
        copies[question.question] += 1
        dice = random.Random(f"{question.question} {copies[question.question]}")
        rollout = solve.Rollout(question, Memory(question.question))
        for _ in range(dice.randrange(1, 3)):
            ids = [dice.randrange(3, 250) for _ in range(dice.randrange(2, 9))]
            rollout.sampled.append(Completion("", policy.chat.encode(question.question), ids))
        rollout.right = dice.random() < 0.5
        rollout.reward = float(rollout.right)
        rollouts.append(rollout)
    return rollouts


def run_train(words):
    args, solve.roll_out = train.settings(train.given(words)), roll_out
    with open(os.devnull if sharded.RANK else f"{args.out}.txt", "a") as out:
        os.dup2(out.fileno(), 1)
    train.train(args)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with models and questions."""
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "qwen", tie_word_embeddings=True)
    for name, number in (("data", 9), ("valid", 4)):  # three steps of three: no epoch ends
        lines = [{"question": f"{name} {n}?", "answer": str(n)} for n in range(number)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def words_of(place, out, *more, model="qwen"):
    files = f"--model {place}/{model} --data {place}/data.jsonl --valid {place}/valid.jsonl"
    how = "--test none --tools base_generator --judge none --device cpu --group-size 4 --every 1"
    how += " --questions 3 --minibatches 2 --steps 3 --keep 4 --lr 1e-4 --token-budget 200"
    return [*f"{files} {how}".split(), *more, "--out", f"{place}/{out}"]


def weights_of(folder):
    return load_file(next(Path(folder).glob("*model.safetensors")))


def apart(one, two):
    """The largest difference between the weights of two checkpoints."""
    one, two = weights_of(one), weights_of(two)
    return max((one[name].float() - two[name].float()).abs().max().item() for name in one)


def same_files(one, two):
    """Are these runs equal to the bit: tables, rollouts and last weights?"""
    names = ["log.csv", "evals.csv", "rollouts.jsonl"]
    return apart(one / "step-3", two / "step-3") == 0 and all(
        (one / name).read_bytes() == (two / name).read_bytes() for name in names
    )


def resumed(run, copy, world):
    """The run again, stopped after its second step and resumed by so many processes."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("step-3", "lock"), symlinks=True)
    ranks(world, run_train, ["--resume", str(copy)])
    return copy


@pytest.mark.exhaustive
def test_a_run_of_two_processes_is_that_of_one_though_the_questions_do_not_divide(place):
    for world, out in ((1, "one"), (2, "two")):
        ranks(world, run_train, words_of(place, out))
    one, two = place / "one", place / "two"
    # Gradients near 1e-3 round by 1e-10. Beside Adam's eps of 1e-8 that moves a weight by lr / 100.
    assert apart(one / "step-3", two / "step-3") < 1e-5
    assert apart(one / "step-3", place / "qwen") > 1e-4
    for table in "log.csv", "evals.csv":
        rows, others = (list(csv.DictReader(open(run / table))) for run in (one, two))
        assert len(rows) >= 3
        for row, other in zip(rows, others, strict=True):
            for name in row.keys() - {"questions"}:
                assert float(row[name]) == pytest.approx(float(other[name]), abs=1e-4), name
    assert (one / "rollouts.jsonl").read_text() == (two / "rollouts.jsonl").read_text()
    printed = (place / "two.txt").read_text()
    assert all(printed.count(f"step   {step}/3") == 1 for step in (1, 2, 3))


@pytest.mark.exhaustive
def test_two_processes_resume_to_the_bit_and_another_number_goes_on(place):
    ranks(2, run_train, words_of(place, "masters", "--dtype", "bfloat16", "--lr", "1e-6"))
    run = place / "masters"
    state = [torch.load(run / f"step-2/trainer-{rank}.pt")["state"] for rank in (0, 1)]
    sizes = [sum(weight["master"].numel() for weight in part.values()) for part in state]
    assert max(sizes) < 0.6 * sum(sizes) and state[0].keys() == state[1].keys()
    assert 0 < apart(run / "step-3", place / "qwen") < 0.1
    assert same_files(run, resumed(run, place / "again", 2))
    for world in (1, 3):
        other = resumed(run, place / f"by-{world}", world)
        assert (other / f"step-3/trainer-{world - 1}.pt").exists()
        # rounding, which moves some weights by a gap of bfloat16
        assert apart(run / "step-3", other / "step-3") <= 1 / 128


@pytest.mark.exhaustive
def test_a_rank_without_questions_or_actions_does_not_hang(place):
    ranks(3, run_train, words_of(place, "few", "--questions", "1", "--minibatches", "4"))
    assert (place / "few/step-3/trainer-2.pt").exists()


@peft
@pytest.mark.parametrize("kind, changes", [("Qwen2", {}), ("Qwen3Moe", MOE)])
def test_a_run_with_adapters_resumes_to_the_bit_and_two_processes_train_them_as_one(
    place, kind, changes
):
    write(place / kind, kind, **changes)
    for world in (1, 2):
        words = words_of(place, f"{kind}-{world}", "--lora", "4", "--lr", "1e-3", model=kind)
        ranks(world, run_train, words)
    one, two = place / f"{kind}-1", place / f"{kind}-2"
    assert apart(one / "step-3", two / "step-3") < 3e-4
    assert apart(one / "step-0", one / "step-3") > 1e-3
    for run, world in ((one, 1), (two, 2)):
        assert same_files(run, resumed(run, place / f"{run.name}-again", world))
        other = resumed(run, place / f"{run.name}-other", 3 - world)  # each rank has all adapters
        assert apart(run / "step-3", other / "step-3") < 3e-4
    moved = [float(row["moved_max"]) for row in csv.DictReader(open(one / "evals.csv"))]
    assert moved[0] == 0 < moved[-1]


@peft
def test_a_checkpoint_with_adapters_answers_a_question(place):
    ranks(1, run_train, words_of(place, "lora", "--lora", "4", "--steps", "1"))
    command = [sys.executable, "solve.py", "a question", "--model", f"{place}/lora/step-1"]
    command += "--device cpu --max-turns 1 --tools base_generator".split()
    shown = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=100)
    names, sizes = zip(*re.findall(r"(?:planner|default) (.*?) \| (.*)", shown.stdout))
    assert names == (f"{place}/lora/step-1", f"{place}/qwen") and len({*sizes}) == 1  # one copy


@peft
def test_the_reference_is_the_model_though_other_modules_have_adapters_on_it(place):
    ranks(1, run_train, words_of(place, "fixed", "--lora", "4", "--steps", "1"))
    words = words_of(place, "beside", "--fixed", f"{place}/fixed/step-1", "--beta", "0.1")
    _, cast, frozen, reference, *_ = train.set_up(train.settings(train.given(words)))
    assert hasattr(cast[1]["default"].model, "peft_config") and frozen.model is reference
    assert not hasattr(reference, "peft_config")
    without = words_of(place, "no-kl", "--fixed", f"{place}/fixed/step-1", "--beta", "0")
    _, cast, frozen, reference, *_ = train.set_up(train.settings(train.given(without)))
    assert reference is None and adapters.moved(cast[0], frozen)["moved_max"] == 0


# --------------------------------------------------------------------------------------- torchrun
SCRIPT = f"""
import os, sys, time
sys.path[:0] = [{str(TESTS.parent)!r}, {str(TESTS)!r}]
import test_scale
if "--resume" in sys.argv and os.environ["RANK"] == "0":
    time.sleep(5)  # the other rank looks for this one, which is not there yet
test_scale.run_train(sys.argv[1:])
"""


def torchrun(place, *words):
    (place / "run.py").write_text(SCRIPT)
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    command = [sys.executable, *launch, str(place / "run.py"), *words]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet)


def wait_for(path, process):
    deadline = time.monotonic() + 120
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert path.exists(), process.communicate()[1]


@pytest.mark.exhaustive
def test_torchrun_that_is_asked_to_end_saves_and_the_run_goes_on(place):
    process = torchrun(place, *words_of(place, "ended", "--steps", "9999", "--every", "9999"))
    wait_for(place / "ended/log.csv", process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    last = len((place / "ended/log.csv").read_text().splitlines()) - 1
    assert (place / f"ended/step-{last}/trainer-1.pt").exists()


@pytest.mark.exhaustive
def test_a_rehearsal_resumes_on_all_processes(place):
    process = torchrun(place, *words_of(place, "night", "--rehearse", "--max-new-tokens", "20"))
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0 and (place / "night-rehearsal/step-2/trainer-1.pt").exists(), (
        errors
    )
