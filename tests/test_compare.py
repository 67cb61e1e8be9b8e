"""Two folders of answers are compared question by question, with the statistics of pairs."""

import json
import random

import pytest

from record.compare import compare, difference, mcnemar
from world.mistakes import Mistake


# -------------------------------------------------------------------------------- the statistics
def table(both, only_first, only_second, neither):
    """The rewards of two planners, from the four counts of a table of pairs."""
    counts = {(1, 1): both, (1, 0): only_first, (0, 1): only_second, (0, 0): neither}
    return map(list, zip(*(pair for pair, count in counts.items() for _ in range(count))))


@pytest.mark.parametrize(
    "lost, won, p", [(1, 9, 22 / 1024), (2, 15, 308 / 2**17), (0, 0, 1), (3, 3, 1)]
)
def test_mcnemars_exact_p_is_twice_the_tail_of_the_binomial(lost, won, p):
    assert mcnemar(*table(1, lost, won, 1)) == (lost, won, pytest.approx(p))


@pytest.mark.parametrize(
    "counts, p, low, high",
    [((1, 1, 7, 12), 0.070, 0.026, 0.507), ((59, 6, 16, 80), 0.052, 0.0046, 0.1186)],
)
def test_the_interval_and_p_are_those_published_for_two_tables(counts, p, low, high):
    """Fagerland, Lydersen, Laake 2014, Statistics in Medicine 33, 2850-2875; there it is A - B."""
    first, second = table(*counts)
    assert mcnemar(first, second)[2] == pytest.approx(p, abs=5e-4)
    digits = 5e-4 if high > 0.2 else 5e-5  # as many as were published
    assert difference(first, second)[1:] == pytest.approx((low, high), abs=digits)
    assert difference(second, first)[1:] == pytest.approx((-high, -low), abs=digits)


@pytest.mark.parametrize("first, second", [([1] * 5, [1] * 5), ([1 / 3] * 7, [0.7] * 7)])
def test_rewards_that_never_vary_have_an_interval_too(first, second):
    gain, low, high = difference(first, second)
    assert low < gain <= high or low <= gain < high


# ------------------------------------------------------------------------ two folders of answers
def record(number, right, answer="42", failed="", gold="42"):
    """A rollout as solve.py --out writes it."""
    step = {"turn": 1, "tool": "python_coder", "error": not right, "seconds": 0.0}
    words = [
        {"turn": 1, "module": "planner", "text": "", "tokens": 5, "seconds": 0.0, "cut": False}
    ]
    outcome = {"answer": answer, "right": bool(right), "failed": failed, "undecided": False}
    question = {"id": "", "kind": "", "question": f"question {number}?", "gold": gold}
    return question | outcome | {"memory": {"analysis": "", "steps": [step]}, "outputs": words}


def folder(path, *trials, name="questions", **settings):
    """trials: of each, the records, or whether each question was answered right."""
    path.mkdir(exist_ok=True)
    (path / "settings.json").write_text(json.dumps(settings))
    for i, trial in enumerate(trials):
        records = [row if isinstance(row, dict) else record(n, row) for n, row in enumerate(trial)]
        lines = "".join(json.dumps(row) + "\n" for row in records)
        (path / f"{name}-{i}.jsonl").write_text(lines)
    return path


def test_two_folders_are_compared_question_by_question(tmp_path):
    a = folder(tmp_path / "a", [1] * 40 + [0] * 60, model="toy", temperature=0.7, seed=1)
    b = folder(tmp_path / "b", [0] + [1] * 78 + [0] * 21, model="best", temperature=0.7, seed=2)
    lines = compare(a, b)
    assert lines[:2] == [f"A  {a}", f"B  {b}"]
    assert "settings that differ, A | B: model toy | best; seed 1 | 2" in lines
    accuracy = (
        "A  accuracy 0.400 [0.31, 0.50] of 100 | turns 1.00 | errors 60.0% | 5 tokens a rollout"
    )
    assert accuracy in lines
    pairs = "questions that differ: A alone right 1, B alone right 39, exact McNemar p = 7.5e-11"
    assert pairs in lines
    assert "B - A: +38.0 points, 95 % interval +27.3 to +47.2 (Newcombe's, paired)" in lines
    shown = lines[lines.index("A is better on 1:") + 1]
    assert shown == "    question 0? | gold 42 | A 42 | B 42"
    assert "B is better on 39:" in lines and sum("| gold 42 |" in line for line in lines) == 6


