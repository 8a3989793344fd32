"""`python -m benchmarks.engines SPEC`: the process of one contender, started by `measured.results`."""

import sys

from benchmarks.engines.measured import main

main(sys.argv[1:])
