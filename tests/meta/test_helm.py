"""The Helm chart renders the same objects as the kustomize overlays, and every value of it has an effect."""

import copy
import re
import shutil
import sys

import baton
import pytest
import yaml
from baton.tests.meta.kubernetes.manifests import (
    CHART,
    KUBERNETES,
    OVERLAYS,
    ROOT,
    helm_template,
    kustomized,
    named,
    needs,
    parsed,
    run,
    templated,
    validate,
    workload,
)
from baton.tests.meta.kubernetes.policies import Pod, is_allowed, selects

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

helm, kubectl = needs("helm"), needs("kubectl")
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
OF_HELM = (
    "helm.sh/hook",
    "helm.sh/hook-weight",
    "helm.sh/hook-delete-policy",
    "checksum/config",
    "helm.sh/chart",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/instance",
)


def plain(document):
    """The objects without the two's own additions: a hash in the ConfigMap's name, and its annotation."""

    def cleaned(value):
        if isinstance(value, list):
            return [cleaned(part) for part in value]
        if isinstance(value, dict):
            kept = {key: cleaned(part) for key, part in value.items() if key not in OF_HELM}
            return {
                key: part
                for key, part in kept.items()
                if not (key in ("annotations", "labels") and part == {})
            }
        return re.sub(r"^(baton-config)-[a-z0-9]{10}$", r"\1", value) if isinstance(value, str) else value

    document = cleaned(copy.deepcopy(document))
    if document["kind"] == "ConfigMap":
        document["data"] = {name: tomllib.loads(text) for name, text in document["data"].items()}
    return document


@helm
@kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_gives_the_objects_of_the_overlay(overlay):
    ours, theirs = (
        named([plain(d) for d in documents]) for documents in (templated(overlay), kustomized(overlay))
    )
    assert sorted(ours) == sorted(theirs)
    for key, document in theirs.items():
        assert ours[key] == document, key


@helm
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_of_the_chart_is_valid(overlay):
    for document in templated(overlay):
        validate(document)


