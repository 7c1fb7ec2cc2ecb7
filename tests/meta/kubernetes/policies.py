"""Network policies: what they allow, by their own words, and the packet filter of each pod that they come to.

`is_allowed` answers for one pair and port, `ruleset` is what a network plugin would load where a pod is. The
two share only the reading of selectors, so each can be held against the other. What the manifests do not use
(ports by name, ranges, address blocks, empty lists of peers) is refused, not guessed.

Semantics: https://kubernetes.io/docs/concepts/services-networking/network-policies/
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

Labels = Mapping[str, str]
MANIFESTS = Path(__file__).resolve().parents[3] / "deploy" / "packaging" / "kubernetes" / "base"
HOOKS = {
    "Ingress": ("from", "input", "saddr"),
    "Egress": ("to", "output", "daddr"),
}  # rule field, hook, whose address


@dataclass(frozen=True, kw_only=True)
class Pod:
    """An end of a connection; `namespace`: labels of its namespace, None for that of the policies."""

    name: str
    labels: Labels
    address: str = ""
    namespace: Labels | None = None


def labels_of(component: str) -> Labels:
    """Those that the manifests give the pods of a role."""
    return {"app.kubernetes.io/name": "baton", "app.kubernetes.io/component": component}


def selects(selector: Mapping, own: Labels) -> bool:
    """Whether a label selector is about who has these labels."""
    if unknown := set(selector) - {"matchLabels", "matchExpressions"}:
        raise ValueError(f"selector with {sorted(unknown)}")
    holds = {"In": lambda rule: own.get(rule["key"]) in rule["values"]}
    return all(own.get(k) == v for k, v in selector.get("matchLabels", {}).items()) and all(
        holds[rule["operator"]](rule) for rule in selector.get("matchExpressions", [])
    )


def shipped() -> list[Mapping]:
    """The policies of the base."""
    documents = [d for path in sorted(MANIFESTS.glob("*.yaml")) for d in yaml.safe_load_all(path.read_text())]
    return [document for document in documents if document["kind"] == "NetworkPolicy"]


def is_peer(peer: Mapping, other: Pod) -> bool:
    """Whether an entry of `from` or `to` selects that pod; the default is the policies' own namespace."""
    if unknown := set(peer) - {"podSelector", "namespaceSelector"}:
        raise ValueError(f"peer with {sorted(unknown)}")
    is_near = other.namespace is None
    if "namespaceSelector" in peer and not (
        other.namespace and selects(peer["namespaceSelector"], other.namespace)
    ):
        return False
    return ("namespaceSelector" in peer or is_near) and selects(peer.get("podSelector", {}), other.labels)


def of_pod(documents: Iterable[Mapping], pod: Pod, direction: str) -> list[Mapping]:
    """The specs of the policies that are about one direction of a pod's traffic."""
    if pod.namespace is not None:
        return []
    specs = [document["spec"] for document in documents if document["kind"] == "NetworkPolicy"]
    return [
        spec
        for spec in specs
        if selects(spec["podSelector"], pod.labels) and direction in spec["policyTypes"]
    ]


def is_allowed(
    documents: Iterable[Mapping], source: Pod, target: Pod, port: int, protocol: str = "TCP"
) -> bool:
    """As the network does it: both ends must agree; an end that no policy selects agrees to everything."""
    for own, direction, other in ((source, "Egress", target), (target, "Ingress", source)):
        specs = of_pod(documents, own, direction)
        rules = [rule for spec in specs for rule in spec.get(direction.lower(), [])]
        if specs and not any(_admits(rule, HOOKS[direction][0], other, port, protocol) for rule in rules):
            return False
    return True


def _admits(rule: Mapping, side: str, other: Pod, port: int, protocol: str) -> bool:
    is_for = side not in rule or any(is_peer(peer, other) for peer in rule[side])
    return is_for and any((p["port"], p.get("protocol", "TCP")) == (port, protocol) for p in rule["ports"])


def ruleset(documents: Iterable[Mapping], pod: Pod, pods: Iterable[Pod]) -> str:
    """nftables rules for the host of `pod`: what no policy lets through is dropped, and nobody is told."""
    chains = [_chain(documents, pod, list(pods), direction) for direction in HOOKS]
    return "table inet policies {\n" + "".join(chains) + "}\n"


def _chain(documents: Iterable[Mapping], pod: Pod, pods: list[Pod], direction: str) -> str:
    side, hook, address = HOOKS[direction]
    specs = of_pod(documents, pod, direction)
    lines = [f"type filter hook {hook} priority 0; policy accept;"]
    if specs:
        lines += [f'{"iif" if hook == "input" else "oif"} "lo" accept', "ct state established,related accept"]
        rules = [rule for spec in specs for rule in spec.get(direction.lower(), [])]
        lines += [line for rule in rules for line in _lines(rule, side, address, pods)]
        lines += ["counter drop"]
    return f"  chain {hook} {{\n" + "".join(f"    {line}\n" for line in lines) + "  }\n"


def _lines(rule: Mapping, side: str, address: str, pods: list[Pod]) -> list[str]:
    """One rule of a policy; none where nobody is meant."""
    whom = ""
    if side in rule:
        found = [pod.address for pod in pods if any(is_peer(peer, pod) for peer in rule[side])]
        if not found:
            return []
        whom = f"ip {address} {{ {', '.join(found)} }} "
    by_protocol: dict[str, list[str]] = {}
    for port in rule["ports"]:
        if set(port) - {"port", "protocol"} or not isinstance(port["port"], int):
            raise ValueError(f"port {port}")
        by_protocol.setdefault(port.get("protocol", "TCP").lower(), []).append(str(port["port"]))
    return [
        f"{whom}{protocol} dport {{ {', '.join(ports)} }} accept" for protocol, ports in by_protocol.items()
    ]
