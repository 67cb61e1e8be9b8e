"""What all tests share: no network, and a model server on loopback."""
import json
import os
import sys
import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a bare `pytest`
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; .ci/run tries two as well
os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers reads it: no test leaves the machine

from bench import faults
from logbook.log import COLUMNS
from world import services

# the metrics of an update in which nothing had a gradient
NO_UPDATE = dict.fromkeys([*COLUMNS, "steps", "token_budget"], 0.0) | {"ratio_min": 1.0, "ratio_max": 1.0}


def pytest_configure(config):
    config.addinivalue_line("markers", "extras(package): needs an optional package; .ci/run installs it")
    config.addinivalue_line("markers", "exhaustive: long, or the rest of a table; .ci/run runs it")
    config.addinivalue_line("filterwarnings", "error::RuntimeWarning")  # what Python says of our own mistakes


def pytest_collection_modifyitems(config, items):
    """Without -m the same tests run everywhere, whatever is installed."""
    if not config.option.markexpr:
        later = [item for item in items if any(map(item.get_closest_marker, ("extras", "exhaustive")))]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]


def pytest_runtest_setup(item):
    for mark in item.iter_markers("extras"):
        pytest.importorskip(*mark.args)


class Handler(faults.Handler):
    """Answers as self.server.reply(handler, body) says; remembers what it was asked."""

    def do_GET(self):
        self.server.list(self)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, dict(self.headers), body))
            turn = len(self.server.asked)
        try:
            self.server.reply(self, body, turn)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


@contextmanager
def serving(handler):
    """A server on loopback that answers as this class of handlers does."""
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture
def server(monkeypatch):
    """A good server; a test may give it another reply."""
    monkeypatch.setattr(services, "PAUSE", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    echo = lambda body: faults.answer(f"echo {body['messages'][0]['content']}")
    models = lambda: {"data": [{"id": name, "owned_by": running.owner} for name in running.models]}
    with serving(Handler) as running:
        running.lock, running.asked, running.models, running.owner = threading.Lock(), [], ["a-model"], None
        running.list = lambda handler: handler.send(json.dumps(models()).encode())
        running.reply = lambda handler, body, turn: handler.send(echo(body))
        running.url = f"http://127.0.0.1:{running.server_port}/v1"
        yield running
