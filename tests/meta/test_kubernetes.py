"""The Kubernetes manifests are valid by pinned schemas, agree with the roles, and restrict connections."""

import copy
import os
import shutil

import jsonschema
import pytest
import yaml
from baton.cluster.config.load import load_config
from baton.cluster.config.roles import DecodeConfig, PrefillConfig, RouterConfig
from baton.cluster.telemetry.metrics import RouterMetrics, RouterRecord
from baton.deploy.cli.findings import OK, check_keys
from baton.deploy.keys.keys import init
from baton.tests.meta.kubernetes.manifests import (
    KUBERNETES,
    OVERLAYS,
    ROOT,
    container_of,
    kustomized,
    named,
    needs,
    parsed,
    pod_of,
    run,
    validate,
    workload,
)
from baton.tests.meta.kubernetes.policies import Pod, is_allowed, labels_of, selects

ROLES = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
kubectl = needs("kubectl")


def documents(paths):
    return [document for path in paths for document in yaml.safe_load_all(path.read_text()) if document]


BASE = documents(
    path for path in sorted((KUBERNETES / "base").glob("*.yaml")) if path.name != "kustomization.yaml"
)


@pytest.mark.parametrize("document", BASE, ids=lambda d: f"{d['kind']}/{d['metadata']['name']}")
def test_the_base_is_valid(document):
    validate(document)


@kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_valid_and_keeps_every_object_of_the_base(overlay):
    assert set(named(BASE)) <= set(named(kustomized(overlay)))
    for document in kustomized(overlay):
        assert document["metadata"]["namespace"] == "baton"
        validate(document)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d["spec"].update(replicas="one"),
        lambda d: d["spec"].update(replica=1),
        lambda d: d["spec"]["template"]["spec"]["containers"][0].pop("name"),
        lambda d: d["spec"].pop("selector"),
    ],
    ids=["a wrong type", "a misspelt field", "a missing field", "no selector"],
)
def test_a_wrong_manifest_is_detected(damage):
    document = copy.deepcopy(workload(BASE, "router"))
    damage(document)
    with pytest.raises(jsonschema.ValidationError):
        validate(document)


@kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("role", ROLES)
def test_a_role_accepts_the_settings_of_its_pod(overlay, role, tmp_path):
    config = next(d for d in kustomized(overlay) if d["kind"] == "ConfigMap")
    (tmp_path / "baton.toml").write_text(config["data"]["baton.toml"])
    name, flag, path, *more = container_of(kustomized(overlay), role)["args"]
    assert (name, flag, path) == (role, "--config", "/etc/baton/baton.toml")
    given = [entry for entry in container_of(kustomized(overlay), role)["env"] if "value" in entry]
    env = {entry["name"]: entry["value"].replace("$(POD_IP)", "10.0.0.9") for entry in given}
    read = load_config(ROLES[role], [f"--config={tmp_path}/baton.toml", *more], env)
    assert_files_are_mounted(read, pod_of(kustomized(overlay), role))
    ports = {port["containerPort"] for port in container_of(kustomized(overlay), role)["ports"]}
    if role == "router":
        assert ports == {read.port, read.probe_port, int(read.control_bind.rpartition(":")[2])}
    elif role == "prefill":
        assert ports == {int(read.kv_bind.rpartition(":")[2]), read.kv_bulk_port, read.metrics_port}
        assert read.kv_advertise == "tcp://10.0.0.9:7200"
    else:
        assert ports == {int(read.prefix_bind.rpartition(":")[2]), read.prefix_bulk_port, read.metrics_port}
        assert read.prefix_advertise == "tcp://10.0.0.9:7300"
    pause = int(container_of(kustomized(overlay), role)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert (
        pod_of(kustomized(overlay), role)["terminationGracePeriodSeconds"] > read.drain_timeout_s + pause + 10
    )


def assert_files_are_mounted(read, pod):
    """Every secret file that a role is told of comes as a folder, which alone follows a Secret that is
    renewed; nobody else of the pod may read it, and no Secret is mounted that it is not told of.
    """
    assert read.keys == "/keys"
    files = [getattr(read, name, "") for name in ("tls_cert", "tls_key", "api_keys")]
    secrets = {volume["name"]: volume["secret"] for volume in pod["volumes"] if "secret" in volume}
    mounts = {
        mount["mountPath"]: mount
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["name"] in secrets
    }
    assert set(mounts) == {read.keys} | {file.rpartition("/")[0] for file in files if file}
    assert all(
        mount["readOnly"] and set(mount) == {"name", "mountPath", "readOnly"} for mount in mounts.values()
    )
    given = {
        f"{path}/{item['path']}" for path, mount in mounts.items() for item in secrets[mount["name"]]["items"]
    }
    assert given == {file for file in files if file} | {f"/keys/{read.role}.key", "/keys/peers.json"}
    assert {secret["defaultMode"] for secret in secrets.values()} == {0o440}


@kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_and_scrapers_speak_tls_where_the_router_does(overlay):
    found = kustomized(overlay)
    container = container_of(found, "router")
    has_tls = any(word.startswith("--tls-cert=") for word in container["args"])
    assert has_tls == (overlay == "secured")
    name = "https" if has_tls else "http"
    assert {"name": name, "containerPort": 8000} in container["ports"]
    asked = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert {(probe["port"], probe.get("scheme", "HTTP")) for probe in asked} == {("probes", "HTTP")}
    assert {"name": "probes", "containerPort": 8081} in container["ports"]
    (port,) = named(found)["Service", "baton"]["spec"]["ports"]
    assert port == {"name": name, "port": 443 if has_tls else 80, "targetPort": name}
    for monitor in (d for d in found if (d["kind"], d["metadata"]["name"]) == ("PodMonitor", "baton-router")):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] == name
        assert (endpoint.get("scheme"), "tlsConfig" in endpoint) == (
            ("https", True) if has_tls else (None, False)
        )
        assert ("authorization" in endpoint) == any(
            word.startswith("--api-keys=") for word in container["args"]
        )


