"""Services: a service may fail in every way, and the key stays with us; downloads; and the cache.

No test leaves the machine: real servers on loopback answer, in test_pages.py and test_search.py,
too."""

import contextlib
import gzip
import re
import socket
import socketserver
import sqlite3
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest

from world import services
from world.services import Cache, ServiceError, api, download, session

KEY = "s3cr3t-k3y-of-mine"
HTTP = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"


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
        with connection.makefile("rb") as file:
            request = b"".join(iter(file.readline, b"\r\n")).decode()
            length = re.search(r"(?i)content-length: (\d+)", request)
            body = file.read(int(length[1])).decode() if length else ""
            self.requests.append(f"{request}\r\n{body}")
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


def drip(start, block=b"x", gap=0.02):
    """An answer that begins with `start` and then gives a block now and then, without end."""

    def write(send):
        send(start)
        while True:
            time.sleep(gap)
            send(block)

    return write


def dropped(send):
    pass


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(services, "PAUSE", 0.001)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def failure(call, *arguments, **more):
    with pytest.raises(ServiceError) as caught:
        call(*arguments, **more)
    return caught.value


# --------------------------------------------------------------------------------------- requests
def test_a_request_has_our_name_its_parameters_and_its_headers_and_an_answer_is_its_json(serve):
    server = serve(reply(gzip.compress('{"a": "é"}'.encode()), Content_Encoding="gzip"))
    url = server.url + "/v1"
    answer = api(session(), "POST", url, params={"q": "a b"}, json={"n": 1}, headers={"X-Key": KEY})
    assert answer == {"a": "é"}
    (request,) = server.requests
    parts = ["POST /v1?q=a+b HTTP/1.1", f"X-Key: {KEY}", "User-Agent: nano-agentflow", '{"n": 1}']
    assert all(part in request for part in parts)


