"""The command line called from tests, in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from tilewise.cli.app import build

RUNNER = CliRunner()


def call(*arguments: str, code: int = 0) -> str:
    """Standard output of the command; its exit code must be `code`."""
    result = RUNNER.invoke(build(rich=False), list(arguments))
    assert result.exit_code == code, (arguments, result.output, result.exception)
    return result.stdout


def data(*arguments: str, code: int = 0) -> Any:
    return json.loads(call(*arguments, "--json", code=code))


def refusal(*arguments: str) -> str:
    """Standard error of a command that ends with exit code 2 and prints nothing else."""
    result = RUNNER.invoke(build(rich=False), list(arguments))
    assert result.exit_code == 2, result.output
    assert not result.stdout
    assert "Traceback" not in result.stderr
    return result.stderr