@helm
def test_helm_itself_finds_no_fault():
    done = run("helm", "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@helm
def test_a_hook_makes_the_keys_before_the_pods_that_wait_for_them():
    hooks = [
        d for d in templated("single-node-gpu") if "helm.sh/hook" in d["metadata"].get("annotations", {})
    ]
    weights = {d["kind"]: int(d["metadata"]["annotations"]["helm.sh/hook-weight"]) for d in hooks}
    assert set(weights) == {"ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "Job"}
    assert all(weights[kind] < weights["Job"] for kind in set(weights) - {"Job"})
    assert {d["metadata"]["annotations"]["helm.sh/hook"] for d in hooks} == {"pre-install,pre-upgrade"}


# --- values -------------------------------------------------------------------------------------------------

# Another value for each; what is not here is a leaf of values.yaml that nobody looked at.
OTHER = {
    "nameOverride": "other",
    "fullnameOverride": "another",
    "commonLabels": {"team": "serving"},
    "commonAnnotations": {"owner": "serving"},
    "image.repository": "registry.example/baton",
    "image.tag": "9.9.9",
    "image.pullPolicy": "Always",
    "image.pullSecrets": [{"name": "pull"}],
    "model.claim": "elsewhere",
    "model.path": "/models/another",
    "model.draft": "/models/head",
    "model.volume.create": True,
    "model.volume.size": "1Ti",
    "model.volume.storageClass": "fast",
    "model.volume.accessMode": "ReadWriteOnce",
    "model.download.repository": "org/model",
    "model.download.revision": "v1",
    "model.download.draftRepository": "org/head",
    "model.download.draftRevision": "v2",
    "model.download.token.secretName": "hub",
    "model.download.token.key": "other",
    "model.download.env": [{"name": "HF_ENDPOINT", "value": "https://mirror.example.com"}],
    "model.download.resources": {"requests": {"cpu": "7"}, "limits": {}},
    "keys.secret": "other-keys",
    "keys.create": False,
    "drainTimeoutSeconds": 300,
    "router.replicas": 3,
    "router.service.type": "LoadBalancer",
    "router.service.port": 8080,
    "router.service.annotations": {"a": "b"},
    "router.ingress.enabled": True,
    "router.ingress.className": "nginx",
    "router.ingress.annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
    "router.ingress.hosts": [{"host": "a.example.com"}, {"host": "b.example.com", "paths": ["/v1"]}],
    "router.ingress.tls": [{"hosts": ["llm.example.com"], "secretName": "certificate"}],
    "router.tls.secretName": "certificate",
    "router.apiKeys.secretName": "clients",
    "router.autoscaling.enabled": True,
    "router.autoscaling.minReplicas": 3,
    "router.autoscaling.maxReplicas": 9,
    "router.autoscaling.cpuUtilization": 0,
    "router.autoscaling.runningRequests": 0,
    "networkPolicy.enabled": False,
    "networkPolicy.monitoring": {"team": "observers"},
    "podMonitor.enabled": True,
    "podMonitor.interval": "1m",
    "podMonitor.tlsConfig": {"insecureSkipVerify": True},
    "podMonitor.authorization": {"credentials": {"name": "another", "key": "key"}},
    "prometheusRule.enabled": True,
    "prometheusRule.labels": {"release": "monitoring"},
    "prometheusRule.runbook": "https://wiki.example/baton",
}
OF_EVERY_ROLE = {
    "resources": {"requests": {"cpu": "7"}, "limits": {}},
    "args": ["--log-level=debug"],
    "env": [{"name": "A", "value": "b"}],
    "nodeSelector": {"pool": "fast"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "annotations": {"of": "the workload"},
    "podAnnotations": {"of": "the pod"},
    "podLabels": {"pool": "fast"},
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}},
    ]}},
    "priorityClassName": "serving",
    "runtimeClassName": "nvidia",
    "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
}  # fmt: skip
OF_A_WORKER = {
    "replicas": 4, "device": "cpu", "gpus": 2, "gpuResource": "example.com/gpu", "spread": True,
    "autoscaling.enabled": True, "autoscaling.minReplicas": 2, "autoscaling.maxReplicas": 9,
    "autoscaling.queuedRequests": 9, "autoscaling.runningRequests": 9,
}  # fmt: skip
OTHER |= {
    f"{role}.{key}": value for role in ("router", "prefill", "decode") for key, value in OF_EVERY_ROLE.items()
}
OTHER |= {f"{role}.{key}": value for role in ("prefill", "decode") for key, value in OF_A_WORKER.items()}
# what acts only beside something else
SECURED = yaml.safe_load((CHART / "presets" / "secured.yaml").read_text())
BESIDE = {
    "podMonitor.tlsConfig": SECURED,
    "podMonitor.authorization": SECURED,
    "router.autoscaling": {"router": {"autoscaling": {"enabled": True}}},
    "router.ingress": {"router": {"ingress": {"enabled": True}}},
    "prefill.autoscaling": {"prefill": {"autoscaling": {"enabled": True}}},
    "decode.autoscaling": {"decode": {"autoscaling": {"enabled": True}}},
    "model.volume": {"model": {"volume": {"create": True}}},
    "model.download.": {
        "model": {
            "draft": "/models/head",
            "download": {
                "repository": "org/other",
                "draftRepository": "org/other-head",
                "token": {"secretName": "token"},
            },
        }
    },
    "podMonitor": {"podMonitor": {"enabled": True}},
    "prometheusRule": {"prometheusRule": {"enabled": True}},
}


def leaves(values, path=""):
    """Dotted names of the values, of which some are themselves a mapping or list that is a whole."""
    for key, value in values.items():
        here = f"{path}{key}"
        if isinstance(value, dict) and value and here not in OTHER:
            yield from leaves(value, f"{here}.")
        else:
            yield here


def with_values(tmp_path, values):
    path = tmp_path / f"values-{len(list(tmp_path.iterdir()))}.yaml"
    path.write_text(yaml.safe_dump(values))
    return ["--values", str(path)]


def nested(path, value):
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.slow
@helm
@pytest.mark.parametrize("path", OTHER)
def test_every_value_of_the_chart_changes_an_object(path, tmp_path):
    beside = next((values for start, values in BESIDE.items() if path.startswith(start)), {})
    beside = {} if path.endswith((".enabled", ".create", ".repository")) else beside
    before = with_values(tmp_path, beside)
    after = [*before, *with_values(tmp_path, nested(path, OTHER[path]))]
    changed = parsed(helm_template(*after))
    assert changed != parsed(helm_template(*before))
    for document in changed:
        validate(document)


def test_every_value_of_the_chart_is_tested():
    assert set(leaves(VALUES)) == set(OTHER)