def test_a_netrc_does_not_overwrite_our_authorization(serve, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login someone password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server = serve(reply())
    api(session(), "GET", server.url, headers={"Authorization": f"Bearer {KEY}"})
    assert f"Authorization: Bearer {KEY}" in server.requests[0]


@pytest.mark.parametrize(
    "first",
    [
        reply(status="503 Busy"),
        reply(status="429 Slow", Retry_After="1"),
        dropped,
        reply("<html>"),
        reply("{}", length=99),
        reply('{"bad": 1}'),
        reply("[" * 100_000),
    ],
)
def test_what_may_pass_is_tried_again(serve, first):
    server = serve(first, reply('{"good": 1}'))
    answer = api(session(), "POST", server.url, read=lambda data: data["good"])
    assert answer == 1 and len(server.requests) == 2


@pytest.fixture
def slept(monkeypatch):
    """The pauses, of which none is waited for."""
    pauses = []
    monkeypatch.setattr(services, "PAUSE", 0.5)
    monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


BAD = ["0.001", "1e3", "30, 40", "", "-1", "soon", "1 Jan 99999 00:00:00 GMT", "9" * 5000, "0"]


@pytest.mark.parametrize("tries", [3, 6])  # of a search, of a model
@pytest.mark.parametrize(
    "status, headers",
    [("429 Slow", {}), ("503 Busy", {}), ("429 Slow", {"Retry_After": "2"})]
    + [("429 Slow", {"Retry_After": "9999"}), *(("503 No", {"Retry_After": bad}) for bad in BAD)],
)
def test_a_limit_of_requests_per_minute_is_outlasted(serve, slept, tries, status, headers):
    limited, good = reply(status=status, **headers), reply('{"good": 1}')
    server = serve(lambda send: send(limited if sum(slept) < 60 else good))
    assert api(session(tries=tries), "POST", server.url) == {"good": 1}
    assert max(slept) < 75 and len(server.requests) <= tries


def test_a_short_refusal_costs_a_short_pause(serve, slept):
    server = serve(*[reply(status="429 Slow")] * 2, reply())
    api(session(tries=6), "GET", server.url)
    assert len(server.requests) == 3 and sum(slept) < 3


@pytest.mark.parametrize("answer", [None, dropped, reply(status="500 No"), reply(status="502 No")])
def test_a_service_that_is_down_is_given_up_after_seconds(serve, slept, answer):
    url = serve(answer).url if answer else nowhere()
    failure(api, session(tries=6), "GET", url)
    assert 15 <= sum(slept) < 20


@pytest.mark.parametrize(
    "answer, sentence, tries",
    [
        (reply("come back", status=f"503 {KEY}"), "answered 503 Service Unavailable", 3),
        (reply("come back", status="401 No"), "answered 401 Unauthorized", 1),
        (reply("come back"), "answered with something that is not JSON", 3),
    ],
)
def test_an_answer_that_fails_for_good_is_named_with_its_status_and_body(
    serve, answer, sentence, tries
):
    server = serve(answer)
    failed = failure(api, session(tries=3), "GET", server.url, again=2)
    assert str(failed).startswith(f"{server.url[7:]} {sentence}") and failed.body == "come back"
    assert len(server.requests) == tries


@pytest.mark.parametrize(
    "answer",
    [
        drip(HTTP + b"\r\n"),
        drip(HTTP + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n1\r\n"),
        drip(HTTP + b"\r\n", b"1" * 100_000, gap=0),
        reply(gzip.compress(b"[" + b"1," * 5_000_000), Content_Encoding="gzip"),
    ],
    ids=["slow", "slow chunks", "endless", "packed"],
)
def test_a_body_that_does_not_end_is_ended(serve, answer):
    url = serve(answer).url
    failed = failure(api, session(), "GET", url, seconds=0.3, limit=1_000_000, again=0)
    assert "not JSON" in str(failed)


def test_a_redirect_of_an_api_is_an_error_and_is_not_followed(serve):
    other = serve(reply())
    server = serve(reply(status="302 Found", Location=other.url))
    failed = failure(api, session(), "GET", server.url, headers={"Authorization": KEY})
    assert str(failed).endswith("answered 302 Found") and not other.requests


def nowhere():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_a_service_that_cannot_be_reached_is_named_with_its_port_and_the_reason(monkeypatch):
    url = nowhere()
    failed = failure(api, session(tries=2), "GET", url)
    assert str(failed) == f"{url[7:]} cannot be reached (nobody listens there)"

    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    failed = failure(api, session(), "GET", "http://api.example.com/a")
    assert str(failed) == "api.example.com cannot be reached (there is no such host)"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        dropped,
        reply("?"),
        reply(f"the key {KEY[:-3]} is wrong", status=f"401 {KEY}", X_Key=KEY),
        reply(status="302 Found", Location=f"http://127.0.0.1/?key={KEY}"),
        f"{KEY} {KEY}\r\n{KEY}\r\n\r\n".encode(),
    ],
)
def test_no_failure_shows_the_key(serve, answer, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", KEY)
    server = serve(answer) if answer else None
    url = (server.url if server else nowhere()).replace(
        "http://", f"http://user:{KEY}@"
    ) + f"/{KEY}"
    headers = {"X-Key": KEY, "Authorization": f"Bearer {KEY}"}
    settings = {"params": {"key": KEY}, "headers": headers, "json": {"key": KEY}}
    failed = failure(api, session(tries=2), "POST", url, seconds=0.2, again=1, **settings)
    shown = "".join(traceback.format_exception(failed)) + failed.body
    assert KEY[:8] not in shown and "127.0.0.1:" in str(failed)


@pytest.mark.parametrize("key", [KEY + "\n", KEY + "∑", KEY + "\r\nX: y"])
def test_a_key_that_is_no_header_is_not_shown_either(serve, key):
    server = serve(reply())
    failed = failure(api, session(), "GET", server.url, headers={"X-Key": key})
    assert KEY not in "".join(traceback.format_exception(failed)) and not server.requests


def test_a_short_key_is_hidden_in_errors_only_for_any_answer_may_hold_that_word(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    assert services.without_keys("key EMPTY") == "key ***"
    assert services.without_whole_keys("an EMPTY set") == "an EMPTY set"
    monkeypatch.setenv("OPENAI_API_KEY", KEY + '/"')
    assert services.without_whole_keys(f'{{"a": "{KEY}/\\""}}') == '{"a": "***"}'


def test_thirty_threads_may_share_a_session(serve):
    server, shared = serve(reply()), session()
    with ThreadPoolExecutor(30) as pool:
        found = pool.map(lambda _: api(shared, "GET", server.url), range(60))
        assert all(data == {} for data in found)


# -------------------------------------------------------------------------------------- downloads
def test_a_download_is_the_whole_file(serve):
    assert download(serve(reply(b"x" * 100_000)).url) == b"x" * 100_000


@pytest.mark.parametrize(
    "answer, why",
    [
        (reply("x", length=99), "cannot be read (the connection was dropped)"),
        (reply("x", status="404 No"), "answered 404 Not Found"),
        (reply("x" * 2000), "sends more than 1000 bytes"),
        (drip(HTTP + b"\r\n"), "cannot be read (no answer in time)"),
    ],
)
def test_a_download_that_is_not_whole_fails(serve, answer, why):
    assert str(failure(download, serve(answer).url, limit=1000, seconds=0.3)).endswith(why)


# ------------------------------------------------------------------------------------------ cache
def test_the_cache_remembers_across_instances_and_keeps_keys_apart(tmp_path):
    cache = Cache(tmp_path / "web.sqlite")
    entries = [("1", "a", "bc"), ("2", "ab", "c"), ("é\0\n", "a"), ("", "empty"), ("3", '"')]
    for value, *key in entries:
        cache.put(value, *key)
        assert Cache(tmp_path / "web.sqlite").get(*key) == cache.get(*key) == value
    cache.put("half \ud800", "a")
    assert cache.get("a") == "half ?" and cache.get("a", "bc") == "1" and cache.get("abc") is None


def test_threads_and_connections_may_share_a_cache(tmp_path):
    caches = [Cache(tmp_path / "web.sqlite") for _ in range(3)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: caches[n % 3].put(str(n), "key", str(n)), range(60)))
        found = pool.map(lambda n: caches[(n + 1) % 3].get("key", str(n)), range(60))
        assert list(found) == [str(n) for n in range(60)]


def locked(cache):
    cache.table.execute("pragma busy_timeout = 50")
    other = sqlite3.connect(cache.path, isolation_level=None)
    other.execute("begin exclusive")
    return other


def full(cache):
    pages = cache.table.execute("pragma page_count").fetchone()[0]
    cache.table.execute(f"pragma max_page_count = {pages}")


FAULTS = {  # what happens to a cache: (how, may it still be read?)
    "locked": (locked, False),
    "full": (full, True),
    "read only": (lambda cache: cache.table.execute("pragma query_only = 1"), True),
    "overwritten": (lambda cache: cache.path.write_bytes(b"no database" * 999), False),
    "without its table": (lambda cache: cache.table.execute("drop table answers"), False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_cache_that_fails_costs_no_answer_and_says_so_once(tmp_path, capsys, fault):
    cache = Cache(tmp_path / "web.sqlite")
    cache.put("found", "old")
    break_it, readable = FAULTS[fault]
    other = break_it(cache)  # a lock is held as long as this connection lives
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: cache.put("x" * 9999, str(n)), range(20)))
        assert set(pool.map(lambda n: cache.get("new"), range(20))) == {None}
    assert cache.get("old") == ("found" if readable else None)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": it is ")[1] for line in lines] == [
        f"not {how} from now on." for how in ("written", "read")[: 2 - readable]
    ]
    assert all(line.startswith(f"{cache.path} fails as a cache (") for line in lines)
    del other


def test_a_file_that_cannot_be_a_cache_is_told_at_once(tmp_path):
    (tmp_path / "text").write_text("this is no database, but a text that is long enough")
    for path in (tmp_path / "text", tmp_path / "no such folder" / "cache"):
        with pytest.raises(ValueError, match="cannot be used as a cache .*name a new file"):
            Cache(path)
