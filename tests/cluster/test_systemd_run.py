"""The units under a real systemd: start order, watchdog, a clean stop, replaced certificates and keys."""

import shutil
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from baton.deploy.keys.api_keys import add, revoke
from baton.deploy.keys.keys import init
from baton.deploy.packaging.units import LAST_WORDS_S, SETTLE_S, WATCHDOG_S, main
from baton.tests.cluster.booted import booted, missing, prepare
from baton.tests.cluster.certificates import Authority, pem
from baton.tests.parity.toy_models import reference_greedy, reference_model

UNITS = ("baton-router.service", "baton-prefill@0.service", "baton-decode@1.service")
DRAIN_S = 20
PROMPT = [7, 80, 33, 150, 9, 212, 41, 5, 18, 99]
SETTINGS = f"""
[router]
drain_timeout_s = {DRAIN_S}
canary_s = 0
[prefill]
drain_timeout_s = {DRAIN_S}
dtype = "float32"
kv_memory_mb = 8
[decode]
drain_timeout_s = {DRAIN_S}
dtype = "float32"
kv_memory_mb = 8
"""
# the first prompt hangs the loop; the process's own watchdog stays out of it, so that the manager's must act
HANGS = "BATON_FAULT=prefill:chunk:1:hang\nBATON_ALLOW_FAULTS=1\nBATON_PREFILL_WATCHDOG_S=0\n"


@pytest.fixture
def files(tmp_path, served_dir):
    """What is laid over the root directory, with a model and keys."""
    if reason := missing():
        pytest.skip(reason)
    files = tmp_path / "files"
    prepare(files)
    shutil.copytree(served_dir, files / "srv" / "model")
    (files / "srv" / "model").chmod(0o755)
    for path in (files / "srv" / "model").iterdir():
        path.chmod(0o644)
    init(files / "etc" / "baton" / "keys", ["router", "prefill", "decode"], "here")
    (tmp_path / "machine").mkdir()
    return files


def install(files, settings, *flags):
    """The units."""
    mine = files.parent / "mine.toml"
    mine.write_text(settings)
    flags = [f"--config={mine}", "--command=/srv/bin/baton", "--model=/srv/model", "--device=cpu", *flags]
    assert main([f"--prefix={files}", *flags]) == 0


@pytest.fixture
def machine(tmp_path, files):
    install(files, SETTINGS)
    (files / "etc" / "baton" / "prefill-0.env").write_text(HANGS)
    with booted(tmp_path / "machine", files) as made:
        yield made


def wait_for(predicate, seconds, what):
    deadline = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.02)


def complete(machine, model, num_tokens):
    body = {
        "model": "model",
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    with machine.inside():
        answer = httpx.post(f"{machine.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == reference_greedy(
        reference_model(model), PROMPT, num_tokens
    )


def open_rooms(machine):
    with machine.inside():
        return httpx.get(f"{machine.url}/status").json()["router"]["open_rooms"]


def states(machine):
    return [machine.show(unit, "ActiveState").get("ActiveState") for unit in UNITS]


@pytest.mark.slow
def test_under_systemd_units_start_outlive_a_hung_loop_and_stop_in_time(machine, served_dir):
    wait_for(lambda: states(machine) == ["active"] * 3, 120, machine.journal)
    complete(machine, served_dir, 24)  # prefill hangs, the router notices, decode computes the prompt itself
    machine.run("rm", "/etc/baton/prefill-0.env")  # its next life is without a fault
    prefill = UNITS[1]
    wait_for(
        lambda: machine.show(prefill, "NRestarts") == {"NRestarts": "1"}, 2 * WATCHDOG_S, machine.journal
    )
    minutes, seconds = divmod(WATCHDOG_S, 60)
    assert f"Watchdog timeout (limit {minutes}min {seconds}s)" in machine.journal(prefill)
    wait_for(lambda: states(machine) == ["active"] * 3, 60, machine.journal)
    with ThreadPoolExecutor(1) as asking:
        running = asking.submit(complete, machine, served_dir, 200)
        wait_for(lambda: open_rooms(machine), 20, machine.journal)
        began = time.monotonic()
        machine.run("systemctl", "stop", *UNITS)
        assert time.monotonic() - began < DRAIN_S + LAST_WORDS_S
        running.result()  # what ran was ended, not cut
    for unit in UNITS:
        ended = machine.show(unit, "ActiveState", "Result", "ExecMainStatus", "NRestarts")
        assert ended.pop("NRestarts") == ("1" if unit == prefill else "0")
        assert ended == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}, (
            machine.journal(unit)
        )


