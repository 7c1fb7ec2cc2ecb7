"""A real Prometheus that scrapes the processes of a test, and answers queries.

with prometheus(directory, {"routers": urls, "workers": urls}) as server
    server.wait_scraped(2)
    server.query("sum(up)")                {labels: value}
"""

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest
from baton.tests.ports import free_port

INTERVAL_S = 0.5
Vector = dict[frozenset[tuple[str, str]], float]


def needs(program: str) -> pytest.MarkDecorator:
    """Skips where a program of Prometheus is not installed. No package index of Python has one."""
    reason = f"{program} is not installed: apt-get install prometheus"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


class Prometheus:
    """A running server."""

    def __init__(self, url: str, num_targets: int) -> None:
        self._url, self._num_targets = url, num_targets
        self._client = httpx.Client(timeout=30, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def query(self, expr: str, at: float | None = None) -> Vector:
        """The instant vector of `expr` at the time `at` (Unix seconds; None: now)."""
        asked = {"query": expr} if at is None else {"query": expr, "time": f"{at:.3f}"}
        document = self._client.get(f"{self._url}/api/v1/query", params=asked).json()
        assert document["status"] == "success", document
        return {
            frozenset(one["metric"].items()): float(one["value"][1]) for one in document["data"]["result"]
        }

    def wait_scraped(self, count: int) -> None:
        """Waits until every target was scraped `count` times more."""
        begun = time.time()
        time.sleep(count * INTERVAL_S)
        deadline = time.monotonic() + 60
        while True:
            seconds = max(1, int(time.time() - begun + 1))
            with contextlib.suppress(httpx.TransportError):  # not up yet
                found = self.query(f"count_over_time(up[{seconds}s]) and (up == 1)")
                fresh = self.query(f"timestamp(up) > {begun + (count - 1) * INTERVAL_S}")
                if len(found) == len(fresh) == self._num_targets and min(found.values()) >= count:
                    return
            assert time.monotonic() < deadline, "a target is not scraped"
            time.sleep(0.1)


@contextlib.contextmanager
def prometheus(directory: Path, jobs: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """A server that scrapes the processes at the URLs of each job."""
    port = free_port()
    scrapes = [
        {"job_name": job, "static_configs": [{"targets": [url.partition("://")[2] for url in urls]}]}
        for job, urls in jobs.items()
        if urls
    ]
    # JSON is YAML
    config = {"global": {"scrape_interval": f"{int(INTERVAL_S * 1000)}ms"}, "scrape_configs": scrapes}
    (directory / "prometheus.yaml").write_text(json.dumps(config))
    command = [
        "prometheus", f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]  # fmt: skip
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        server = Prometheus(f"http://127.0.0.1:{port}", sum(len(urls) for urls in jobs.values()))
        try:
            yield server
        except BaseException as error:
            error.add_note((directory / "prometheus.log").read_text()[-4000:])
            raise
        finally:
            server.close()
            process.kill()
            process.wait()
