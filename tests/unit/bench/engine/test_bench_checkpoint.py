"""`baton bench checkpoint` writes loadable checkpoints: equal weights, equal tokens, no overwritten files."""

from pathlib import Path

import pytest
import torch
from baton.bench.engine.checkpoint import main
from baton.bench.engine.model import TOKEN, random_head, random_target
from baton.bench.engine.shapes import SHAPES, target_config
from baton.engine.batch.extend_batch import extend_batch
from baton.engine.kv.pool import KVPool
from baton.engine.models.interface import CausalLM
from baton.engine.models.weights import iter_safetensors, load_model
from baton.engine.request import Request
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafters.eagle3_weights import load_eagle3
from baton.engine.speculative.drafters.spec_config import load_draft_config
from baton.engine.weights_hash import model_fingerprint
from baton.router.text.tokenizer import load_tokenizer
from baton.tests.parity.eagle3_engine import Engine

CPU = torch.device("cpu")
WRITE = [
    "--shape",
    "toy",
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--draft-vocab",
    "300",
    "--accept-length",
    "2",
]
BLOCKS = "toy-blocks"  # whose sizes blocks and groups of 128 divide
# (shape, form, name and dtype of a tensor that the checkpoint has for it)
STORED = [
    ("toy", "fp8", "mlp.down_proj.weight_scale", torch.float32),
    (BLOCKS, "fp8-blocks", "mlp.down_proj.weight_scale_inv", torch.float32),
    (BLOCKS, "int4", "mlp.down_proj.qzeros", torch.int32),
    ("toy-moe", "fp8", "mlp.experts.7.down_proj.weight", torch.float8_e4m3fn),
    ("toy-latent", "fp8", "self_attn.kv_b_proj.weight", torch.float8_e4m3fn),
    ("toy-gpt-oss", "mxfp4", "mlp.experts.down_proj_blocks", torch.uint8),
    ("toy-gpt-oss", "none", "mlp.experts.down_proj", torch.float32),
]


def written(folder: Path, shape: str, *flags: str) -> int:
    """The exit code of a run for `shape`; later flags win over those of WRITE."""
    return main([str(folder), *WRITE, "--shape", shape, *flags])


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384}
    monkeypatch.setitem(SHAPES, BLOCKS, SHAPES["toy"] | sizes)


@torch.no_grad()
def logits_of(model: CausalLM) -> torch.Tensor:
    """float32 `[1, V]`, behind a prompt of nine tokens."""
    request = Request(
        room="prompt", epoch=0, prompt_ids=list(range(5, 14)), sampling=SamplingParams(), pages=[1]
    )
    batch = extend_batch([(request, 0, 9)], page_size=16, device=CPU)
    return ModelRunner(model, KVPool(2, model.kv_layout(16))).forward(batch).logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bench") / "checkpoint"
    assert main([str(made), *WRITE]) == 0
    return made


def test_servers_load_the_weights_that_were_made(folder: Path) -> None:
    model, config = load_model(folder / "target", dtype=torch.float32)
    for (name, read), (_, made) in zip(
        model.tensors(), random_target(config, torch.float32, CPU).tensors(), strict=True
    ):
        assert torch.equal(read, made), name
    drafts = load_draft_config(folder / "head", config, dtype="float32", convention="auto")
    head, made_head = load_eagle3(drafts, dtype=torch.float32), random_head(drafts, 2, torch.float32, CPU)
    assert head.lm_head is not None
    assert torch.equal(head.lm_head, made_head.lm_head)
    for (name, read), (_, made) in zip(head.tensors(), made_head.tensors(), strict=True):
        assert torch.equal(read, made), name
    assert drafts.aux.ids == (1, 2)
    assert len(model_fingerprint(folder / "target")) == 64


def test_every_token_writes_something_and_text_is_read_byte_for_byte(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder / "target"))
    ids = tokenizer.encode("hé a")
    assert len(ids) == len("hé a".encode())
    assert min(ids) >= 4
    backend = tokenizer._backend
    assert backend.decode(ids) == "hé a"
    assert all(backend.decode([n]) for n in range(512))


