"""Moves KV pages between workers: states as data, the wire format, and one transport per medium."""
