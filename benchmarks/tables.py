"""The ten benchmarks of the paper and its two training sets, by name, as plain questions (tasks.py).

    load("bamboogle")                 the first 125 items, as many as in the paper; downloaded once, then read from the cache
    load("gpqa", folder="data")       from data/gpqa/data/data.json, data/gpqa.json or data/test/gpqa/data/data.json
    training("nq+deepmath", 1000, 0)  a sample of Natural Questions and DeepMath-103K, half each, the same for the same seed
    held_out(questions, 100, 0)       (train, valid, note), no validation question nearly in train

The benchmarks are for testing only: training() refuses their names, so that no accuracy is measured on what chose the policy.
Their data files belong to the paper's repository (github.com/lupantech/AgentFlow, test/<name>/data/data.json) and are not ours to
ship. A download is streamed to a file beside, at most 50 MB, read as a whole before it gets its name, and its SHA-256 is recorded:
the same name is the same file tomorrow. A file put into the cache by hand is treated the same way.

Each file has its own habits, and every one is read here and nowhere else:

    the question    "query", else "question" or "Question"; the "When ready, output the final answer enclosed in <answer>..." glued
                    to it in bamboogle, hotpotqa and aime24 is cut off, since our generator (generator.py) says that itself
    the gold        "answer", else "Final answer"; a text, a number, or a list of aliases, any of which is right
    the options     gpqa "choices", medqa "options", with or without letters, or a string that holds such a list; the gold is an
                    option with its letter (gpqa) or without (medqa) and becomes "B. text". A query that lacks them gets them.
    gameof24        the gold is the numbers, so that every solution is right; the solutions in the file are aliases, never compared
    ids             only labels: medqa has the pids 0-99 twice. An item is its position in the file.

Seen in the files: gaia is the 127 of its 165 validation questions that need no attachment. medqa shows a picture that nobody gets in
nine of its first hundred items; they are kept, as in the paper. gpqa's first hundred have one item with the same option twice.

    python benchmarks.py --check [--benchmark-dir FOLDER]      # can every gold be marked right, and no other item's answer?
"""

import argparse
import ast
import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.files import _cache, _download, _write
from rewards import rules
from rewards.questions import Question

FILES = "https://raw.githubusercontent.com/lupantech/AgentFlow/main/test"     # /<name>/data/data.json


@dataclass(frozen=True)
class Benchmark:
    """Items that the paper used, the first of the file; its accuracies (%) with Qwen2.5-7B alone, a frozen and a trained planner."""
    items: int
    alone: float
    frozen: float
    trained: float
    sha256: str                  # of the file that this reader was checked with; another one may be right too