@pytest.mark.parametrize(
    "first, second, line",
    [
        ({"code": "1f2e"}, {"code": "9a8b"}, "code 1f2e | 9a8b"),
        ({"code": "1f2e-dirty-0a"}, {"code": "1f2e-0b"}, "code 1f2e-dirty-0a | 1f2e-0b"),
        ({"code": "1f2e-0a"}, {"code": "9a8b-dirty-0a"}, "none"),
        ({"code": "1f2e", "limit": 3}, {"code": "1f2e", "limit": None}, "none"),
        ({}, {"max_turns": 3}, "max_turns None | 3"),
    ],
)
def test_another_code_is_a_setting_that_differs_and_another_commit_is_none(
    tmp_path, first, second, line
):
    lines = compare(folder(tmp_path / "a", [1], **first), folder(tmp_path / "b", [1], **second))
    assert f"settings that differ, A | B: {line}" in lines


def test_all_questions_that_differ_are_kept_with_out(tmp_path):
    a, b = folder(tmp_path / "a", [1, 0, 0]), folder(tmp_path / "b", [0, 1, 0])
    assert compare(a, b, tmp_path / "kept")[-1].startswith("all 2 questions that differ: ")
    rows = (tmp_path / "kept" / "differences.jsonl").read_text().splitlines()
    row = {"set": "questions", "question": "question 1?", "gold": "42", "right": [0.0, 1.0]}
    assert json.loads(rows[1]) == row | {"answers": ["42", "42"]}


def test_more_trials_add_no_questions_and_count_by_the_share_that_was_right(tmp_path):
    once, other = [1, 1, 0, 0, 0, 1], [1, 0, 1, 1, 1, 1]
    one = compare(folder(tmp_path / "a", once), folder(tmp_path / "b", other))
    three = compare(folder(tmp_path / "a3", *[once] * 3), folder(tmp_path / "b2", *[other] * 2))
    sign_test = "A more often right 1, B more often right 3, exact sign test p = 0.62"
    assert f"questions that differ, in trials 1 to 2 of both: {sign_test}" in three
    assert one[-1] == three[-1]
    assert [line for line in one if line.startswith("B - A")][0] in three
    half = compare(folder(tmp_path / "c", [1, 1], [0, 1]), folder(tmp_path / "d", [1, 1]))
    assert any(line.startswith("A  accuracy 0.750") for line in half)
    assert any(line.startswith("B - A: +25.0 points") for line in half)


def test_the_test_of_questions_gives_one_seed_no_advantage_over_five(tmp_path):
    dice = random.Random(0)
    for n in range(6):  # planners that are equally good
        folder(tmp_path / f"p{n}", [dice.random() < 0.9 for _ in range(300)])
    lines = compare(tmp_path / "p0", [tmp_path / f"p{n}" for n in range(1, 6)])
    [line] = [line for line in lines if line.startswith("questions that differ")]
    assert line.startswith("questions that differ, in trials 1 to 1 of both: A alone right ")
    assert float(line.rpartition(" ")[2]) > 0.05
    [gain] = [line for line in lines if line.startswith("B - A")]
    first = compare(tmp_path / "p0", tmp_path / "p1")
    assert line.partition(": ")[2] in "\n".join(first) and gain not in first  # that is of all


