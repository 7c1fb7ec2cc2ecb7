"""`baton up` with children that are tiny scripts: supervision, readiness, draining and endings."""

import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from baton.cluster.config.load import load_config
from baton.cluster.config.roles import UpConfig
from baton.cluster.errors import ConfigError, StartupError
from baton.deploy.cli.top import clients_of
from baton.deploy.up import supervise
from baton.deploy.up.gpu_list import Gpu
from baton.deploy.up.launcher import Cluster, fetch, remove_stale_directories
from baton.deploy.up.serve import without_prefill
from baton.tests.ports import free_port

ROUTER = """
    import http.server, json, os, signal, sys
    port = int(next(f for f in sys.argv if f.startswith("--port=")).partition("=")[2])
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            states = [("prefill", "starting" if os.path.exists("wait") else "serving"), ("decode", "serving")]
            workers = [{"role": role, "state": state} for role, state in states]
            body = json.dumps({"router": {"pid": os.getpid()}, "workers": workers}).encode()
            self.send_response(200); self.end_headers(); self.wfile.write(body)
        def log_message(self, *_): pass
    open(os.path.join(os.getcwd(), "control"), "w").close()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
WORKER = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("working", flush=True)
    while True: time.sleep(0.05)
"""
SEES_GPU = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("GPU", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    while True: time.sleep(0.05)
"""
STUBBORN = """
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("stubborn", flush=True)
    while True: time.sleep(0.05)
"""
CANNOT = """
    import sys
    print("loading", flush=True)
    sys.stderr.write("baton decode: head was trained for hidden size 9; choose another --draft\\n")
    sys.exit(1)
"""
PORT_TAKEN = """
    import sys, time
    time.sleep(0.5)
    sys.stderr.write("baton router: cannot listen on 127.0.0.1; choose another --port\\n")
    sys.exit(1)
"""


def commands(**scripts):
    """A `command_of` that runs the given script per role."""
    all_scripts = {"router": ROUTER, "prefill": WORKER, "decode": WORKER, **scripts}

    def command_of(role, flags):
        return [sys.executable, "-c", textwrap.dedent(all_scripts[role]), *flags]

    return command_of


def poll_until(is_true, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def runtime():
    """A directory for sockets; pytest's own are too long for one."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="up-") as directory:
        yield Path(directory)


@pytest.fixture
def launch(runtime):
    clusters = []

    def start(port=0, config="", env=None, routers=1, gpus=(), model="/tmp", **scripts):
        output = io.StringIO()
        env = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), **(env or {})}
        settings = UpConfig(
            model=str(model), config=config, routers=routers, **({} if port is None else {"port": port})
        )
        cluster = Cluster(
            settings, env=env, output=output, command_of=commands(**scripts), gpus_of=lambda env: tuple(gpus)
        )
        clusters.append(cluster)
        cluster.start()
        return cluster, output

    yield start
    for cluster in clusters:
        cluster.stop()


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_cluster_gets_ready_and_stops_leaving_no_process_and_no_file(launch, runtime):
    cluster, output = launch()
    assert cluster.wait_ready(60)
    children = cluster.children
    assert [child.role for child in children] == ["router", "prefill", "decode"]
    directory = next(runtime.iterdir())
    assert directory.stat().st_mode & 0o777 == 0o700
    poll_until(lambda: "decode-0  | working\n" in output.getvalue())
    cluster.stop()
    assert all(is_gone(child.pid) for child in children)
    assert list(runtime.iterdir()) == []
    assert cluster.wait_ready(1) is False


@pytest.mark.parametrize("source", ["table", "variable"])
def test_the_launcher_reports_the_host_and_port_of_the_router(launch, tmp_path, source):
    port = free_port()
    path = tmp_path / "c.toml"
    path.write_text(f"[router]\nport = {port}\n" if source == "table" else "")
    env = {} if source == "table" else {"BATON_ROUTER_PORT": str(port)}
    cluster, _ = launch(port=None, config=str(path), env=env)
    assert cluster.wait_ready(60)
    assert cluster.url == f"http://127.0.0.1:{port}"
    assert cluster.config.port == port


