"""Ranking: the texts nearest to a query, by bm25, with SQLite's full-text search FTS5.

    ranked([("Iron", "a metal"), ("Gold", "a red metal")], "red metals", k=1)    # [1]

search.py keeps the table of a corpus; ranked() makes a table of a page's passages and drops it again.
"""
import contextlib
import re
import sqlite3
import unicodedata


def table_of(columns, rows, path=":memory:") -> sqlite3.Connection:
    """A new table "passages" of these rows. Threads may share it if only one at a time uses it."""
    table = sqlite3.connect(path, check_same_thread=False)
    options = "tokenize = 'unicode61 remove_diacritics 2'"
    table.execute(f"create virtual table passages using fts5({', '.join(columns)}, {options})")
    table.executemany(f"insert into passages values ({', '.join('?' * len(columns))})", rows)
    return table


def best(table, select, words, k, operator="OR", weights="") -> sqlite3.Cursor:
    """`select` of the best k rows with any of the words; with operator "", of rows with all of them."""
    match = f" {operator} ".join(f'"{word}"' for word in words)  # in quotes, NOT and AND are words too
    order = f"bm25(passages{weights}), rowid"
    command = f"select {select} from passages where passages match ? order by {order} limit ?"
    return table.execute(command, (match, k))


def ranked(rows: list[tuple[str, ...]], query: str, k: int) -> list[int]:
    """The indices of the best k rows, the best first; only rows with a word of the query. Never raises."""
    words = re.findall(r"[^\s\0-/:-@\[-`{-\x7f]+", clean(query[:10_000]))  # between ASCII punctuation
    if not rows or not words:
        return []
    columns = [f"c{n}" for n in range(len(rows[0]))]
    with contextlib.closing(table_of(columns, (tuple(map(clean, row)) for row in rows))) as table:
        return [index for (index,) in best(table, "rowid - 1", dict.fromkeys(words[:64]), max(k, 0))]


def clean(text: str) -> str:
    """The text without halves of surrogate pairs, which SQLite refuses."""
    return text.encode("utf-8", "replace").decode()


def words_of(text: str) -> list[str]:
    """'Curaçao, 1954' -> ['curacao', '1954']: lower-case words without accents, as FTS5 splits them."""
    if not text.isascii():
        bare = "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))
        text = unicodedata.normalize("NFC", bare)
    return re.findall(r"[^\W_]+", text.lower())


def passages(text: str, words: int = 200) -> list[str]:
    """The text in passages of `words` words. Longer "words" are split at 100 characters."""
    pieces = [word[i:i + 100] for word in text.split() for i in range(0, len(word), 100)]
    return [" ".join(pieces[i:i + words]) for i in range(0, len(pieces), words)]
