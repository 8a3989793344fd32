"""Tests of the repository's own tools and of the machinery of benchmark records."""
