"""The chart under real helm: lint, schema, what it renders, and that each value does something."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from pdserve.core.config import ServiceConfig, WorkerConfig, load
from pdserve.core.tls import TlsConfig
from pdserve.decode_service.__main__ import RoleConfig
from pdserve.engine.config import EngineConfig
from pdserve.router.config import RouterConfig, RouterServiceConfig
from tests.helm.chart import (
    CHART,
    HELM_VERSIONS,
    SERVICES,
    VALUES,
    environment,
    find,
    pod_specs,
    render,
    render_text,
    run,
    workloads,
)

KUBERNETES = "1.37"
CONFIGS: dict[str, tuple[type, ...]] = {
    "router": (RouterServiceConfig, TlsConfig, RouterConfig),
    "prefill": (ServiceConfig, WorkerConfig, TlsConfig, EngineConfig),
    "decode": (ServiceConfig, WorkerConfig, TlsConfig, EngineConfig, RoleConfig),
}
FIELDS = {"status.podIP": "10.0.0.7", "metadata.name": "release-pdserve-decode-0"}
every_version = pytest.mark.parametrize("version", HELM_VERSIONS)
every_values = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())


@every_version
@every_values
def test_lint(version: str, values: Path | None) -> None:
    done = run(version, "lint", "--strict", values=values)
    assert done.returncode == 0, done.stdout + done.stderr


@every_values
def test_rendered_objects_are_valid(values: Path | None) -> None:
    documents = render(values)
    assert {d["kind"] for d in documents} >= {"Deployment", "StatefulSet", "Service"}
    for document in documents:
        if document["kind"] != "PodMonitor":  # a custom resource: no schema
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


@every_values
def test_both_helms_render_the_same(values: Path | None) -> None:
    one, other = (render(values, version=version) for version in HELM_VERSIONS)

    def key(document: dict[str, Any]) -> tuple[str, str]:
        return document["kind"], document["metadata"]["name"]

    assert sorted(one, key=key) == sorted(other, key=key)


@every_version
@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("replicaCount=2", "replicaCount"),
        ("router.replicaz=2", "replicaz"),
        ("decode.cache.siez=1Gi", "siez"),
        ("router.replicas=none", "replicas"),
        ("router.replicas=0", "replicas"),
        ("decode.role=prefill", "role"),
        ("engine.device=tpu", "device"),
        ("engine.pageSize=0", "pageSize"),
        ("engine.schedulingPolicy=lottery", "schedulingPolicy"),
        ("engine.preemptionMode=drop", "preemptionMode"),
        ("engine.batching=none", "batching"),
        ("engine.swapSpaceBytes=-1", "swapSpaceBytes"),
        ("engine.tpotSloMs=0", "tpotSloMs"),
        ("logLevel=loud", "logLevel"),
        ("router.service.port=70000", "port"),
        ("redis.maxmemory=lots", "maxmemory"),
        ("redis.url=http://redis", "url"),
        ("prefill.cache.size=big", "size"),
        ("prefill.resources.limit.memory=1Gi", "limit"),
    ],
)
def test_schema_refuses(version: str, setting: str, word: str) -> None:
    done = run(version, "template", "--set", setting)
    assert done.returncode != 0
    assert word in done.stderr and "schema" in done.stderr


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["prefill.replicas=0"], "nobody computes prompts"),
        (["redis.enabled=false"], "redis.url or redis.existingSecret"),
        (["redis.url=redis://elsewhere:6379/0"], "set redis.enabled=false"),
        (["engine.batching=static"], "engine.batching static needs decode.role mixed"),
    ],
)
def test_combinations_that_cannot_work_are_refused(settings: list[str], word: str) -> None:
    done = run(HELM_VERSIONS[0], "template", "--set", ",".join(settings))
    assert done.returncode != 0
    assert word in done.stderr


@every_values
def test_command_lines_and_environment_are_understood(values: Path | None) -> None:
    """Flags go through the real parsers; variables named PDSERVE_* are options that exist."""
    seen = set()
    for component, spec in pod_specs(render(values)):
        if component not in SERVICES:
            continue
        seen.add(component)
        container = spec["containers"][0]
        command, *flags = container["args"]
        assert command == component
        environ = environment(container, FIELDS)
        sections = {cls.__name__: cls for cls in CONFIGS[component]}
        options = {k: v for config in load(command, "", sections, flags, environ) for k, v in vars(config).items()}
        variables = {name.removeprefix("PDSERVE_").lower() for name in environ if name.startswith("PDSERVE_")}
        assert variables - set(options) == {"cache"}
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        listening = (options["host"], options["port"], options["metrics_port"])
        assert listening == ("0.0.0.0", ports["grpc"], ports["metrics"])
        assert options["advertise_address"] == f"10.0.0.7:{ports['grpc']}"
        if component == "prefill":
            assert options["data_port"] == ports["data"]
            assert options["advertise_data_address"] == f"10.0.0.7:{ports['data']}"
        lease_s = options.get("kv_lease_s", 0)
        assert spec["terminationGracePeriodSeconds"] > options["drain_grace_s"] + lease_s
    assert seen == {c for c, _ in workloads(render(values))} - {"redis"}


@every_values
def test_pods_are_locked_down_and_probed(values: Path | None) -> None:
    for component, spec in pod_specs(render(values)):
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert {"requests", "limits"} <= set(container["resources"])
        if component in SERVICES:
            container = spec["containers"][0]
            ready = "pdserve.v1.Inference" if component == "router" else "pdserve.v1.Worker"
            probes = [container[f"{kind}Probe"]["grpc"]["service"] for kind in ("startup", "liveness", "readiness")]
            assert probes == ["", "", ready]
            startup = container["startupProbe"]
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
            assert spec["initContainers"][0]["args"][0] == "fetch-model"


def test_services_reach_their_pods() -> None:
    documents = render(VALUES["cpu"])
    templates = {c: d["spec"]["template"] for c, d in workloads(documents)}
    for document in documents:
        if document["kind"] != "Service":
            continue
        component = document["metadata"]["labels"]["app.kubernetes.io/component"]
        template = templates[component]
        assert document["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        names = {p["name"] for c in template["spec"]["containers"] for p in c["ports"]}
        assert {p["targetPort"] for p in document["spec"]["ports"]} <= names
    assert find(documents, "Service", "router")["spec"]["ports"][0]["appProtocol"] == "kubernetes.io/h2c"
    (test_pod,) = (d for d in documents if d["kind"] == "Pod")
    router = find(documents, "Service", "router")
    address = f"--router={router['metadata']['name']}:{router['spec']['ports'][0]['port']}"
    assert address in test_pod["spec"]["containers"][0]["args"]


def test_redis_keeps_what_it_is_given() -> None:
    spec = find(render(), "StatefulSet", "redis")["spec"]
    command = " ".join(spec["template"]["spec"]["containers"][0]["args"])
    assert "--appendonly yes" in command and "--maxmemory-policy noeviction" in command
    assert spec["volumeClaimTemplates"][0]["metadata"]["name"] == "data"


def test_gpu_values_ask_for_gpus_and_an_outside_redis() -> None:
    documents = render(VALUES["gpu"])
    for component in ("prefill", "decode"):
        container = find(documents, "StatefulSet", component)["spec"]["template"]["spec"]["containers"][0]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert "--kv-cache-memory-bytes=34359738368" in container["args"]
        (redis,) = (v for v in container["env"] if v["name"] == "PDSERVE_REDIS_URL")
        assert redis["valueFrom"]["secretKeyRef"] == {"name": "redis-url", "key": "url"}
    assert "redis" not in dict(workloads(documents))


def test_minimal_values_render_the_least() -> None:
    documents = render(VALUES["minimal"])
    assert sorted(d["kind"] for d in documents) == ["Deployment", "Pod", "Service", "Service", "StatefulSet"]
    container = find(documents, "StatefulSet", "decode")["spec"]["template"]["spec"]["containers"][0]
    assert "--role=mixed" in container["args"]


def _options(component: str, *settings: str) -> dict[str, object]:
    """What the real parser makes of the flags of a service."""
    (spec,) = (spec for name, spec in pod_specs(render(None, "--set", ",".join(settings))) if name == component)
    container = spec["containers"][0]
    command, *flags = container["args"]
    sections = {cls.__name__: cls for cls in CONFIGS[component]}
    configs = load(command, "", sections, flags, environment(container, FIELDS))
    return {name: value for config in configs for name, value in vars(config).items()}


def test_options_of_decode_reach_the_workers_that_take_them() -> None:
    given = {
        "engine.preemptionMode": "swap",
        "engine.swapSpaceBytes": 1 << 30,
        "engine.tpotSloMs": 120,
        "engine.enablePrefixCaching": "false",
        "engine.schedulingPolicy": "sjf",
        "engine.longPrefillTokenThreshold": 512,
        "engine.maxLongPartialPrefills": 2,
    }
    settings = [f"{name}={value}" for name, value in given.items()]
    decode, prefill = (_options(component, *settings) for component in ("decode", "prefill"))
    assert (decode["preemption_mode"], decode["swap_space_bytes"], decode["tpot_slo_ms"]) == ("swap", 1 << 30, 120)
    assert (prefill["preemption_mode"], prefill["swap_space_bytes"], prefill["tpot_slo_ms"]) == ("auto", 0, None)
    for options in (decode, prefill):
        assert (options["enable_prefix_caching"], options["scheduling_policy"]) == (False, "sjf")
        assert (options["long_prefill_token_threshold"], options["max_long_partial_prefills"]) == (512, 2)


def test_a_fixed_batch_of_mixed_workers() -> None:
    mixed = ["decode.role=mixed", "prefill.replicas=0"]
    options = _options("decode", *mixed, "engine.batching=dynamic,engine.batchSize=8,engine.batchWindowMs=0")
    assert (options["batching"], options["batch_size"], options["batch_window_ms"]) == ("dynamic", 8, 0)


def test_tls_is_required_of_all_and_probes_stay_plain() -> None:
    settings = "tls.secretName=certificates"
    for component, spec in pod_specs(render(None, "--set", settings)):
        if component not in SERVICES:
            continue
        options, container = _options(component, settings), spec["containers"][0]
        assert options["require_tls"] and options["tls_peer_name"] == "pdserve"
        (mount,) = (m["mountPath"] for m in container["volumeMounts"] if m["name"] == "tls")
        (secret,) = (v["secret"] for v in spec["volumes"] if v["name"] == "tls")
        assert secret["secretName"] == "certificates"
        files = [options[f"tls_{name}_file"] for name in ("cert", "key", "ca")]
        assert files == [f"{mount}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probed = {container[f"{kind}Probe"]["grpc"]["port"] for kind in ("startup", "liveness", "readiness")}
        assert probed == {ports["grpc"] if component == "router" else ports["health"]}
        assert options.get("health_port") == (None if component == "router" else ports["health"])


def test_dashboard_is_shipped_as_it_is() -> None:
    (config_map,) = (d for d in render() if d["kind"] == "ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    shipped = json.loads(config_map["data"]["pdserve.json"])
    assert shipped == json.loads((CHART / "dashboards" / "pdserve.json").read_text())


# ---- every value does something -------------------------------------------------------------------------------------

# What must be set for a change of a value to show (redis.* needs a URL elsewhere, and so on).
OUTSIDE = "redis.enabled=false,redis.url=redis://elsewhere:6379/0"
SECRET = "redis.enabled=false,redis.existingSecret.name=other"
GIVEN = {
    "redis.url": OUTSIDE,
    "redis.existingSecret.name": SECRET,
    "redis.existingSecret.key": SECRET,
    "prefill.cache.storageClassName": "prefill.cache.persistent=true",
    "decode.cache.storageClassName": "decode.cache.persistent=true",
    "observability.podMonitor.interval": "observability.podMonitor.enabled=true",
    "observability.podMonitor.labels": "observability.podMonitor.enabled=true",
    "engine.batching": "decode.role=mixed",
    "tls.peerName": "tls.secretName=certificates",
}
# Changes of values whose allowed values are few.
CHANGES = {
    "redis.enabled": OUTSIDE,
    "redis.url": "redis.url=redis://other:6379/0",
    "redis.maxmemory": "redis.maxmemory=9mb",
    "observability.podMonitor.interval": "observability.podMonitor.interval=9s",
    "otlpTracesEndpoint": "otlpTracesEndpoint=http://collector:4317",
    "engine.dtype": "engine.dtype=float16",
    "engine.device": "engine.device=cuda",
    "engine.schedulingPolicy": "engine.schedulingPolicy=fair",
    "engine.preemptionMode": "engine.preemptionMode=recompute",
    "engine.batching": "engine.batching=static",
    "decode.role": "decode.role=mixed",
    "logLevel": "logLevel=debug",
    "router.service.type": "router.service.type=NodePort",
    "image.pullPolicy": "image.pullPolicy=Always",
    "redis.image.pullPolicy": "redis.image.pullPolicy=Never",
}


def _leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            yield from _leaves(value, name)
        else:
            yield name, value


def _values() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load((CHART / "values.yaml").read_text(), yaml.CSafeLoader)
    return loaded


def _change(name: str, value: object) -> list[str]:
    """Helm's words that set a value to another one of its type."""
    last = name.rsplit(".", 1)[-1]
    if name in CHANGES:
        return ["--set", CHANGES[name]]
    match value:
        case bool():
            return ["--set", f"{name}={str(not value).lower()}"]
        case int() | None:
            return ["--set", f"{name}={(value or 0) + 7}"]
        case dict():
            return ["--set-string", f"{name}.key=value"]
        case list():
            return ["--set", f"{name}[0]=--word" if last == "extraArgs" else f"{name}[0].name=word"]
        case _:
            return ["--set-string", f"{name}={'9Gi' if last in ('size', 'memory') else '9'}"]


@pytest.mark.parametrize(("name", "value"), list(_leaves(_values())), ids=lambda v: v if isinstance(v, str) else "")
def test_value_does_something(name: str, value: object) -> None:
    given = ["--set", GIVEN[name]] if name in GIVEN else []
    assert render_text(None, *given) != render_text(None, *given, *_change(name, value))


def test_schema_and_values_name_the_same() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values: dict[str, Any], node: dict[str, Any], where: str) -> None:
        properties = set(node["properties"]) - {"global"}
        assert set(values) == properties, where
        assert node["additionalProperties"] is False, where
        for name, value in values.items():
            child = node["properties"][name]
            if "$ref" in child:
                child = schema["definitions"][child["$ref"].rsplit("/", 1)[1]]
            if isinstance(value, dict) and "properties" in child:
                compare(value, child, f"{where}.{name}")

    compare(_values(), schema, "values")
