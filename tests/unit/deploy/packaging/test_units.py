"""The units of `baton deploy systemd`: systemd accepts them, and their settings reach the roles."""

import re
import shutil
import subprocess
import sys

import pytest
from baton.cluster.config.load import load_config
from baton.cluster.config.roles import DecodeConfig, PrefillConfig, RouterConfig
from baton.cluster.errors import ConfigError
from baton.deploy.packaging.units import OWN_WATCHDOG_S, UNITS, WATCHDOG_S, host_of, main, members, render

MOST_EXPOSED = {  # tenths
    "baton-router.service": 15, "baton-router-secrets.service": 15,
    "baton-prefill@.service": 20, "baton-decode@.service": 20,
}  # fmt: skip
ROLES = [unit for unit in MOST_EXPOSED if "secrets" not in unit]
SECRETS = """[router]
api_keys = "/etc/baton/api.json"
tls_cert = "/etc/live/fullchain.pem"
tls_key = "/etc/live/privkey.pem"
"""
COMMAND = f"--command={sys.executable}"
systemd_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not installed: apt-get install systemd",
)


def files_of(*flags):
    host, _ = host_of(["--prefix=/", "--model=/srv/m", COMMAND, *flags])
    return render(host)


def lines_of(files, unit):
    return files[f"{UNITS}/{unit}"].splitlines()


@pytest.fixture
def written(tmp_path):
    """The directory of the units as the command writes them, with everything switched on."""
    (tmp_path / "mine.toml").write_text(SECRETS)
    argv = [
        f"--prefix={tmp_path}",
        "--model=/srv/m",
        COMMAND,
        f"--config={tmp_path}/mine.toml",
        "--allow=10.0.0.0/8",
    ]
    assert main(argv) == 0
    return tmp_path / UNITS.lstrip("/")


@systemd_analyze
def test_systemd_finds_no_fault_in_the_units(written):
    names = ["baton-router.service", "baton-prefill@0.service", "baton-decode@1.service", "baton.target"]
    names += ["baton-router-secrets.path", "baton-router-secrets.service"]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(f"./{name}" for name in names)],
        cwd=written, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, [line for line in done.stderr.splitlines() if "baton" in line]) == (0, [])


