"""What docker-compose.yml, its override and the Dockerfiles say, by reading them: no engine is needed."""

from __future__ import annotations

import re
import runpy
import tomllib
from typing import Any

import pytest
import yaml
from compose_cli import BASE_IMAGE, ROOT, Project, installed_composes

from executor_svc.kernels.native.isa import FORCED_BY
from octavo.client.discovery import ADMIN_PORTS, GATEWAY_PORTS
from octavo.rpc.settings import Settings, fields_of, variable_of
from octavo.settings import ADMIN_PORT, GATEWAY_PORT, ExecutorSettings, GatewaySettings, SchedulerSettings

SERVICES: dict[str, type[Settings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "executor": ExecutorSettings,
}
FIXED = {"bind", "port", "http_port", "admin_port", "metrics_port", "cell", "check_invariants"}
"""Settings that a stack has no choice in: a container has its ports to itself, and a project is a cell."""
DOCKERFILES = sorted((ROOT / "deploy").glob("*.Dockerfile"))
VERSIONS = ("v1", "v2")


def load(name: str = "docker-compose.yml") -> dict[str, Any]:
    """Read a compose file as it is written."""
    document: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return document


def config(version: str, *files: str, **variables: str) -> dict[str, Any]:
    """Let a compose read the files and return what it makes of them."""
    if version not in installed_composes():
        pytest.skip(f"no compose {version} here")
    project = Project(installed_composes()[version], "octavo-config", files, variables)
    document: dict[str, Any] = yaml.safe_load(project.compose("config", timeout=60))
    return document


@pytest.mark.parametrize("version", VERSIONS)
def test_both_versions_of_compose_read_the_stack(version: str) -> None:
    """Neither refuses a word of it, and a model given by a variable reaches all who need its name."""
    services = config(version, "docker-compose.yml", OCTAVO_MODEL="owner/name", OCTAVO_THREADS="3")["services"]
    assert set(services) - {"executor-tp"} == {"model", *SERVICES}  # version 1 shows what is in a profile, too
    assert services["model"]["command"] == ["prepare", "--if-needed", "owner/name"]
    for service in ("gateway", "executor"):
        assert services[service]["environment"]["OCTAVO_MODEL"] == "owner/name"
    assert str(services["executor"]["environment"]["OCTAVO_THREADS"]) == "3"
    assert services["executor"]["depends_on"]["model"]["condition"] == "service_completed_successfully"
    assert services["scheduler"]["depends_on"]["executor"]["condition"] == "service_healthy"
    assert services["gateway"]["depends_on"]["scheduler"]["condition"] == "service_healthy"


@pytest.mark.parametrize("version", VERSIONS)
def test_an_executor_of_two_processes_is_one_of_the_executors(version: str) -> None:
    """Its profile adds nothing else; it is an executor but for the number of ranks, and is found by the same name."""
    services = config(version, "docker-compose.yml", COMPOSE_PROFILES="tp", OCTAVO_TENSOR_PARALLEL="1")["services"]
    assert set(services) == {"model", "executor-tp", *SERVICES}
    executor, divided = services["executor"], services["executor-tp"]
    assert divided.pop("profiles") == ["tp"]
    assert divided["networks"].pop("default")["aliases"] == ["executor"]
    assert str(divided["environment"].pop("OCTAVO_TENSOR_PARALLEL")) == "2"
    executor["environment"].pop("OCTAVO_TENSOR_PARALLEL")
    for each in (executor, divided):
        each.pop("networks", None)
    assert divided == executor
    assert services["scheduler"]["environment"]["OCTAVO_SCHEDULER_EXECUTORS"] == "executor:50053"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_override_for_gpus_gives_executors_devices_and_a_torch_that_knows_them(version: str) -> None:
    """An NVIDIA device is reserved, the build takes torch's own, and the image is told from that for CPUs."""
    plain = config(version, "docker-compose.yml")["services"]
    services = config(version, "docker-compose.yml", "docker-compose.gpu.yml")["services"]
    executor = services["executor"]
    (device,) = executor["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    assert executor["environment"]["OCTAVO_DEVICE"] == "cuda"
    # Triton compiles, and loads as code, what it compiles: it needs a compiler and a folder that allows both.
    cache = executor["environment"]["TRITON_CACHE_DIR"]
    assert any(re.match(f"{cache}:(.*,)?exec(,|$)", str(mount)) for mount in executor["tmpfs"])
    assert re.search(r'"\$build" = gpu.*install .* gcc', (ROOT / "deploy/executor.Dockerfile").read_text(), re.DOTALL)
    # The card's memory is shared out by another flag than the machine's.
    assert executor["environment"].get("OCTAVO_KV_MEMORY") is None
    assert plain["executor"]["environment"]["OCTAVO_KV_MEMORY"] == "1GiB"
    assert services["model"]["build"]["args"] == {"TORCH": "gpu"}
    assert services["model"]["image"] == executor["image"] != plain["executor"]["image"]
    assert set(load("docker-compose.gpu.yml")["services"]) == {"model", "executor"}  # the others need no GPU


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_of_a_service_can_be_given(service: str) -> None:
    """The stack passes on each variable that its service knows and that a user may choose, and no other."""
    settings = SERVICES[service]
    names = {each.name for each in fields_of(settings)} - FIXED
    others = set()
    if service == "executor":
        names.remove("device")  # the override for GPUs gives it
        others = {FORCED_BY}
    given = load()["services"][service]["environment"]
    assert set(given) == {variable_of(settings, name) for name in names} | others


def test_clients_look_where_gateways_are_published() -> None:
    """The ranges are those that `octavo` searches, on 127.0.0.1 alone; nothing but the gateway is published."""
    services = load()["services"]
    published = {}
    for text in services["gateway"]["ports"]:
        match = re.fullmatch(r"127\.0\.0\.1:(\d+)-(\d+):(\d+)", text)
        assert match, text
        published[int(match[3])] = range(int(match[1]), int(match[2]) + 1)
    assert (GATEWAY_PORT, *published[GATEWAY_PORT]) == GATEWAY_PORTS
    assert (ADMIN_PORT, *published[ADMIN_PORT]) == ADMIN_PORTS
    assert len({len(each) for each in published.values()}) == 1
    assert not any("ports" in services[name] for name in services if name != "gateway")


def test_every_service_is_confined_alike() -> None:
    """Non-root is the images' work; the rest stands here for each service, the one-shot one too."""
    for name, service in load()["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["tmpfs"] == ["/tmp"], name
        assert not {"cap_add", "privileged", "user", "network_mode", "pid"} & set(service), name
        assert service["restart"] == ("no" if name == "model" else "unless-stopped"), name


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_a_dockerfile_asks_for_nothing_special(path: Any) -> None:
    """The classic builder reads it, pip's variables have no default and are never set, and root is left behind."""
    text = path.read_text()
    instructions = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    lines = [line.strip() for line in instructions.splitlines() if line.strip()]
    assert lines[0].removesuffix(" AS packages") == f"FROM {BASE_IMAGE}"
    assert {line for line in lines[1:] if line.startswith("FROM")} <= {"FROM packages", "FROM packages AS kernels"}
    assert not re.search(r"^#\s*syntax", text)
    assert "--mount" not in text
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        assert f"ARG {name}" in lines
        assert text.count(name) == 1
    assert [line for line in lines if line.startswith("USER")] == ["USER octavo"]
    assert max(i for i, line in enumerate(lines) if line.startswith("RUN")) < lines.index("USER octavo")


def test_the_images_share_their_first_layers() -> None:
    """Word for word the same up to the common packages, so that an engine makes these layers once."""
    assert len(DOCKERFILES) == len(SERVICES)
    commons = set()
    for path in DOCKERFILES:
        text = path.read_text().replace(" AS packages\n", "\n", 1)
        _, found, rest = text.partition(f"FROM {BASE_IMAGE}\n")
        common, end, _ = rest.partition("-r requirements.txt setuptools\n")
        assert found, path
        assert end, path
        commons.add(common)
    assert len(commons) == 1


def test_the_packages_of_an_image_come_before_its_source() -> None:
    """A change of the source leaves the layers with the packages as they are."""
    for path in DOCKERFILES:
        before, _, after = path.read_text().partition("COPY README.md LICENSE ./\n")
        assert "COPY octavo octavo" in after
        assert "COPY octavo octavo" not in before.partition("AS kernels")[0]
        assert "-r requirements.txt" in before
        assert "-r requirements.txt" not in after


def test_an_image_gets_what_the_project_declares() -> None:
    """The list of packages is pyproject.toml's own; torch is in no extra that gateway or scheduler get."""
    requirements = runpy.run_path(str(ROOT / "deploy/requirements.py"))["requirements"]
    pyproject = ROOT / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    gateway = requirements(pyproject, ["gateway"])
    assert gateway == project["dependencies"] + project["optional-dependencies"]["gateway"]
    assert not any(each.startswith("torch") for each in gateway)
    assert any(each.startswith("torch") for each in requirements(pyproject, ["executor"]))
    with pytest.raises(KeyError, match="nothing"):
        requirements(pyproject, ["nothing"])
