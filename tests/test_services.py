"""Services: a service may fail in every way, and the key stays with us; and the cache of their answers.

No test leaves the machine: the servers are real ones on loopback, for test_pages.py and test_search.py, too.
"""
import contextlib
import gzip
import json
import os
import re
import socket
import socketserver
import sqlite3
import tempfile
import threading
import time
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from world import services
from world.services import Cache, ServiceError, api, session

KEY = "s3cr3t-k3y"
HTTP = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
SOON, LONG = 20, 60  # seconds: what ends in half a second may take SOON, and LONG where nothing ends it


def reply(body=b"{}", status="200 OK", kind="text/html", length=None, **headers):
    """The bytes of an answer; length: what Content-Length says, if not the truth."""
    body = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {length or len(body)}", "Connection: close"]
    lines += [f"Content-Type: {kind}"] * (kind is not None)
    lines += [f"{key.replace('_', '-')}: {value}" for key, value in headers.items()]
    return "\r\n".join(lines + ["", ""]).encode() + body


class Server(socketserver.ThreadingTCPServer):
    """Gives its answers in order, the last one ever after: bytes, or a function that writes."""
    daemon_threads = True
    request_queue_size = 50

    def __init__(self, *answers):
        super().__init__(("127.0.0.1", 0), None)
        self.answers, self.requests, self.connections = list(answers), [], 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def finish_request(self, connection, _):
        self.connections += 1
        connection.settimeout(10)
        with connection.makefile("rb") as file:
            request = b"".join(iter(file.readline, b"\r\n")).decode()
            length = re.search(r"(?i)content-length: (\d+)", request)
            self.requests.append(f"{request}\r\n{file.read(int(length[1])).decode()}" if length else request)
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        with contextlib.suppress(OSError):  # the other side has had enough
            answer(connection.sendall) if callable(answer) else connection.sendall(answer)

    def handle_error(self, *_):
        pass  # those who try TLS here


@pytest.fixture
def serve():
    servers = []
    yield lambda *answers: servers.append(Server(*answers)) or servers[-1]
    for server in servers:
        server.shutdown()
        server.server_close()


def drip(start, byte=b"x", gap=0.02):
    """An answer that begins with `start` and then gives a byte now and then, for a long time."""
    def write(send):
        send(start.encode())
        for _ in range(int(LONG / gap)):
            time.sleep(gap)
            send(byte)
    return write


def endless(start, block=b"x" * 65536):
    def write(send):
        send(start.encode())
        while True:
            send(block)
    return write


def slow(seconds):
    return lambda send: (time.sleep(seconds), send(reply()))


def dropped(send):
    pass


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(services, "PAUSE", 0.01)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def clock():
    began = time.monotonic()
    return lambda: time.monotonic() - began


def failure(call, *arguments, **more):
    with pytest.raises(ServiceError) as caught:
        call(*arguments, **more)
    return caught.value


# ------------------------------------------------------------ api and session: services that we chose
@pytest.mark.parametrize("data", [{"a": [1, "é"]}, []])
@pytest.mark.parametrize("pack, encoding", [
    (bytes, "identity"), (gzip.compress, "gzip"), (zlib.compress, "deflate")])
def test_an_answer_is_its_json(serve, data, pack, encoding):
    server = serve(reply(pack(json.dumps(data).encode()), X_Left="7", Content_Encoding=encoding))
    assert api(session(), "GET", server.url) == data


def test_the_request_has_our_name_its_parameters_its_headers_and_only_the_encoding_that_we_read(serve):
    server = serve(reply())
    api(session(), "POST", server.url + "/v1", params={"q": "a b"}, json={"n": 1}, headers={"X-Key": KEY})
    request, = server.requests
    assert request.startswith("POST /v1?q=a+b HTTP/1.1") and f"X-Key: {KEY}" in request
    assert "User-Agent: nano-agentflow" in request and "2510.05592" in request
    assert "Accept-Encoding: gzip\r\n" in request


