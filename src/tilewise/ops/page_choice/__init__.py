"""Which pages of a KV cache queries read, by their summaries: `table.CHOOSE_PAGES`, for `tilewise.TopPages`."""
