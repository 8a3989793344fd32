"""Tests of tilewise, one folder a package; the tiers are in CONTRIBUTING.md."""
