"""`baton plan`: sizes a deployment from a model's config and rates of the hardware.

    baton plan --model DIR --prompt 4000 --output 300 --rate 2
    baton plan --model DIR --pull tcp://10.0.0.2:7999
    baton plan --model DIR --url http://127.0.0.1:8000 --within 25
    baton plan --model DIR --gpu H200 --num-gpus 8
    baton plan --model DIR --memory

Rates that are not given are estimated from the model's size and the data sheet of this host's GPU, or of
--gpu. The second form measures the bandwidth. The third measures prefill and link on a running cluster, reads
the sizes of its workers, and compares the prediction with it; the exit code is 1 when the prediction is more
than 25 % off. The fourth deals GPUs to workers, as `baton up` does for its default load. The last shows how
many tokens of KV each known GPU holds.

On a running cluster prompts of up to two chunks give the prefill rate, the link and the fixed cost of a
hand-off; longer prompts, which were not used for these, are then predicted and measured. See `sizing` for the
calculation.
"""

import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...cluster.config.fields import Setting, check_fields, flag_of, read_command_line, setting
from ...cluster.config.groups import WINDOW_KV
from ...cluster.config.roles import DecodeConfig, PrefillConfig
from ...cluster.errors import BatonError, ConfigError
from ...cluster.process.progress import JobProgress
from ...cluster.security.ciphers import AUTO
from ...engine.auto_sizes import MIB, Card
from ...engine.hub import NGRAM
from ..capacity.checkpoints import DTYPE_BYTES, KVShape, head_dir
from ..capacity.gpus import (
    CPU,
    GPUS,
    TYPICAL,
    GpuModel,
    estimate,
    gpu_here,
    gpu_named,
    kv_tokens_of,
    shares_of,
)
from ..capacity.recommend import recommend
from ..capacity.sizing import Measured, PlannedLoad, SizingPlan, handoff_of, most_requests, plan_of
from ..capacity.worker_sizes import CPU_DTYPE, GPU_DTYPE, ModelNeed, find_card, need_of, worker_sizes
from .client import KEY_VARIABLE, ChatClient
from .command import run_command
from .findings import output_of
from .pull_test import measure

