"""Pages: a page, and an address that a model wrote, may do what they like: nothing private is reached.

fetch() refuses the servers of these tests, which are on loopback; the fixture `loopback` lets them through.
"""
import gzip
import shutil
import socket
import ssl
import subprocess
import threading
import time
import tracemalloc
import zlib

import pytest
from test_services import HTTP, SOON, clock, drip, dropped, endless, failure, quick, reply, serve  # noqa

from world import pages, services
from world.pages import fetch, public, text_of
from world.services import api, session


@pytest.fixture
def loopback(monkeypatch):
    monkeypatch.setattr(pages, "public", lambda address: address == "127.0.0.1")


def refusal(*arguments, **more):
    return str(failure(fetch, *arguments, **more))


def resolved(address, port):
    """What getaddrinfo says."""
    family, rest = (socket.AF_INET6, (0, 0)) if ":" in address else (socket.AF_INET, ())
    return [(family, socket.SOCK_STREAM, 6, "", (address, port, *rest))]


# ------------------------------------------------------------ fetch: what may be asked for
EXAMPLE = "http://example.com/"
HOSTILE = """
    file:///etc/passwd ftp://example.com/ gopher://example.com:70/_x data:text/html,hello
    javascript:alert(1) jar:http://example.com!/a about:blank //example.com/ example.com http:example.com
    http:/example.com http:///path http:// https://:443/ http://user@example.com/ http://user:pw@example.com/
    http://@example.com/ http://example.com:80\\@127.0.0.1/ http://example.com\\.evil.com/
    http://example.com/a\\b http://a..b/ http://.example.com/ http://example.com../ http://exa%6dple.com/
    http://example.com%00.evil.com/ http://exam<ple.com/ http://*.example.com/ http://example.com:0/
    http://example.com:99999/ http://example.com:-1/ http://example.com:80a/ http://127.0.0.1/
    http://127.0.0.1:22/ http://127.1/ http://127.0.1/ http://2130706433/ http://0x7f000001/ http://0x7f.1/
    http://0X7F.0.0.1/ http://0x/ http://017700000001/ http://0177.0.0.1/ http://127.0.0.1./
    http://1.2.3.4./ http://8.8.8.8.8/ http://8.8.8.256/ http://08.8.8.8/ http://example.1/ http://0/
    http://169.254.169.254/latest/meta-data/ http://255.255.255.255/ http://[::1]/ http://[::]/
    http://[::ffff:127.0.0.1]/ http://[::ffff:8.8.8.8]/ http://[::ffff:7f00:1]/ http://[::127.0.0.1]/
    http://[2002:7f00:1::]/ http://[64:ff9b::7f00:1]/ http://[2600::5efe:7f00:1]/ http://[fe80::1%25eth0]/
    http://[2600::1%25eth0]/ http://[2600::1%eth0]/ http://[::1 http://::1/ http://[127.0.0.1]/
    http://[v1.a]/ http://[2600::1]x/ http://x[2600::1]/ http://[]/ http://localhost/ http://LOCALHOST:8000/
    http://localhost./ http://private.example.com/ http://①②⑦.⓪.⓪.①/ http://１２７.０.０.１/
    http://127。0。0。1/ http://127．0．0．1/ http://ⓛocalhost/ http://example.com／@evil.com/ http://℀.com/
    http://exa\u200bmple.com/ http://exa\u00admple.com/\u202e""".split() + [
    "http://example.com/a b", "http://exa mple.com/", "http://example.com:8 0/", "",
    " http://example.com/", "http://example.com/\n", "ht\ntp://example.com/", "http://exam\tple.com/",
    "http://example.com/\r\nHost: evil", "http://example.com/\0", "http://example.com\x7f/",
    "http://example.com/\ud800", "http://\ud800.com/", "http://example.com:８０8０8０/",
    "http://example.com/\u2028", EXAMPLE + "a" * 2000, "http://" + "a." * 130 + "com/",
    "http://" + "a" * 64 + ".com/", "http://" + "[" * 900 + "/"]


