"""What `import octavo` costs and offers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import octavo
import octavo.client

ROOT = Path(__file__).parents[4]


def test_the_package_costs_nothing_until_a_client_is_asked_for() -> None:
    """The services import octavo at every start: it must not bring gRPC, and no client brings what a model needs."""
    code = """
        import sys
        import octavo
        assert "grpc" not in sys.modules and "octavo.client" not in sys.modules
        octavo.Client
        assert "octavo.client" in sys.modules
        assert not {"torch", "numpy", "transformers", "tokenizers", "jinja2"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_every_name_leads_to_the_client_package() -> None:
    """The two lists of public names agree, and each name is there."""
    assert octavo.__all__ == octavo.client.__all__
    for name in octavo.__all__:
        assert getattr(octavo, name) is getattr(octavo.client, name)
        assert name in dir(octavo)


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="has no attribute 'Clint'"):
        _ = octavo.Clint  # type: ignore[attr-defined]


GOOD = """
    from collections.abc import Iterator

    import octavo


    def read(client: octavo.Client, question: str) -> Iterator[str]:
        stream = client.generate([octavo.Message("user", question)], max_tokens=64, temperature=0, seed=None)
        for delta in stream:
            yield delta.text
        reasons: list[octavo.FinishReason] = [choice.reason for choice in stream.choices]
        print(stream.started.seed, stream.usage.completion_tokens, reasons)


    async def count(client: octavo.AsyncClient) -> int:
        total = 0
        async with client.generate([{"role": "user", "content": "hi"}]) as stream:
            async for delta in stream:
                total += len(delta.token_ids)
        try:
            completion = await client.complete([1, 2, 3], n=2, timeout=5)
        except octavo.InvalidArgumentError as error:
            return len(error.violations)
        return total + completion.usage.prompt_tokens + len(await client.tokenize(completion.choices[0].text))


    def load(client: octavo.AdminClient) -> float:
        return sum(info.age for info in client.list_requests()) / client.get_load().live_requests
"""
BAD = {
    'octavo.Client().generate("x", temprature=1)': "Unexpected keyword argument",
    'octavo.Client().generate("x", max_tokens="many")': "incompatible type",
    'octavo.Message("robot", "x")': "incompatible type",
    "octavo.Client().generate(3)": "incompatible type",
    'octavo.Client().complete("x").text + 1': "Unsupported operand",
    'octavo.AsyncClient().complete("x").text': "has no attribute",
}


def test_a_program_of_a_user_is_checked_by_its_types(tmp_path: Path) -> None:
    """Strict mypy passes good use through `octavo` alone, without one Any, and finds each mistake."""
    (tmp_path / "good.py").write_text(textwrap.dedent(GOOD))
    (tmp_path / "bad.py").write_text("import octavo\n\n" + "\n".join(BAD) + "\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--disallow-any-expr",
        "--no-error-summary",
        "--follow-imports",
    ]
    done = subprocess.run(
        [*command, "silent", "--config-file", "", "--cache-dir", str(tmp_path / "cache"), "good.py", "bad.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("good.py")] == []
    for number, (use, complaint) in enumerate(BAD.items(), 3):
        assert any(line.startswith(f"bad.py:{number}: error:") and complaint in line for line in lines), (use, lines)
