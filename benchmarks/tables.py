"""The ten benchmarks of the paper, by name, as plain questions.

    load("bamboogle")              the first 125 items, as many as in the paper; downloaded once
    load("gpqa", folder="data")    from data/gpqa.json, data/gpqa/data/data.json or data/test/...

The data files belong to the paper's repository (github.com/lupantech/AgentFlow, test/<name>/data/
data.json), so they are not part of this one. A line says so if a file is not the one that this code
was tested with. Each file has its own format, and only this file reads them:

    the question  "query", else "question" or "Question", without the instruction "When ready,
                  output the final answer enclosed in <answer>..." of bamboogle, hotpotqa and
                  aime24, which the generator's prompt gives, too
    the gold      "answer", else "Final answer"; a text, a number, or a list of aliases, any of
                  which is right
    the options   gpqa "choices", medqa "options", with or without letters, or a string with such a
                  list; the gold is an option with its letter (gpqa) or without (medqa) and becomes
                  "B. text". A query that lacks the options is extended by them.
    gameof24      the gold is the numbers: every solution is right; the file's solutions are aliases
    ids           only labels, because medqa has the pids 0-99 twice: positions identify items

What the files contain: gaia has the 127 of its 165 validation questions that need no attachment.
Nine of medqa's first hundred items mention a picture that the file lacks; they stay, as in the
released scripts. One of gpqa's first hundred has the same option twice. Three fractions of aime24
have lost a backslash, which is put back. musique has 79 different golds: near-copies count as
independent in an interval, which is therefore too narrow.
"""

import ast
import hashlib
import json
import os
import re
import statistics
import sys
from collections import namedtuple
from pathlib import Path
from string import ascii_uppercase

from benchmarks.questions import Question, Written, check_choices
from record.folder import replace_file
from record.metrics import interval, markdown, share, summary
from record.rollouts import read_answers
from rewards.rules import LIMIT, unlettered
from world import services
from world.mistakes import Mistake

FILES = "https://raw.githubusercontent.com/lupantech/AgentFlow/main/test"  # /<name>/data/data.json


# How many items the paper used; its accuracies (%) with Qwen2.5-7B alone, and in the flow with a
# frozen and with a trained planner; the first 40 digits of the file that this code was tested with
Benchmark = namedtuple("Benchmark", "items alone frozen trained sha256")


BENCHMARKS = {
    "bamboogle": Benchmark(125, 12.0, 58.4, 69.6, "647c37dda2f27341e3f28e5b2a9625f6abcff446"),
    "2wiki": Benchmark(100, 23.0, 60.0, 77.2, "eb4b045ebf8e3441bb14a7420e5d84bafcaea58c"),
    "hotpotqa": Benchmark(100, 21.0, 51.3, 57.0, "81f09495a18c6bc1cd1c48483babc6c59dfb9381"),
    "musique": Benchmark(100, 6.0, 19.2, 25.3, "195b9e75a45c58a5a0398c753a1d8fb7a8adf87b"),
    "gaia": Benchmark(127, 3.2, 17.2, 33.1, "fa714861d661c54c8999f3b9de0155c6da3d2d64"),
    "aime24": Benchmark(30, 6.7, 16.7, 40.0, "9284356275e85963bc7508d41c42b73215faffc9"),
    "amc23": Benchmark(40, 47.5, 47.4, 61.5, "ad7c8d4930ac9399e01915632c92fa69f7988f6f"),
    "gameof24": Benchmark(100, 33.0, 31.0, 53.0, "ffb0c95018ba400931f2940a2dabae666f1ed6d0"),
    "gpqa": Benchmark(100, 34.0, 37.0, 47.0, "f95883e7748b65186f95edd256d5ada5707ed7f1"),
    "medqa": Benchmark(100, 66.0, 76.0, 80.0, "d4f09708b623a7750013b22c607495eb8872bbef"),
}
INSTRUCTION = r"(?s)\s*When ready, output the final answer enclosed in <answer>.{0,120}\Z"
PLACES = "{}/data/data.json", "{}.json", "test/{}/data/data.json"


def load(name, folder=None, limit=None, cache=None):
    """The first items of a benchmark: `limit`, or as many as in the paper. cache: of downloads."""
    if folder:
        places = [Path(folder, place.format(name)) for place in PLACES]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            places = ", ".join(map(str, places))
            raise Mistake(f"{folder} has no {name}; put its file at one of {places}.")
    else:
        path = downloaded(name, cache_folder(cache))
    if not hashlib.sha256(path.read_bytes()).hexdigest().startswith(BENCHMARKS[name].sha256):
        note = "is not the file that benchmarks/tables.py was checked with; it may be newer."
        print(f"{path} {note}", file=sys.stderr)
    questions, number = read_items(path, name), BENCHMARKS[name].items
    if limit is None and len(questions) < number:
        fewer = f"the file has {len(questions)} items, the paper used {number}."
        print(f"{name}: {fewer}", file=sys.stderr)
    return questions[: limit or number]


def cache_folder(folder=None):
    """The folder that keeps downloads."""
    default = os.environ.get("NANO_AGENTFLOW_CACHE") or Path.home() / ".cache" / "nano-agentflow"
    return Path(folder or default)


