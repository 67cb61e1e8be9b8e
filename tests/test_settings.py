"""settings.py and advice.py: what is typed is answered at once, and a run that cannot learn is not called healthy."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from memory import Memory, Step
from rewards.questions import Question
from scale import advice, command_line
from solve import Flow


def parsed(monkeypatch, arguments, *argv):
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    return arguments()


def refused(monkeypatch, capsys, arguments, *argv):
    with pytest.raises(SystemExit) as stop:
        parsed(monkeypatch, arguments, *argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", ["solve.py --help", "train.py --help", "train.py --step 3", "train.py --data nowhere.jsonl",
                                     "solve.py --tools googel", "train.py --group-size 1"])
def test_help_and_typos_are_answered_before_torch_is_imported(command):
    script, *rest = command.split()
    code = (f"import runpy, sys; sys.modules['torch'] = None; sys.argv = {[script, *rest]!r}\n"     # an import of torch would raise
            f"runpy.run_path({script!r}, run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if "--help" in rest else 2) and "Traceback" not in done.stderr


def test_no_flag_may_be_shortened(monkeypatch, capsys):
    assert "unrecognized arguments: --step 3" in refused(monkeypatch, capsys, command_line.train_arguments, "--step", "3")


@pytest.mark.parametrize("argv, tools, question", [
    (["--tools", "python_coder,base_generator", "What is 2 + 2?"], ["python_coder", "base_generator"], "What is 2 + 2?"),
    (["--tools", "python_coder", "base_generator", "2+2?"], ["python_coder", "base_generator"], "2+2?"),
    (["Which, a or b?", "--tools", "python_coder"], ["python_coder"], "Which, a or b?"),
    (["--tools", "python_coder,", "base_generator"], ["python_coder", "base_generator"], None)])
def test_tools_are_named_with_commas_or_spaces_and_swallow_no_question(monkeypatch, argv, tools, question):
    args = parsed(monkeypatch, command_line.solve_arguments, *argv)
    assert args.tools == tools and args.question == question


def test_a_tool_that_is_none_is_no_question(monkeypatch, capsys):
    assert "no tool is called 'googel'" in refused(monkeypatch, capsys, command_line.solve_arguments, "--tools", "python_coder", "googel")


def test_a_model_of_your_own_has_data_and_a_judge_and_the_toy_has_its_own(monkeypatch):
    args = parsed(monkeypatch, command_line.train_arguments, "--model", "Qwen/Qwen2.5-7B-Instruct")
    assert (args.data, args.valid, args.test, args.judge) == ("nq+deepmath", None, None, "Qwen/Qwen2.5-7B-Instruct")
    assert (args.steps, args.questions, args.group_size, args.max_turns, args.lr) == (32, 32, 8, 3, None)
    args = parsed(monkeypatch, command_line.train_arguments)
    assert args.judge is None and args.data.endswith("toy/train.jsonl") and args.test.endswith("toy/test.jsonl")


@pytest.mark.parametrize("flags, judge", [([], "a/b"), (["--judge", "none"], None), (["--judge", "c/d"], "c/d"), (["--fixed", "e/f"], "e/f")])
def test_the_judge_is_the_fixed_model_unless_another_or_none_is_named(monkeypatch, flags, judge):
    for arguments in (command_line.train_arguments, command_line.solve_arguments):
        assert parsed(monkeypatch, arguments, "--model", "a/b", *flags).judge == judge


def test_one_question_has_no_gold_and_needs_no_judge(monkeypatch):
    assert parsed(monkeypatch, command_line.solve_arguments, "--model", "a/b", "Who?").judge is None


def test_ctrl_c_during_the_imports_leaves_no_traceback():
    process = subprocess.Popen([sys.executable, "train.py"], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.time() + 60                               # until torch is being mapped: the imports have begun
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text() and time.time() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and "Traceback" not in error and out == ""


@pytest.mark.exhaustive
def test_a_terminal_without_letters_is_no_reason_to_stop():
    done = subprocess.run([sys.executable, "solve.py", "Où est Curaçao?", "--max-turns", "1"], cwd=ROOT, capture_output=True, timeout=120,
                          env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and rb"O\xf9 est Cura\xe7ao?" in done.stdout and b"Traceback" not in done.stderr


# A run that cannot learn

def flow(*errors, failed="", words="no plan at all"):
    """A rollout with a turn for each error; "" is a turn that went well."""
    steps = [Step(n, "" if why else "python_coder", "", "", f"Error: {why}" if why else "4", error=bool(why)) for n, why in enumerate(errors, 1)]
    made = Flow(Question("q", "a"), Memory("q", "", steps), failed=failed)
    made.add_output(1, "planner", words, 3, 0.1)
    return made


def test_plans_that_cannot_be_parsed_are_counted_with_the_commonest_reasons_and_an_example():
    text = advice.unparsed([flow("no line 'Tool: ...'", "no line 'Tool: ...'"), flow("two plans", words="\x1b[31m")])
    assert text.startswith("0 of 3 plans could be parsed.") and "  2 x no line 'Tool: ...'\n  1 x two plans" in text
    assert "    no plan at all\n" in text and "\x1b" not in text and "--max-new-tokens" in text
    assert advice.unparsed([flow("", "", "two plans")]) == "" == advice.unparsed([flow()])


def test_three_flat_steps_in_a_row_are_told_once_with_what_they_mean():
    flat, lesson = {"flat": 4, "groups": 4, "reward": 0.0, "kl": 0.0}, {"flat": 3, "groups": 4, "reward": 0.5, "kl": 0.0}
    steps = [[flat] * 2, [flat] * 3, [flat] * 4, [flat, lesson, flat, flat], [lesson] + [flat] * 3]
    assert [advice.flat_steps(rows, [flow("")], 0.7) != "" for rows in steps] == [False, True, False, False, True]
    assert "easier questions" in advice.flat_steps([flat] * 3, [flow("")], 0.7)
    assert "0 of 1 plans could be parsed" in advice.flat_steps([flat] * 3, [flow("why")], 0.7)
    assert "too easy" in advice.flat_steps([flat | {"reward": 1.0}] * 3, [flow("")], 0.7)
    assert "--temperature 0.01" in advice.flat_steps([flat] * 3, [flow("")], 0.01)
    assert "--lr that is too high" in advice.flat_steps([flat | {"kl": 4000.0}] * 3, [flow("why")], 0.7)


def test_the_commonest_reasons_of_failed_rollouts_come_first():
    flows = [flow(failed=why) for why in ("a", "b", "b", "c", "c", "c", "d")] + [flow()]
    assert advice.failures(flows).splitlines() == ["failed 3 times: c", "failed 2 times: b", "failed 1 times: a"]
