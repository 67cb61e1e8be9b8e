"""Training on a GPU, on a machine without one (card.py): there a run has the numbers that it has on the CPU.

What most first runs on a GPU fail on: a tensor left on the CPU, .numpy(), a random state, a dtype. A run
trains float32 weights, adapters on a bfloat16 base, or bfloat16 weights with their masters on the host.

Not covered: all weights in bfloat16 with their masters on the GPU. That run is sharded with one process
(scale/sharding.py), and fully_shard asks CUDA itself for its device, which a wrapper in Python cannot answer.
Its numbers are tested on the CPU (test_sharding.py). Nor are several GPUs, kernels, a real lack of memory.
"""
import inspect
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import card
import pytest
import torch
from card import Card
from safetensors.torch import load_file
from test_flow_grpo import in_memory
from test_models import CHATML, write
from test_train import (
    at,
    command,
    even_is_right,
    everything,
    in_trainer,
    interrupt,
    jsonl,
    rows,
    signals_as_before,  # noqa: F401  a fixture
    words,
    wordy,
)

import flow_grpo
import solve
from cli.flags import TOY
from fast import head, logps, sampling, trees, upcast
from flow_grpo import Action
from models import local
from models.loading import load_engine
from scale import fit, report, sharding
from scale.passes import Passes

torch.set_num_threads(1)
HERE, THERE = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "cuda"  # a tensor on the CPU, and the GPU
pytestmark = pytest.mark.exhaustive

REFUSED = {
    "a sum": lambda x: x + HERE,
    "a product": lambda x: x @ HERE,
    "a layer whose weights stayed behind": torch.nn.Linear(2, 2),
    "a CPU tensor of no dimension in a list": lambda x: torch.stack([x[0, 0], HERE[0, 0]]),
    "a condition": lambda x: torch.where(HERE > 1, x, 0.0),
    "places to gather": lambda x: x.gather(1, torch.tensor([[0], [1]])),
    "an index on the GPU into a tensor on the CPU": lambda x: HERE[x[0].long() - 1],
    "new values for some rows": lambda x: x.index_put_((torch.tensor([0]),), HERE[0]),
    "a number of the CPU that is written": lambda x: HERE[0, 0].clone().add_(x[0, 0]),
    "a mask": lambda x: x.masked_fill(HERE > 1, 0.0),
    "ids of an embedding": lambda x: torch.nn.functional.embedding(torch.tensor([0]), x),
    "a product of integers": lambda x: x.long() @ x.long(),
    "numpy": lambda x: x.numpy(),
    "a CPU generator": lambda x: torch.rand(2, device=THERE, generator=torch.Generator()),
    "a CPU generator, in place": lambda x: x.uniform_(generator=torch.Generator()),
    "a generator of the GPU, on the CPU": lambda x: torch.rand(2, generator=torch.Generator(THERE)),
}
ALLOWED = {
    "a number": lambda x: (x + HERE[0, 0], HERE + HERE[0, 0]),
    "a number under a mask": lambda x: (x.masked_fill(x > 1, HERE[0, 0]), HERE.masked_fill(HERE > 1, 1.0)),
    "an index on the CPU": lambda x: (x[torch.tensor([1])], HERE[[1]]),
    "a mask on the CPU as an index": lambda x: (x[torch.tensor([True, False])], HERE[[0]]),
    "a number for some rows": lambda x: (x.index_put((torch.tensor([0]),), HERE[0, 0]), [[1, 1], [3, 4]]),
    "a copy into a part": lambda x: (x.copy_(HERE.flip(0)), HERE.flip(0)),
    "tolist": lambda x: (x.tolist(), HERE),
    "item": lambda x: (x[1, 1].item(), 4.0),
    "a row chosen by the GPU": lambda x: (HERE[x[0, 0].long()], HERE[1]),
    "ready-made, elsewhere": lambda x: (torch.zeros_like(x, device="cpu") + HERE, HERE),
    "new_tensor": lambda x: (x.new_tensor([1, 2]) + x[0], [2.0, 4.0]),
    "a move with another dtype": lambda x: (HERE.to(x.device, torch.float64) + x, 2 * HERE),
}


@pytest.fixture
def gpu():
    with card.gpu():
        yield torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=THERE)


# The rules of a GPU, as CUDA has them

@pytest.mark.parametrize("what", REFUSED)
def test_what_a_gpu_refuses_is_refused(gpu, what):
    with pytest.raises((RuntimeError, TypeError), match="same device|numpy|for generator|for integers"):
        REFUSED[what](gpu)


@pytest.mark.parametrize("what", ALLOWED)
def test_what_a_gpu_allows_is_allowed_and_right(gpu, what):
    found, wanted = ALLOWED[what](gpu)
    found = torch.as_tensor(found).cpu()
    assert torch.equal(found, torch.as_tensor(wanted, dtype=found.dtype))