def downloaded(name, cache):
    """The path of a benchmark's file in the cache, downloaded if it is missing."""
    path, url = cache / f"{name}.json", f"{FILES}/{name}/data/data.json"
    if not path.exists():
        try:
            body = services.download(url)
            json.loads(body)  # not the page of a hotel's network
        except (services.ServiceError, ValueError) as why:
            cure = f"download it by hand to {path}, or give --benchmark-dir FOLDER."
            raise Mistake(f"{url} cannot be used ({why}); {cure}") from None
        replace_file(path, body)
    return path


def read_items(path, name):
    """All items of a file. Mistake names the file and the item that cannot be used."""
    try:
        # Numbers as in benchmarks/questions.py
        rows = json.loads(path.read_bytes(), parse_float=Written, parse_constant=int)
    except ValueError as why:
        raise Mistake(f"{path} is not JSON ({why}).") from None
    questions = []
    for i, row in enumerate(rows):
        try:
            questions.append(question_of(row, name, i))
        except ValueError as why:
            raise Mistake(f"{path}, item {i}: {why}.") from None
    return questions


def question_of(row, name, position):
    """One item as a Question, for all ten formats.

    {"query": "2 + 2?When ready, output ... tag.", "answer": 4, "pid": "0"}
        -> Question("2 + 2?", "4", id="0", kind="aime24")
    {"query": "Which?", "choices": ["A. x", "B. y"], "answer": "B. y"}
        -> Question("Which?\\nA. x\\nB. y", "B. y", choices=("x", "y"), kind="gpqa")
    """
    texts = [row.get(key) for key in ("query", "question", "Question")]
    texts = [re.sub(INSTRUCTION, "", text).strip() for text in texts if isinstance(text, str)]
    # \frac and \tfrac, whose \f and \t became a form feed and a tab
    texts = [re.sub(r"\\?\x0crac", r"\\frac", text) for text in texts]
    texts = [re.sub(r"\tfrac(?![a-z])", r"\\tfrac", text) for text in texts]
    if not any(texts):
        raise ValueError('it has no "query" or "question"')
    text, gold = next(filter(None, texts)), row.get("answer", row.get("Final answer"))
    answer, *aliases = gold_texts(gold)
    choices = choices_of(row.get("choices") or row.get("options") or [])
    if choices:
        check_choices(choices, gold)
        lettered = zip(ascii_uppercase, choices, strict=False)
        options = [f"{letter}. {choice}" for letter, choice in lettered]
        golds = [option for option in options if answer in (option, option[0], option[3:])]
        if not golds:
            raise ValueError(f"the answer {answer[:60]!r} is none of the options")
        answer, aliases = golds[0], []  # of two options with the same text, rules.py takes either
        if not all("".join(option.split()) in "".join(text.split()) for option in options):
            text = "\n".join([text, *options])
    if name == "gameof24":
        answer, aliases = " ".join(map(str, row["question"])), [answer, *aliases]
    id = str(row.get("pid", position))
    return Question(text, answer, tuple(aliases), tuple(choices), id, name)


def gold_texts(value):
    """A gold and its aliases: ["Jane Austen ", 4] -> ["Jane Austen", "4"], 4 -> ["4"]"""
    golds = value if isinstance(value, list) else [value]
    texts = [str(gold).strip() for gold in golds if type(gold) in (str, int, Written)]
    if not golds or len(texts) < len(golds) or not all(0 < len(text) <= LIMIT for text in texts):
        raise ValueError(f'it has no usable "answer": {json.dumps(value)[:60]}')
    return texts


def choices_of(value):
    """The options without letters: ["A. 0.9", "B. 2"], "['A. 0.9', 'B. 2']" -> ["0.9", "2"]"""
    if isinstance(value, str):
        value = ast.literal_eval(value)  # reads a list, executes nothing
    if not isinstance(value, list):
        raise ValueError("its options are not a list")
    return unlettered([str(choice).strip() for choice in value])


def write_table(folder):
    """Write table.md, and return it: a row for each benchmark with whole trials in the folder."""
    rows = []
    for name, trials in read_answers(folder).items():
        rollouts = [rollout for question in trials for rollout in question]
        found, n = summary(rollouts), len(trials)
        low, high = interval(found["accuracy"], n)
        each = [100 * share(r.right for r in trial) for trial in zip(*trials, strict=True)]
        spread = f" ({statistics.stdev(each):.1f})" if len(each) > 1 else ""
        paper = BENCHMARKS[name]
        shares = "".join(f", {tool} {calls[0]}" for tool, calls in found["calls"].items())
        items = n if n == paper.items else f"{n} of {paper.items}"  # --limit, or unfinished
        row = {"benchmark": name, "items": items, "accuracy %": f"{100 * found['accuracy']:.1f}"}
        row |= {"95 %": f"{100 * low:.1f}-{100 * high:.1f}", "trials (sd)": f"{len(each)}{spread}"}
        row |= {f"paper: {way}": getattr(paper, way) for way in ("alone", "frozen", "trained")}
        row |= {"turns": f"{found['turns']:.2f}", "errors %": f"{100 * found['errors']:.1f}"}
        row |= {"failed": found["failed"], "undecided": found["undecided"], "calls": shares[2:]}
        rows.append({column: str(value) for column, value in row.items()})
    table = markdown([list(rows[0]), *(list(row.values()) for row in rows)])
    replace_file(folder / "table.md", f"{table}\n".encode())
    return table
