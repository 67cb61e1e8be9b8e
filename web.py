"""The web: what leaves this machine, and what may come back.

    session, page = web.session(), web.fetch("https://en.wikipedia.org/wiki/Iron")   # Page(url, text)
    data, headers = web.api(session, "GET", "https://api.example.com/search", params={"q": "iron"}, headers={"X-Key": key})
    best = web.ranked([(passage,) for passage in web.passages(page.text)], "atomic number of iron", k=3)

There are two kinds of peers. A service that we chose (a search API, an engine of language models) is trusted but unreliable:
api() is patient with it, and its errors never show the key. A page that a language model named is hostile: fetch() goes to
public addresses only, has an end in time and in size, and brings back only text. Whatever fails is one sentence, Failed.
Not covered: a service that drips its headers holds api(); a network that has public addresses for private things is open to
fetch(); and the words of a page may still be lies, or orders to the model that reads them.
"""
import codecs
import contextlib
import email.utils
import html as entities
import http.client
import io
import ipaddress
import json
import queue
import random
import re
import socket
import sqlite3
import ssl
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import requests
import urllib3
from urllib3.exceptions import MaxRetryError

USER_AGENT = ("nano-agentflow/1.0 (educational reference of AgentFlow, https://arxiv.org/abs/2510.05592) "
              f"python-requests/{requests.__version__}")  # Wikimedia asks who calls, and with what
PATIENCE = 30            # seconds; a service that asks to wait longer has failed
PAUSE = 0.5              # seconds before the first new attempt, doubled for each that follows
REDIRECTS = 5
MOVED = 301, 302, 303, 307, 308
PRIVATE = "is not at a public address"


class Failed(Exception):
    """One sentence for the planner or the user: the host and what it did, never a key, a header, a path or a query."""

    def __init__(self, sentence: str, status: int | None = None, body: str = ""):
        super().__init__(sentence)
        self.status, self.body = status, body[:2000]  # the body is what the service said, and may show anything


def status_line(status: int) -> str:
    """503 -> '503 Service Unavailable': our own words, for a server could put anything there."""
    return f"{status} {http.client.responses.get(status, '')}".strip()


# ---------------------------------------------------------------------------------------------- services that we chose
def wait(headers) -> float:
    """The seconds that Retry-After asks for, by a number or a date; 0 where it does not."""
    asked = headers.get("Retry-After", "").strip()
    try:
        if re.fullmatch(r"[0-9]{1,9}", asked):
            return float(asked)
        return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - time.time())
    except (ValueError, TypeError, IndexError, OverflowError):  # what the standard library makes of hostile dates
        return 0.0


class Patient(urllib3.Retry):
    """urllib3's retries, but a long Retry-After is the end, every pause has jitter, and failed answers are not read."""

    def increment(self, method=None, url=None, response=None, **rest):
        if response is not None and wait(response.headers) > PATIENCE:
            raise MaxRetryError(None, url, None)  # urllib3 then takes this answer for the last
        more = super().increment(method, url, response=response, **rest)
        if response is not None:
            response.close()  # urllib3 would read it to its end, and it may have none
        return more

    def get_retry_after(self, response):
        return wait(response.headers)

    def get_backoff_time(self):
        return pause(len(self.history))


def pause(attempt: int) -> float:
    return PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1)  # jitter: those who failed together do not return together


def session(tries: int = 4) -> requests.Session:
    """One for all threads. Each request is tried up to `tries` times: POST too, as what we ask changes nothing."""
    retry = Patient(total=tries - 1, allowed_methods=None, status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False)
    new = requests.Session()
    for scheme in ("http://", "https://"):
        new.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=32, max_retries=retry))
    new.headers["User-Agent"] = USER_AGENT
    new.auth = lambda request: request  # else a line of ~/.netrc would replace our Authorization header
    return new


REASONS = {"NewConnectionError": "nobody listens there", "ConnectionRefusedError": "nobody listens there",
           "NameResolutionError": "there is no such host", "ConnectTimeoutError": "no connection in time",
           "ReadTimeoutError": "no answer in time", "TimeoutError": "too slow", "ProtocolError": "the connection was dropped",
           "IncompleteRead": "the connection was dropped", "ConnectionResetError": "the connection was dropped",
           "SSLCertVerificationError": "its certificate is not valid", "SSLError": "no secure connection",
           "error": "its encoding is broken"}  # zlib.error