BENCHMARKS = {
    "bamboogle": Benchmark(125, 12.0, 58.4, 69.6, "647c37dda2f27341e3f28e5b2a9625f6abcff44639f26a08dcbe1667d831d5e2"),
    "2wiki": Benchmark(100, 23.0, 60.0, 77.2, "eb4b045ebf8e3441bb14a7420e5d84bafcaea58c776cfec75c3bb98ee1653122"),
    "hotpotqa": Benchmark(100, 21.0, 51.3, 57.0, "81f09495a18c6bc1cd1c48483babc6c59dfb9381e524850be53ffb62a9c28fd7"),
    "musique": Benchmark(100, 6.0, 19.2, 25.3, "195b9e75a45c58a5a0398c753a1d8fb7a8adf87b4bfde3f12d20ce22517e4759"),
    "gaia": Benchmark(127, 3.2, 17.2, 33.1, "fa714861d661c54c8999f3b9de0155c6da3d2d6496e4c95cd12f4dcf59210b76"),
    "aime24": Benchmark(30, 6.7, 16.7, 40.0, "9284356275e85963bc7508d41c42b73215faffc962abad02f248a650ca51feb2"),
    "amc23": Benchmark(40, 47.5, 47.4, 61.5, "ad7c8d4930ac9399e01915632c92fa69f7988f6f097bd57ebc7067569aa63072"),
    "gameof24": Benchmark(100, 33.0, 31.0, 53.0, "ffb0c95018ba400931f2940a2dabae666f1ed6d0383beadd969f0447869a14ff"),
    "gpqa": Benchmark(100, 34.0, 37.0, 47.0, "f95883e7748b65186f95edd256d5ada5707ed7f18907d28f22da24cf7d797e15"),
    "medqa": Benchmark(100, 66.0, 76.0, 80.0, "d4f09708b623a7750013b22c607495eb8872bbef7a3f50990b7279c8fd87ec8d"),
}
INSTRUCTION = re.compile(r"\s*When ready, output the final answer enclosed in <answer>.{0,120}\Z", re.S)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def load(name, folder=None, limit=None, cache=None) -> list[Question]:
    """The first items of a benchmark, as many as the paper used or `limit`; a ValueError that says what to do if there are none."""
    if name not in BENCHMARKS:
        raise ValueError(f"no benchmark is called {name!r}; use one of {', '.join(BENCHMARKS)}.")
    number = BENCHMARKS[name].items if limit is None else limit
    if number < 1:
        raise ValueError(f"a limit of {number} leaves no item of {name}; use 1 or more.")
    questions = _from_folder(name, Path(folder)) if folder else _from_cache(name, _cache(cache))
    if limit is None and len(questions) < number:
        print(f"{name}: the file has {len(questions)} items, the paper used {number}.", file=sys.stderr)
    return questions[:number]


def _from_folder(name, folder):
    places = [folder / name / "data" / "data.json", folder / f"{name}.json", folder / "test" / name / "data" / "data.json"]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ValueError(f"{folder} has no {name}; put its file at one of {', '.join(map(str, places))}.")
    return _questions(path, name)


def _from_cache(name, cache):
    """Downloaded once, recorded, and the same file ever after: another one would be another benchmark."""
    path, record = cache / f"{name}.json", cache / f"{name}.sha256.json"
    if not path.exists():
        _download(f"{FILES}/{name}/data/data.json", path, lambda part: _questions(part, name))
    data, questions = path.read_bytes(), _questions(path, name)
    found = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    if not record.exists():
        _write(record, json.dumps(found))
        if found["sha256"] != BENCHMARKS[name].sha256:
            print(f"{path} is not the file that benchmarks.py was checked with; it may be newer.", file=sys.stderr)
    elif record.read_text(encoding="utf-8") != json.dumps(found):
        raise ValueError(f"{path} has changed since its first download; delete it to download it again, and {record} with it "
                         "to accept what comes.")
    return questions


def _questions(path, name):
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON.") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is not a JSON list of items.")
    return [_question(row, name, i, f"{path}, item {i}") for i, row in enumerate(rows)]


def _question(row, name, position, where):
    """One item of a file as a Question, whatever its keys are called.

    {"query": "2 + 2?When ready, output ... tag.", "answer": 4, "pid": "0"} -> Question("2 + 2?", "4", id="0", kind="aime24")
    {"query": "Which?", "choices": ["A. x", "B. y"], "answer": "B. y"}
        -> Question("Which?\\nA. x\\nB. y", "B. y", choices=("x", "y"), kind="gpqa")
    """
    text = next((row[key] for key in ("query", "question", "Question") if isinstance(row.get(key), str) and row[key].strip()), None)
    if text is None:
        raise ValueError(f"{where} has no \"query\" or \"question\".")
    text = INSTRUCTION.sub("", text).strip()
    answer, *aliases = _golds(row.get("answer", row.get("Final answer")), where)
    choices = _choices(row.get("choices") or row.get("options"), where)
    if choices:
        answer, aliases = _gold_option(answer, choices, where), []
        options = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices)]
        if not all("".join(option.split()) in "".join(text.split()) for option in options):
            text = "\n".join([text, *options])
    if name == "gameof24":
        numbers = row.get("question")
        if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
            raise ValueError(f"{where} has no list of numbers as its \"question\".")
        answer, aliases = " ".join(map(str, numbers)), [answer, *aliases]
    return Question(text, answer, tuple(aliases), tuple(choices), str(row.get("pid", position)), name)