def test_a_hostile_url_opens_no_connection(monkeypatch):
    opened = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: opened.append(address))
    monkeypatch.setattr(socket, "create_connection", lambda address, *_: opened.append(address))
    inside = dict.fromkeys(["localhost", "localhost.", "private.example.com"], "127.0.0.1")
    look_up = lambda host, port, **_: resolved(inside.get(host, "8.8.8.8"), port)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for url in HOSTILE:
        sentence = refusal(url)
        assert not opened and "\n" not in sentence and len(sentence) < 350, ascii(url)


PRIVATE = """
    0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.127.255.255 127.0.0.1 127.255.255.255 169.254.0.1 172.16.0.1
    172.31.255.255 192.0.0.1 192.0.0.9 192.0.0.170 192.0.2.1 192.88.99.1 192.168.1.1 198.18.0.1
    198.19.255.255 198.51.100.1 203.0.113.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 :: ::1 ::8.8.8.8
    ::ffff:8.8.8.8 ::ffff:0:8.8.8.8 64:ff9b::808:808 64:ff9b:1::808:808 100::1 2001::1 2001:0:1::1
    2001:20::1 2001:db8::1 2002:808:808:: 3fff::1 5f00::1 fc00::1 fd12::1 fe80::1 febf::1 fec0::1 feff::1
    ff02::1 2600::1%eth0 2600::5efe:808:808 2600::200:5efe:808:808 localhost x 08.8.8.8 8.8 134744072
    8.8.8.8/32""".split() + ["", " 8.8.8.8", "8.8.8.8\n"]


def test_an_address_of_the_internet_is_public_and_any_other_is_not():
    assert all(map(public, "8.8.8.8 93.184.216.34 100.63.255.255 2600::1 2a00:1450:4001:81b::200e".split()))
    assert [address for address in PRIVATE if public(address)] == []


# ------------------------------------------------------------ fetch: names
@pytest.fixture
def names(monkeypatch):
    """Name servers that give these answers in order; and lists of what was looked up and connected to."""
    answers, looked_up, connected = [], [], []

    def look_up(host, port, **_):
        looked_up.append(host)
        return [row for address in answers.pop(0) for row in resolved(address, port)]

    def connect(sock, address):
        connected.append(address[0])
        raise ConnectionRefusedError
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket.socket, "connect", connect)
    return answers, looked_up, connected


@pytest.mark.parametrize("addresses", [
    ["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["10.0.0.1", "8.8.8.8"], ["2600::1", "::1"],
    ["8.8.8.8", "::ffff:8.8.8.8"], ["fe80::1%2"], []])
def test_a_name_with_any_private_address_is_refused(names, addresses):
    names[0].append(addresses)
    assert refusal(EXAMPLE) == "example.com is not at a public address" and not names[2]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_name_is_looked_up_once_and_the_connection_goes_to_what_was_checked(names, scheme):
    names[0].extend([["2600::1", "8.8.8.8"], ["127.0.0.1"]])  # rebinding: the second answer would be ours
    assert refusal(f"{scheme}://example.com/") == "example.com cannot be read (nobody listens there)"
    assert names[1] == ["example.com"] and names[2] == ["2600::1", "8.8.8.8"]


def test_an_address_of_a_kind_that_this_machine_does_not_have_is_passed_over(names, monkeypatch):
    rows = [(999, socket.SOCK_STREAM, 6, "", ("2600::1", 80))] + resolved("8.8.8.8", 80)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: rows)
    assert "nobody listens there" in refusal(EXAMPLE) and names[2] == ["8.8.8.8"]


