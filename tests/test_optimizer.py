"""optimizer.py: bit for bit torch's AdamW, on float32 masters, whatever is saved, moved or shared out on the way.

There is no GPU here. What state on the host does differently (a float32 weight's own master, copies, the fused kernel) is run
on CPU weights by telling the optimizer that they are elsewhere. Not covered: copies that cross a bus, and pinned memory.
"""
import io
import os
import sys
import weakref
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"          # before transformers reads it: no test asks the network
import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from scale import masters as module
from scale import ranks
from scale.masters import MasterAdamW

torch.set_num_threads(1)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Oracle(torch.optim.AdamW):
    """What train.py had before: AdamW itself, on float32 copies of all the weights."""

    def __init__(self, weights, **settings):
        self.weights = list(weights)
        super().__init__([w if w.dtype == torch.float32 else w.detach().float() for w in self.weights], **settings)

    @torch.no_grad()
    def step(self):
        masters = self.param_groups[0]["params"]
        for weight, master in zip(self.weights, masters):
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step()
        for weight, master in zip(self.weights, masters):
            weight.copy_(master)


class Elsewhere(MasterAdamW):
    """State on the host of weights that are not: here they are, but it does not know."""

    def apart(self, weight):
        return True


def elsewhere(weights, **settings):
    return Elsewhere(weights, device="cpu", **settings)


def on_cpu(weights, **settings):
    return MasterAdamW(weights, device="cpu", **settings)


def small(dtype=torch.float32):
    """A model with matrices, vectors and a weight that is used twice; the same one each time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 24), torch.nn.Tanh(),
                                torch.nn.Linear(24, 16), torch.nn.Linear(16, 20, bias=False))
    model[5].weight = model[0].weight
    return model.to(torch.bfloat16).to(dtype)                 # the same start in every dtype


def give_gradients(model, step, some_missing=True):
    """Gradients that the step decides; now and then a weight gets none."""
    generator = torch.Generator().manual_seed(step)
    for i, weight in enumerate(model.parameters()):
        slope = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        weight.grad = None if some_missing and (step + i) % 3 == 0 else slope


def trained(make, dtype, steps=20, model=None, first=0, **settings):
    """(model, optimizer) after some steps on made-up gradients."""
    model = model or small(dtype)
    optimizer = make(model.parameters(), **{"lr": 1e-3, "weight_decay": 0.0} | settings) if callable(make) else make
    for step in range(first, steps):
        give_gradients(model, step)
        optimizer.step()
    return model, optimizer


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def saved(state):
    """Through a file and back, as in trainer.pt, with nothing in it that torch.load would not trust."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# The same numbers as before

@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_float32_model_is_trained_as_by_torchs_adamw_bit_for_bit(weight_decay):
    ours, optimizer = trained(MasterAdamW, torch.float32, weight_decay=weight_decay)
    theirs, torchs = trained(torch.optim.AdamW, torch.float32, weight_decay=weight_decay)
    assert same(ours, theirs) and not same(ours, small())
    for mine, its in zip(optimizer.state.values(), torchs.state.values(), strict=True):
        assert mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in its)


@pytest.mark.parametrize("lr", [1e-6, 1e-3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_of_any_precision_is_trained_as_train_py_did_before(dtype, lr):
    ours, optimizer = trained(MasterAdamW, dtype, lr=lr)
    theirs, oracle = trained(Oracle, dtype, lr=lr)
    assert same(ours, theirs)
    masters = [optimizer.state[weight].get("master", weight) for weight in ours.parameters()]
    assert all(torch.equal(mine, its) for mine, its in zip(masters, oracle.param_groups[0]["params"], strict=True))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_language_model_learns_the_same_as_before_with_its_gradient_clipped(dtype):
    from transformers import Qwen2Config, Qwen2ForCausalLM
    ids, ends = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1)), []
    for make in (MasterAdamW, Oracle):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                             num_attention_heads=2, num_key_value_heads=1)).to(dtype)
        optimizer = make(model.parameters(), lr=1e-5, weight_decay=0.0)
        for _ in range(10):
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        ends.append(model)
    assert same(*ends)


