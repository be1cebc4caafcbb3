"""The stack of docker-compose.yml, built and run on a real engine.

All in one file, since its tests share one stack and use it in order. They are skipped, and say why, where no engine or
no compose is to be had.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from compose_cli import (
    BASE_IMAGE,
    CommandFailed,
    Project,
    address_in_network,
    crash,
    docker,
    installed_composes,
    other_processes,
    why_no_engine,
)
from metrics_page import scrape
from pages import blocks, pages
from stack import wait_serving
from stack_client import Output, read_stream, request_for

from octavo.client import AsyncAdminClient, Load, RequestInfo
from octavo.client.discovery import ADMIN_PORTS, GATEWAY_PORTS
from octavo.models.location import models_folder
from octavo.rpc.channel import open_channel
from octavo.settings import ADMIN_PORT, GATEWAY_METRICS_PORT, GATEWAY_PORT
from octavo.v1 import inference_pb2, inference_pb2_grpc

# Building the images takes minutes where the packages are not there yet.
pytestmark = pytest.mark.timeout(1500)

TIMEOUT = 180.0
"""Seconds for what containers do: start, come back, be found."""
SERVICES = ("gateway", "scheduler", "executor")
VARIABLES = {
    # Replayed tokens are promised to be the same in float32.
    "OCTAVO_DTYPE": "float32",
    "OCTAVO_THREADS": "1",
    "OCTAVO_KV_MEMORY": "128MiB",
}
MODEL_FROM_HERE = """\
services:
  model:
    volumes:
      - {models}:/var/lib/octavo/models
  executor:
    volumes:
      - {models}:/var/lib/octavo/models:ro
  gateway:
    volumes:
      - {models}:/var/lib/octavo/models:ro
"""
"""For an engine that reaches no package index at run time: the model that the tests have fetched."""
QUESTION = "Once upon a time, in a village by the sea, there lived"


def composes() -> Iterator[object]:
    """One compose for every run, the other for thorough ones; which is which is found out when they run."""
    yield pytest.param(0, id="compose")
    yield pytest.param(1, id="other-compose", marks=pytest.mark.full)


@pytest.fixture(scope="module", params=composes())
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A stack of two executors that serves; nothing of it is left at the end."""
    missing = why_no_engine()
    commands = list(installed_composes().values())
    if missing is None and len(commands) <= request.param:
        missing = "no compose" if not commands else "only one version of compose"
    if missing is not None:
        pytest.skip(f"containers cannot be run here: {missing}")
    plain = Project(commands[request.param], f"octavo-test-{secrets.token_hex(4)}", variables=VARIABLES)
    for service in ("scheduler", "gateway", "model"):
        # At once, each would make the layers that they share.
        plain.compose("build", service)
    try:
        project = start(plain, tmp_path_factory.mktemp("compose"))
        asyncio.run(wait_serving(project.published("gateway", GATEWAY_PORT)))
        yield project
    finally:
        whole = with_profiles(plain)
        print(whole.logs())  # shown where a test failed
        whole.compose("down", "--volumes", "--remove-orphans")


def with_profiles(project: Project) -> Project:
    """Return the project with the services that are started by name alone."""
    return replace(project, variables={**project.variables, "COMPOSE_PROFILES": "tp"})


def start(project: Project, folder: Path) -> Project:
    """Start two executors and the rest. A model that the `model` service cannot fetch comes from this machine."""
    up = ("up", "-d", "--scale", "executor=2")
    try:
        project.compose(*up)
    except CommandFailed:
        if all(each["State"]["ExitCode"] == 0 for each in project.containers("model")):
            raise
        override = folder / "model.yml"
        override.write_text(MODEL_FROM_HERE.format(models=models_folder()))
        project = replace(project, files=(*project.files, str(override)))
        project.compose(*up)
    return project


async def generate(address: str, request: inference_pb2.GenerateRequest) -> Output:
    """Run one request and check the shape of its stream."""
    async with asyncio.timeout(TIMEOUT), open_channel(address) as channel:
        return await read_stream(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request))


