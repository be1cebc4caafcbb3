"""SIGTERM while a service starts.

Its own handler stands once the event loop runs; imports and models take seconds before that. A process that is the
first of its container hears no signal that it has no handler for: it would be killed when the engine's patience ends.
"""

from __future__ import annotations

import os
import signal


def end_at_sigterm() -> None:
    """Until the service takes SIGTERM itself, let it end the process at once, with exit code 0.

    Called first thing, before whatever takes time. Nothing has begun that would want an orderly end, and a device
    thread that loads a model would hold one up.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
