"""benchmarks.training"""

import json
import random
from dataclasses import asdict

from benchmarks.files import CAP, _cache, _write
from benchmarks.tables import BENCHMARKS, _golds
from rewards.questions import Question, read_questions
from rewards.rules import normalise
from world import services

ROWS = "https://datasets-server.huggingface.co/rows"                          # rows of any public Hugging Face dataset, by offset
PAGE = 20                       # rows per request: small pages spread a sample over the whole set (the API allows 100)
NEAR = 0.8                      # two questions that share this part of their words are the same question
TRAINING = {"nq": ("RUC-NLPIR/FlashRAG_datasets", "nq"), "deepmath": ("zwhe99/DeepMath-103K", "default")}


def training(names, limit=1000, seed=0, cache=None) -> list[Question]:
    """`limit` questions of "nq", "deepmath" or "nq+deepmath" (equal shares, shuffled); the same for the same limit and seed.

    The paper trains on all 182 190 rows of both, of which its 32 steps of 32 questions see about a thousand: the default.
    """
    parts = list(dict.fromkeys(names.split("+")))
    for part in parts:
        if part in BENCHMARKS:
            raise ValueError(f"{part} is a test benchmark: trained or chosen on it, a policy's accuracy there would say nothing; "
                             f"use {', '.join(TRAINING)} or {'+'.join(TRAINING)}.")
        if part not in TRAINING:
            raise ValueError(f"no training set is called {part!r}; use {', '.join(TRAINING)} or {'+'.join(TRAINING)}.")
    if limit < len(parts):
        raise ValueError(f"a limit of {limit} is too few for {names}; use {len(parts)} or more.")
    questions = []
    for i, part in enumerate(parts):
        share = limit // len(parts) + (i < limit % len(parts))
        path = _cache(cache) / f"{part}-seed{seed}-{share}.jsonl"
        if not path.exists():
            _write(path, "".join(json.dumps(asdict(question)) + "\n" for question in _sample(part, share, seed)))
        questions += read_questions(path)                    # written and read the same way, so that a second run is the first
    random.Random(f"{names} {seed}").shuffle(questions)
    return questions


def _sample(name, number, seed):
    """Pages in a pseudo-random order of the whole set, until there are enough rows that can be used."""
    dice, found, known = random.Random(f"{name} {seed}"), [], set()
    with services.session() as session:
        starts = list(range(0, _rows(session, name, 0, 1)["num_rows_total"], PAGE))
        dice.shuffle(starts)
        for start in starts:
            for row in _rows(session, name, start, PAGE)["rows"]:
                question = _train_question(row, name)
                if question and normalise(question.question) not in known:
                    known.add(normalise(question.question))
                    found.append(question)
            if len(found) >= number:
                break
    if not found:
        raise ValueError(f"{ROWS} gave no usable row of {name}; use --data FILE with questions of your own.")
    return found[:number]


def _rows(session, name, offset, length):
    dataset, config = TRAINING[name]
    where = {"dataset": dataset, "config": config, "split": "train", "offset": offset, "length": length}
    try:
        data, _ = services.api(session, "GET", ROWS, params=where, seconds=60, limit=CAP)
    except services.Failed as error:
        raise ValueError(f"{dataset} cannot be downloaded: {error}; try later, or use --data FILE with questions of your own.") from None
    if not (isinstance(data, dict) and isinstance(data.get("rows"), list) and type(data.get("num_rows_total")) is int
            and all(isinstance(entry, dict) and isinstance(entry.get("row"), dict) for entry in data["rows"])):
        raise ValueError(f"{ROWS} answered in another form for {dataset}; use --data FILE with questions of your own.")
    return data


def _train_question(entry, name):
    """A row of the API as a Question, or None where text or gold is missing, cut short or longer than tasks.py reads.

    {"row_idx": 7, "row": {"question": "who wrote emma", "golden_answers": ["Jane Austen", "Austen"]}, "truncated_cells": []}
        -> Question("who wrote emma?", "Jane Austen", aliases=("Austen",), id="nq-7", kind="nq")
    """
    row, gold = entry["row"], "golden_answers" if name == "nq" else "final_answer"
    text, value = row.get("question"), row.get(gold)
    if {"question", gold} & set(entry.get("truncated_cells") or []) or not isinstance(text, str) or not text.strip():
        return None
    try:
        answer, *aliases = _golds(value, "")
    except ValueError:
        return None
    text = text.strip() + ("?" if name == "nq" and not text.strip().endswith("?") else "")
    return Question(text, answer, tuple(aliases), (), f"{name}-{entry.get('row_idx')}", name)


def held_out(questions, number, seed):
    """(train, valid, note): `number` validation questions, of the rest what is not nearly one of them, and a
    sentence that says how many are left out for that ("" for none).

    Nearly: four fifths of the words of both are shared. "Who wrote Emma?" and "who wrote the emma" count as
    one, and so do "What is 3 + 5?" and "What is 5 + 3?".
    """
    words = [frozenset(normalise(question.question).split()) for question in questions]
    order, valid, seen = list(range(len(questions))), [], set()
    random.Random(f"held out {seed}").shuffle(order)
    for i in order:
        if len(valid) < number and words[i] not in seen:
            seen.add(words[i])
            valid.append(i)
    train = [question for question, mine in zip(questions, words)
             if not any(len(mine & theirs) >= NEAR * len(mine | theirs) for theirs in seen)]
    dropped = len(questions) - len(train) - len(valid)
    note = (f"{dropped} of {len(questions)} questions are left out, because they share four fifths of their "
            f"words with one of the {len(valid)} held out for validation: --valid FILE.jsonl keeps them")
    if not train:                                        # nor can it be if there are too few for valid
        raise ValueError(f"no question is left to train on: {note}.")
    return train, [questions[i] for i in valid], note if dropped else ""
