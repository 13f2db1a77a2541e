"""The real entry point, in processes of its own: streams, signals, the environment, start-up."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_helpers import command_line, process

pytest_plugins = ["cli_fixtures"]


def on_terminal(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run with stdout and stderr on a terminal; the exit code and all that was written."""
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        command_line(*arguments),
        cwd=cwd,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    written = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        written += piece
    os.close(leader)
    return child.wait(timeout=60), written.decode()


def test_version_and_help_come_without_the_library(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom mpfs_cli.main import run\nassert run([sys.argv[1]]) == 0\n"
        "assert not {'mpfs.repository', 'numpy', 'torch', 'numba', 'lmdb', 'pydantic'} & set(sys.modules)"
    )
    for option, expected in (("--version", "mpfs "), ("--help", "Upkeep")):
        done = subprocess.run([sys.executable, "-c", code, option], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
        assert done.stderr == ""


def test_reading_history_loads_no_arrays_and_no_merging(workplace: Path) -> None:
    code = (
        "import sys\nfrom mpfs_cli.main import run\n"
        "for verb in (['log', '--graph'], ['show', 'a'], ['ls', 'a', '--tensors'], ['branch'],\n"
        "             ['tag', 't', 'a'], ['rm', 't'], ['reflog'], ['-r', '.', 'branch', '--json']):\n"
        "    assert run(verb) == 0\n"
        "    heavy = {'torch', 'numba', 'numpy', 'pydantic', 'yaml', 'fsspec', 'rich', 'mpfs.merge.engine'}\n"
        "    assert not heavy & set(sys.modules), (verb, heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=workplace, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_verb_loads_no_other_verb(workplace: Path) -> None:
    code = "import sys\nfrom mpfs_cli.main import run\nassert run(['branch']) == 0\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=workplace, capture_output=True, text=True)
    assert "mpfs_cli.branch" in done.stdout
    assert not {f"mpfs_cli.{verb}" for verb in ("log", "merge", "import_", "mount", "sweep")} & set(done.stdout.split())


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_numpy_starts_no_threads_unless_told_to(workplace: Path) -> None:
    code = (
        "import atexit, os, sys\nfrom mpfs_cli.main import main\n"
        "atexit.register(lambda: print('numpy' in sys.modules, len(os.listdir('/proc/self/task'))))\n"
        "atexit.register(lambda: print(os.environ['OPENBLAS_NUM_THREADS']))\nmain()"
    )
    free = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", code, "diff", "base", "a"]
    done = subprocess.run(command, cwd=workplace, env=free, capture_output=True, text=True)
    assert done.stdout.splitlines()[-2:] == ["1", "True 1"]
    told = {**free, "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=workplace, env=told, capture_output=True, text=True)
    assert done.stdout.splitlines()[-2] == "2"


def test_data_goes_to_stdout_and_talk_to_stderr(workplace: Path) -> None:
    done = process("ls", "a", cwd=workplace)
    assert done.returncode == 0
    assert "model.safetensors" in done.stdout
    assert done.stderr.startswith("mpfs: 3 files")
    quiet = process("-q", "ls", "a", cwd=workplace)
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")
    failed = process("ls", "nothing", cwd=workplace)
    assert (failed.returncode, failed.stdout) == (13, "")
    assert failed.stderr.startswith("mpfs: ")
    assert failed.stderr.count("\n") == 1


def test_a_merge_end_to_end(workplace: Path) -> None:
    done = process("merge", "recipe.yml", "--into", "merged", "--checkout", "out", "--json", cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["ref"] == "merged"
    assert (workplace / "out" / "model.safetensors").is_file()


def test_the_repository_is_found_from_below_and_by_name(workplace: Path, tmp_path: Path) -> None:
    below = workplace / "a" / "sub"
    assert process("-q", "branch", cwd=below).returncode == 0
    outside = tmp_path / "outside"
    outside.mkdir()
    lost = process("branch", cwd=outside)
    assert lost.returncode == 10
    assert "mpfs init" in lost.stderr
    for arguments, env in (
        (["-r", str(workplace)], {}),
        (["-r", str(workplace / ".mpfs")], {}),
        ([], {"MPFS_REPO": str(workplace / ".mpfs")}),
        (["-r", str(workplace)], {"MPFS_REPO": "/nowhere"}),
    ):
        assert "base" in process(*arguments, "branch", cwd=outside, env=env).stdout


def test_a_reader_that_goes_away_is_no_error(workplace: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = process("cat", "a:model.safetensors", cwd=workplace, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_told(workplace: Path) -> None:
    with open("/dev/full", "w") as full:
        done = process("log", cwd=workplace, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == "mpfs: No space left on device\n"


def test_an_interrupt_is_one_line(workplace: Path) -> None:
    os.mkfifo(workplace / "pipe.yml")  # a recipe that is never written to its end
    child = subprocess.Popen(
        command_line("plan", "pipe.yml"),
        cwd=workplace,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever started the tests in the background (nohup, &) has had SIGINT ignored, which is handed down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    writer = open_when_read(workplace / "pipe.yml")
    child.send_signal(signal.SIGINT)
    # If the signal came in the instant before the read, the read does not know of it: let it end.
    time.sleep(0.2)
    os.close(writer)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out, err) == (130, "", "mpfs: interrupted\n")


def open_when_read(fifo: Path) -> int:
    """Open a FIFO for writing, as soon as somebody has opened it for reading."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < deadline, "nobody reads"
            time.sleep(0.02)


def test_a_terminal_gets_colours_and_a_pipe_does_not(workplace: Path) -> None:
    assert "\x1b" not in process("log", "--graph", cwd=workplace).stdout
    _, coloured = on_terminal("log", cwd=workplace)
    assert "\x1b[33m" in coloured
    _, plain = on_terminal("log", cwd=workplace, env={"NO_COLOR": "1"})
    assert "\x1b[33m" not in plain
    assert "\x1b[32m" not in plain
    _, dumb = on_terminal("log", cwd=workplace, env={"TERM": "dumb"})
    assert "\x1b" not in dumb


def test_progress_is_for_terminals_that_want_it(workplace: Path) -> None:
    bar = "import again"
    assert bar in on_terminal("import", "a", "--as", "again", cwd=workplace)[1]
    assert bar not in on_terminal("-q", "import", "a", "--as", "again", cwd=workplace)[1]
    piped = process("import", "a", "--as", "again", cwd=workplace)
    assert piped.stderr == ""


def test_a_narrow_terminal_cuts_no_tensor_name(workplace: Path) -> None:
    process("merge", "recipe.yml", "--into", "merged", cwd=workplace)
    _, shown = on_terminal("explain", "merged", cwd=workplace, env={"COLUMNS": "40", "NO_COLOR": "1"})
    assert "\nlayer.0.weight\r" in shown.replace("\x1b[0m", "").replace("\x1b[1m", "")


def test_stdout_that_knows_only_ascii(workplace: Path) -> None:
    done = process("log", "--graph", cwd=workplace, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "* " in done.stdout
