"""Writes the table of proven models into docs/models.md, from the variations that the tests run."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: scripts/models_table.py -->\n", "<!-- end of the table -->\n"
KERNELS = "reference, cpu"
"""The kernel sets that every row is run with."""

sys.path.insert(0, str(ROOT / "tests"))


def table() -> str:
    """Return the lines of the table."""
    from gguf_families import GGUF_FAMILIES
    from model_variations import FALLBACKS, FIRSTS, PROOFS, RARER, VARIATIONS
    from published_llamas import LLAMAS
    from published_others import OTHERS

    lines = ["| family | variation | format | kernel sets | proven |", "| --- | --- | --- | --- | --- |"]
    for each in VARIATIONS + RARER:
        proofs = [proof for proof in PROOFS if each.is_windowed or proof != "past the window"]
        kernels = f"{KERNELS}, triton" if each in FIRSTS else KERNELS
        lines.append(f"| {each.family} | {each.name} | folder | {kernels} | {', '.join(proofs)} |")
    for name, published in (LLAMAS | OTHERS).items():
        kind = published.architecture or "(none named)"
        lines.append(f"| `{kind}` | {name} as published | folder | cpu | whole, step by step |")
    for name, family in GGUF_FAMILIES.items():
        model, kind = family.model.removesuffix("ForCausalLM").removesuffix("LMHeadModel"), family.architecture
        lines.append(f"| {model} | {name} | GGUF `{kind}` | {KERNELS} | step by step, names, config |")
    others = [proof for proof in PROOFS if proof not in ("past the window", "names")]
    for config in FALLBACKS:
        name = f"{config.removesuffix('Config')} by transformers' code"
        lines.append(f"| others | {name} | folder | {KERNELS} | {', '.join(others)} |")
    return "".join(f"{line}\n" for line in lines)


def with_table(text: str) -> str:
    """Return a page with the table as it is now. Raises ValueError where the page has no place for it."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE} has no {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
