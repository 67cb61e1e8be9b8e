"""Services: requests to servers that we chose (a search API, an engine), and a cache of their answers.

    session = services.session()
    data = services.api(session, "GET", "https://api.example.com/search", params={"q": "iron"})
    cache = services.Cache("answers.sqlite")            # an answer in it is not requested again

A service that we chose is trusted but unreliable. session() retries refusals (429, 5xx, a dropped
connection), through urllib3; api() limits the answer in bytes and seconds, and retries what is not JSON. What
still fails is ServiceError: one sentence that never shows the key. A page that a language model chose is not
trusted: pages.py reads those.
Not covered: a service that sends its headers byte by byte can hold up api().
"""
import email.utils
import html
import http.client
import json
import os
import random
import re
import sqlite3
import threading
import time
import warnings
import zlib
from urllib.parse import quote, quote_plus, urlsplit

import requests
import urllib3
from urllib3.exceptions import MaxRetryError

from world.text import printable

USER_AGENT = ("nano-agentflow/1.0 (educational reference of AgentFlow, https://arxiv.org/abs/2510.05592) "
              f"python-requests/{requests.__version__}")  # Wikimedia asks who calls, and with what
PATIENCE = 30            # seconds; a service that asks to wait longer has failed
PAUSE = 0.5              # seconds before the second attempt, doubled for each that follows
SHAPE_ERRORS = KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError


class ServiceError(Exception):
    """One sentence for the planner or the user: the host and what it did; no key, header, path or query.

    status, body: of the service's answer. The body may quote the key, which is hidden here."""

    def __init__(self, sentence: str, status: int | None = None, body: str = ""):
        super().__init__(sentence)
        self.status, self.body = status, without_keys(body[:2000])


def without_keys(text: str) -> str:
    """An error's text with `***` for each key of the environment, also as URLs, JSON and HTML write it.

    8 characters of a key are enough: a service may quote a part, and a text may have been cut anywhere."""
    pieces = set()
    for form in forms_of_keys(shortest=4):
        pieces.update(form[i : i + 8] for i in range(max(1, len(form) - 7)))
    return replaced(pieces, r"[\w%+/=.~-]*", text)


def without_whole_keys(text: str) -> str:
    """An answer, or a program, with `***` for each key of the environment that it quotes as a whole.

    Not for a short one, such as "none" or "EMPTY" for a local server: that may be any word of the text."""
    return replaced(forms_of_keys(shortest=16), "", text)


def forms_of_keys(shortest):
    """Every key of the environment with so many characters, and how URLs, JSON and HTML write it."""
    forms = set()
    for name, key in os.environ.items():
        # TOKENIZERS_PARALLELISM is "false"
        if re.search("KEY|TOKEN(?!IZERS)|SECRET|PASSWORD", name, re.IGNORECASE) and len(key) >= shortest:
            forms |= {key, quote(key, safe=""), quote_plus(key), json.dumps(key)[1:-1], html.escape(key),
                      key.replace("/", "\\/")}
    return forms


def replaced(pieces, rest, text):
    """The text with `***` for each of the pieces, and for what matches `rest` behind it."""
    if not pieces:
        return text
    whole = "|".join(map(re.escape, sorted(pieces, key=len, reverse=True)))
    return re.sub(rf"(?:{whole}){rest}", "***", text, flags=re.IGNORECASE)


def is_server(name):
    """True if the name of a model is the address of a server."""
    return str(name).startswith(("http://", "https://"))


def status_line(status: int) -> str:
    """503 -> '503 Service Unavailable': Python's phrase, because the server's own could be anything."""
    return f"{status} {http.client.responses.get(status, '')}".strip()


def retry_after(headers) -> float:
    """Seconds until the time in Retry-After, which is a number or a date; 0 without a valid one."""
    value = headers.get("Retry-After", "").strip()
    try:
        if re.fullmatch(r"[0-9]{1,9}", value):
            return float(value)
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except SHAPE_ERRORS:  # hostile dates raise several of them
        return 0.0


class Patient(urllib3.Retry):
    """urllib3's retries, except: a long Retry-After ends them, pauses vary, a failed answer is not read."""

    def increment(self, method=None, url=None, response=None, **rest):
        if response is not None and retry_after(response.headers) > PATIENCE:
            raise MaxRetryError(None, url, None)  # makes urllib3 return this answer as the last
        more = super().increment(method, url, response=response, **rest)
        if response is not None:
            response.close()  # urllib3 would read it to its end, and it may be endless
        return more

    def get_retry_after(self, response):
        return retry_after(response.headers)

    def get_backoff_time(self):
        return pause(len(self.history))


def pause(attempt: int) -> float:
    """Seconds before the next attempt; random, so that requests that failed together do not return so."""
    return PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1)


def session(tries: int = 4) -> requests.Session:
    """A session for all threads. It tries each request up to `tries` times, POST too: ours change nothing."""
    busy = 429, *range(500, 600)
    retry = Patient(tries - 1, allowed_methods=None, status_forcelist=busy, raise_on_status=False)
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=32, max_retries=retry))
    session.headers.update({"User-Agent": USER_AGENT, "Accept-Encoding": "gzip"})  # unpacked() reads gzip
    session.auth = lambda request: request  # else a line of ~/.netrc would replace our Authorization header
    return session


REASONS = {"NewConnectionError": "nobody listens there", "ConnectionRefusedError": "nobody listens there",
           "NameResolutionError": "there is no such host", "ConnectTimeoutError": "no connection in time",
           "ReadTimeoutError": "no answer in time", "TimeoutError": "too slow",
           "ProtocolError": "the connection was dropped", "IncompleteRead": "the connection was dropped",
           "ConnectionResetError": "the connection was dropped",
           "SSLCertVerificationError": "its certificate is not valid", "SSLError": "no secure connection",
           "error": "its encoding is broken"}  # zlib.error


