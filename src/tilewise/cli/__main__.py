"""`python -m tilewise.cli` is the `tilewise` command."""

from tilewise.cli import main

main()
