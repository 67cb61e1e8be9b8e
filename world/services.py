"""Services: requests to servers that the user chose (a search API, an engine), and a cache.

    session = services.session()
    data = services.api(session, "GET", "https://api.example.com/search", params={"q": "iron"})
    cache = services.Cache("answers.sqlite")            # an answer in it is not requested again

Such a server is trusted but unreliable. session() repeats a request that was refused (429, 5xx) or
dropped, through urllib3. api() limits the answer in bytes and seconds, and repeats a request whose
answer is not the JSON that was expected. What still fails is a ServiceError: one sentence, which
never shows a key. Pages whose addresses a model wrote are not trusted: pages.py reads those.
Not covered: a server that sends its headers byte by byte can hold up api().
"""

import contextlib
import html
import http.client
import json
import os
import re
import sqlite3
import sys
import threading
import time
from urllib.parse import quote, quote_plus, urlsplit

import requests
import urllib3

from world.mistakes import Mistake

AGENT = f"nano-agentflow/1.0 ({{}}) python-requests/{requests.__version__}"
USER_AGENT = AGENT.format("educational reference of AgentFlow, https://arxiv.org/abs/2510.05592")
PAUSE = 0.5  # seconds before a request is repeated; doubled each time
# What code raises that reads JSON of another shape
SHAPE_ERRORS = (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)
FAILURES = OSError, ValueError, OverflowError, urllib3.exceptions.HTTPError  # of a request


class ServiceError(Exception):
    """One sentence for the planner or the user: the host and what it did; no key, header or path.

    status, body: of the service's answer. The body may quote a key, which is hidden here."""

    def __init__(self, sentence, status=None, body=""):
        super().__init__(sentence)
        self.status, self.body = status, without_keys(body[:2000])


# ------------------------------------------------------------------------------------------- keys
KEYS = set()  # environment variables that are keys, whatever their name: what the tools need


def without_keys(text):
    """An error's text with `***` for each key of the environment, also as URLs, JSON and HTML write
    it. 8 characters of a key are enough: a service may quote a part of it."""
    pieces = set()
    for form in forms_of_keys(shortest=4):
        pieces.update(form[i : i + 8] for i in range(max(1, len(form) - 7)))
    return replaced(pieces, r"[\w%+/=.~-]*", text)


def without_whole_keys(text):
    """An answer, or a program, with `***` for each key of the environment that it quotes whole.

    Not for a short one, such as "none" or "EMPTY" for a local server: any text may hold that."""
    return replaced(forms_of_keys(shortest=16), "", text)


def forms_of_keys(shortest):
    """Every key of the environment with that many characters, also as URLs, JSON, HTML write it."""
    forms = set()
    for name, key in os.environ.items():
        # TOKENIZERS_PARALLELISM is "false"
        is_key = name in KEYS or re.search("KEY|TOKEN(?!IZERS)|SECRET|PASSWORD", name, re.I)
        if is_key and len(key) >= shortest:
            forms |= {key, quote(key, safe=""), quote_plus(key), html.escape(key)}
            forms |= {json.dumps(key)[1:-1], key.replace("/", "\\/")}
    return forms


def replaced(pieces, rest, text):
    """The text with `***` for each of the pieces, and for what matches `rest` behind it."""
    if not pieces:
        return text
    whole = "|".join(map(re.escape, sorted(pieces, key=len, reverse=True)))
    return re.sub(rf"(?:{whole}){rest}", "***", text, flags=re.IGNORECASE)


# --------------------------------------------------------------------------------------- requests
class Retry(urllib3.Retry):
    """urllib3's Retry, which also outlasts a limit of requests per minute."""

    def sleep(self, response=None):
        """Wait before the next try: 0, 1, 2, 4, ... seconds, or longer if a server says so."""
        pause = self.get_backoff_time()
        if response is not None and response.status in (429, 503, 529) and self.total == 0:
            pause += 120 * PAUSE  # a minute, before the last try
        with contextlib.suppress(*FAILURES):  # of a Retry-After that is no number and no date
            pause = max(pause, response and self.get_retry_after(response) or 0)
        time.sleep(pause)


def session(tries=4):
    """A requests.Session for all threads, which tries each request up to `tries` times. POST, too:
    ours change nothing."""
    retry = Retry(
        tries - 1,
        allowed_methods=None,
        status_forcelist=(408, 429, *range(500, 600)),
        raise_on_status=False,  # the last answer is returned, so that its error can be read
        backoff_factor=PAUSE,
        backoff_jitter=PAUSE,  # requests that failed together do not return together
        retry_after_max=30,
    )
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=64, max_retries=retry))
    session.headers["User-Agent"] = USER_AGENT
    session.auth = lambda request: request  # else a ~/.netrc would replace our Authorization header
    return session


REASONS = {
    "NameResolutionError": "there is no such host",
    "gaierror": "there is no such host",
    "NewConnectionError": "nobody listens there",
    "ConnectionRefusedError": "nobody listens there",
    "TimeoutError": "no answer in time",
    "ProtocolError": "the connection was dropped",
    "IncompleteRead": "the connection was dropped",
    "ConnectionError": "the connection was dropped",
    "SSLCertVerificationError": "its certificate is not valid",
    "SSLError": "no secure connection",
}


