"""Arithmetic that the Triton kernels of several ops share. No op of its own."""
