"""The model's graph: captured plain, fused by passes, compiled into one function over a kernel set's ops.

    description of a decoder  --capture-->  plain ops  --passes-->  fused ops  --compile_graph-->  what a step runs

A graph is a torch.fx.Graph whose nodes call the ops of `ops.py`; it has no branch and no loop. See docs/graph.md.
"""
