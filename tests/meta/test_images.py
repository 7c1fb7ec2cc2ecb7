"""Container images install locked packages only, no more than serving needs, and agree with the roles."""

import importlib.metadata
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from baton.cluster.config.load import load_config
from baton.cluster.config.roles import DecodeConfig, PrefillConfig, RouterConfig
from baton.cluster.distribution import DISTRIBUTION
from baton.deploy.packaging import alive
from baton.tests.lock_files import IMAGES, LOCK, PINS, pins_of
from baton.tests.meta.kubernetes.manifests import KUBERNETES, ROOT, needs, run
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEPLOY = ROOT / "deploy" / "packaging"
DOCKERFILE = (IMAGES / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
ROLES = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
OF_TORCH = re.compile(r"nvidia-|cuda-")  # pinned exactly by torch itself


DEVICES = ("cpu", "cuda")
EXTRAS = ("otel",)
UNUSED = ("triton",)  # kernels, of which the CPU path has none: 700 MB unpacked


def locked(name):
    return {pin.name: pin for pin in pins_of(IMAGES / f"{name}.lock")}


# --- locks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_each_wheel_of_an_image_is_locked_in_its_pinned_version(device):
    known = {(pin.name, pin.version): set(pin.hashes) for pin in pins_of(LOCK)}
    for name, pin in locked(device).items():
        assert pin.hashes, name
        if name != "torch" and not OF_TORCH.match(name):
            assert set(pin.hashes) <= known[name, pin.version], name


@pytest.mark.parametrize("device", DEVICES)
def test_torch_is_the_pinned_one_built_for_the_device(device):
    pinned = next(pin.version for pin in pins_of(PINS) if pin.name == "torch")
    assert locked(device)["torch"].version == pinned + ("+cpu" if device == "cpu" else "")
    assert any(OF_TORCH.match(name) for name in locked(device)) == (device == "cuda")


def requires(name):
    """Requirements of a distribution; our own are read from pyproject.toml, which may be newer."""
    if name != DISTRIBUTION:
        return importlib.metadata.requires(name) or ()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *extras]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the images' Python is 3.11")
def test_an_image_has_what_serving_needs_and_no_test_tool():
    seen, todo = set(), [Requirement(f"{DISTRIBUTION}[{','.join(EXTRAS)}]")]
    while todo:
        wanted = todo.pop()
        for line in requires(wanted.name):
            needed = Requirement(line)
            markers = [{"extra": extra} for extra in wanted.extras] or [{"extra": ""}]
            holds = needed.marker is None or any(needed.marker.evaluate(extra) for extra in markers)
            name = canonicalize_name(needed.name)
            if holds and (name, *needed.extras) not in seen and name not in UNUSED:
                seen.add((name, *needed.extras))
                todo.append(needed)
    assert {name for name, *_ in seen} == set(locked("cpu"))