# --- what is replaced while the router runs -----------------------------------------------------------------

LIVE, API_KEYS = "etc/certificates/live", "etc/baton/api.json"
SECURED = f"""
[router]
canary_s = 0
api_keys = "/{API_KEYS}"
tls_cert = "/{LIVE}/chain.pem"
tls_key = "/{LIVE}/key.pem"
"""


class Outside:
    """Renews certificates as ACME clients do, by links to new files for each, and manages API keys."""

    def __init__(self, files):
        self.authority = Authority()
        self.files, self.machine = files, None
        (files / LIVE).mkdir(parents=True)
        (files / LIVE).parent.chmod(0o700)

    def run(self, script):
        """Here before the machine is booted, and there from then on."""
        if self.machine is not None:
            return self.machine.run("sh", "-euc", f"cd /; {script}")
        subprocess.run(["sh", "-euc", script], cwd=self.files, check=True)
        return ""

    def renew(self, name):
        certificate, key = self.authority.issue(name)
        for kind, content in (("key", pem(key)), ("chain", pem(certificate))):
            self.run(
                f"printf '%s' '{content.decode()}' > {LIVE}/../{name}-{kind}.pem; chmod 600 "
                f"{LIVE}/../{name}-{kind}.pem"
            )
            self.run(f"ln -sfn ../{name}-{kind}.pem {LIVE}/{kind}.pem")

    def name_offered(self):
        trusting = ssl.create_default_context(cadata=pem(self.authority.certificate).decode())
        with self.machine.inside():
            connection = socket.create_connection(("127.0.0.1", 8000), timeout=10)
        with connection, trusting.wrap_socket(connection, server_hostname="localhost") as inside:
            return dict(pair[0] for pair in inside.getpeercert()["subject"])["commonName"]

    def status_for(self, key):
        with self.machine.inside():
            headers = {"authorization": f"Bearer {key}"}
            return httpx.get(
                "https://127.0.0.1:8000/v1/models", headers=headers, verify=False, timeout=10
            ).status_code


@pytest.mark.slow
def test_under_systemd_a_router_adopts_replaced_certificates_and_keys(tmp_path, files):
    outside = Outside(files)
    outside.renew("first")
    install(files, SECURED, "--prefill=", "--decode=")
    secret, key = add(files / API_KEYS, {"name": "alice"})
    with booted(tmp_path / "machine", files) as machine:
        outside.machine, router = machine, "baton-router.service"
        wait_for(
            lambda: machine.show(router, "ActiveState") == {"ActiveState": "active"}, 120, machine.journal
        )
        process = machine.show(router, "MainPID")
        assert (outside.name_offered(), outside.status_for(secret)) == ("first", 200)
        for name in ("second", "third"):
            outside.renew(name)
            wait_for(lambda name=name: outside.name_offered() == name, SETTLE_S + 20, machine.journal)
        revoke(files / API_KEYS, key.id)
        content = (files / API_KEYS).read_text()
        outside.run(f"printf '%s' '{content}' > {API_KEYS}.new; mv {API_KEYS}.new {API_KEYS}")
        wait_for(lambda: outside.status_for(secret) == 401, SETTLE_S + 20, machine.journal)
        assert machine.show(router, "MainPID") == process
        copies = machine.run(
            "sh", "-c", "cd /run/baton-router-secrets && stat -c '%n %a %u' . *"
        ).splitlines()
        owner = machine.run("stat", "-Lc", "%u", "/run/baton-router").strip()
        assert owner != "0"
        assert copies == [". 711 0", *(f"{name} 400 {owner}" for name in ("api_keys", "tls_cert", "tls_key"))]
        machine.run("systemctl", "stop", router)
        assert machine.show("baton-router-secrets.path", "ActiveState") == {"ActiveState": "inactive"}
        assert "No such file" in machine.run("ls", "/run/baton-router-secrets")
