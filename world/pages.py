"""Pages: the text of one public web page, from an address that a language model wrote.

    url, text = pages.fetch("https://en.wikipedia.org/wiki/Iron")           # or a ServiceError

Such a page is hostile: its address may point into our own network, and its answer may never end.
fetch() connects to public addresses only, checks each redirect, limits time and size, and returns
only text. A page that forwards within 5 seconds counts as a redirect; a check of the browser, which
some sites send instead of the page, as an error.
Not covered: private services that have public addresses can be reached, and the system decides how
long a name server may take. The words of a page may still be lies, or orders to the model.
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
import time
from collections import Counter
from urllib.parse import urljoin

import requests
import urllib3

from world.services import FAILURES, USER_AGENT, ServiceError, body_of, reason, status_line
from world.text import visible

REDIRECTS = 5
URL_LIMIT = 2_000  # characters
PORTS = {"http": 80, "https": 443}
HEADERS = "Accept: text/html, text/plain\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n"


def parse_url(url):
    """The parts of a URL, as urllib3.util.Url, without its fragment; else ServiceError.

    No name is looked up here. Equal addresses get equal parts: "HTTP://A.org:80#b" -> "http://a.org/"
    """
    if len(url) > URL_LIMIT or not url.isprintable() or " " in url or "\\" in url:
        raise ServiceError("this URL is too long, or has characters that no URL has")
    try:
        parts = urllib3.util.parse_url(url)
        known = parts.scheme in PORTS and re.fullmatch(r"[\w.:[\]-]+", parts.host or "")
    except ValueError:
        known = False
    if not known or parts.auth:
        why = "it must be http or https, with a host and no password"
        raise ServiceError(f"this is not a URL that can be read: {why}")
    port = None if parts.port == PORTS[parts.scheme] else parts.port
    return parts._replace(port=port, path=parts.path or "/", fragment=None)


# --------------------------------------------------------------------------------- the connection
UNICAST = ipaddress.ip_network("2000::/3")  # not in it: ::1, ::ffff:127.0.0.1, NAT64, fc00::
# Python 3.11 calls these global; IANA's registries of special-purpose addresses do not: protocols
# (a cloud has its metadata server there), relays of 6to4 (deprecated), documentation. The last is
# the host's own service in Azure's machines.
SPECIAL = "192.0.0.0/24", "192.88.99.0/24", "3fff::/20", "168.63.129.16"
SPECIAL = [ipaddress.ip_network(net) for net in SPECIAL]


def public(address):
    """True for an address of the public internet. An IPv6 address that holds an IPv4 one is not."""
    ip = ipaddress.ip_address(address)
    if ip.version == 6 and (ip not in UNICAST or ip.sixtofour or ip.teredo):
        return False
    return ip.is_global and not ip.is_multicast and not any(ip in net for net in SPECIAL)


def connect(url, end):
    """A socket that is connected to the host of a URL, with TLS for https.

    The name is looked up once, and the address that was checked is the one that is connected to: a
    second lookup could give another.
    """
    host, port = url.host.strip("[]"), url.port or PORTS[url.scheme]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [address[0] for *_, address in found]
    if not all(map(public, addresses)):
        raise ServiceError(f"{host} is not at a public address")
    address = min(addresses, key=lambda address: ":" in address)  # IPv6 may not work here
    sock = socket.create_connection((address, port), timeout=seconds_left(end))
    if url.scheme == "http":
        return sock
    sock.settimeout(seconds_left(end))
    context = ssl.create_default_context(cafile=requests.certs.where())
    return context.wrap_socket(sock, server_hostname=host)


def seconds_left(end):
    """Seconds until time.monotonic() says `end`; TimeoutError if that is over."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


class Clocked(io.RawIOBase):
    """Reads from a socket. All reads share one limit of time: slow bytes gain nothing."""

    def __init__(self, sock, end):
        self.sock, self.end = sock, end

    def readable(self):
        return True

    def readinto(self, buffer):
        self.sock.settimeout(seconds_left(self.end))
        return self.sock.recv_into(buffer)

    def makefile(self, mode):  # HTTPResponse calls this
        return io.BufferedReader(self)


