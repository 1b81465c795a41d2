"""Checks for a machine with a GPU: `tests/gpu/check.sh`."""
