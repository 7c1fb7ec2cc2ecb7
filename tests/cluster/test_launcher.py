"""`baton up` with children that are tiny scripts: supervision, endings, and what children are told."""

import io
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from baton.cluster.config import COMMAND_LINE, FILE, DecodeConfig, PrefillConfig, RouterConfig, UpConfig, load_config
from baton.cluster.errors import ConfigError, StartupError
from baton.deploy.launcher import Cluster, child_environment, child_specs, remove_stale_directories

# --- what children are told -------------------------------------------------------------------------------------------


def told(config, env=None):
    """The config that each child ends up with, by name."""
    specs = child_specs(config, env or {}, Path("/run/x"), lambda role, flags: [role, *flags])
    classes = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
    return {spec.name: load_config(classes[spec.role], spec.argv[1:], {}) for spec in specs}


def test_endpoints_agree_between_the_children():
    for transport in ("ipc", "tcp"):
        children = told(UpConfig(model="m", prefill=2, decode=2, transport=transport))
        assert list(children) == ["router", "prefill-0", "prefill-1", "decode-0", "decode-1"]
        control = children["router"].control_bind
        assert {child.router for name, child in children.items() if name != "router"} == {control}
        assert control.startswith(f"{transport}://")
        binds = [children["prefill-0"].kv_bind, children["prefill-1"].kv_bind]
        assert transport == "tcp" or len(set(binds)) == 2


def test_settings_of_up_reach_the_children_that_know_them():
    children = told(UpConfig(model="m", chunk_size=64, spec_steps=2, no_draft=True, lease_s=2.5, prefix_cache=False))
    assert children["prefill-0"].chunk_size == 64
    assert children["decode-0"].spec_steps == 2
    assert children["decode-0"].no_draft
    assert (children["prefill-0"].lease_s, children["prefill-0"].prefix_cache) == (2.5, False)