PROG = "baton plan"
SUMMARY = "Size a deployment: hand-off time, memory, workers, and when not to disaggregate."
EXIT_OFF = 1
FASTEST = 1e12  # bytes per second; the assumed bandwidth when the link's share is too small to measure
FIRST_ID, NUM_IDS = 10, 200  # range of token ids for random prompts, valid in every vocabulary


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Plan."""

    model: str = setting("", Setting(help="checkpoint directory (required)", metavar="DIR"))
    draft: str = setting(
        "",
        Setting(
            help=f"directory of a draft head, whose features travel too; {NGRAM}: lookup, for which nothing "
            "travels",
            metavar=f"DIR|{NGRAM}",
        ),
    )
    dtype: str = setting(
        "auto",
        Setting(
            help="type of weights and KV cache; auto: bfloat16, on a CPU float32",
            choices=("auto", *DTYPE_BYTES),
        ),
    )
    quantize: str = setting(
        "none", Setting(help="as of a worker: matrices of the layers in 8 bits", choices=("none", "fp8"))
    )
    kv_dtype: str = setting(
        "auto", Setting(help="as of a worker: the KV cache in 8 bits", choices=("auto", "fp8_e4m3"))
    )
    window_kv: str = setting(
        AUTO,
        Setting(
            help="as of a worker: KV behind the windows of a model that has them; auto: as the workers of "
            "--url do; without --url, freed",
            choices=WINDOW_KV,
        ),
    )
    url: str = setting("", Setting(help="a running cluster to measure", metavar="URL"))
    pull: str = setting(
        "", Setting(help="measure the link to `baton doctor --serve-pull`", metavar="ENDPOINT")
    )
    bandwidth: float = setting(
        0.0,
        Setting(
            help="of the link; auto: of two workers on one host",
            unit="GB/s",
            minimum=0.001,
            maximum=10000,
            auto=0,
        ),
    )
    prefill_rate: float = setting(
        0.0,
        Setting(
            help="of one prefill worker; auto: estimated from the model and the GPU",
            unit="tokens/s",
            minimum=1,
            maximum=1e9,
            auto=0,
        ),
    )
    fixed_ms: float = setting(
        1.0, Setting(help="of each hand-off, beside its bytes", unit="ms", minimum=0, maximum=60000)
    )
    tpot_ms: float = setting(
        0.0,
        Setting(
            help="per token, of a full decode worker; auto: estimated from the model and the GPU",
            unit="ms",
            minimum=0.01,
            maximum=6e4,
            auto=0,
        ),
    )
    prompt: int = setting(2048, Setting(help="tokens of a prompt", minimum=1, maximum=2**24))
    output: int = setting(256, Setting(help="tokens of an answer", minimum=1, maximum=2**24))
    rate: float = setting(
        1.0,
        Setting(help="requests per second; with --num-gpus what these serve", minimum=0.0001, maximum=1e6),
    )
    chunk: int = setting(
        -1,
        Setting(
            help="--chunk-size of prefill; auto: what a worker of this host chooses",
            unit="tokens",
            minimum=0,
            maximum=2**20,
            auto=-1,
        ),
    )
    kv_memory_mb: int = setting(
        0,
        Setting(
            help="of a decode worker; auto: what one on this card chooses",
            unit="MiB",
            minimum=0,
            maximum=2**24,
            auto=0,
        ),
    )
    max_running: int = setting(
        0,
        Setting(
            help="--max-running of decode; auto: what a worker of this host chooses",
            minimum=1,
            maximum=4096,
            auto=0,
        ),
    )
    gpu: str = setting(
        "",
        Setting(
            help="GPU for which rates that are not given are estimated, such as H200, or CPU; empty: this "
            "host's",
            metavar="NAME",
        ),
    )
    tp: int = setting(1, Setting(help="GPUs of each worker, --tp", minimum=1, maximum=64))
    num_gpus: int = setting(
        0, Setting(help="GPUs to deal to workers, --tp to each; 0: none", minimum=0, maximum=1024)
    )
    memory: bool = setting(False, Setting(help="show the tokens of KV that each known GPU holds, and end"))
    rounds: int = setting(
        5, Setting(help="of each prompt length on --url; medians count", minimum=1, maximum=1000)
    )
    within: float = setting(
        0.0,
        Setting(
            help="a prediction on --url that is further off fails; 0: none does",
            unit="%",
            minimum=0,
            maximum=1e6,
        ),
    )

    given: frozenset[str] = frozenset()  # the settings of the command line

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class HandoffSample:
    """One measured request: tokens handed over, and times in seconds."""

    tokens: int
    num_bytes: int
    handoff_s: float
    prefill_s: float


def main(argv: Sequence[str]) -> int:
    """Runs `baton plan` and returns its exit code."""
    return run_command(PROG, lambda: _plan(argv))


def _plan(argv: Sequence[str]) -> int:
    given = read_command_line(PlanConfig, argv, PROG, SUMMARY)
    config = PlanConfig(**given, given=frozenset(given))  # type: ignore[arg-type]
    if not config.model:
        raise ConfigError("no model given; write --model DIR")
    if config.num_gpus == 1:
        raise ConfigError("--num-gpus 1: one GPU is not split; write 2 or more")
    if config.num_gpus and (config.num_gpus % config.tp or config.num_gpus == config.tp):
        raise ConfigError(
            f"--num-gpus {config.num_gpus}: workers take {config.tp} each (--tp); write a multiple, from "
            f"{2 * config.tp} on"
        )
    gpu = gpu_named(config.gpu) if config.gpu else gpu_here(find_card("auto", output_of))
    if config.dtype == "auto":
        is_on_cpu = gpu.name == CPU and not config.memory
        config = replace(config, dtype=CPU_DTYPE if is_on_cpu else GPU_DTYPE)
    if config.memory:
        sys.stdout.write("\n".join(_memory_table(_need_of(config))) + "\n")
        return 0
    return _run(with_worker_sizes(config, gpu.card), gpu)


def _need_of(config: PlanConfig) -> ModelNeed:
    return need_of(
        Path(config.model),
        head_dir(config.draft),
        config.dtype,
        quantize=config.quantize,
        kv_dtype=config.kv_dtype,
        window_kv=config.window_kv,
        tp=config.tp,
    )


def _load_of(config: PlanConfig) -> PlannedLoad:
    return PlannedLoad(
        prompt=config.prompt,
        output=config.output,
        rate=config.rate,
        chunk=config.chunk,
        kv_memory=config.kv_memory_mb * 2.0**20 * config.tp,
        max_running=config.max_running,
    )


def _memory_table(need: ModelNeed) -> list[str]:
    """Tokens of KV per GPU: for a worker of its own, and for one prefill and one decode worker together."""

    def tokens(gpu: GpuModel, share: float, *, is_decode: bool) -> str:
        count = kv_tokens_of(gpu.card, need, is_decode=is_decode, share=share)
        return f"{count:,}" if count >= TYPICAL.prompt + TYPICAL.output else "-"

    weights, per_token = need.decode.model.weight_bytes, need.decode.per_token
    in_windows = 0 if per_token.windows is None else per_token.windows.kv_bytes
    token = _token_text(per_token.page_bytes, in_windows, need.shape.window)
    lines = [
        f"weights {weights / 2**30:.1f} GiB, KV of a token {token}; tokens of KV, -: does not fit",
        f"{'GPU':<10}{'GiB':>7}{'decode':>12}{'prefill':>12}{'both on one GPU':>24}",
    ]
    for gpu in GPUS:
        shares = shares_of(gpu.card, need, [False, True])
        both = " + ".join(tokens(gpu, own, is_decode=at == 1) for at, own in enumerate(shares)) or "-"
        alone = "".join(f"{tokens(gpu, 0.0, is_decode=is_decode):>12}" for is_decode in (True, False))
        lines.append(f"{gpu.name:<10}{gpu.memory / 2**30:>7.1f}{alone}{both:>24}")
    return lines


def fit(
    short: Sequence[HandoffSample],
    whole: Sequence[HandoffSample],
    two: Sequence[HandoffSample],
    tpot_s: float,
) -> Measured:
    """The hardware's rates, fitted to medians over prompts of a part of a chunk, of one chunk and of two
    chunks.

    The hand-off times of the first two give a line: its slope is the link's time per token, its intercept the
    fixed cost. The time of two chunks beyond twice that of one shows how attention slows prefill down.
    """
    near, far = (_median([s.handoff_s for s in samples]) for samples in (short, whole))
    more = whole[0].num_bytes - short[0].num_bytes
    bandwidth = more / (far - near) if far > near and more > 0 else FASTEST
    once, twice = (_median([s.prefill_s for s in samples]) for samples in (whole, two))
    count = whole[0].tokens
    slowing = min(max(0.0, twice - 2 * once), once) / (count * count)
    return Measured(
        prefill_rate=count / (once - slowing * count * count / 2),
        slowing=slowing,
        bandwidth=min(bandwidth, FASTEST),
        fixed_s=max(0.0, near - short[0].num_bytes / bandwidth),
        tpot_s=tpot_s,
    )


def _run(config: PlanConfig, gpu: GpuModel) -> int:
    client: ChatClient | None = None
    if config.url:
        client = ChatClient(config.url, api_key=os.environ.get(KEY_VARIABLE, ""))
        config = with_sizes_of(config, client.get("/status"))
    need = _need_of(config)
    shape = need.shape
    lines: list[str] = []
    off = 0.0
    if client is not None:
        measured, off, lines = _on_cluster(client, config, gpu, need)
    else:
        measured = _estimated(config, estimate(gpu, need, _load_of(config)))
    load = _load_of(config)
    num_places = config.num_gpus // config.tp
    if num_places and "rate" not in config.given:
        load = replace(load, rate=most_requests(num_places, shape, measured, load))
    plan = plan_of(shape, measured, load)
    lines += [str(recommend(shape, measured, load, plan, num_places)), ""]
    lines += report(shape, measured, load, plan, _sources(config, gpu, need))
    sys.stdout.write("\n".join(lines) + "\n")
    if config.within and abs(off) > config.within / 100:
        sys.stderr.write(
            f"{PROG}: the prediction is off by {off:+.0%}, more than {config.within:g} %; is it idle?\n"
        )
        return EXIT_OFF
    return 0


def _estimated(config: PlanConfig, rates: Measured) -> Measured:
    """`rates` of the data sheet, with those that the command line gives or `--pull` measures."""
    link = measure(config.pull).bytes_per_s if config.pull else config.bandwidth * 1e9
    return Measured(
        prefill_rate=config.prefill_rate or rates.prefill_rate,
        slowing=0.0 if config.prefill_rate else rates.slowing,
        bandwidth=link or rates.bandwidth,
        fixed_s=config.fixed_ms / 1e3,
        tpot_s=config.tpot_ms / 1e3 or rates.tpot_s,
    )


def _sources(config: PlanConfig, gpu: GpuModel, need: ModelNeed) -> str:
    """Where the rates come from, for the last line."""
    weights = f"{need.prefill.model.num_weights / 1e9:.3g} billion weights that a token uses"
    source = "cores and memory channels" if gpu.name == CPU else "data sheet"
    link = f", NVLink {gpu.nvlink:g} GB/s" if gpu.nvlink else ""
    sheet = f"the {source} of {gpu.name} ({gpu.tflops:g} TFLOP/s, {gpu.gb_per_s:g} GB/s{link}) and {weights}"
    names = ("prefill_rate", "tpot_ms", "bandwidth")
    given = [flag_of(name) for name in names if getattr(config, name)]
    given += ["--pull"] if config.pull else []
    if config.url:
        given += [f"{config.url} (prompts, link, sizes of workers)"]
    return (
        f"from {', '.join(given)}; the others estimated from {sheet}" if given else f"estimated from {sheet}"
    )


def with_worker_sizes(config: PlanConfig, card: Card) -> PlanConfig:
    """`config` with the automatic sizes that workers on `card` would choose."""
    if config.chunk >= 0 and config.max_running and config.kv_memory_mb:
        return config
    model, draft = Path(config.model), head_dir(config.draft)
    prefill = PrefillConfig(
        model=config.model,
        chunk_size=config.chunk,
        quantize=config.quantize,
        kv_dtype=config.kv_dtype,
        window_kv=config.window_kv,
        tp=config.tp,
    )
    decode = DecodeConfig(
        model=config.model,
        draft=config.draft,
        quantize=config.quantize,
        kv_dtype=config.kv_dtype,
        window_kv=config.window_kv,
        kv_memory_mb=config.kv_memory_mb,
        max_running=config.max_running,
        tp=config.tp,
    )
    sizes = worker_sizes(card, model, draft, decode)
    return replace(
        config,
        chunk=worker_sizes(card, model, draft, prefill).chunk_size,
        max_running=sizes.max_running,
        kv_memory_mb=sizes.kv_bytes // MIB,
    )


def _token_text(full_bytes: int, window_bytes: int, window: int) -> str:
    """The KV of a token: in layers that keep it, and in those that give it up behind `window` tokens."""
    kept = [f"{full_bytes / 1024:.1f} KiB"] if full_bytes or not window else []
    near = [f"{window_bytes / 1024:.1f} KiB while it is one of the last {window} tokens"] if window else []
    return ", and ".join(kept + near)


def report(
    shape: KVShape, measured: Measured, load: PlannedLoad, plan: SizingPlan, sources: str
) -> list[str]:
    """The figures behind a recommendation, a line each."""
    handoff = plan.handoff
    features = f", and {shape.feature_bytes / 1024:.1f} KiB for the drafter" if shape.feature_bytes else ""
    token = _token_text(shape.full_bytes, shape.window_bytes, shape.window)
    link, hiding = measured.bandwidth / 1e9, plan.hiding_bandwidth / 1e9
    hides = (
        "hides all but the last chunk"
        if link >= hiding
        else f"would hide all but the last chunk from {hiding:.2f} GB/s on"
    )
    rows = [
        ("Token", f"its KV cache has {token}{features}"),
        (
            "Prompt",
            f"{load.prompt} tokens take {_ms(handoff.prefill_s)} on a prefill worker that computes "
            f"{measured.prefill_rate:.0f} tokens/s",
        ),
        (
            "Hand-off",
            f"takes {_ms(handoff.total_s)}, {_ms(handoff.exposed_s)} of it after the prompt is computed",
        ),
        ("Link", f"{link:.2f} GB/s {hides}"),
        (
            "Request",
            f"holds {plan.request_bytes / 2**20:.1f} MiB of KV cache on decode, for {load.prompt} + "
            f"{load.output} tokens",
        ),
        (
            "Decode worker",
            f"holds {plan.places} requests at once and gives each a token every {_ms(measured.tpot_s)}",
        ),
        (
            "For the load",
            f"{load.rate:g} requests/s need {plan.num_prefill} prefill and {plan.num_decode} decode workers",
        ),
        ("Rates", sources),
    ]
    return [f"{name:<15}{text}" for name, text in rows]


# --- a running cluster --------------------------------------------------------------------------------------


def _on_cluster(
    client: ChatClient, config: PlanConfig, gpu: GpuModel, need: ModelNeed
) -> tuple[Measured, float, list[str]]:
    """The cluster's measured rates, the relative error of the prediction for prompts not used in the fit, and
    lines that tell it. `config` has the sizes of its workers.
    """
    shape = need.shape
    if config.chunk < 8:
        raise ConfigError(
            f"--chunk {config.chunk}: measuring a cluster needs the --chunk-size of its prefill, at least 8"
        )
    model, rng = client.model(), random.Random()
    sizes = [config.chunk // 4, config.chunk, 2 * config.chunk, config.prompt]
    if config.prompt in sizes[:-1]:
        raise ConfigError(
            f"--prompt {config.prompt} is one of the lengths that are measured; write another to predict"
        )
    samples: dict[int, list[HandoffSample]] = {size: [] for size in sizes}
    # discard the first request: a pair's first contact costs more
    _ask(client, model, rng, config.chunk, shape)
    progress = JobProgress()
    progress.begin(f"measuring {config.url}")
    try:
        for done in range(config.rounds):
            for at, size in enumerate(sizes):
                progress.show((done + at / len(sizes)) / config.rounds, f"a prompt of {size} tokens")
                samples[size].append(_ask(client, model, rng, size, shape))
    finally:
        progress.close()
    measured = fit(samples[sizes[0]], samples[sizes[1]], samples[sizes[2]], 0.0)
    tpot_s = config.tpot_ms / 1e3 or estimate(gpu, need, _load_of(config)).tpot_s
    measured = replace(measured, tpot_s=tpot_s)
    # workers time a hand-off from the end of the prompt's computation on
    predicted = handoff_of(config.prompt, shape, measured, config.chunk).exposed_s
    seen = _median([sample.handoff_s for sample in samples[config.prompt]])
    text = (
        f"hand-off of {config.prompt} tokens: predicted {predicted * 1e3:.1f} ms, "
        f"measured {seen * 1e3:.1f} ms"
    )
    off = predicted / seen - 1
    return measured, off, [f"{text} ({off:+.0%}, median of {config.rounds})", ""]


def with_sizes_of(config: PlanConfig, status: Mapping[str, Any]) -> PlanConfig:
    """`config` with the sizes that the workers of a router's /status chose, where they were not given. Those
    without window pages keep the KV behind windows.
    """
    chosen: dict[str, int] = {}
    told = [
        (worker.get("role"), sizes) for worker in status.get("workers", []) if (sizes := worker.get("chosen"))
    ]
    if config.window_kv == AUTO and told:
        is_free = any("window_pages" in sizes for _, sizes in told)
        config = replace(config, window_kv="free" if is_free else "keep")
    for role, sizes in told:
        wanted = (
            {"chunk": "chunk_size"}
            if role == "prefill"
            else {"max_running": "max_running", "kv_memory_mb": "kv_memory_mb"}
        )
        for name, size in wanted.items():
            value = str((sizes.get(size) or {}).get("value", ""))
            if value.isdigit():
                chosen[name] = min(int(value), chosen.get(name, int(value)))
    return replace(config, **{name: value for name, value in chosen.items() if name not in config.given})  # type: ignore[arg-type]


def _ask(client: ChatClient, model: str, rng: random.Random, tokens: int, shape: KVShape) -> HandoffSample:
    """Sends one request with a random prompt of `tokens` tokens, which no worker has cached.

    Raises BatonError.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": [rng.randrange(FIRST_ID, FIRST_ID + NUM_IDS) for _ in range(tokens)],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
    }
    timeline = client.post("/v1/completions", body).get("timeline") or {}
    if not timeline.get("handoff_bytes") or not timeline.get("prefill_ms"):
        raise BatonError(
            "the cluster handed nothing over: it needs a prefill worker, and --local-prefill-max 0"
        )
    expected = shape.moved_bytes(tokens, tokens)
    if not 0.5 * expected <= timeline["handoff_bytes"] <= 2 * expected + 2**20:
        text = f"{tokens} tokens travelled as {timeline['handoff_bytes']} bytes, {expected} were expected"
        raise ConfigError(f"{text}; name the cluster's own --model, --draft, --dtype and --window-kv")
    return HandoffSample(
        tokens=tokens,
        num_bytes=timeline["handoff_bytes"],
        handoff_s=timeline["handoff_ms"] / 1e3,
        prefill_s=timeline["prefill_ms"] / 1e3,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
