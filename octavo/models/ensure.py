"""A model ready to be served, whatever that takes. Where it is ready, what fetches and prepares is not imported."""

from __future__ import annotations

from collections.abc import Callable

from octavo.models.location import MANIFEST_NAME, ModelKind, ModelLocation, locate
from octavo.models.manifest import read_manifest
from octavo.models.prepared import PreparedModel, open_prepared


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
    prepared = open_prepared(model)
    prepared.check_weights()
    return prepared


def _is_ready(location: ModelLocation) -> bool:
    if not (location.prepared / MANIFEST_NAME).is_file():
        return False
    return location.kind is ModelKind.PREPARED or read_manifest(location.prepared).is_current
