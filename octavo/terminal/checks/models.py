"""The models in OCTAVO_HOME: fetched, prepared, whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from octavo.models.catalog import CATALOG, DEFAULT_MODEL
from octavo.models.errors import ModelError
from octavo.models.location import MANIFEST_NAME, ModelLocation, fetched_models, locate, models_folder
from octavo.models.manifest import read_manifest
from octavo.models.prepared import command_for, open_prepared
from octavo.terminal.checks.finding import Finding, Level
from octavo.terminal.figures import size

_SECTION = "models"


def check_models(home: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the state of every model that was fetched, and of the one that OCTAVO_MODEL names."""
    folder = models_folder(home)
    names = fetched_models(folder)
    named = environ.get("OCTAVO_MODEL")
    if named and named not in names:
        names.append(named)
    for name in names:
        try:
            location = locate(name, folder)
        except ModelError as error:
            # A stray folder is nobody's model; the one that OCTAVO_MODEL names is the services' model.
            if name == named:
                yield Finding(_SECTION, name, Level.PROBLEM, str(error), "set OCTAVO_MODEL to a model, or unset it")
            continue
        yield _state(location)
    if not names:
        model = CATALOG[DEFAULT_MODEL]
        advice = f"octavo pull {model.name} ({size(model.size)}); `octavo up {model.name}` does it by itself"
        yield Finding(_SECTION, "none", Level.NOTE, f"no model in {folder}", advice)


def _state(location: ModelLocation) -> Finding:
    name = location.given
    if not (location.prepared / MANIFEST_NAME).is_file():
        is_fetched = location.weights is not None and location.weights.exists()
        text = "fetched, not prepared" if is_fetched else "not fetched, or only half"
        return Finding(_SECTION, name, Level.NOTE, text, command_for(location))
    try:
        prepared = open_prepared(str(location.prepared))
        prepared.check_weights()
    except ModelError as error:
        return Finding(_SECTION, name, Level.PROBLEM, str(error), command_for(location))
    total = sum(file.size for file in read_manifest(location.prepared).weight_files)
    text = f"prepared, {size(total)}, revision {prepared.revision[:12]}"
    return Finding(_SECTION, name, Level.OK, text, f"octavo up {name}")
