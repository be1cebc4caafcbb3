"""Steps on an accelerator: the next one's inputs are built and sent while this one is computed.

`runner.py` launches and lands steps; the others are its parts. `executor_svc.device` says what an accelerator is.
"""