@systemd_analyze
@pytest.mark.parametrize("unit", MOST_EXPOSED)
def test_s35_the_exposure_score_of_a_unit_stays_below_its_bound(written, unit):
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        f"--threshold={MOST_EXPOSED[unit]}",
        f"./{unit}",
    ]
    done = subprocess.run(command, cwd=written, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@systemd_analyze
def test_a_weakened_unit_exceeds_the_exposure_bound(written):
    unit = written / "baton-router.service"
    unit.write_text(re.sub(r"(?m)^(Capab|Restrict|Protect|SystemCall|IPAddress).*\n", "", unit.read_text()))
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=15", f"./{unit.name}"]
    assert subprocess.run(command, cwd=written, capture_output=True, timeout=60, check=False).returncode != 0


def test_roles_read_the_settings_of_their_unit(tmp_path):
    (tmp_path / "mine.toml").write_text(
        "[router]\nport = 9000\n[prefill]\nchunk_size = 512\n[decode]\nmax_running = 4\n"
    )
    files = files_of(f"--config={tmp_path}/mine.toml", "--draft=/srv/d", "--router=tcp://10.0.0.1:7100")
    path = tmp_path / "baton.toml"
    path.write_text(files["/etc/baton/baton.toml"])
    roles = (RouterConfig, PrefillConfig, DecodeConfig)
    router, prefill, decode = (load_config(role, [f"--config={path}"], {}) for role in roles)
    assert (router.model, router.port, router.watchdog_s) == ("/srv/m", 9000, OWN_WATCHDOG_S)
    assert (prefill.draft, prefill.chunk_size, prefill.router) == ("/srv/d", 512, "tcp://10.0.0.1:7100")
    assert (decode.max_running, decode.router) == (4, "tcp://10.0.0.1:7100")


def test_a_process_writes_its_stacks_before_the_manager_ends_it():
    assert OWN_WATCHDOG_S + 1 < WATCHDOG_S


def test_the_manager_waits_longer_than_the_drain(tmp_path):
    (tmp_path / "mine.toml").write_text("[decode]\ndrain_timeout_s = 300\n")
    files = files_of(f"--config={tmp_path}/mine.toml")
    assert "TimeoutStopSec=315" in lines_of(files, "baton-decode@.service")
    assert "TimeoutStopSec=45" in lines_of(files, "baton-prefill@.service")


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_a_role_is_given_its_own_secret_key_and_no_other(role):
    unit = "baton-router.service" if role == "router" else f"baton-{role}@.service"
    lines = lines_of(files_of(), unit)
    loaded = [line for line in lines if line.startswith("LoadCredential=")]
    assert loaded == [
        f"LoadCredential={name}:/etc/baton/keys/{name}" for name in (f"{role}.key", "peers.json")
    ]
    assert f"Environment=BATON_{role.upper()}_KEYS=%d" in lines
    assert not [line for line in lines_of(files_of("--keys="), unit) if "Credential" in line]


def test_the_router_gets_copies_of_secrets_at_start_and_after_changes(tmp_path):
    (tmp_path / "mine.toml").write_text(SECRETS)
    files = files_of(f"--config={tmp_path}/mine.toml")
    lines = lines_of(files, "baton-router.service")
    given = [
        "api_keys /etc/baton/api.json",
        "tls_cert /etc/live/fullchain.pem",
        "tls_key /etc/live/privkey.pem",
    ]
    text = files[f"{UNITS}/baton-router.service"]
    assert text.count(" ".join(["%t/baton-router-secrets", *given])) == 2
    for name in ("api_keys", "tls_cert", "tls_key"):
        assert f"Environment=BATON_ROUTER_{name.upper()}=%t/baton-router-secrets/{name}" in lines
        assert name not in files["/etc/baton/baton.toml"]
    assert "Wants=baton-router-secrets.path" in lines
    watched = [
        "/etc/baton",
        "/etc/baton/api.json",
        "/etc/live",
        "/etc/live/fullchain.pem",
        "/etc/live/privkey.pem",
    ]
    path = lines_of(files, "baton-router-secrets.path")
    assert [line for line in path if line.startswith("PathChanged=")] == [
        f"PathChanged={name}" for name in watched
    ]


def test_without_such_secrets_nothing_is_copied_or_watched():
    files = files_of()
    assert not [name for name in files if "secrets" in name]
    assert "secrets" not in files[f"{UNITS}/baton-router.service"]


def test_the_target_names_the_workers_of_this_host():
    host, _ = host_of(["--prefix=/", "--model=/m", COMMAND, "--no-router", "--prefill=", "--decode=0,3"])
    assert members(host) == ["baton-decode@0.service", "baton-decode@3.service"]
    assert f"Wants={' '.join(members(host))}" in render(host)[f"{UNITS}/baton.target"]
    assert f"{UNITS}/baton-router.service" not in render(host)


def test_prefill_workers_of_a_public_host_have_a_port_each():
    files = files_of("--kv-bind=tcp://10.0.0.2:7200", "--prefill=0,2", "--decode=3")
    assert files["/etc/baton/prefill-0.env"] == "BATON_PREFILL_KV_BIND=tcp://10.0.0.2:7200\n"
    assert files["/etc/baton/prefill-2.env"] == "BATON_PREFILL_KV_BIND=tcp://10.0.0.2:7201\n"
    assert not [line for line in lines_of(files, "baton-prefill@.service") if "ipc://" in line]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill=0", "--decode=0"], "GPU 0"),
        (["--prefill=one"], "'one'"),
        (["--allow=10.0.0.0/99"], "10.0.0.0/99"),
        (["--keys=/a b"], "'/a b'"),
        (["--keys=/a\nUser=root"], "User=root"),
        (["--router-memory=lots"], "'lots'"),
        (["--kv-bind=ipc:///x"], "ipc:///x"),
        (["--modle=/x"], "--modle"),
        (["--no-router", "--prefill=", "--decode="], "nothing would run"),
    ],
)
def test_a_setting_that_no_unit_can_hold_is_named(flags, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        files_of(*flags)


def test_settings_owned_by_the_units_are_refused_in_the_users_file(tmp_path):
    (tmp_path / "mine.toml").write_text('[prefill]\nkv_bind = "tcp://10.0.0.2:7200"\n')
    with pytest.raises(ConfigError, match="--kv-bind"):
        files_of(f"--config={tmp_path}/mine.toml")


@pytest.mark.parametrize("unit", ROLES)
def test_the_units_leave_libzmq_the_system_calls_that_it_requires(unit):
    lines = lines_of(files_of(), unit)
    families = next(line for line in lines if line.startswith("RestrictAddressFamilies="))
    assert "AF_NETLINK" in families.split()  # getifaddrs, at each bind to tcp
    filters = [line.partition("=")[2] for line in lines if line.startswith("SystemCallFilter=")]
    if "~@resources" in filters:
        assert (
            "sched_setscheduler" in filters[filters.index("~@resources") + 1 :]
        )  # pthread_setschedparam, at each thread


def test_a_router_of_this_host_listens_where_its_workers_look_for_it():
    text = files_of("--router=tcp://10.0.0.1:7155")["/etc/baton/baton.toml"]
    assert 'control_bind = "tcp://10.0.0.1:7155"' in text
    elsewhere = files_of("--router=tcp://10.0.0.1:7155", "--no-router")["/etc/baton/baton.toml"]
    assert "control_bind" not in elsewhere


@pytest.mark.parametrize("setting", ["tp", "dp_attention"])
def test_a_worker_of_two_ranks_gets_two_gpus_and_is_named_by_the_first(tmp_path, setting):
    (tmp_path / "mine.toml").write_text(f"[decode]\n{setting} = 2\naggregated = true\n")
    flags = ["--prefix=/", "--model=/srv/m", COMMAND, f"--config={tmp_path}/mine.toml", "--prefill="]
    host, _ = host_of([*flags, "--decode=0,1,2,3"])
    assert members(host)[1:] == ["baton-decode@0.service", "baton-decode@2.service"]
    assert render(host)["/etc/baton/decode-2.env"] == "CUDA_VISIBLE_DEVICES=2,3\n"
    odd, _ = host_of([*flags, "--decode=0,1,2"])
    with pytest.raises(ConfigError, match=r"--decode names 3 GPUs, and each worker takes 2 "):
        render(odd)
