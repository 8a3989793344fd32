"""`python -m tilewise.explain.ladder`: every rung at one small size, in reading order."""

from tilewise.explain.ladder import ORDER, show

for name in ORDER:
    show(name)
