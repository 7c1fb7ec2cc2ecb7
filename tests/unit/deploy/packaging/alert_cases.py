"""For every alert of Prometheus: series under which it fires, with its labels and summary, and series under
which it does not. Series have a value each minute, in promtool's notation: `0+5x30` is 0, 5, ..., 150."""

from dataclasses import dataclass, field

Series = dict[str, str]
ONE = {"model_name": "m"}
ROUTER = 'model_name="m",job="routers",instance="r1"'
OTHER_ROUTER = 'model_name="m",job="routers",instance="r2"'
DECODE = 'model_name="m",role="decode",worker="d1"'
OF_WORKER = f'{DECODE},job="workers",instance="w1"'
OF_ROUTER = f'{DECODE},job="routers",instance="r1"'  # the same series, exported by a router
PROCESS = 'job="routers",instance="r1"'
BUILD = f'baton_build_info{{{PROCESS},role="router",version="1"}}'


@dataclass(frozen=True, kw_only=True)
class AlertCase:
    """One alert after 60 minutes."""

    alert: str
    fires: Series
    quiet: Series
    summary: str
    severity: str = "warning"
    labels: dict[str, str] = field(default_factory=lambda: dict(ONE))
    later: tuple[tuple[int, Series, bool], ...] = ()
    """Further cases: minutes, series, and whether it fires after these minutes."""


def requests(**outcomes: int) -> Series:
    """So many requests a minute."""
    return {
        f'baton_requests_total{{{ROUTER},outcome="{outcome}"}}': f"0+{count}x60"
        for outcome, count in outcomes.items()
    }


def answers(**statuses: int) -> Series:
    """So many answers a minute, by s429 and the like."""
    return {
        f'baton_http_responses_total{{{ROUTER},status="{status[1:]}"}}': f"0+{count}x60"
        for status, count in statuses.items()
    }


def times(name: str, bound: float, below: float) -> Series:
    """A histogram, of which 100 values a minute are in the bucket up to `bound`, which begins at `below`."""
    buckets = {str(below): 0, str(bound): 100, "+Inf": 100}
    return {f'{name}_bucket{{{ROUTER},le="{le}"}}': f"0+{count}x60" for le, count in buckets.items()}


def events(*labels: str, **counts: int) -> Series:
    """Events of a worker a minute, at each of the processes with `labels`."""
    return {
        f'baton_worker_events_total{{{label},event="{event}"}}': f"0+{count}x60"
        for label in labels
        for event, count in counts.items()
    }


def registered(router: str, role: str, state: str, values: str) -> Series:
    return {f'baton_registered_workers{{{router},role="{role}",state="{state}"}}': values}


def lacks_prefill(first: str, second: str) -> Series:
    names = (f"baton_lacks_prefill{{{router}}}" for router in (ROUTER, OTHER_ROUTER))
    return dict(zip(names, (first, second), strict=True))


def pages(free: int, queued: int) -> Series:
    """Decode has `free` of 100 pages, and `queued` requests wait; two processes export the worker."""
    shown = {
        f'baton_worker_pages{{{label},kind="{kind}"}}': f"{value}x60"
        for label in (OF_WORKER, OF_ROUTER)
        for kind, value in {"free": free, "total": 100}.items()
    }
    return {**shown, f"baton_queued_requests{{{ROUTER}}}": f"{queued}x60"}


def ready(first: str, second: str) -> Series:
    return {f"baton_ready{{{ROUTER}}}": first, f"baton_ready{{{OTHER_ROUTER}}}": second}


def drafts(accepted: int, verifies: int) -> Series:
    return {
        f"baton_accepted_tokens_total{{{ROUTER}}}": f"0+{accepted}x60",
        f"baton_verify_steps_total{{{ROUTER}}}": f"0+{verifies}x60",
    }


def descriptors(num_open: int) -> Series:
    """A process has so many of 100 descriptors open."""
    shown = {"process_open_fds": num_open, "process_max_fds": 100}
    return {f"{name}{{{PROCESS}}}": f"{value}x60" for name, value in shown.items()} | {BUILD: "1x60"}


