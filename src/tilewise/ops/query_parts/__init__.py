"""By which dimensions scores of tokens are predicted, and what of queries: `table.PART_QUERIES`, for
`tilewise.SparQ`.
"""