def test_each_hop_is_looked_up_and_checked_again(monkeypatch, serve):
    server = serve(reply(status="302 Found", Location="http://example.com:81/again"))
    answers, really = ["8.8.8.8", "127.0.0.1"], socket.socket.connect
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: resolved(answers.pop(0), port))
    monkeypatch.setattr(socket.socket, "connect", lambda sock, _: really(sock, server.server_address))
    assert refusal(EXAMPLE) == "example.com is not at a public address" and len(server.requests) == 1


def test_a_name_server_that_never_answers_does_not_hold_us(monkeypatch, clock):
    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: end.wait(60))
    assert "did not answer in time" in refusal(EXAMPLE, seconds=0.2) and clock() < SOON
    end.set()


def test_an_unknown_name_is_told(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "?")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert refusal(EXAMPLE) == "example.com cannot be found"


@pytest.mark.parametrize("url, host, first_line", [
    ("HTTP://EXAMPLE.com", "example.com", "GET / HTTP/1.1"),
    ("http://example.com:80/a#b", "example.com", "GET /a HTTP/1.1"),
    ("https://example.com:8443?q=é&r=%20", "example.com:8443", "GET /?q=%C3%A9&r=%20 HTTP/1.1"),
    ("http://bücher.de/ü", "xn--bcher-kva.de", "GET /%C3%BC HTTP/1.1"),
    ("http://[2600::0:1]:81/", "[2600::1]:81", "GET / HTTP/1.1"),
    ("http://8.8.8.8/;a=1?b='\"<>", "8.8.8.8", "GET /;a=1?b='%22%3C%3E HTTP/1.1")])
def test_a_plain_url_becomes_a_plain_request(url, host, first_line):
    target = pages.parse_url(url)
    assert target.request.split("\r\n")[:2] == [first_line, f"Host: {host}"]
    assert target.request.endswith("\r\n\r\n")
    assert target.url.isascii() and "#" not in target.url
    assert pages.parse_url(target.url).request == target.request


# ------------------------------------------------------------ fetch: what may come back
def test_loopback_is_refused_without_any_connection(serve):
    server = serve(reply())
    assert "is not at a public address" in refusal(server.url) and server.connections == 0


def test_a_page_is_its_last_url_and_its_text(serve, loopback):
    server = serve(reply("<title>Iron</title><p>Iron is a <b>metal</b>."))
    assert fetch(server.url + "/a?b=c#d") == (server.url + "/a?b=c", "Iron\nIron is a metal.")
    assert "User-Agent: nano-agentflow" in server.requests[0] and "Cookie" not in server.requests[0]


@pytest.mark.parametrize("kind", "text/plain text/csv;charset=utf-8 application/ld+json TEXT/XML".split())
def test_other_text_is_left_as_it_is(serve, loopback, kind):
    assert fetch(serve(reply("a <b> &amp;\r\n c\x1b[31m\0", kind=kind)).url).text == "a <b> &amp;\n c [31m "


@pytest.mark.parametrize("kind", [
    "image/png", "application/pdf", "application/octet-stream", "multipart/mixed", None, "", ";", "text/",
    "text", "video/é", "application/jsonx", "text/html\x7f", "application/xml/x"])
def test_what_is_not_text_is_refused_and_its_type_is_named(serve, loopback, kind):
    sentence = refusal(serve(reply("x", kind=kind)).url)
    assert sentence.endswith("which is not text") and sentence.isascii()
    assert kind != "image/png" or kind in sentence


@pytest.mark.parametrize("kind, body, text", [
    ("text/html; charset=latin-1", b"caf\xe9", "café"),
    ('text/html; Charset="ISO-8859-1"', b"caf\xe9", "café"),
    ("text/html", b'<meta charset="windows-1252">caf\xe9', "café"), ("text/html", "café".encode(), "café"),
    ("text/html", "<meta http-equiv=x content='text/html; charset=Shift_JIS'>漢".encode("shift_jis"), "漢"),
    ("text/html; charset=utf-8", b"<meta charset=latin-1>caf\xc3\xa9", "café"),
    ("text/html", b"caf\xe9!", "caf\ufffd!"), ("text/html; charset=utf-16", "café".encode("utf-16"), "café"),
    ("text/html", b"\xef\xbb\xbfcaf\xc3\xa9", "café"),
    *((f"text/html; charset={name}", b"caf\xc3\xa9", "café") for name in ["", "a" * 5000, "utf-8\0",
      *"""zip rot13 hex base64 bz2 idna punycode undefined unicode_escape raw_unicode_escape mbcs nonsense
      ..os " é __builtins__""".split()])])
