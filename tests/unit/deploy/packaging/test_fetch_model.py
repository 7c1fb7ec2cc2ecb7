"""Laws of the chart's download: whole before it is marked, once per checkpoint, one line for a failure."""

import pytest
from baton.deploy.packaging import fetch_model
from baton.deploy.packaging.fetch_model import MARK, Checkpoint, main, wait


@pytest.fixture
def hub(monkeypatch):
    """The downloads that the hub was asked for. It fails while `fails` is set."""
    asked = []

    def snapshot_download(repository, revision, local_dir, allow_patterns, ignore_patterns):
        asked.append((repository, revision))
        local_dir.mkdir(parents=True, exist_ok=True)
        (local_dir / "config.json").write_text("{}")
        assert "*.safetensors" in allow_patterns
        assert "consolidated*.safetensors" in ignore_patterns
        if "fails" in repository:
            raise OSError("Connection refused\nand more")

    monkeypatch.setattr(fetch_model, "snapshot_download", snapshot_download)
    return asked


def test_a_checkpoint_is_downloaded_once_and_another_one_replaces_it(hub, tmp_path, capsys):
    for text in ("org/m@main", "org/m@main", "org/m@v2", "org/m@v2"):
        assert main(["download", f"{text}={tmp_path}/model"]) == 0
    assert hub == [("org/m", "main"), ("org/m", "v2")]
    assert (tmp_path / "model" / MARK).read_text() == "org/m@v2"
    assert "is in" in capsys.readouterr().err


def test_a_download_that_fails_leaves_no_mark_and_one_line(hub, tmp_path, capsys):
    assert main(["download", f"org/m={tmp_path}"]) == 0
    capsys.readouterr()
    assert main(["download", f"org/fails@main={tmp_path}"]) == 1
    assert not (tmp_path / MARK).exists()
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"fetch_model: org/fails@main could not be downloaded to {tmp_path} (Connection")
    assert "and more" not in said


@pytest.mark.parametrize("argv", [[], ["fetch"], ["wait", "org/m"], ["download", "m@main=/models"]])
def test_a_wrong_command_line_ends_with_2(argv, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_pods_wait_until_every_checkpoint_is_whole(tmp_path, capsys):
    model, head = (Checkpoint.parsed(f"org/{name}@main={tmp_path}/{name}") for name in ("model", "head"))
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds
        for checkpoint, due in ((model, 40.0), (head, 80.0)):
            if now[0] >= due:
                checkpoint.directory.mkdir(exist_ok=True)
                (checkpoint.directory / MARK).write_text(str(checkpoint))

    wait([model, head], sleep)
    assert now[0] == 80.0
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        "waiting for org/model@main, org/head@main", "waiting for org/model@main, org/head@main",
        "waiting for org/head@main", "the model is there",
    ]  # fmt: skip
