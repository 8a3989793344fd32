"""What every test tier shares: named cases, oracles, error budgets, strategies, and properties of an implementation.

`cases` names problems, `oracles` solves them densely in float64 with plain functions, `budgets` says how far an
implementation may be from that, `properties` checks one implementation on one device, `strategies` (needs hypothesis)
draws shapes and formulas.

It is part of the installed package, because the book's programs use it (`kinds`, `scenes`, `weight_codes`) and because
masks, scores and implementations of your own can be tested with it. No other package of tilewise imports it. Its names
may change in any release.
"""