def test_a_roles_own_table_beats_ups_table_and_ups_command_line_beats_both(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(
        "[up]\nkv_memory_mb = 100\nlease_s = 9\n"
        "[decode]\nkv_memory_mb = 200\nmax_running = 3\n"
        "[router]\nmax_queue = 5\n"
    )
    base = ["--model", "m", "--config", str(path)]
    config = load_config(UpConfig, base, {})
    assert config.explicit["kv_memory_mb"] == FILE
    children = told(config)
    assert (children["prefill-0"].kv_memory_mb, children["decode-0"].kv_memory_mb) == (100, 200)
    assert (children["decode-0"].max_running, children["decode-0"].lease_s, children["router"].max_queue) == (3, 9, 5)
    config = load_config(UpConfig, [*base, "--kv-memory-mb", "1024"], {})  # the default, and still the user's word
    assert config.explicit["kv_memory_mb"] == COMMAND_LINE
    assert told(config)["decode-0"].kv_memory_mb == 1024


def test_a_roles_own_variable_reaches_it_through_flags_alone():
    env = {"BATON_DECODE_MAX_RUNNING": "2", "PATH": "/bin"}
    assert told(UpConfig(model="m"), env)["decode-0"].max_running == 2
    child = child_environment(env, 3)
    assert [name for name in child if name.startswith("BATON_")] == ["BATON_PARENT_PID"]
    assert (child["OMP_NUM_THREADS"], child["OMP_WAIT_POLICY"], child["PATH"]) == ("3", "passive", "/bin")


def test_threads_are_divided_among_the_workers_of_a_role():
    cores = len(os.sched_getaffinity(0))
    assert told(UpConfig(model="m"))["decode-0"].threads == cores
    assert told(UpConfig(model="m", prefill=cores, decode=1))["decode-0"].threads == 1
    assert told(UpConfig(model="m", threads=7))["prefill-0"].threads == 7
    assert told(UpConfig(model="m"), {"OMP_NUM_THREADS": "5"})["prefill-0"].threads == 5


def test_paths_are_absolute_for_children_and_hub_ids_stay(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert told(UpConfig(model="here"))["router"].model == str(tmp_path / "here")
    assert told(UpConfig(model="org/name"))["router"].model == "org/name"


def test_a_wrong_value_for_a_child_shows_before_anything_runs(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[decode]\nmax_running = 0\n")
    cluster = Cluster(UpConfig(model="m", config=str(path)), env={"XDG_RUNTIME_DIR": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"\[decode\], key 'max_running'"):
        cluster.start()
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.toml"]


# --- real processes ---------------------------------------------------------------------------------------------------

ROUTER = """
    import http.server, json, os, signal, sys
    port = int(next(f for f in sys.argv if f.startswith("--port=")).partition("=")[2])
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            workers = [{"role": "prefill"}, {"role": "decode"}]
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


def poll_until(is_true, seconds=15.0):
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

    def start(port=0, **scripts):
        output = io.StringIO()
        env = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
        cluster = Cluster(UpConfig(model="m", port=port), env=env, output=output, command_of=commands(**scripts))
        clusters.append(cluster)
        cluster.start()
        return cluster, output

    yield start
    for cluster in clusters:
        cluster.stop()


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_cluster_gets_ready_and_stops_leaving_no_process_and_no_file(launch, runtime):
    cluster, output = launch()
    assert cluster.wait_ready(30)
    children = cluster.children
    assert [child.role for child in children] == ["router", "prefill", "decode"]
    directory = next(runtime.iterdir())
    assert directory.stat().st_mode & 0o777 == 0o700
    poll_until(lambda: "decode-0  | working\n" in output.getvalue())
    cluster.stop()
    assert all(is_gone(child.pid) for child in children)
    assert list(runtime.iterdir()) == []
    assert cluster.wait_ready(1) is False


def test_a_killed_child_comes_back_with_another_pid(launch):
    cluster, _ = launch()
    assert cluster.wait_ready(30)
    victim = cluster.children[2]
    os.kill(victim.pid, signal.SIGKILL)
    poll_until(lambda: cluster.children[2].num_starts == 2 and cluster.children[2].pid)
    assert cluster.children[2].pid != victim.pid
    assert [child.num_starts for child in cluster.children] == [1, 1, 2]


def test_children_that_ignore_sigterm_and_their_children_are_gone_within_5_s(launch, runtime):
    cluster, output = launch(prefill=STUBBORN)
    assert cluster.wait_ready(30)
    poll_until(lambda: "stubborn" in output.getvalue())
    tree = [child.pid for child in cluster.children]
    tree += [grandchild.pid for pid in tree for grandchild in psutil.Process(pid).children()]
    assert len(tree) == 4
    began = time.monotonic()
    cluster.stop()
    assert time.monotonic() - began < 5.0
    assert all(is_gone(pid) for pid in tree)
    assert list(runtime.iterdir()) == []


def test_a_child_that_cannot_start_stops_the_rest_and_its_line_is_the_error(launch):
    cluster, output = launch(router=WORKER, decode=CANNOT)
    with pytest.raises(StartupError, match=r"^decode-0: head was trained for hidden size 9; choose another --draft$"):
        cluster.wait_ready(30)
    cluster.stop()
    assert [child.pid for child in cluster.children] == [None, None, None]
    assert "decode-0  | loading" in output.getvalue()
    assert "head was trained" not in output.getvalue()  # said once, by whoever reports the failure


def test_whoever_else_answers_at_the_port_does_not_make_the_cluster_ready(launch):
    stranger, _ = launch()
    assert stranger.wait_ready(30)
    cluster, _ = launch(router=PORT_TAKEN, port=stranger.config.port)
    with pytest.raises(StartupError, match=r"^router: cannot listen on 127.0.0.1; choose another --port$"):
        cluster.wait_ready(30)


def test_directories_of_dead_launchers_are_removed_and_others_stay(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f"baton-{dead.pid}-x", f"baton-{os.getpid()}-x", "baton-notes-x"):
        (tmp_path / name).mkdir()
    remove_stale_directories(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([f"baton-{os.getpid()}-x", "baton-notes-x"])


MAIN = """
    import sys
    from baton.deploy import launcher
    scripts = {scripts!r}
    launcher.role_command = lambda role, flags: [sys.executable, "-c", scripts[role], *flags]
    sys.exit(launcher.main(sys.argv[1:]))
"""


def start_main(runtime, *flags, **scripts):
    all_scripts = {"router": ROUTER, "prefill": WORKER, "decode": WORKER, **scripts}
    code = textwrap.dedent(MAIN).format(scripts={role: textwrap.dedent(text) for role, text in all_scripts.items()})
    return subprocess.Popen(
        [sys.executable, "-c", code, "--model", "m", "--port", "0", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
    )  # fmt: skip


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_up_says_ready_and_a_signal_ends_everything_within_5_s(runtime, signum):
    with start_main(runtime) as process:
        assert process.stdout.readline().startswith("ready  http://127.0.0.1:")
        tree = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(tree) == 3
        began = time.monotonic()
        process.send_signal(signum)
        assert process.wait(10) == 0
        assert time.monotonic() - began < 5.0
    assert all(is_gone(pid) for pid in tree)
    assert list(runtime.iterdir()) == []


def test_up_with_a_child_that_cannot_start_exits_with_1_and_that_line(runtime):
    with start_main(runtime, router=WORKER, decode=CANNOT) as process:
        out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert out == ""
    assert err.splitlines()[-1] == (
        "baton up: decode-0: head was trained for hidden size 9; choose another --draft"
    )
    assert "Traceback" not in err
    assert list(runtime.iterdir()) == []


def test_up_without_a_model_is_one_line_and_exit_code_1():
    done = subprocess.run(
        [sys.executable, "-m", "baton", "up", "--port", "0"], cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
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
def test_the_baton_command_answers_for_itself(argv, code, words):
    done = subprocess.run([sys.executable, "-m", "baton", *argv], cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert words in done.stdout + done.stderr
