"""Names of models and of dtypes that cannot work, refused without importing torch, which takes seconds."""

import os
import re
from pathlib import Path

DTYPES = ("float32", "bfloat16", "float16", "float64")


def check_model(name):
    """ValueError if this is neither a model's folder nor a name that a model on the hub could have."""
    name = os.path.expanduser(name)
    if os.path.isdir(name):
        if not os.path.exists(os.path.join(name, "config.json")):
            raise ValueError(f"The folder {name!r} holds no model: there is no config.json in it."
                             f"{did_you_mean(name)}")
    elif os.path.exists(name) or name.startswith((os.sep, ".")) or name.count("/") > 1:
        raise ValueError(f"There is no folder {name!r}: give the folder of a saved model, or a model's name "
                         f"on the hub.{did_you_mean(os.path.dirname(name))}")
    elif re.fullmatch(r"[\w.-]+(:\d+.*|/v\d(#.*)?)", name):  # localhost:8000/v1, api.example.com/v1
        raise ValueError(f"{name!r} is no folder and no model's name: for a server, write http://{name}")


def did_you_mean(folder):
    """' Did you mean runs/toy-seed0/best?', for the folder of a training run; else ''."""
    steps = [path for path in Path(folder).glob("step-*") if path.name[5:].isdigit()]
    for path in [Path(folder, "best"), *sorted(steps, key=lambda path: -int(path.name[5:]))]:
        if (path / "config.json").exists():
            return f" Did you mean {path}?"
    return ""


def check_dtype(dtype):
    """The dtype's name, without "torch."; ValueError if it is no floating-point dtype. None: to be chosen."""
    name = dtype and str(dtype).removeprefix("torch.")
    if name not in (None, *DTYPES):
        raise ValueError(f"There is no dtype {name!r} here: use one of {', '.join(DTYPES)}.")
    return name
