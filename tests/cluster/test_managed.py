"""Real roles under a service manager: readiness, pings from the loop that computes, an orderly stop."""

import contextlib
import signal
import threading
import time

import httpx
from baton.cluster.process.sd_notify import PINGS_PER_LIMIT
from baton.tests.cluster.managed import managed
from baton.tests.ports import free_port

WATCHDOG_S = 2.0
DRAIN_S = 30.0
QUIET = "--watchdog-s=0"  # the process's own watchdog stays out of it
WORKER = (
    "--device=cpu",
    "--dtype=float32",
    "--kv-memory-mb=8",
    "--threads=1",
    f"--drain-timeout-s={DRAIN_S}",
    QUIET,
)


def router_flags(model):
    port, control = free_port(), f"tcp://127.0.0.1:{free_port()}"
    flags = (
        f"--model={model}",
        f"--port={port}",
        f"--control-bind={control}",
        f"--drain-timeout-s={DRAIN_S}",
        QUIET,
    )
    flags += ("--canary-s=0",)  # the request that hangs is the test's
    return f"http://127.0.0.1:{port}", control, flags


def ask(url, model):
    """A request in a thread of its own: its worker hangs, and another may answer it or none."""
    body = {"model": model.name, "prompt": [5, 6, 7], "max_tokens": 4}

    def post():
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{url}/v1/completions", json=body, timeout=30)

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    return thread


def test_managed_roles_report_ready_ping_and_stop_and_hung_ones_are_killed(served_dir, tmp_path):
    url, control, flags = router_flags(served_dir)
    hang = {"BATON_FAULT": "prefill:chunk:1:hang", "BATON_ALLOW_FAULTS": "1"}
    own = (f"--model={served_dir}", f"--router={control}", *WORKER)
    with (
        managed(tmp_path / "p", "prefill", *own, watchdog_s=WATCHDOG_S, env=hang) as prefill,
        managed(tmp_path / "d", "decode", *own, watchdog_s=WATCHDOG_S) as decode,
    ):
        for worker in (prefill, decode):
            worker.wait_for("STATUS=waiting for a router", 90)
            assert not worker.has_heard("READY=1")  # nobody could give it work
        with managed(tmp_path / "r", "router", *flags, watchdog_s=WATCHDOG_S) as router:
            router.wait_for("READY=1", 60)
            assert httpx.get(f"{url}/health").status_code == 200
            for worker in (prefill, decode):
                worker.wait_for("READY=1", 60)
            prefill.wait_for_pings(
                2 * PINGS_PER_LIMIT, 60
            )  # an idle loop moves; at which pace is for unit/cluster/process/test_sd_notify.py
            asking = ask(url, served_dir)
            assert prefill.watch(WATCHDOG_S, 60)  # its I/O thread goes on, its loop does not
            assert prefill.process.wait(60) == -signal.SIGABRT
            leave(decode)
            leave(router)
            asking.join(10)


def leave(role):
    """SIGTERM ends it in order: STOPPING first, exit code 0 within the drain time."""
    began = time.monotonic()
    role.process.send_signal(signal.SIGTERM)
    role.wait_for("STOPPING=1", DRAIN_S)
    assert role.process.wait(DRAIN_S) == 0, role.log.read_text()
    assert time.monotonic() - began < DRAIN_S + 5
