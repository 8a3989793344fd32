"""`python -m tilewise.explain.guesses`: all methods on one text, in reading order."""

from tilewise.explain.guesses import ORDER, as_text, play

print(as_text([play(name) for name in ORDER]))
