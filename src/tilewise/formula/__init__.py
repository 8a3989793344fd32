"""Masks and scores as formulas: traced once, then evaluated, differentiated, bounded and emitted."""

from tilewise.formula.expr import binary, unary, where
from tilewise.formula.formula import Formula, Mask, Score, as_mask, as_score, mask, score

__all__ = ["Formula", "Mask", "Score", "as_mask", "as_score", "binary", "mask", "score", "unary", "where"]
