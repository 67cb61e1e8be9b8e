"""Pages: the text of one public web page, from an address that a language model wrote.

    page = pages.fetch("https://en.wikipedia.org/wiki/Iron")        # Page(url, text), or a ServiceError

Such a page is hostile: its address may point into our own network, and its answer may never end. fetch()
connects to public addresses only, checks each redirect, keeps a limit of time and of size, and returns only
text.
Not covered: private services that have public addresses can be reached. The words of a page may still be
lies, or orders to the model that reads them.
"""
import codecs
import contextlib
import html as entities
import http.client
import io
import ipaddress
import re
import socket
import ssl
import threading
import time
import zlib
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import requests

from world.services import USER_AGENT, ServiceError, reason, seconds_left, status_line, unpacked

REDIRECTS = 5
MOVED = 301, 302, 303, 307, 308
PRIVATE = "is not at a public address"


class Page(NamedTuple):
    url: str  # the last one, after redirects
    text: str


class Target(NamedTuple):
    url: str  # in ASCII, without the fragment
    host: str  # a name, an IPv4 address, or an IPv6 address without brackets
    port: int
    request: str  # what we send


def parse_url(url: str) -> Target:
    """The parts of a URL; ServiceError if it is not a plain http or https URL. No name is looked up here."""
    if len(url) > 2000 or not url.isprintable() or " " in url or "\\" in url:
        raise ServiceError("this URL is too long, or has characters that no URL has")
    try:
        parts = urlsplit(url)
        host, port = host_of(parts), {"http": 80, "https": 443}.get(parts.scheme)
        if port is None or "@" in parts.netloc or parts.port == 0:
            raise ValueError
        path, query = (quote(part, safe="!$%&'()*+,/:;=?@[]~") for part in (parts.path or "/", parts.query))
    except ValueError:
        raise ServiceError("this is not a URL that can be read: it must be http or https, with a host and no "
                     "password") from None
    name = f"[{host}]" if ":" in host else host
    name += f":{parts.port}" if parts.port not in (None, port) else ""
    path += f"?{query}" if query else ""
    request = (f"GET {path} HTTP/1.1\r\nHost: {name}\r\nUser-Agent: {USER_AGENT}\r\n"
               "Accept: text/html, text/plain\r\nAccept-Encoding: gzip, identity\r\n"
               "Connection: close\r\n\r\n")
    return Target(f"{parts.scheme}://{name}{path}", host, parts.port or port, request)


