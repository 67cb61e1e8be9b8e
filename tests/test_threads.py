"""scale/threads.py: a rule chooses torch's number of threads."""
from types import SimpleNamespace

import pytest
import torch
from test_flow_grpo import tiny

from models.local import HF
from scale import threads


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_small_model_gets_one_thread(monkeypatch):
    assert threads.choose(HF(tiny(), None)) == (
        "threads 1 of 2: the model is small (OMP_NUM_THREADS chooses)")
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_users_choice_comes_before_the_rule(monkeypatch, name):
    monkeypatch.setenv(name, "2")
    assert threads.choose(HF(tiny(), None)) == "" and torch.get_num_threads() == 2


def test_for_a_larger_model_on_a_gpu_and_for_a_server_nothing_changes(monkeypatch):
    on_gpu = HF(SimpleNamespace(device=torch.device("cuda")), None)
    monkeypatch.setattr(threads, "SMALL", 32)  # the hidden size of tiny()
    for engine in (HF(tiny(), None), on_gpu, SimpleNamespace(model="a-name")):
        assert threads.choose(engine) == "" and torch.get_num_threads() == 2
