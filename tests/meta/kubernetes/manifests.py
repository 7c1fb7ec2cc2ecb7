"""Shared by the tests of manifests: the output of kubectl and helm, and Kubernetes' own schemas."""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ROOT / "deploy" / "packaging" / "kubernetes"
CHART = ROOT / "deploy" / "packaging" / "helm" / "baton"
OVERLAYS = ("cpu-demo", "single-node-gpu", "multi-node", "autoscaled", "secured")
WORKLOADS = ("Deployment", "StatefulSet")
SCHEMAS = json.loads((Path(__file__).parent / "schemas-v1.34.json").read_text())
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast

# of the Prometheus operator's API, as far as the alerts use it
RULE = {
    "type": "object",
    "required": ["alert", "expr"],
    "properties": {
        "alert": {"type": "string"},
        "expr": {"type": ["string", "integer"]},
        "for": {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "additionalProperties": False,
}
GROUP = {
    "type": "object",
    "required": ["name", "rules"],
    "properties": {"name": {"type": "string"}, "rules": {"type": "array", "items": RULE}},
    "additionalProperties": False,
}
RULES = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PrometheusRule"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "required": ["groups"],
            "properties": {"groups": {"type": "array", "items": GROUP}},
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}

Document = dict[str, Any]


def program(name: str) -> str | None:
    """Where it is: on the path, or beside the interpreter, where pip puts programs."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def needs(name: str) -> pytest.MarkDecorator:
    """Skips where the program is not installed."""
    return pytest.mark.skipif(program(name) is None, reason=f"{name} is not installed")


def run(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The program's end and what it said."""
    command = [program(name) or name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def helm_template(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The chart's objects as YAML, as release `baton` in the namespace `baton`."""
    return run("helm", "template", "baton", str(CHART), "--namespace", "baton", *arguments)


def parsed(done: "subprocess.CompletedProcess[str]") -> list[Document]:
    """The documents that a program wrote."""
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, Loader=LOADER) if document]


@functools.cache
def kustomized(overlay: str) -> list[Document]:
    """The documents of an overlay; to be read only."""
    return parsed(run("kubectl", "kustomize", str(KUBERNETES / "overlays" / overlay)))


@functools.cache
def templated(overlay: str) -> list[Document]:
    """The chart's documents with the values that stand for an overlay; to be read only."""
    preset = CHART / "presets" / f"{overlay}.yaml"
    return parsed(helm_template(*(["--values", str(preset)] if preset.exists() else [])))


def validate(document: Document) -> None:
    """Raises jsonschema.ValidationError for an object that Kubernetes or the Prometheus operator refuses."""
    if document["kind"] == "PrometheusRule":
        return jsonschema.Draft7Validator(RULES).validate(document)
    schema = {"$ref": SCHEMAS["kinds"][document["kind"]], "definitions": SCHEMAS["definitions"]}
    jsonschema.Draft7Validator(schema).validate(document)


def named(documents: list[Document]) -> dict[tuple[str, str], Document]:
    """By kind and name, which must differ."""
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(found) == len(documents)
    return found


def workload(documents: list[Document], role: str) -> Document:
    """The Deployment or StatefulSet of a role."""
    return next(d for d in documents if d["kind"] in WORKLOADS and d["metadata"]["name"] == f"baton-{role}")


def pod_of(documents: list[Document], role: str) -> Document:
    """Its pods' spec."""
    pod: Document = workload(documents, role)["spec"]["template"]["spec"]
    return pod


def container_of(documents: list[Document], role: str) -> Document:
    """Its pods' only container."""
    (container,) = pod_of(documents, role)["containers"]
    assert isinstance(container, dict)
    return container
