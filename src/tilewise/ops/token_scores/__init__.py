"""What scores tokens of a KV cache are likely to have, by a few dimensions of their keys: `table.SCORE_TOKENS`, for
`tilewise.SparQ`.
"""