def fetch(url, seconds=15, limit=2_000_000):
    """(the last URL, after redirects; the text) of a page, or ServiceError. A longer page is cut.

    requests would look the name up again after our check, and restart its limit of time with each
    byte. So each hop is read with http.client, over a socket of connect().
    """
    end, host = time.monotonic() + seconds, "this URL"
    try:
        for _ in range(REDIRECTS + 1):
            parts = parse_url(url)
            host = parts.host
            with contextlib.closing(connect(parts, end)) as sock:
                request = f"GET {parts.request_uri} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
                sock.sendall(f"{request}User-Agent: {USER_AGENT}\r\n{HEADERS}".encode())
                answer = http.client.HTTPResponse(Clocked(sock, end), method="GET")
                answer.begin()
                location = answer.headers["Location"]
                if answer.status // 100 == 3 and location:
                    location = location.encode("latin-1").decode("utf-8", "replace")
                else:
                    text, location = text_in(answer, host, limit, end)
                    if not location or target(parts.url, location) == parts.url:
                        return parts.url, text
                url = target(parts.url, location)
    except (*FAILURES, http.client.HTTPException) as why:
        raise ServiceError(f"{host} cannot be read ({reason(why)})") from None
    raise ServiceError(f"{host} redirects more than {REDIRECTS} times")


def target(url, location):
    """Where a page at this URL sends its reader. ServiceError if that is too long: urljoin()
    normalises it, which takes minutes for 100,000 accents, and nothing could interrupt it."""
    if len(location) > URL_LIMIT:
        raise ServiceError(f"it leads to an address of more than {URL_LIMIT} characters")
    return urljoin(url, location)


# How a short page begins that Cloudflare, Anubis or Amazon sends in place of the page
CHECKS = re.compile(
    r"(?im)^just a moment(\.\.\.|…)$|you(['’]| a)re not a (ro)?bot|^redirecting\W*$|(checking|"
    r"verify(ing)?) (your browser|(if |that )?you are (a )?human)|enable (js|javascript|cookies)\b"
)


def text_in(answer, host, limit, end):
    """(the text of an answer of status 200 and a text type, without control characters; where a
    page of HTML sends its reader, or "")."""
    if answer.status != 200:
        raise ServiceError(f"{host} answered {status_line(answer.status)}", answer.status)
    kind, _, details = answer.headers.get("Content-Type", "").partition(";")
    kind = kind.strip().lower()
    if not re.fullmatch(r"text/[\w.+-]+|application/([\w.+-]+\+)?(json|xml)", kind, re.ASCII):
        raise ServiceError(f"{host} answered with {ascii(kind[:80])}, which is not text")
    packed = urllib3.HTTPResponse(answer, answer.headers.items(), preload_content=False)
    encoding = ", ".join(answer.headers.get_all("Content-Encoding", ["identity"])).strip().lower()
    if encoding not in ("", "identity", *packed.CONTENT_DECODERS):
        raise ServiceError(f"{host} answered in an encoding that nobody asked for")
    body = body_of(packed, limit, end)[:limit]
    text, location = body.decode(charset_of(body, details), "replace").replace("\r\n", "\n"), ""
    if "html" in kind:
        text, location = text_of(text), refresh_of(text)
        if not location and len(text) < 2000 and CHECKS.search(text[:200]):
            raise ServiceError(f"{host} wants a browser: it sent a check or a script, not the page")
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", " ", visible(text)), location


