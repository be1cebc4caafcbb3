"""Which processes `octavo up` starts, with which flags and ports."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest
from gguf_samples import byte_level_metadata, write_gguf

from octavo.local.plan import BadSettingError, CellPlan, PlanError, PlanOptions, check_settings, plan_cell
from octavo.models import PreparedModel, open_prepared
from octavo.models.prepare import prepare
from octavo.rpc.settings import Settings, read
from octavo.settings import ExecutorSettings, GatewaySettings, SchedulerSettings, known_variables

FREE = {"gateway_port": 0, "scheduler_port": 0, "executor_port": 0, "http_port": 0, "admin_port": 0, "metrics_port": 0}
CLASSES: dict[str, type[Settings]] = {
    "gateway": GatewaySettings,
    "scheduler_svc": SchedulerSettings,
    "executor_svc": ExecutorSettings,
}


@pytest.fixture
def model(tmp_path: Path) -> PreparedModel:
    """A prepared model."""
    path = write_gguf(tmp_path / "m.gguf", byte_level_metadata())
    prepare(str(path))
    return open_prepared(str(path))


def settings_of(plan: CellPlan) -> dict[str, Settings]:
    """Read each planned command line as the service itself would, in an empty environment."""
    return {
        service.name: read(CLASSES[service.command[2]], service.command[3:], {}, known_variables())
        for service in plan.services
    }


def test_the_services_find_one_another(model: PreparedModel) -> None:
    """Gateway knows the scheduler, the scheduler every executor, all the same model; each port is another."""
    plan = plan_cell(model, PlanOptions(num_executors=3, **FREE), {})
    settings = settings_of(plan)
    assert list(settings) == ["gateway", "scheduler", "executor-0", "executor-1", "executor-2"]
    addresses = {service.name: service.address for service in plan.services}
    metrics = {service.name: service.metrics_address for service in plan.services}
    assert len({*addresses.values(), *metrics.values(), plan.admin_address, plan.http_address}) == 12
    assert plan.admin_address == f"127.0.0.1:{settings['gateway'].admin_port}"
    assert plan.http_address == f"127.0.0.1:{settings['gateway'].http_port}"
    assert plan.gateway_address == addresses["gateway"]
    assert settings["gateway"].scheduler == addresses["scheduler"]
    assert settings["scheduler"].executors.split(",") == [addresses[f"executor-{index}"] for index in range(3)]
    for name, each in settings.items():
        assert addresses[name] == f"{each.bind}:{each.port}"
        assert metrics[name] == f"{each.bind}:{each.metrics_port}"
        assert getattr(each, "model", str(model.path)) == str(model.path)


def test_flags_reach_the_services_that_know_them(model: PreparedModel) -> None:
    """A shared setting goes to all, another to its own service only."""
    extra = {"cell": "blue", "dtype": "float32", "depth": "1", "kv_memory": "64MiB", "check_invariants": "true"}
    extra |= {"ops": "my_package.my_ops", "passes": "all,-liveness", "build_ahead": "false"}
    settings = settings_of(plan_cell(model, PlanOptions(extra=extra, **FREE), {}))
    assert {each.cell for each in settings.values()} == {"blue"}
    assert (settings["scheduler"].depth, settings["scheduler"].check_invariants) == (1, True)
    executor = settings["executor-0"]
    assert (executor.dtype, executor.kv_memory) == ("float32", 64 << 20)
    assert (executor.ops, executor.passes, executor.build_ahead) == ("my_package.my_ops", "all,-liveness", False)


def test_several_executors_share_cores_and_memory(model: PreparedModel) -> None:
    """Each would take all cores and most of the memory by itself; a choice of the user's stays as it is."""
    cores = os.cpu_count() or 1
    one = settings_of(plan_cell(model, PlanOptions(**FREE), {}))
    assert one["executor-0"].threads is None
    two = settings_of(plan_cell(model, PlanOptions(num_executors=2, **FREE), {}))
    assert two["executor-1"].threads == max(1, cores // 2)
    assert one["executor-0"].kv_memory is None
    assert 0 < two["executor-0"].kv_memory == two["executor-1"].kv_memory < psutil.virtual_memory().total // 4
    extra = {"threads": "7", "kv_memory": "1MiB"}
    chosen = settings_of(plan_cell(model, PlanOptions(num_executors=2, extra=extra, **FREE), {}))
    assert (chosen["executor-1"].threads, chosen["executor-1"].kv_memory) == (7, 1 << 20)
    variables = {"OCTAVO_THREADS": "7", "OCTAVO_KV_MEMORY": "1MiB"}
    by_variable = plan_cell(model, PlanOptions(num_executors=2, **FREE), variables)
    assert {"--threads", "--kv-memory"}.isdisjoint(by_variable.services[-1].command)


def test_several_executors_on_one_gpu_are_told_what_each_may_have(model: PreparedModel) -> None:
    """The memory of a card is measured by who loads: with others loading beside it, the user has to say."""
    for options, environ in (
        (PlanOptions(num_executors=2, extra={"device": "cuda"}, **FREE), {}),
        (PlanOptions(num_executors=2, **FREE), {"OCTAVO_DEVICE": "cuda"}),
    ):
        with pytest.raises(PlanError, match=r"^--executors 2: on one GPU") as caught:
            plan_cell(model, options, environ)
        assert "--kv-memory" in str(caught.value.hint)
    chosen = PlanOptions(num_executors=2, extra={"device": "cuda", "kv_memory": "1GiB"}, **FREE)
    assert settings_of(plan_cell(model, chosen, {}))["executor-1"].kv_memory == 1 << 30
    one = PlanOptions(extra={"device": "cuda"}, **FREE)
    assert settings_of(plan_cell(model, one, {}))["executor-0"].device == "cuda"


def test_a_length_beyond_the_model_s_end_is_refused_at_once(model: PreparedModel) -> None:
    """The flag or the variable is named with the end of the model; the end itself is fine."""
    end = model.max_position_embeddings
    with pytest.raises(PlanError, match=rf"^--max-model-len={end + 1}: model m ends at {end} tokens"):
        plan_cell(model, PlanOptions(extra={"max_model_len": str(end + 1)}, **FREE), {})
    with pytest.raises(PlanError, match=rf"^OCTAVO_MAX_MODEL_LEN={end + 1}: "):
        plan_cell(model, PlanOptions(**FREE), {"OCTAVO_MAX_MODEL_LEN": str(end + 1)})
    plan_cell(model, PlanOptions(extra={"max_model_len": str(end)}, **FREE), {})


@pytest.mark.parametrize("service", ["gateway", "scheduler", "executor", "http", "admin", "metrics"])
def test_a_taken_port_is_named_with_its_flag(model: PreparedModel, service: str) -> None:
    """Nothing is moved to another port behind the user's back."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PlanError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--{service}-port"):
            plan_cell(model, PlanOptions(**(FREE | {f"{service}_port": port})), {})


def test_all_taken_ports_are_named_at_once(model: PreparedModel) -> None:
    """Nobody has to free one after the other to learn of the next; what has them here is no cell."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        first, second = one.getsockname()[1], other.getsockname()[1]
        # A listener that never answers is asked only where the gateway was to be, which is free here.
        ports = FREE | {"scheduler_port": first, "executor_port": second}
        with pytest.raises(PlanError) as raised:
            plan_cell(model, PlanOptions(**ports), {})
    assert str(raised.value) == (
        f"cannot listen on 127.0.0.1:{first} (Address already in use; --scheduler-port), "
        f"127.0.0.1:{second} (Address already in use; --executor-port)"
    )
    assert raised.value.hint == "stop what uses them, or choose others by these flags (0 picks a free one)"


def test_two_services_cannot_have_one_port(model: PreparedModel) -> None:
    """Ports that collide within the plan are found before anything starts."""
    port = free_run(1)
    with pytest.raises(PlanError, match=rf":{port}.*--scheduler-port"):
        plan_cell(model, PlanOptions(**(FREE | {"gateway_port": port, "scheduler_port": port})), {})


def test_executors_take_the_ports_after_the_first(model: PreparedModel) -> None:
    """`--executor-port P --executors 2` listens on P and P + 1."""
    first = free_run(2)
    plan = plan_cell(model, PlanOptions(num_executors=2, **(FREE | {"executor_port": first})), {})
    assert [service.address for service in plan.services[2:]] == [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]


def test_executors_leave_out_the_ports_of_the_rest_of_the_cell(model: PreparedModel) -> None:
    """The usual admin port comes right after the first executor's: a second executor takes the port behind it."""
    first = free_run(3)
    ports = FREE | {"executor_port": first, "admin_port": first + 1}
    plan = plan_cell(model, PlanOptions(num_executors=2, **ports), {})
    assert [service.address for service in plan.services[2:]] == [f"127.0.0.1:{first}", f"127.0.0.1:{first + 2}"]
    assert plan.admin_address == f"127.0.0.1:{first + 1}"


def test_metrics_pages_take_the_ports_after_the_gateway_s(model: PreparedModel) -> None:
    """`--metrics-port P`: gateway P, scheduler P + 1, executors from P + 2."""
    first = free_run(4)
    plan = plan_cell(model, PlanOptions(num_executors=2, **(FREE | {"metrics_port": first})), {})
    assert [service.metrics_address for service in plan.services] == [f"127.0.0.1:{first + i}" for i in range(4)]


def test_ports_come_from_variables_where_no_flag_is_given(model: PreparedModel) -> None:
    """`octavo up` reads the services' own variables, and a flag wins over them; further executors come after."""
    first = free_run(2)
    variables = {f"OCTAVO_{name}_PORT": "0" for name in ("GATEWAY", "SCHEDULER", "EXECUTOR", "ADMIN")}
    variables |= {"OCTAVO_GATEWAY_METRICS_PORT": "0", "OCTAVO_SCHEDULER_METRICS_PORT": "0"}
    variables |= {"OCTAVO_EXECUTOR_METRICS_PORT": str(first)}
    plan = plan_cell(model, PlanOptions(num_executors=2), variables)
    taken = {service.address.split(":")[1] for service in plan.services} | {plan.admin_address.split(":")[1]}
    assert {"50051", "50052", "50053", "50054"}.isdisjoint(taken)
    assert [service.metrics_address for service in plan.services[2:]] == [f"127.0.0.1:{first + i}" for i in range(2)]
    with pytest.raises(PlanError, match="--gateway-port"):
        plan_cell(model, PlanOptions(gateway_port=70_000), variables)


def test_each_flag_stands_once_in_a_command(model: PreparedModel) -> None:
    """The plan's ports are not given beside what the user gave for the same setting in another way."""
    for service in plan_cell(model, PlanOptions(extra={"cell": "blue"}, **FREE), {}).services:
        flags = [text for text in service.command if text.startswith("--")]
        assert len(flags) == len(set(flags))


def test_bad_flags_and_variables_are_named_before_anything_starts(model: PreparedModel) -> None:
    """The services' own reading decides, so up and service agree on what is valid."""
    with pytest.raises(PlanError, match="--dtype='int3'"):
        plan_cell(model, PlanOptions(extra={"dtype": "int3"}, **FREE), {})
    with pytest.raises(PlanError, match="OCTAVO_DEPHT"):
        plan_cell(model, PlanOptions(**FREE), {"OCTAVO_DEPHT": "2"})


def test_only_the_gateway_listens_elsewhere(model: PreparedModel) -> None:
    """`--bind` opens the public API; the services behind it stay on loopback, and so do local clients."""
    plan = plan_cell(model, PlanOptions(bind="0.0.0.0", **FREE), {})
    settings = settings_of(plan)
    assert settings["gateway"].bind == "0.0.0.0"
    assert plan.gateway_address.startswith("127.0.0.1:")
    assert {settings["scheduler"].bind, settings["executor-0"].bind} == {"127.0.0.1"}


def free_run(count: int) -> int:
    """Return the first of `count` ports in a row on which nobody listens."""
    return next(port for port in range(20_000, 30_000) if all(is_free(port + i) for i in range(count)))


def is_free(port: int) -> bool:
    """Tell whether nobody listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_passes_that_nothing_has_are_refused_before_anything_starts() -> None:
    """With those there are; where there are operators of the user's own, these may have the name."""
    for passes in ("all,-views,-veiws", "veiws"):
        with pytest.raises(BadSettingError, match="--passes: 'veiws' is none of all, none, merge_qkv"):
            check_settings(PlanOptions(extra={"passes": passes}), {})
    check_settings(PlanOptions(extra={"passes": "veiws", "ops": "my.ops"}), {})
    check_settings(PlanOptions(extra={"passes": "none, views"}), {})


def test_an_address_of_another_machine_is_the_fault_of_bind(model: PreparedModel) -> None:
    """And not of the ports, none of which would do."""
    with pytest.raises(PlanError, match="--bind") as raised:
        plan_cell(model, PlanOptions(bind="192.0.2.1", **FREE), {})
    assert "--gateway-port" not in str(raised.value)
