"""Laws of checkpoints from the hub: one download per id, directories for children, names for clients."""

import pytest
from baton.cluster.config.roles import DecodeConfig, PrefillConfig, RouterConfig
from baton.cluster.errors import ConfigError
from baton.deploy.up.local_checkpoints import fetch_once, head_of, with_directories
from baton.engine import hub
from baton.engine.errors import CheckpointError
from baton.engine.hub import is_hub_id
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The ids that the hub was asked for; each download is a directory of `tmp_path`."""
    asked = []

    def snapshot_download(name, allow_patterns, ignore_patterns, tqdm_class, local_files_only):
        assert "*.safetensors" in allow_patterns
        assert "consolidated*.safetensors" in ignore_patterns
        asked.append(name)
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
        return str(tmp_path / name)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    return asked


def test_a_hub_id_is_an_owner_and_a_name_and_no_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("owner/name")
    assert not any(is_hub_id(name) for name in ("name", "/a/b", "./a/b", "~/a", "a/b/c", ""))
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert not is_hub_id("owner/name")


def test_children_get_directories_and_the_hub_is_asked_once_per_id(asked, tmp_path):
    fetch = fetch_once()
    model, head = str(tmp_path / "org/model"), str(tmp_path / "org/head")
    router = with_directories(RouterConfig(model="org/model"), fetch)
    prefill = with_directories(PrefillConfig(model="org/model", draft="org/head"), fetch)
    decode = with_directories(DecodeConfig(model="org/model", draft="org/head", served_model="x"), fetch)
    assert asked == ["org/model", "org/head"]
    assert [child.model for child in (router, prefill, decode)] == [model] * 3
    assert [child.draft for child in (prefill, decode)] == [head] * 2
    assert [child.served_model for child in (router, prefill, decode)] == [
        "model,org/model", "model,org/model", "x",
    ]  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    """The directory of a checkpoint."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text("{}")
    return tmp_path / "here"


def test_a_head_that_does_not_draft_is_not_downloaded(asked, checkpoint):
    with_directories(DecodeConfig(model=str(checkpoint), draft="org/head", no_draft=True), fetch_once())
    assert asked == []


def test_lookup_has_no_checkpoint_to_download(asked, checkpoint):
    config = DecodeConfig(model=str(checkpoint), draft="ngram")
    assert head_of(config) == ""
    assert with_directories(config, fetch_once()) == config
    assert asked == []


def test_a_directory_stays_and_keeps_its_name(asked, checkpoint):
    config = PrefillConfig(model=str(checkpoint), draft=str(checkpoint))
    assert with_directories(config, fetch_once()) == config
    assert asked == []


def test_a_head_without_a_config_is_refused_before_children_start(checkpoint, tmp_path):
    config = PrefillConfig(model=str(checkpoint), draft=str(tmp_path))
    with pytest.raises(ConfigError, match=f"^--draft '{tmp_path}' has no config.json; give"):
        with_directories(config, fetch_once())


def test_a_download_that_fails_is_one_error_with_the_id_and_a_remedy(monkeypatch):
    def unreachable(name, allow_patterns, ignore_patterns, tqdm_class, local_files_only):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match=r"'org/model' could not be fetched.*unreachable.*directory"):
        with_directories(RouterConfig(model="org/model"), fetch_once())


def test_each_refusal_of_the_hub_names_its_remedy(monkeypatch):
    def refused(kind, text):
        def snapshot_download(name, allow_patterns, ignore_patterns, tqdm_class, local_files_only):
            error = kind.__new__(kind)
            error.args = (text,)
            raise error

        monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
        with pytest.raises(CheckpointError) as caught:
            hub.resolve_checkpoint("org/model")
        return str(caught.value)

    assert refused(GatedRepoError, "403").endswith("and set HF_TOKEN, or name a directory")
    assert "correct the id" in refused(RepositoryNotFoundError, "404")
    assert "(LocalEntryNotFoundError); name a directory" in refused(LocalEntryNotFoundError, "")


def test_a_relative_directory_is_absolute_for_children(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint.parent)
    assert fetch_once()("here", "--model") == checkpoint