def test_a_killed_child_comes_back_with_another_pid(launch):
    cluster, _ = launch()
    assert cluster.wait_ready(60)
    victim = cluster.children[2]
    os.kill(victim.pid, signal.SIGKILL)
    poll_until(lambda: cluster.children[2].num_starts == 2 and cluster.children[2].pid)
    assert cluster.children[2].pid != victim.pid
    assert [child.num_starts for child in cluster.children] == [1, 1, 2]


def test_a_restarted_worker_keeps_its_gpu(launch, toy_checkpoint):
    gpus = [Gpu(index=index, name="NVIDIA H200", memory=140 << 30) for index in ("2", "5")]
    cluster, output = launch(gpus=gpus, model=toy_checkpoint("llama"), prefill=SEES_GPU, decode=SEES_GPU)
    assert cluster.wait_ready(60)
    assert (cluster.config.prefill, cluster.config.decode) == (1, 1)
    poll_until(lambda: output.getvalue().count("| GPU ") == 2)
    os.kill(cluster.children[2].pid, signal.SIGKILL)
    poll_until(lambda: output.getvalue().count("| GPU ") == 3)
    lines = sorted(line for line in output.getvalue().splitlines() if "| GPU " in line)
    assert lines == ["decode-0  | GPU 5", "decode-0  | GPU 5", "prefill-0 | GPU 2"]


def test_dealing_sees_the_model_and_the_device_of_a_roles_own_table(toy_checkpoint, tmp_path, runtime):
    gpus = [Gpu(index=index, name="NVIDIA H200", memory=140 << 30) for index in ("2", "5")]
    path, toy = tmp_path / "c.toml", toy_checkpoint("llama")
    path.write_text(f'[decode]\nmodel = "{toy}"\n[prefill]\nmodel = "{toy}"\ndevice = "cpu"\n')
    config = load_config(UpConfig, [f"--config={path}"], {"BATON_UP_MODEL": str(tmp_path / "none")})
    cluster = Cluster(config, env={"XDG_RUNTIME_DIR": str(runtime)}, gpus_of=lambda env: tuple(gpus))
    cluster.prepare()
    assert [(place.worker, place.gpu.index) for place in cluster.settled.places] == [
        ("decode-0", "2"),
        ("decode-1", "5"),
    ]
    assert cluster.config.prefill == 1
    cluster.stop()


def test_decode_alone_on_the_cpu_is_one_worker_without_a_gpu(toy_checkpoint, tmp_path, runtime):
    gpus = [Gpu(index=index, name="NVIDIA H200", memory=140 << 30) for index in ("2", "5")]
    path = tmp_path / "c.toml"
    path.write_text('[decode]\ndevice = "cpu"\n')
    config = load_config(
        UpConfig, [f"--config={path}", f"--model={toy_checkpoint('llama')}", "--prefill=0"], {}
    )
    cluster = Cluster(config, env={"XDG_RUNTIME_DIR": str(runtime)}, gpus_of=lambda env: tuple(gpus))
    cluster.prepare()
    assert (cluster.config.prefill, cluster.config.decode, cluster.settled.places) == (0, 1, ())
    cluster.stop()


