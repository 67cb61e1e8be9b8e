"""Files: check that one can be read to its end, and replace one in a single step."""

import os


def check_file(path, advice=""):
    """ValueError for a pipe or a device, which would be read for ever. A file that is not there passes."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is not a regular file" + (f": {advice}" if advice else ""))


def replace_file(path, content):
    """Write a file in one step: after a kill or on a full disk, the old or the new content is complete.

    content: text, bytes, or an iterable of texts, which are written one by one.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.writing")  # two processes may write the same file
    try:
        beside.unlink(missing_ok=True)  # a kill may have left one
        with beside.open("xb") as file:  # not through a link
            for piece in [content] if isinstance(content, (str, bytes)) else content:
                file.write(piece if isinstance(piece, bytes) else piece.encode("utf-8"))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
