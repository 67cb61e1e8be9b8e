"""The toolbox: plain functions from strings to a string, each with the text by which the planner chooses it.

    tools = toolbox(["python_coder", "wikipedia_search"], corpus="toy/corpus.jsonl")
    print(describe("python_coder", tools["python_coder"]))       # what the planner and the executor read
    result, error = call(tools, "python_coder", {"code": "2 + 2"})  # ("4", False)

A tool never raises at the flow. What goes wrong, by the model's mistake or the world's, is a result that starts with
"Error:" and says what to do instead; it enters memory like any other result and the planner can react to it.
Adding a tool is one function and one entry in TOOLS.
"""

import contextlib
import functools
import json
import os
import re
import sqlite3
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from tqdm import tqdm

from world import pages, services
from world.text import truncate

PASSAGE_BUDGET = 1300    # characters of one passage, about 200 words, so that k = 3 of them fit into a result
IN_MEMORY = 8_000_000    # bytes of a corpus; the index of a larger one is kept in a file beside it
NOTHING = "Error: no"    # how the answer of a search begins that went well and found nothing
LIVE = "wikipedia:"      # followed by a language, the corpus is the live Wikipedia
WIKIPEDIA = "https://{}.wikipedia.org/w/api.php"
SERPER = "https://google.serper.dev/search"
GOOGLE = "https://www.googleapis.com/customsearch/v1"
STOP_WORDS = tuple("a an and are as at be by did do does for from how in is it of on or that the their this to was "
                   "were what when where which who whom whose why with".split())


# ---------------------------------------------------------------------------------------------- wikipedia_search
LOCK = threading.Lock()  # one index, many threads


def words(text: str) -> list[str]:
    """'Curaçao, 1954' -> ['curacao', '1954']: as FTS5's unicode61 splits it, without accents."""
    if not text.isascii():
        bare = "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))
        text = unicodedata.normalize("NFC", bare)
    return re.findall(r"[^\W_]+", text.lower())


def passages(corpus: str) -> Iterator[tuple[str, str]]:
    """The (title, text) of each line; ValueError "corpus.jsonl:3: ..." where it is not one."""
    number = 0
    try:
        with open(corpus, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("title", "text")):
                        raise ValueError('each line must be {"title": "...", "text": "..."}')
                    (row["title"] + row["text"]).encode()  # half of a surrogate pair is valid JSON but no text
                    yield row["title"], row["text"]
    except OSError as e:
        raise ValueError(f"{corpus}: cannot read this corpus of wikipedia_search ({e.strerror})") from e
    except ValueError as e:
        raise ValueError(f"{corpus}:{number}: {e}") from e


@functools.lru_cache(maxsize=8)
def index(corpus: str) -> sqlite3.Connection:
    """The corpus as a full-text index: in memory, or, of a large one, in a file beside it that is built once (corpus.jsonl.fts5)."""
    try:
        size, changed = (stat := os.stat(corpus)).st_size, stat.st_mtime_ns
    except OSError as e:
        raise ValueError(f"{corpus}: cannot read this corpus of wikipedia_search ({e.strerror})") from e
    if size <= IN_MEMORY:
        return build(corpus, ":memory:")
    beside, version = Path(f"{corpus}.fts5"), f"{size} {changed}"
    if not built(beside, version):
        half = beside.with_name(f"{beside.name}.{os.getpid()}")  # several processes may build; each renames a whole one
        try:
            table = build(corpus, half)
            table.execute("create table version as select ? as of", (version,))
            table.commit()
            table.close()
            half.replace(beside)
        except (OSError, sqlite3.OperationalError):              # a folder that we may not write to, a full disk
            return build(corpus, ":memory:")
        finally:
            half.unlink(missing_ok=True)
    return sqlite3.connect(beside, check_same_thread=False)


def built(path, version) -> bool:
    """Is this the whole index of the corpus as it is now?"""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as table:
            return table.execute("select of from version").fetchone() == (version,)
    except sqlite3.DatabaseError:
        return False


def build(corpus, path) -> sqlite3.Connection:
    """Index every passage; about 10 s for 100 000 of 100 words."""
    table = sqlite3.connect(path, check_same_thread=False)  # LOCK sees to one thread at a time
    table.execute("create virtual table passages using fts5(title, text, tokenize = 'unicode61 remove_diacritics 2')")
    table.execute("create virtual table vocabulary using fts5vocab(passages, row)")  # in how many passages each word stands
    rows = tqdm(passages(corpus), desc=f"indexing {Path(corpus).name}", unit=" passages", delay=2, leave=False, disable=None)
    if not table.executemany("insert into passages values (?, ?)", rows).rowcount > 0:
        raise ValueError(f"{corpus}: this corpus of wikipedia_search has no passages")
    return table


