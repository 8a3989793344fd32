"""Scores of pairs of tiles, and how alike a tile's rows are, out of sums of rows that were made beside their codes:
`table.TILE_SCORES`, which `attention(select=)` calls.
"""