def test_gradients_are_on_the_gpu_and_come_back_with_a_copy(gpu):
    weight, here = gpu.requires_grad_(), HERE.clone().requires_grad_()
    (weight * here.to(THERE)).cpu().sum().backward()
    assert isinstance(weight.grad, Card) and torch.equal(weight.grad.cpu(), HERE)
    assert not isinstance(here.grad, Card) and torch.equal(here.grad, HERE)


def test_the_gpu_has_random_numbers_of_its_own(gpu):
    torch.manual_seed(0)
    ours, theirs, state = torch.rand(2), torch.rand(2, device=THERE), torch.get_rng_state()
    assert torch.equal(ours, theirs.cpu())  # one seed for both
    torch.rand(2, device=THERE)
    assert torch.equal(torch.get_rng_state(), state)
    gpu.uniform_()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_is_moved_in_place_so_that_tied_weights_stay_tied(gpu):
    model = load_engine(str(TOY)).model
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head is embeddings and isinstance(head, Card) and isinstance(head, torch.nn.Parameter)
    assert head.dtype == torch.bfloat16  # without --dtype


# What the code would have to do wrong

PLANTED = {  # the module and the function that it calls, what stands there, and the fault
    "advantages on the CPU": (flow_grpo, "add_gradient", "a.A for a in micro]).to(logp.device)",
                              "a.A for a in micro])"),
    "tokens on the CPU": (trees, "layout", "x.to(model.device)", "x"),
    "random numbers on the CPU": (sampling, "sample", ".to(ids.device, wide)", ".to(wide)"),
    "tokens to try the head on the CPU": (head, "is_linear", ", device=model.device", ""),
    "numpy": (report, "measure", "ratio.min().item()", "ratio.min().numpy().item()"),
    "two devices in a report": (report, "measure", ", device=logp.device)", ")"),
}


def plant(monkeypatch, module, name, right, wrong):
    """The function with a fault in its source."""
    function = getattr(module, name)
    source, names = inspect.getsource(function), dict(inspect.unwrap(function).__globals__)
    assert right in source
    exec(source.replace(right, wrong), names)
    monkeypatch.setattr(module, name, names[name])


def lesson(device):
    """The planner samples answers and learns from them: (the answers, the report, the weights)."""
    engine = load_engine("model", device, "float32")
    torch.manual_seed(0)
    answers = engine(["hi", "hi", "a longer one"], temperature=1.0, max_new_tokens=5)
    A = 1.0, -1.0, 0.5
    actions = [Action(one.prompt_ids, one.ids, i, A[i], one.logps) for i, one in enumerate(answers)]
    optimizer = sharding.adamw(engine.model, lr=1e-3)
    passes = Passes(engine.model, None, *logps.scoring(flow_grpo.log_probs, engine.model))
    assert trees.shares(engine.model)  # else an error of the GPU was taken for a model that takes no mask
    learned = flow_grpo.update(passes, optimizer, actions, range(3), temperature=1.0, minibatches=2)
    return [answer.ids for answer in answers], learned, [weight.cpu() for weight in engine.model.parameters()]


@pytest.fixture
def fused(monkeypatch):
    """The CPU computes AdamW as the GPU does: otherwise the two differ in last bits."""
    make = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *given, **settings: make(
        *given, **settings | {"fused": True}))


@pytest.fixture
def place(tmp_path, monkeypatch, fused):
    """A folder with a tiny model and its questions (test_train.py). The head's logits come in chunks."""
    stops = {"eos_token_id": [2, *range(20, 150)]}
    write(tmp_path / "model", wordy(CHATML), generation=stops, max_position_embeddings=4096)
    jsonl(tmp_path / "data.jsonl", *"abcde")
    jsonl(tmp_path / "valid.jsonl", *"vw")
    monkeypatch.setattr(solve, "roll_out", even_is_right)
    monkeypatch.setattr(head, "CHUNK", 5000)
    monkeypatch.setattr(upcast, "slow", lambda: False)  # or the CPU alone would compute in float32
    monkeypatch.setattr(fit, "bound_host_memory", lambda: None)  # it would bind this process for good
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("what", PLANTED)
def test_a_fault_that_no_test_on_the_cpu_can_see_is_seen_on_the_gpu(place, monkeypatch, what):
    plant(monkeypatch, *PLANTED[what])
    lesson("cpu")
    with card.gpu(), pytest.raises((RuntimeError, TypeError), match="same device|numpy"):
        lesson("cuda")


