"""What stands for the tokens of a KV cache that were not read, added to attention over those that were:
`table.ADD_REST`, for `tilewise.SparQ`.
"""