@helm
@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            "router.autoscaling",
            {"enabled": True, "minReplicas": 9},
            "minReplicas 9 is more than maxReplicas 8",
        ),
        ("decode.gpu", 1, "gpu is not allowed"),
        ("router", SECURED["router"], "name a Secret with one under podMonitor.authorization"),
    ],
)
def test_an_invalid_value_is_refused_by_name(path, value, said, tmp_path):
    monitored = with_values(tmp_path, {"podMonitor": {"enabled": True}})
    done = helm_template(*monitored, *with_values(tmp_path, nested(path, value)))
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.slow
@helm
@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("fullnameOverride", "A_b", "fullnameOverride"),
        ("model.download.repository", "model", "model.download.repository"),
        (
            "model.download",
            {"draftRepository": "org/head"},
            "name its directory below /models in model.draft",
        ),
        ("model.volume.size", "big", "model.volume.size"),
        ("router.ingress", {"enabled": True, "hosts": []}, "router.ingress.hosts"),
        ("router.ingress.hosts", [{"name": "a"}], "name is not allowed"),
        ("decode.autoscaling", {"enabled": True, "runningRequests": 0}, "decode.autoscaling: neither"),
        ("prefill.autoscaling", {"enabled": True, "minReplicas": 9}, "more than maxReplicas 4"),
        ("decode.extraVolumeMounts", [{"name": "a"}], "mountPath is required"),
        ("model.path", "/elsewhere", "model.path"),
        ("keys.secret", "A_b", "keys.secret"),
        ("router.tls.secretName", "A_b", "router.tls.secretName"),
        (
            "router.args",
            ["--tls-cert=/etc/cert.pem"],
            "--tls-cert=/etc/cert.pem: name a Secret in router.tls",
        ),
        ("drainTimeoutSeconds", "soon", "drainTimeoutSeconds"),
        ("drainTimeoutSeconds", 0, "drainTimeoutSeconds"),
        ("router.replicas", -1, "router.replicas"),
        ("prefill.device", "tpu", "prefill.device"),
        ("router.autoscaling", {"enabled": True, "cpuUtilization": 0, "runningRequests": 0}, "neither"),
        ("networkPolicy.monitoring", {"baton.monitoring": None}, "networkPolicy.monitoring"),
    ],
)
def test_every_other_invalid_value_is_refused(path, value, said, tmp_path):
    test_an_invalid_value_is_refused_by_name(path, value, said, tmp_path)


EVERYTHING = {
    "model": {"volume": {"create": True}, "download": {"repository": "org/model"}},
    "router": {"ingress": {"enabled": True}, "autoscaling": {"enabled": True}},
    "prefill": {"autoscaling": {"enabled": True}},
    "decode": {"autoscaling": {"enabled": True}},
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
}


def released(name, tmp_path, values):
    flags = with_values(tmp_path, values)
    return parsed(run("helm", "template", name, str(CHART), "--namespace", "baton", *flags))


def selectors_of(document):
    """Every selector of pods in an object, and what a pod of it is labelled with."""

    def walked(value, key=""):
        if isinstance(value, dict):
            if key in ("selector", "podSelector", "labelSelector"):
                yield value if "matchLabels" in value or value == {} else {"matchLabels": value}
            for name, part in value.items():
                yield from walked(part, name)
        elif isinstance(value, list):
            for part in value:
                yield from walked(part)

    is_scaler = document["kind"] == "HorizontalPodAutoscaler"  # its selector is one of series
    found = [] if is_scaler else list(walked(document.get("spec", {})))
    return [each for each in found if "k8s-app" not in each.get("matchLabels", {})]


@helm
@pytest.mark.parametrize("names", [("a", "b"), ("baton", "baton-two"), ("x" * 53, "x" * 52 + "y")])
def test_two_releases_in_one_namespace_have_nothing_in_common(names, tmp_path):
    one, two = (released(name, tmp_path, EVERYTHING) for name in names)
    assert len(one) == len(two) >= 30
    assert not set(named(one)) & set(named(two))
    pods = {}
    for at, documents in enumerate((one, two)):
        pods[at] = [
            d["spec"]["template"]["metadata"]["labels"] for d in documents if "template" in d.get("spec", {})
        ]
        assert len(pods[at]) == 5
        for document in documents:
            validate(document)
            assert len(document["metadata"]["name"]) <= 63
    for at, documents in enumerate((one, two)):
        chosen = [selector for document in documents for selector in selectors_of(document)]
        assert len(chosen) > 20
        for selector in chosen:
            assert any(selects(selector, labels) for labels in pods[at]), selector
            assert not any(selects(selector, labels) for labels in pods[1 - at]), selector
    # what pods mount, dial and run as is of their own release
    texts = [yaml.safe_dump(documents) for documents in (one, two)]
    for ours, (theirs, text) in zip((one, two), zip((two, one), texts, strict=True), strict=True):
        others = {d["metadata"]["name"] for d in theirs} - {d["metadata"]["name"] for d in ours}
        others = {name for name in others if not any(name in d["metadata"]["name"] for d in ours)}
        assert not [name for name in others if re.search(rf"(?<![a-z0-9-]){name}(?![a-z0-9-])", text)]


