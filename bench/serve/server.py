"""Server-side figures of a baton endpoint under load: the difference of two readings of its /metrics."""

from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from .client import LoadClient, Unexpected

Reading = Mapping[str, float]
TIERS = {
    ("baton_worker_tier_moved_bytes_total", "host", "in"): "host_in",
    ("baton_worker_tier_moved_bytes_total", "host", "out"): "host_out",
    ("baton_worker_tier_moved_bytes_total", "disk", "in"): "disk_in",
    ("baton_worker_tier_moved_bytes_total", "disk", "out"): "disk_out",
}  # by (series, tier, direction)
WANTED = {
    "handoff_s": "baton_handoff_seconds_sum",
    "handoffs": "baton_handoff_seconds_count",
    "handoff_bytes": "baton_handoff_bytes_total",
    "prefill_s": "baton_prefill_seconds_sum",
    "prefills": "baton_prefill_seconds_count",
    "prefill_wait_s": "baton_prefill_queue_seconds_sum",
    "prompt": "baton_prompt_tokens_total",
    "cached": "baton_cached_prompt_tokens_total",
    "retries": "baton_retries_total",
    "verifies": "baton_verify_steps_total",
    "accepted": "baton_accepted_tokens_total",
    "drafted": "baton_drafted_tokens_total",
    "tier_hits": "baton_worker_tier_hit_tokens_total",
}
NAMES = (*WANTED, *TIERS.values())


async def read_metrics(routers: Sequence[LoadClient]) -> Reading:
    """The totals over all routers; empty if one shows no metrics of baton or the key may not read them."""
    readings = [await _read(client) for client in routers]
    if not all(readings):
        return {}
    return {name: sum(reading.get(name, 0.0) for reading in readings) for name in NAMES}


async def _read(client: LoadClient) -> Reading:
    try:
        status, body = await client.get("/metrics")
    except (OSError, EOFError, Unexpected):
        return {}
    return totals(body.decode("utf-8", "replace")) if status == 200 else {}


def totals(text: str) -> Reading:
    """Totals by the keys of WANTED, and of the copies between tiers."""
    names = {series: name for name, series in WANTED.items()}
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = sample.labels
                moved = (sample.name, labels.get("tier", ""), labels.get("direction", ""))
                name = TIERS.get(moved) or names.get(sample.name)
                if name is not None:
                    found[name] = found.get(name, 0.0) + sample.value
    except ValueError:  # not a sample line of baton's metrics
        return {}
    return found if "prompt" in found else {}


def said(before: Reading, after: Reading) -> dict[str, float]:
    """Figures of the time between two readings.

    A figure without events is left out. All are left out when a counter fell, since a process has restarted.
    """
    if not before or not after:
        return {}
    gone = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in NAMES}
    if min(gone.values()) < 0:  # a process has restarted, or another router answered
        return {}
    shown = {
        "accept_length": _ratio(gone["accepted"] + gone["verifies"], gone["verifies"]),
        "accepted_share": _ratio(gone["accepted"], gone["drafted"]),
        "handoff_ms": _ratio(1000 * gone["handoff_s"], gone["handoffs"]),
        "handoff_mb": _ratio(gone["handoff_bytes"] / 1e6, gone["handoffs"]),
        "handoff_mb_per_s": _ratio(gone["handoff_bytes"] / 1e6, gone["handoff_s"]),
        "prefill_ms": _ratio(1000 * gone["prefill_s"], gone["prefills"]),
        "prefill_wait_ms": _ratio(1000 * gone["prefill_wait_s"], gone["prefills"]),
        "cached_share": _ratio(gone["cached"], gone["prompt"]),
        "retries": gone["retries"],
        "tier_hit_share": _ratio(gone["tier_hits"], gone["prompt"]) if gone["tier_hits"] else None,
        **{f"{name}_mb": gone[name] / 1e6 for name in TIERS.values() if gone[name]},
    }
    return {name: value for name, value in shown.items() if value is not None}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