PAIR = 'prefill="p1",decode="d1",kind="PeerLost"'
LATE = "0x50 1x10"  # an increase within the last ten minutes
CASES = (
    AlertCase(
        alert="BatonNotReady", severity="critical", fires=ready("0x60", "0x60"), quiet=ready("0x60", "1x60"),
        summary="No router of m is ready, clients get 503.",
    ),
    AlertCase(
        alert="BatonRouterNotReady", fires=ready("0x60", "1x60"), quiet=ready("1x58 0x2", "1x60"),
        labels={"model_name": "m", "job": "routers", "instance": "r1"},
        summary="The router r1 is not ready, others of m are.",
    ),
    AlertCase(
        alert="BatonAbsent", severity="critical", fires={}, quiet=ready("0x60", "0x60"), labels={},
        summary="No router is scraped.",
    ),
    AlertCase(
        alert="BatonNoPrefill",
        fires=lacks_prefill("1x60", "1x60"),  # there never was one
        quiet=lacks_prefill("1x60", "0x60"),
        later=(
            (480, lacks_prefill("0x60 1x420", "0x60 1x420"), True),  # gone for 7 hours
            (480, lacks_prefill("1x420 0x60", "1x420 0x60"), False),  # it came back
            (60, registered(ROUTER, "prefill", "serving", "0x60") | lacks_prefill("0x60", "0x60"), False),
        ),  # the last one: aggregated workers only
        summary="No prefill worker of m serves, decode workers compute prompts.",
    ),
    AlertCase(
        alert="BatonWorkerStalled", severity="critical", labels={"model_name": "m", "role": "decode"},
        fires=registered(ROUTER, "decode", "stalled", "1x60"),
        quiet=registered(ROUTER, "decode", "stalled", "0x60")
        | registered(ROUTER, "decode", "draining", "1x60"),
        summary="A decode worker of m that no other can replace stands still.",
    ),
    AlertCase(
        alert="BatonPairFails", fires={f"baton_failing_pairs{{{ROUTER},{PAIR}}}": "3x60"},
        quiet={f"baton_failing_pairs{{{ROUTER},{PAIR}}}": "2x60"},
        labels={"model_name": "m", "prefill": "p1", "decode": "d1", "kind": "PeerLost"},
        summary="No request passes from prefill p1 to decode d1 (PeerLost).",
    ),
    AlertCase(
        alert="BatonWorkerUnregistered", labels={"model_name": "m", "role": "decode"},
        fires={
            f'baton_worker_up{{{OF_WORKER},state="serving"}}': "1x60",
            **registered(ROUTER, "decode", "serving", "1x60"),
            **registered(OTHER_ROUTER, "decode", "serving", "0x60"),
        },
        quiet={  # two processes export one worker
            f'baton_worker_up{{{OF_WORKER},state="serving"}}': "1x60",
            f'baton_worker_up{{{OF_ROUTER},state="serving"}}': "1x60",
            **registered(ROUTER, "decode", "serving", "1x60"),
        },
        summary="A router knows fewer decode workers of m than serve.",
    ),
    AlertCase(
        alert="BatonErrors", severity="critical", fires=requests(ok=90, failed=4, timeout=6),
        quiet=requests(ok=90, failed=2, timeout=2, cancelled=60, rejected=60),
        summary="10% of the requests to m fail or take too long.",
    ),
    AlertCase(
        alert="BatonRejections", fires=answers(s429=20, s200=80) | requests(ok=80, rejected=20),
        quiet=answers(s429=4, s200=96) | requests(ok=96, rejected=4),
        summary="20% of the requests to m get 429.",
    ),
    AlertCase(
        alert="BatonLongQueue", fires=times("baton_queue_wait_seconds", 10, 5),
        quiet=times("baton_queue_wait_seconds", 5, 2.5),
        summary="A tenth of the requests to m wait for a worker for 9.5s or more.",
    ),
    AlertCase(
        alert="BatonSlowFirstToken", fires=times("baton_time_to_first_token_seconds", 12.8, 6.4),
        quiet=times("baton_time_to_first_token_seconds", 6.4, 3.2),
        summary="The first token of m takes 12.48s (p95).",
    ),
    AlertCase(
        alert="BatonSlowTokens", fires=times("baton_inter_token_seconds", 0.64, 0.32),
        quiet=times("baton_inter_token_seconds", 0.16, 0.08),
        summary="The next token of m takes 624ms (p95).",
    ),
    AlertCase(
        alert="BatonQuarantine", fires={f'baton_router_events_total{{{ROUTER},event="quarantined"}}': LATE},
        quiet={
            f'baton_router_events_total{{{ROUTER},event="quarantined"}}': "7x60",
            f'baton_router_events_total{{{ROUTER},event="resumed"}}': LATE,
        },
        summary="A request to m ended three workers and was given up.",
    ),
    AlertCase(
        alert="BatonWorkersDie", severity="critical",
        fires={f"baton_worker_deaths_total{{{ROUTER}}}": "0x39 1x5 2x5 6x10"},
        quiet={  # three routers see the same death
            f'baton_worker_deaths_total{{model_name="m",instance="r{i}"}}': "0x40 1x20" for i in range(3)
        },
        summary="6 workers of m were lost in 30 minutes.",
    ),
    AlertCase(
        alert="BatonWorkerAvoided", fires={f"baton_ejections_total{{{ROUTER}}}": LATE},
        quiet={f"baton_ejections_total{{{ROUTER}}}": "5x60"},
        summary="A worker of m failed so often that routers avoid it.",
    ),
    AlertCase(
        alert="BatonDecodeFull", fires=pages(free=2, queued=3), quiet=pages(free=2, queued=0),
        summary="Decode workers of m have no KV pages left, and requests wait.",
    ),
    AlertCase(
        alert="BatonHandoffsFail",
        fires=events(OF_WORKER, OF_ROUTER, requests=100, failed=10, handoffs_aborted=10),
        quiet=events(OF_WORKER, OF_ROUTER, requests=100, failed=2, handoffs_aborted=2),
        summary="20% of the attempts at decode workers of m fail.",
    ),
    AlertCase(
        alert="BatonDamagedBlocks", severity="critical", labels={"model_name": "m", "worker": "d1"},
        fires={f'baton_worker_events_total{{{OF_WORKER},event="digest_mismatches"}}': LATE},
        quiet=events(OF_WORKER, digest_mismatches=0, repulls=5),
        summary="The decode worker d1 got KV blocks with wrong digests.",
    ),
    AlertCase(
        alert="BatonRepeatedBlocks", fires=events(OF_WORKER, OF_ROUTER, handoff_blocks=100, repulls=10),
        quiet=events(OF_WORKER, OF_ROUTER, handoff_blocks=100, repulls=1),
        summary="10% of the KV blocks of m are asked for again.",
    ),
    AlertCase(
        alert="BatonCompilesWhileServing", severity="info", labels={"model_name": "m", "worker": "d1"},
        fires={f"baton_worker_captures_after_ready_total{{{OF_WORKER}}}": LATE},
        quiet={f"baton_worker_compilations_after_ready_total{{{OF_WORKER}}}": "9x60"},
        summary="The worker d1 compiles kernels or captures graphs while it serves.",
    ),
    AlertCase(
        alert="BatonDraftsRejected", severity="info", fires=drafts(accepted=6, verifies=120),
        quiet=drafts(accepted=3, verifies=30),  # too few to tell
        summary="Hardly any draft for m is accepted, drafting costs time.",
    ),
    AlertCase(
        alert="BatonRestarts",
        fires={f"process_start_time_seconds{{{PROCESS}}}": "1x40 2x5 3x5 4x10", BUILD: "1x60"},
        quiet={  # another program's process, and one restart
            'process_start_time_seconds{job="node",instance="n1"}': "1x40 2x5 3x5 4x10",
            f"process_start_time_seconds{{{PROCESS}}}": "1x40 2x20",
            BUILD: "1x60",
        },
        labels={"job": "routers", "instance": "r1"},
        summary="The process at r1 started 3 times in 30 minutes.",
    ),
    AlertCase(
        alert="BatonDescriptors",
        fires=descriptors(90), quiet=descriptors(80),
        labels={"job": "routers", "instance": "r1"},
        summary="The process at r1 uses 90% of its file descriptors.",
    ),
    AlertCase(
        alert="BatonStrangers", labels={"model_name": "m", "instance": "r1"},
        fires={f'baton_router_events_total{{{ROUTER},event="control_denied"}}': "0+1x60"},
        quiet={f'baton_router_events_total{{{ROUTER},event="control_denied"}}': "0x59 8"},
        summary="Connections to the control port of r1 are refused for their keys.",
    ),
)  # fmt: skip
