"""solve.py --compare: the statistics of pairs, two folders of answers, and two models that answer first."""

import json
import signal
import sys
from types import SimpleNamespace

import pytest
from test_models import tokenizer, write

import solve
from cli import comparing
from cli.command_line import solve_arguments
from logbook.records import lines_of
from memory import Memory, Step
from models import loading
from rewards.compare import difference, lines, mcnemar
from rewards.questions import Question
from tools import TOOLS


# ---- the statistics ----------------------------------------------------------------------------------------
def table(both, only_first, only_second, neither):
    """The rewards of two planners, from the four counts of a table of pairs."""
    counts = {(1, 1): both, (1, 0): only_first, (0, 1): only_second, (0, 0): neither}
    return map(list, zip(*(pair for pair, count in counts.items() for _ in range(count))))


@pytest.mark.parametrize("lost, won, p", [(1, 9, 22 / 1024), (2, 15, 308 / 2**17), (0, 0, 1.0), (3, 3, 1.0)])
def test_mcnemars_exact_p_is_twice_the_tail_of_the_binomial(lost, won, p):
    assert mcnemar(*table(1, lost, won, 1)) == (lost, won, pytest.approx(p))


@pytest.mark.parametrize("counts, p, low, high", [
    ((1, 1, 7, 12), 0.070, 0.026, 0.507), ((59, 6, 16, 80), 0.052, 0.0046, 0.1186)])
def test_the_interval_and_p_are_those_published_for_two_tables(counts, p, low, high):
    """In Fagerland, Lydersen, Laake 2014, Statistics in Medicine 33, 2850-2875; there it is A - B."""
    first, second = table(*counts)
    assert mcnemar(first, second)[2] == pytest.approx(p, abs=5e-4)
    digits = 5e-4 if high > 0.2 else 5e-5  # as many as were published
    assert difference(first, second)[1:] == pytest.approx((low, high), abs=digits)
    assert difference(second, first)[1:] == pytest.approx((-high, -low), abs=digits)


def test_planners_that_are_right_on_the_same_questions_are_told_apart_sooner():
    together, apart = difference(*table(45, 5, 10, 40)), difference(*table(20, 30, 35, 15))
    assert together[0] == apart[0] == pytest.approx(0.05)
    assert together[2] - together[1] < 0.6 * (apart[2] - apart[1])


@pytest.mark.parametrize("first, second", [([1] * 5, [1] * 5), ([0] * 5, [1] * 5), ([1 / 3] * 7, [0.7] * 7)])
def test_rewards_that_never_vary_have_an_interval_too(first, second):
    gain, low, high = difference(first, second)
    assert low < gain <= high or low <= gain < high


# ---- two folders of answers --------------------------------------------------------------------------------
def rollout(number, reward, answer="42", failed="", tokens=5):
    step = Step(1, "python_coder", "goal", "call", "result", error=not reward, verdict="STOP", seconds=0.0)
    outputs = [{"turn": 1, "module": "planner", "text": "", "tokens": tokens, "seconds": 0.0}]
    question = Question(f"question {number}?", "42")
    return solve.Rollout(question, Memory(question.question, steps=[step]), outputs=outputs, answer=answer,
                      right=reward > 0, reward=float(reward), failed=failed)


def folder(path, *trials, name="questions", **settings):
    """A folder as solve.py --out writes it. trials: the rollouts of each, or their rewards."""
    path.mkdir(exist_ok=True)
    (path / "settings.json").write_text(json.dumps(settings))
    for i, trial in enumerate(trials):
        rollouts = [each if isinstance(each, solve.Rollout) else rollout(n, each)
                    for n, each in enumerate(trial)]
        (path / f"{name}-{i}.jsonl").write_text(lines_of(rollouts))
    return str(path)


