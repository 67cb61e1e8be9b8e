"""logbook/endings.py, stopping.py: Ctrl-C, `| head`, a full disk, missing packages, a closed terminal."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ["solve.py", "train.py", "toy/make.py", *(f"experiments/{name}.py" for name in
           "flows monolith sft smollm study warm".split())]
READY = "from logbook import endings\nendings.without_traceback('__main__')\n"


def ended(*words, code=None, **settings):
    """A Python process that has ended. code: what it runs, in the place of a script."""
    command = [sys.executable, *words, *(["-c", READY + code] if code else [])]
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, **settings)


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_its_packages_a_script_says_how_to_get_them(script):
    process = ended("-S", script)  # -S: no site-packages, as in a shell without the environment
    assert process.returncode == 1 and process.stderr.count("\n") == 1
    assert process.stderr.startswith(f"{Path(script).name}: the package ")
    assert ". .venv/bin/activate" in process.stderr and "pip install -r requirements.txt" in process.stderr


def test_a_module_that_is_missing_for_another_reason_keeps_its_traceback():
    assert "Traceback" in ended(code="import torch_of_mine").stderr


@pytest.mark.parametrize("code", ["print('x' * 10**6)", "print('x')", "print('x', flush=True)"])
def test_a_reader_that_has_gone_ends_a_script_quietly_as_sigpipe_would(code):
    reader, writer = os.pipe()
    os.close(reader)  # | head has ended
    process = ended(code=code, stdout=writer)
    os.close(writer)
    assert (process.returncode, process.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("code", ["print('x')", "print('x', flush=True)"])
def test_output_onto_a_full_disk_is_one_sentence(code):
    with open("/dev/full", "w") as full:
        process = ended(code=code, stdout=full)
    assert (process.returncode, process.stderr) == (1, "-c: cannot write: No space left on device\n")


def test_without_stdout_or_stderr_a_script_prints_nowhere_and_runs():
    code = "import sys; print('x'); sys.stdout.flush(); sys.stderr.reconfigure(errors='replace'); sys.exit(7)"
    for stream in 1, 2:  # `>&-` and `2>&-`
        script = 'exec "$0" -c "$1" %d>&-' % stream
        process = subprocess.run(["sh", "-c", script, sys.executable, READY + code], cwd=ROOT, text=True,
                                 capture_output=True, timeout=60)
        assert (process.returncode, process.stderr) == (7, "")


@pytest.mark.parametrize("code", [
    "import signal, time; signal.raise_signal(signal.SIGINT); time.sleep(9)",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); signal.raise_signal(2)"])
def test_ctrl_c_ends_a_script_quietly_as_the_shell_expects(code):
    process = ended(code=code)
    assert (process.returncode, process.stderr) == (-signal.SIGINT, "")


STOPPING = ("import signal\nfrom logbook.stopping import Stopping\n"
            "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n")  # pytest itself may run under nohup


@pytest.mark.exhaustive
def test_a_closed_terminal_asks_a_training_to_stop_unless_nohup_ignores_it():
    code = STOPPING + ("stopping = Stopping(); signal.raise_signal(signal.SIGHUP); "
                       "signal.raise_signal(signal.SIGHUP); print(stopping.requested())")
    assert ended(code=code, stdout=subprocess.PIPE).stdout.endswith("from there. Ctrl-C again leaves at once."
                                                                    "\nTrue\n")
    ignored = code.replace("SIG_DFL", "SIG_IGN")  # as nohup does
    assert ended(code=ignored, stdout=subprocess.PIPE).stdout == "False\n"


@pytest.mark.exhaustive
def test_a_second_ctrl_c_leaves_at_once_and_quietly():
    code = STOPPING + "Stopping(); signal.raise_signal(2); signal.raise_signal(2); print('still here')"
    process = ended(code=code, stdout=subprocess.PIPE)
    assert (process.returncode, process.stderr) == (-signal.SIGINT, "") and "still" not in process.stdout
