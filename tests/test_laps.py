"""scale/laps.py: train.py --profile (that it changes nothing of a run: test_train.py)."""
from types import SimpleNamespace

import pytest
from test_flow_grpo import learn, lesson, tiny

from scale import laps, passes, report
from scale.laps import lap, table


@pytest.fixture
def clock(monkeypatch):
    """The time, which only this test moves."""
    now = [100.0]
    monkeypatch.setattr(laps, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for name in ("seconds", "phase", "since", "finish"):
        monkeypatch.setattr(laps, name, getattr(laps, name))
    return now


def test_every_second_counts_for_one_phase_and_a_phase_that_comes_again_adds_up(clock):
    laps.start()
    for phase, seconds in [("planner", 1), ("tools", 2), ("rest", 4), ("planner", 8), ("forward", 16)]:
        lap(phase)
        clock[0] += seconds
    assert table("step 1", {"padding": 0.25, "shared": 0.8}).splitlines() == [
        "profile step 1: 31.00 s",
        "        planner         9.00 s  29.0%",
        "        tools           2.00 s   6.5%",
        "        forward        16.00 s  51.6%",
        "        rest            4.00 s  12.9%",
        "        padding     25.0% of the update's slots",
        "        shared      80.0% of its tokens, computed once"]
    clock[0] += 3
    assert table("checkpoint") == "profile checkpoint: 3.00 s"  # it begins where the one before ended


def test_without_profile_there_is_no_table_and_no_clock_is_read(clock, monkeypatch):
    monkeypatch.setattr(laps, "time", None)
    lap("planner")
    assert table("step 1") == ""


def test_a_lap_waits_for_the_device_before_it_reads_the_clock(clock):
    def wait():
        clock[0] += 5  # what the device still has to do for the phase that ends
    laps.start(wait)
    lap("forward")
    lap("backward")
    assert "forward         5.00 s" in table("step 1") and clock[0] == 115


def test_an_update_names_its_phases_in_the_order_of_its_work(monkeypatch):
    names = []
    for module in (passes, report):
        monkeypatch.setattr(module, "lap", names.append)
    learn(tiny(), *lesson(), reference=tiny(1), minibatches=2)
    micro_batch = ["reference", "forward", "backward"]
    mini_batch = [*micro_batch, *micro_batch, "optimiser", "rest"]  # flat rollouts are a micro-batch apart
    assert names == ["old", *mini_batch, *mini_batch]