@helm
def test_only_the_download_reaches_the_hub_and_sees_its_token(tmp_path):
    values = {"model": {"download": {"repository": "org/m", "token": {"secretName": "hub"}}}}
    found = released("baton", tmp_path, values)
    (job,) = [d for d in found if d["kind"] == "Job" and "download" in d["metadata"]["name"]]
    pod = job["spec"]["template"]
    assert pod["spec"]["containers"][0]["args"] == ["download", "org/m@main=/models/model"]
    hub = Pod(name="hub", labels={}, namespace={"anywhere": "true"})
    policies = [d for d in found if d["kind"] == "NetworkPolicy"]
    assert is_allowed(policies, Pod(name="d", labels=pod["metadata"]["labels"]), hub, 443)
    for role in ("router", "prefill", "decode"):
        workload_ = workload(found, role)["spec"]["template"]
        (waits,) = workload_["spec"]["initContainers"]
        assert waits["args"] == ["wait", "org/m@main=/models/model"]
        assert not is_allowed(policies, Pod(name=role, labels=workload_["metadata"]["labels"]), hub, 443)
        assert "HF_TOKEN" not in yaml.safe_dump(workload_)
    assert "HF_TOKEN" in yaml.safe_dump(pod)


@helm
def test_worker_autoscalers_ask_for_what_workers_export(tmp_path):
    found = named(released("baton", tmp_path, EVERYTHING))
    shown = (ROOT / "docs" / "metrics.md").read_text()
    for role in ("prefill", "decode"):
        scaler = found["HorizontalPodAutoscaler", f"baton-{role}"]["spec"]
        kind = scaler["scaleTargetRef"]["kind"]
        assert "replicas" not in found[kind, f"baton-{role}"]["spec"]
        (metric,) = scaler["metrics"]
        (row,) = [
            line for line in shown.splitlines() if line.startswith(f"| `{metric['pods']['metric']['name']}`")
        ]
        assert f"`{metric['pods']['metric']['selector']['matchLabels']['kind']}`" in row


@helm
def test_the_notes_name_the_objects_of_the_release(tmp_path):
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)  # `helm template` leaves notes out, so they become an object
    notes = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "notes.yaml").write_text(
        '{{- define "notes" }}'
        + notes
        + '{{ end }}\nkind: Notes\ntext: |\n{{ include "notes" . | indent 2 }}\n'
    )
    for values, words in (
        (EVERYTHING, ["http://llm.example.com/v1", "name=x-baton,", "claim x-baton-models", "org/model"]),
        (SECURED, ["port-forward service/x-baton 8000:443", "curl -k https://127.0.0.1", "Bearer $KEY"]),
        ({}, ["port-forward service/x-baton 8000:80", "Whoever reaches the service may use it"]),
    ):
        flags = with_values(tmp_path, values)
        done = run("helm", "template", "x", str(chart), "--show-only", "templates/notes.yaml", *flags)
        (told,) = parsed(done)
        assert not [word for word in words if word not in told["text"]]


@helm
def test_the_chart_has_the_alerts_with_links_to_the_given_runbook(tmp_path):
    values = {"prometheusRule": {"enabled": True, "runbook": "https://wiki.example/baton"}}
    documents = parsed(helm_template(*with_values(tmp_path, values)))
    [rules] = [document for document in documents if document["kind"] == "PrometheusRule"]
    alerts = (CHART / "alerts.yaml").read_text()
    assert "{{ $labels.model_name }}" in alerts, "which Helm would take for its own"
    assert rules["spec"] == yaml.safe_load(alerts.replace("docs/runbook.md", "https://wiki.example/baton"))
    validate(rules)


def test_chart_and_overlays_are_of_the_package_s_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    base = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())
    assert {chart["version"], chart["appVersion"], base["images"][0]["newTag"]} == {baton.__version__}