async def wait_load(project: Project, is_so: Callable[[Load], bool]) -> Load:
    """Wait until the cell's load is as wanted; fails after TIMEOUT with what it was last."""
    load = None
    try:
        async with asyncio.timeout(TIMEOUT), AsyncAdminClient(project.published("gateway", ADMIN_PORT)) as client:
            while True:
                load = await client.get_load()
                if is_so(load):
                    return load
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"still {load}") from None


async def wait_request(project: Project, is_so: Callable[[RequestInfo], bool]) -> RequestInfo:
    """Wait until a live request is as wanted, and return it."""
    async with asyncio.timeout(TIMEOUT), AsyncAdminClient(project.published("gateway", ADMIN_PORT)) as client:
        while True:
            for info in await client.list_requests():
                if is_so(info):
                    return info
            await asyncio.sleep(0.05)


async def keep_busy(address: str, count: int) -> None:
    """Run so many requests at once, long enough to be there together, and let all of them end well."""
    requests = (request_for(f"{QUESTION} {number}", 48, ignore_eos=True) for number in range(count))
    outputs = await asyncio.gather(*(generate(address, request) for request in requests))
    assert [output.usage.completion_tokens for output in outputs] == [48] * count


def in_container(project: Project, service: str, program: str) -> str:
    """Run a Python program in the first container of a service, as its user, and return what it prints."""
    return project.compose("exec", "-T", service, "python", "-c", program)


@pytest.mark.asyncio
async def test_a_generation_streams_through_the_published_port(project: Project) -> None:
    """A chat is answered, rightly, at the address that `compose port` tells and that `octavo` searches."""
    address = project.published("gateway", GATEWAY_PORT)
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) in GATEWAY_PORTS[1:]
    message = inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content="What is the capital of France?")
    request = request_for([], 24)
    request.chat.messages.append(message)
    output = await generate(address, request)
    assert "Paris" in output.choices[0].text


def test_only_gateways_are_reachable_and_from_this_machine_alone(project: Project) -> None:
    """Every published port is on 127.0.0.1 and a gateway's; its metrics page is among them and true."""
    for container in project.containers():
        service = container["Config"]["Labels"]["com.docker.compose.service"]
        bindings = container["NetworkSettings"]["Ports"].values()
        hosts = {each["HostIp"] for binding in bindings for each in binding or ()}
        assert hosts == ({"127.0.0.1"} if service == "gateway" else set()), service
    _, _, port = project.published("gateway", GATEWAY_METRICS_PORT).rpartition(":")
    page = asyncio.run(scrape(int(port)))
    assert sum(value for series, value in page.items() if series.startswith("octavo_requests_accepted_total")) >= 1


@pytest.mark.parametrize("target", ["scheduler:9102", "executor:9103", "gateway:9101"])
def test_every_metrics_page_is_reached_by_its_services_name(project: Project, target: str) -> None:
    """What a Prometheus in the project's network would scrape is there, though it is not published."""
    program = f"import urllib.request; print(urllib.request.urlopen('http://{target}/metrics').read().decode())"
    assert "octavo_" in in_container(project, "gateway", program)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_can_do_no_more_than_its_work(project: Project, service: str) -> None:
    """No root, no capability, no way to gain one, nothing to write on but /tmp: as declared and as seen from inside."""
    for container in project.containers(service):
        host = container["HostConfig"]
        assert container["Config"]["User"] == "octavo"
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert not host["CapAdd"]
        assert not host["Privileged"]
        assert any(option.startswith("no-new-privileges") for option in host["SecurityOpt"])
        assert host["RestartPolicy"]["Name"] == "unless-stopped"
        assert not [mount for mount in container["Mounts"] if mount["RW"]]
    status = in_container(
        project,
        service,
        "import os, pathlib, tempfile\n"
        "assert os.getuid() and os.getgid()\n"
        "for folder in ('/', '/src', os.path.expanduser('~'), os.environ['OCTAVO_HOME'], '/usr/local'):\n"
        "    try:\n"
        "        pathlib.Path(folder, 'written').write_text('')\n"
        "    except OSError as error:\n"
        "        continue\n"
        "    raise SystemExit(f'{folder} can be written')\n"
        "tempfile.TemporaryFile().close()\n"
        "print(pathlib.Path('/proc/1/status').read_text())\n",
    )
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert fields["NoNewPrivs"].strip() == "1"