def reason(error: Exception) -> str:
    """Why it failed, from the type alone: the text of an error of requests contains the whole URL."""
    # requests has the cause in args, urllib3 in reason
    cause = error.args[0] if error.args and isinstance(error.args[0], Exception) else error
    cause = cause.reason if isinstance(getattr(cause, "reason", None), Exception) else cause
    kinds = [kind.__name__ for kind in type(cause).__mro__]
    return next((REASONS[kind] for kind in kinds if kind in REASONS), kinds[0])


def place(url: str) -> str:
    """The part of a URL that a sentence may show: 'api.example.com' or 'localhost:8000'."""
    try:
        parts = urlsplit(url)
        return f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname or "the address"
    except ValueError:
        return "the address"


def api(session, method, url, seconds=30, limit=5_000_000, again=2, read=lambda data: data, **request):
    """read(data) of one JSON answer, or ServiceError. request: params, json, headers of requests.

    `session` retries refusals. Up to `again` times, api() repeats a request whose answer is not JSON or not
    of the shape that read() expects, or is a redirect: an API has none, but a proxy that restarts may."""
    for attempt in range(again + 1):
        try:
            return answer_of(session, method, url, seconds, limit, read, request)
        except ServiceError as e:
            if e.status is None or e.status >= 400 or attempt == again:
                raise
        time.sleep(pause(attempt + 1))


def answer_of(session, method, url, seconds, limit, read, request):
    """One attempt of api(). It follows no redirect: the key would go to another server."""
    server, settings = place(url), {"timeout": (10, seconds), "stream": True, "allow_redirects": False}
    try:
        answer = session.request(method, url, **settings, **request)
    except (requests.RequestException, urllib3.exceptions.HTTPError, UnicodeError) as e:
        raise ServiceError(f"{server} cannot be reached ({reason(e)})") from None
    with answer:
        body, problem = body_of(answer, limit, seconds)
    text, status, delay = body.decode("utf-8", "replace"), answer.status_code, retry_after(answer.headers)
    if not 200 <= status < 300:
        patience = f" and asks to wait {delay:.0f} seconds" if delay > PATIENCE else ""
        raise ServiceError(f"{server} answered {status_line(status)}{patience}", status, text)
    try:
        data = None if problem else json.loads(body)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, (dict, list)):
        raise ServiceError(f"{server} answered with something that is not JSON{problem}", status, text)
    try:
        return read(data)
    except SHAPE_ERRORS:
        raise ServiceError(f"{server} answered with JSON of another shape", status, text) from None


def body_of(answer: requests.Response, limit: int, seconds: float) -> tuple[bytes, str]:
    """(body, ""), or (the part of it that has arrived, " (what is wrong)")."""
    # read1 returns what has arrived, so that unpacked() can check the time
    pieces = iter(lambda: answer.raw.read1(65536, decode_content=False), b"")
    try:
        body = unpacked(pieces, answer.headers.get("Content-Encoding", ""), limit, time.monotonic() + seconds)
    except (OSError, urllib3.exceptions.HTTPError, zlib.error, ValueError) as e:
        return b"", f" ({reason(e)})"
    return body[:limit], f" (longer than {limit} bytes)" if len(body) > limit else ""


def unpacked(pieces, encoding: str, limit: int, end: float) -> bytes:
    """The body, decompressed: all of it, or limit + 1 bytes of a longer one."""
    encoding = encoding.strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise zlib.error("unknown")
    unpack = None if encoding in ("", "identity") else zlib.decompressobj(47)  # 47: gzip or zlib
    body = bytearray()
    for piece in pieces:
        body += unpack.decompress(piece, limit + 1 - len(body)) if unpack else piece
        if len(body) > limit or (unpack and unpack.eof):
            return bytes(body[:limit + 1])
        seconds_left(end)
    if unpack and body:
        raise zlib.error("ends too early")
    return bytes(body)


def seconds_left(end: float) -> float:
    """Seconds left on the clock; TimeoutError if none."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


class Cache:
    """Answers in an SQLite file: a second run requests nothing. Threads and processes may share it."""

    def __init__(self, path):
        self.path, self.lock, self.warned = path, threading.Lock(), False
        try:
            self.table = sqlite3.connect(path, timeout=10, check_same_thread=False, isolation_level=None)
            self.table.execute("create table if not exists answers (key text primary key, value text)")
            # deletes nothing: shows that the table is ours and can be written
            self.table.execute("delete from answers where key is null and value is null")
        except sqlite3.Error as e:
            raise ValueError(f"{path}: this cannot be used as a cache ({e}). Name a new file in a folder "
                             "that you can write, or delete it if it is an old cache") from e

    def get(self, *key: str) -> str | None:
        rows = self.run("select value from answers where key = ?", json.dumps(key))
        return rows[0][0] if rows and isinstance(rows[0][0], str) else None

    def put(self, value: str, *key: str) -> None:
        self.run("insert or replace into answers values (?, ?)", json.dumps(key), value)

    def run(self, command: str, *values: str) -> list[tuple]:
        """Execute a command. If that fails (a full disk, a locked file), warn once and go on uncached."""
        try:
            with self.lock:
                return self.table.execute(command, values).fetchall()
        except (sqlite3.Error, UnicodeError) as e:
            sentence = f"{self.path}: the cache does not work, answers are not kept ({e})"
            if not self.warned:
                warnings.warn(printable(sentence), stacklevel=3)  # the file may hold SQL of somebody else
            self.warned = True
            return []
