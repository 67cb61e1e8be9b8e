"""Searches: the search tools. Each turns a query into lines "[1] title (url): text", or an error.

    wikipedia_search("atomic number of iron", "toy/corpus.jsonl")   # an offline corpus
    wikipedia_search("Eisen", "wikipedia:de")                       # the live Wikipedia
    google_search("iron")                                           # with a key of Serper
    web_search("https://en.wikipedia.org/wiki/Iron", "melting point")
    web_search("https://iron.org/melting", "melting point", corpus="mine.jsonl")   # a page of it

An offline corpus is a JSONL file of {"title": ..., "text": ...}: free, fast, and the same in every
run. Lines that also have a "url" are pages: web_search reads them from the corpus, and no others. A
search that fails raises services.ServiceError; tools.run_tool() makes it the result of the call.

Texts are split into passages, which SQLite's full-text search FTS5 ranks by bm25. It gets them as
words that words_of() has found, in texts and in queries alike.
"""

import contextlib
import functools
import json
import math
import os
import re
import sqlite3
import threading
import time
import unicodedata
import zlib
from collections import deque
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from world import pages, services
from world.mistakes import Mistake, refuse_link
from world.text import printable, truncate, visible

PASSAGE = 1100  # characters of a passage, so that k = 3 of them fit into a result
IN_MEMORY = 8_000_000  # bytes of a corpus; the index of a larger one is a file beside it
FULL = re.compile(rf"\S.{{0,{PASSAGE - 1}}}(?!\S)|\S{{{PASSAGE}}}")
NOTHING = re.compile(r"Error: no \w+ matches ")  # the answer of a search that found nothing
LIVE = "wikipedia:"  # with a language behind it: not a file, but the live Wikipedia
WIKIPEDIA = "https://{}.wikipedia.org/w/api.php"
SERPER = "https://google.serper.dev/search"
STOP_WORDS = set(
    "a an and are as at be by did do does for from how in is it of on or that the their this to "
    "was were what when where which who whom whose why with".split()
)


# -------------------------------------------------------------------------------- words, passages
# Chinese, Japanese, Thai, Lao, Burmese, Khmer and others; Korean, whose particles join the words
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u3005-\u3007\u3041-\u3096"
    "\u30a1-\u30fa\u30fc-\u30ff\u3400-\u9fff\ua980-\ua9df\uaa60-\uaa7f\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
RUNS = re.compile(rf"([{UNSPACED}]+)|[^\W_{UNSPACED}]+")
# What STOP_WORDS are to a query in these scripts
PARTICLES = re.compile(
    "(です|ます|でした)か?|いつ|どこ|いく[つら]|什么|什麼|多少|คือ|อะไร|ของ|เท่าไร|เท่าไหร่|ที่ไหน|ใคร"
    "|[のはがをにでともへや何誰的是了在和与與呢吗嗎几幾谁哪]"
)


def words_of(text, query=False):
    """The words of a text, in lower case, without accents: "Curaçao, 1954" -> ["curacao", "1954"].

    Of a script without spaces: all characters and all pairs of neighbours. A query has the pairs
    only, or else everything would match it: "融点は" -> ["融点", "点は"]
    """
    if text.isascii():
        return re.findall("[a-z0-9]+", text.lower())
    bare = unicodedata.normalize("NFKD", visible(text))
    bare = "".join(c for c in bare if not unicodedata.combining(c))
    words = []
    for found in RUNS.finditer(unicodedata.normalize("NFC", bare).lower()):
        run = found[1]
        pairs = [run[i : i + 2] for i in range(len(run) - 1)] if run else []
        words += pairs or [found[0]]
        if pairs and not query:
            words += run
    return words


def query_words(query):
    """The different words of a query, without the common ones, unless it has no others."""
    words = words_of(PARTICLES.sub(" ", visible(query)), query=True)
    words = [word for word in words if word not in STOP_WORDS] or words_of(query, query=True)
    return list(dict.fromkeys(words))