def reason(error: Exception) -> str:
    """Why it failed, told by the type alone: the text of an error of requests has the whole URL in it."""
    cause = error.args[0] if error.args and isinstance(error.args[0], Exception) else error  # what requests wraps
    cause = cause.reason if isinstance(getattr(cause, "reason", None), Exception) else cause  # what urllib3 wraps
    kinds = [kind.__name__ for kind in type(cause).__mro__]
    return next((REASONS[kind] for kind in kinds if kind in REASONS), kinds[0])


def place(url: str) -> str:
    """The part of a URL that a sentence may show: 'api.example.com' or 'localhost:8000'."""
    try:
        parts = urlsplit(url)
        return f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname or "the address"
    except ValueError:
        return "the address"


def api(session: requests.Session, method: str, url: str, seconds: float = 30, limit: int = 5_000_000, again: int = 2,
        **request) -> tuple[dict | list, dict]:
    """(data, headers) of one JSON answer, or Failed. request: params, json and headers, as requests takes them.

    `session` deals with refusals; here an answer that began well and is no JSON in the end is asked for `again`."""
    for attempt in range(again + 1):
        try:
            return answer_of(session, method, url, seconds, limit, request)
        except Failed as e:
            if e.status is None or e.status >= 300 or attempt == again:
                raise
        time.sleep(pause(attempt + 1))


def answer_of(session, method, url, seconds, limit, request):
    """One attempt of api(). Redirects are not followed: an API has none, and they would take the key elsewhere."""
    where = place(url)
    try:
        answer = session.request(method, url, timeout=(10, seconds), stream=True, allow_redirects=False, **request)
    except (requests.RequestException, urllib3.exceptions.HTTPError, UnicodeError) as e:
        raise Failed(f"{where} cannot be reached ({reason(e)})") from None
    with answer:
        body, problem = body_of(answer, limit, seconds)
    text, status, asked = body.decode("utf-8", "replace"), answer.status_code, wait(answer.headers)
    if not 200 <= status < 300:
        patience = f" and asks to wait {asked:.0f} seconds" if asked > PATIENCE else ""
        raise Failed(f"{where} answered {status_line(status)}{patience}", status, text)
    try:
        data = None if problem else json.loads(body)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, (dict, list)):
        raise Failed(f"{where} answered with something that is not JSON{problem}", status, text)
    return data, answer.headers


def body_of(answer: requests.Response, limit: int, seconds: float) -> tuple[bytes, str]:
    """(body, "") or (what there is of it, " (what is wrong)")."""
    def pieces():
        while piece := answer.raw.read1(65536, decode_content=False):  # read1: what is there now, then we look at the clock
            yield piece
    try:
        body = unpacked(pieces(), answer.headers.get("Content-Encoding", ""), limit, time.monotonic() + seconds)
    except (OSError, urllib3.exceptions.HTTPError, zlib.error, ValueError) as e:
        return b"", f" ({reason(e)})"
    return body[:limit], f" (longer than {limit} bytes)" if len(body) > limit else ""


def unpacked(pieces: Iterator[bytes], encoding: str, limit: int, end: float) -> bytes:
    """The body without its gzip or deflate: all of it, or limit + 1 bytes of a longer one, however small it came."""
    encoding = encoding.strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise zlib.error("unknown")
    unpack = None if encoding in ("", "identity") else zlib.decompressobj(47)  # 47: gzip or zlib, as its header says
    body = bytearray()
    for piece in pieces:
        body += unpack.decompress(piece, limit + 1 - len(body)) if unpack else piece
        if len(body) > limit or (unpack and unpack.eof):
            return bytes(body[:limit + 1])
        left(end)
    if unpack and body:
        raise zlib.error("ends too early")
    return bytes(body)