def host_of(parts) -> str:
    """The host of a URL in ASCII. ValueError for short forms as 127.1 and 2130706433: both are 127.0.0.1."""
    if "[" in parts.netloc:
        if not re.fullmatch(r"\[[0-9A-Fa-f:.]+\](:[0-9]*)?", parts.netloc):
            raise ValueError
        host = literal = str(ipaddress.IPv6Address(parts.hostname))
    else:
        # idna also turns "①" into a digit and "。" into a dot
        host = (parts.hostname or "").encode("idna").decode().lower()
        if len(host) > 253 or not re.fullmatch(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?", host):
            raise ValueError
        numeric = re.fullmatch(r"[0-9]+|0x[0-9a-f]*", host.rstrip(".").rpartition(".")[2])
        literal = str(ipaddress.IPv4Address(host)) if numeric else ""
    if literal and not public(literal):
        raise ServiceError(f"{literal} {PRIVATE}")
    return host


NOT_PUBLIC = [ipaddress.ip_network(network) for network in (
    "192.0.0.0/24", "192.88.99.0/24",                         # some Pythons call parts of these global
    "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")]  # Teredo and other protocols, examples, 6to4
# not in it: ::1, ::ffff:8.8.8.8, ::8.8.8.8, NAT64, fc00::, fe80::, fec0::, ff00::
UNICAST = ipaddress.ip_network("2000::/3")


def public(address: str) -> bool:
    """True for an address of the public internet. An IPv6 address that contains an IPv4 address is not."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if ip.version == 6 and ("%" in address or ip not in UNICAST or (int(ip) >> 32) & 0xFDFFFFFF == 0x5EFE):
        return False  # 5EFE: ISATAP
    return (ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_link_local)
            and not any(ip in network for network in NOT_PUBLIC))


def lookup(target: Target, end: float) -> list[tuple]:
    """The addresses of the host; all must be public. A thread asks: a stuck name server cannot be stopped."""
    answers = []

    def look_up():
        with contextlib.suppress(OSError, UnicodeError):
            answers.append(socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(seconds_left(end))
    late = thread.is_alive()
    if not answers:
        raise TimeoutError if late else ServiceError(f"{target.host} cannot be found")
    if not answers[0] or not all(public(address[0]) for *_, address in answers[0]):
        raise ServiceError(f"{target.host} {PRIVATE}")
    return answers[0]


def connect(target: Target, end: float) -> socket.socket:
    """A connection to the first address that answers. A second lookup could give addresses never checked."""
    for *kind, _, address in lookup(target, end):
        try:
            return dial(target, kind, address, end)
        except OSError as e:
            problem = e
    raise problem


def dial(target: Target, kind: list, address: tuple, end: float) -> socket.socket:
    """A connection to this address; https checks the certificate against the name in the URL."""
    sock = socket.socket(*kind)
    try:
        sock.settimeout(min(5, seconds_left(end)))  # a silent address leaves time for the next one
        sock.connect(address)
        sock.settimeout(seconds_left(end))
        if target.url.startswith("http:"):
            return sock
        context = ssl.create_default_context(cafile=requests.certs.where())
        return context.wrap_socket(sock, server_hostname=target.host.rstrip("."))
    except OSError:
        sock.close()
        raise


class Clocked(io.RawIOBase):
    """Reads from a socket. All reads share one time limit: a server that sends byte by byte gains nothing."""

    def __init__(self, sock, end):
        self.sock, self.end = sock, end

    def readable(self):
        return True

    def readinto(self, buffer):
        self.sock.settimeout(seconds_left(self.end))
        return self.sock.recv_into(buffer)

    def makefile(self, mode):  # HTTPResponse calls this
        return io.BufferedReader(self)


def fetch(url: str, seconds: float = 15, limit: int = 2_000_000) -> Page:
    """The page at this URL, or ServiceError. A longer page is cut at `limit` bytes.

    Built on http.client, because requests would look the name up again after our check, follow redirects
    without a check, use proxies and ~/.netrc, and restart its time limit with each byte. Here every hop is
    checked, and one time limit holds for all."""
    end, host = time.monotonic() + seconds, "this URL"
    try:
        for _ in range(REDIRECTS + 1):
            target = parse_url(url)
            host = target.host
            with contextlib.closing(connect(target, end)) as sock:
                sock.sendall(target.request.encode())
                answer = http.client.HTTPResponse(Clocked(sock, end), method="GET")
                answer.begin()
                if answer.status not in MOVED or not answer.headers["Location"]:
                    return Page(target.url, text_in(answer, host, limit, end))
                location = answer.headers["Location"].encode("latin-1").decode("utf-8", "replace")
                url = urljoin(target.url, location)
    except TimeoutError:
        raise ServiceError(f"{host} did not answer in time (at most {seconds:g} seconds)") from None
    except (OSError, http.client.HTTPException, zlib.error, ValueError) as e:
        raise ServiceError(f"{host} cannot be read ({reason(e)})") from None
    raise ServiceError(f"{host} redirects more than {REDIRECTS} times")


def text_in(answer: http.client.HTTPResponse, host: str, limit: int, end: float) -> str:
    """The text of an answer of status 200 and a text type, without control characters."""
    if answer.status != 200:
        raise ServiceError(f"{host} answered {status_line(answer.status)}", answer.status)
    kind, _, details = answer.headers.get("Content-Type", "").partition(";")
    kind = kind.strip().lower()
    if not re.fullmatch(r"text/[\w.+-]+|application/([\w.+-]+\+)?(json|xml)", kind, re.ASCII):
        name = ascii(kind[:80]) if kind else "an unnamed type"
        raise ServiceError(f"{host} answered with {name}, which is not text")
    encoding = ",".join(answer.headers.get_all("Content-Encoding", []))
    text = decoded(unpacked(blocks(answer), encoding, limit, end)[:limit], details)
    text = text_of(text) if "html" in kind else text.replace("\r\n", "\n")
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", " ", text)


def blocks(answer: http.client.HTTPResponse):
    """The body, block by block. IncompleteRead if it is shorter than Content-Length says."""
    while block := answer.read(65536):
        yield block
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)


CHARSETS = tuple("utf ascii iso8859 iso2022 cp koi8 mac gb big5 euc shift_jis tis hz".split())


def decoded(body: bytes, details: str) -> str:
    """The text in the charset of the header, else of <meta charset>, else UTF-8. (Python also has "zip".)"""
    named = re.search(r"charset\s*=\s*[\"']?([\w.:-]{1,40})", details, re.ASCII | re.IGNORECASE)
    inside = re.search(rb"<meta[^>]+charset\s*=\s*[\"']?([\w.:-]{1,40})", body[:1024], re.IGNORECASE)
    try:
        charset = codecs.lookup(named[1] if named else inside[1].decode() if inside else "utf-8").name
    except LookupError:
        charset = "utf-8"
    return body.decode(charset if charset.startswith(CHARSETS) else "utf-8", "replace").lstrip("\ufeff")


# ------------------------------------------------------------ text
# Each piece of markup ends at its closing mark, or else at the end of the page, and the search continues from
# there. So no page makes us read a character twice. html.parser, and most regular expressions for whole tags,
# read an unfinished tag again from each of its characters.
MARKUP = re.compile(r"""<!--(?:-?>|.*?(?:-->|\Z))            # a comment
                      | <[!?].*?(?:>|\Z)                     # <!doctype html>, <?xml version="1.0"?>
                      | <(?P<end>/?)(?P<name>[a-z][^\s/>]*)  # the beginning of a tag
                     """, re.VERBOSE | re.DOTALL | re.IGNORECASE)
IN_TAG = re.compile(r"""=\s*(["'])|>""")  # a quoted value, in which ">" does not end the tag; or the end
LONG_NUMBER = re.compile(r"&#x?[0-9a-f]{9,}", re.IGNORECASE)  # html.unescape() raises on very long numbers
UNSEEN = {"script", "style", "noscript", "template", "svg", "iframe", "textarea", "title"}
CELLS = {"td", "th", "option"}
BREAKS = set("address article aside blockquote body br caption center dd div dl dt fieldset figcaption "
             "figure footer form h1 h2 h3 h4 h5 h6 head header hr html li main nav ol p pre section "
             "select table tbody tfoot thead tr ul".split())


def text_of(html: str) -> str:
    """The title, then what a reader sees; style sheets are ignored.

    '<title>Fe</title><p>Iron is<br>a <b>metal</b>' -> 'Fe\\nIron is\\na metal'
    """
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
    """The position after a tag; `at`: where its attributes begin."""
    while found := IN_TAG.search(html, at):
        if found[0] == ">":
            return found.end()
        at = html.find(found[1], found.end()) + 1 or len(html)
    return len(html)


def collapsed(text: str) -> str:
    return re.sub(r"\s+", " ", entities.unescape(text))
