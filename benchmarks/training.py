"""The paper's two training sets, and the split into questions for training and for validation.

    training("nq+deepmath", 1000, 0)  a sample of Natural Questions and DeepMath-103K, half each
    held_out(questions, 100, 0)       (train, valid, note): no question of valid has a near-duplicate in
                                      train, unless nearly all are alike

The seed alone decides both. The ten benchmarks (tables.py) are only for testing: training() refuses their
names, so that no policy is tested on questions that it was trained on.
"""

import json
import random
import re
import unicodedata
from dataclasses import asdict

from benchmarks.files import CAP, cache_folder, save
from benchmarks.tables import BENCHMARKS, gold_texts
from rewards.questions import Question, read_questions
from world import services

ROWS = "https://datasets-server.huggingface.co/rows"  # rows of any public Hugging Face dataset, by offset
PAGE = 20  # rows per request (the API allows 100): small pages spread a sample over the whole set
NEAR = 0.8  # questions that share this fraction of their words are near-duplicates
TRAINING = {"nq": ("RUC-NLPIR/FlashRAG_datasets", "nq"), "deepmath": ("zwhe99/DeepMath-103K", "default")}


def training(names, limit=1000, seed=0, cache=None):
    """`limit` questions of "nq", "deepmath" or "nq+deepmath" (equal shares, shuffled).

    The released set is all 182 190 rows of both, but the paper's steps (some 32, read off its figures, of 32
    questions) use only about a thousand of them: the default.
    """
    parts = list(dict.fromkeys(names.split("+")))
    for part in parts:
        if part not in TRAINING:
            why = f"no training set is called {part!r}"
            if part in BENCHMARKS:
                why = f"{part} is a test benchmark: trained or chosen on it, "
                why += "a policy's accuracy there would say nothing"
            raise ValueError(f"{why}; use {', '.join(TRAINING)} or {'+'.join(TRAINING)}.")
    if limit < len(parts):
        raise ValueError(f"a limit of {limit} is too few for {names}; use {len(parts)} or more.")
    questions = []
    for i, part in enumerate(parts):
        share = limit // len(parts) + (i < limit % len(parts))
        path = cache_folder(cache) / f"{part}-seed{seed}-{share}.jsonl"
        if not path.exists():
            save(path, "".join(json.dumps(asdict(question)) + "\n" for question in sample(part, share, seed)))
        questions += read_questions(path)
    random.Random(f"{names} {seed}").shuffle(questions)
    return questions


def sample(name, number, seed):
    """`number` questions, from pages of the set in an order that the seed decides."""
    dice, found = random.Random(f"{name} {seed}"), {}
    with services.session() as session:
        starts = list(range(0, rows(session, name, 0, 1)[0], PAGE))
        dice.shuffle(starts)
        for start in starts:
            for question in filter(None, rows(session, name, start, PAGE)[1]):
                found.setdefault(tuple(words_of(question.question)), question)
            if len(found) >= number:
                break
    if not found:
        raise ValueError(f"{ROWS} gave no usable row of {name}; use --data FILE with questions of your own.")
    return list(found.values())[:number]


def rows(session, name, offset, length):
    """(the number of rows in the set, `length` rows from `offset` on: [Question or None])"""
    dataset, config = TRAINING[name]
    where = {"dataset": dataset, "config": config, "split": "train", "offset": offset, "length": length}

    def read(data):
        return int(data["num_rows_total"]), [question_of(entry, name) for entry in data["rows"]]

    try:
        return services.api(session, "GET", ROWS, params=where, seconds=60, limit=CAP, read=read)
    except services.ServiceError as why:
        raise ValueError(f"{dataset} cannot be downloaded: {why}; try later, or use --data FILE with "
                         "questions of your own.") from None


def question_of(entry, name):
    """A row of the API as a Question; None if its question or gold is missing, truncated or too long.

    {"row_idx": 7, "row": {"question": "who wrote emma", "golden_answers": ["Jane Austen", "Austen"]}}
        -> Question("who wrote emma?", "Jane Austen", aliases=("Austen",), id="nq-7", kind="nq")
    """
    row, gold = entry["row"], "golden_answers" if name == "nq" else "final_answer"
    text, value = row.get("question"), row.get(gold)
    truncated = {"question", gold} & set(entry.get("truncated_cells") or [])
    if truncated or not isinstance(text, str) or not text.strip():
        return None
    try:
        answer, *aliases = gold_texts(value)
    except ValueError:
        return None
    text = text.strip() + ("?" if name == "nq" and not text.strip().endswith("?") else "")
    return Question(text, answer, tuple(aliases), (), f"{name}-{entry.get('row_idx')}", name)


def words_of(text):
    """The words and signs without case, accents and articles: "What is a Café?" -> ["what", "is", "cafe"]"""
    plain = re.sub("[\u0300-\u036f]", "", unicodedata.normalize("NFKD", text.casefold()))
    return [word for word in re.findall(r"[\w.]*\w|[-+*/%]", plain) if word not in ("a", "an", "the")]


def held_out(questions, number, seed):
    """(train, valid, note): `number` questions for validation, and the rest for training.

    A question that shares four fifths of its words with one for validation is in neither: "Who wrote Emma?"
    and "who wrote the emma" count as the same, and so do "What is 3 + 5?" and "What is 5 + 3?". If this would
    leave less than a quarter of the questions, as of those made by a template, only those that share all
    words are left out. note: a sentence that says how many, or "".
    """
    words = [frozenset(words_of(question.question) or [question.question]) for question in questions]
    order, valid = list(range(len(questions))), {}  # valid: {words: index}
    random.Random(f"held out {seed}").shuffle(order)
    for i in order:
        if len(valid) < number:
            valid.setdefault(words[i], i)

    def unlike(share):
        """The questions that share less than this with each of those for validation."""
        return [question for question, a in zip(questions, words)
                if not any(len(a & b) >= share * len(a | b) for b in valid)]

    train, shared = unlike(NEAR), "four fifths of their"
    if 4 * len(train) < len(questions) - len(valid):
        train, shared = unlike(1), "all"
    dropped = len(questions) - len(train) - len(valid)
    note = (f"{dropped} of {len(questions)} questions are left out, because they share {shared} words with "
            f"one of the {len(valid)} held out for validation: --valid FILE.jsonl keeps them")
    if not train:
        raise ValueError(f"no question is left to train on: {note}.")
    return train, [questions[i] for i in valid.values()], note if dropped else ""
