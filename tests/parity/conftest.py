"""Toy targets and heads; the demo model and its float32 outputs in transformers, cached per machine."""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
import transformers
from baton.deploy.cli.demo_model import cache_dir, ensure_demo_model, model_digest
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head, write_oracle
from baton.tests.parity.prompts import PROMPTS
from baton.tests.shared_files import SharedFiles

NUM_TOKENS = 64
ASSETS = Path(__file__).resolve().parents[2] / "assets"


@dataclass(frozen=True)
class Reference:
    """transformers' greedy continuation of one prompt, end-of-sequence ignored.

    `gaps[i]` is the difference between the two largest logits that chose `output_ids[i]`: where another
    engine differs first, a gap within float32 noise proves a tie.
    """

    name: str
    prompt_ids: list[int]
    output_ids: list[int]
    gaps: list[float]
    runners_up: list[int]  # the second-best token of each step


@pytest.fixture(scope="session")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    """A random target of few layers: what takes long is the capture of each."""
    return toy_checkpoint("llama", num_hidden_layers=4)


@pytest.fixture(scope="session")
def head(shared_files: SharedFiles) -> Path:
    """A random head for `target`."""
    ids = (0, 1, 3)
    return shared_files.folder(
        "head", repr(ids), lambda path: write_head(path, head_config(2, ids), head_tensors())
    )


@pytest.fixture(scope="session")
def deep_target(toy_checkpoint: Callable[..., Path]) -> Path:
    """A random target of 12 layers, for tests of which layers the features come from."""
    return toy_checkpoint("llama", num_hidden_layers=12)


@pytest.fixture(scope="session")
def deep_head(shared_files: SharedFiles) -> Path:
    """A random head for `deep_target`, with the default layers."""
    return shared_files.folder("head", "deep", lambda path: write_head(path, head_config(2), head_tensors()))


@pytest.fixture(scope="session")
def oracle(shared_files: SharedFiles) -> tuple[Path, Path]:
    """A target whose next token depends on the newest alone, and a head that is right if its features are."""
    path = shared_files.folder("oracle", "default", write_oracle)
    return path / "target", path / "head"


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The demo model's directory; made if it is missing, never skipped."""
    return ensure_demo_model(progress=False)


@pytest.fixture(scope="session")
def eagle3_dir() -> Path:
    """The EAGLE3 head that the repository ships for the demo model."""
    return ASSETS / "smollm2-135m-eagle3"


@pytest.fixture(scope="session")
def mtp_dir() -> Path:
    """The MTP module that the repository ships for the demo model."""
    return ASSETS / "smollm2-135m-mtp"


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_dir: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="session")
def reference_greedy(
    smollm2_dir: Path, smollm2_tokenizer: transformers.PreTrainedTokenizerBase
) -> dict[str, Reference]:
    """References of all PROMPTS by name."""
    found = few_references(smollm2_dir, smollm2_tokenizer, [prompt.name for prompt in PROMPTS])
    return {reference.name: reference for reference in found}


def few_references(
    smollm2_dir: Path, smollm2_tokenizer: transformers.PreTrainedTokenizerBase, names: Sequence[str]
) -> list[Reference]:
    """References of these prompts, from the cache on disk where model, prompt and versions are the same."""
    prompts = {p.name: p.token_ids(smollm2_tokenizer) for p in PROMPTS if p.name in names}
    paths = {name: _path(smollm2_dir, prompts[name]) for name in names}
    load = functools.cache(lambda: _load(smollm2_dir))
    # Another test process may compute some of them: those are waited for last.
    for waits in (False, True):
        for name, path in paths.items():
            with contextlib.ExitStack() as stack:
                number = _number(name)
                if (
                    not path.is_file()
                    and stack.enter_context(_alone(number, waits=waits))
                    and not path.is_file()
                ):
                    _write(path, json.dumps(asdict(_greedy(load(), name, prompts[name]))))
    return [Reference(**json.loads(path.read_text(encoding="utf-8"))) for path in paths.values()]


def _number(name: str) -> int:
    """The prompt's place among PROMPTS: the byte of the lock file that stands for it."""
    return [prompt.name for prompt in PROMPTS].index(name)


def _path(model_dir: Path, prompt_ids: list[int]) -> Path:
    parts = [model_digest(model_dir), transformers.__version__, torch.__version__, NUM_TOKENS, prompt_ids]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    return cache_dir() / "parity" / f"greedy-{key}.json"


@contextlib.contextmanager
def _alone(number: int, *, waits: bool) -> Iterator[bool]:
    """True: no other process is in here with this number. The kernel frees the lock of one that dies."""
    lock = cache_dir() / "parity" / ".lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except BlockingIOError:
            yield False
        else:
            yield True


def _load(model_dir: Path) -> transformers.PreTrainedModel:
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # ignore end-of-sequence
    return model.eval()


def _greedy(model: transformers.PreTrainedModel, name: str, prompt_ids: list[int]) -> Reference:
    ids = torch.tensor([prompt_ids])
    with torch.no_grad():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
    top = torch.topk(torch.cat(made.logits), 2)
    output_ids = made.sequences[0, len(prompt_ids) :].tolist()
    assert output_ids == top.indices[:, 0].tolist(), f"{name}: generate did not take the largest logit"
    assert len(output_ids) == NUM_TOKENS
    gaps = (top.values[:, 0] - top.values[:, 1]).tolist()
    return Reference(name, prompt_ids, output_ids, gaps, top.indices[:, 1].tolist())


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
