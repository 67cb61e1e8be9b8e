"""Searches: the search tools. Each turns a query into lines "[1] title (url): text", or into an error.

    wikipedia_search("atomic number of iron", "toy/corpus.jsonl")   # an offline corpus, through FTS5
    wikipedia_search("Eisen", "wikipedia:de")                       # the live Wikipedia
    google_search("iron")                                           # with a key of Serper
    web_search("https://en.wikipedia.org/wiki/Iron", "melting point")
    web_search("https://iron.org/melting", "melting point", corpus="mine.jsonl")   # a page of the corpus

An offline corpus is a JSONL file of {"title": ..., "text": ...}: free, fast, and the same in every run. Lines
that also have a "url" are pages: web_search reads them from the corpus, and no others. A search that fails
raises services.ServiceError; tools.run_tool() makes it the result of the call.
"""
import contextlib
import functools
import json
import os
import sqlite3
import threading
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from tqdm import tqdm

from world import pages, services
from world.files import check_file
from world.ranking import best, passages, ranked, table_of, words_of
from world.text import truncate

PASSAGE_BUDGET = 1300    # characters of one passage, about 200 words, so that k = 3 of them fit into a result
IN_MEMORY = 8_000_000    # bytes of a corpus; the index of a larger one is a file beside it
NOTHING = "Error: no"    # the beginning of the answer when a search has worked but found nothing
LIVE = "wikipedia:"      # with a language behind it: not a file, but the live Wikipedia
WIKIPEDIA = "https://{}.wikipedia.org/w/api.php"
SERPER = "https://google.serper.dev/search"
COLUMNS = ["title", "text", "url unindexed"]    # of the index of a corpus; a query finds no words of a URL
STOP_WORDS = tuple("a an and are as at be by did do does for from how in is it of on or that the their "
                   "this to was were what when where which who whom whose why with".split())


# ------------------------------------------------------------ wikipedia_search
LOCK = threading.Lock()  # one index, many threads


def rows_of(corpus):
    """The (title, text, URL or "") of each line. ValueError "corpus.jsonl:3: ..." for a line of another form.

    The URL is written as pages.parse_url() writes it, so that equal addresses are equal texts."""
    with open(corpus, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    row = json.loads(line)
                    texts = [row.get("title"), row.get("text"), row.get("url") or ""] \
                        if isinstance(row, dict) else [None]
                    if not all(isinstance(text, str) for text in texts):
                        raise ValueError('each line must be {"title": "...", "text": "..."}, '
                                         'and may have a "url": "..."')
                    "".join(texts).encode()  # half of a surrogate pair is valid JSON but no text
                    title, text, url = texts
                    yield title, text, pages.parse_url(url.strip()).url if url else ""
            except (ValueError, services.ServiceError) as e:
                raise ValueError(f"{corpus}:{number}: {e}") from e


@functools.lru_cache(maxsize=8)
def index(corpus: str) -> sqlite3.Connection:
    """The full-text index of a corpus: in memory, or that of a large corpus in corpus.jsonl.fts5."""
    try:
        check_file(corpus, "write the corpus into one, and give that")
        stat = os.stat(corpus)
        version = f"{stat.st_size} {stat.st_mtime_ns} {', '.join(COLUMNS)}"
        return build(corpus, ":memory:") if stat.st_size <= IN_MEMORY else index_in_file(corpus, version)
    except OSError as e:
        raise ValueError(f"{corpus}: cannot read this corpus of wikipedia_search ({e.strerror})") from e


def index_in_file(corpus, version) -> sqlite3.Connection:
    """The index in the file beside a corpus, built once. In memory where no file can be written."""
    beside = Path(f"{corpus}.fts5")
    with contextlib.suppress(sqlite3.DatabaseError):  # no such file, half a file, not a file of ours
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(beside))}?mode=ro", uri=True)) as table:
            if table.execute("select of from version").fetchone() == (version,):
                return sqlite3.connect(beside, check_same_thread=False)
    half = beside.with_name(f"{beside.name}.{os.getpid()}")  # several processes may build, each its own file
    try:
        with contextlib.closing(build(corpus, half)) as table:
            table.execute("create table version as select ? as of", (version,))
            table.commit()
        half.replace(beside)
    except (OSError, sqlite3.OperationalError):  # a folder that we may not write to, a full disk
        return build(corpus, ":memory:")
    finally:
        half.unlink(missing_ok=True)
    return sqlite3.connect(beside, check_same_thread=False)


