"""Switches for each defence of less urgent requests, and of urgent ones; `cluster_seams` has the rules."""

from dataclasses import replace
from unittest.mock import patch

from baton.decode import preemption
from baton.decode.preemption import Preemption
from baton.prefill.queues import PrefillRoom
from baton.tests.sim.cluster_faults import Faults
from baton.tests.sim.cluster_world import Options, Settings

CLASSES = Settings(
    has_classes=True, is_crowded=True, decode_pages=40, max_running=3, is_caching=False, first_guess=1,
    learns=False, request_timeout_s=20.0, queue_timeout_s=20.0,
)  # fmt: skip
SPREAD = replace(CLASSES, is_crowded=False, max_running=2, step_s=0.02)
SLOW = replace(CLASSES, step_s=0.06)
PROMPTS = Settings(
    has_classes=True, prefill_pages=14, max_running=16, chunk_size=2, step_s=0.012, is_caching=False,
    request_timeout_s=20.0, queue_timeout_s=20.0, decode_pages=200,
)  # fmt: skip


def taken_within_grants():
    """A room may make way for urgent ones again and again."""
    return patch.object(preemption, "is_beyond_grant", lambda room: bool(room.request.pages)), Options(
        faults=Faults(), settings=SPREAD, num_clients=44, num_decodes=1
    )


def taken_again_on_prefill():
    """A prompt may give its pages up again and again."""
    deaf = property(lambda _: False, lambda _, value: None)
    return patch.object(PrefillRoom, "keeps_pages", deaf), Options(
        faults=Faults(), settings=PROMPTS, num_clients=50, num_prefills=1
    )


def nobody_makes_way():
    """An urgent request waits for a place like any other."""
    return patch.object(Preemption, "way_for", lambda *_: None), Options(
        faults=Faults(), settings=SLOW, num_clients=16, num_decodes=1, urgent_within_s=1.3
    )


CLASS_SEAMS = {
    "grant against urgent rooms": taken_within_grants,
    "pages kept on prefill": taken_again_on_prefill,
    "way for urgent rooms": nobody_makes_way,
}
