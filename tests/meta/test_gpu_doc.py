"""docs/gpu.md shows the memory that the code computes, its settings exist, and its error lines are said."""

import json
import re
from pathlib import Path

import pytest
from baton.cluster.config.fields import flag_of, settings_of
from baton.cluster.config.roles import UpConfig
from baton.deploy.capacity.gpus import GPUS, TYPICAL, kv_tokens_of
from baton.deploy.capacity.worker_sizes import need_of
from baton.deploy.cli.plan import PlanConfig

ROOT = Path(__file__).resolve().parents[2]
ROUNDING = 12_000  # tokens: the workspace of a worker beside its KV may change
PAGE = (ROOT / "docs" / "gpu.md").read_text()
LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
QWEN = {
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "hidden_size": 5120,
    "max_position_embeddings": 40960,
}  # fmt: skip
MODELS = {
    "Llama-3.2-1B": LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "Llama-3.1-8B": LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "Qwen3-14B": QWEN | {"intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
    "Qwen3-32B": QWEN | {"intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}


def table_under(heading):
    """The cells of the first table of a section, its heading row first."""
    text = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|--")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("model", MODELS)
def test_the_memory_table_is_about_what_the_code_computes(model, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    need = need_of(tmp_path)
    head, *rows = table_under("Memory")
    shown = {row[0]: row[head.index(model)] for row in rows}
    assert list(shown) == [f"{gpu.name}, {gpu.memory / 2**30:.0f} GiB" for gpu in GPUS]
    for gpu, text in zip(GPUS, shown.values(), strict=True):
        tokens = kv_tokens_of(gpu.card, need, is_decode=True)
        least = TYPICAL.prompt + TYPICAL.output
        told = 0 if text == "-" else int(text.removesuffix("k")) * 1000
        assert abs(told - (tokens if tokens >= least else 0)) <= 0.05 * tokens + ROUNDING, (gpu, tokens)


def test_every_flag_of_the_page_is_a_setting_of_its_command():
    known = {flag_of(name) for cls in (UpConfig, PlanConfig) for name in settings_of(cls)}
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE.replace("|--", "|")))
    assert {"--gpus", "--prefill", "--num-gpus", "--memory"} <= named
    assert named <= known


def test_every_error_line_of_the_page_is_one_of_the_code():
    files = [path for folder in ("deploy", "engine") for path in sorted((ROOT / folder).rglob("*.py"))]
    code = "".join(path.read_text() for path in files)
    lines = [line for line, _ in table_under("When it does not start")[1:]]
    assert len(lines) == 6
    for line, words in zip(lines, ERROR_WORDS, strict=True):
        assert words in line
        assert words in code


ERROR_WORDS = (
    "cannot hold ", " are free, since other processes hold ", "cannot hold ", "there is no GPU ",
    "the GPUs of this host are not known", "could not be fetched from the hub",
)  # fmt: skip
PENDING = {flag_of("gpu_memory_share")} - {flag_of(name) for name in settings_of(UpConfig)}
