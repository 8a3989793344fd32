"""The command line: `tilewise demo`, `why`, `explain`, `bench`, `roofline` and three commands that tune attention.

Exit codes: 0 done, 1 the check failed, 2 wrong usage or a missing extra.
"""

from __future__ import annotations

import sys

HINT = "tilewise: the command line needs typer and rich: pip install 'tilewise[cli]'"


def main() -> None:
    """Entry point of the `tilewise` command."""
    try:
        from tilewise.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        print(HINT, file=sys.stderr)
        raise SystemExit(2) from None
    app()
