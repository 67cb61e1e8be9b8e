"""scale/masters.py: bit for bit torch's AdamW, on float32 masters, however the state is saved, loaded or
moved.

There is no GPU here. State on the host is tested on CPU weights, with an optimizer that takes them to be
elsewhere. Copies between GPU and host: test_card.py, on a pretended GPU. Not covered: pinned memory. State
over several processes: test_ranks.py.
"""
import io
import weakref

import pytest
import torch

from scale import masters
from scale.masters import MasterAdamW

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Elsewhere(MasterAdamW):
    """State on the host, as for weights on a GPU."""

    def __init__(self, weights, **settings):
        super().__init__(weights, device="cpu", **settings)

    def apart(self, weight):
        return True


def on_cpu(weights, **settings):
    return MasterAdamW(weights, device="cpu", **settings)


def small(dtype=torch.float32):
    """A model with matrices, vectors and a weight that is used twice; the same one each time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(20, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 24), torch.nn.Tanh(),
        torch.nn.Linear(24, 16), torch.nn.Linear(16, 20, bias=False))
    model[5].weight = model[0].weight
    return model.to(torch.bfloat16).to(dtype)                 # the same start in every dtype


def give_gradients(model, step, some_missing=True):
    """Gradients that the step decides, the same in every dtype; every third time a weight gets none."""
    generator = torch.Generator().manual_seed(step)
    for i, weight in enumerate(model.parameters()):
        slope = torch.randint(-99, 100, weight.shape, generator=generator).to(weight.dtype) / 64
        weight.grad = None if some_missing and (step + i) % 3 == 0 else slope


def trained(make, dtype, steps=20, model=None, first=0, **settings):
    """(model, optimizer) after some steps on made-up gradients."""
    model = model or small(dtype)
    settings = {"lr": 1e-3, "weight_decay": 0.0} | settings
    optimizer = make(model.parameters(), **settings) if callable(make) else make
    for step in range(first, steps):
        give_gradients(model, step)
        optimizer.step()
    return model, optimizer


def masters_of(model, optimizer):
    return [optimizer.state[weight].get("master", weight) for weight in model.parameters()]


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def same(one, two):
    return equal(one.parameters(), two.parameters())


def saved(state):
    """Through a file and back, as in trainer.pt, with nothing in it that torch.load would not trust."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# torch's numbers

