"""Laws of the router's files of a model: one download of the small ones, and one line where there is none."""

import json

import pytest
from baton.cluster.errors import ConfigError, StartupError
from baton.router.text import model_files
from baton.router.text.model_files import model_directory
from baton.router.text.tokenizer import LLAMA_CUTS, load_tokenizer
from baton.tests.cluster.router_fakes import save_tokenizer
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast


def test_a_directory_is_itself(tmp_path):
    assert model_directory(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["/nope", "nope", "./a/b", "a/b/c"])
def test_a_name_that_is_neither_is_a_wrong_setting(model):
    with pytest.raises(ConfigError, match=f"--model '{model}' is neither"):
        model_directory(model)


def test_only_small_files_of_a_hub_id_are_downloaded(monkeypatch, tmp_path):
    asked = []

    def snapshot_download(model, allow_patterns, ignore_patterns):
        asked.append((model, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(model_files, "snapshot_download", snapshot_download)
    assert model_directory("org/model") == tmp_path
    assert asked == [("org/model", ["*.json", "*.model", "*.jinja"])]


@pytest.mark.parametrize(
    ("error", "is_offline", "reason"),
    [
        (LocalEntryNotFoundError("Cannot find\nsee"), True, "not in the cache, and HF_HUB_OFFLINE is set"),
        (OSError("Got: ConnectError: Name or service not known\nmore"), False, "(ConnectError: Name or"),
        (TimeoutError(), False, "(TimeoutError)"),
    ],
)
def test_a_hub_that_is_not_reached_is_one_line(monkeypatch, error, is_offline, reason):
    def snapshot_download(model, allow_patterns, ignore_patterns):
        raise error

    monkeypatch.setattr(model_files, "snapshot_download", snapshot_download)
    monkeypatch.setattr(model_files, "is_offline_mode", lambda: is_offline)
    with pytest.raises(StartupError, match="--model 'org/model' could not be fetched") as caught:
        model_directory("org/model")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_of_a_model_of_images_is_read(tmp_path):
    folder = save_tokenizer(tmp_path / "tok", template=False)
    assert not load_tokenizer(str(folder)).has_chat_template
    template = folder / "chat_template.json"
    template.write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    assert load_tokenizer(str(folder)).chat_template == "{{ messages[0]['content'] }}"
    for wrong in ("{", "[]", '{"chat_template": 3}', "{}"):
        template.write_text(wrong)
        with pytest.raises(ConfigError, match=r"chat_template\.json: holds no chat_template; fetch the file"):
            load_tokenizer(str(folder))


def saved_with_cuts(folder, cuts, specials):
    backend = Backend(models.BPE())
    backend.add_special_tokens(specials)
    split = pre_tokenizers.Split(Regex(cuts), behavior="isolated")
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, levels])
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return str(folder)


def pieces(model, text):
    return [piece for piece, _ in load_tokenizer(model)._backend.pre_tokenizer.pre_tokenize_str(text)]


def test_a_tekken_with_the_cuts_of_llama_gets_its_own(tmp_path):
    """As published for Mistral Small 2501 and 3.1; transformers calls it `fix_mistral_regex`."""
    tekken = saved_with_cuts(tmp_path / "tekken", LLAMA_CUTS, ["<unk>", "<s>", "</s>", "[INST]"])
    llama = saved_with_cuts(tmp_path / "llama", LLAMA_CUTS, ["<unk>", "<s>", "</s>"])
    other = saved_with_cuts(tmp_path / "other", r"\w+|\W", ["<unk>", "<s>", "</s>", "[INST]"])
    assert pieces(llama, "getUserName 2026") == ["getUserName", "Ġ", "202", "6"]
    assert pieces(tekken, "getUserName 2026") == ["get", "User", "Name", "Ġ", "2", "0", "2", "6"]
    assert pieces(other, "getUserName 2026") == ["getUserName", "Ġ", "2026"]


def test_a_model_with_a_tekken_alone_says_what_it_lacks(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json.*tekken\.json") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)
