"""scale/threads.py: a rule chooses torch's number of threads, and a resumed run keeps its own."""
from types import SimpleNamespace

import pytest
import torch
from test_flow_grpo import tiny

from cli import setup
from fast import upcast
from models.local import HF
from scale import threads


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("small, line", [
    (33, "threads 1 of 2: the model is small (OMP_NUM_THREADS chooses)"),
    (32, "threads 2 of 2: all cores (OMP_NUM_THREADS chooses)")])
def test_a_small_model_gets_one_thread_and_a_larger_one_all_cores(monkeypatch, small, line):
    monkeypatch.setattr(threads, "SMALL", small)
    torch.set_num_threads(2)
    assert threads.choose(HF(tiny(), None)) == line
    assert torch.get_num_threads() == int(line.split()[1])


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_users_choice_comes_before_that_of_a_resumed_run_and_both_before_the_rule(monkeypatch, name):
    torch.set_num_threads(3)
    assert threads.choose(HF(tiny(), None), 2).startswith("threads 2 of 3: ") and torch.get_num_threads() == 2
    monkeypatch.setenv(name, "2")
    assert threads.choose(HF(tiny(), None), 1).startswith("threads 2 of 2: ") and torch.get_num_threads() == 2


def test_a_resumed_run_that_had_more_cores_follows_the_rule():
    torch.set_num_threads(2)
    assert threads.choose(HF(tiny(), None), 3).startswith("threads 1 of 2: the model is small")


def test_on_a_gpu_and_for_a_server_nothing_is_chosen():
    on_gpu = HF(SimpleNamespace(device=torch.device("cuda")), None)
    assert threads.choose(on_gpu) == threads.choose(SimpleNamespace(model="a-name")) == ""


@pytest.mark.parametrize("line, stored", [("threads 2 of 2: so", 2), ("", None)])
def test_a_number_that_nobody_chose_is_not_stored_for_a_resumed_run(monkeypatch, capsys, line, stored):
    monkeypatch.setattr(setup.loading, "load_engine", lambda *settings: HF(tiny(), None))
    monkeypatch.setattr(setup.fit, "bound_host_memory", lambda: None)
    monkeypatch.setattr(threads, "choose", lambda engine, number: line)
    torch.set_num_threads(2)
    args = SimpleNamespace(model="a-name", device="cpu", dtype=None, think=None, plain=False, lora=None,
                           threads=None, gradient_checkpointing=False, optimizer_device=None, lr=1e-4, beta=0,
                           fixed="other", executor=None, verifier=None, generator=None, judge=None)
    setup.load_models(args, None)
    assert args.threads == stored and args.dtype == "float32" and capsys.readouterr().out.strip() == line


@pytest.mark.parametrize("slow", [True, False])
def test_a_bfloat16_model_on_a_cpu_that_is_slow_in_it_gets_a_second_line(monkeypatch, slow):
    monkeypatch.setattr(upcast, "slow", lambda: slow)
    in_float32, in_half = (threads.choose(HF(tiny().to(dtype), None)) for dtype in (
        torch.float32, torch.bfloat16))
    second = "\ndtype   bfloat16; this CPU is slow in it, so linear layers compute in float32"
    assert in_half == in_float32 + second * slow