def test_the_tool_that_writes_the_sbom_is_locked():
    tools = locked("tools")
    assert all(pin.hashes for pin in tools.values())
    made = re.search(r"^CYCLONEDX := cyclonedx-bom==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tools["cyclonedx-bom"].version == made[1]


def test_the_build_context_has_every_folder_of_the_package():
    context = set((ROOT / ".dockerignore").read_text().split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {name.split(".")[1] for name in project["tool"]["setuptools"]["packages"] if "." in name}
    files = {"LICENSE", "pyproject.toml", "__init__.py", "__main__.py", project["project"]["readme"]}
    assert {f"!{name}" for name in folders | files} <= context


# --- the Dockerfile -----------------------------------------------------------------------------------------


def final_stage():
    """The instructions of what is shipped, continued lines joined, without comments."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.startswith("#")]
    instructions = "\n".join(lines).replace("\\\n", " ").splitlines()
    start = max(number for number, line in enumerate(instructions) if line.startswith("FROM "))
    return [line.split(maxsplit=1) for line in instructions[start:] if line]


@needs("hadolint")
def test_hadolint_finds_no_fault():
    done = run("hadolint", str(IMAGES / "Dockerfile"))
    assert done.returncode == 0, done.stdout


def test_an_image_runs_unprivileged_and_has_no_compiler():
    stage = final_stage()
    assert ["USER", "10001:10001"] in stage
    assert ["ENTRYPOINT", '["baton"]'] in stage
    assert {"HEALTHCHECK", "STOPSIGNAL"} <= {instruction for instruction, _ in stage}
    copied = [words for instruction, words in stage if instruction == "COPY"]
    assert copied == ["--from=built /opt/baton /opt/baton"]
    ran = " ".join(words for instruction, words in stage if instruction == "RUN")
    assert not re.search(r"apt|pip|gcc|curl", ran)


def test_wheels_are_installed_by_hash_alone():
    installs = [
        line
        for line in DOCKERFILE.replace("\\\n", " ").splitlines()
        if " install -" in line and "bin/pip" in line
    ]
    assert len(installs) == 3
    for line in installs:
        assert "--no-deps" in line
        assert "--require-hashes" in line or "--no-index" in line


def test_the_stand_in_compiler_copies_only_prebuilt_files():
    script = (IMAGES / "cc").read_text()
    assert script.startswith("#!/bin/sh\n")
    assert (IMAGES / "cc").stat().st_mode & 0o111
    for path in ("/opt/baton/lib/triton/driver.c", "/opt/baton/lib/triton/driver.so"):
        assert path in script
    assert "CC=/opt/baton/lib/triton/cc" in " ".join(
        words for instruction, words in final_stage() if instruction == "ENV"
    )


def test_triton_builds_only_the_file_that_the_image_contains():
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    source = re.sub(r"\s+", " ", Path(driver.__file__).read_text(encoding="utf-8"))
    assert source.count("compile_module_from_src(") == 1
    assert 'os.path.join(dirname, "driver.c")' in source


# --- alive --------------------------------------------------------------------------------------------------


class Role(BaseHTTPRequestHandler):
    def do_GET(self):
        code = {"/health": 200, "/ready": 503}[self.path]
        self.send_response(code)
        self.end_headers()
        self.wfile.write(b"as it is")

    def log_message(self, *args):
        pass


@pytest.fixture
def role():
    server = HTTPServer(("127.0.0.1", 0), Role)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


NOBODY = "http://127.0.0.1:1/health"


@pytest.mark.parametrize(
    ("paths", "code", "said"),
    [
        (["/health"], 0, "200 as it is"),
        (["/ready"], 1, "503 as it is"),
        ([NOBODY, "/health"], 0, "200 as it is"),
        ([NOBODY, "/ready", "/health"], 1, "503 as it is"),
        ([NOBODY], 1, "nobody listens"),
        ([], 1, "no URL given"),
        (["ftp:/x"], 1, "ftp:/x"),
    ],
)
def test_the_first_address_that_accepts_a_connection_decides(paths, code, said, role, capsys):
    urls = [f"{role}{path}" if path.startswith("/") else path for path in paths]
    assert alive.main(urls) == code
    assert said in capsys.readouterr().out


def test_the_health_check_imports_the_standard_library_only():
    source = (DEPLOY / "alive.py").read_text()
    assert set(re.findall(r"^(?:import|from) (\S+)", source, re.MULTILINE)) == {
        "collections.abc", "http.client", "ssl", "sys", "urllib.parse",
    }  # fmt: skip


# --- compose ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_a_role_accepts_the_settings_of_compose(role):
    service = COMPOSE["services"][role]
    name, flag, path, *more = service["command"]
    assert (name, flag) == (role, "--config")
    mounted = dict(volume.split(":")[1::-1] for volume in service["volumes"] if volume.startswith("./"))
    assert (DEPLOY / mounted[path]).resolve() == KUBERNETES / "base" / "baton.toml"
    read = load_config(
        ROLES[role], [f"--config={DEPLOY / mounted[path]}", *more], service.get("environment", {})
    )
    asked = int(re.search(r":(\d+)/ready", service["healthcheck"]["test"][-1]).group(1))
    if role == "router":
        assert asked == read.port
        assert service["ports"] == [f"127.0.0.1:{read.port}:{read.port}"]
        assert "baton-control" in service["networks"]["default"]["aliases"]
    else:
        assert asked == read.metrics_port
        assert read.router == "dns+tcp://baton-control:7100"
    if role == "prefill":
        assert read.kv_advertise == f"tcp://prefill:{read.kv_bind.rpartition(':')[2]}"
    if role == "decode":
        assert read.prefix_advertise == f"tcp://decode:{read.prefix_bind.rpartition(':')[2]}"
    assert float(service["stop_grace_period"].removesuffix("s")) > read.drain_timeout_s + 10


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_container_is_confined(name):
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    writable = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
    assert writable == (["keys:/keys"] if name == "keys" else [])


def test_a_gpu_worker_has_its_own_gpu_and_the_command_of_the_cpu_one_else():
    gpus = []
    for role, service in yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())["services"].items():
        assert [word.replace("cuda", "cpu") for word in service["command"]] == COMPOSE["services"][role][
            "command"
        ]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        gpus += device["device_ids"]
    assert gpus == ["0", "1"]


def test_with_tls_a_container_mounts_a_folder_of_replaceable_files():
    whole = yaml.safe_load((DEPLOY / "compose.tls.yaml").read_text())
    assert set(whole) == {"services"}
    assert set(whole["services"]) == {"router"}
    service = whole["services"]["router"]
    assert set(service) == {"environment", "healthcheck", "volumes"}, (
        "no command: of several files the last one has it"
    )
    read = load_config(
        RouterConfig, [f"--config={KUBERNETES / 'base' / 'baton.toml'}"], service["environment"]
    )
    assert (read.tls_cert, read.tls_key) == ("/tls/tls.crt", "/tls/tls.key")
    asked = COMPOSE["services"]["router"]["healthcheck"]["test"]
    assert service["healthcheck"] == {"test": [word.replace("http://", "https://") for word in asked]}
    (volume,) = service["volumes"]
    assert re.fullmatch(r"\$\{BATON_TLS:\?.*\}:/tls:ro", volume)
