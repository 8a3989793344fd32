"""Which tiles of keys a tile of queries takes, by its row of scores: `table.TAKE`, which `attention(select=)` calls."""
