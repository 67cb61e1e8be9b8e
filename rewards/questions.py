"""rewards.questions"""

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from rewards.rules import LIMIT, _numbers_of, _option

LONG_GOLD = 12    # words of a gold: no response equals a longer one by chance

SOLUTION = re.compile(r"(?:.*\n)?####[ \t]+(\S[^\n]*)\s*", re.S)       # of GSM8K; group 1 is the final answer


@dataclass(frozen=True)
class Question:
    """A question, its gold answer and what marking needs. The id is a label, never a key: two questions may share one."""
    question: str
    answer: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    id: str = ""
    kind: str = ""                   # "gameof24" marks by game_of_24(); anything else is only a label


def read_questions(path) -> list[Question]:
    """Every question of a JSONL file, in order; a ValueError with the file and the line if one cannot be used.

    {"question": "2 + 2?", "answer": 4} -> Question(question="2 + 2?", answer="4")
    """
    try:
        lines = Path(path).read_bytes().splitlines()      # of bytes: a JSON string may hold what splits text, U+2028
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; give a JSONL file of questions.") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from None
    questions = [_question(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ValueError(f"{path}: the file is empty; write one JSON object with a question and an answer on each line.")
    return questions


def _question(line, where):
    try:
        row = json.loads(line, parse_constant=int)       # int("NaN") raises: a missing answer exported as NaN is no answer
    except (ValueError, RecursionError) as error:        # bad bytes and endless digits are ValueErrors too
        raise ValueError(f"{where}: not JSON ({getattr(error, 'msg', error)}).") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not a JSON object but a {type(row).__name__}.")

    def text(key, value, kinds=(str, int, float)):
        if not isinstance(value, kinds) or isinstance(value, bool):
            wanted = "text" if kinds is str else "text or a number"
            raise ValueError(f"{where}: \"{key}\" must be {wanted}, not {json.dumps(value)[:40]}.")
        return str(value)

    def texts(key):
        if not isinstance(values := row.get(key) or [], list):
            raise ValueError(f"{where}: \"{key}\" must be a list, not {json.dumps(values)[:40]}.")
        return tuple(text(key, value) for value in values)

    for key, kinds in (("question", str), ("answer", (str, int, float))):
        if key not in row:
            raise ValueError(f"{where}: lacks \"{key}\".")
        if not text(key, row[key], kinds).strip():
            raise ValueError(f"{where}: \"{key}\" is empty.")
    name = "" if row.get("id") is None else text("id", row["id"])
    kind = text("kind", row.get("kind") or "", str)
    solution = SOLUTION.fullmatch(str(row["answer"]))
    answer = solution[1].strip() if solution else str(row["answer"])
    question = Question(row["question"], answer, texts("aliases"), texts("choices"), name, kind)
    if len(question.answer) > LIMIT:
        raise ValueError(f"{where}: the answer has more than {LIMIT} characters; no response could be marked right.")
    if question.choices and _option(question.answer, question.choices) is None:
        raise ValueError(f"{where}: the answer {question.answer[:40]!r} is not exactly one of the choices.")
    if question.kind == "gameof24" and not _numbers_of(question):
        raise ValueError(f"{where}: a gameof24 question names no numbers to use.")
    return question


def prose_warning(questions) -> str:
    """For a run without a judge: a sentence if most golds are too long for a response to equal, else ""."""
    lengths = [min(len(gold.split()) for gold in (q.answer, *q.aliases)) for q in questions if not q.choices]
    if not lengths or (words := statistics.median(lengths)) <= LONG_GOLD:
        return ""
    return (f"the golds have {words:.0f} words in the median, and without a judge only a response with these "
            "very words is right: give --judge MODEL, or golds that are the final answer alone")