def test_a_netrc_does_not_overwrite_our_authorization(serve, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login someone password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server = serve(reply())
    api(session(), "GET", server.url, headers={"Authorization": f"Bearer {KEY}"})
    assert f"Authorization: Bearer {KEY}" in server.requests[0]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("first", [
    *(reply(status=status) for status in ("500 Oops", "502 Bad", "504 Late", "522 Origin", "429 Slow")),
    dropped, b"HTTP/1.1 200", reply("<html>"), reply(""), reply("{}", length=99), reply(b'{"a": "\xff"}'),
    reply("7"), reply("[" * 100_000), reply(b"not gzip", Content_Encoding="gzip"),
    reply(gzip.compress(b"{}")[:-9], Content_Encoding="gzip"), reply(Content_Encoding="br"),
    reply(Content_Encoding="gzip, gzip"), endless("HTTP/1.1 503 Busy\r\n\r\n"),
    reply(status="503 Busy", Retry_After="never"), reply(status="503 Busy", Retry_After="9" * 5000)],
    ids=lambda first: "" if callable(first) or isinstance(first, str) else repr(first[9:20]))
def test_what_may_pass_is_tried_again(serve, first, method):
    server = serve(first, reply('{"good": 1}'))
    assert api(session(), method, server.url, seconds=5) == {"good": 1} and len(server.requests) == 2


def test_retry_after_is_respected(serve, monkeypatch):
    waited = []
    monkeypatch.setattr("urllib3.util.retry.time", SimpleNamespace(time=time.time, sleep=waited.append))
    server = serve(reply(status="429 Too Many Requests", Retry_After="7"), reply())
    assert api(session(), "POST", server.url) == {} and waited == [7]


@pytest.mark.parametrize("asked", ["3600", "Fri, 31 Dec 2100 23:59:59 GMT"])
@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
def test_a_long_retry_after_fails_at_once_and_says_how_long(serve, clock, asked, status):
    server = serve(reply("later", status=status, Retry_After=asked))
    failed = failure(api, session(), "GET", server.url)
    assert clock() < SOON and len(server.requests) == 1
    assert failed.status == int(status[:3]) and failed.body == "later"
    assert f"answered {status} and asks to wait " in str(failed) and (asked in str(failed) or asked != "3600")


NO_JSON = "answered with something that is not JSON"


@pytest.mark.parametrize("answer, sentence, tries", [
    (reply("come back " * 1000, status="503 " + KEY), "answered 503 Service Unavailable", 3),
    *((reply("come back", status=status), f"answered {status}", 1) for status in (
        "400 Bad Request", "401 Unauthorized", "404 Not Found", "402 Payment Required")),
    (reply("come back"), NO_JSON, 4)])
def test_an_answer_that_fails_is_named_with_its_status_and_body_and_only_tried_again_if_it_may_pass(
        serve, answer, sentence, tries):
    server = serve(answer)
    failed = failure(api, session(tries=3), "GET", server.url, again=3)
    assert str(failed) == f"{server.url[7:]} {sentence}" and len(server.requests) == tries
    assert failed.body.startswith("come back") and len(failed.body) <= 2000
    assert failed.status == (200 if sentence == NO_JSON else int(sentence.split()[1]))


@pytest.mark.parametrize("answer, why", [
    (drip(HTTP + "\r\n"), "too slow"),
    (drip(HTTP + "Transfer-Encoding: chunked\r\n\r\n", b"1\r\n1\r\n"), "too slow"),
    (drip(HTTP + "Content-Length: 5000\r\n\r\n{"), "too slow"),
    (drip(HTTP + "\r\n", b"x", 2), "no answer in time"),
    (endless(HTTP + "\r\n"), "longer than 1000000 bytes"),
    (reply(gzip.compress(b"[" + b"1," * 5_000_000), Content_Encoding="gzip"), "longer than 1000000 bytes")])
def test_a_body_that_does_not_end_is_ended(serve, clock, answer, why):
    failed = failure(api, session(), "GET", serve(answer).url, seconds=0.3, limit=1_000_000, again=0)
    assert f"not JSON ({why})" in str(failed) and clock() < SOON


def test_a_redirect_of_an_api_is_an_error_and_is_not_followed(serve):
    other = serve(reply())
    server = serve(reply(status="302 Found", Location=other.url))
    failed = failure(api, session(), "GET", server.url, headers={"Authorization": KEY})
    assert str(failed).endswith("answered 302 Found") and not other.requests


def nowhere():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return "http://127.0.0.1:%d" % sock.getsockname()[1]


@pytest.mark.parametrize("answer, why", [
    (slow(2), "no answer in time"), (dropped, "the connection was dropped"), (None, "nobody listens there"),
    (b"?", "dropped")])
def test_a_service_that_cannot_be_reached_is_named_with_its_port_and_the_reason(serve, answer, why):
    url = serve(answer).url if answer else nowhere()
    failed = failure(api, session(tries=2), "GET", url, seconds=0.3)
    assert str(failed).startswith(f"{url[7:]} cannot be reached (") and why in str(failed)
    assert failed.status is None and failed.body == ""


def test_an_unknown_host_and_a_url_that_is_none_are_sentences_too(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    known = failure(api, session(), "GET", "http://api.example.com/a")
    assert str(known) == "api.example.com cannot be reached (there is no such host)"
    for url in ("localhost:8000/v1", "", "http://", "http://[::1", "http://a:b/", f"http://{'a' * 70}/"):
        assert "cannot be reached" in str(failure(api, session(), "GET", url))


@pytest.mark.parametrize("answer", [
    slow(2), dropped, None, reply("?"), reply("{}", length=99), reply(status="503 " + KEY), b"?",
    reply(status="401 No", X_Key=KEY), reply(status="302 Found", Location="http://127.0.0.1/?key=" + KEY),
    reply(status="429 Slow", Retry_After="3600"), drip(HTTP + "\r\n"), endless(HTTP + "\r\n"),
    reply(KEY, Content_Encoding=KEY), f"{KEY} {KEY}\r\n{KEY}\r\n\r\n".encode()])
def test_no_failure_shows_the_key(serve, answer):
    url = (serve(answer).url if answer else nowhere()).replace("http://", f"http://user:{KEY}@") + f"/{KEY}"
    headers = {"X-Key": KEY, "Authorization": f"Bearer {KEY}"}
    failed = failure(api, session(tries=2), "POST", url, seconds=0.2, limit=100_000, again=1,
                     params={"key": KEY}, headers=headers, json={"key": KEY})
    assert KEY not in "".join(traceback.format_exception(failed)) and "127.0.0.1:" in str(failed)


@pytest.mark.parametrize("key", [KEY + "\n", KEY + "∑", KEY + "\r\nX: y", "\n" + KEY])
def test_a_key_that_is_no_header_is_not_shown_either(serve, key):
    server = serve(reply())
    failed = failure(api, session(), "GET", server.url, headers={"X-Key": key})
    assert KEY not in "".join(traceback.format_exception(failed)) and not server.requests


def test_thirty_threads_may_share_a_session(serve):
    server, shared = serve(reply()), session()
    with ThreadPoolExecutor(30) as pool:
        assert all(data == {} for data in pool.map(lambda _: api(shared, "GET", server.url), range(60)))


# ------------------------------------------------------------ the cache
def test_the_cache_remembers_across_instances_and_keeps_keys_apart(tmp_path):
    cache = Cache(tmp_path / "web.sqlite")
    rows = ("1", "a", "bc"), ("2", "ab", "c"), ("é\0\n", "a"), ("", "empty"), ("3", "\ud800", '"')
    for value, *key in rows:
        cache.put(value, *key)
        assert Cache(tmp_path / "web.sqlite").get(*key) == cache.get(*key) == value
    cache.put("new", "a")
    assert cache.get("a") == "new" and cache.get("a", "bc") == "1" and cache.get("abc") is None


def test_threads_and_connections_may_share_a_cache(tmp_path):
    caches = [Cache(tmp_path / "web.sqlite") for _ in range(3)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: caches[n % 3].put(str(n), "key", str(n)), range(60)))
        found = pool.map(lambda n: caches[(n + 1) % 3].get("key", str(n)), range(60))
        assert list(found) == [str(n) for n in range(60)]


@pytest.mark.parametrize("make", [
    lambda path: path.write_text("this is no database, but a text that is long enough"),
    lambda path: path.mkdir(),
    lambda path: sqlite3.connect(path).execute("create table answers (other)").connection.close()])
def test_a_file_that_cannot_be_a_cache_is_told_at_once(tmp_path, make):
    make(tmp_path / "cache")
    with pytest.raises(ValueError, match="cache: this cannot be used as a cache .*Name a new file"):
        Cache(tmp_path / "cache")
    with pytest.raises(ValueError, match="cannot be used as a cache"):
        Cache(tmp_path / "no such folder" / "cache")


def test_a_cache_that_cannot_be_written_is_told_at_once():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path, user = os.path.join(folder, "cache"), os.geteuid()
        Cache(path).put("1", "a")
        os.chmod(path, 0o444)
        try:
            os.seteuid(user or 65534)  # root may write everything: nobody has a try
            with pytest.raises(ValueError, match="cannot be used as a cache .*readonly"):
                Cache(path)
        finally:
            os.seteuid(user)


def test_a_full_disk_costs_the_cache_but_not_the_rollout(tmp_path):
    cache = Cache(tmp_path / "cache")
    cache.table.execute("pragma max_page_count = 3")
    with pytest.warns(UserWarning, match="answers are not kept .*full") as warned:
        for n in range(3):
            cache.put("x" * 100_000, str(n))
    assert cache.get("0") is None and len(warned) == 1


def test_a_value_that_is_no_text_is_not_kept(tmp_path):
    cache = Cache(tmp_path / "cache")
    with pytest.warns(UserWarning):
        cache.put("half \ud800", "a")
    cache.put("whole", "b")
    assert cache.get("a") is None and cache.get("b") == "whole"


def test_a_cache_that_somebody_else_made_gives_texts_only_and_none_of_its_words_to_the_terminal(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "cache", isolation_level=None)) as table:
        table.execute("create table answers (key text primary key, value)")
        rows = ('["a"]', 5), ('["b"]', b"\xff"), ('["c"]', "c")
        table.executemany("insert into answers values (?, ?)", rows)
        table.execute("create trigger t before insert on answers begin select raise(abort, '\x1b[2J'); end")
    cache = Cache(tmp_path / "cache")
    assert [cache.get(key) for key in "abc"] == [None, None, "c"]
    with pytest.warns(UserWarning, match=r"answers are not kept \(\\x1b\[2J\)"):
        cache.put("d", "d")