@kubectl
def test_the_components_go_with_an_overlay_that_has_no_monitor(tmp_path):
    here = os.path.relpath(KUBERNETES, tmp_path.resolve())
    whole = {
        "resources": [f"{here}/overlays/cpu-demo"],
        "components": [f"{here}/components/{c}" for c in ("api-keys", "tls")],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    found = parsed(run("kubectl", "kustomize", str(tmp_path)))
    assert set(named(found)) == set(named(kustomized("cpu-demo")))
    for document in found:
        validate(document)
    ours, secured = (pod_of(documents, "router") for documents in (found, kustomized("secured")))
    assert sorted(ours["containers"][0]["args"]) == sorted(secured["containers"][0]["args"])
    assert {volume["name"] for volume in ours["volumes"]} == {volume["name"] for volume in secured["volumes"]}


VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


@kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_may_run_where_the_restricted_profile_is_enforced(overlay):
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    pods = [
        d["spec"]["template"]["spec"]
        for d in kustomized(overlay)
        if d["kind"] in ("Deployment", "StatefulSet", "Job")
    ]
    assert len(pods) == 4
    for pod in pods:
        own = pod["securityContext"]
        assert (own["runAsNonRoot"], own["runAsUser"], own["seccompProfile"]) == (
            True,
            10001,
            {"type": "RuntimeDefault"},
        )
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all(set(volume) - {"name"} <= VOLUMES for volume in pod["volumes"])
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert all("hostPort" not in port for port in container.get("ports", []))


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_has_its_own_secret_key_alone(role, tmp_path):
    pod = pod_of(BASE, role)
    assert pod["automountServiceAccountToken"] is False
    keys = next(volume["secret"] for volume in pod["volumes"] if "secret" in volume)
    init(tmp_path / "host", list(ROLES), "here")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    for item in keys["items"]:
        shutil.copy(tmp_path / "host" / item["key"], mounted / item["path"])
    assert [finding.level for finding in check_keys(mounted, [role], 0.0)] == [OK]
    assert sorted(path.name for path in mounted.iterdir()) == sorted([f"{role}.key", "peers.json"])


@pytest.mark.parametrize("role", ROLES)
def test_ready_and_live_are_different_questions(role):
    container = container_of(BASE, role)
    paths = {
        kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")
    }
    assert (paths["readiness"], paths["liveness"]) == ("/ready", "/health")
    assert container["startupProbe"]["failureThreshold"] > container["livenessProbe"]["failureThreshold"]


def test_services_reach_pods_at_ports_that_they_have():
    for service in (d for d in BASE if d["kind"] == "Service"):
        role = service["spec"]["selector"]["app.kubernetes.io/component"]
        names = {port["name"] for port in container_of(BASE, role)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


# --- who may speak to whom ----------------------------------------------------------------------------------


def pod(component):
    return Pod(name=component, labels=labels_of(component))


ROUTER, PREFILL, DECODE, KEYS = pod("router"), pod("prefill"), pod("decode"), pod("keys")
CLIENT = Pod(name="client", labels={"app": "client"})
ALLOWED = [
    (CLIENT, ROUTER, 8000), (PREFILL, ROUTER, 7100), (DECODE, ROUTER, 7100), (DECODE, PREFILL, 7200),
    (DECODE, PREFILL, 7201), (PREFILL, DECODE, 7300), (PREFILL, DECODE, 7301),
]  # fmt: skip
FORBIDDEN = [
    (CLIENT, ROUTER, 7100), (CLIENT, PREFILL, 7200), (CLIENT, DECODE, 9100), (CLIENT, PREFILL, 9100),
    (ROUTER, PREFILL, 7200), (ROUTER, DECODE, 9100), (PREFILL, DECODE, 9100), (PREFILL, PREFILL, 7200),
    (DECODE, DECODE, 9100), (PREFILL, CLIENT, 443), (DECODE, CLIENT, 443), (ROUTER, CLIENT, 443),
    (PREFILL, ROUTER, 8000), (DECODE, PREFILL, 9100), (ROUTER, ROUTER, 7100), (DECODE, DECODE, 7300),
    (ROUTER, DECODE, 7300), (CLIENT, DECODE, 7301),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "port"), ALLOWED)
def test_s34_the_connections_of_serving_are_allowed(source, target, port):
    assert is_allowed(BASE, source, target, port)


@pytest.mark.parametrize(("source", "target", "port"), FORBIDDEN)
def test_s34_no_other_connection_is_allowed(source, target, port):
    assert not is_allowed(BASE, source, target, port)


def test_s34_only_monitoring_scrapes_workers_and_workers_may_use_dns():
    scraper = {"name": "p", "labels": {"app": "prometheus"}}
    assert is_allowed(BASE, Pod(**scraper, namespace={"baton.monitoring": "true"}), DECODE, 9100)
    assert not is_allowed(BASE, Pod(**scraper, namespace={"kubernetes.io/metadata.name": "x"}), DECODE, 9100)
    system = {"kubernetes.io/metadata.name": "kube-system"}
    dns = Pod(name="dns", labels={"k8s-app": "kube-dns"}, namespace=system)
    for protocol in ("TCP", "UDP"):
        assert is_allowed(BASE, DECODE, dns, 53, protocol)
        assert not is_allowed(BASE, ROUTER, dns, 53, protocol)


@kubectl
@pytest.mark.parametrize("overlay", ["multi-node", "secured"])
def test_each_pod_monitor_names_a_port_of_the_pods_that_it_selects(overlay):
    seen = []
    for monitor in (d["spec"] for d in kustomized(overlay) if d["kind"] == "PodMonitor"):
        roles = [role for role in ROLES if selects(monitor["selector"], labels_of(role))]
        for role in roles:
            names = {port["name"] for port in container_of(kustomized(overlay), role)["ports"]}
            assert monitor["podMetricsEndpoints"][0]["port"] in names
        seen += roles
    assert sorted(seen) == sorted(ROLES)


@kubectl
def test_every_gpu_worker_has_a_gpu_and_the_router_has_none():
    for overlay in ("single-node-gpu", "multi-node"):
        limits = {role: container_of(kustomized(overlay), role)["resources"]["limits"] for role in ROLES}
        assert {role: limit.get("nvidia.com/gpu") for role, limit in limits.items()} == {
            "router": None, "prefill": 1, "decode": 1,
        }  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_an_eviction_takes_one_pod_of_a_role_at_a_time(role):
    budget = named(BASE)["PodDisruptionBudget", f"baton-{role}"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert [other for other in ROLES if selects(budget["selector"], labels_of(other))] == [role]


@kubectl
def test_the_autoscaler_asks_for_what_the_router_has_and_exports():
    scaler = named(kustomized("autoscaled"))["HorizontalPodAutoscaler", "baton-router"]["spec"]
    target = workload(kustomized("autoscaled"), "router")
    assert scaler["scaleTargetRef"] == {key: target[key] for key in ("apiVersion", "kind")} | {
        "name": "baton-router"
    }
    assert "replicas" not in target["spec"]
    cpu, running = scaler["metrics"]
    assert (
        cpu["resource"]["name"] in container_of(kustomized("autoscaled"), "router")["resources"]["requests"]
    )
    shown = RouterMetrics("m").render(RouterRecord(queued=0, running=0), []).decode()
    assert f"# TYPE {running['pods']['metric']['name']} gauge\n" in shown


# --- the Secret of the keys ---------------------------------------------------------------------------------


def test_the_key_job_may_create_secrets_and_nothing_else():
    objects = named(BASE)
    assert objects["Role", "baton-keys"]["rules"] == [
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}
    ]
    bound = objects["RoleBinding", "baton-keys"]
    assert (bound["roleRef"]["kind"], bound["roleRef"]["name"]) == ("Role", "baton-keys")
    pod = objects["Job", "baton-keys"]["spec"]["template"]["spec"]
    assert [subject["name"] for subject in bound["subjects"]] == [pod["serviceAccountName"]]
    assert pod["serviceAccountName"] not in {pod_of(BASE, role)["serviceAccountName"] for role in ROLES}


def test_the_key_job_makes_the_secret_that_the_pods_mount():
    (container,) = named(BASE)["Job", "baton-keys"]["spec"]["template"]["spec"]["containers"]
    command, action, name = container["args"]
    assert (command, action) == ("keys", "secret")
    for role in ROLES:
        mounted = next(volume["secret"] for volume in pod_of(BASE, role)["volumes"] if "secret" in volume)
        assert mounted["secretName"] == name


def test_s34_the_key_job_reaches_the_api_server_alone():
    api = Pod(name="api", labels={"component": "kube-apiserver"}, namespace={"a": "b"})
    assert is_allowed(BASE, KEYS, api, 6443)
    for target, port in ((ROUTER, 7100), (ROUTER, 8000), (PREFILL, 7200), (DECODE, 9100)):
        assert not is_allowed(BASE, KEYS, target, port)
    assert not is_allowed(BASE, CLIENT, KEYS, 443)


def test_the_example_for_keda_scales_a_workload_by_exported_series():
    (scaled,) = documents([KUBERNETES / "examples" / "keda-decode.yaml"])
    target = scaled["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) in named(BASE)
    exported = (ROOT / "docs" / "metrics.md").read_text()
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert len(queries) == 2
    for query in queries:
        name = query.removeprefix("sum(").partition("{")[0]
        assert f"| `{name}` | gauge |" in exported
