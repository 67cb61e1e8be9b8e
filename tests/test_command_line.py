"""cli/command_line.py: it answers at once, and refuses in one sentence what cannot work."""
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.command_line import after_loading, before_imports, solve_arguments, train_arguments
from logbook.endings import errors_leave
from logbook.records import read_answers
from models.names import check_model
from tools import TOOLS
from world.toolbox import choose

ROOT = Path(__file__).parents[1]


def parsed(monkeypatch, arguments, *argv):
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    return arguments(TOOLS)


def refused(monkeypatch, capsys, arguments, *argv):
    with pytest.raises(SystemExit) as stop:
        parsed(monkeypatch, arguments, *argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


ANSWERED = [
    "solve.py --help", "train.py --help", "train.py --data nowhere.jsonl", "solve.py --tools googel",
    "train.py --valid nowhere.jsonl",
    "solve.py --model bench", "solve.py --fixed= why?",
    "train.py --judge localhost:8000/v1", "solve.py --dtype float3", "train.py --corpus nowhere.jsonl",
    "solve.py --compare bench toy", "solve.py what is 2 + 2",
    "solve.py --fixed http://localhost:1 why?"]


# Each command line in a fork of one process, which has imported the command line, and cannot import the rest.
IN_FORKS = """
import os, runpy, sys
sys.modules |= dict.fromkeys(["torch", "transformers", "tokenizers"])
import cli.command_line
for n, command in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        os.dup2(os.open(f"{os.environ['OUT']}/{n}", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = command.split()
        runpy.run_path(sys.argv[0], run_name="__main__")
    print(os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)
"""


def test_help_and_mistakes_are_answered_before_torch_and_transformers_are_imported(tmp_path):
    ran = subprocess.run([sys.executable, "-c", IN_FORKS, *ANSWERED], cwd=ROOT, capture_output=True,
                         text=True, timeout=300, env=os.environ | {"OUT": str(tmp_path)})
    for n, (command, code) in enumerate(zip(ANSWERED, ran.stderr.split(), strict=True)):
        error = (tmp_path / str(n)).read_text()
        assert "Traceback" not in error and int(code) == (0 if "--help" in command else 2), (command, error)
        assert "--help" in command or error.startswith(command.split()[0] + ": ") and error.count("\n") == 1


MISTAKES = {
    "--benchmark-dir folder": "--benchmark-dir holds the files of benchmarks: name them with --benchmark",
    "what is 2 + 2": "'is' is no flag (put a question of several words into quotes): see --help",
    "why? --limits": "'--limits' is no flag (did you mean --limit?): see --help",
    "why? --wherefore": "'--wherefore' is no flag: see --help",
    "toy/test.jsonl": "toy/test.jsonl is a file: to answer its questions, give --data toy/test.jsonl",
    "toy/tset.jsonl": "There is no file toy/tset.jsonl here, and it is no question",
    "--model=": "--model is empty: give a value, or leave it out",
    "--benchmark bamboogle nope": "invalid choice: 'nope' (choose from "}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_of_solve_py_is_a_sentence_that_says_what_to_type(monkeypatch, capsys, flags):
    monkeypatch.chdir(ROOT)
    assert MISTAKES[flags] in refused(monkeypatch, capsys, solve_arguments, *flags.split())


@pytest.mark.parametrize("saved, meant", [
    (["best", "step-2"], "best"), (["step-2", "step-10"], "step-10"), ([], "")])
def test_the_folder_of_a_training_is_no_model_but_its_checkpoint_is_named(tmp_path, saved, meant):
    for name in saved:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    for refuse in (check_model, read_answers):
        with pytest.raises(ValueError) as why:
            refuse(str(tmp_path))
        assert str(why.value).endswith(f" Did you mean {tmp_path / meant}?") == bool(saved)


def test_a_missing_best_and_a_checkpoint_to_resume_name_what_is_there(tmp_path, monkeypatch, capsys):
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "config.json").write_text("{}")
    (tmp_path / "args.json").write_text("{}")
    with pytest.raises(ValueError, match=f"There is no folder .* Did you mean {tmp_path / 'step-2'}\\?"):
        check_model(str(tmp_path / "best"))
    error = refused(monkeypatch, capsys, train_arguments, "--resume", str(tmp_path / "step-2"))
    assert f"leave --resume out (did you mean --resume {tmp_path}?)" in error