def build(corpus, path) -> sqlite3.Connection:
    """Index every passage; 100 000 of 100 words take about 10 s."""
    name = Path(corpus).name
    rows = tqdm(rows_of(corpus), f"indexing {name}", unit=" passages", delay=2, leave=False, disable=None)
    table = table_of(COLUMNS, rows, path)
    # the number of passages in which each word occurs
    table.execute("create virtual table vocabulary using fts5vocab(passages, row)")
    # the passages of each page: FTS5 itself would read the whole corpus to find a URL
    table.execute("create table pages as select url, rowid as passage from passages where url != ''")
    table.execute("create index page on pages(url, passage)")
    if not table.execute("select 1 from passages limit 1").fetchone():
        raise ValueError(f"{corpus}: this corpus of wikipedia_search has no passages")
    return table


def wikipedia_search(query: str, corpus: str, k: int = 3) -> str:
    """The best k passages, one a line: "[1] Iron: Iron is a ...", with the URL of those that are on a page.
    corpus: a JSONL file or "wikipedia:en"."""
    if corpus.startswith(LIVE):
        return wikipedia_online(query, corpus.removeprefix(LIVE), k)
    words = list(dict.fromkeys(words_of(query)))
    words = [word for word in words if word not in STOP_WORDS] or words
    with LOCK:
        rows = matching(index(corpus), words, k) if words else []
    return numbered((title, url, text) for title, text, url in rows) or nothing(query, "passage")


