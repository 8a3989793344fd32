"""Random calls of everything public, judged by a dense implementation of their own: `python -m tools.fuzz`.

A case follows from its name, SEED:WORKER:CASE, alone. `draw` makes the choices, `kinds` knows who builds which case,
`judge` compares, `workers` runs many at once, and `twins` breaks the library on purpose to see that it is noticed.
"""
