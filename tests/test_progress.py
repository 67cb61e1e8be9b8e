"""Progress: a bar on a terminal, once a minute elsewhere, and only from rank 0."""

import io
import re
import sys
import time
from types import SimpleNamespace

import pytest
from test_solve import GO_ON, STOP, TOOLS, Cast, questions

import solve
from cli import progress


class Terminal(io.StringIO):
    isatty = lambda self: True


@pytest.fixture
def slow():
    """A run in which the verifier takes its time, and stops one of three questions at once."""
    def verify(prompt):
        time.sleep(0.05)
        return STOP if "a?" in prompt else GO_ON
    fixed, settings = Cast(verifier=verify), {"max_turns": 2}
    return lambda watch=None: solve.evaluate(
        questions("a?", "b?", "c?"), Cast(), fixed, TOOLS, watch=watch, **settings)


def test_without_a_terminal_the_bar_is_printed_once_a_minute(slow, monkeypatch, capsys):
    monkeypatch.setattr(progress, "MINUTE", 0.02)
    with progress.Progress(3) as bar:
        slow(bar)
    out, frames = capsys.readouterr()
    assert out == "" and re.search(r"1/3 .*, (turn 2 \w+|generator)\]", frames)


def test_a_run_shorter_than_a_minute_prints_nothing_without_a_terminal(slow, capsys):
    with progress.Progress(3) as bar:
        slow(bar)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_a_bar_names_turn_and_module_and_leaves_nothing_behind(slow, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.Progress(3) as bar:
        slow(bar)
    *frames, last, end = sys.stderr.getvalue().split("\r")
    assert any("0/3" in frame and "turn 1 verifier" in frame for frame in frames)
    assert any("1/3" in frame and "turn 2 executor" in frame for frame in frames)
    assert last.strip() == "" and end == ""                     # the line is blank again


def test_with_several_batches_the_rollouts_of_all_count_and_the_accuracy_so_far_is_shown(slow, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.Progress(9, "bamboogle") as shown:
        rollouts = slow()[1]  # three of the nine, each with the right answer
        shown.next_batch(rollouts)
        shown([*rollouts[:1], SimpleNamespace(stopped=False, failed="")], 2, "verifier")
        frame = sys.stderr.getvalue().split("\r")[-1]
    assert re.match(r"bamboogle, accuracy 1.000: .* 4/9 .*, turn 2 verifier", frame)


@pytest.mark.parametrize("stream, drawn", [(Terminal, True), (io.StringIO, False)])
def test_a_text_above_the_bar_draws_it_again_on_a_terminal_alone(monkeypatch, capsys, stream, drawn):
    monkeypatch.setattr(sys, "stderr", stream())
    with progress.Progress(9) as shown:
        begun = len(sys.stderr.getvalue())
        shown.write("a trace")
        assert ("0/9" in sys.stderr.getvalue()[begun:]) is drawn
    assert capsys.readouterr().out == "a trace\n"


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_under_torchrun_only_rank_0_shows_anything(slow, monkeypatch, stream):
    monkeypatch.setattr(progress, "RANK", "1")
    monkeypatch.setattr(progress, "MINUTE", 0.01)
    monkeypatch.setattr(sys, "stderr", stream())
    slow()
    assert sys.stderr.getvalue() == ""