def test_nothing_tried_to_write_where_it_may_not(project: Project) -> None:
    """No library of any service missed a cache folder: the logs hold no complaint of it, and no other error."""
    logs = project.logs()
    assert '"message": "executor serving"' in logs
    for complaint in ("Read-only file system", "Permission denied", "not writable", '"level": "error"', "Traceback"):
        assert [line for line in logs.splitlines() if complaint in line] == []


@pytest.mark.parametrize("service", SERVICES)
def test_only_executors_carry_torch(project: Project, service: str) -> None:
    """Its image has torch exactly where it computes, and of the services' packages its own alone."""
    program = "import importlib.util, sys; print(*[n for n in sys.argv[1:] if importlib.util.find_spec(n)])"
    (image,) = {container["Config"]["Image"] for container in project.containers(service)}
    names = ("torch", "triton", "gateway", "scheduler_svc", "executor_svc")
    found = docker("run", "--rm", "--entrypoint", "python", image, "-c", program, *names).split()
    own = {"gateway": ["gateway"], "scheduler": ["scheduler_svc"], "executor": ["torch", "executor_svc"]}
    assert found == own[service]


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_keeps_what_its_base_says_of_pip(project: Project, service: str) -> None:
    """The environment of the base image is there unchanged, with nothing added but Octavo's own."""

    def environment(image: str) -> set[str]:
        (inspected,) = json.loads(docker("image", "inspect", image))
        return set(inspected["Config"]["Env"])

    base, own = environment(BASE_IMAGE), environment(f"octavo-{service}")
    assert base <= own
    names = {"OCTAVO_HOME", f"OCTAVO_{service.upper()}_BIND"} | (
        {"OCTAVO_KERNELS_DIR"} if service == "executor" else set()
    )
    assert {each.partition("=")[0] for each in own - base} == names


@pytest.mark.asyncio
async def test_a_stream_survives_its_executor_which_comes_back_and_takes_work(project: Project) -> None:
    """Killed in the middle of a stream, one of two executors costs not a token, and the engine starts it again."""
    address = project.published("gateway", GATEWAY_PORT)
    request = request_for(QUESTION, 32, ignore_eos=True)
    undisturbed = await generate(address, request)
    before = await wait_load(project, lambda load: len(load.executors) == 2)
    containers = {address_in_network(each): each for each in project.containers("executor")}

    stream = asyncio.create_task(generate(address, request))
    live = await wait_request(project, lambda info: info.completion_tokens >= 4 and bool(info.executors))
    victim = containers[live.executors[0].rpartition(":")[0]]
    await asyncio.to_thread(crash, victim, "octavo-scheduler")
    survived = await stream
    assert survived.choices[0].token_ids == undisturbed.choices[0].token_ids
    assert survived.choices[0].text == undisturbed.choices[0].text

    known = {each.incarnation for each in before.executors}
    after = await wait_load(
        project, lambda load: len(load.executors) == 2 and len({e.incarnation for e in load.executors} - known) == 1
    )
    (returned,) = [each for each in after.executors if each.incarnation not in known]
    await keep_busy(address, 8)
    await wait_load(project, lambda load: steps_of(load, returned.incarnation) > returned.steps)
    restarts = {each["Id"]: each["RestartCount"] for each in project.containers("executor")}
    assert restarts.pop(victim["Id"]) == 1
    assert set(restarts.values()) == {0}


def steps_of(load: Load, incarnation: str) -> int:
    """Return the steps that an executor has finished; 0 where it is not there."""
    return sum(each.steps for each in load.executors if each.incarnation == incarnation)