# --------------------------------------------------------------------------------------- charsets
BOMS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
# Browsers read these charsets as others, which have more characters: many pages are labelled wrong.
SUPERSETS = dict.fromkeys(("ascii", "iso8859-1"), "cp1252") | {"iso8859-9": "cp1254"}
SUPERSETS |= dict.fromkeys(("iso8859-11", "tis-620"), "cp874") | {"big5": "big5hkscs"}
SUPERSETS |= dict.fromkeys(("gb2312", "gbk"), "gb18030") | {"shift_jis": "cp932", "euc_kr": "cp949"}
# Python also has "zip" and the like, and UTF-7, which browsers do not read
CHARSETS = tuple("utf-8 utf-16 iso cp koi8 mac gb big5 euc hz".split())
LABEL = rb"\s*+=\s*+[\"']?\s*+([\w.:-]{1,40})"  # `*+`: n spaces cost n steps, not n²
IN_HEADER = re.compile(b"charset" + LABEL, re.IGNORECASE)
IN_DOCUMENT = re.compile(rb"<(?:meta[^>]*charset|\?xml[^>]*encoding)" + LABEL, re.IGNORECASE)


def charset_of(body, details):
    """The charset of a page, as browsers find it: its byte order mark, else the header's label (in
    `details`, which follow the type), else what the document declares, else UTF-8."""
    for mark, name in BOMS.items():
        if body.startswith(mark):
            return name
    header = IN_HEADER.search(details.encode("utf-8", "replace"))
    start = re.sub(rb"<!--.*?-->", b"", body[:1024], flags=re.DOTALL)
    for found in (header, IN_DOCUMENT.search(start)):
        label = found[1].decode().lower().removeprefix("x-") if found else "none"
        label = label.replace("windows-31j", "cp932").replace("windows-", "cp")
        label = label.replace("gb_", "gb").removesuffix("-i").removesuffix("-e")  # iso-8859-8-i
        with contextlib.suppress(LookupError):
            name = codecs.lookup(label).name
            name = SUPERSETS.get(name, name)
            if name.startswith(CHARSETS):
                # a document that can be searched for its declaration is not in UTF-16
                return name if found is header or not name.startswith("utf") else "utf-8"
    return "utf-8"


