"""The paper's two training sets, and the split into questions for training and for validation.

    training("nq+deepmath", 1100, 0)  a sample of Natural Questions and DeepMath-103K, half each
    held_out(questions, 100, 0)       (train, valid): no question of valid is also in train

The seed alone decides both. The ten benchmarks (tables.py) are only for testing: training() refuses
their names. It compares no texts: some hops of musique are questions of NQ.
"""

import json
import random
import re
import unicodedata
from dataclasses import asdict

from benchmarks.questions import Question, read_questions
from benchmarks.tables import BENCHMARKS, cache_folder, gold_texts
from record.folder import replace_file
from rewards.plain import folded
from world import services
from world.mistakes import Mistake

ROWS = "https://datasets-server.huggingface.co/rows"  # rows of any public set, by offset
# Rows per request, of deepmath 1 MB: services.api() would refuse 100, which the API allows. Small
# pages also spread a sample over the whole set.
PAGE = 20
TRAINING = {
    "nq": ("RUC-NLPIR/FlashRAG_datasets", "nq"),
    "deepmath": ("zwhe99/DeepMath-103K", "default"),
}


def training(names, limit, seed=0, cache=None):
    """`limit` questions of "nq", "deepmath" or "nq+deepmath" (equal shares, shuffled).

    The released set is all 182 190 rows of both, but the paper's steps (some 32, read off its
    figures, of 32 questions) use only 1,024 of them.
    """
    parts = list(dict.fromkeys(names.split("+")))
    for part in parts:
        if part not in TRAINING:
            why = f"no training set is called {part!r}"
            if part in BENCHMARKS:
                why = f"{part} is a test benchmark: trained or chosen on it, accuracy says nothing"
            raise Mistake(f"{why}; use {' or '.join(TRAINING)}.")
    questions = []
    for i, part in enumerate(parts):
        number = limit // len(parts) + (i < limit % len(parts))
        path = cache_folder(cache) / f"{part}-seed{seed}-{number}.jsonl"
        if not path.exists():
            lines = [json.dumps(asdict(question)) + "\n" for question in sample(part, number, seed)]
            if not lines:
                raise Mistake(f"{ROWS} gave no usable row of {part}: use --data FILE.")
            replace_file(path, "".join(lines).encode())
        questions += read_questions(path)
    random.Random(f"{names} {seed}").shuffle(questions)
    return questions


def sample(name, number, seed):
    """`number` questions, from pages of the set in an order that the seed decides."""
    dice, found = random.Random(f"{name} {seed}"), {}
    with services.session() as session:
        starts = list(range(0, rows(session, name, 0, 1)["num_rows_total"], PAGE))
        dice.shuffle(starts)
        for start in starts:
            entries = rows(session, name, start, PAGE)["rows"]
            for question in filter(None, (question_of(entry, name) for entry in entries)):
                found.setdefault(words_of(question.question), question)
            if len(found) >= number:
                break
    return list(found.values())[:number]


def rows(session, name, offset, length):
    """The API's answer: {"rows": [`length` rows from `offset` on], "num_rows_total": of the set}"""
    dataset, config = TRAINING[name]
    where = {"dataset": dataset, "config": config, "split": "train"}
    where |= {"offset": offset, "length": length}
    try:
        return services.api(session, "GET", ROWS, params=where)
    except services.ServiceError as why:
        cure = "try later, or use --data FILE with questions of your own."
        raise Mistake(f"{dataset} cannot be downloaded: {why}; {cure}") from None


def question_of(entry, name):
    """A row of the API as a Question; None if question or gold is missing, truncated or too long.

    {"row_idx": 7, "row": {"question": "who wrote emma", "golden_answers": ["Jane Austen", "JA"]}}
        -> Question("who wrote emma?", "Jane Austen", aliases=("JA",), id="nq-7", kind="nq")
    """
    row, gold = entry["row"], "golden_answers" if name == "nq" else "final_answer"
    text = (row.get("question") or "").strip()
    if not text or {"question", gold} & set(entry.get("truncated_cells") or []):
        return None
    try:
        answer, *aliases = gold_texts(row.get(gold))
    except ValueError:
        return None
    text += "?" if name == "nq" and not text.endswith("?") else ""
    return Question(text, answer, tuple(aliases), (), f"{name}-{entry['row_idx']}", name)


def held_out(questions, number, seed):
    """(train, valid): `number` different questions for validation, and the others for training.

    Copies of a question for validation are in neither, whatever their case, accents and articles:
    len(questions) - len(train) - len(valid) of them.
    """
    words = [words_of(question.question) for question in questions]
    order, valid = list(range(len(questions))), {}  # valid: {words: index}
    random.Random(f"held out {seed}").shuffle(order)
    for i in order:
        if len(valid) < number:
            valid.setdefault(words[i], i)
    train = [question for question, key in zip(questions, words, strict=True) if key not in valid]
    if not train:
        raise Mistake(f"{len(questions)} questions are too few to hold {number} out: give --valid.")
    return train, [questions[i] for i in valid.values()]


def words_of(text):
    """The words and signs without case, accents and articles: "What is a Café?" -> (what, is, cafe)

    A text without words, as one of signs alone, is itself.
    """
    plain = re.sub("[\u0300-\u036f]", "", unicodedata.normalize("NFKD", folded(text).casefold()))
    words = re.findall(r"[\w.]*\w|[-+*/%]", plain)
    return tuple(word for word in words if word not in ("a", "an", "the")) or (text,)
