"""scale/sharding.py on gloo processes: the numbers of one process, in lock-step, also where memory is short.

Two real processes go through all scenarios; the tests look at what they left. Whole runs of train.py:
test_ranks.py. There is no GPU here: NCCL, CUDA's streams and pinned memory are not covered.
"""
import faulthandler
import os
import re
import sys
import warnings
from dataclasses import replace
from multiprocessing import set_forkserver_preload

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from test_flow_grpo import T, tiny, with_advantages
from test_flow_grpo import lesson as small_lesson

from fast import logps
from fast.sampling import sample
from flow_grpo import log_probs, update
from logbook import checkpoints
from models.state import sampling_mode
from scale import ranks, sharding
from scale.masters import local
from scale.lockstep import make_passes

pytestmark = pytest.mark.exhaustive  # two processes and all their scenarios: 20 seconds

SETTINGS = dict(temperature=T, beta=0.1, max_grad_norm=1e6)
BUDGET = 30  # tokens of a micro-batch: several in a mini-batch
OFTEN = dict(minibatches=2)  # with old log-probs of a forward pass of their own
KINDS = [(torch.float64, False), (torch.float64, True), (torch.bfloat16, False), (torch.bfloat16, True)]


# What a rank does

class Recorder:
    """An optimizer that only remembers the gradients it got, whole."""

    def __init__(self, model):
        self.model, self.gradients = model, []

    def step(self):
        self.gradients.append(torch.cat([whole(weight.grad).flatten() for weight in self.model.parameters()]))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def sharded(model, host=False):
    sharding.shard(model, host)
    return model


def lesson():
    """A lesson twice, so that each rank has several micro-batches in each mini-batch."""
    actions, A = small_lesson()
    actions = with_advantages(actions, A)
    return actions + [replace(a, rollout=a.rollout + len(A)) for a in actions], range(2 * len(A))


