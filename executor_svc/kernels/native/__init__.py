"""The compiled kernels: C++ sources beside each op, built for an instruction set, called through a plain C interface.

`isa` knows the instruction sets and which of them a machine runs, `build` compiles and keeps libraries, `library` loads
one. The sources share `csrc/`: vectors of each set's width, and the team of compute threads. `python -m
executor_svc.kernels.native DIRECTORY` builds every set ahead, for an image.
"""