def test_any_charset_gives_text(serve, loopback, kind, body, text):
    assert fetch(serve(reply(body, kind=kind)).url).text == text


@pytest.mark.parametrize("packed, encoding", [
    (gzip.compress, "gzip"), (zlib.compress, "deflate"), (gzip.compress, "X-GZIP")])
def test_a_packed_page_is_unpacked(serve, loopback, packed, encoding):
    assert fetch(serve(reply(packed(b"<p>Iron"), Content_Encoding=encoding)).url).text == "Iron"


@pytest.mark.parametrize("answer", [
    reply("x" * 3_000_000), endless(HTTP + "\r\n"),
    endless(HTTP + "Transfer-Encoding: chunked\r\n\r\n", b"3e8\r\n" + b"x" * 1000 + b"\r\n"),
    reply(gzip.compress(b"x" * 10_000_000), Content_Encoding="gzip"), reply(b"x" * 2000, length="9" * 30)])
def test_a_long_page_is_cut_at_its_limit(serve, loopback, answer):
    assert fetch(serve(answer).url, limit=1000).text == "x" * 1000


def test_a_bomb_is_not_unpacked_beyond_the_limit():
    bomb = gzip.compress(b"x" * 50_000_000)
    tracemalloc.start()
    assert len(services.unpacked(iter([bomb]), "gzip", 1000, time.monotonic() + 60)) == 1001
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("answer, why", [
    (reply("x", length=99), "dropped"),
    (reply(gzip.compress(b"x" * 99)[:-9], Content_Encoding="gzip"), "encoding is broken"),
    (reply(Content_Encoding="br"), "encoding is broken"),
    (reply(gzip.compress(gzip.compress(b"x")), Content_Encoding="gzip, gzip"), "encoding is broken"),
    (reply(gzip.compress(b"x"), Content_Encoding="gzip", content_encoding="gzip"), "encoding is broken"),
    (dropped, "dropped"), ((HTTP + "Transfer-Encoding: chunked\r\n\r\n5\r\nab").encode(), "dropped"),
    (b"220 smtp.example.com\r\n", "BadStatusLine"),
    ((HTTP + "Transfer-Encoding: chunked\r\n\r\n-5\r\nab").encode(), "ValueError"),
    (b"\0" * 100_000, "LineTooLong"), (HTTP.encode() + b"a: b\r\n" * 200 + b"\r\n", "HTTPException")])
def test_a_broken_page_is_told(serve, loopback, answer, why):
    sentence = refusal(serve(answer).url)
    assert sentence.startswith("127.0.0.1 cannot be read (") and why in sentence


@pytest.mark.parametrize("status, sentence", [
    ("404 " + "x" * 100, "404 Not Found"), ("206 Part", "206 Partial Content"), ("302 Found", "302 Found"),
    ("500 Oops", "500 Internal Server Error"), ("304 Same", "304 Not Modified"), ("799 Odd", "799")])
def test_a_status_is_told_in_our_words(serve, loopback, status, sentence):
    failed = failure(fetch, serve(reply("x", status=status)).url)
    assert str(failed) == f"127.0.0.1 answered {sentence}" and failed.status == int(status[:3])


