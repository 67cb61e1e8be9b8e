"""Question, and reading questions from a JSONL file.

One JSON object a line. "question" and "answer" are required; unknown keys are ignored:

    {"question": "Capital of France?", "answer": "Paris", "aliases": ["Paris, France"], "id": "7"}

The gold of a worked solution as in GSM8K is its last line: "... #### 29" gives 29.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from rewards.rules import LIMIT, named_option, numbers_to_use

SOLUTION = re.compile(r"####[ \t]+(.+)")  # the last line of a GSM8K solution; group 1 is the final answer


class Written(str):
    """A number with a decimal point or an exponent, as the file writes it: a float would lose digits."""


@dataclass(frozen=True)
class Question:
    """A question with its gold answer. The id is only a label: two questions may have the same one."""

    question: str
    answer: str
    aliases: tuple[str, ...] = ()  # other right answers
    choices: tuple[str, ...] = ()  # the options of a multiple-choice question
    id: str = ""
    kind: str = ""  # rules.game_of_24() grades "gameof24"; any other kind is only a label


def read_questions(path):
    """Every question of a JSONL file, in order. ValueError names the file and the bad line.

    {"question": "2 + 2?", "answer": 4} -> Question(question="2 + 2?", answer="4")
    """
    try:
        lines = Path(path).read_bytes().splitlines()  # bytes: str.splitlines() also splits at U+2028
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; give a JSONL file of questions.") from None
    except OSError as why:
        raise ValueError(f"{path}: cannot be read ({why.strerror}).") from None
    questions = []
    for number, line in enumerate(lines, 1):
        try:
            questions += [parse(line)] if line.strip() else []
        except ValueError as why:
            raise ValueError(f"{path}, line {number}: {why}") from None
    if not questions:
        hint = "write one JSON object with a question and an answer on each line"
        raise ValueError(f"{path}: the file is empty; {hint}.")
    return questions


def parse(line):
    """One line as a Question; ValueError says what is wrong with it."""
    try:
        # int("NaN") raises: NaN is an answer that is missing.
        row = json.loads(line, parse_float=Written, parse_constant=int)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8: save the file in this encoding.") from None
    except (ValueError, RecursionError) as why:  # also for numbers of many digits
        raise ValueError(f"not JSON ({getattr(why, 'msg', why)}). Each line must be an object, as "
                         '{"question": "...", "answer": "..."}.') from None
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object but a {type(row).__name__}.")
    for key, types in (("question", [str]), ("answer", [str, int, Written])):
        if key not in row:
            keys = ", ".join(json.dumps(name[:30]) for name in list(row)[:8]) or "nothing"
            raise ValueError(f'lacks "{key}" (it has {keys}).')
        if not text(key, row[key], types).strip():
            raise ValueError(f'"{key}" is empty.')
    answer, id = str(row["answer"]), "" if row.get("id") is None else text("id", row["id"])
    last = answer.rstrip().rpartition("\n")[2]
    answer = solution[1] if (solution := SOLUTION.fullmatch(last)) else answer
    kind = text("kind", row.get("kind") or "", [str])
    question = Question(row["question"], answer, texts(row, "aliases"), texts(row, "choices"), id, kind)
    if len(answer) > LIMIT:
        raise ValueError(f"the answer has more than {LIMIT} characters; no response could be marked right.")
    if question.choices and named_option(question.answer, question.choices) is None:
        raise ValueError(f"the answer {question.answer[:40]!r} names none of the choices, or several: write "
                         "the letter and the text of one, as in 'B. London'.")
    if question.kind == "gameof24" and not numbers_to_use(question):
        raise ValueError("a gameof24 question names no numbers to use.")
    return question


def text(key, value, types=(str, int, Written)):
    """A value as text; ValueError if it is of another type."""
    if type(value) not in types:
        wanted = "text" if types == [str] else "text or a number"
        shown = value if type(value) is Written else json.dumps(value)
        raise ValueError(f'"{key}" must be {wanted}, not {shown[:40]}.')
    return str(value)


def texts(row, key):
    """The texts of a list; () if the row has none."""
    values = row.get(key) or []
    if not isinstance(values, list):
        raise ValueError(f'"{key}" must be a list, not {json.dumps(values)[:40]}.')
    return tuple(text(key, value) for value in values)