def reason(error):
    """Why it failed, from the type alone: the text of an error of requests holds the whole URL."""
    # requests has the cause in args, urllib3 in reason
    cause = error.args[0] if error.args and isinstance(error.args[0], Exception) else error
    cause = cause.reason if isinstance(getattr(cause, "reason", None), Exception) else cause
    kinds = [kind.__name__ for kind in type(cause).__mro__]
    return next((REASONS[kind] for kind in kinds if kind in REASONS), kinds[0])


def status_line(status):
    """503 -> '503 Service Unavailable': Python's phrase, because the server's could be anything."""
    return f"{status} {http.client.responses.get(status, '')}".strip()


def host_of(url):
    """The part of a URL that a sentence may show: 'api.example.com' or 'localhost:8000'."""
    return urlsplit(url).netloc.rpartition("@")[2] or "the address"


def api(session, method, url, seconds=30, limit=5_000_000, again=2, read=dict, **request):
    """read(data) of one JSON answer, or ServiceError. request: params, json, headers of requests.

    session() repeats refusals. api() repeats, up to `again` times, a request whose answer is not
    the JSON that read() expects, or is a redirect: an API has none, but a proxy that restarts may.
    No redirect is followed: the key would go to another server.
    """
    host = host_of(url)
    settings = {"timeout": (10, seconds), "stream": True, "allow_redirects": False, **request}
    for attempt in range(again + 1):
        try:
            answer = session.request(method, url, **settings)
        except FAILURES as why:
            raise ServiceError(f"{host} cannot be reached ({reason(why)})") from None
        status, body, did = answer.status_code, b"", status_line(answer.status_code)
        try:
            with answer:
                body = body_of(answer.raw, limit, time.monotonic() + seconds)
            if 200 <= status < 300:
                return read(json.loads(body[:limit]))
        except (*FAILURES, *SHAPE_ERRORS) as why:
            if status < 300:
                did = f"with something that is not JSON, or JSON of another shape ({reason(why)})"
        if status >= 400 or attempt == again:
            raise ServiceError(f"{host} answered {did}", status, body.decode("utf-8", "replace"))
        time.sleep(PAUSE * 2**attempt)


def body_of(response, limit, end):
    """The body of an answer of urllib3, unpacked. Of a longer one: limit + 1 bytes. end: when
    time.monotonic() says that it has taken too long."""
    body = bytearray()
    # read1() returns what has arrived, so that the clock is read now and then
    while len(body) <= limit and (piece := response.read1(65536, decode_content=True)):
        body += piece
        if time.monotonic() > end:
            raise TimeoutError
    return bytes(body[: limit + 1])


def download(url, limit=50_000_000, seconds=300):
    """The file at this URL, whole; else ServiceError."""
    host = host_of(url)
    try:
        with session() as ours, ours.get(url, stream=True, timeout=30) as answer:
            body = body_of(answer.raw, limit, time.monotonic() + seconds)
    except FAILURES as why:
        raise ServiceError(f"{host} cannot be read ({reason(why)})") from None
    if answer.status_code != 200:
        raise ServiceError(f"{host} answered {status_line(answer.status_code)}", answer.status_code)
    if len(body) > limit:
        raise ServiceError(f"{host} sends more than {limit} bytes")
    return body


# ------------------------------------------------------------------------------------------ cache
class Cache:
    """Answers in an SQLite file, not requested again. Threads and processes may share it.

    A file that fails later (the disk is full, another process locks it) costs no answer: stderr
    says so once, and the file is not written, or not read, from then on.
    """

    def __init__(self, path):
        self.path, self.lock, self.broken = path, threading.Lock(), set()
        try:
            settings = dict(timeout=60, check_same_thread=False, isolation_level=None)
            self.table = sqlite3.connect(path, **settings)
            self.table.execute("create table if not exists answers (key primary key, value)")
        except sqlite3.Error as why:
            raise Mistake(f"{path} cannot be used as a cache ({why}): name a new file") from why

    def get(self, *key):
        """The value of these keys; None if there is none."""
        rows = self.run("read", "select value from answers where key = ?", json.dumps(key))
        return rows[0][0] if rows else None

    def put(self, value, *key):
        value = value.encode("utf-8", "replace")  # SQLite refuses halves of surrogate pairs
        command = "insert or replace into answers values (?, ?)"
        self.run("written", command, json.dumps(key), value.decode())

    def run(self, how, command, *values):
        """The rows of a command; None from the first one on that failed in this way."""
        with self.lock:
            try:
                if how not in self.broken:
                    return self.table.execute(command, values).fetchall()
            except sqlite3.Error as why:
                self.broken.add(how)
                sentence = f"{self.path} fails as a cache ({why}): it is not {how} from now on."
                print(sentence, file=sys.stderr)
