"""The name of the cells that this process starts.

Ports of services that tests have killed are soon another's, in another test process too. Whoever still dials one
belongs to this cell and is sent away by every other: under one name for all it would take that cell over.
"""

from __future__ import annotations

import os

CELL = f"tests-{os.getpid()}"
