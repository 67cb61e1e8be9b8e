"""benchmarks.files"""

import os
import time
from pathlib import Path

import requests

from world import services

CAP = 50_000_000                # bytes of a download
PATIENCE = 300                  # seconds for a download; a silent server is given up after 30


def _cache(cache):
    return Path(cache or os.environ.get("NANO_AGENTFLOW_CACHE") or Path.home() / ".cache" / "nano-agentflow")


def _download(url, path, read):
    """The file at a URL, under its name only when it is whole and could be read."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _stream(url, part)
        read(part)
        part.replace(path)
    except (requests.RequestException, ValueError) as error:
        cause = services.reason(error) if isinstance(error, requests.RequestException) else str(error).rstrip(".")
        raise ValueError(f"{url} cannot be used ({cause}); download it by hand to {path}, or give --benchmark-dir FOLDER.") from None
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        if part.exists():
            part.unlink()


def _stream(url, part):
    # Bounded in bytes and seconds; an answer shorter than its Content-Length is an error of requests.
    start, size = time.monotonic(), 0
    with services.session() as session, session.get(url, stream=True, timeout=30) as answer:
        if answer.status_code != 200:
            raise ValueError(services.status_line(answer.status_code))
        with part.open("wb") as file:
            for block in answer.iter_content(65536):
                file.write(block)
                size += len(block)
                if size > CAP or time.monotonic() - start > PATIENCE:
                    raise ValueError(f"more than {CAP} bytes or {PATIENCE} seconds")


def _write(path, text):
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path, error):
    return ValueError(f"{path} cannot be written ({error.strerror}); set NANO_AGENTFLOW_CACHE to another folder.")
