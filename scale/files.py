"""Replace a file in one step: after a kill or on a full disk it is the old one or the new one, whole."""

import os


def replace_file(path, content):
    """content: text or bytes. It is written into a file beside `path`, which then takes its name."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.writing")  # two processes may write the same file
    try:
        beside.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