@pytest.mark.parametrize("answer", [
    drip("", gap=60), drip(""), drip("HTTP/1.1 200 OK\r\n"), drip("HTTP/1.1 200 OK\r\n", b"a: b\r\n", 0.05),
    drip(HTTP + "\r\n"), drip("", b"HTTP/1.1 100 Continue\r\n\r\n"),
    drip(HTTP + "Content-Length: 99999\r\n\r\n"),
    drip(HTTP + "Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    drip(HTTP + "Transfer-Encoding: chunked\r\n\r\n", b"1"),
    endless(HTTP + "Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"")[:10].decode("latin-1"),
            b"\0\0\0\xff\xff" * 9999),
    lambda send: (time.sleep(0.2), send(reply(status="302 Found", Location="/")))],
    ids="slow status header headers body continue length chunks chunk-size empty-blocks redirects".split())
@pytest.mark.exhaustive
def test_one_clock_ends_everything(serve, loopback, clock, answer):
    sentence = refusal(serve(answer).url, seconds=0.3)
    assert clock() < SOON
    late = "127.0.0.1 did not answer in time (at most 0.3 seconds)"
    assert sentence == late or "encoding is broken" in sentence


def test_a_server_that_never_greets_in_tls_is_ended_too(serve, loopback, clock):
    silent = socket.create_server(("127.0.0.1", 0))
    url = "https://127.0.0.1:%d/" % silent.getsockname()[1]
    assert "did not answer in time" in refusal(url, seconds=0.3) and clock() < SOON
    silent.close()


# ------------------------------------------------------------ fetch: redirects
def test_five_redirects_are_followed_and_six_are_not(serve, loopback):
    hops = [reply(status=f"{code} Moved", Location=f"/{code}?n={code}") for code in (301, 302, 303, 307, 308)]
    server = serve(*hops, reply("here"))
    assert fetch(server.url) == (server.url + "/308?n=308", "here") and len(server.requests) == 6
    server = serve(*hops, hops[0], reply("here"))
    assert refusal(server.url) == "127.0.0.1 redirects more than 5 times" and len(server.requests) == 6


@pytest.mark.parametrize("location, path", [
    ("b", "/a/b"), ("../b?c", "/b?c"), ("?c", "/a/x?c"), ("/é", "/%C3%A9"), ("#d", "/a/x")])
def test_a_redirect_may_be_relative(serve, loopback, location, path):
    server = serve(reply(status="302 Found", Location=location), reply("here"))
    assert fetch(server.url + "/a/x").url == server.url + path
    assert server.requests[1].startswith(f"GET {path} ")


def test_a_redirect_to_another_host_takes_nothing_along_and_its_body_is_not_read(serve, loopback):
    other = serve(reply("there"))
    server = serve(endless(f"HTTP/1.1 302 Found\r\nLocation: {other.url}\r\nSet-Cookie: a=b\r\n\r\n"))
    assert fetch(server.url) == (other.url + "/", "there") and "a=b" not in other.requests[0]


@pytest.mark.parametrize("location", [
    "file:///etc/passwd", "http://10.0.0.1/", "//169.254.169.254/", "http://127.1/", "http://[::1]/",
    "http://user@127.0.0.1/", "http://[", "/a b", "http://\xff/", "/" + "a" * 3000, "data:text/html,x"])
def test_a_redirect_to_where_a_url_may_not_go_is_refused(serve, loopback, location):
    server = serve(reply(status="302 Found", Location=location), reply("never"))
    failure(fetch, server.url)
    assert server.connections == 1


# ------------------------------------------------------------ certificates
@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if not shutil.which("openssl"):
        pytest.skip("openssl makes the certificate of these tests")
    folder = tmp_path_factory.mktemp("tls")
    command = ("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
               "-keyout key.pem -out cert.pem -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1")
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def secure(serve, certificate):
    server = serve(reply('{"a": 1}'))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.url = server.url.replace("http:", "https:")
    return server


def test_a_certificate_that_nobody_signed_is_refused(secure, loopback):
    assert refusal(secure.url) == "127.0.0.1 cannot be read (its certificate is not valid)"
    sentence = str(failure(api, session(tries=1), "GET", secure.url))
    assert sentence == f"{secure.url[8:]} cannot be reached (no secure connection)"
    assert not secure.requests


def test_a_trusted_certificate_holds_for_its_own_name_only(secure, loopback, certificate, monkeypatch):
    monkeypatch.setattr("requests.certs.where", lambda: str(certificate / "cert.pem"))
    assert fetch(secure.url).text == '{"a": 1}'
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: resolved("127.0.0.1", port))
    assert "its certificate is not valid" in refusal(secure.url.replace("127.0.0.1", "example.com"))