def test_the_toys_examples_get_the_turns_of_its_training_and_all_else_ten(monkeypatch):
    for flags, turns in ([], 2), (["--model", "a/b"], 2), (["--max-turns", "5"], 5), (["2 + 2?"], 10), \
            (["--data", "toy/test.jsonl"], 10), (["--compare", "a", "b"], 10):
        assert parsed(monkeypatch, solve_arguments, *flags).max_turns == turns


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


REFUSED = {
    "--step 3": "'--step' is no flag (did you mean --steps?): see --help",  # no flag may be shortened
    "toy/test.jsonl": "'toy/test.jsonl' is no flag (questions to train on are given as --data FILE.jsonl)",
    "--minibatches 17 --questions 2": "--minibatches 17 is more than the 16 rollouts of a step",
    "--group-size 1": "--group-size 1 has no baseline",
    "--max-turns 0": "--max-turns 0 does nothing",
    "--seed 20240101123456": "--seed 20240101123456 is too large: give one below 2147483648",
    "--lora 0": "--lora 0 does nothing",
    "--temperature 0": "--temperature 0.0 does not sample",
    "--temperature inf": "--temperature inf does not sample",
    "--temperature nan": "--temperature nan does not sample",
    "--lr nan": "--lr nan cannot work",
    "--lr -1": "--lr -1.0 cannot work",
    "--lr 0": "--lr 0 learns nothing: use more than 0",
    "--beta -1": "--beta -1.0 cannot work",
    "--clip-low 2": "--clip-low 2.0 cannot work",
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


def test_a_run_that_is_there_already_can_be_resumed_instead(tmp_path, monkeypatch, capsys):
    """Also one that ended before its first step, which has left nothing but its settings."""
    settings_of_a_run(tmp_path, monkeypatch)
    error = refused(monkeypatch, capsys, train_arguments, "--out", str(tmp_path))
    assert f"go on with --resume {tmp_path}, give another --out, or remove it" in error


def test_the_default_of_minibatches_is_no_more_than_the_rollouts_of_a_step(tmp_path, monkeypatch):
    flags = ["--out", str(tmp_path / "run"), "--questions", "1", "--group-size"]
    assert parsed(monkeypatch, train_arguments, *flags, "3").minibatches == 3
    assert parsed(monkeypatch, train_arguments, *flags, "8").minibatches == 4  # the toy's


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


def test_a_plain_run_stays_plain_when_it_is_resumed(tmp_path, monkeypatch):
    for given in (True, False):
        settings_of_a_run(tmp_path, monkeypatch, plain=given)
        assert parsed(monkeypatch, train_arguments, "--resume", str(tmp_path)).plain is given
        assert parsed(monkeypatch, solve_arguments, *["--plain"] * given).plain is given


DAMAGED = {
    "{": "Expecting property name", "": "Expecting value", "[1]": "it holds no JSON object",
    "7": "no JSON object",
    "\udcff": "can't decode", "[" * 10**5: "recursion", "1" * 5000: "digits"}


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_an_args_json_that_is_no_object_is_one_sentence(tmp_path, monkeypatch, capsys, text):
    (tmp_path / "args.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    error = refused(monkeypatch, capsys, train_arguments, "--resume", str(tmp_path))
    assert DAMAGED[text] in error and error.count("\n") == 1
    assert error.endswith("): repair it, or start a new run\n")


@pytest.mark.parametrize("name, value, sentence", [
    ("seed", ..., "it has no 'seed'; if this setting is newer than the run, add its default, \"seed\": 0"),
    ("steps", ..., "it has no 'steps'"),
    ("seed", "x", "--seed: invalid int value"),
    ("think", 3, "--think: ignored explicit argument"),
    ("no_such_flag", 0.1, "this code has no setting 'no_such_flag': go on with the code that made the run"),
    ("tools", ["rm"], "no tool is called 'rm'"),
    ("temperature", float("nan"), "nan does not sample"), ("lr", 1e300, "--lr 1e+300 cannot work"),
    ("group_size", 1, "has no baseline"), ("every", 0, "--every 0 does nothing"),
    ("questions", 2.5, "invalid int"), ("optimizer_device", "gpu", "invalid choice"),
    ("data", "--lr=1", "no such"),
    ("model", "http://localhost:1/v1", "its model is a server"),
    ("cache", "/gone.sqlite", "--cache /gone.sqlite is not"),
    ("data", "/gone.jsonl", "--data /gone.jsonl is not")])
def test_a_setting_that_is_missing_or_cannot_work_is_one_sentence(
        tmp_path, monkeypatch, capsys, name, value, sentence):
    settings_of_a_run(tmp_path, monkeypatch, **{name: value})
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume", str(tmp_path)])
    with pytest.raises(SystemExit), errors_leave("train.py"):
        args = train_arguments(TOOLS)
        before_imports(args, choose(TOOLS, args.tools, args.corpus))
    error = capsys.readouterr().err
    gc.enable()
    assert sentence in error and error.startswith("train.py: ") and error.count("\n") == 1


def test_a_server_that_a_folder_names_must_be_repeated_before_it_gets_the_key(tmp_path, monkeypatch, capsys):
    judge, fixed = "https://evil.example/v1#m", "http://localhost:8000/v1"
    settings_of_a_run(tmp_path, monkeypatch, judge=judge, fixed=fixed)
    resume = ["--resume", str(tmp_path)]
    error = refused(monkeypatch, capsys, train_arguments, *resume)
    assert f"repeat them: --resume {tmp_path} --fixed {fixed} --judge {judge}\n" in error
    assert "--judge" in refused(monkeypatch, capsys, train_arguments, *resume, "--fixed", fixed)
    error = refused(monkeypatch, capsys, train_arguments, *resume, "--fixed", fixed, "--judge",
                    "http://other/v1")
    assert f"--judge http://other/v1 is not the run's, {judge}: leave it out" in error
    args = parsed(monkeypatch, train_arguments, *resume, "--fixed", fixed, "--judge", judge)
    assert (args.fixed, args.judge) == (fixed, judge)


def test_a_model_in_a_folder_need_not_be_repeated_but_may(tmp_path, monkeypatch, capsys):
    settings_of_a_run(tmp_path, monkeypatch)
    monkeypatch.chdir(ROOT)
    assert parsed(monkeypatch, train_arguments, "--resume", str(tmp_path)).fixed == str(ROOT / "toy")
    assert parsed(monkeypatch, train_arguments, "--resume", str(tmp_path), "--fixed", "toy").seed == 0
    assert "is not the run's" in refused(monkeypatch, capsys, train_arguments, "--resume", str(tmp_path),
                                         "--executor", "toy")


def test_the_toy_is_refused_as_a_judge(monkeypatch, capsys):
    for arguments in solve_arguments, train_arguments:
        assert "the toy cannot judge" in refused(monkeypatch, capsys, arguments, "--judge", str(ROOT / "toy"))


def test_a_home_folder_that_the_shell_did_not_expand_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "q.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}')
    args = parsed(monkeypatch, train_arguments, "--out=~/run", "--data=~/q.jsonl")
    assert (args.out, args.data) == (f"{tmp_path}/run", f"{tmp_path}/q.jsonl")
    assert parsed(monkeypatch, solve_arguments, "~/x is what?").question == "~/x is what?"


@pytest.mark.parametrize("argv, tools, question", [
    (["--tools", "python_coder,base_generator", "2 + 2?"], ["python_coder", "base_generator"], "2 + 2?"),
    (["--tools", "python_coder", "base_generator", "2 + 2?"], ["python_coder", "base_generator"], "2 + 2?"),
    (["Which, a or b?", "--tools", "python_coder"], ["python_coder"], "Which, a or b?"),
    (["--tools", "python_coder,", "base_generator"], ["python_coder", "base_generator"], None),
    (["--tools", "python_coder, base_generator"], ["python_coder", "base_generator"], None)])
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