@pytest.fixture
def compare(monkeypatch, capsys, tmp_path):
    """solve.py --compare with these words: (exit code, stdout, stderr). It leaves Ctrl-C as it was."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT)

    def compare(*words):
        monkeypatch.setattr(sys, "argv", ["solve.py", "--compare", *words])
        with pytest.raises(SystemExit) as stop:
            comparing.leave_if_compared(solve_arguments(TOOLS))
        return stop.value.code or 0, *capsys.readouterr()
    yield compare
    signal.signal(signal.SIGINT, before)


def test_two_folders_are_compared_question_by_question(compare, tmp_path):
    first = folder(tmp_path / "first", [1] * 40 + [0] * 60, model="toy", temperature=0.7, seed=1)
    second = folder(tmp_path / "second", [0] + [1] * 78 + [0] * 21, model="best", temperature=0.7, seed=2)
    code, out, _ = compare(first, second)
    assert code == 0 and f"A  {first}\nB  {second}\n" in out
    assert "settings that differ, A | B: model toy | best; seed 1 | 2\n" in out
    assert "A  accuracy 0.400 [0.31, 0.50] of 100 | turns 1.00 | errors 60.0% | 5 tokens a rollout\n" in out
    assert "A alone right 1, B alone right 39, exact McNemar p = 7.5e-11\n" in out
    assert "B - A: +38.0 points, 95 % interval +27.3 to +47.2 (Newcombe's, paired)\n" in out
    assert "A is better on:\n    question 0? | gold 42 | A 42 | B 42\n" in out
    assert out.count("question 4") == 5 and "... and 34 more; --out FOLDER keeps all\n" in out


def test_all_questions_that_differ_are_kept_with_out_and_none_is_shown_with_quiet(compare, tmp_path):
    first, second = folder(tmp_path / "first", [1, 0, 0]), folder(tmp_path / "second", [0, 1, 0])
    _, out, _ = compare(first, second, "--out", str(tmp_path / "kept"), "--quiet")
    assert "question 0" not in out and "All 2 questions that differ: " in out
    rows = [json.loads(line) for line in (tmp_path / "kept" / "differences.jsonl").read_text().splitlines()]
    assert rows[1] == {"set": "questions", "question": "question 1?", "gold": "42", "right": [0.0, 1.0],
                       "answers": ["42", "42"]}


def test_more_trials_add_no_questions(compare, tmp_path):
    once, other = [1, 1, 0, 0, 0, 1], [1, 0, 1, 1, 1, 1]
    _, one, _ = compare(folder(tmp_path / "a", once), folder(tmp_path / "b", other))
    _, three, _ = compare(folder(tmp_path / "a3", *[once] * 3), folder(tmp_path / "b2", *[other] * 2))
    assert "A alone right 1, B alone right 3, exact McNemar p = 0.62" in one
    assert "A more often right 1, B more often right 3, exact sign test p = 0.62" in three
    interval = next(line for line in one.splitlines() if line.startswith("B - A"))
    assert interval in three and "of 6 | turns" in three


def test_a_question_that_is_right_in_one_of_two_trials_counts_half():
    first, second = [[rollout(0, 1), rollout(0, 0)], [rollout(1, 1)]], [[rollout(0, 1)], [rollout(1, 1)]]
    text = "\n".join(lines(first, second))
    assert "A  accuracy 0.750" in text and "B more often right 1," in text and "B - A: +25.0 points" in text


def test_benchmarks_that_both_have_are_compared_one_by_one_and_together(compare, tmp_path):
    for name in ("gameof24", "bamboogle"):
        folder(tmp_path / "a", [1, 0], name=name)
        folder(tmp_path / "b", [1, 1], name=name)
    folder(tmp_path / "b", [1], name="medqa")
    _, out, _ = compare("a", "b")
    assert out.index("\nbamboogle\n") < out.index("\ngameof24\n") < out.index("\nall\n")
    assert out.count(" of 2 |") == 4 and out.count(" of 4 |") == 2 and "medqa" not in out


def test_what_a_kill_left_behind_is_not_compared(compare, tmp_path):
    for name in ("a", "b"):
        folder(tmp_path / name, [1, 0, 1], [1, 0])  # the second trial is unfinished
        with open(tmp_path / name / "questions-0.jsonl", "a") as file:
            file.write('{"question": "half a li')
        (tmp_path / name / "unfinished-questions-1.jsonl").write_text(lines_of([rollout(2, 0)]))
    code, out, _ = compare("a", "b")
    assert code == 0 and out.count(" of 3 |") == 2 and "unfinished" not in out


def test_equal_questions_are_paired_in_their_order(compare, tmp_path):
    folder(tmp_path / "a", [rollout(7, 1), rollout(7, 0), rollout(7, 0)])
    folder(tmp_path / "b", [rollout(7, 0), rollout(7, 1), rollout(7, 0)])
    assert "A alone right 1, B alone right 1" in compare("a", "b")[1]


def test_a_failed_rollout_counts_as_not_right_and_is_shown_so(compare, tmp_path):
    folder(tmp_path / "a", [rollout(0, 0, answer="", failed="planner: no room"), rollout(1, 1)])
    folder(tmp_path / "b", [1, 1])
    _, out, _ = compare("a", "b")
    assert "of 2 | turns 1.00 | errors 50.0% | 5 tokens a rollout | failed 1\n" in out
    assert "question 0? | gold 42 | A planner: no room | B 42\n" in out


def test_answers_are_shown_as_one_line_that_no_terminal_obeys(compare, tmp_path):
    folder(tmp_path / "a", [rollout(0, 0, answer="\x1b[2J gone\n" + "x" * 99), rollout(1, 1)])
    folder(tmp_path / "b", [1, 1])
    assert "| A \\x1b[2J gone " + "x" * 34 + "... | B 42\n" in compare("a", "b")[1]


def test_one_file_under_two_names_is_no_setting_that_differs(compare, tmp_path):
    (tmp_path / "corpus").write_text("")
    folder(tmp_path / "a", [1], corpus="corpus", batch=1, limit=None)
    folder(tmp_path / "b", [1], corpus=str(tmp_path / "corpus"), batch=9, limit=3)
    assert "settings that differ, A | B: none\n" in compare("a", "b")[1]


REFUSED = {
    "a nowhere": "nowhere holds no answers: give a folder that solve.py --out wrote",
    "empty a": "empty holds no answers",
    "a model": "model holds no answers: give a folder that solve.py --out wrote; two models need --data",
    "a games": "nothing to compare: a has answered questions, and games gameof24",
    "a short": "a alone has answered 2, short alone 0. Let both commands finish",
    "a other": "different questions cannot be compared: a alone has answered 2, other alone 1.",
    "typed typed": "no question has a gold answer, so none was graded",
    "a damaged": "damaged/questions-0.jsonl cannot be used (KeyError: 'gold'): give a folder that",
    "a a --limit 3": "leave out --limit",
    "model model --data data.jsonl": "--compare needs two different models",
    "model bench --data data.jsonl": "'bench' holds no model",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_compared_is_one_sentence(compare, tmp_path, words):
    folder(tmp_path / "a", [1, 0, 1])
    folder(tmp_path / "short", [1])
    folder(tmp_path / "other", [rollout(0, 1), rollout(9, 1)])
    folder(tmp_path / "games", [1], name="gameof24")
    typed = rollout(0, 0)
    typed.question = Question("q?", "")
    folder(tmp_path / "typed", [typed])
    for name in ("empty", "model", "damaged", "bench"):
        folder(tmp_path / name, *([],) if name == "empty" else ())
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "damaged" / "questions-0.jsonl").write_text('{"question": "q?"}\n')
    (tmp_path / "data.jsonl").write_text('{"question": "2 + 2?", "answer": 4}\n')
    code, out, err = compare(*words.split())
    assert code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith("solve.py: ") and REFUSED[words] in err


# ---- two models --------------------------------------------------------------------------------------------
def test_two_models_answer_the_questions_with_the_same_flags_and_are_compared(compare, tmp_path, monkeypatch):
    for name in ("first", "second"):
        write(tmp_path / name, tokenizer(), max_position_embeddings=16_384)
    (tmp_path / "data.jsonl").write_text('{"question": "2 + 2?", "answer": 4}\n' * 2)
    runs = []

    def run(command):  # in this process: a second one would import torch for seconds
        runs.append(command[2:])
        monkeypatch.setattr(sys, "argv", command[1:])
        solve.main()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(comparing.subprocess, "run", run)
    flags = ["--data", "data.jsonl", "--max-new-tokens", "3", "--max-turns", "1", "--tools", "base_generator",
             "--device", "cpu", "--judge", "none"]
    code, out, err = compare("first", "second", *flags)
    assert code == 0, err
    assert runs == [[*flags, "--model", name, "--out", f"runs/compare/{name}", "--quiet"]
                    for name in ("first", "second")]
    assert "A  first\nB  second\n" in out and "model first | second" in out and " of 2 | turns 1.00" in out
    assert (tmp_path / "runs/compare/differences.jsonl").exists()
    runs.clear()
    assert compare("first", "second", *flags)[0] == 0 and len(runs) == 2  # again: nothing is answered anew


def test_a_second_model_that_is_nowhere_is_refused_before_any_answers(compare, tmp_path, monkeypatch):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "data.jsonl").write_text('{"question": "2 + 2?", "answer": 4}\n')
    monkeypatch.setattr(loading, "hub_is_down", lambda: True)
    for second in "no-such-model", "http://127.0.0.1:1":
        code, out, err = compare("first", second, "--data", "data.jsonl")
        assert (code, out) == (2, "") and "cannot be reached" in err


def test_a_run_of_a_model_that_is_stopped_ends_the_comparison(compare, tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "data.jsonl").write_text('{"question": "2 + 2?", "answer": 4}\n')

    def stopped(command):  # Ctrl-C is for the run alone, which says how to go on
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        return SimpleNamespace(returncode=130)

    monkeypatch.setattr(comparing.subprocess, "run", stopped)
    code, out, err = compare("first", "second", "--data", "data.jsonl")
    assert (code, err) == (130, "") and "second" not in out