def test_tls_to_a_server_without_it_is_told(loopback):
    plain = socket.create_server(("127.0.0.1", 0))
    answer = lambda: plain.accept()[0].sendall(reply(status="400 Bad Request"))
    threading.Thread(target=answer, daemon=True).start()
    port = plain.getsockname()[1]
    assert "cannot be read (no secure connection)" in refusal(f"https://127.0.0.1:{port}/")
    plain.close()


# ------------------------------------------------------------ text
@pytest.mark.parametrize("html, text", [
    ("<title>Fe</title><p>Iron is<br>a <b>metal</b>", "Fe\nIron is\na metal"), ("a<p>b</p>c", "a\nb\nc"),
    ("in<i>line</i>", "inline"), ("<head><title> A &amp;\n B </title><style>p{}</style></head>x", "A & B\nx"),
    ("x<title>late</title>y", "late\nxy"), ("", ""), ("<script>if (a<b) '<p>'</script>x", "x"),
    ("<SCRIPT>a</ScRiPt >x", "x"), ("<script>never closed <p>x", ""), ("<script/>x", "x"),
    ("a<!-- b > c -->d<!-->e<!--->f", "adef"), ("<!-- open <p>x", ""), ("<!doctype html><?xml a?>x", "x"),
    ("<![CDATA[a]]>x", "x"),
    ("<style>a</style><noscript>b</noscript><template>c</template><svg><title>d</title></svg>e", "e"),
    ("<scripted>x", "x"), ("<a title='a>b' href=\"c>d\">x</a>", "x"), ("<a b=c>x", "x"), ("<p don't>x", "x"),
    ("<p a = '>'>x", "x"), ("<p a='>x", ""),
    ("1 < 2 & 3 > 2 &lt;b&gt; &eacute; &#233; &#xe9; &nope; &", "1 < 2 & 3 > 2 <b> é é é &nope; &"),
    ("a\n \t b\u00a0c", "a b c"), ("<table><tr><td>Fe<td>26</tr><tr><th>Cu<th>29", "Fe 26\nCu 29"),
    ("<ul><li>a<li>b</ul>", "a\nb"), ("a</", "a</"), ("a<", "a<"), ("&#" + "9" * 5000 + ";x", "\ufffd;x"),
    ("<b", ""), ("<title>one</title><title>two</title>", "one"), ("&#0;&#xD800;", "\ufffd\ufffd")])
def test_html_becomes_what_a_reader_sees(html, text):
    assert text_of(html) == text


HEAVY = [
    "<", "<!", "<!--", "<a ", "&", "<![CDATA[", "<?", "</", "<div>", "<script>", "<title>", "<svg></svg>",
    "&a", "&#1", "<a b='", "<a b=", "= ", "<!---->", "<p>\n", "</script", "<a/", "&amp;", " x", "--"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("before", ["", "<a ", "<script>", "<!--"])
def test_hostile_html_takes_no_longer_than_other(before):
    for html in HEAVY:
        page, began = before + html * (300_000 // len(html)), time.thread_time()
        assert len(text_of(page)) <= len(page) and time.thread_time() - began < SOON, html


def test_deep_nesting_is_no_problem():
    assert text_of("<div>" * 100_000 + "x" + "</div>" * 100_000) == "x"