def test_an_update_on_the_gpu_moves_every_weight_as_on_the_cpu(place):
    with card.gpu():
        ids, report, weights = lesson("cuda")
    wanted_ids, wanted_report, wanted = lesson("cpu")
    assert ids == wanted_ids and report == pytest.approx(wanted_report, rel=1e-4, abs=1e-6)
    for one, other in zip(weights, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_after_a_lack_of_memory_the_gpu_goes_on_with_the_random_numbers_of_the_first_try(gpu):
    drawn = []  # in each try, by the CPU and by the GPU

    def work(batch):
        drawn.append((torch.rand(1).item(), torch.rand(1, device=THERE).item()))
        if len(batch) > 2:
            raise torch.OutOfMemoryError

    with pytest.warns(UserWarning, match="Out of memory"):
        in_memory(work, range(4), lambda item: 1, 4)
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn) == 3


def test_a_lack_of_memory_while_adapters_are_merged_is_not_taken_for_a_full_disk(place, monkeypatch):
    monkeypatch.setattr(local.HF, "save", Mock(side_effect=torch.OutOfMemoryError))
    code = command(*words("run", steps=1, max_turns=1, valid="none", test="none"))
    assert "the checkpoint does not fit into memory: give --" in code and "disk" not in code


# A run of train.py

def on_cpu(**settings):
    """The folder of a run of two steps on the CPU."""
    flags = {"steps": 2, "gradient_checkpointing": True, "max_turns": 1} | settings
    assert command(*words("cpu", **flags)) == 0
    return Path("cpu")


def on_gpu(monkeypatch, **settings):
    """The folder of the same run on the GPU, stopped after its first step and resumed."""
    with card.gpu():
        with monkeypatch.context() as patch:
            at(1, interrupt, patch)
            assert command(*words("gpu", **{"steps": 2, "max_turns": 1, "device": None} | settings)) == 130
        assert command("train.py", "--resume", "gpu") == 0
    return Path("gpu")


@pytest.mark.exhaustive
def test_on_a_gpu_a_run_that_is_stopped_and_resumed_is_the_run_on_the_cpu(place, monkeypatch, capsys):
    found = on_gpu(monkeypatch)
    out = capsys.readouterr().out
    assert "of 80 GB on the GPU" in out and "| cuda:0 | float32" in out
    assert json.loads((found / "args.json").read_text())["gradient_checkpointing"] is True
    assert everything(found, 2) == everything(on_cpu(), 2)
    assert all(float(row["grad_norm"]) > 0 for row in rows(found))


@pytest.mark.exhaustive
def test_masters_on_the_host_move_bfloat16_weights_on_the_gpu_as_on_the_cpu(place, monkeypatch, capsys):
    settings = dict(optimizer_device="cpu", valid="none", test="none")
    found = on_gpu(monkeypatch, dtype=None, **settings)
    assert "| cuda:0 | bfloat16" in capsys.readouterr().out
    other, start = on_cpu(dtype="bfloat16", **settings), load_file("model/model.safetensors")
    one, wanted = (in_trainer(folder / "step-2") for folder in (found, other))
    assert one.keys() == wanted.keys() and all(torch.equal(one[name], wanted[name]) for name in one)
    assert max((one[name] - start[name]).abs().max() for name in start) > 1e-3
    weights = load_file(found / "step-2" / "model.safetensors")
    assert all(torch.equal(weights[name], one[name].bfloat16()) for name in start)


@pytest.mark.extras("peft")
def test_adapters_on_a_gpu_are_those_of_the_cpu(place, monkeypatch):
    folders = on_gpu(monkeypatch, lora=4, dtype=None), on_cpu(lora=4, dtype="bfloat16")
    assert everything(folders[0], 2) == everything(folders[1], 2)
    one, other = (folder / "step-2" / "adapters" / "adapter_model.safetensors" for folder in folders)
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.exhaustive
def test_a_step_of_the_toy_on_a_gpu_is_that_on_the_cpu_and_its_planner_answers(
        tmp_path, monkeypatch, capsys, fused):
    monkeypatch.setattr(fit, "bound_host_memory", lambda: None)
    flags = ("--steps 1 --questions 1 --group-size 3 --max-turns 1 --seed 1 --dtype float32 "
             "--valid none --test none --out").split()
    with card.gpu():
        assert command("train.py", *flags, str(tmp_path / "gpu")) == 0
        question = ["--max-turns", "1", "What is 2 + 3?"]
        monkeypatch.setattr(sys, "argv", ["solve.py", "--model", str(tmp_path / "gpu" / "step-1"), *question])
        solve.main()
    out = capsys.readouterr().out
    assert "of 80 GB for the weights, in bfloat16" in out and "turn 1 planner" in out
    assert command("train.py", *flags, str(tmp_path / "cpu"), "--device", "cpu") == 0
    (one,), (other,) = rows(tmp_path / "gpu"), rows(tmp_path / "cpu")
    assert one == other and float(one["grad_norm"]) > 0