def left(end: float) -> float:
    """Seconds left on the clock; TimeoutError if none."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


# ---------------------------------------------------------------------------------------------- pages of a hostile web
class Page(NamedTuple):
    url: str   # the last one, after redirects
    text: str


class Target(NamedTuple):
    url: str   # without its fragment, in ASCII
    host: str  # a name, an IPv4 address, or an IPv6 address without brackets
    port: int
    secure: bool
    request: str  # what we send


def target(url: str) -> Target:
    """A URL taken apart; Failed where it is not a plain one of the public web. Nothing is looked up here."""
    if len(url) > 2000 or not url.isprintable() or " " in url or "\\" in url:
        raise Failed("this URL is too long, or has characters that no URL has")
    try:
        parts = urlsplit(url)
        host, port = host_of(parts), {"http": 80, "https": 443}.get(parts.scheme)
        if port is None or "@" in parts.netloc or parts.port == 0:
            raise ValueError
        path, query = (quote(part, safe="!$%&'()*+,/:;=?@[]~") for part in (parts.path or "/", parts.query))
    except ValueError:
        raise Failed("this is not a URL that can be read: it must be http or https, with a host and no password") from None
    name = f"[{host}]" if ":" in host else host
    name += f":{parts.port}" if parts.port not in (None, port) else ""
    path += f"?{query}" if query else ""
    request = (f"GET {path} HTTP/1.1\r\nHost: {name}\r\nUser-Agent: {USER_AGENT}\r\nAccept: text/html, text/plain\r\n"
               "Accept-Encoding: gzip, identity\r\nConnection: close\r\n\r\n")
    return Target(f"{parts.scheme}://{name}{path}", host, parts.port or port, parts.scheme == "https", request)


def host_of(parts) -> str:
    """The host of a URL as ASCII; ValueError where it is a number but no plain one: 127.1 and 2130706433 are 127.0.0.1."""
    if re.fullmatch(r"\[[0-9A-Fa-f:.]+\](:[0-9]*)?", parts.netloc):
        host = literal = str(ipaddress.IPv6Address(parts.hostname))
    else:
        host = (parts.hostname or "").encode("idna").decode().lower()  # also makes digits of "①" and dots of "。"
        if len(host) > 253 or not re.fullmatch(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?", host):
            raise ValueError
        numeric = re.fullmatch(r"[0-9]+|0x[0-9a-f]*", host.rstrip(".").rpartition(".")[2])
        literal = str(ipaddress.IPv4Address(host)) if numeric else ""
    if literal and not public(literal):
        raise Failed(f"{literal} {PRIVATE}")
    return host


NOT_PUBLIC = [ipaddress.ip_network(network) for network in (
    "192.0.0.0/24", "192.88.99.0/24",                          # some Pythons call parts of these global
    "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")]   # Teredo and other protocols, examples, 6to4
UNICAST = ipaddress.ip_network("2000::/3")  # outside: ::1, ::ffff:8.8.8.8, ::8.8.8.8, NAT64, fc00::, fe80::, fec0::, ff00::


def public(address: str) -> bool:
    """Is it an address of the public internet? IPv6 that hides an IPv4 address in itself is not."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if ip.version == 6 and ("%" in address or ip not in UNICAST or (int(ip) >> 32) & 0xFDFFFFFF == 0x5EFE):
        return False  # 5EFE: ISATAP
    return (ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_link_local)
            and not any(ip in network for network in NOT_PUBLIC if network.version == ip.version))


