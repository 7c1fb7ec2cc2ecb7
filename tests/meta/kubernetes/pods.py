"""A host per end of the policies' rules with its packet filter: connections over real TCP and UDP."""

import contextlib
import errno
import itertools
import select
import socket
import time
from collections.abc import Iterable, Mapping

from baton.tests.faults.places import BULK, CLIENT, CONTROL, HTTP, KV, METRICS, Lan
from baton.tests.meta.kubernetes.policies import Pod, is_allowed, labels_of, ruleset

Triple = tuple[str, str, int]  # source, target, port
DNS = 53
PORTS = (HTTP, CONTROL, KV, BULK, METRICS, DNS, 443, 6443)
PATIENCE_S, SILENCE_S = (
    60.0,
    0.5,
)  # for what is allowed to connect; for what is forbidden to stay silent behind that
ENDS = {
    "router": (labels_of("router"), None),
    **{f"{role}-{i}": (labels_of(role), None) for role in ("prefill", "decode") for i in (0, 1)},
    "keys": (labels_of("keys"), None),
    CLIENT: ({"app": "client"}, None),
    "monitor": ({"app": "prometheus"}, {"baton.monitoring": "true"}),
    "dns": ({"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"}),
    "api": ({"component": "kube-apiserver"}, {"kubernetes.io/metadata.name": "kube-system"}),
    "stranger": (labels_of("decode"), {"kubernetes.io/metadata.name": "another"}),
}


def allowed(documents: Iterable[Mapping]) -> set[Triple]:
    """What the policies say of every pair of ENDS and every port."""
    ends = [Pod(name=name, labels=own, namespace=of) for name, (own, of) in ENDS.items()]
    pairs = itertools.permutations(ends, 2)
    return {
        (a.name, b.name, port)
        for (a, b), port in itertools.product(pairs, PORTS)
        if is_allowed(documents, a, b, port)
    }


class Pods:
    """A host per end, under the rules of some policies."""

    def __init__(self, lan: Lan, documents: Iterable[Mapping]) -> None:
        self._lan, self._sockets = lan, contextlib.ExitStack()
        for name in ENDS:
            if name not in lan.names:
                lan.add(name)
        self.all = [
            Pod(name=name, labels=own, address=lan.address(name), namespace=of)
            for name, (own, of) in ENDS.items()
        ]
        for pod in self.all:
            lan.filter(pod.name, ruleset(documents, pod, self.all))
        self._questions: dict[str, socket.socket] = {}

    def listen(self) -> None:
        """A listener at every port that no node has."""
        for pod in self.all:
            for port in PORTS:
                with contextlib.suppress(OSError):
                    self._open(pod, socket.SOCK_STREAM, (pod.address, port)).listen(64)
            self._questions[pod.name] = self._open(pod, socket.SOCK_DGRAM, (pod.address, DNS))

    def close(self) -> None:
        """No more sockets; the rules stay. Idempotent."""
        self._sockets.close()

    def connected(self, expected: set[Triple]) -> set[Triple]:
        """Whatever connects; waits for `expected`, and then as long as silence must last."""
        under_way = {}
        for source, target, port in itertools.product(self.all, self.all, PORTS):
            if source is not target:
                made = self._open(source, socket.SOCK_STREAM)
                assert made.connect_ex((target.address, port)) == errno.EINPROGRESS
                under_way[made.fileno()] = (source.name, target.name, port), made
        poller = select.poll()
        for number in under_way:
            poller.register(number, select.POLLOUT)
        found, patience = set(), time.monotonic() + PATIENCE_S
        until, is_last = patience, False
        while not is_last:
            left = max(0.0, until - time.monotonic())
            is_last = not left  # what came while this process got no core is still looked at
            for number, _ in poller.poll(left * 1000):
                poller.unregister(number)
                triple, made = under_way[number]
                assert made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0, (
                    f"{triple} is refused, not dropped"
                )
                found.add(triple)
            if expected <= found and until == patience:
                until = time.monotonic() + SILENCE_S
        return found

    def heard_by_dns(self, expected: set[str]) -> set[str]:
        """Whose datagrams come to the name server; waits as `connected` does."""
        for pod in self.all:
            with contextlib.suppress(PermissionError):  # its own host drops it
                self._questions[pod.name].sendto(pod.name.encode(), (self._lan.address("dns"), DNS))
        heard, until = set(), time.monotonic() + PATIENCE_S
        while select.select([self._questions["dns"]], [], [], max(0.0, until - time.monotonic()))[0]:
            heard.add(self._questions["dns"].recv(64).decode())
            if expected <= heard:
                until = time.monotonic() + SILENCE_S
        return heard - {"dns"}

    def _open(self, pod: Pod, kind: int, address: tuple[str, int] | None = None) -> socket.socket:
        with self._lan.inside(pod.name):
            made = self._sockets.enter_context(socket.socket(socket.AF_INET, kind))
        made.setblocking(False)
        if address:
            made.bind(address)
        return made