def test_a_float64_model_is_trained_in_float64_as_by_torch():
    assert same(trained(MasterAdamW, torch.float64)[0], trained(torch.optim.AdamW, torch.float64)[0])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_groups_and_schedulers_are_obeyed_as_by_torch(dtype):
    ends = []
    for make in (MasterAdamW, torch.optim.AdamW):
        model = small(dtype) if make is MasterAdamW else small()
        one, *others = model.parameters()
        optimizer = make([{"params": [one], "lr": 1e-2, "betas": (0.5, 0.6)}, {"params": others}], lr=1e-3, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(5):
            torch.manual_seed(step)
            for weight in model.parameters():
                weight.grad = torch.randn(weight.shape).bfloat16().to(weight.dtype)
            optimizer.step()
            scheduler.step()
        ends.append([optimizer.state[weight].get("master", weight) for weight in model.parameters()])
    assert all(torch.equal(mine, its) for mine, its in zip(*ends))


# What bfloat16 cannot hold

def moved(make, dtype):
    """How weights as large as a language model's have moved after 200 steps of the paper's size along a noisy slope."""
    generator = torch.Generator().manual_seed(0)
    start, slope = (0.02 * torch.randn(64, 64, generator=generator)).bfloat16(), torch.randn(64, 64, generator=generator)
    weight = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = make([weight], lr=1e-6, weight_decay=0.0)
    for _ in range(200):
        weight.grad = (slope + torch.randn(64, 64, generator=generator)).to(dtype)
        optimizer.step()
    return (weight.detach().float() - start.float()).flatten()


def test_bfloat16_weights_follow_the_float32_update_where_plain_adamw_loses_it():
    wanted, ours = moved(torch.optim.AdamW, torch.float32), moved(MasterAdamW, torch.bfloat16)
    plain = moved(torch.optim.AdamW, torch.bfloat16)
    cosine = lambda a: torch.nn.functional.cosine_similarity(a, wanted, dim=0)
    lost = lambda a: (a == 0).float().mean()
    assert cosine(ours) > 0.9 and cosine(plain) < 0.5 and lost(wanted) == 0 and lost(ours) < 0.3 and lost(plain) > 0.9


def test_steps_too_small_for_the_weight_add_up_until_it_moves():
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    optimizer, values = MasterAdamW([weight], lr=1e-4), []
    for _ in range(60):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        values.append(weight.item())
    assert values[:18] == [1.0] * 18 and values[20] == 1 - 2**-8          # half the gap below 1 is 2**-9, some 19.5 steps
    assert abs(optimizer.state[weight]["master"].item() - (1 - 60e-4)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_weight_is_always_its_master_rounded_and_the_state_is_float32(dtype):
    model, optimizer = trained(MasterAdamW, dtype, steps=3)
    for weight in model.parameters():
        state = optimizer.state[weight]
        assert ("master" in state) == (dtype != torch.float32)
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
        assert torch.equal(weight, state.get("master", weight).to(dtype)) and weight.dtype == dtype


def test_a_weight_without_a_gradient_stays_and_costs_nothing():
    first, *others = small(torch.bfloat16).parameters()
    optimizer, before = MasterAdamW([first, *others]), [weight.clone() for weight in others]
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert list(optimizer.state) == [first] and all(torch.equal(a, b) for a, b in zip(others, before))


@pytest.mark.parametrize("make", [MasterAdamW, elsewhere])
def test_one_float32_gradient_at_a_time_is_alive_and_the_weights_own_is_not_touched(make, monkeypatch):
    seen, alive = [], []

    def spy(masters, gradients, *states, **settings):
        alive.append(sum(gradient() is not None for gradient in seen))
        seen.append(weakref.ref(gradients[0]))
        real(masters, gradients, *states, **settings)

    real, model = module.adamw, small(torch.bfloat16)
    monkeypatch.setattr(module, "adamw", spy)
    give_gradients(model, 1, some_missing=False)
    before = [weight.grad.clone() for weight in model.parameters()]
    optimizer = make(model.parameters())
    optimizer.step()
    assert len(alive) == 7 and set(alive) == {0} and all(torch.equal(a, w.grad) for a, w in zip(before, model.parameters()))
    optimizer.zero_grad()
    assert all(weight.grad is None for weight in model.parameters())


# Saved and loaded

@pytest.mark.parametrize("make", [MasterAdamW, on_cpu, elsewhere])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_run_resumed_half_way_equals_one_that_was_not(dtype, make):
    straight, _ = trained(make, dtype)
    half, optimizer = trained(make, dtype, steps=9)
    model, state = small(dtype), saved({"model": half.state_dict(), "optimizer": optimizer.state_dict()})
    model.load_state_dict(state["model"])
    fresh = make(model.parameters(), lr=5.0)                  # its settings come from the state as well
    fresh.load_state_dict(state["optimizer"])
    assert same(trained(fresh, dtype, model=model, first=9)[0], straight) and not same(half, straight)


def test_loading_does_not_round_where_torchs_own_loading_would():
    model, optimizer = trained(MasterAdamW, torch.bfloat16)
    one, two = MasterAdamW(model.parameters()), MasterAdamW(model.parameters())
    one.load_state_dict(optimizer.state_dict())
    torch.optim.Optimizer.load_state_dict(two, optimizer.state_dict())
    for weight in model.parameters():
        for name in ("master", "exp_avg", "exp_avg_sq"):
            was = optimizer.state[weight][name]
            assert torch.equal(one.state[weight][name], was) and not torch.equal(two.state[weight][name].float(), was)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_loading_leaves_the_given_state_as_it_was(dtype):
    model, optimizer = trained(elsewhere, dtype, steps=3)     # a float32 weight's master, which nobody needs beside the weight
    state = optimizer.state_dict()
    names = [list(entry) for entry in state["state"].values()]
    MasterAdamW(model.parameters()).load_state_dict(state)
    assert [list(entry) for entry in state["state"].values()] == names and "master" in names[0]


def test_a_state_that_does_not_fit_the_model_is_refused():
    _, optimizer = trained(MasterAdamW, torch.float32, steps=1)
    with pytest.raises(ValueError, match="size of optimizer's group"):
        MasterAdamW([torch.nn.Parameter(torch.ones(2))]).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_state_of_plain_adamw_is_taken_over(dtype):
    model, optimizer = trained(torch.optim.AdamW, dtype, steps=5)
    ours = MasterAdamW(model.parameters())
    ours.load_state_dict(saved(optimizer.state_dict()))
    for weight in model.parameters():
        state, before = ours.state[weight], optimizer.state[weight]
        assert torch.equal(state.get("master", weight), weight.float()) and state["exp_avg"].dtype == torch.float32
        assert torch.equal(state["exp_avg"], before["exp_avg"].float()) and state["step"] == before["step"]


# State elsewhere than the weight

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_device_of_the_weights_themselves_changes_nothing(dtype):
    (ours, optimizer), (beside, _) = trained(on_cpu, dtype), trained(MasterAdamW, dtype)
    assert same(ours, beside) and ("master" in optimizer.state_dict()["state"][0]) == (dtype != torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_on_the_host_gives_the_same_weights_but_for_a_last_bit(dtype):
    (ours, optimizer), (beside, near) = trained(elsewhere, dtype), trained(MasterAdamW, dtype)
    for weight, other in zip(ours.parameters(), beside.parameters()):
        state, master = optimizer.state[weight], near.state[other].get("master", other)
        assert torch.allclose(state["master"], master, rtol=0, atol=2e-6) and torch.equal(weight, state["master"].to(dtype))
        assert state["master"].data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_run_can_move_its_state_to_the_host_and_back(dtype):
    model, optimizer = trained(MasterAdamW, dtype, steps=6)
    for first, make in ((6, elsewhere), (12, MasterAdamW)):
        moved = make(model.parameters())
        moved.load_state_dict(saved(optimizer.state_dict()))
        model, optimizer = trained(moved, dtype, model=model, steps=first + 6, first=first)
    straight, other = trained(MasterAdamW, dtype, steps=18)
    for weight, wanted in zip(model.parameters(), straight.parameters()):
        mine, its = optimizer.state[weight], other.state[wanted]
        assert mine.keys() == its.keys() and ("master" in mine) == (dtype != torch.float32)
        assert torch.allclose(mine.get("master", weight), its.get("master", wanted), rtol=0, atol=2e-6)


def test_state_that_is_in_its_place_is_not_copied_at_each_step():
    model, optimizer = trained(MasterAdamW, torch.bfloat16, steps=3)
    before = {id(tensor) for state in optimizer.state.values() for tensor in state.values()}
    trained(optimizer, torch.bfloat16, model=model, steps=6, first=3)
    assert {id(tensor) for state in optimizer.state.values() for tensor in state.values()} == before


# Shared out over processes

def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 20, (8, 5), generator=generator), torch.randint(0, 20, (8, 5), generator=generator)


def learn(model, optimizer, steps, rank=0, world=1):
    """Train on this process's share of each batch; the gradients are summed as flow_grpo.update() does."""
    for step in steps:
        x, y = (tensor[rank::world] for tensor in data(step))
        model.zero_grad()
        (torch.nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten(), reduction="sum") / 40).backward()
        for weight in model.parameters() if world > 1 else ():
            dist.all_reduce(weight.grad)
        optimizer.step()
    return model


def process(rank, folder):
    """One of two: five steps, a checkpoint, three more; then the three once more, from the checkpoint alone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ranks.RANK, ranks.WORLD = rank, 2
    zero = lambda model, lr: ZeroRedundancyOptimizer(model.parameters(), optimizer_class=MasterAdamW, lr=lr)
    for dtype in DTYPES[:2]:
        model = small(dtype)
        optimizer = zero(model, 1e-3)
        learn(model, optimizer, range(5), rank, 2)
        state = ranks.state_of(optimizer)
        if rank == 0:
            torch.save([model.state_dict(), state], f"{folder}/{dtype}.checkpoint")
        dist.barrier()
        weights, state = torch.load(f"{folder}/{dtype}.checkpoint", weights_only=True)
        end, again = learn(model, optimizer, range(5, 8), rank, 2), small(dtype)
        again.load_state_dict(weights)
        fresh = zero(again, 5.0)
        ranks.load(fresh, state)
        learn(again, fresh, range(5, 8), rank, 2)
        late = ranks.state_of(fresh)
        mine = sum(tensor.numel() for states in optimizer.optim.state.values() for tensor in states.values())
        torch.save([end.state_dict(), again.state_dict(), mine, late], f"{folder}/{dtype}.{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.spawn(process, (str(folder),), nprocs=2)
    return lambda dtype: [torch.load(folder / f"{dtype}.{end}") for end in ("checkpoint", 0, 1)]


def alike(one, two, within=0.0):
    return all(torch.allclose(one[name], two[name], rtol=0, atol=within) for name in one)


def test_two_processes_give_the_weights_of_one(two):
    model = small()
    learn(model, MasterAdamW(model.parameters(), lr=1e-3), range(8))
    _, (first, _, _, _), (second, _, _, _) = two(torch.float32)
    assert alike(first, second) and alike(first, model.state_dict(), within=1e-6)
    assert not alike(first, small().state_dict(), within=1e-3)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_each_process_keeps_about_half_of_the_state(two, dtype):
    _, (_, _, first, _), (_, _, second, _) = two(dtype)
    numbers = 2 if dtype == torch.float32 else 3
    whole = numbers * sum(weight.numel() for weight in small().parameters()) + 7          # and 7 counters
    assert first + second == whole and max(first, second) < 0.65 * whole


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_two_processes_go_on_from_their_checkpoint_as_if_nothing_had_been(two, dtype):
    for straight, resumed, _, _ in two(dtype)[1:]:
        assert alike(straight, resumed)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_checkpoint_of_two_processes_is_whole_float32_and_good_for_one(two, dtype):
    (weights, state), (end, _, _, late), _ = two(dtype)
    tensors = [tensor for states in [*state["state"].values(), *late["state"].values()] for tensor in states.values()]
    assert {tensor.dtype for tensor in tensors} == {torch.float32} and len(state["state"]) == len(late["state"]) == 7
    model = small(dtype)
    model.load_state_dict(weights)
    optimizer = MasterAdamW(model.parameters())
    optimizer.load_state_dict(state)
    learn(model, optimizer, range(5, 8))
    assert alike(end, model.state_dict(), within=1e-6 if dtype == torch.float32 else 2e-3)
