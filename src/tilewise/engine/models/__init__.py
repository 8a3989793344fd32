"""Decoders of checkpoints: what their files say, their weights, and what they compute."""