def lookup(spot: Target, end: float) -> list[tuple]:
    """What the host's name stands for; all of it must be public. In a thread, as nobody can stop a stuck name server."""
    answers = queue.SimpleQueue()

    def ask():
        try:
            answers.put(socket.getaddrinfo(spot.host, spot.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as e:
            answers.put(e)
    threading.Thread(target=ask, daemon=True).start()
    try:
        found = answers.get(timeout=left(end))
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(found, Exception):
        raise Failed(f"{spot.host} cannot be found")
    if not found or not all(public(address[0]) for *_, address in found):
        raise Failed(f"{spot.host} {PRIVATE}")
    return found


def connect(spot: Target, end: float) -> socket.socket:
    """A connection to the first address that answers, one of those that were checked: a second lookup could give another."""
    for *kind, _, address in lookup(spot, end):
        try:
            return dial(spot, kind, address, end)
        except OSError as e:
            problem = e
    raise problem


def dial(spot: Target, kind: list, address: tuple, end: float) -> socket.socket:
    """A connection to this address; for https in TLS, with the certificate checked against the name in the URL."""
    sock = socket.socket(*kind)
    try:
        sock.settimeout(min(5, left(end)))  # an address that is silent leaves time for the next
        sock.connect(address)
        sock.settimeout(left(end))
        if not spot.secure:
            return sock
        context = ssl.create_default_context(cafile=requests.certs.where())
        return context.wrap_socket(sock, server_hostname=spot.host.rstrip("."))
    except OSError:
        sock.close()
        raise


class Clocked(io.RawIOBase):
    """A socket for reading, each time with what is left on the clock: a drip of bytes does not make it longer."""

    def __init__(self, sock, end):
        self.sock, self.end = sock, end

    def readable(self):
        return True

    def readinto(self, buffer):
        self.sock.settimeout(left(self.end))
        return self.sock.recv_into(buffer)

    def makefile(self, mode):  # what HTTPResponse asks of a socket
        return io.BufferedReader(self)


def fetch(url: str, seconds: float = 15, limit: int = 2_000_000) -> Page:
    """The text of a page that a language model named, or Failed. A longer page is cut at `limit` bytes.

    Built on http.client, not on requests, which looks a name up again after we have checked it, follows redirects that nobody
    checks, obeys proxies and ~/.netrc, and starts its clock anew with each byte. Here each hop is checked, by one clock."""
    end, host = time.monotonic() + seconds, "this URL"
    try:
        for _ in range(REDIRECTS + 1):
            spot = target(url)
            host = spot.host
            with contextlib.closing(connect(spot, end)) as sock:
                sock.sendall(spot.request.encode())
                answer = http.client.HTTPResponse(Clocked(sock, end), method="GET")
                answer.begin()
                if answer.status not in MOVED or not answer.headers["Location"]:
                    return Page(spot.url, text_in(answer, host, limit, end))
                url = urljoin(spot.url, answer.headers["Location"].encode("latin-1").decode("utf-8", "replace"))
    except TimeoutError:
        raise Failed(f"{host} did not answer in time (at most {seconds:g} seconds)") from None
    except (OSError, http.client.HTTPException, zlib.error, ValueError) as e:
        raise Failed(f"{host} cannot be read ({reason(e)})") from None
    raise Failed(f"{host} redirects more than {REDIRECTS} times")


def text_in(answer: http.client.HTTPResponse, host: str, limit: int, end: float) -> str:
    """The text of a good answer, without control characters."""
    if answer.status != 200:
        raise Failed(f"{host} answered {status_line(answer.status)}", answer.status)
    kind, _, details = answer.headers.get("Content-Type", "").partition(";")
    kind = kind.strip().lower()
    if not re.fullmatch(r"text/[\w.+-]+|application/([\w.+-]+\+)?(json|xml)", kind, re.ASCII):
        raise Failed(f"{host} answered with {ascii(kind[:80]) if kind else 'an unnamed type'}, which is not text")
    body = unpacked(blocks(answer), ",".join(answer.headers.get_all("Content-Encoding", [])), limit, end)[:limit]
    text = decoded(body, details)
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", " ", text_of(text) if "html" in kind else text.replace("\r\n", "\n"))


def blocks(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    while block := answer.read(65536):
        yield block
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)


CHARSETS = "utf", "ascii", "iso8859", "iso2022", "cp", "koi8", "mac", "gb", "big5", "euc", "shift_jis", "tis", "hz"


def decoded(body: bytes, details: str) -> str:
    """The text in the charset of the header, else of <meta charset>, else UTF-8. (Python has a codec "zip", too.)"""
    named = re.search(r"charset\s*=\s*[\"']?([\w.:-]{1,40})", details, re.ASCII | re.IGNORECASE)
    inside = re.search(rb"<meta[^>]+charset\s*=\s*[\"']?([\w.:-]{1,40})", body[:1024], re.IGNORECASE)
    try:
        charset = codecs.lookup(named[1] if named else inside[1].decode() if inside else "utf-8").name
    except LookupError:
        charset = "utf-8"
    return body.decode(charset if charset.startswith(CHARSETS) else "utf-8", "replace").lstrip("\ufeff")


# ---------------------------------------------------------------------------------------------- text
# Markup ends at its mark or else at the end of the page, and the search goes on from there: nothing is read twice, whatever
# the page. html.parser, and most expressions for whole tags, read an unfinished tag again from each of its characters.
MARKUP = re.compile(r"""<!--(?:-?>|.*?(?:-->|\Z))            # a comment
                      | <[!?].*?(?:>|\Z)                     # <!doctype html>, <?xml version="1.0"?>
                      | <(?P<end>/?)(?P<name>[a-z][^\s/>]*)  # the beginning of a tag
                     """, re.VERBOSE | re.DOTALL | re.IGNORECASE)
IN_TAG = re.compile(r"""=\s*(["'])|>""")                      # a quoted value, where ">" does not count, or the end
LONG_NUMBER = re.compile(r"&#x?[0-9a-f]{9,}", re.IGNORECASE)  # no character: Python refuses to read very long ones
UNSEEN = {"script", "style", "noscript", "template", "svg", "iframe", "textarea", "title"}
CELLS = {"td", "th", "option"}
BREAKS = set("address article aside blockquote body br caption center dd div dl dt fieldset figcaption figure footer form h1 "
             "h2 h3 h4 h5 h6 head header hr html li main nav ol p pre section select table tbody tfoot thead tr ul".split())


def text_of(html: str) -> str:
    """'<title>Fe</title><p>Iron is<br>a <b>metal</b>' -> 'Fe\\nIron is\\na metal': the title, then what a reader
    sees, as far as that can be told without style sheets."""
    html = LONG_NUMBER.sub("\ufffd", html)
    title, shown, at = "", [], 0
    while mark := MARKUP.search(html, at):
        shown.append(collapsed(html[at:mark.start()]))
        name = (mark["name"] or "").lower()
        at = end_of_tag(html, mark.end()) if name else mark.end()
        if name in UNSEEN and not mark["end"] and html[at - 2:at] != "/>":
            close = re.compile(rf"</{name}(?=[\s/>])|\Z", re.IGNORECASE).search(html, at).start()
            title = title or (collapsed(html[at:close]) if name == "title" else "")
            at = close
        shown.append("\n" if name in BREAKS else " " if name in CELLS else "")
    lines = [title] + "".join(shown + [collapsed(html[at:])]).split("\n")
    return "\n".join(" ".join(line.split()) for line in lines if line.strip())


def end_of_tag(html: str, at: int) -> int:
    """Where a tag ends whose attributes begin here."""
    while found := IN_TAG.search(html, at):
        if found[0] == ">":
            return found.end()
        at = html.find(found[1], found.end()) + 1 or len(html)
    return len(html)


def collapsed(text: str) -> str:
    return re.sub(r"\s+", " ", entities.unescape(text))


def passages(text: str, words: int = 200) -> list[str]:
    """Consecutive passages of `words` words; longer "words" than any language has are cut."""
    every = [word[i:i + 100] for word in text.split() for i in range(0, len(word), 100)]
    return [" ".join(every[i:i + words]) for i in range(0, len(every), words)]


def ranked(rows: list[tuple[str, ...]], query: str, k: int) -> list[int]:
    """The indices of the best k rows by bm25, the best first; only rows with a word of the query. Never raises."""
    asked = re.findall(r"[^\s\0-/:-@\[-`{-\x7f]+", clean(query[:10_000]))  # what lies between spaces and ASCII punctuation
    if not rows or not asked:
        return []
    columns, values = (", ".join(form.format(n) for n in range(len(rows[0]))) for form in ("c{}", "?"))
    with contextlib.closing(sqlite3.connect(":memory:")) as table:
        table.execute(f"create virtual table texts using fts5({columns}, tokenize = 'unicode61 remove_diacritics 2')")
        table.executemany(f"insert into texts values ({values})", (tuple(map(clean, row)) for row in rows))
        any_of = " OR ".join(f'"{word}"' for word in dict.fromkeys(asked[:64]))  # quoted: never an operator
        best = "select rowid - 1 from texts where texts match ? order by bm25(texts), rowid limit ?"
        return [index for (index,) in table.execute(best, (any_of, max(k, 0)))]


def clean(text: str) -> str:
    """Without NUL and halves of surrogate pairs, which SQLite does not take."""
    return text.encode("utf-8", "replace").decode().replace("\0", " ")


class Cache:
    """Answers in an SQLite file: a second run costs nothing and gives the same. Threads and processes may share it."""

    def __init__(self, path):
        self.path, self.lock, self.warned = path, threading.Lock(), False
        try:
            self.table = sqlite3.connect(path, timeout=10, check_same_thread=False, isolation_level=None)
            self.table.execute("create table if not exists answers (key text primary key, value text)")
            self.table.execute("delete from answers where key is null and value is null")  # none: we may write, to our table
        except sqlite3.Error as e:
            raise ValueError(f"{path}: this cannot be used as a cache ({e}). Name a new file in a folder that you can write, "
                             "or delete it if it is an old cache") from e

    def get(self, *key: str) -> str | None:
        rows = self.run("select value from answers where key = ?", json.dumps(key))
        return rows[0][0] if rows else None

    def put(self, value: str, *key: str) -> None:
        self.run("insert or replace into answers values (?, ?)", json.dumps(key), value)

    def run(self, command: str, *values: str) -> list[tuple]:
        """A full disk or a locked file costs the cache, not the flow."""
        try:
            with self.lock:
                return self.table.execute(command, values).fetchall()
        except (sqlite3.Error, UnicodeError) as e:
            if not self.warned:
                warnings.warn(f"{self.path}: the cache does not work, answers are not kept ({e})", stacklevel=3)
            self.warned = True
            return []