def learn(part, fault=None, **settings):
    """One update: (the gradients, the report)."""
    model, reference = tiny(), tiny(1).requires_grad_(False)
    scoring = logps.scoring(log_probs, model, reference)  # before they are sharded
    sharded(model), sharded(reference)
    model.activation_checkpointing_enable()
    optimizer = Recorder(model)
    if fault:
        fault(model, reference)
    passes = make_passes(model, reference, *scoring, token_budget=BUDGET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Out of memory: from here on ...
        report = update(passes, optimizer, *part, **SETTINGS | settings)
    return optimizer.gradients, report


def count_down(calls, then):
    """A hook that runs out of memory at its calls-th call."""
    left = [calls]

    def hook(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError
        then(*arguments)
    return hook


def forward(module, calls=1):
    module.register_forward_pre_hook(count_down(calls, lambda *_: None))


def backward(module, calls=1):
    """In the backward pass, where the module's gradient comes in."""
    fails = count_down(calls, lambda gradient: None)

    def hook(_, inputs, output):
        if output.requires_grad:
            output.register_hook(fails)
    module.register_forward_hook(hook)


FAULTS = {  # where memory is short on the second rank
    "policy, forward, at the first layer": lambda policy, reference: forward(policy.model.layers[0]),
    "policy, forward, later": lambda policy, reference: forward(policy.model.layers[1].mlp, 3),
    "reference, forward": lambda policy, reference: forward(reference.model.layers[1].mlp, 2),
    "policy, backward, at the last layer": lambda policy, reference: backward(policy.model.norm),
    "policy, backward, later": lambda policy, reference: backward(policy.model.layers[0].mlp, 2),
}


def always(policy, reference):
    """However small the batch is."""
    def hook(*_):
        raise torch.OutOfMemoryError
    policy.model.layers[1].register_forward_pre_hook(hook)


def train(model, optimizer, steps):
    """Learn from this rank's part of made-up batches."""
    for step in steps:
        x = ranks.share(torch.randint(0, 60, (6, 9), generator=torch.Generator().manual_seed(step)))
        model.zero_grad()
        logps = model(x, use_cache=False).logits.float().log_softmax(-1)[:, :-1]
        (-logps.gather(-1, x[:, 1:, None]).sum() / 48).backward()
        optimizer.step()


def ends(model, optimizer):
    """{name: weight}, whole: as the model computes with them, and as the optimizer keeps them."""
    kept = {name: whole(tensor) for name, tensor in checkpoints.tensors_of(optimizer).items()}
    sharding.gather(model)
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}, kept


def trained(folder, dtype, host):
    """Three steps, a checkpoint, and two more: (the weights, what is kept, how much of it by this rank)."""
    model = sharded(tiny().to(dtype), host)
    optimizer = sharding.adamw(model, 1e-3, host)
    train(model, optimizer, range(3))
    checkpoint = folder / f"{dtype}-{host}-{ranks.WORLD}"
    checkpoint.mkdir(exist_ok=True)
    checkpoints.write_trainer(checkpoint / "trainer", optimizer)
    train(model, optimizer, range(3, 5))
    numbers = sum(local(tensor).numel() for tensor in checkpoints.tensors_of(optimizer).values())
    return *ends(model, optimizer), numbers


def resumed(folder, dtype, host, world):
    """The two steps after the checkpoint that `world` ranks have written."""
    model = sharded(tiny(7).to(dtype), host)
    optimizer = sharding.adamw(model, 1e-3, host)
    checkpoints.restore(folder / f"{dtype}-{host}-{world}", optimizer)
    train(model, optimizer, range(3, 5))
    return ends(model, optimizer)


def sampled(number):
    """Completions of `number` prompts, with the weights gathered: the other rank has others, or none."""
    model = sharded(tiny())
    sharding.gather(model)
    draws = torch.rand(number, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    with sampling_mode(model):
        return sample(model, [[5, 6, 7 + i] for i in range(number)], [], T, 6, [*draws]) if number else []


def scenarios(folder, world):
    """{name: what it left} of this rank."""
    if world == 3:
        return {"resumed": {kind: resumed(folder, *kind, 2) for kind in KINDS[:2]}}
    left = {"trained": {kind: trained(folder, *kind) for kind in KINDS}}
    ranks.wait()
    left["resumed"] = {kind: resumed(folder, *kind, 1) for kind in KINDS}
    if world == 2:
        left["sampled"] = sampled(ranks.RANK)
        part = lesson()
        left |= {"once": learn(part), "often": learn(part, **OFTEN)}
        left["tokens"] = learn(part, **OFTEN, token_mean=True)
        for name, fault in FAULTS.items():
            left[name] = learn(part, fault if ranks.RANK == 1 else None, **OFTEN)
        with pytest.raises(MemoryError) as why:
            learn(part, always if ranks.RANK == 1 else None)
        left["always"] = str(why.value)
        left["afterwards"] = learn(part)
    return left


def process(rank, world, folder):
    faulthandler.dump_traceback_later(300, exit=True)  # ranks that wait for each other would wait for ever
    torch.set_num_threads(1)
    ranks.RANK, ranks.WORLD = rank, world
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{world}", rank=rank, world_size=world)
    torch.save(scenarios(folder, world), folder / f"left{rank}of{world}")
    dist.destroy_process_group()


def fork_ranks(function, world, *arguments):
    """function(rank, world, *arguments) in each of so many processes. They are forks of one process that has
    imported these files, because importing torch takes longer than what a rank does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # where the fork server finds these files
        set_forkserver_preload(["test_sharding", "test_ranks"])
        start_processes(function, (world, *arguments), nprocs=world, start_method="forkserver")


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """left(world): what each rank has left."""
    folder, found = tmp_path_factory.mktemp("ranks"), {}

    def of(world):
        if world not in found:
            if world > 1:
                of(world - 1)
            fork_ranks(process, world, folder)
            files = [folder / f"left{rank}of{world}" for rank in range(world)]
            found[world] = [torch.load(file, weights_only=False) for file in files]
        return found[world]
    return of


# What it must be

def same(one, other, within):
    return one.keys() == other.keys() and all(
        torch.allclose(one[name].double(), other[name].double(), rtol=0, atol=within) for name in one)


def test_the_gradient_of_two_ranks_is_that_of_one_process_also_with_several_mini_batches(left):
    for way, settings in (("once", {}), ("often", OFTEN), ("tokens", OFTEN | dict(token_mean=True))):
        alone, report = learn(lesson(), **settings)
        for gradients, of_rank in (rank[way] for rank in left(2)):
            assert len(gradients) == len(alone) == report["steps"]
            assert all((x - y).abs().max() < 1e-6 * y.norm() for x, y in zip(gradients, alone))
            for name in ("loss", "kl", "entropy", "grad_norm", "tokens", "steps"):
                assert of_rank[name] == pytest.approx(report[name], abs=1e-5)


def test_ranks_sample_alone_from_gathered_weights(left):
    (ids, logps), = sampled(1)
    assert left(2)[0]["sampled"] == [] and left(2)[1]["sampled"][0][0] == ids
    assert left(2)[1]["sampled"][0][1] == pytest.approx(logps, abs=1e-5)


@pytest.mark.parametrize("where", FAULTS)
def test_if_memory_is_short_on_one_rank_all_halve_and_the_gradients_stay(left, where):
    for rank in left(2):
        (wanted, calm), (gradients, report) = rank["often"], rank[where]
        assert len(wanted) == len(gradients) == 2 and calm["halved"] == 0 and report["halved"] == 1
        assert all((x - y).abs().max() < 1e-9 * x.norm() for x, y in zip(wanted, gradients))
    assert left(2)[0][where][1]["token_budget"] == left(2)[1][where][1]["token_budget"] < BUDGET


def test_if_a_row_does_not_fit_on_one_rank_both_end_with_a_sentence_and_can_go_on(left):
    first, second = left(2)
    assert first["always"] == "a row of another process does not fit into memory"
    assert re.fullmatch(r"one row of \d+ tokens does not fit into memory", second["always"])
    assert all(torch.equal(rank["afterwards"][0][0], rank["once"][0][0]) for rank in (first, second))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_rank_keeps_about_half_and_all_have_the_same_weights(left, kind):
    (one, kept, first), (other, _, second) = (rank["trained"][kind] for rank in left(2))
    assert same(one, other, 0) and first < 0.6 * (first + second) > second
    assert {tensor.dtype for tensor in kept.values()} <= {torch.float32, torch.float64}
    assert {tensor.dtype for tensor in one.values()} == {kind[0]}


@pytest.mark.parametrize("host", [False, True])
def test_two_ranks_learn_what_one_process_learns(left, host):
    (_, kept, _), (_, wanted, _) = left(2)[0]["trained"][torch.float64, host], left(1)[0]["trained"][
        torch.float64, host]
    assert same(kept, wanted, 1e-7)  # log-probs in float32: a gradient near Adam's eps of 1e-8 may tell
    start = dict(tiny().named_parameters())
    assert min((kept[name] - start[name]).abs().max() for name in start) > 1e-3


@pytest.mark.parametrize("host", [False, True])
def test_one_process_in_bfloat16_trains_float32_masters_as_written_by_hand(left, host):
    """The model is the rounding of its masters, and AdamW moves the masters by the model's gradient."""
    model = tiny().bfloat16()
    masters = [weight.detach().float() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.0, fused=host or None)

    class ByHand:
        def step(self):
            for master, weight in zip(masters, model.parameters()):
                master.grad = weight.grad.float()
            optimizer.step()
            with torch.no_grad():
                for master, weight in zip(masters, model.parameters()):
                    weight.copy_(master)

    train(model, ByHand(), range(5))
    weights, kept, _ = left(1)[0]["trained"][torch.bfloat16, host]
    for (name, weight), master in zip(model.named_parameters(), masters, strict=True):
        assert torch.equal(weights[name], weight) and torch.equal(kept[name], master)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_checkpoint_resumes_to_the_bit_at_the_same_number_of_ranks(left, kind):
    _, kept, _ = left(1)[0]["trained"][kind]
    assert same(left(1)[0]["resumed"][kind][1], kept, 0)


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
def test_a_checkpoint_of_one_rank_resumes_on_two(left, kind):
    assert same(left(2)[0]["resumed"][kind][1], left(1)[0]["trained"][kind][1], 1e-7)


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
def test_a_checkpoint_of_two_ranks_resumes_on_three(left, kind):
    assert all(same(rank["resumed"][kind][1], left(2)[0]["trained"][kind][1], 1e-7) for rank in left(3))
