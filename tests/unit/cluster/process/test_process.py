"""Starting, signals and exit codes."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from baton.cluster.errors import ConfigError, StartupError
from baton.cluster.process.log import PACKAGE, configure
from baton.cluster.process.process import (
    EXIT_CANNOT_START,
    EXIT_CRASHED,
    EXIT_OK,
    EXIT_USAGE,
    PARENT_VARIABLE,
    Shutdown,
    report_cannot_start,
    run_phases,
    run_role,
)


def run_child(code, *, env=None, **kwargs):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/", env={**os.environ, **(env or {})},
        **kwargs,
    )  # fmt: skip


def test_phases_run_in_order_and_are_logged_with_their_time(caplog):
    clock = iter([0.0, 1.25, 10.0, 10.5])
    order = []
    with caplog.at_level(logging.INFO, logger="baton"):
        run_phases(
            [("loading model", lambda: order.append(1)), ("opening", lambda: order.append(2))], clock.__next__
        )
    assert order == [1, 2]
    assert [(r.getMessage(), r.fields["seconds"]) for r in caplog.records if r.levelno == logging.INFO] == [
        ("loading model done", 1.25),
        ("opening done", 0.5),
    ]


def test_a_failed_phase_leaves_the_rest_undone():
    def fail():
        raise StartupError("no")

    with pytest.raises(StartupError):
        run_phases([("a", fail), ("b", lambda: pytest.fail("ran"))])


def test_a_start_that_fails_is_one_line_and_exit_code_1(capfd):
    def start():
        raise StartupError("port 8000 is in use;\nchoose another --port")

    assert run_role("baton router", start, {}) == EXIT_CANNOT_START
    assert capfd.readouterr().err == "baton router: port 8000 is in use; choose another --port\n"


def test_a_wrong_setting_is_one_line_and_exit_code_2(capfd):
    def start():
        raise ConfigError("--port 99999: above the largest allowed, 65535")

    assert run_role("baton router", start, {}) == EXIT_USAGE == 2
    assert capfd.readouterr().err == "baton router: --port 99999: above the largest allowed, 65535\n"


def test_an_unexpected_error_names_its_type_and_how_to_see_more(capfd):
    def start():
        raise KeyError("k")

    assert run_role("baton router", start, {}) == EXIT_CANNOT_START
    assert capfd.readouterr().err == "baton router: KeyError: 'k'; --log-level debug shows the traceback\n"


def test_with_json_logs_a_failed_start_is_a_record_except_in_a_child(monkeypatch):
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.handlers[:], root.level, logging.getLogger(PACKAGE).level
    configure("up", log_format="json", stream=stream)
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    try:
        report_cannot_start("baton up", StartupError("no GPU"))
        monkeypatch.setenv(PARENT_VARIABLE, "1")
        report_cannot_start("baton router", StartupError("no port"))
    finally:
        root.handlers[:], root.level = before[0], before[1]
        logging.getLogger(PACKAGE).setLevel(before[2])
    record = json.loads(stream.getvalue())
    assert (record["level"], record["message"], record["reason"]) == ("error", "cannot start", "no GPU")
    assert err.getvalue() == "baton router: no port\n", "the launcher looks for this line"


def test_a_crash_while_serving_is_logged_with_its_traceback(caplog):
    def serve():
        raise RuntimeError("boom")

    assert run_role("baton decode", lambda: serve, {}) == EXIT_CRASHED
    assert caplog.records[-1].exc_info is not None


def test_the_return_value_of_serving_is_the_exit_code():
    assert run_role("baton decode", lambda: lambda: EXIT_OK, {}) == EXIT_OK
    assert run_role("baton decode", lambda: lambda: 3, {}) == 3


def test_the_first_signal_drains_and_the_second_stops():
    changes = []
    shutdown = Shutdown(lambda: changes.append(repr(shutdown)))
    shutdown.handle(signal.SIGTERM)
    assert shutdown.drain.is_set()
    assert not shutdown.stop.is_set()
    shutdown.handle(signal.SIGINT)
    assert shutdown.stop.is_set()
    assert changes == ["Shutdown(draining)", "Shutdown(stopping)"]


def test_real_signals_drain_stop_and_end_a_process():
    child = run_child("""
        import time
        from baton.cluster.process.process import Shutdown
        shutdown = Shutdown()
        shutdown.install()
        print("up", flush=True)
        shutdown.drain.wait(); print("drain", flush=True)
        shutdown.stop.wait(); print("stop", flush=True)
        while True: time.sleep(1)
    """)
    with child:
        for line, signum in (("up", signal.SIGTERM), ("drain", signal.SIGTERM), ("stop", signal.SIGINT)):
            assert child.stdout.readline() == line + "\n"
            child.send_signal(signum)
        assert child.wait(60) == 128 + signal.SIGINT


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_a_child_is_told_when_its_launcher_is_killed():
    launcher = run_child("""
        import os, subprocess, sys
        code = '''
        from baton.cluster.process.process import Shutdown, run_role
        def serve():
            print("up", flush=True)
            shutdown.drain.wait()
            print("told", flush=True)
            return 0
        shutdown = Shutdown()
        shutdown.install()
        run_role("x", lambda: serve)
        '''.replace("\\n        ", "\\n")
        env = {**os.environ, "BATON_PARENT_PID": str(os.getpid())}
        subprocess.Popen([sys.executable, "-c", code], env=env).wait()
    """)
    with launcher:
        assert launcher.stdout.readline() == "up\n"
        launcher.kill()
        assert launcher.stdout.readline() == "told\n"
        assert launcher.stdout.read() == ""  # the child held the pipe, so it is gone too


def test_a_child_of_an_already_dead_launcher_is_told_at_once():
    child = run_child(
        """
        from baton.cluster.process.process import Shutdown, watch_parent
        shutdown = Shutdown()
        shutdown.install()
        watch_parent()
        print(shutdown)
        """,
        env={"BATON_PARENT_PID": str(2**22)},
    )
    out, _ = child.communicate(timeout=60)
    assert out == "Shutdown(draining)\n"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_signal_that_comes_when_a_routers_loop_has_ended_is_quiet(loop):
    done = run_child(
        f"""
        import signal, {loop}
        from baton.router import __main__ as router

        class Ended:
            async def run(self, drain, stop): pass

        {loop}.run(router._run(Ended()))
        signal.raise_signal(signal.SIGTERM)
        """
    )
    assert done.communicate(timeout=60) == ("", "")
    assert done.returncode == 0