def _golds(value, where):
    golds = value if isinstance(value, list) else [value]
    if not golds or not all(type(gold) in (str, int, float) and 0 < len(str(gold).strip()) <= rules.LIMIT for gold in golds):
        raise ValueError(f"{where} has no usable \"answer\": {json.dumps(value)[:60]}.")
    return [str(gold).strip() for gold in golds]


def _choices(value, where):
    """The texts of the options without their letters: ["A. 0.9", "B. 2"] or "['A. 0.9', 'B. 2']" -> ["0.9", "2"]; [] for none."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)              # reads a list, runs nothing
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"{where} has options that are not a list: {value[:60]!r}.") from None
    if not value:
        return []
    if not isinstance(value, (list, tuple)) or not 2 <= len(value) <= 26 or not all(str(choice).strip() for choice in value):
        raise ValueError(f"{where} has options that are not a list of texts: {str(value)[:60]}.")
    choices = [str(choice).strip() for choice in value]
    lettered = [re.fullmatch(rf"\(?{letter}[.):]\s*(.+)", choice, re.S) for letter, choice in zip(LETTERS, choices)]
    return [match[1] for match in lettered] if all(lettered) else choices


def _gold_option(answer, choices, where):
    """The gold as "B. text". Of two options with the gold's text the first: tasks.py takes either for it."""
    for letter, choice in zip(LETTERS, choices):
        if answer in (choice, letter, f"{letter}. {choice}"):
            return f"{letter}. {choice}"
    raise ValueError(f"{where} has an answer that is none of its options: {answer[:60]!r}.")


def golds_of(question):
    """Every form of the gold that a response may take: an option's letter, its text, both; an alias; a solution."""
    if question.choices:
        letter, text = question.answer.split(". ", 1)
        return [question.answer, letter, text]
    return list(question.aliases) if question.kind == "gameof24" else [question.answer, *question.aliases]


def check(name, folder=None, cache=None):
    """(items in the file, golds marked right, other items' answers marked right, what is odd), over the whole file.

    The other item is the next one with a different gold; its answer is the option's text, the solution, the first alias.
    """
    questions, right, wrong, odd = load(name, folder, 10**9, cache), 0, 0, []
    for i, question in enumerate(questions):
        missed = [gold for gold in golds_of(question) if not rules.is_right(question, gold)]
        after = questions[i + 1:] + questions[:i]
        other = next((golds_of(q)[-1 if q.choices else 0] for q in after if golds_of(q)[-1] != golds_of(question)[-1]), "")
        taken = rules.is_right(question, other)
        right, wrong = right + (not missed), wrong + taken
        odd += [f"item {i}: its gold {gold[:60]!r} is not marked right ({rules.decide(question, gold)})" for gold in missed]
        odd += [f"item {i}: {other[:60]!r} of another item is marked right for {question.answer[:60]!r}"] * taken
    return len(questions), right, wrong, odd


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", required=True, help="read every file and mark its golds by the rules")
    parser.add_argument("--benchmark-dir", metavar="FOLDER", help="where the files are; without it they are downloaded")
    args = parser.parse_args(argv)
    print(f"{'benchmark':10} {'in file':>8} {'used':>5} {'gold right':>11} {'other right':>12}")
    fine, notes = True, []
    for name, benchmark in BENCHMARKS.items():
        total, right, wrong, odd = check(name, args.benchmark_dir)
        print(f"{name:10} {total:8} {min(total, benchmark.items):5} {right / total:11.1%} {wrong / total:12.1%}")
        fine = fine and right >= 0.995 * total and wrong <= 0.02 * total
        notes += [f"{name} {line}" for line in odd]
    print("\n".join(notes) or "no exceptions")
    return 0 if fine else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(str(error))
