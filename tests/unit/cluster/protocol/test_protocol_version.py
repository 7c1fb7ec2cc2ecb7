"""Processes with the same protocol number can read each other's messages.

A field that must be there may neither come nor go under one number, since a peer without it could not read
the message, or would send one that is none. Fields with a default may: who does not know them ignores them.
Until a version of baton is released, its number may be given another content; behind a release a change of
this table needs another number.
"""

from typing import get_args

import pytest
from baton.cluster.protocol import messages as m
from baton.router.workers.registry import Registry
from baton.tests.unit.router.workers.test_registry import hello
from msgspec import structs

REQUIRED = {
    1: {
        "Hello": "role instance protocol fingerprint model pages_total page_size max_context max_running",
        "Heartbeat": "instance stats",
        "HeldPrefixes": "instance seq root",
        "Reserved": "room epoch instance",
        "Refused": "room epoch instance reason",
        "PromptLogprobs": "room epoch instance start items",
        "RoutedExperts": "room epoch instance start count ids",
        "RoutedShape": "layers num_layers top_k id_bytes",
        "FirstToken": "room epoch instance token",
        "Tokens": "instance items",
        "Finished": "room epoch instance reason output_tokens",
        "Failed": "room epoch instance kind message retryable",
        "Gone": "room epoch instance",
        "Goodbye": "instance",
        "Welcome": "instance router",
        "Rejected": "instance reason",
        "Reserve": "room epoch instance prompt_ids sampling deadline_ms",
        "Prefill": "room epoch instance prompt_ids sampling deadline_ms",
        "OfferPrefix": "instance transfer tokens",
        "TellPrefixes": "instance",
        "PrefixPull": "transfer instance endpoint tokens patience_ms",
        "PromptEmbeds": "room epoch instance start width dtype data",
        "Cancel": "room epoch instance",
        "SwapDraft": "instance order action",
        "ChangeRole": "instance order role drain_ms",
        "KVHello": "instance protocol layout",
        "Attach": "room epoch instance have",
        "Pull": "room epoch instance block",
        "Release": "room epoch instance",
        "Abort": "room epoch instance",
        "SlabRequest": "instance address token num_slots slot_bytes",
        "SlotFree": "room epoch instance block slab slot",
        "SlabUnusable": "instance slab reason",
        "KVWelcome": "instance layout",
        "KVRefused": "instance reason",
        "Announce": "room epoch instance tokens_ready",
        "Block": "room epoch instance block size digest",
        "SlabBlock": "room epoch instance block size digest slab slot lease_ms",
        "SlabPlan": "blocks",
        "SlabSoon": "room epoch instance",
        "SlabGrant": "instance token slab num_slots slot_bytes",
        "SlabDenied": "instance token reason",
        "RouterGoodbye": "instance",
        "TokenItem": "room epoch seq ids",
        "TokenLogprob": "logprob",
        "PromptRows": "count digest",
        "Layout": "fingerprint dtype page_size num_layers num_kv_heads head_dim",
        **dict.fromkeys(("Sampling", "WorkerStats", "GraphCounts", "PrefillTimeline", "DecodeTimeline"), ""),
    }
}
PARTS = (
    m.TokenItem, m.TokenLogprob, m.Layout, m.Sampling, m.WorkerStats, m.GraphCounts, m.PrefillTimeline,
    m.DecodeTimeline, m.PromptRows, m.PrefixPull, m.RoutedShape,
)  # fmt: skip


def test_a_protocol_number_fixes_the_required_fields():
    unions = (m.ControlUp, m.ControlDown, m.KVUp, m.KVDown)
    kinds = {kind for union in unions for kind in get_args(union)} | set(PARTS)
    found = {kind.__name__: " ".join(f.name for f in structs.fields(kind) if f.required) for kind in kinds}
    assert found == REQUIRED[m.PROTOCOL_MAJOR]


@pytest.mark.parametrize("step", [-1, 1])
def test_a_worker_of_another_version_is_told_both_and_the_remedy(step):
    registry = Registry("a" * 32, 1.8)
    other = m.PROTOCOL_MAJOR + step
    rejected = registry.hello(b"w", hello(protocol=other), 0.0)
    assert (
        rejected.reason == f"protocol {other} is not {m.PROTOCOL_MAJOR}: run the same release on every host"
    )
    assert len(registry) == 0
