"""Cases of the Triton kernels in Triton's interpreter, run by `python -m tests.kernels.triton_cases NAME...`."""
