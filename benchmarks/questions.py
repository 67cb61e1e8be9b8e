"""Question, and reading questions from a JSONL file.

One JSON object a line. "question" and "answer" are required; unknown keys are ignored:

    {"question": "Capital of France?", "answer": "Paris", "aliases": ["Paris, France"], "id": "7"}
    {"question": "Which is even?", "choices": ["1", "2", "3"], "answer": "B"}

The gold of a multiple-choice question is a letter or the text of an option. A number, as in
"answer": 2, could also be an index, so it is refused beside options that are numbers. The gold of a
worked solution as in GSM8K is its last line: "... #### 29" gives 29.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from rewards.game24 import numbers_to_use
from rewards.rules import LIMIT, named_option
from world.mistakes import Mistake

SOLUTION = re.compile(r"####[ \t]+(.+)")  # the last line of a GSM8K solution; group 1 is the answer


class Written(str):
    """A number with a point or an exponent, as the file writes it: a float would lose digits."""


@dataclass(frozen=True)
class Question:
    """A question with its gold answer. The id is only a label: two questions may have the same."""

    question: str
    answer: str
    aliases: tuple[str, ...] = ()  # other right answers
    choices: tuple[str, ...] = ()  # the options of a multiple-choice question
    id: str = ""
    kind: str = ""  # "gameof24" is graded by game24.py; any other kind is only a label


def read_questions(path):
    """Every question of a JSONL file, in order. Mistake names the file and the bad line.

    {"question": "2 + 2?", "answer": 4} -> Question(question="2 + 2?", answer="4")
    """
    try:
        lines = Path(path).read_bytes().splitlines()  # of bytes: str's would split at U+2028, too
    except FileNotFoundError:
        raise Mistake(f"{path}: no such file; give a JSONL file of questions.") from None
    questions = []
    for number, line in enumerate(lines, 1):
        try:
            questions += [parse(line)] if line.strip() else []
        except ValueError as why:
            raise Mistake(f"{path}, line {number}: {why}.") from None
    if not questions:
        raise Mistake(f"{path}: the file is empty.")
    return questions


def is_file(data):
    """Is --data a file, or else names of training sets?"""
    return Path(data).exists() or data.endswith(".jsonl")


def three_sets(data, valid, test, limit, seed):
    """The questions of train.py's flags: (training, validation, test), three lists of Question.

    data: a file, or names of training sets, of which the seed draws a sample. "none" is an empty
    list. Without --valid, up to 64 of --data are held out for it; of a file the same for all seeds,
    because a run may go on with another's planner."""
    if is_file(data):
        questions = read_questions(data)[:limit]
    else:
        from benchmarks.training import training

        questions = training(data, limit or 1000, seed)  # 1000: in old runs, which do not say it
    others = [read_questions(path) if path not in (None, "none") else [] for path in (valid, test)]
    if valid is None:
        from benchmarks.training import held_out

        questions, others[0] = held_out(questions, min(64, len(questions) // 2), seed=0)
    return questions, *others


def parse(line):
    """One line as a Question; ValueError says what is wrong with it."""
    try:
        # int("NaN") raises: NaN is an answer that is missing.
        row = json.loads(line, parse_float=Written, parse_constant=int)
    except ValueError as why:
        raise ValueError(f"not JSON ({why})") from None
    if not isinstance(row, dict):
        raise ValueError('not a JSON object such as {"question": "...", "answer": "..."}')
    answer = text("answer", row.get("answer"))
    solution = SOLUTION.fullmatch(answer.rstrip().rpartition("\n")[2])
    answer = solution[1] if solution else answer
    aliases, choices = (texts(key, row.get(key) or []) for key in ("aliases", "choices"))
    labels = ("" if row.get(key) is None else str(row[key]) for key in ("id", "kind"))
    question = Question(text("question", row.get("question")), answer, aliases, choices, *labels)
    if not question.question.strip() or not 0 < len(question.answer.strip()) <= LIMIT:
        raise ValueError(f"question and answer must have 1 to {LIMIT} characters")
    check_choices(question.choices, row["answer"], *row.get("aliases") or [])
    if question.choices and named_option(question.answer, question.choices) is None:
        why = f"the answer {question.answer[:40]!r} names none of the choices, or several"
        raise ValueError(f"{why}: write the letter and the text of one, as in 'B. London'")
    if question.kind == "gameof24" and not numbers_to_use(question):
        raise ValueError("a gameof24 question names no numbers to use")
    return question


def check_choices(choices, *golds):
    """ValueError for a gold that can be the index of an option or the value of another one."""
    indices = {f"{i}{end}" for i in range(len(choices) + 1) for end in ("", ".0")}
    for gold in golds:
        index = type(gold) in (int, Written) and str(gold) in indices
        if index and named_option(str(gold), choices) is not None:
            why = f"the answer {gold} can be the index or the value of an option"
            raise ValueError(f"{why}: write the letter of the option, or its value in quotes")


def text(key, value):
    """A text or a number as text. Half of a surrogate pair becomes "?", as in all files."""
    if type(value) not in (str, int, Written):
        raise ValueError(f'"{key}" must be text or a number, not {json.dumps(value)[:40]}')
    return str(value).encode("utf-8", "replace").decode()


def texts(key, values):
    """A list of texts or numbers as texts."""
    if not isinstance(values, list):
        raise ValueError(f'"{key}" must be a list, not {json.dumps(values)[:40]}')
    return tuple(text(key, value) for value in values)
