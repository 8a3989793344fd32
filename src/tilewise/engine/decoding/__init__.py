"""Speculative decoding without a model of its own: trees of proposed tokens, their verification, and who proposes."""
