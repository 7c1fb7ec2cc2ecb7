"""The Helm chart renders the same objects as the kustomize overlays, and every value of it has an effect."""

import copy
import re
import sys

import baton
import pytest
import yaml
from baton.tests.meta.kubernetes.manifests import (
    CHART,
    KUBERNETES,
    OVERLAYS,
    helm_template,
    kustomized,
    named,
    needs,
    parsed,
    run,
    templated,
    validate,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

helm, kubectl = needs("helm"), needs("kubectl")
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
OF_HELM = ("helm.sh/hook", "helm.sh/hook-weight", "helm.sh/hook-delete-policy", "checksum/config")


def plain(document):
    """The objects without the two's own additions: a hash in the ConfigMap's name, and its annotation."""

    def cleaned(value):
        if isinstance(value, list):
            return [cleaned(part) for part in value]
        if isinstance(value, dict):
            kept = {key: cleaned(part) for key, part in value.items() if key not in OF_HELM}
            return {key: part for key, part in kept.items() if not (key == "annotations" and part == {})}
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
    "name": "other",
    "image.repository": "registry.example/baton",
    "image.tag": "9.9.9",
    "image.pullPolicy": "Always",
    "image.pullSecrets": [{"name": "pull"}],
    "model.claim": "elsewhere",
    "model.path": "/models/another",
    "model.draft": "/models/head",
    "keys.secret": "other-keys",
    "keys.create": False,
    "drainTimeoutSeconds": 300,
    "router.replicas": 3,
    "router.service.type": "LoadBalancer",
    "router.service.port": 8080,
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
}
OF_EVERY_ROLE = {
    "resources": {"requests": {"cpu": "7"}, "limits": {}},
    "args": ["--log-level=debug"],
    "env": [{"name": "A", "value": "b"}],
    "nodeSelector": {"pool": "fast"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
}
OF_A_WORKER = {"replicas": 4, "device": "cpu", "gpus": 2, "gpuResource": "example.com/gpu", "spread": True}
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
    "podMonitor": {"podMonitor": {"enabled": True}},
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
    beside = {} if path.endswith(".enabled") else beside
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
        ("name", "A_b", "name"),
        ("model.path", "/elsewhere", "model.path"),
        ("keys.secret", "", "keys.secret"),
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


@helm
def test_two_clusters_in_one_namespace_share_only_configured_objects(tmp_path):
    other = parsed(helm_template(*with_values(tmp_path, {"name": "other", "keys": {"secret": "other-keys"}})))
    first = templated("single-node-gpu")
    assert not set(named(other)) & set(named(first))
    assert "baton-" not in yaml.safe_dump(other).replace("baton-models", "")
    for document in other:
        spec = document.get("spec", {})
        assert "baton" not in str([spec.get("selector"), spec.get("podSelector")])


def test_chart_and_overlays_are_of_the_package_s_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    base = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())
    assert {chart["version"], chart["appVersion"], base["images"][0]["newTag"]} == {baton.__version__}
