"""Checks of what containers are told: by variables, flags and commands, held to what the programs really read."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

from deploy_objects import ROOT, Check, Rendered, Workload
from kustomize_render import containers

from octavo.cli import _parser
from octavo.models.errors import ModelError
from octavo.models.location import locate
from octavo.rpc.settings import Settings, SettingsError, read, variables_of
from octavo.settings import ExecutorSettings, GatewaySettings, SchedulerSettings, known_variables

SETTINGS: Mapping[str, type[Settings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "executor": ExecutorSettings,
}
SECRETS = {("gateway", "resume-key"): "a-secret-of-32-characters-at-most", ("huggingface", "token"): "token"}
"""The Secrets that docs/kubernetes.md has made, by name and key, with such a value."""
PORT_FIELDS = {"grpc": "port", "http": "http_port", "admin": "admin_port", "metrics": "metrics_port"}
"""Names of container ports, and the setting that each is."""


NAMESPACE = "the-namespace"
"""What a pod is told of where it is."""


class Missing(Exception):  # noqa: N818 - what is missing, not what went wrong
    """Something that a container refers to is not there."""


def image_program(container: Mapping[str, Any]) -> str:
    """Return the service whose image a container runs."""
    return str(container["image"]).rpartition("/")[2].partition(":")[0].removeprefix("octavo-")


def image_environment(program: str) -> dict[str, str]:
    """Return the variables that an image sets."""
    text = re.sub(r"\\\n", " ", (ROOT / "deploy" / f"{program}.Dockerfile").read_text())
    lines = re.findall(r"^ENV (.+)$", text, re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in line.split())


def given_environment(rendered: Rendered, pod: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that the manifests set. Raises Missing."""
    environment: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        environment |= _config_map(rendered, source["configMapRef"]["name"])
    for variable in container.get("env", ()):
        environment[variable["name"]] = _value(rendered, pod, container, variable)
    return environment


def read_settings(rendered: Rendered, workload: Workload) -> Any:
    """Return the settings with which a service's container would start. Raises SettingsError and Missing."""
    program = image_program(workload.main)
    environment = image_environment(program) | given_environment(rendered, workload.pod, workload.main)
    return read(SETTINGS[program], workload.main.get("args", []), environment, known_variables())


def _config_map(rendered: Rendered, name: str) -> dict[str, str]:
    found = rendered.find("ConfigMap", name)
    if found is None:
        raise Missing(f"there is no ConfigMap {name}")
    return dict(found["data"])


