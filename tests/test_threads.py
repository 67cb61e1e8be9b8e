"""scale/threads.py: torch's number of threads is measured once, and a resumed run keeps it."""
from types import SimpleNamespace

import pytest
import torch
from test_flow_grpo import tiny

from cli import setup
from models.local import HF
from scale import threads


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("one, four, number", [(1.0, 0.5, 4), (1.0, 0.76, 4), (1.0, 0.78, 1), (1.0, 30.0, 1)])
def test_all_cores_are_taken_only_if_they_are_clearly_faster(one, four, number):
    chosen, why = threads.faster(4, {1: one, 4: four}.get)
    assert chosen == number and f"4 compute {one / four:.2f} times as fast as 1" in why


def test_one_slow_moment_does_not_decide():
    times = iter([1.0, 50.0, 1.0, 0.5, 90.0, 0.5, 1.0, 0.5, 1.0, 0.5])
    assert threads.faster(2, lambda threads: next(times))[0] == 2


def test_a_measurement_that_takes_long_is_not_repeated(monkeypatch):
    monkeypatch.setattr(threads, "SECONDS", 1e-9)
    assert threads.faster(2, lambda threads: threads)[0] == 1
    calls = []
    monkeypatch.setattr(threads, "SECONDS", 0.02)
    threads.faster(2, lambda number: calls.append(number) or threads.time.sleep(0.02) or 1.0)
    assert calls == [1, 2]


def test_where_nobody_has_chosen_it_is_measured_without_a_random_number(monkeypatch):
    torch.set_num_threads(2)
    engine, asked, state = HF(tiny(), None), [], torch.get_rng_state()
    monkeypatch.setattr(threads, "faster", lambda cores, seconds_of: asked.append(seconds_of(1)) or (1, "so"))
    assert threads.choose(engine) == "threads 1 of 2: so" and torch.get_num_threads() == 1
    assert asked[0] > 0 and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_users_choice_comes_before_that_of_a_resumed_run_and_neither_is_measured(monkeypatch, name):
    monkeypatch.setattr(threads, "faster", None)
    torch.set_num_threads(3)
    assert threads.choose(HF(tiny(), None), 2).startswith("threads 2 of 3: ") and torch.get_num_threads() == 2
    monkeypatch.setenv(name, "2")
    assert threads.choose(HF(tiny(), None), 1).startswith("threads 2 of 2: ") and torch.get_num_threads() == 2


def test_a_resumed_run_that_had_more_cores_measures_anew(monkeypatch):
    monkeypatch.setattr(threads, "faster", lambda cores, seconds_of: (1, "so"))
    torch.set_num_threads(2)
    assert threads.choose(HF(tiny(), None), 3) == "threads 1 of 2: so" and torch.get_num_threads() == 1


def test_on_a_gpu_and_for_a_server_nothing_is_chosen(monkeypatch):
    monkeypatch.setattr(threads, "faster", None)
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


@pytest.mark.parametrize("slower, dtype", [(0.5, "bfloat16"), (0.9, "float32"), (4.1, "float32")])
def test_a_cpu_takes_bfloat16_only_if_a_product_is_clearly_faster_in_it(monkeypatch, slower, dtype):
    seconds = {torch.float32: 1.0, torch.bfloat16: slower}
    monkeypatch.setattr(threads, "products", lambda number, size, dtype, mlps: seconds[dtype])
    why = f"bfloat16 takes {slower} times as long as float32 here"
    assert threads.pick_cpu_dtype(1, 576) == (dtype, why)


def test_the_products_that_decide_are_real_ones_and_draw_no_random_number():
    state = torch.get_rng_state()
    slower, why = threads.slowness(torch.bfloat16, 1, 576)
    assert f"takes {slower:.1f} times" in why and 0.01 < slower < 1000
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_in_half_precision_on_a_cpu_is_told_what_that_costs(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    dtypes = torch.float32, torch.bfloat16
    in_float32, in_half = (threads.choose(HF(tiny().to(dtype), None)) for dtype in dtypes)
    assert "dtype" not in in_float32
    assert in_half.startswith(f"{in_float32}\ndtype   bfloat16 takes ")
