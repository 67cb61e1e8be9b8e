"""scale/command_line.py: it answers at once, and refuses in one sentence what cannot work."""
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scale.command_line import after_loading, solve_arguments, train_arguments
from tools import TOOLS

ROOT = Path(__file__).parents[1]


def parsed(monkeypatch, arguments, *argv):
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    return arguments(TOOLS)


def refused(monkeypatch, capsys, arguments, *argv):
    with pytest.raises(SystemExit) as stop:
        parsed(monkeypatch, arguments, *argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", [
    "solve.py --help", "train.py --help-all", "train.py --data nowhere.jsonl", "solve.py --tools googel",
    "solve.py --data README.md", "train.py --valid LICENSE", "solve.py --model bench", "train.py --fixed ./x",
    "train.py --judge localhost:8000/v1", "solve.py --dtype float3", "train.py --corpus nowhere.jsonl",
    "solve.py --compare bench toy"])
def test_help_and_mistakes_are_answered_before_torch_and_transformers_are_imported(command):
    script, *flags = command.split()
    code = ("import runpy, sys; sys.modules |= dict.fromkeys(['torch', 'transformers', 'tokenizers'])\n"
            f"sys.argv = {[script, *flags]!r}; runpy.run_path({script!r}, run_name='__main__')")
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == (0 if "--help" in command else 2) and "Traceback" not in ended.stderr
    assert "--help" in command or ended.stderr.startswith(f"{script}: ") and ended.stderr.count("\n") == 1


def test_garbage_is_collected_again_once_the_models_are_loaded():
    gc.disable()
    try:
        after_loading()
        assert gc.isenabled() and (frozen := gc.get_freeze_count())
        after_loading()
        assert gc.get_freeze_count() == frozen  # only once: what is frozen is never freed
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.parametrize("arguments, hidden", [
    (train_arguments, "--clip-high"), (solve_arguments, "--dtype")])
def test_help_shows_at_most_25_flags_and_help_all_shows_the_rest(monkeypatch, capsys, arguments, hidden):
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parsed(monkeypatch, arguments, flag)
    usual, everything = capsys.readouterr().out.split("usage: ")[1:]
    assert len(re.findall(r"^  -", usual, re.M)) <= 25 and hidden not in usual and hidden in everything


REFUSED = {
    "--step 3": "unrecognized arguments: --step 3",  # no flag may be shortened
    "--group-size 1": "--group-size 1 has no baseline",
    "--max-turns 0": "--max-turns 0 does nothing",
    "--lora 0": "--lora 0 does nothing",
    "--temperature 0": "--temperature 0.0 does not sample",
    "--temperature inf": "--temperature inf does not sample",
    "--temperature nan": "--temperature nan does not sample",
    "--lr nan": "--lr nan cannot work",
    "--lr -1": "--lr -1.0 cannot work",
    "--beta -1": "--beta -1.0 cannot work",
    "--clip-low 2": "--clip-low 2.0 cannot work",
    "--data nowhere.jsonl": "nowhere.jsonl: no such file",
    "--valid nowhere.jsonl": "nowhere.jsonl: no such file",
    "--tools python_coder googel": "no tool is called 'googel'",
    "--model http://localhost:8000/v1#m": "--model must be local weights",
    "--out tests": "tests exists already and is not written over",
    "--resume tests": "tests is not the folder of a run",
    "--resume nowhere": "nowhere is not the folder of a run",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_work_is_refused_with_a_sentence_and_code_2(monkeypatch, capsys, flags):
    monkeypatch.chdir(ROOT)
    assert REFUSED[flags] in refused(monkeypatch, capsys, train_arguments, *flags.split())


def settings_of_a_run(folder, monkeypatch, **changed):
    """args.json as a run of the toy leaves it, with some settings changed; `...` leaves one out."""
    settings = vars(parsed(monkeypatch, train_arguments, "--out", str(folder / "new"))) | changed
    settings = {name: value for name, value in settings.items() if value is not ...}
    (folder / "args.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("flags", ["--lr 1", "--temperature 0.7", "--token-mean", "--steps 0"])
def test_resuming_takes_only_a_new_number_of_steps_beside_the_run(tmp_path, monkeypatch, capsys, flags):
    settings_of_a_run(tmp_path, monkeypatch, steps=4, lr=0.5)  # 0.7: the default
    error = refused(monkeypatch, capsys, train_arguments, "--resume", str(tmp_path), *flags.split())
    assert f"leave out {flags.split()[0]}" in error
    args = parsed(monkeypatch, train_arguments, "--resume", str(tmp_path), "--steps", "9")
    assert (args.steps, args.lr, args.group_size) == (9, 0.5, 8)


@pytest.mark.parametrize("argv, tools, question", [
    (["--tools", "python_coder,base_generator", "2 + 2?"], ["python_coder", "base_generator"], "2 + 2?"),
    (["--tools", "python_coder", "base_generator", "2+2?"], ["python_coder", "base_generator"], "2+2?"),
    (["Which, a or b?", "--tools", "python_coder"], ["python_coder"], "Which, a or b?"),
    (["--tools", "python_coder,", "base_generator"], ["python_coder", "base_generator"], None)])
def test_tools_are_named_with_commas_or_spaces_and_swallow_no_question(monkeypatch, argv, tools, question):
    args = parsed(monkeypatch, solve_arguments, *argv)
    assert args.tools == tools and args.question == question


def test_another_model_has_data_and_a_judge_and_the_toy_has_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # without a runs/ of an earlier training
    args, qwen = parsed(monkeypatch, train_arguments, "--model", "Qwen/Qwen2.5-7B"), "Qwen/Qwen2.5-7B"
    assert (args.data, args.valid, args.test, args.judge) == ("nq+deepmath", None, None, qwen)
    assert (args.steps, args.questions, args.group_size, args.max_turns, args.lr) == (32, 32, 8, 3, None)
    args = parsed(monkeypatch, train_arguments)
    assert args.judge is None
    assert args.data.endswith("toy/train.jsonl") and args.test.endswith("toy/test.jsonl")


@pytest.mark.parametrize("flags, judge", [
    ([], "a/b"), (["--judge", "none"], None), (["--judge", "c/d"], "c/d"), (["--fixed", "e/f"], "e/f")])
def test_the_judge_is_the_fixed_model_unless_another_or_none_is_named(monkeypatch, flags, judge):
    for arguments in (train_arguments, solve_arguments):
        assert parsed(monkeypatch, arguments, "--model", "a/b", *flags).judge == judge


def test_one_question_has_no_gold_and_needs_no_judge(monkeypatch):
    assert parsed(monkeypatch, solve_arguments, "--model", "a/b", "Who?").judge is None


def test_ctrl_c_during_the_imports_leaves_no_traceback(tmp_path):
    process = subprocess.Popen([sys.executable, "train.py", "--out", tmp_path / "run"], cwd=ROOT,
                               stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    maps, deadline = Path(f"/proc/{process.pid}/maps"), time.time() + 60
    while "libtorch" not in maps.read_text() and time.time() < deadline:  # the imports have begun
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and "Traceback" not in error and out == ""


@pytest.mark.exhaustive
def test_a_terminal_without_letters_is_no_reason_to_stop():
    argv = [sys.executable, "solve.py", "Où est Curaçao?", "--max-turns", "1"]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=120,
                           env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert rb"O\xf9 est Cura\xe7ao?" in ended.stdout
    assert ended.returncode == 0 and b"Traceback" not in ended.stderr
