"""Loading torch's largest library while Python still imports other modules.

Python holds its lock while it loads an extension module, and torch's libraries take a third of a second to load: a
second core has nothing to do then. The system's own loader is called here from a thread, without the lock; when torch
is imported later, the library is there or waited for.
"""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import PathFinder
from pathlib import Path
from threading import Thread

LIBRARY = "libtorch_cpu.so"


def preload_torch() -> Thread | None:
    """Begin to load the library, and return the thread that does; None where it is not where Linux wheels have it.

    An error is left to the import of torch, which says more.
    """
    spec = PathFinder.find_spec("torch")
    library = None if spec is None or spec.origin is None else Path(spec.origin).parent / "lib" / LIBRARY
    if library is None or not library.is_file():
        return None
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    thread = Thread(target=load, args=(os.fsencode(library), os.RTLD_NOW), name="preload", daemon=True)
    thread.start()
    return thread
