"""The name of the cells that this process starts.

Ports that the system picks, and those of a test process that has ended, are soon another's. Whoever still dials one
belongs to this cell and is sent away by every other: under one name for all it would take that cell over.
"""

from __future__ import annotations

import os

CELL = f"tests-{os.getpid()}"