@pytest.mark.asyncio
async def test_a_scaled_stack_uses_all_of_it(project: Project) -> None:
    """A third executor is found by itself and takes work; a second gateway answers at a port of its own."""
    before = await wait_load(project, lambda load: len(load.executors) == 2)
    known = {each.incarnation for each in before.executors}
    await asyncio.to_thread(project.compose, "up", "-d", "--no-build", "--scale", "executor=3", "--scale", "gateway=2")
    addresses = [project.published("gateway", GATEWAY_PORT, index) for index in (1, 2)]
    assert len(set(addresses)) == 2
    assert {int(each.rpartition(":")[2]) for each in addresses} <= set(GATEWAY_PORTS[1:])
    for address in addresses:
        await wait_serving(address)
    load = await wait_load(project, lambda load: len(load.executors) == 3 and load.gateways == 2)
    assert {each.incarnation for each in load.executors} > known  # who was there was left alone
    (newcomer,) = {each.incarnation for each in load.executors} - known
    await asyncio.gather(*(keep_busy(address, 6) for address in addresses))
    await wait_load(project, lambda load: steps_of(load, newcomer) > 0)

    # Either gateway's admin port answers for the whole cell.
    for index in (1, 2):
        admin = project.published("gateway", ADMIN_PORT, index)
        assert int(admin.rpartition(":")[2]) in ADMIN_PORTS[1:]
        async with AsyncAdminClient(admin) as client:
            assert (await client.get_load()).gateways == 2


@pytest.mark.full
@pytest.mark.asyncio
async def test_an_executor_of_two_processes_gives_the_same_tokens_and_ends_whole(project: Project) -> None:
    """Alone in the cell it serves what the others did. A rank that is killed takes the container down, which comes back
    by itself, and the stream goes on without a token lost.
    """
    address = project.published("gateway", GATEWAY_PORT)
    request = request_for(QUESTION, 32, ignore_eos=True)
    undisturbed = (await generate(address, request)).choices[0].token_ids
    await asyncio.to_thread(project.compose, "up", "-d", "--no-build", "executor-tp")
    (divided,) = with_profiles(project).containers("executor-tp")
    host = address_in_network(divided)
    await wait_load(project, lambda load: host in hosts_of(load))
    await asyncio.to_thread(project.compose, "stop", "executor")
    await wait_load(project, lambda load: hosts_of(load) == {host})
    assert (await generate(address, request)).choices[0].token_ids == undisturbed

    (other_rank,) = other_processes(divided, "executor_svc")
    stream = asyncio.create_task(generate(address, request))
    await wait_request(project, lambda info: info.completion_tokens >= 4)
    await asyncio.to_thread(crash, divided, "octavo-scheduler", other_rank)
    assert (await stream).choices[0].token_ids == undisturbed
    (returned,) = with_profiles(project).containers("executor-tp")
    assert (returned["Id"], returned["RestartCount"]) == (divided["Id"], 1)
    num_others = len(project.containers("executor"))
    await asyncio.to_thread(project.compose, "start", "executor")
    await wait_load(project, lambda load: len(load.executors) == num_others + 1)


def hosts_of(load: Load) -> set[str]:
    """Return the hosts of the executors in session."""
    return {each.address.rpartition(":")[0] for each in load.executors}


def test_the_commands_of_the_pages_work(project: Project) -> None:
    """Whatever README and docs say of `docker compose` is done on this stack, and all that it starts comes to
    serve. Stopping it comes next.
    """
    commands = [words for page in pages() for block in blocks(page) for words in block.commands]
    said = [words[2:] for words in commands if words[:2] == ["docker", "compose"]]
    assert ["down"] in said
    assert any("--scale" in words for words in said)
    for words in said:
        if words != ["down"]:
            project.compose(*words)
    asyncio.run(wait_load(project, lambda load: (len(load.executors), load.gateways) == (3, 2)))


def test_a_stack_that_is_stopped_ends_well_and_one_that_is_removed_leaves_nothing(project: Project) -> None:
    """SIGTERM ends every service with 0 and in time; `down --volumes` takes containers, network and model away."""
    project = with_profiles(project)
    project.compose("stop")
    ended = project.containers()
    assert len(ended) == 7  # the model, two executors and one of two processes, a scheduler, two gateways
    assert {each["State"]["ExitCode"] for each in ended} == {0}
    project.compose("down", "--volumes")
    label = f"label=com.docker.compose.project={project.name}"
    for kind in (["ps", "-a"], ["volume", "ls"], ["network", "ls"]):
        assert docker(*kind, "--quiet", "--filter", label) == ""
