"""What `--model` may name, and where its weights and its prepared folder lie."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from octavo.home import octavo_home
from octavo.models.catalog import CATALOG
from octavo.models.errors import ModelError
from octavo.models.gguf_parts import whole_name
from octavo.spelling import did_you_mean

MANIFEST_NAME = "manifest.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelKind(Enum):
    """What a model's name stands for."""

    GGUF = "gguf"
    FOLDER = "folder"
    CATALOG = "catalog"
    HUB = "hub"
    PREPARED = "prepared"


@dataclass(frozen=True)
class ModelLocation:
    """Where a model lies, whether or not it has been fetched.

    `given` is what the user wrote. `name` is the model's name unless it was prepared under another. `weights` is the
    GGUF file or the Hugging Face folder; None for a prepared folder, whose manifest knows.
    """

    kind: ModelKind
    given: str
    name: str
    weights: Path | None
    prepared: Path


def models_folder(home: Path | None = None) -> Path:
    """Return the folder that holds fetched models."""
    return (octavo_home() if home is None else home) / "models"


def fetched_models(models: Path) -> list[str]:
    """Return the names of the models that lie in the folder of fetched models, whole or not, sorted by folder."""
    folders = [path.name for path in sorted(models.iterdir()) if path.is_dir()] if models.is_dir() else []
    # Hub ids lie there with -- in place of the slash.
    return [name if name in CATALOG else name.replace("--", "/", 1) for name in folders]


def locate(model: str, models: Path | None = None) -> ModelLocation:
    """Return where a catalog name, GGUF file, Hugging Face folder, prepared folder or hub id (owner/name) lies.

    Catalog names come first (`./NAME` means the path), paths before hub ids. `models` replaces the folder of fetched
    models. Raises ModelError where the text can be none of these.
    """
    models = models_folder() if models is None else models
    if model in CATALOG:
        weights = models / model / CATALOG[model].file_name
        return ModelLocation(ModelKind.CATALOG, model, model, weights, prepared_beside(weights))
    path = Path(model).expanduser().absolute() if model else None
    if path is not None and path.is_dir():
        if (path / MANIFEST_NAME).is_file():
            return ModelLocation(ModelKind.PREPARED, model, path.name, None, path)
        return ModelLocation(ModelKind.FOLDER, model, path.resolve().name, path, prepared_beside(path))
    if path is not None and path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(
                f"{model} is a file whose name does not end in .gguf: give a GGUF file of such a name, or a link, "
                "or the folder that holds config.json"
            )
        return ModelLocation(ModelKind.GGUF, model, whole_name(path.stem), path, prepared_beside(path))
    if _HUB_ID.fullmatch(model) and not model.lower().endswith(".gguf"):
        folder = models / model.replace("/", "--")
        return ModelLocation(ModelKind.HUB, model, model, folder, prepared_beside(folder))
    known = ", ".join(CATALOG)
    raise ModelError(
        f"no model {model!r}: there is no such file or folder, it is no name that `octavo pull` knows ({known}), "
        f"and no hub id (owner/name){did_you_mean(model, {*CATALOG, *fetched_models(models)})}"
    )


def prepared_beside(weights: Path) -> Path:
    """Return where a prepared folder goes: `<stem>.octavo/` beside a GGUF file, `octavo/` in a Hugging Face folder."""
    return weights.with_suffix(".octavo") if weights.suffix.lower() == ".gguf" else weights / "octavo"