def passages(text):
    """The text in passages of at most PASSAGE characters, without line breaks, split at spaces. A
    longer run without a space is split where a passage is full."""
    return FULL.findall(" ".join(visible(text).split()))


# --------------------------------------------------------------------------------------- ranking
def fill(table, rows):
    """Index these (title, text, url). The passages that are shown are in `passages`, their words in
    `words`; `vocabulary` says in how many passages each word occurs."""
    table.execute("create table passages (title, text, url)")
    table.execute("create index pages on passages(url)")
    # words_of() has removed the accents. M: vowels of Thai and others are marks
    tokens = """tokenize = "unicode61 remove_diacritics 0 categories 'L* N* M* Co'\""""
    table.execute(f"create virtual table words using fts5(head, body, content = '', {tokens})")
    table.execute("create virtual table vocabulary using fts5vocab(words, row)")
    for row in rows:
        id = table.execute("insert into passages values (?, ?, ?)", row).lastrowid
        indexed = (" ".join(words_of(text)) for text in row[:2])
        table.execute("insert into words(rowid, head, body) values (?, ?, ?)", (id, *indexed))


def best(table, select, words, k, operator="OR"):
    """`select` of the best k passages with any of the words; with operator "", with all of them."""
    match = f" {operator} ".join(f'"{word}"' for word in words)  # in quotes, NOT and AND are words
    command = f"""select {select} from words join passages on passages.rowid = words.rowid
                  where words match ? order by bm25(words, 5, 1), words.rowid limit ?"""
    return table.execute(command, (match, k))


def ranked(texts, query, k):
    """The indices of the k texts nearest to a query, the best first; of the first k if none has a
    word of the query."""
    if words := query_words(query):
        with contextlib.closing(sqlite3.connect(":memory:")) as table:
            fill(table, (("", text, "") for text in texts))
            if found := [i for (i,) in best(table, "words.rowid - 1", words, k)]:
                return found
    return range(min(k, len(texts)))


# ------------------------------------------------------------------------------ wikipedia_search
LOCK = threading.Lock()  # one index, many threads


