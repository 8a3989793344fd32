"""A worker's process: `python -m tools.fuzz.worker PLAN WORKER FIRST`, which `tools.fuzz.workers` starts."""

from __future__ import annotations

import json
import sys

from tools.fuzz.workers import Plan, work

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    plan = Plan(**given | {"only": tuple(given["only"]), "firsts": tuple(given["firsts"])})
    work(plan, int(sys.argv[2]), int(sys.argv[3]))
