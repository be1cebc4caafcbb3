"""Models on disk: finding, fetching, preparing and opening them. Only `octavo.models.prepare` needs more than numpy."""

from octavo.models.errors import ModelError
from octavo.models.prepared import PreparedModel, open_prepared

__all__ = ["ModelError", "PreparedModel", "open_prepared"]