# ------------------------------------------------------------------------------------------- text
# Each match ends at its closing mark, or else at the end of the page, and nothing is tried twice:
# *+ never gives back. So no page makes us read a character many times; html.parser reads an
# unfinished tag again and again. In a quoted value, ">" does not end the tag.
ATTRIBUTES = r"""(?:[^>=]++|=\s*+(?:"[^"]*+"?|'[^']*+'?)?+)*+"""
UNSEEN = "annotation|annotation-xml|iframe|noscript|script|style|svg|textarea|title"
MARKUP = re.compile(
    rf"""(?xsi) <!--(?:-?>|.*?(?:-->|\Z))
       | <[!?][^>]*+>?
       | <(?P<unseen>{UNSEEN})(?=[\s/>]){ATTRIBUTES}(?<!/)>(?P<inside>.*?)(?=</(?P=unseen)[\s/>]|\Z)
       | <(?P<end>/?)(?P<name>[a-z][^\s/>]*+)(?P<attributes>{ATTRIBUTES})>?
     """
)
ATTRIBUTE = re.compile(r"""([^\s/>=]++)(?:\s*+=\s*+(?:"([^"]*+)"?|'([^']*+)'?|([^\s>]*+)))?+""")
LONG_NUMBER = re.compile(r"&#x?[0-9a-f]{9,}", re.IGNORECASE)  # html.unescape() raises on these
BREAKS = (
    "address article aside blockquote body br caption center dd div dl dt fieldset figcaption "
    "figure footer form h1 h2 h3 h4 h5 h6 head header hr html li main nav ol p pre section select "
    "table tbody tfoot thead tr ul"
).split()
VOID = "area base br col embed frame hr img input link meta param source track wbr".split()
# An element whose end tag may be left out also ends where one of these begins.
ENDED_BY = {"p": {*BREAKS} - {"br", "select"}, "li": {"li"}, "tr": {"tr", "tbody", "tfoot"}}
ENDED_BY |= dict.fromkeys(("td", "th"), {"td", "th", *ENDED_BY["tr"]}) | {"option": {"option"}}
ENDED_BY |= dict.fromkeys(("tbody", "thead"), {"tbody", "tfoot"})
ENDED_BY |= dict.fromkeys(("dt", "dd", "rp", "rt"), {"dt", "dd", "rb", "rp", "rt"})
# Tags of what nobody sees, as flat() writes them; rt is the reading of its characters. Not of a
# whole page: a script will show it.
HIDDEN = re.compile(
    r"""(?xi) <(?:datalist|del|rp|rt|rtc|s|strike)\0 | <dialog\0(?!.*\0open=)
        | <template\0(?!.*\0shadowrootmode=) | <(?!(?:html|body)\0).*\0(?:hidden=(?!until-found)
        | style=(?:[^\0]*;)?[ ]?(?:display[ ]?:[ ]?none | visibility[ ]?:[ ]?(?:hidden|collapse)
        | text-decoration(?:-line)?[ ]?:[^\0;]*line-through))"""
)
REFRESH = re.compile(
    r"(?i)(?=.*\0http-equiv=refresh\b).*\0content= ?[0-5] ?[;,] ?+(url ?= ?)?+[\"']?([^\0\"']+)"
)
NOTE = re.compile(r"note|(?<![a-z])(?:fn|ref|cit)", re.IGNORECASE)  # class="reference"
# What an element shows at its beginning and at its end. \1 and \2 enclose what is raised, \3 and \4
# a part of a formula, which gets brackets if it is not SIMPLE: a number or a letter. \5 and \6
# enclose a footnote's mark, if it is raised. \7: from here on it is lowered; \b: this, or a number
# of a formula, ends here.
SHOWN = dict.fromkeys(BREAKS, ("\n", "\n"))
SHOWN |= dict.fromkeys(("td", "th", "option"), ("\t", "\t"))
SHOWN |= {"sup": ("\1", "\2"), "sub": ("\7", "\b"), "mn": ("", "\b")}
SHOWN |= {"a": ("", "\6"), "span": ("", "\6")}
SHOWN |= {"mfrac": (" ", " "), "msqrt": ("√\3", "\4"), "mroot": ("", ")")}
# what follows the n-th part
SIGNS = {("mfrac", 1): "/", ("msup", 1): "^", ("msubsup", 2): "^", ("mroot", 1): "^(1/"}
FORMULAS = {name for name, _ in SIGNS}
SIMPLE = r"[-+−–]?(?:\d[\d.,]*|\w?)[-+−–]?"


def text_of(html):
    """The title, then what a reader sees; style sheets are ignored.

    '<title>Fe</title><p>Iron is<br>a <b>metal</b>' -> 'Fe\\nIron is\\na metal'
    '5,000<sup class="note">2</sup> m<sup>2</sup><i hidden>00033</i>' -> '5,000[2] m^2'
    """
    title, shown, at = "", [], 0
    opened = []  # [name, finished parts, where it begins in `shown` if it is hidden]
    count = Counter()  # how many of each name are open
    for mark in MARKUP.finditer(html):
        text = collapsed(html[at : mark.start()])
        shown.append("" if text == " " and any(map(count.get, FORMULAS)) else text)
        at, ends, name = mark.end(), mark["end"], (mark["name"] or mark["unseen"] or "").lower()
        if name == "title":
            title = title or collapsed(mark["inside"] or "")
        if ends == "":
            while opened and name in ENDED_BY.get(opened[-1][0], ()):
                close(opened, count, shown)
            part = "\3" if opened and opened[-1][0] in FORMULAS else ""
            linked = name == "a" and "#" in mark["attributes"]  # to a place in this page
            note = "\5" if linked or NOTE.search(mark["attributes"]) else ""
            # Wikipedia hides a formula, and shows a picture of it
            hidden = HIDDEN.match(flat(name, mark["attributes"])) and html[at : at + 5] != "<math"
            opened.append([name, 0, len(shown) if hidden else None])
            count[name] += 1
            shown.append(part + SHOWN.get(name, ("", ""))[0] + note)
            ends = name in VOID or (count["math"] and mark[0].endswith("/>"))
        if ends and not count[name]:  # </p> without <p>
            shown.append(SHOWN.get(name, ("", ""))[1])
        while ends and count[name] and close(opened, count, shown) != name:
            pass  # what is still open inside of it ends, too
    shown.append(collapsed(html[at:]))
    text = with_signs("".join(shown))
    return "\n".join(" ".join(line.split()) for line in [title, *text.split("\n")] if line.strip())