def test_seeds_of_a_side_are_pooled_by_question_and_counted_as_blocks(tmp_path):
    for n, right in enumerate([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]]):
        folder(tmp_path / f"mine-seed{n}", right)
    for n, right in enumerate([[0, 0, 1, 0], [0, 0, 1, 0]]):
        folder(tmp_path / f"plain-seed{n}", right, right)  # twice as many trials weigh the same
    lines = compare(tmp_path / "plain-seed*", tmp_path / "mine-seed*")
    assert "A  accuracy 0.250" in "\n".join(lines) and "B  accuracy 0.833" in "\n".join(lines)
    assert any("A more often right 0, B more often right 3" in line for line in lines)
    seeds = "each folder: A 0.250 0.250 | B 0.750 1.000 0.750, exact permutation test p = 0.1"
    assert seeds in lines  # one of the ten ways to deal them
    for n, turns in enumerate((3, 10, 3)):
        settings = json.dumps({"seed": n, "max_turns": turns})
        (tmp_path / f"mine-seed{n}" / "settings.json").write_text(settings)
    lines = compare([tmp_path / "plain-seed1"], tmp_path / "mine-seed*")
    assert lines[0] == f"A  {tmp_path / 'plain-seed1'}" and lines[1].count("mine-seed") == 3
    assert lines[2] == "settings that differ, A | B: seed None | 0; max_turns None | 3, 10"
    folder(tmp_path / "mine-seed3", [1, 1, 1])
    with pytest.raises(Mistake, match="folders of a side have answered different questions"):
        compare(tmp_path / "plain-seed*", tmp_path / "mine-seed*")
    with pytest.raises(Mistake, match=r"no folder matches .*nowhere\*"):
        compare(tmp_path / "nowhere*", tmp_path / "plain-seed0")


def test_benchmarks_that_both_have_are_compared_one_by_one_and_together(tmp_path):
    for name in ("gameof24", "bamboogle"):
        a, b = folder(tmp_path / "a", [1, 0], name=name), folder(tmp_path / "b", [1, 1], name=name)
    folder(tmp_path / "b", [1], name="medqa")
    lines = compare(a, b)
    assert lines.index("bamboogle") < lines.index("gameof24") < lines.index("all")
    text = "\n".join(lines)
    assert text.count(" of 2 |") == 4 and text.count(" of 4 |") == 2 and "medqa" not in text


def test_what_a_kill_left_behind_is_not_compared(tmp_path):
    for name in ("a", "b"):
        folder(tmp_path / name, [1, 0, 1], [1, 0])  # the second trial is unfinished
        with open(tmp_path / name / "questions-0.jsonl", "a") as file:
            file.write('{"question": "half a li')
    assert "\n".join(compare(tmp_path / "a", tmp_path / "b")).count(" of 3 |") == 2


def test_a_failed_rollout_counts_as_not_right_and_is_shown_on_a_line_that_no_terminal_obeys(
    tmp_path,
):
    down = record(0, 0, answer="", failed="planner: no room")
    odd = record(1, 0, answer="\x1b[2J gone\n" + "x" * 99)
    lines = compare(folder(tmp_path / "a", [down, odd]), folder(tmp_path / "b", [1, 1]))
    assert any(
        line.endswith(" of 2 | turns 1.00 | errors 100.0% | 5 tokens a rollout | failed 1")
        for line in lines
    )
    assert "    question 0? | gold 42 | A planner: no room | B 42" in lines
    assert lines[-1].endswith("| A \\x1b[2J gone " + "x" * 37 + "... | B 42")


REFUSED = {
    "empty a": "empty holds no answers: give a folder that solve.py --out wrote",
    "a games": "nothing to compare",
    "a short": r"have answered different questions \(3 and 1\): let both runs finish",
    "a other": "have answered different questions",
    "typed typed": "no question has a gold answer, so none was graded",
}


@pytest.mark.parametrize("names", REFUSED)
def test_what_cannot_be_compared_is_one_sentence(tmp_path, names):
    folder(tmp_path / "a", [1, 0, 1])
    folder(tmp_path / "short", [1])
    folder(tmp_path / "other", [record(0, 1), record(9, 1), record(2, 1)])
    folder(tmp_path / "games", [1], name="gameof24")
    folder(tmp_path / "typed", [record(0, 0, gold="")])
    folder(tmp_path / "empty", [])
    with pytest.raises(ValueError, match=REFUSED[names]):
        compare(*(tmp_path / name for name in names.split()))
