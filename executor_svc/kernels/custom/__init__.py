"""What a custom operator's C++ source includes, octavo_op.h, and what it is joined to: see executor_svc/graph."""
