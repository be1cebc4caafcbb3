"""Where a limit lies in an order of tokens, for the Triton kernels of sampling. No op of its own; selection.h is the
C++ kernels'.
"""