def matching(table, words, k) -> list[tuple[str, str, str]]:
    """(title, text, url) of the best passages with all of the words, or else with more than half of them.

    A passage that shares only a number or a common word with the query is no answer. Every passage with more
    than half of the words has at least one of the rarer half, so it is enough to look at passages with one
    of those: few, in a corpus of any size."""
    search = functools.partial(best, table, "title, text, url", weights=", 5, 1")
    if rows := search(words, k, "").fetchall():
        return rows
    frequency = "select doc from vocabulary where term = ?"
    rare = sorted(words, key=lambda word: table.execute(frequency, (word,)).fetchone() or (0,))
    candidates = search(rare[:(len(rare) + 1) // 2], 1000)
    return list(islice((row for row in candidates if more_than_half(words, " ".join(row[:2]))), k))


def more_than_half(words: list[str], text: str) -> bool:
    """Does the text contain more than half of these words?"""
    lower = text.lower()
    # a fast test first: words that are not even parts of words
    if text.isascii() and 2 * sum(word in lower for word in words) <= len(words):
        return False
    return 2 * len(set(words) & set(words_of(text))) > len(words)


def nothing(query, what):
    return f"{NOTHING} {what} matches {truncate(query, 200)!r}. Try other or fewer words."


def numbered(found) -> str:
    """[(title, url or "", text)] as lines "[1] title (url): text"; "" if there are none."""
    lines = []
    for number, (title, url, text) in enumerate(found, 1):
        head = f"[{number}] {title} ({url})" if url else f"[{number}] {title}"
        lines.append(truncate(" ".join(f"{head}: {text}".split()), PASSAGE_BUDGET))
    return services.without_whole_keys("\n".join(lines))  # a service may quote the key that it got


# ------------------------------------------------------------ web_search
def has_pages(corpus: str) -> bool:
    """Has an offline corpus lines with a URL?"""
    with LOCK:
        return index(corpus).execute("select 1 from pages limit 1").fetchone() is not None


def offline_page(url: str, corpus: str) -> tuple[str, list[str]]:
    """(its URL, its passages) of a page of the corpus; ServiceError for another. Nothing is connected to."""
    url = pages.parse_url(url).url
    on_it = "rowid in (select passage from pages where url = ?)"
    command = f"select text from passages where {on_it} order by rowid"
    with LOCK:
        texts = index(corpus).execute(command, (url,)).fetchall()
    if not texts:
        raise services.ServiceError("this address is not a page of the corpus: take one that a result has "
                                    "shown")
    return url, [passage for (text,) in texts for passage in passages(text)]


def live_page(url: str) -> tuple[str, list[str]]:
    """(its last URL, its passages) of a public page."""
    page = pages.fetch(url)
    return page.url, passages(page.text)


def web_search(url: str, query: str, k: int = 3, corpus: str | None = None) -> str:
    """The passages of a page nearest to the query; its first ones if none has a word of the query.

    corpus: a JSONL file whose pages are the only ones that can be read; None: any public page."""
    address, parts = offline_page(url.strip(), corpus) if corpus else live_page(url.strip())
    order = ranked([(part,) for part in parts], query, k) or range(min(k, len(parts)))
    found = [(f"passage {i + 1} of {len(parts)}", address, parts[i]) for i in order]
    return numbered(found) or f"Error: {address} has no text."


# ------------------------------------------------------------ searches of the network
SESSION = services.session(tries=3)


def wikipedia_online(query: str, language: str, k: int) -> str:
    """The best passages of the k best pages of the live Wikipedia, with the URLs of these pages."""
    search = {"list": "search", "srsearch": truncate(query, 250), "srlimit": k, "srprop": ""}
    page_ids = mediawiki(language, search, lambda found: [page["pageid"] for page in found["search"]])
    rows = []
    for page_id in page_ids:
        content = {"prop": "extracts|info", "inprop": "url", "explaintext": 1, "pageids": page_id}
        fields = lambda found: [found["pages"][0].get(key, "") for key in ("title", "fullurl", "extract")]
        title, url, text = mediawiki(language, content, fields)
        rows += [(title, url, passage) for passage in passages(text)]
    order = ranked([(title, text) for title, _, text in rows], query, k) or range(min(k, len(rows)))
    return numbered(rows[i] for i in order) or nothing(query, "page")


def mediawiki(language: str, params: dict, read):
    """One query of the MediaWiki API."""
    params = {"action": "query", "format": "json", "formatversion": 2, **params}
    parse = lambda data: (data["error"], None) if data.get("error") else (None, read(data["query"]))
    url = WIKIPEDIA.format(language)
    error, result = services.api(SESSION, "GET", url, params=params, read=parse)
    if error:
        raise services.ServiceError(f"Wikipedia answered: {truncate(str(error.get('info')), 200)}")
    return result


def google_search(query: str, k: int = 5) -> str:
    """Ranked titles, URLs and snippets, from Serper.

    Only a list of results: an answer that the search service's own language model wrote is left out. With
    it, that model would be measured, and the planner rewarded for passing the question on."""
    headers = {"X-API-KEY": os.environ["SERPER_API_KEY"]}
    found = services.api(
        SESSION, "POST", SERPER, headers=headers, json={"q": query, "num": k},
        read=lambda data: [(row["title"], row["link"], row.get("snippet", ""))
                           for row in data.get("organic", [])[:k]])
    return numbered(found) or nothing(query, "page")


def remembered(cache, name, run):
    """The tool `run` with a cache: each call runs once, even if it finds nothing, unless it fails."""
    def search(**arguments):
        key = json.dumps(arguments, sort_keys=True)
        if (cached := cache.get(name, key)) is not None:
            return cached
        if (result := run(**arguments)) is None:
            return None
        result = str(result)
        if not result.startswith("Error:") or result.startswith(NOTHING):
            cache.put(result, name, key)
        return result
    return search
