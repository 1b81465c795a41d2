"""Compiled kernels for CPUs: wrappers around the C of `csrc`. Optional: see `library.why_not`."""
