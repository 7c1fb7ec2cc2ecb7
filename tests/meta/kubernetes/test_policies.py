"""S34: the network policies as packet filters on hosts: allowed traffic connects, all other is dropped."""

import contextlib
import copy
import itertools

import pytest
from baton.tests.faults.netns import missing
from baton.tests.faults.places import BULK, CLIENT, CONTROL, KV, METRICS, Lan
from baton.tests.meta.kubernetes.pods import ENDS, Pods, allowed
from baton.tests.meta.kubernetes.policies import shipped

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made")


@contextlib.contextmanager
def pods(documents):
    with Lan() as lan, contextlib.closing(Pods(lan, documents)) as made:
        made.listen()
        yield made


def test_pairs_that_the_policies_allow_connect_and_others_time_out():
    with pods(shipped()) as made:
        expected = allowed(shipped())
        assert made.connected(expected) == expected
        inner = {triple for triple in expected if triple[1].startswith(("prefill", "decode"))}
        wanted = set(itertools.product(("decode-0", "decode-1"), ("prefill-0", "prefill-1"), (KV, BULK)))
        wanted |= {("monitor", f"{role}-{i}", METRICS) for role in ("prefill", "decode") for i in (0, 1)}
        assert inner == wanted
        asking = set(ENDS) - {"router", "keys", "dns"}
        assert made.heard_by_dns(asking) == asking


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "triple", "is_open"),
    [
        (lambda by: by["baton-prefill"]["ingress"][0]["ports"].pop(), ("decode-0", "prefill-0", BULK), False),
        (lambda by: by["baton-router"]["ingress"][1].pop("from"), (CLIENT, "router", CONTROL), True),
        (lambda by: by["baton-default-deny"]["policyTypes"].remove("Egress"), ("router", CLIENT, 443), True),
        (lambda by: by["baton-workers"]["egress"].pop(0), ("prefill-0", "router", CONTROL), False),
    ],
    ids=["a port less", "no peers named", "no default for the way out", "a rule less"],
)
def test_a_policy_that_is_changed_changes_what_connects(change, triple, is_open):
    documents = copy.deepcopy(shipped())
    change({document["metadata"]["name"]: document["spec"] for document in documents})
    assert (triple in allowed(shipped())) != is_open
    with pods(documents) as made:
        expected = allowed(documents)
        assert (triple in expected) == is_open
        assert made.connected(expected) == expected