def _value(
    rendered: Rendered, pod: Mapping[str, Any], container: Mapping[str, Any], variable: Mapping[str, Any]
) -> str:
    if "value" in variable:
        return _file_from_secret(pod, container, variable["value"])
    ((source, reference),) = variable["valueFrom"].items()
    if source == "configMapKeyRef":
        data = _config_map(rendered, reference["name"])
        if reference["key"] not in data:
            raise Missing(f"ConfigMap {reference['name']} has no {reference['key']}")
        return data[reference["key"]]
    if source == "secretKeyRef":
        key = reference["name"], reference["key"]
        if key not in SECRETS:
            raise Missing(f"nobody is told to make the Secret {key[0]} with {key[1]}")
        return SECRETS[key]
    if source == "fieldRef":
        assert reference["fieldPath"] == "metadata.namespace", reference
        return NAMESPACE
    assert source == "resourceFieldRef", source
    section, _, resource = reference["resource"].partition(".")
    amount = container.get("resources", {}).get(section, {}).get(resource)
    if amount is None:
        raise Missing(f"{variable['name']} is {reference['resource']}, which the container does not say")
    if "divisor" in reference:
        raise Missing(f"{variable['name']} is {reference}: of cores Kubernetes takes no divisor but 1")
    return str(-(-_cores(amount) // 1000))


def _cores(text: str) -> int:
    """Return an amount of processor, in thousandths of a core."""
    return int(text.removesuffix("m")) if text.endswith("m") else 1000 * int(text)


def _file_from_secret(pod: Mapping[str, Any], container: Mapping[str, Any], value: str) -> str:
    """Return a value; a path into a mounted Secret becomes one of a file that is here, so that it can be read."""
    volumes = {each["name"]: each for each in pod.get("volumes", ())}
    for mount in container.get("volumeMounts", ()):
        secret = volumes.get(mount["name"], {}).get("secret")
        if secret is not None and value.startswith(f"{mount['mountPath']}/"):
            if value.removeprefix(f"{mount['mountPath']}/") not in {each["path"] for each in secret["items"]}:
                raise Missing(f"the mounted Secret has no {value}")
            return __file__
    return value


@Check
def settings(rendered: Rendered) -> Iterator[str]:
    """Each service starts with what it is given: it knows the flags, takes the values, and has what it requires."""
    for workload in rendered.services:
        try:
            read_settings(rendered, workload)
        except (SettingsError, Missing) as error:
            yield f"{workload.name}: {error}"


@Check
def own_variables(rendered: Rendered) -> Iterator[str]:
    """No container is given another program's variable, which it would ignore in silence."""
    for workload in rendered.services:
        with contextlib.suppress(Missing):
            given = given_environment(rendered, workload.pod, workload.main)
            own = variables_of(SETTINGS[workload.name])
            for name in sorted(each for each in given if each.startswith("OCTAVO_") and each not in own):
                yield f"{workload.name}: {name} means nothing to it"


@Check
def ports(rendered: Rendered) -> Iterator[str]:
    """Each port of a service is declared under its name, with the number that it listens on, at all addresses."""
    for workload in rendered.services:
        with contextlib.suppress(SettingsError, Missing):
            chosen = read_settings(rendered, workload)
            listens = {name: getattr(chosen, field) for name, field in PORT_FIELDS.items() if hasattr(chosen, field)}
            if workload.ports != listens:
                yield f"{workload.name}: it listens on {listens}, and {workload.ports} is declared"
            if chosen.bind != "0.0.0.0":
                yield f"{workload.name}: nobody reaches it at {chosen.bind}"


@Check
def commands(rendered: Rendered) -> Iterator[str]:
    """What is run in place of an image's own program is a command that Octavo has, for a model that can be named."""
    for workload in rendered.workloads:
        for container in containers(workload.pod):
            if (command := container.get("command")) is None:
                continue
            try:
                environment = given_environment(rendered, workload.pod, container)
            except Missing as error:
                yield f"{workload.name}/{container['name']}: {error}"
                continue
            words = [re.sub(r"\$\((\w+)\)", functools.partial(_expand, environment), word) for word in command]
            if words[0] != "octavo":
                yield f"{workload.name}/{container['name']}: {words[0]} is no command of ours"
                continue
            printed = io.StringIO()
            try:
                with contextlib.redirect_stderr(printed):
                    arguments = _parser().parse_args(words[1:])
                locate(arguments.model)
            except (SystemExit, ModelError) as error:
                yield f"{workload.name}/{container['name']}: {printed.getvalue() or error}"


def _expand(environment: Mapping[str, str], match: re.Match[str]) -> str:
    """Return what a word's $(NAME) becomes: as Kubernetes does it, itself where there is no such variable."""
    return environment.get(match[1], match[0])


@Check
def one_model(rendered: Rendered) -> Iterator[str]:
    """Everybody is told of the same model."""
    names = set()
    for workload in rendered.workloads:
        for container in containers(workload.pod):
            with contextlib.suppress(Missing):
                names.add(given_environment(rendered, workload.pod, container).get("OCTAVO_MODEL"))
    if len(names - {None}) != 1:
        yield f"the model is {sorted(map(str, names - {None}))}"


@Check
def one_cell(rendered: Rendered) -> Iterator[str]:
    """The services of a namespace are a cell of its name: a pod's address may be another namespace's by and by."""
    for workload in rendered.services:
        with contextlib.suppress(SettingsError, Missing):
            chosen = read_settings(rendered, workload).cell
            if chosen != NAMESPACE:
                yield f"{workload.name}: its cell is {chosen!r} in every namespace"


@Check
def devices(rendered: Rendered) -> Iterator[str]:
    """An executor asks for a GPU exactly where it is to use one, with the image and the cache folder for it."""
    executor = rendered.workload("executor")
    with contextlib.suppress(SettingsError, Missing):
        chosen = read_settings(rendered, executor)
        is_gpu = chosen.device == "cuda"
        limits = executor.main["resources"]["limits"]
        if is_gpu != ("nvidia.com/gpu" in limits):
            yield f"the device is {chosen.device}, and the limits are {limits}"
        if is_gpu != executor.main["image"].endswith("-gpu"):
            yield f"the device is {chosen.device}, and the image {executor.main['image']}"
        if chosen.threads is None:
            yield "an executor that is not told of its cores takes all of the node"
        elif 1000 * chosen.threads * chosen.tensor_parallel > _cores(executor.main["resources"]["requests"]["cpu"]):
            yield f"{chosen.tensor_parallel} processes of {chosen.threads} threads have more than was asked for"
        cache = given_environment(rendered, executor.pod, executor.main).get("TRITON_CACHE_DIR", "")
        if is_gpu and not cache.startswith("/tmp/"):
            yield f"compiled kernels go to {cache or 'the home folder'}, which cannot be written"
