"""A machine under a real systemd: process 1 of new namespaces over changed copies of this host's files.

    with booted(directory, files) as machine      lays `files` over the root directory, starts baton.target
        machine.systemctl("show", ...)            as root there
        machine.url                               of its router, for whoever is `machine.inside()`

It has process ids, mounts, a host name, a loopback interface and a subtree of control groups of its own;
nothing of it is left when process 1 is killed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from baton.tests.faults.netns import inside

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = Path("/lib/systemd/systemd")
TOOLS = ("unshare", "nsenter", "ip", "systemctl", "journalctl", "pivot_root")
# The units hide /root, /home and /tmp, where a checkout and its interpreter may be: these are below /srv.
COMMAND = f"""#!/bin/sh
export PYTHONPATH=/srv/app:/srv/site LD_LIBRARY_PATH=/srv/python/lib PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
exec /srv/python/bin/python{sys.version_info[0]}.{sys.version_info[1]} -m baton "$@"
"""  # noqa: E501
BOOT = """
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
cd "$1"
mkdir upper work root groups
mount -t cgroup2 cgroup2 groups
mkdir "groups/$2"
echo 0 > "groups/$2/cgroup.procs"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" root
cp -a "$3/." root/
mkdir -p root/srv/app/baton root/srv/site root/srv/python
mount --bind "$4" root/srv/app/baton
mount --bind "$5" root/srv/site
mount --bind "$6" root/srv/python
ip link set lo up
exec unshare --cgroup sh -euc '
cd root
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
for place in run tmp dev; do mount -t tmpfs tmpfs $place; done
for name in null zero full random urandom tty; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mkdir dev/shm dev/pts dev/mqueue dev/hugepages below
mount -t tmpfs tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
: > etc/machine-id
pivot_root . below
cd /
umount -l below
# systemd leaves this to who made a container: credentials are mounted in the namespace of a child and must come back
mount --make-rshared /
exec env -i container=baton /lib/systemd/systemd --system --log-target=journal --show-status=0 --unit=baton.target
'
"""  # noqa: E501
CLEAR = """
mount -t cgroup2 cgroup2 "$1"
for turn in $(seq 100); do  # a group is busy until the last process is reaped
  if [ ! -d "$1/$2" ] || find "$1/$2" -depth -type d -exec rmdir {} + 2> /dev/null; then exit 0; fi
  sleep 0.1
done
exit 1
"""


def missing() -> str:
    """Why nothing can be booted here; "" when it can."""
    if not SYSTEMD.exists():
        return "systemd is not installed"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{' and '.join(absent)} not found: install util-linux, iproute2 and systemd"
    if os.geteuid():
        return "only root may mount what a machine needs"
    if "\toverlay\n" not in Path("/proc/filesystems").read_text():
        return "this kernel has no overlay filesystem"
    trial = 'mount -t cgroup2 cgroup2 /mnt; mkdir "/mnt/$0"; rmdir "/mnt/$0"'
    command = ["unshare", "--mount", "--cgroup", "sh", "-euc", trial, f"baton-trial-{os.getpid()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"no control groups to give away: {done.stderr.strip()}" if done.returncode else ""


class Machine:
    """A booted machine; `pid` is its process 1 as this host counts."""

    def __init__(self, pid: int, network: int) -> None:
        self.pid = pid
        self.url = "http://127.0.0.1:8000"
        self._network = network

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """This thread is in its network meanwhile."""
        return inside(self._network)

    def run(self, *command: str) -> str:
        """What a command, run there by root, wrote."""
        whole = [
            "nsenter",
            f"--target={self.pid}",
            "--mount",
            "--pid",
            "--net",
            "--cgroup",
            "--uts",
            "--ipc",
            *command,
        ]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=120, check=False, cwd="/")
        return done.stdout + done.stderr

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        said = self.run("systemctl", "show", unit, *(f"--property={name}" for name in names))
        return dict(line.partition("=")[::2] for line in said.splitlines())

    def journal(self, unit: str = "baton-*") -> str:
        """What was logged by units, and by systemd about them."""
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}")


@contextlib.contextmanager
def booted(directory: Path, files: Path) -> Iterator[Machine]:
    """`directory` is an empty one; `files` as the module says, which `prepare` has begun."""
    name = f"baton-{os.getpid()}"
    site, python = sysconfig.get_paths()["purelib"], sys.base_prefix
    log = (directory.parent / "console").open("wb")
    process = subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--net", "sh", "-euxc",
        BOOT, "boot",
         str(directory), name, str(files), str(ROOT), site, python],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
    )  # fmt: skip
    try:
        first = first_process(process, directory.parent / "console")
        network = os.open(f"/proc/{first}/ns/net", os.O_RDONLY)
        try:
            yield Machine(first, network)
        finally:
            os.close(network)
    finally:
        process.kill()  # and with it process 1, which takes everybody along
        process.wait()
        log.close()
        subprocess.run(["unshare", "--mount", "sh", "-euc", CLEAR, "clear", str(directory), name], check=True)


def first_process(process: subprocess.Popen, console: Path) -> int:
    """Process 1, once it is systemd."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, console.read_text()
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):
                if child.name() == "systemd":
                    return child.pid
        time.sleep(0.05)
    raise AssertionError(console.read_text())


def prepare(files: Path) -> str:
    """Puts the command there, as it will be found on the machine; its path."""
    command = files / "srv" / "bin" / "baton"
    command.parent.mkdir(parents=True)
    command.write_text(COMMAND)
    command.chmod(0o755)
    return "/srv/bin/baton"
