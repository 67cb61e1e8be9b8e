"""Downloads and the cache. A file enters the cache only if it is complete and could be read."""

import os
from pathlib import Path

import requests

from world import services
from world.files import replace_file

CAP = 50_000_000  # bytes of a download
PATIENCE = 300  # seconds for a download; 30 for a server that sends nothing


def cache_folder(folder=None):
    return Path(folder or os.environ.get("NANO_AGENTFLOW_CACHE") or Path.home() / ".cache" / "nano-agentflow")


def download(url, path, read):
    """Save the file at a URL as `path`, if it is whole and read(bytes) does not raise; else ValueError."""
    try:
        with services.session() as session, session.get(url, stream=True, timeout=30) as response:
            if response.status_code != 200:
                raise ValueError(services.status_line(response.status_code))
            data, problem = services.body_of(response, CAP, PATIENCE)
        if problem:
            raise ValueError(problem.strip(" ()"))
        read(data)
    except (requests.RequestException, ValueError) as why:
        cause = services.reason(why) if isinstance(why, requests.RequestException) else str(why).rstrip(".")
        raise ValueError(f"{url} cannot be used ({cause}); download it by hand to {path}, "
                         "or give --benchmark-dir FOLDER.") from None
    save(path, data)


def save(path, content):
    """Write a file of the cache; ValueError if the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as why:
        raise ValueError(f"{path} cannot be written ({why.strerror}); "
                         "set NANO_AGENTFLOW_CACHE to another folder.") from None