def rows_of(corpus):
    """The (title, text, URL or "") of each passage. ValueError "corpus.jsonl:3: ..." for a line of
    another form. The URL is written as pages.parse_url() writes it, so that equal addresses are
    equal texts."""
    with open(corpus, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                title, text, url = row["title"], row["text"], row.get("url") or ""
                (title + text).encode()  # half of a surrogate pair is valid JSON but no text
                url = pages.parse_url(url.strip()).url if url else ""
            except (*services.SHAPE_ERRORS, services.ServiceError) as why:
                form = '{"title": "...", "text": "..."}, and may have a "url": "..."'
                raise Mistake(f"{corpus}:{number}: each line must be {form} ({why})") from why
            for passage in passages(text) or [""]:
                yield visible(title), passage, url


@functools.lru_cache(maxsize=8)
def index(corpus):
    """The index of a corpus, an SQLite connection: in memory, or in a file beside a large corpus.

    That file is written in one transaction, so half of one counts as none; of several processes,
    one writes it, and the others wait. If the corpus changes, it is written again."""
    size, version = os.path.getsize(corpus), "pragma user_version"
    # ctime, too: whoever sends a corpus can choose its size and mtime, and add a false index
    times = os.stat(corpus).st_mtime_ns, os.stat(corpus).st_ctime_ns
    writable = os.access(Path(corpus).parent, os.W_OK)
    code = Path(__file__).read_bytes()  # it decides what the index holds
    wanted = zlib.crc32(f"{size} {times}".encode() + code) >> 1
    path = f"{corpus}.fts5" if size > IN_MEMORY and writable else ":memory:"
    for end in ("", "-journal", "-wal", "-shm"):  # SQLite writes these beside it
        refuse_link(path + end, "its other end would be overwritten")
    table = sqlite3.connect(path, timeout=3600, check_same_thread=False, isolation_level=None)
    if table.execute(version).fetchone() == (wanted,):
        return table
    with table:  # commits, or undoes all of it
        table.execute("begin immediate")  # here, the others wait
        if table.execute(version).fetchone() != (wanted,):
            for name in ("vocabulary", "words", "passages"):
                table.execute(f"drop table if exists {name}")
            what = f"indexing {printable(Path(corpus).name)}"
            fill(table, tqdm(rows_of(corpus), what, unit=" passages", delay=2, disable=None))
            if not table.execute("select 1 from passages limit 1").fetchone():
                raise Mistake(f"{corpus}: this corpus of wikipedia_search has no passages")
            table.execute(f"{version} = {wanted}")
    return table


def is_live(corpus):
    """Is this the live Wikipedia, or else a file? Mistake if it is neither."""
    if not corpus.startswith(LIVE):
        if not Path(corpus).is_file():
            raise Mistake(f"{corpus}: there is no such corpus")
        return False
    # the language is a part of a host name
    if not re.fullmatch(r"wikipedia:[a-z]{2,12}(-[a-z]+)*", corpus):
        raise Mistake(f"{corpus} names no Wikipedia: give its language, as in wikipedia:de")
    return True


def wikipedia_search(query, corpus, k=3):
    """The best k passages, one a line: "[1] Iron: Iron is a ...", with the URL of those that are on
    a page. corpus: a JSONL file or "wikipedia:en"."""
    if corpus.startswith(LIVE):
        return wikipedia_online(visible(query), corpus.removeprefix(LIVE), k)
    words = query_words(query)
    with LOCK:
        rows = matching(index(corpus), words, k) if words else []
    return numbered((title, url, text) for title, text, url in rows) or nothing(query, "passage")


def matching(table, words, k):
    """(title, text, url) of the best passages with all of the words, or else with more than half.

    A passage that shares only a number or a common word with the query is no answer. Every passage
    with more than half of the words has at least one of the rarer half, so it is enough to look at
    passages with one of those: few, in a corpus of any size."""
    if rows := best(table, "title, text, url", words, k, "").fetchall():
        return rows
    frequency = "select doc from vocabulary where term = ?"
    rare = sorted(words, key=lambda word: table.execute(frequency, (word,)).fetchone() or (0,))
    likely = best(table, "title, text, url", rare[: (len(rare) + 1) // 2], 1000)
    enough = lambda row: 2 * len({*words} & {*words_of(row[0]), *words_of(row[1])}) > len(words)
    return list(islice(filter(enough, likely), k))


def nothing(query, what):
    return f"Error: no {what} matches {truncate(query, 200)!r}. Try other or fewer words."


def numbered(found):
    """[(title, url or "", text)] as lines "[1] title (url): text"; "" if there are none."""
    lines = []
    for number, (title, url, text) in enumerate(found, 1):
        head = f"{truncate(title, 200)} ({url})" if url else truncate(title, 200)
        lines.append(" ".join(f"[{number}] {head}: {truncate(text, PASSAGE)}".split()))
    return services.without_whole_keys("\n".join(lines))  # a service may quote the key that it got


# ------------------------------------------------------------------------------------ web_search
def select(corpus, command, *values):
    with LOCK:
        return index(corpus).execute(command, values).fetchall()


def has_pages(corpus):
    """Has an offline corpus lines with a URL?"""
    return bool(select(corpus, "select 1 from passages where url > '' limit 1"))


def page_of(corpus, url):
    """(the URL, its passages) of a page of the corpus; ServiceError for another."""
    url = pages.parse_url(url).url
    rows = select(corpus, "select text from passages where url = ? order by rowid", url)
    if not rows:
        why = "take one that a result has shown"
        raise services.ServiceError(f"this address is not a page of the corpus: {why}")
    return url, [text for (text,) in rows if text]


def web_search(url, query, k=3, corpus=None):
    """The passages of a page nearest to the query; its first ones if none has a word of the query.

    corpus: a JSONL file whose pages are the only ones that can be read; None: any public page."""
    if corpus:
        url, texts = page_of(corpus, url.strip())
    else:
        url, text = pages.fetch(url.strip())
        texts = passages(text)
    order = ranked(texts, query, k)
    found = [(f"passage {i + 1} of {len(texts)}", url, texts[i]) for i in order]
    return numbered(found) or f"Error: {url} has no text."


# -------------------------------------------------------------------------- other searches online
SESSION = services.session(tries=3)
# Wikimedia answers 200 requests a minute of a client that says who runs it, and perhaps 10 of
# another. (Other hosts do not learn the contact.) So no more than 190 are sent, by all GPUs.
CONTACT = os.environ.get("WIKIMEDIA_CONTACT", "").encode("ascii", "ignore").decode().strip()
WIKIMEDIA_AGENT = services.AGENT.format(CONTACT) if CONTACT else services.USER_AGENT
PER_MINUTE = max(1, 190 // int(os.environ.get("WORLD_SIZE", 1)))
SENT, PACE = deque([-math.inf] * PER_MINUTE, maxlen=PER_MINUTE), threading.Lock()


def wikipedia_online(query, language, k):
    """The best passages of the k best pages of the live Wikipedia, with the URLs of these pages."""
    search = {"list": "search", "srsearch": truncate(query, 250), "srlimit": k, "srprop": ""}
    rows, found = [], mediawiki(language, search)["search"]
    for hit in found:
        content = {"prop": "extracts|info", "inprop": "url", "explaintext": 1}
        page = mediawiki(language, content | {"pageids": hit["pageid"]})["pages"][0]
        title, url, text = page["title"], page["fullurl"], page.get("extract") or ""
        rows += [(title, url, passage) for passage in passages(text)]
    if found and not rows:  # not "no page matches": that would be kept as an answer
        raise services.ServiceError("Wikipedia sent no text of the pages that it found")
    order = ranked([f"{title} {text}" for title, _, text in rows], query, k)
    return numbered(rows[i] for i in order) or nothing(query, "page")


def mediawiki(language, params):
    """The result of one query of the MediaWiki API."""
    with PACE:
        time.sleep(max(0, SENT[0] + 60 - time.monotonic()))
        SENT.append(time.monotonic())
    params = {"action": "query", "format": "json", "formatversion": 2, **params}
    headers = {"User-Agent": WIKIMEDIA_AGENT}
    url, read = WIKIPEDIA.format(language), lambda data: data["query"]
    return services.api(SESSION, "GET", url, params=params, headers=headers, read=read)


def google_search(query, k=5):
    """Ranked titles, URLs and snippets, from Serper.

    Only a list of results: an answer written by the search service's own language model is left
    out. With it, that model would be measured, and the planner rewarded for passing the question
    on. A result without an address is shown, one without a title under its address.
    """
    headers = {"X-API-KEY": os.environ["SERPER_API_KEY"]}
    fields = lambda row: [str(row.get(name) or "") for name in ("title", "link", "snippet")]
    read = lambda data: [fields(row) for row in data.get("organic", []) if isinstance(row, dict)]
    body = {"q": visible(query), "num": k}
    found = services.api(SESSION, "POST", SERPER, headers=headers, json=body, read=read)
    found = [(title or url, url, text) for title, url, text in found if title or url or text]
    return numbered(found[:k]) or nothing(query, "page")


# ----------------------------------------------------------------------------------------- cache
def remembered(cache, name, run):
    """The tool `run` with a cache: a call runs once, even if it finds nothing, unless it fails."""

    def search(**arguments):
        key = json.dumps(arguments, sort_keys=True)
        result = cache.get(name, key)
        if result is None:
            result = run(**arguments)
            if isinstance(result, str) and (
                NOTHING.match(result) or not result.startswith("Error:")
            ):
                cache.put(result, name, key)
        return result

    return search
