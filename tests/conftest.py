"""What all tests share: no network, and a model server on loopback."""

import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a bare `pytest`
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; .ci/run tries two as well
os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers reads it: no test leaves the machine

from world import services


def pytest_configure(config):
    lines = "markers", "extras(package): needs an optional package; .ci/run installs it"
    config.addinivalue_line(*lines)
    lines = "markers", "exhaustive: long, or the rest of a table; .ci/run runs it"
    config.addinivalue_line(*lines)
    config.addinivalue_line("filterwarnings", "error::RuntimeWarning")  # Python's, of our mistakes


def pytest_collection_modifyitems(config, items):
    """Without -m the same tests run everywhere, whatever is installed."""
    if not config.option.markexpr:
        marks = "extras", "exhaustive"
        later = [item for item in items if any(map(item.get_closest_marker, marks))]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]


def pytest_runtest_setup(item):
    for mark in item.iter_markers("extras"):
        pytest.importorskip(*mark.args)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("SERPER_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


class Handler(BaseHTTPRequestHandler):
    """Sends the (status, data) of server.get(path), or of server.reply(body, turn); server.asked
    lists what was asked."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet for head and body: of two, the second waits for 40 ms

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send(*self.server.get(self.path))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, dict(self.headers), body))
            turn = len(self.server.asked)
        self.send(*self.server.reply(body, turn))

    def send(self, status, data):
        self.close_connection = status == 0
        if status:  # 0: the connection is dropped
            text = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)


def answer(text, finish_reason="stop", **usage):
    """(status, data): a good answer of OpenAI's chat API."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return 200, {"choices": [choice], "usage": {"total_tokens": 10, **usage}}


def spy(monkeypatch, module, name):
    """The calls of a function from here on, as (arguments, settings, result)."""
    calls, function = [], getattr(module, name)

    def called(*given, **settings):
        calls.append((given, settings, function(*given, **settings)))
        return calls[-1][2]

    monkeypatch.setattr(module, name, called)
    return calls


def without_seconds(path):
    """The lines of a file of rollouts, without their seconds."""
    return re.sub(r'"seconds": [0-9.e-]+', "", Path(path).read_text()).splitlines()


@pytest.fixture
def server(monkeypatch):
    """A good server; a test may give it another reply."""
    monkeypatch.setattr(services, "PAUSE", 0.001)
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    running.lock, running.asked, running.models = threading.Lock(), [], ["a-model"]
    running.get = lambda path: (200, {"data": [{"id": name} for name in running.models]})
    running.reply = lambda body, turn: answer(f"echo {body['messages'][0]['content']}")
    running.url = f"http://127.0.0.1:{running.server_port}/v1"
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()