def test_an_existing_checkpoint_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), *WRITE]) == 1
    assert f"{folder / 'target'} exists; name another directory" in capsys.readouterr().err


def test_a_checkpoint_has_the_layers_that_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "some"), *WRITE, "--layers", "2"]) == 0
    model, config = load_model(tmp_path / "some" / "target", dtype=torch.float32)
    assert config.num_layers == 2
    assert {name.split(".")[2] for name, _ in model.tensors() if ".layers." in name} == {"0", "1"}
    assert main([str(tmp_path / "more"), *WRITE, "--layers", "99"]) == 1
    assert "--layers 99: toy has" in capsys.readouterr().err


@pytest.mark.parametrize(("shape", "form", "name", "dtype"), STORED)
def test_a_server_reads_the_model_of_the_engine_bench_in_its_form(
    tmp_path: Path, shape: str, form: str, name: str, dtype: torch.dtype
) -> None:
    assert written(tmp_path / "new", shape, "--quantize", form) == 0
    target = tmp_path / "new" / "target"
    assert dict(iter_safetensors(target))[f"model.layers.1.{name}"].dtype == dtype
    model, config = load_model(target, dtype=torch.float32)
    assert config == target_config(shape, "", tmp_path, form)
    bench = random_target(config, torch.float32, CPU)
    for (read_name, read), (made_name, made) in zip(model.tensors(), bench.tensors(), strict=True):
        assert read_name == made_name
        assert torch.equal(read, made), read_name
    logits = logits_of(model)
    assert torch.equal(logits, logits_of(bench))
    assert int(logits.argmax()) == TOKEN


@pytest.mark.parametrize(("shape", "form"), [case[:2] for case in STORED] + [("toy-moe", "none")])
def test_a_server_accepts_the_drafts_of_the_head_that_is_beside_the_target(
    tmp_path: Path, shape: str, form: str
) -> None:
    assert written(tmp_path / "new", shape, "--quantize", form, "--accept-length", "3") == 0
    head = tmp_path / "new" / "head"
    floats = {tensor.dtype for name, tensor in iter_safetensors(head) if name not in ("d2t", "t2d")}
    assert floats == {torch.float32}
    engine = Engine(tmp_path / "new" / "target", head)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
    assert engine.generate([[9, 40, 300, TOKEN]], greedy) == [[TOKEN] * 16]
    assert set(engine.accept_lens) == {3}


def test_answers_that_end_are_written_in_any_form(tmp_path: Path) -> None:
    assert written(tmp_path / "new", "toy-gpt-oss", "--quantize", "mxfp4", "--answers", "100") == 0
    model, config = load_model(tmp_path / "new" / "target", dtype=torch.float32)
    assert config.eos_token_ids == (100, 200, 300, 400, 500)
    assert config.moe is not None
    assert config.moe.is_packed
    assert bool(logits_of(model).isfinite().all())


@pytest.mark.parametrize(
    ("shape", "form", "said"),
    [
        ("toy", "mxfp4", "--quantize mxfp4: LlamaForCausalLM has no experts in it; take gpt-oss"),
        ("toy-moe", "mxfp4", "--quantize mxfp4: Qwen3MoeForCausalLM has no experts in it; take gpt-oss"),
        ("toy-gpt-oss", "fp8", "no checkpoint of GptOssForCausalLM has this form; take mxfp4"),
        ("toy", "int4", "mlp.down_proj: 192 inputs in groups of 128"),
        ("toy", "fp8-blocks", "self_attn.k_proj: 64 outputs are no multiple of 128"),
    ],
)
def test_a_form_that_a_shape_does_not_have_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str, form: str, said: str
) -> None:
    assert written(tmp_path, shape, "--quantize", form) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "new"), "--shape", "toy", "--device", "cuda"]) == 1
    assert "no usable CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
