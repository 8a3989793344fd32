"""Programs in processes of their own, in which nothing of theirs has been imported, traced or compiled before.

PyTorch and its compiler take seconds to import. One process, this file as a program, imports them once and forks a
child for each program; it calls nothing of them, so what a child calls is the first call of its process.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

LIMIT_S = 1800  # as pytest has it: the longest takes a hundredth


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one, as its input does."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # tensors are small, and other tests run beside
    command = [sys.executable, __file__]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(server.communicate)
    return server


def run(
    program: str,
    *arguments: str,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    first: str = "",
) -> subprocess.CompletedProcess[str]:
    """What `python -c program arguments` does in that folder, with `first` as the first place of its imports."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as at:
        files = [str(Path(at) / name) for name in ("stdout", "stderr")]
        job = {
            "program": program,
            "arguments": arguments,
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
            "first": first,
            "files": files,
        }
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        said = [Path(file).read_text(encoding="utf-8") for file in files]
    return subprocess.CompletedProcess([program, *arguments], code, *said)


def check(program: str) -> None:
    """Run a program that must end well."""
    done = run(program)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def _child() -> tuple[str, Sequence[str]]:
    """In the process that forks this returns never, in a child the program and its arguments."""
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            break
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
    else:
        sys.exit()
    signal.alarm(LIMIT_S)
    for at, path in enumerate([os.devnull, *job["files"]]):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, at)
        os.close(opened)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path[0] = job["first"]
    return job["program"], job["arguments"]


if __name__ == "__main__":
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch._inductor.cpu_vec_isa

    torch._inductor.cpu_vec_isa.pick_vec_isa()  # compiles and starts processes to know the machine
    _program, _arguments = _child()
    _this, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    sys.argv = ["-c", *_arguments]
    exec(_program, sys.modules["__main__"].__dict__)
