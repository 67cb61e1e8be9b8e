"""fast/upcast.py: a bfloat16 layer that computes in float32 is torch's own, but for rounding."""

from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from test_models import tokenizer, write

from fast import head
from fast.logps import token_logps
from flow_grpo import Action, log_probs
from fast import upcast
from models.loading import load_engine
from models.state import ready_to_update

HALF, FULL = (torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float32))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(upcast, "BLOCK", 100)


@pytest.fixture(params=[True, False])
def slow(monkeypatch, request):
    """The test runs as on a CPU that is slow in bfloat16, and as on one that is not."""
    monkeypatch.setattr(upcast, "slow", lambda: request.param)
    return request.param


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def near(value, exact, size):
    """Is a sum of products right, but for rounding? exact: in float64; size: the same sum of absolute values.

    A float32 sum of n terms is off by at most n x eps x size, whatever its order, and the result is rounded
    to bfloat16 once."""
    return bool(((value.double() - exact).abs() <= HALF / 2 * exact.abs() + 1000 * FULL * size).all())


@pytest.mark.parametrize("shape", [(1, 1), (3,), (1, 1000), (5, 7, 2)])
@pytest.mark.parametrize("bias, frozen", [(True, False), (False, False), (True, True)])
def test_values_and_gradients_are_those_of_torch_but_for_rounding(slow, bias, shape, frozen):
    x, weight, bias = random(*shape, 30), random(50, 30), random(50) if bias else None
    d_out, given = random(*shape, 50), [t for t in (x, None if frozen else weight, None if frozen else bias)
                                        if t is not None]
    for tensor in given:
        tensor.requires_grad_()
    out = upcast.linear(x, weight, bias)
    rows, d_rows, matrix = x.double().flatten(0, -2), d_out.double().flatten(0, -2), weight.double()
    offset = torch.zeros(50) if bias is None else bias.double()
    assert out.shape == (*shape, 50) and out.dtype == torch.bfloat16
    assert near(out.flatten(0, -2), rows @ matrix.T + offset, rows.abs() @ matrix.abs().T + offset.abs())
    exact = [(d_rows @ matrix, d_rows.abs() @ matrix.abs()), (d_rows.T @ rows, d_rows.T.abs() @ rows.abs()),
             (d_rows.sum(0), d_rows.abs().sum(0))]
    gradients = torch.autograd.grad(out, given, d_out)
    assert gradients[0].shape == x.shape and {g.dtype for g in gradients} == {torch.bfloat16}
    assert all(near(g.flatten(0, -2) if g.dim() > 1 else g, *values) for g, values in zip(gradients, exact))


@pytest.fixture
def folder(tmp_path, slow):
    return write(tmp_path / "model", tokenizer(), tie_word_embeddings=False)


def test_a_bfloat16_model_computes_in_float32_only_on_a_cpu_that_is_slow_in_bfloat16(folder, slow):
    for dtype, expected in (("bfloat16", slow), ("float32", False)):
        modules = load_engine(folder, dtype=dtype).model.modules()
        linears = [m for m in modules if isinstance(m, torch.nn.Linear)]
        assert len(linears) == 15 and {isinstance(m, upcast.Upcast) for m in linears} == {expected}


def test_a_saved_model_is_the_one_that_was_loaded(folder, tmp_path):
    write(tmp_path / "half", tokenizer(), tie_word_embeddings=False)
    load_engine(folder, dtype="bfloat16").save(tmp_path / "saved")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)


def test_the_head_stays_plain_and_its_chunks_have_the_gradient_of_the_whole(folder, monkeypatch):
    """Where a sum ends near the border between two bfloat16 numbers, another chunk may round it differently,
    in each of the eight products between the logits and this weight."""
    model = load_engine(folder, dtype="bfloat16").model
    actions = [Action([40, 41, 42], [50, 51, 52, 2], 0), Action([60], [61, 62], 1)]
    assert head.is_plain(model, log_probs)
    results = []
    for size in (2**25, 900):  # logits at a time: all of them, three rows of 300
        monkeypatch.setattr(head, "CHUNK", size)
        logps = token_logps(model, actions, 0.7, log_probs)
        results.append((logps, torch.autograd.grad(logps.sum(), model.model.layers[0].mlp.up_proj.weight)[0]))
    (one, d_one), (other, d_other) = results
    assert torch.allclose(one, other, atol=1e-5)
    assert (d_one - d_other).float().norm() < 8 * HALF * d_one.float().norm()


@pytest.mark.extras("peft")
def test_adapters_with_gradient_checkpointing_learn_as_without(folder):
    from scale import adapters
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = adapters.adapted(load_engine(folder, dtype="bfloat16"), rank=2)[0].model
        if checkpointing:
            model.activation_checkpointing_enable()
        ready_to_update(model)
        token_logps(model, [Action([40, 41, 42], [50, 51, 52, 2], 0)], 0.7, log_probs).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(*pair) for pair in zip(*gradients)) and any(g.any() for g in gradients[0])


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_the_measurement_leaves_the_number_of_threads_as_it_was(monkeypatch, error):
    def product(x, weight):
        assert torch.get_num_threads() == 1
        if error:
            raise error

    monkeypatch.setattr(upcast, "torch_linear", product)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.raises(error) if error else nullcontext():
        upcast.slow.__wrapped__()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
