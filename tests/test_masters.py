"""scale/masters.py: torch's AdamW on float32 masters in the host's memory, a weight at a time.

There is no GPU here: the weights are on the CPU, too. Copies from and to a GPU: test_card.py, on a pretended
one. Sharded weights, checkpoints: test_sharding.py. Not covered: pinned memory.
"""
import weakref

import pytest
import torch

from scale import masters
from scale.masters import HostAdamW

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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


def trained(make, dtype, steps=20, **settings):
    """(model, optimizer) after some steps on made-up gradients."""
    model = small(dtype)
    optimizer = make(model.parameters(), **{"lr": 1e-3, "weight_decay": 0.0} | settings)
    for step in range(steps):
        give_gradients(model, step)
        optimizer.step()
    return model, optimizer


def masters_of(model, optimizer):
    return [optimizer.state[weight].get("master", weight) for weight in model.parameters()]


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# torch's numbers

@pytest.mark.parametrize("lr, weight_decay", [(1e-6, 0.0), (1e-3, 0.0), (1e-3, 0.1)])
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_weights_of_any_precision_are_trained_as_by_torchs_adamw_on_float32_copies(dtype, lr, weight_decay):
    wide, settings = torch.promote_types(dtype, torch.float32), {"lr": lr, "weight_decay": weight_decay}
    ours, optimizer = trained(HostAdamW, dtype, **settings)
    theirs, torchs = trained(torch.optim.AdamW, wide, fused=True, **settings)
    assert equal(masters_of(ours, optimizer), theirs.parameters())
    assert equal(ours.parameters(), theirs.to(dtype).parameters())
    for state, wanted in zip(optimizer.state.values(), torchs.state.values(), strict=True):
        assert state.keys() - wanted.keys() == {"master"}
        assert equal([state[name] for name in wanted], wanted.values())
        assert {tensor.dtype for name, tensor in state.items() if name != "step"} == {wide}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_fused_torchs_numbers_differ_by_a_last_bit_in_each_step(dtype):
    steps = 20
    ours, optimizer = trained(HostAdamW, dtype, steps)
    theirs, _ = trained(torch.optim.AdamW, torch.float32, steps)
    for master, wanted in zip(masters_of(ours, optimizer), theirs.parameters(), strict=True):
        # Each of the two rounds each weight once a step, by half a last bit at most. The moves, a thousandth
        # of the weights in size, are rounded much finer: one more half for them.
        last_bit = torch.finfo(torch.float32).eps * wanted.abs().max()
        assert (master - wanted).abs().max() <= steps * 1.5 * last_bit


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_groups_and_schedulers_are_obeyed_as_by_torch(dtype):
    ends = []
    for make, model in ((HostAdamW, small(dtype)), (torch.optim.AdamW, small())):
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 1e-2, "betas": (0.5, 0.6)}, {"params": others}]
        optimizer = make(groups, lr=1e-3, weight_decay=0.1, **{} if make is HostAdamW else {"fused": True})
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(5):
            give_gradients(model, step)
            optimizer.step()
            scheduler.step()
        ends.append(masters_of(model, optimizer))
    assert equal(*ends)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_master_shares_no_memory_with_its_weight_and_is_there_after_the_first_gradient(dtype):
    model = small(dtype)
    optimizer = HostAdamW(model.parameters(), lr=1e-3)
    give_gradients(model, 0)  # the first weight gets none
    optimizer.step()
    assert set(optimizer.state) == {weight for weight in model.parameters() if weight.grad is not None}
    for weight, state in optimizer.state.items():
        assert state["master"].data_ptr() != weight.data_ptr() and not state["master"].requires_grad


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
    wanted, ours = moved(torch.optim.AdamW, torch.float32), moved(HostAdamW, torch.bfloat16)
    plain = moved(torch.optim.AdamW, torch.bfloat16)
    cosine = lambda a: torch.nn.functional.cosine_similarity(a, wanted, dim=0)
    lost = lambda a: (a == 0).float().mean()
    assert cosine(ours) > 0.9 and cosine(plain) < 0.5
    assert lost(wanted) == 0 and lost(ours) < 0.3 and lost(plain) > 0.9


def test_one_float32_gradient_exists_at_a_time_and_the_weights_own_is_not_touched(monkeypatch):
    seen, alive, adamw, model = [], [], masters.adamw, small(torch.bfloat16)

    def spy(weights, gradients, *states, **settings):
        alive.append(sum(gradient() is not None for gradient in seen))
        seen.append(weakref.ref(gradients[0]))
        adamw(weights, gradients, *states, **settings)

    monkeypatch.setattr(masters, "adamw", spy)
    give_gradients(model, 1, some_missing=False)
    before = [weight.grad.clone() for weight in model.parameters()]
    HostAdamW(model.parameters()).step()
    assert alive == [0] * 7 and equal(before, [weight.grad for weight in model.parameters()])


def test_state_that_is_in_its_place_is_not_copied_at_each_step():
    model = small(torch.bfloat16)
    optimizer, seen = HostAdamW(model.parameters()), []
    for step in range(6):
        give_gradients(model, step, some_missing=False)
        optimizer.step()
        seen.append({id(tensor) for state in optimizer.state.values() for tensor in state.values()})
    assert all(tensors == seen[0] for tensors in seen)