def test_a_model_without_a_readable_config_is_refused_before_dealing(launch, runtime, tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        launch(gpus=[Gpu(index="0", name="NVIDIA H200", memory=140 << 30)], model=tmp_path)
    assert list(runtime.iterdir()) == []


def test_gpus_on_a_cpu_are_one_clear_error(runtime):
    cluster = Cluster(UpConfig(model="/tmp", gpus="0", device="cpu"), env={"XDG_RUNTIME_DIR": str(runtime)})
    with pytest.raises(ConfigError, match="--gpus 0: --device cpu uses no GPU"):
        cluster.start()
    assert list(runtime.iterdir()) == []


def test_serve_starts_no_prefill_worker_and_refuses_to():
    table = load_config(UpConfig, ["--model=m"], {"BATON_UP_PREFILL": "2"})
    assert without_prefill(table).prefill == 0
    assert without_prefill(load_config(UpConfig, ["--model=m", "--prefill=0"], {})).prefill == 0
    with pytest.raises(ConfigError, match="--prefill 2: baton serve starts no prefill worker"):
        without_prefill(load_config(UpConfig, ["--model=m", "--prefill=2"], {}))


def test_a_hub_that_cannot_be_reached_is_one_line_and_exit_code_1(tmp_path, runtime):
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    env |= {"XDG_RUNTIME_DIR": str(runtime), "NOTIFY_SOCKET": str(tmp_path / "notify")}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(env["NOTIFY_SOCKET"])
        done = subprocess.run(
            [sys.executable, "-m", "baton", "up", "--model=org/name", "--device=cpu", "--log-level=error"],
            cwd="/", capture_output=True, text=True, check=False, timeout=120, env=env,
        )  # fmt: skip
        manager.settimeout(1)
        told = manager.recv(4096)
    assert told == b"EXTEND_TIMEOUT_USEC=30000000\nSTATUS=fetching checkpoints"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("baton up: --model 'org/name' could not be fetched from")
    assert list(runtime.iterdir()) == []


def test_children_that_ignore_sigterm_and_their_children_are_ended(launch, runtime, monkeypatch):
    monkeypatch.setattr(
        supervise, "TERM_AGAIN_S", 0.3
    )  # the times themselves are a matter of unit/deploy/up/test_supervise.py
    monkeypatch.setattr(supervise, "KILL_AFTER_S", 0.6)
    cluster, output = launch(prefill=STUBBORN)
    assert cluster.wait_ready(60)
    poll_until(lambda: "stubborn" in output.getvalue())
    tree = [child.pid for child in cluster.children]
    tree += [grandchild.pid for pid in tree for grandchild in psutil.Process(pid).children()]
    assert len(tree) == 4
    cluster.stop()
    poll_until(lambda: all(is_gone(pid) for pid in tree))  # who was killed dies when it gets a core
    assert list(runtime.iterdir()) == []


def test_a_child_that_cannot_start_stops_the_rest_with_its_own_error(launch):
    cluster, output = launch(router=WORKER, decode=CANNOT)
    with pytest.raises(
        StartupError, match=r"^decode-0: head was trained for hidden size 9; choose another --draft$"
    ):
        cluster.wait_ready(60)
    cluster.stop()
    assert [child.pid for child in cluster.children] == [None, None, None]
    assert "decode-0  | loading" in output.getvalue()
    assert "head was trained" not in output.getvalue()  # said once, by whoever reports the failure


def test_another_server_at_the_port_does_not_make_the_cluster_ready(launch):
    stranger, _ = launch()
    assert stranger.wait_ready(60)
    cluster, _ = launch(router=PORT_TAKEN, port=stranger.config.port)
    with pytest.raises(StartupError, match=r"^router: cannot listen on 127.0.0.1; choose another --port$"):
        cluster.wait_ready(60)


def test_directories_of_dead_launchers_are_removed_and_others_stay(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f"baton-{dead.pid}-x", f"baton-{os.getpid()}-x", "baton-notes-x"):
        (tmp_path / name).mkdir()
    remove_stale_directories(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(
        [f"baton-{os.getpid()}-x", "baton-notes-x"]
    )


MAIN = """
    import sys
    from baton.deploy.up import launcher
    scripts = {scripts!r}
    launcher.role_command = lambda role, flags: [sys.executable, "-c", scripts[role], *flags]
    sys.exit(launcher.main(sys.argv[1:]))
"""


def start_main(runtime, *flags, **scripts):
    all_scripts = {"router": ROUTER, "prefill": WORKER, "decode": WORKER, **scripts}
    code = textwrap.dedent(MAIN).format(
        scripts={role: textwrap.dedent(text) for role, text in all_scripts.items()}
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, "--model", "/tmp", "--port", "0", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
    )  # fmt: skip


BOTH_PORTS = """
    import socket, threading, time
    def serve(port):
        server = http.server.HTTPServer(("127.0.0.1", port), Handler, bind_and_activate=False)
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.server_bind()
        server.server_activate()
        server.serve_forever()
    own_port = int(next(f for f in sys.argv if f.startswith("--own-port=")).partition("=")[2])
    threading.Thread(target=serve, args=(port,), daemon=True).start()
    while "HELD" in os.environ and "control-1" in " ".join(sys.argv) and not os.path.exists("go"): time.sleep(0.02)
    serve(own_port)
"""  # noqa: E501
SHARING = ROUTER.replace(
    '    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()', BOTH_PORTS
)


def test_several_routers_are_ready_when_each_own_port_says_so(launch, runtime):
    cluster, _ = launch(routers=2, router=SHARING, env={"HELD": "1"})
    assert len(cluster.own_urls) == 2
    poll_until(
        lambda: fetch(cluster.url, "/ready") is not None and fetch(cluster.own_urls[0], "/ready") is not None
    )
    assert not cluster._is_ready(all_workers=True)
    (next(runtime.iterdir()) / "go").touch()
    assert cluster.wait_ready(60)


LATE_PREFILL = ROUTER.replace('"control"), "w")', '"control"), "w"); open("wait", "w")')


def test_a_cluster_is_ready_when_all_its_workers_serve(launch, runtime):
    """A decode worker alone makes the router ready, and would compute the prompts itself."""
    cluster, _ = launch(router=LATE_PREFILL)
    poll_until(lambda: cluster._is_ready(all_workers=False))
    assert not cluster._is_ready(all_workers=True)
    (next(runtime.iterdir()) / "wait").unlink()
    assert cluster.wait_ready(60)


def test_up_prints_the_own_port_of_each_router(runtime):
    with start_main(runtime, "--routers", "2", router=SHARING) as process:
        assert process.stdout.readline().startswith("ready  http://127.0.0.1:")
        command, urls = process.stdout.readline().split(" --url ")
        process.send_signal(signal.SIGINT)
    assert command == "watch  baton top"
    assert len({client.url for client in clients_of(urls)}) == 2


def test_up_says_what_is_missing_while_decode_serves_alone(runtime):
    with start_main(runtime, router=LATE_PREFILL) as process:
        line = process.stdout.readline()
        assert line.startswith("serving  http://127.0.0.1:")
        assert line.endswith(" s), not yet started: 1 of 1 prefill\n")
        (next(runtime.iterdir()) / "wait").unlink()
        assert process.stdout.readline().startswith("ready  http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_up_says_ready_and_a_signal_ends_everything(runtime, signum):
    with start_main(runtime) as process:
        assert process.stdout.readline().startswith("ready  http://127.0.0.1:")
        tree = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(tree) == 3
        began = time.monotonic()
        process.send_signal(signum)
        assert process.wait(60) == 0
        assert time.monotonic() - began < 30.0, (
            "nothing is waited for; the times are a matter of unit/deploy/up/test_supervise.py"
        )
    assert all(is_gone(pid) for pid in tree)
    assert list(runtime.iterdir()) == []


DRAINING = (
    ROUTER.replace("lambda *_: os._exit(0)", "drain")
    .replace(
        "    open(os.path",
        """    def drain(*_):
        print("draining", flush=True)
        def end():
            time.sleep(float(os.environ["DRAIN_S"]))
            print("drained", flush=True)
            os._exit(0)
        threading.Thread(target=end).start()
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    open(os.path""",
    )
    .replace("import http.server,", "import http.server, threading, time,")
)


@pytest.mark.parametrize(
    ("signals", "drain_s", "shortest", "longest", "drains"),
    [
        ([signal.SIGTERM], 1.5, 1.5, 30.0, True),
        ([signal.SIGINT], 1.5, 1.5, 30.0, True),
        ([signal.SIGINT, signal.SIGINT], 60, 0.0, 30.0, False),
        ([signal.SIGTERM, signal.SIGTERM], 60, 0.0, 30.0, False),
        ([signal.SIGTERM, signal.SIGINT], 60, 0.0, 30.0, False),
    ],
)
def test_the_first_signal_drains_and_a_second_does_not_wait(
    runtime, monkeypatch, signals, drain_s, shortest, longest, drains
):
    monkeypatch.setenv("DRAIN_S", str(drain_s))
    with start_main(runtime, "--drain-timeout-s", "50", router=DRAINING) as process:
        assert process.stdout.readline().startswith("ready")
        began = time.monotonic()
        for signum in signals[:-1]:
            process.send_signal(signum)
            assert any("draining" in line for line in process.stderr)
        process.send_signal(signals[-1])
        err = process.communicate(timeout=55)[1]
        assert process.returncode == 0
        assert shortest <= time.monotonic() - began < longest
    assert ("drained" in err) is drains
    assert list(runtime.iterdir()) == []


def test_a_signal_delivered_to_another_thread_is_heard_during_the_drain(launch):
    cluster, output = launch(router=DRAINING, env={"DRAIN_S": "60"})
    assert cluster.wait_ready(60)
    hurry = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: hurry.set())

    def interrupt():
        poll_until(lambda: "draining" in output.getvalue())
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    thread = threading.Thread(target=interrupt)
    thread.start()
    began = time.monotonic()
    cluster.stop(hurry, drain_s=60)
    thread.join()
    signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - began < 30.0


def test_a_drain_time_of_zero_waits_for_the_last_writes_only(runtime, monkeypatch):
    monkeypatch.setenv("DRAIN_S", "60")
    with start_main(runtime, "--drain-timeout-s", "0", router=DRAINING) as process:
        assert process.stdout.readline().startswith("ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(50) == 0


def test_up_with_a_child_that_cannot_start_exits_with_1_and_that_line(runtime):
    with start_main(runtime, router=WORKER, decode=CANNOT) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert err.splitlines()[-1] == (
        "baton up: decode-0: head was trained for hidden size 9; choose another --draft"
    )
    assert "Traceback" not in err
    assert list(runtime.iterdir()) == []


LATE_CANNOT = """
    import os, sys, time
    while not os.path.exists("fail"): time.sleep(0.05)
    sys.stderr.write("baton prefill: no memory for the KV pool; choose another --kv-memory-mb\\n")
    sys.exit(1)
"""


def test_up_ends_with_the_reason_of_a_prefill_worker_that_fails_late(runtime):
    """Decode alone serves by then, which is no reason to go on without the worker that was ordered."""
    with start_main(runtime, router=LATE_PREFILL, prefill=LATE_CANNOT) as process:
        assert process.stdout.readline().startswith("serving  http://127.0.0.1:")
        (next(runtime.iterdir()) / "fail").touch()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == "", "it was never ready"
    reason = "baton up: prefill-0: no memory for the KV pool; choose another --kv-memory-mb"
    assert err.splitlines()[-1] == reason
    assert list(runtime.iterdir()) == []


def test_up_without_a_model_is_one_line_and_exit_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "baton", "up", "--port", "0"],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--model DIR" in done.stderr


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--help"], 0, "commands:"),
        (["version"], 0, "torch "),
        (["rooter"], 2, "did you mean 'router'?"),
        (["xyzzy"], 2, "commands: up, router"),
    ],
)
def test_baton_without_a_role_prints_help_version_or_a_hint(argv, code, words):
    done = subprocess.run(
        [sys.executable, "-m", "baton", *argv], cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert words in done.stdout + done.stderr
