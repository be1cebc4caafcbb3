"""Python's garbage collector while a service starts.

Imports make hundreds of thousands of objects that live as long as the process. The collector walks through them again
and again meanwhile, a tenth of the time that imports take, and after that in each full collection, which is a pause in
every stream. So it rests until they are there, and leaves them out from then on.
"""

from __future__ import annotations

import gc


def pause_gc() -> None:
    """Let no garbage be collected. Called first thing, before whatever takes time."""
    gc.disable()


def resume_gc() -> None:
    """Collect garbage again, among what is made from now on."""
    gc.freeze()
    gc.enable()
