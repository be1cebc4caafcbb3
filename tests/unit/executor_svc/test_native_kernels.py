"""Compiled kernels: which instruction set is chosen, and how its library comes to be."""

from __future__ import annotations

import itertools
import logging
import os
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from instruction_sets import each_library

from executor_svc.cpu_features import cpu_features
from executor_svc.kernels import build_kernels
from executor_svc.kernels.linear.cpu import PanelMemory, make_pack_linear
from executor_svc.kernels.native import build as native_build
from executor_svc.kernels.native import library as native_library
from executor_svc.kernels.native.__main__ import main
from executor_svc.kernels.native.build import BUILT_AHEAD_IN, KernelBuildError, build, find_library, library_name
from executor_svc.kernels.native.isa import (
    FORCED_BY,
    INSTRUCTION_SETS,
    InstructionSet,
    InstructionSetError,
    choose,
    runnable,
)
from executor_svc.kernels.native.library import load_library
from executor_svc.kernels.native.sealed import seal

GENERIC, AVX2, AVX512 = (
    next(isa for isa in INSTRUCTION_SETS if isa.name == name) for name in ("generic", "avx2", "avx512")
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and nothing built ahead."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(BUILT_AHEAD_IN, raising=False)
    return tmp_path / "home"


def _make(library: Path, contents: bytes = b"built") -> Path:
    """Write what is taken for a library."""
    library.write_bytes(contents)
    seal(library)
    return library


def _compiler(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_highest_set_that_the_processor_runs_is_chosen() -> None:
    """A set is chosen where every one of its features is there, and not where one is missing."""
    assert choose(frozenset(), {}) is GENERIC
    assert choose(AVX2.features, {}) is AVX2
    assert choose(AVX2.features - {"fma"}, {}) is GENERIC
    assert choose(AVX512.features, {}) is AVX512
    assert choose(AVX512.features - {"avx512bw"}, {}) is AVX2


def test_a_lower_set_can_be_forced_and_no_other() -> None:
    """OCTAVO_CPU_ISA names a set that runs here; one that does not, or that nobody knows, is refused with those."""
    assert choose(AVX512.features, {FORCED_BY: "avx2"}) is AVX2
    assert choose(AVX512.features, {FORCED_BY: ""}) is AVX512
    with pytest.raises(InstructionSetError, match="avx512: this processor does not run it; here run generic, avx2"):
        choose(AVX2.features, {FORCED_BY: "avx512"})
    with pytest.raises(InstructionSetError, match="z80: unknown; here run generic"):
        choose(frozenset(), {FORCED_BY: "z80"})


def test_a_library_is_built_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that come at once build it once, and whoever comes later finds it."""
    built: list[Path] = []

    def slow_build(_: object, library: Path) -> None:
        built.append(library)
        together.wait(0.2)
        _make(library)

    together = threading.Event()
    monkeypatch.setattr(native_build, "build", slow_build)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: find_library(GENERIC), range(4)))
    assert found == {home / "kernels" / library_name(GENERIC)} == set(built)
    assert len(built) == 1


def test_a_library_built_ahead_is_taken(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fits the sources is used where it lies; one of other sources is not."""
    ahead = tmp_path / "ahead"
    ahead.mkdir()
    monkeypatch.setenv(BUILT_AHEAD_IN, str(ahead))
    monkeypatch.setattr(native_build, "build", lambda _, library: _make(library))
    (ahead / "octavo-generic-0123456789abcdef.so").write_bytes(b"old")
    assert find_library(GENERIC).parent == home / "kernels"
    _make(ahead / library_name(GENERIC))
    assert find_library(GENERIC) == ahead / library_name(GENERIC)


@pytest.mark.parametrize("left", [0, 1, 4096, -1], ids=["empty", "a byte", "a page", "all but a byte"])
def test_what_is_left_of_a_library_is_never_loaded(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """A full disk or a crash leaves part of a file, or its blocks unwritten: it is built again. What was built ahead is
    not replaced: the error names it and says how to build it.
    """
    built: list[Path] = []
    contents = bytes(range(256)) * 40
    monkeypatch.setattr(native_build, "build", lambda _, library: built.append(_make(library, contents)))
    library = find_library(GENERIC)
    whole = library.read_bytes()
    for damaged in (whole[:left], whole[:left] + bytes(len(whole) - len(whole[:left])), whole[1:], whole + b"x"):
        library.write_bytes(damaged)
        assert find_library(GENERIC) == library
        assert library.read_bytes() == whole
    assert len(built) == 5
    ahead = tmp_path / "ahead"
    ahead.mkdir()
    (ahead / library.name).write_bytes(whole[:left])
    monkeypatch.setenv(BUILT_AHEAD_IN, str(ahead))
    with pytest.raises(KernelBuildError, match=rf"{library.name} is damaged: build it again .*native {ahead}\)"):
        find_library(GENERIC)


def test_a_library_that_cannot_be_loaded_is_an_error_of_the_build(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one in a folder that nothing may be run from: where to put it is said."""
    monkeypatch.setattr(native_build, "build", lambda _, library: _make(library))
    monkeypatch.setattr(native_library, "_loaded", {})
    with pytest.raises(KernelBuildError, match=r"cannot be loaded .*set OCTAVO_HOME"):
        load_library(1, GENERIC)
    assert home.is_dir()


def test_old_libraries_are_removed_where_a_new_one_is_built(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest few of the same instruction set stay, with their locks; those of others are not touched."""
    folder = home / "kernels"
    folder.mkdir(parents=True)
    for age in range(1, 13):
        for isa in (AVX512, AVX2):
            library = folder / f"octavo-{isa.name}-{age:016x}.so"
            library.touch()
            os.utime(library, (1e9 - age, 1e9 - age))
            Path(f"{library}.lock").touch()
    monkeypatch.setattr(native_build, "build", lambda _, library: _make(library))
    built = find_library(AVX512)
    kept = {f"octavo-avx512-{age:016x}.so" for age in range(1, 9)} | {built.name}
    assert {path.name for path in folder.glob("octavo-avx512-*.so")} == kept
    assert {path.name for path in folder.glob("octavo-avx512-*.lock")} == {f"{name}.lock" for name in kept}
    assert len(list(folder.glob("octavo-avx2-*"))) == 24


def test_the_name_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another set, another source, another header: another library."""
    monkeypatch.setattr(native_build, "SOURCES", tmp_path)
    (tmp_path / "a.cpp").write_text("int a;")
    names = [library_name(GENERIC), library_name(AVX2)]
    (tmp_path / "a.cpp").write_text("int b;")
    names.append(library_name(GENERIC))
    (tmp_path / "a.h").write_text("int c;")
    names.append(library_name(GENERIC))
    assert len(set(names)) == 4


@pytest.mark.usefixtures("home")
def test_without_a_compiler_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, or a CXX that is none: what to install, and which set runs without."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler.*apt install g\+\+.*--kernels reference"):
        find_library(GENERIC)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(KernelBuildError, match="CXX=/no/such/compiler is not a program"):
        find_library(GENERIC)


def test_a_compiler_that_fails_is_quoted(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first words are in the error, nothing is left behind, and a compiler that works is asked again."""
    monkeypatch.setenv("CXX", str(_compiler(tmp_path / "cxx", "echo 'a.cpp:1: what is this' >&2; exit 3")))
    with pytest.raises(KernelBuildError, match=r"could not compile the kernels .*: a\.cpp:1: what is this"):
        find_library(GENERIC)
    assert [path.suffix for path in (home / "kernels").iterdir()] == [".lock"]
    works = 'while [ "$1" != -o ]; do shift; done; echo made >"$2"'
    monkeypatch.setenv("CXX", str(_compiler(tmp_path / "cxx", works)))
    assert find_library(GENERIC).read_bytes().startswith(b"made\n")


def test_who_waits_sees_how_far_it_is(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the first moment on, as the stage `kernels` of a start; a library that is there says nothing."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CXX", str(_compiler(tmp_path / "cxx", 'while [ "$1" != -o ]; do shift; done; echo made >"$2"')))
    find_library(GENERIC)
    told = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert {each["stage"] for each in told} == {"kernels"}
    done = [each["done"] for each in told]
    assert done == sorted(set(done))
    assert (done[0], done[-1]) == (0, told[-1]["total"])
    caplog.clear()
    find_library(GENERIC)
    assert not caplog.records


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file where the home should be: the error says where the library should go and what to set."""
    monkeypatch.delenv(BUILT_AHEAD_IN, raising=False)
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelBuildError, match=r"cannot be kept in .*file/kernels.*set OCTAVO_HOME"):
        find_library(GENERIC)


def test_all_sets_are_built_for_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One library for each set of this kind of machine, by the names that are looked for; a failure is exit code 1."""
    monkeypatch.setattr("executor_svc.kernels.native.__main__.build", lambda _, library: library.write_bytes(b""))
    assert main([str(tmp_path / "libraries")]) == 0
    built = {path.name for path in (tmp_path / "libraries").iterdir()}
    assert {library_name(isa) for isa in runnable(cpu_features())} <= built
    assert len(capsys.readouterr().out.splitlines()) == len(built)
    assert main([]) == 2

    def fail(*_: object) -> None:
        raise KernelBuildError("no compiler")

    monkeypatch.setattr("executor_svc.kernels.native.__main__.build", fail)
    assert main([str(tmp_path / "libraries")]) == 1


@pytest.mark.full
@pytest.mark.parametrize("isa", INSTRUCTION_SETS, ids=lambda isa: str(isa.name))
def test_every_set_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: InstructionSet) -> None:
    """The sources compile without a warning for every set, also for those this machine does not run."""
    if isa.features and not cpu_features() & {"avx2", "fma"}:
        pytest.skip("not an x86-64 processor")
    monkeypatch.setattr(native_build, "_FLAGS", (*native_build._FLAGS, "-Werror"))
    build(isa, tmp_path / "library.so")
    assert (tmp_path / "library.so").stat().st_size > 0


@each_library
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["float32", "float32 of bfloat16", "bfloat16"])
@pytest.mark.parametrize("width", [77, 96])
def test_a_row_is_the_same_whatever_stands_beside_it(isa: InstructionSet, threads: int, kind: str, width: int) -> None:
    """Bit for bit: alone, among few, among many, with any number of threads, at sizes that fill panels and tiles and at
    such that do not; and right, by float64. Logits are the same, not rounded.
    """
    pack_linear = make_pack_linear(load_library(threads, isa))
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn((203, width), generator=generator), torch.randn(203, generator=generator)
    rows = torch.randn((1100, width), generator=generator)
    if kind != "float32":
        weight = weight.bfloat16().float()
    if kind == "bfloat16":
        weight, bias, rows = weight.bfloat16(), bias.bfloat16(), rows.bfloat16()
    linear = pack_linear(weight, bias)
    indices = torch.tensor([202, 0, 31, 32, 0])
    assert torch.equal(linear.weight_rows(indices), weight[indices])
    whole = linear(rows)
    exact = rows.double() @ weight.double().T + bias.double()
    tolerance = 2**-8 if kind == "bfloat16" else 1e-5
    torch.testing.assert_close(whole.double(), exact, rtol=tolerance, atol=1e-4)
    logits = linear.logits(rows)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-4)
    assert torch.equal(logits.to(whole.dtype), whole)
    for count in (1, 2, 3, 5, 6, 7, 11, 12, 13, 16, 17, 31, 32, 33, 64, 400):
        for start in (0, 3):
            assert torch.equal(linear(rows[start : start + count]), whole[start : start + count])
        assert torch.equal(linear.logits(rows[:count]), logits[:count])


@each_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_with_nan_spoils_no_other(isa: InstructionSet, dtype: torch.dtype) -> None:
    """A row's NaN comes out of that row, all of it, and of no other."""
    linear = make_pack_linear(load_library(2, isa))(torch.ones((40, 33), dtype=dtype), None)
    x = torch.ones((35, 33), dtype=dtype)
    x[17, 32] = torch.nan
    nan = linear(x).isnan()
    assert nan[17].all()
    assert nan.sum() == 40


def test_threads_that_pack_side_by_side_share_no_memory() -> None:
    """Layers are loaded by several threads: each weight has its own memory, aligned, and all of it is there."""
    memory = PanelMemory(chunk_bytes=8192)
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(lambda n: memory.take(1 + n % 500, torch.float32), range(20_000)))
    finally:
        sys.setswitchinterval(switch_interval)
    assert all(len(each) == 1 + n % 500 and each.data_ptr() % 64 == 0 for n, each in enumerate(taken))
    spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in taken)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_sixteen_bits_hold_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 weight whose values are bfloat16 takes half the memory; one value that is not, and it takes all."""
    monkeypatch.delenv(FORCED_BY, raising=False)
    kernels = build_kernels("cpu")
    weight = torch.randn((64, 48), generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert kernels.pack_linear(weight, None).panels.dtype == torch.bfloat16  # type: ignore[attr-defined]
    weight[63, 47] = 1 + 2**-20
    assert kernels.pack_linear(weight, None).panels.dtype == torch.float32  # type: ignore[attr-defined]


def test_executors_of_one_process_share_the_team() -> None:
    """Threads that call ops at once get their own results."""
    kernels = build_kernels("cpu", 2)
    weight = torch.randn((256, 64), generator=torch.Generator().manual_seed(0))
    linear = kernels.pack_linear(weight, None)
    inputs = [torch.full((3, 64), float(index)) for index in range(4)]
    expected = [linear(x) for x in inputs]

    def call_often(index: int) -> bool:
        return all(torch.equal(linear(inputs[index]), expected[index]) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call_often, range(4)))
