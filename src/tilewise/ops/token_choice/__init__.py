"""Which tokens of a KV cache queries read, by scores that are predicted, and what stands for the others:
`table.CHOOSE_TOKENS`, for `tilewise.SparQ`.
"""
