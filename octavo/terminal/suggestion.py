"""The model to name where a command is to be typed."""

from __future__ import annotations

from pathlib import Path

from octavo.home import octavo_home
from octavo.models.catalog import DEFAULT_MODEL
from octavo.models.errors import ModelError
from octavo.models.location import MANIFEST_NAME, fetched_models, locate, models_folder

_TEMPLATE = "octavo up MODEL"


def model_to_serve(home: Path) -> str:
    """Return a model that is prepared on this machine, the catalog's default before others; else that default."""
    folder = models_folder(home)
    try:
        names = fetched_models(folder)
    except OSError:  # a hint is no place to fail
        names = []
    for name in sorted(names, key=lambda each: each != DEFAULT_MODEL):
        try:
            if (locate(name, folder).prepared / MANIFEST_NAME).is_file():
                return name
        except (ModelError, OSError):
            continue
    return DEFAULT_MODEL


def with_model(hint: str) -> str:
    """Return a hint with a model's name in place of MODEL, so that the command can be pasted."""
    return hint.replace(_TEMPLATE, f"octavo up {model_to_serve(octavo_home())}") if _TEMPLATE in hint else hint