def wikipedia_search(query: str, corpus: str, k: int = 3) -> str:
    """The best k passages, one a line: "[1] Iron: Iron is a ...". corpus: a JSONL file, or "wikipedia:en" for the live one.

    From a file: passages with all words of the query, or else those with more than half of them. A passage that shares only a
    number or a common word with the query is no answer."""
    if corpus.startswith(LIVE):
        return wikipedia_online(query, corpus.removeprefix(LIVE), k)
    asked = list(dict.fromkeys(words(query)))
    asked = [word for word in asked if word not in STOP_WORDS] or asked
    with LOCK:
        search = index(corpus).execute
        found = search(BEST, (" ".join(map(quoted, asked)), k)).fetchall() if asked else []
        if asked and not found:
            # A passage with more than half of the words has one of the rarer half: few passages to look at, in a corpus of any size.
            rare = sorted(asked, key=lambda word: search("select doc from vocabulary where term = ?", (word,)).fetchone() or (0,))
            some = search(BEST, (" OR ".join(map(quoted, rare[: (len(rare) + 1) // 2])), 1000))
            found = list(islice((row for row in some if more_than_half(asked, " ".join(row))), k))
    return numbered([(title, "", text) for title, text in found]) or nothing(query, "passage")


BEST = "select title, text from passages where passages match ? order by bm25(passages, 5, 1), rowid limit ?"


def more_than_half(asked: list[str], text: str) -> bool:
    """Has the text more than half of these words?"""
    plain = text.lower()
    if text.isascii() and 2 * sum(word in plain for word in asked) <= len(asked):  # nor parts of its words: soon told
        return False
    return 2 * len(set(asked) & set(words(text))) > len(asked)


def quoted(word):
    """For FTS5: a word, never an operator."""
    return f'"{word}"'


def nothing(query, what):
    return f"{NOTHING} {what} matches {truncate(query, 200)!r}. Try other or fewer words."


def numbered(found) -> str:
    """[(title, url or "", text)] as lines: "[1] title (url): text"; "" for none."""
    lines = ((f"[{n}] {title} ({url})" if url else f"[{n}] {title}", text) for n, (title, url, text) in enumerate(found, 1))
    return "\n".join(truncate(" ".join(f"{head}: {text}".split()), PASSAGE_BUDGET) for head, text in lines)


# ---------------------------------------------------------------------------------------------- what asks the network
SESSION = services.session(tries=3)


def wikipedia_online(query: str, language: str, k: int) -> str:
    """Passages of the k best pages of the live Wikipedia, with their URLs: a search, the pages' plain texts, the best passages of all."""
    search = {"list": "search", "srsearch": truncate(query, 250), "srlimit": k, "srprop": ""}
    rows = []
    for number in mediawiki(language, search, lambda found: [page["pageid"] for page in found["search"]]):
        text = {"prop": "extracts|info", "inprop": "url", "explaintext": 1, "pageids": number}
        title, url, text = mediawiki(language, text, lambda found: [found["pages"][0].get(key, "") for key in ("title", "fullurl", "extract")])
        rows += [(title, url, passage) for passage in pages.passages(text)]
    best = pages.ranked([(title, text) for title, _, text in rows], query, k) or range(min(k, len(rows)))
    return numbered([rows[i] for i in best]) or nothing(query, "page")


def mediawiki(language: str, params: dict, read: Callable) -> list:
    """One query of the MediaWiki API. maxlag: when its databases are behind, it asks us to come back later, and we do."""
    params = {"action": "query", "format": "json", "formatversion": 2, "maxlag": 5, **params}
    for attempt in range(3):
        (error, found), headers = services.api(SESSION, "GET", WIKIPEDIA.format(language), params=params,
                                               read=lambda data: (data.get("error"), None if data.get("error") else read(data["query"])))
        if not error:
            return found
        if error.get("code") != "maxlag":
            break
        if (pause := services.wait(headers) or 5) > services.PATIENCE:
            break
        time.sleep(pause)
    raise services.Failed(f"Wikipedia answered: {truncate(str(error.get('info')), 200)}")


def google_search(query: str, k: int = 5) -> str:
    """Ranked titles, URLs and snippets, from Serper or from Google's Programmable Search, whichever there is a key for.

    A list of results, never an answer: some implementations ask a search service that is itself a stronger language model and
    writes the answer. Then it is that model which is measured, and the planner is rewarded for passing the question on."""
    if key := os.environ.get("SERPER_API_KEY"):
        place, asked, results = ("POST", SERPER), {"json": {"q": query, "num": k}, "headers": {"X-API-KEY": key}}, "organic"
    else:  # the key in a header: an address may be logged on its way
        params = {"q": query, "num": k, "cx": os.environ["GOOGLE_CSE_ID"]}
        place, asked, results = ("GET", GOOGLE), {"params": params, "headers": {"X-Goog-Api-Key": os.environ["GOOGLE_API_KEY"]}}, "items"
    found, _ = services.api(SESSION, *place, **asked, read=lambda data: [
        (row["title"], row["link"], row.get("snippet", "")) for row in data.get(results, [])[:k]])
    return numbered(found) or nothing(query, "page")


def web_search(url: str, query: str, k: int = 3) -> str:
    """The passages of a public page nearest the query, or its first ones where none has a word of the query."""
    page = pages.fetch(url.strip())
    parts = pages.passages(page.text)
    best = pages.ranked([(part,) for part in parts], query, k) or range(min(k, len(parts)))
    return numbered([(f"passage {i + 1} of {len(parts)}", page.url, parts[i]) for i in best]) or f"Error: {page.url} has no text."


def remembered(cache: services.Cache, name: str, run: Callable[..., str]) -> Callable[..., str]:
    """The tool, but what it has answered before it answers again, from the cache; also that there is nothing. What went wrong is
    tried again."""
    def search(**arguments):
        key = json.dumps(arguments, sort_keys=True)
        if (known := cache.get(name, key)) is not None:
            return known
        if not (result := run(**arguments)).startswith("Error:") or result.startswith(NOTHING):
            cache.put(result, name, key)
        return result
    return search