def collapsed(text):
    return re.sub(r"\s+", " ", entities.unescape(LONG_NUMBER.sub("\ufffd", text)))


def flat(name, attributes):
    """<p Class="a b" hidden> -> "<p\\0 \\0Class=a b \\0hidden=" """
    return f"<{name}\0" + collapsed(ATTRIBUTE.sub(r"\0\1=\2\3\4", attributes))


def refresh_of(html):
    """Where a page sends its reader within 5 seconds, or "".

    '<meta http-equiv="refresh" content="0; url=/b">' -> "/b"
    """
    marks = (mark for mark in MARKUP.finditer(html) if (mark["name"] or "").lower() == "meta")
    found = (REFRESH.match(flat("meta", mark["attributes"])) for mark in marks)
    return next((match[2].strip() for match in found if match), "")


def close(opened, count, shown):
    """Close the innermost open element, and return its name. opened, count, shown: of text_of()."""
    name, _, begin = opened.pop()
    count[name] -= 1
    shown.append(SHOWN.get(name, ("", ""))[1])
    if opened and opened[-1][0] in FORMULAS:
        opened[-1][1] += 1
        shown.append("\4" + SIGNS.get(tuple(opened[-1][:2]), ""))
    if begin is not None:
        del shown[begin:]
    return name


def with_signs(text):
    """The text with "^" and brackets for what only the layout shows: 10<sup>8</sup> -> 10^8"""
    text = re.sub(r"([$€£¥]\s?\d[\d,]*+)\x01(\d\d)\x02", r"\1.\2", text)  # a price
    marks = r"(\x05\s*)?\x01([^\x01\x02]*)\x02(\s*\x06)?"
    text = re.sub("[\5\6]", "", re.sub(marks, footnote, text))
    text = text.replace("\3 ", "\3").replace(" \4", "\4")
    # a number does not go on with another that is lowered, or follows: 1010_2, 2 10^8
    text = re.sub(r"(?<=\d)\x08(\x04*+)(?=\x03*\d)", r"\1 ", text).replace("\b", "")
    text = re.sub(r"(?<=[\d\x02])\x07", "_", text).replace("\7", "")
    text = re.sub(rf"\x03({SIMPLE})\x04", r"\1", text)
    text = text.replace("\3", "(").replace("\4", ")")
    before = r"(?:(?<=[\w)\]}])|(?<=\d) )"  # in <sup>14</sup>C there is nothing to be raised to
    for _ in range(2):  # 10<sup>10<sup>100</sup></sup>
        text = re.sub(before + r"\x01([^\x01\x02]*)\x02(?=(.?))", power, text)
    return text.replace("\1", "").replace("\2", "")


def footnote(raised):
    """2 -> [2], if it is a mark of a footnote"""
    before, text, after = raised.groups()
    linked = (before and after) or text.lstrip().startswith("\5")
    text = re.sub("[\5\6]", "", text).strip()
    if not linked or not re.fullmatch(r"(?=.*\d|(?!.*[^\W\d]{2}))(?![-–])[^−+=]{1,12}", text):
        return raised[0]
    return f"{before or ''}[{text.strip('[]')}]{after or ''}"


def power(raised):
    """8 -> ^8, n+1 -> ^(n+1); unchanged: st, [1], TM."""
    text, after = raised[1].strip(), raised[2]
    if text.isdigit() and after and after in "/⁄":  # 3<sup>1</sup>/<sub>2</sub>
        return f" {text}"
    if not re.fullmatch(r"(?=.*[\d+−–=-])[^[(].{0,11}|[ijkmnptxyz]", text):
        return raised[0]
    return f"^{text}" if re.fullmatch(SIMPLE, text) else f"^({text})"
