"""What a custom operator's C++ source includes, octavo_op.h, and what it is joined to. See executor_svc/graph/native_op.py."""
