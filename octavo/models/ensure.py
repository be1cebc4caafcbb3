"""A model ready to be served, whatever that takes. Where it is ready, what fetches and prepares is not imported."""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.models.errors import ModelError
from octavo.models.location import MANIFEST_NAME, ModelKind, ModelLocation, locate
from octavo.models.manifest import read_manifest
from octavo.models.prepared import PreparedModel, open_prepared

WAIT_INTERVAL = 2.0
"""Seconds between two looks at a model that somebody else prepares."""


def ensure_prepared(model: str, report: Callable[[str], None] = print) -> PreparedModel:
    """Open a model and its weights, fetched and prepared first where that was never done. Raises ModelError.

    A folder that an Octavo with other recommended defaults prepared is renewed, unless `model` names that very folder.
    `report` takes one line for the person who waits.
    """
    location = locate(model)
    if not _is_ready(location):
        from octavo.models.prepare import prepare
        from octavo.models.pull import pull

        fetch = pull if location.kind is ModelKind.CATALOG else prepare
        fetch(model, report=report)
    return _open_whole(model)


def wait_prepared(
    model: str, report: Callable[[str], None] = print, sleep: Callable[[float], None] = time.sleep
) -> PreparedModel:
    """Open a model and its weights once somebody else has prepared them, in a volume that this process may only read.

    Waits for ever: only whoever waits for it knows how long a fetch may take. `report` takes why, once for each reason.
    """
    told = ""
    while True:
        try:
            if not _is_ready(locate(model)):
                raise ModelError(f"model {model!r} is not prepared yet")
            return _open_whole(model)
        except ModelError as error:
            if str(error) != told:
                told = str(error)
                report(f"waiting: {told}")
        sleep(WAIT_INTERVAL)


def _open_whole(model: str) -> PreparedModel:
    prepared = open_prepared(model)
    prepared.check_weights()
    return prepared


def _is_ready(location: ModelLocation) -> bool:
    if not (location.prepared / MANIFEST_NAME).is_file():
        return False
    return location.kind is ModelKind.PREPARED or read_manifest(location.prepared).is_current