@pytest.mark.parametrize("lr, weight_decay", [(1e-6, 0.0), (1e-3, 0.0), (1e-3, 0.1)])
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_weights_of_any_precision_are_trained_as_by_torchs_adamw_on_float32_copies(dtype, lr, weight_decay):
    wide, settings = torch.promote_types(dtype, torch.float32), {"lr": lr, "weight_decay": weight_decay}
    ours, optimizer = trained(MasterAdamW, dtype, **settings)
    theirs, torchs = trained(torch.optim.AdamW, wide, **settings)
    assert equal(masters_of(ours, optimizer), theirs.parameters()) and same(ours, theirs.to(dtype))
    for state, wanted in zip(optimizer.state.values(), torchs.state.values(), strict=True):
        assert state.keys() - wanted.keys() == ({"master"} if dtype != wide else set())
        assert equal([state[name] for name in wanted], wanted.values())
        assert {tensor.dtype for name, tensor in state.items() if name != "step"} == {wide}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_groups_and_schedulers_are_obeyed_as_by_torch(dtype):
    ends = []
    for make, model in ((MasterAdamW, small(dtype)), (torch.optim.AdamW, small())):
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 1e-2, "betas": (0.5, 0.6)}, {"params": others}]
        optimizer = make(groups, lr=1e-3, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(5):
            give_gradients(model, step)
            optimizer.step()
            scheduler.step()
        ends.append(masters_of(model, optimizer))
    assert equal(*ends)


# What bfloat16 rounds away

def moved(make, dtype):
    """How weights of a language model's size move in 200 steps of the paper's size along a noisy slope."""
    generator = torch.Generator().manual_seed(0)
    start = (0.02 * torch.randn(64, 64, generator=generator)).bfloat16()
    slope = torch.randn(64, 64, generator=generator)
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
    assert cosine(ours) > 0.9 and cosine(plain) < 0.5
    assert lost(wanted) == 0 and lost(ours) < 0.3 and lost(plain) > 0.9


@pytest.mark.parametrize("make", [MasterAdamW, Elsewhere])
def test_one_float32_gradient_exists_at_a_time_and_the_weights_own_is_not_touched(make, monkeypatch):
    seen, alive, adamw, model = [], [], masters.adamw, small(torch.bfloat16)

    def spy(weights, gradients, *states, **settings):
        alive.append(sum(gradient() is not None for gradient in seen))
        seen.append(weakref.ref(gradients[0]))
        adamw(weights, gradients, *states, **settings)

    monkeypatch.setattr(masters, "adamw", spy)
    give_gradients(model, 1, some_missing=False)
    before = [weight.grad.clone() for weight in model.parameters()]
    make(model.parameters()).step()
    assert alive == [0] * 7 and equal(before, [weight.grad for weight in model.parameters()])


# Saved, loaded, moved

@pytest.mark.parametrize("make", [MasterAdamW, on_cpu, Elsewhere])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_run_resumed_half_way_equals_one_that_was_not(dtype, make):
    straight, _ = trained(make, dtype)
    half, optimizer = trained(make, dtype, steps=9)
    model, state = small(dtype), saved({"model": half.state_dict(), "optimizer": optimizer.state_dict()})
    model.load_state_dict(state["model"])
    fresh = make(model.parameters(), lr=5.0)                  # the state brings the settings as well
    fresh.load_state_dict(state["optimizer"])
    assert same(trained(fresh, dtype, model=model, first=9)[0], straight) and not same(half, straight)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_loading_leaves_the_given_state_as_it_was(dtype):
    model, optimizer = trained(Elsewhere, dtype, steps=3)     # float32 weights have a master on the host only
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
        assert torch.equal(state.get("master", weight), weight.float())
        assert torch.equal(state["exp_avg"], before["exp_avg"].float()) and state["step"] == before["step"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_device_of_the_weights_themselves_changes_nothing(dtype):
    (ours, optimizer), (beside, _) = trained(on_cpu, dtype), trained(MasterAdamW, dtype)
    assert same(ours, beside) and ("master" in optimizer.state_dict()["state"][0]) == (dtype != torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_on_the_host_gives_the_same_weights_but_for_a_last_bit(dtype):
    (ours, optimizer), (beside, near) = trained(Elsewhere, dtype), trained(MasterAdamW, dtype)
    for weight, wanted in zip(ours.parameters(), masters_of(beside, near)):
        master = optimizer.state[weight]["master"]
        assert torch.allclose(master, wanted, rtol=0, atol=2e-5) and torch.equal(weight, master.to(dtype))
        assert master.data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_run_can_move_its_state_to_the_host_and_back(dtype):
    model, optimizer = trained(MasterAdamW, dtype, steps=6)
    for first, make in ((6, Elsewhere), (12, MasterAdamW)):
        fresh = make(model.parameters())
        fresh.load_state_dict(saved(optimizer.state_dict()))
        model, optimizer = trained(fresh, dtype, model=model, steps=first + 6, first=first)
    straight, other = trained(MasterAdamW, dtype, steps=18)
    assert all(("master" in state) == (dtype != torch.float32) for state in optimizer.state.values())
    assert list(map(dict.keys, optimizer.state.values())) == list(map(dict.keys, other.state.values()))
    for master, wanted in zip(masters_of(model, optimizer), masters_of(straight, other), strict=True):
        assert torch.allclose(master, wanted, rtol=0, atol=2e-5)


def test_state_that_is_in_its_place_is_not_copied_at_each_step():
    model, optimizer = trained(MasterAdamW, torch.bfloat16, steps=3)
    tensors = lambda: {id(tensor) for state in optimizer.state.values() for tensor in state.values()}
    before = tensors()
    trained(optimizer, torch.bfloat16, model=model, steps=6, first=3)
    assert tensors() == before
