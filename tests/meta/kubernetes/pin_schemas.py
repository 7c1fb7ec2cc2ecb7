"""Extracts the schemas that the manifests' tests use from two public files, so that the tests need neither.

    cd tests/meta/kubernetes; python pin_schemas.py DEFINITIONS POD_MONITOR_SPEC > schemas-v1.34.json


- DEFINITIONS: `kubernetes_validate/kubernetes-json-schema/v1.34.0-local-strict/_definitions.json` of the
  wheel kubernetes-validate 1.37.0: Kubernetes' own OpenAPI as JSON Schema, unknown fields refused;
- POD_MONITOR_SPEC: what `npx ts-json-schema-generator -p .../monitoring.coreos.com/v1/PodMonitorSpec.d.ts -t
  IPodMonitorSpec --no-type-check` makes of the npm package @kubernetes-models/prometheus-operator 6.0.0,
  types made of the operator's own.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = {
    "ConfigMap": "core.v1", "Deployment": "apps.v1", "HorizontalPodAutoscaler": "autoscaling.v2",
    "Ingress": "networking.v1", "Job": "batch.v1",
    "NetworkPolicy": "networking.v1", "PodDisruptionBudget": "policy.v1", "Role": "rbac.v1",
    "PersistentVolumeClaim": "core.v1", "RoleBinding": "rbac.v1",
    "Secret": "core.v1", "Service": "core.v1", "ServiceAccount": "core.v1", "StatefulSet": "apps.v1",
}  # fmt: skip
PREFIX, META = "io.k8s.api.", "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
SOURCE = (
    "Kubernetes v1.34.0 OpenAPI and the Prometheus operator's PodMonitor, strict, without descriptions; "
    "Apache-2.0"
)


def main() -> None:
    """Writes the schemas to stdout."""
    core, monitor = (json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:3])
    core = _plain(core["$defs"])
    monitor = {
        f"monitoring.{name[1:]}": schema
        for name, schema in _plain(monitor["definitions"], "monitoring.").items()
    }
    monitor["monitoring.PodMonitor"] = {
        "type": "object",
        "properties": {
            "apiVersion": {"enum": ["monitoring.coreos.com/v1"]},
            "kind": {"enum": ["PodMonitor"]},
            "metadata": {"$ref": f"#/definitions/{META}"},
            "spec": {"$ref": "#/definitions/monitoring.PodMonitorSpec"},
        },
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
    }
    kinds = {kind: f"{PREFIX}{group}.{kind}" for kind, group in KINDS.items()} | {
        "PodMonitor": "monitoring.PodMonitor"
    }
    both = core | monitor
    wanted = _reached(both, kinds.values())
    document = {
        "definitions": {name: both[name] for name in sorted(wanted)},
        "kinds": {kind: f"#/definitions/{name}" for kind, name in sorted(kinds.items())},
        "source": SOURCE,
    }
    sys.stdout.write(json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n")


def _plain(value: Any, prefix: str = "") -> Any:
    """Without descriptions and extensions, references into this document."""
    if isinstance(value, list):
        return [_plain(part, prefix) for part in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _plain(part, prefix) for key, part in value.items() if not _is_prose(key, part)}
    if isinstance(reference := kept.get("$ref"), str):
        name = reference.rpartition("/")[2]
        kept["$ref"] = f"#/definitions/{prefix}{name[1:] if prefix else name}"
    return kept


def _is_prose(key: str, part: Any) -> bool:
    return key.startswith("x-kubernetes-") or (key == "description" and isinstance(part, str))


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for part in value:
            yield from _references(part)
    elif isinstance(value, dict):
        for key, part in value.items():
            if key == "$ref" and isinstance(part, str):
                yield part.rpartition("/")[2]
            else:
                yield from _references(part)


def _reached(definitions: dict[str, Any], roots: Any) -> set[str]:
    """The names that the roots need."""
    seen: set[str] = set()
    todo = list(roots)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += _references(definitions[name])
    return seen


if __name__ == "__main__":
    main()
