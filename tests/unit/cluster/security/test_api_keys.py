"""Keys of clients: the file, who is found by a key, and the command that makes them."""

import gc
import hmac
import re
import sys
import time
from datetime import datetime, timezone

import pytest
from baton.cluster.errors import ConfigError
from baton.cluster.security import api_keys
from baton.cluster.security.api_keys import LOOK_AGAIN_S, ApiKeys, read_api_keys, write_api_keys
from baton.deploy.keys.api_keys import add, revoke
from baton.deploy.keys.keys import main
from baton.tests.meta.kubernetes.secret_volume import SecretVolume
from baton.tests.unit.virtual_time import Clock

NOW = 1_800_000_000.0
ENTRY = '{"id":"00000001","name":"a","sha256":"' + "0" * 64 + '"}'


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.json"


def table(path, clock=None):
    clock = clock or Clock(NOW)
    return ApiKeys(path, clock, clock)


def test_a_key_is_found_until_it_is_revoked_and_no_other_text_is(path):
    secret, key = add(path, {"name": "alice"})
    clock = Clock(NOW)
    keys = table(path, clock)
    assert keys.find(secret) == key
    wrong = [
        secret[:-1],
        secret + "x",
        secret[:12] + "A" * 43,
        "",
        "bk-",
        "bk-00000000-" + "A" * 43,
        secret * 100,
        "ü" * 50,
    ]
    assert [keys.find(text) for text in wrong] == [None] * len(wrong)
    revoke(path, key.id)
    clock.now += LOOK_AGAIN_S
    assert keys.find(secret) is None


def test_the_file_holds_no_secret_and_only_its_owner_reads_it(path):
    secret, key = add(path, {"name": "alice"})
    text = path.read_text()
    assert key.id in text
    assert secret.split("-", 2)[2] not in text
    assert path.stat().st_mode & 0o077 == 0


def test_a_new_key_needs_no_restart_and_a_broken_file_changes_nothing(path, caplog):
    old, _ = add(path, {"name": "alice"})
    clock = Clock(NOW)
    keys = table(path, clock)
    new, _ = add(path, {"name": "bob"})
    clock.now += LOOK_AGAIN_S
    assert keys.find(new).name == "bob"
    path.write_text("{")
    clock.now += LOOK_AGAIN_S
    assert keys.find(old).name == "alice"
    path.unlink()
    clock.now += LOOK_AGAIN_S
    assert keys.find(old).name == "alice"
    assert "stay as they were" in caplog.text


def test_a_mounted_secret_that_changes_admits_and_revokes(path, tmp_path):
    secrets = [add(path, {"name": name})[0] for name in ("alice", "bob")]
    both = path.read_bytes()
    revoke(path, secrets[1][3:11])
    volume = SecretVolume(tmp_path / "api-keys")
    volume.write({"api.json": path.read_bytes()})
    clock = Clock(NOW)
    keys = table(volume.path / "api.json", clock)
    for content, known in ((both, [True, True]), (path.read_bytes(), [True, False])):
        volume.write({"api.json": content})
        clock.now += LOOK_AGAIN_S
        assert [keys.find(secret) is not None for secret in secrets] == known


def test_a_key_ends_at_its_moment(path):
    clock = Clock(NOW)
    end = datetime.fromtimestamp(clock.now + 10, timezone.utc)
    secret, _ = add(path, {"name": "alice", "not_after": end})
    keys = table(path, clock)
    assert keys.find(secret)
    clock.now += 11
    assert keys.find(secret) is None


def test_every_presented_key_is_compared_in_constant_time(path, monkeypatch):
    secret, _ = add(path, {"name": "alice"})
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(
        api_keys.hmac, "compare_digest", lambda a, b: bool(compared.append((a, b))) or compare(a, b)
    )
    keys = table(path)
    for text in (secret, "bk-00000000-unknown", "", secret[:-1]):
        keys.find(text)
    assert [(len(a), len(b)) for a, b in compared] == [(64, 64)] * 4


def steps_of(work):
    """Every function that is called, with Python's own and those in C, in order."""
    seen = []

    def note(frame, event, arg):
        if event in ("call", "c_call"):
            seen.append(frame.f_code.co_name if event == "call" else arg.__name__)

    gc.disable()  # whose callbacks would be among them
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return seen[:-1]  # setprofile itself


def test_s13_every_wrong_key_takes_the_same_steps(path):
    """No clock is asked: times of wrong keys can differ by their content only where their steps do."""
    secrets = [add(path, {"name": name})[0] for name in ("alice", "bob")]
    keys = table(path)
    wrong = [
        secret[:length] + "~" * (len(secret) - length) for secret in secrets for length in range(len(secret))
    ]
    steps = {text: steps_of(lambda text=text: keys.find(text)) for text in wrong}
    assert all("compare_digest" in found for found in steps.values())
    assert len({tuple(found) for found in steps.values()}) == 1
    assert steps_of(lambda: keys.find(secrets[0])) != steps[wrong[0]], "a right one goes on"


def test_keys_of_one_tenant_share_a_salt_and_others_do_not(path):
    made = [add(path, fields)[1] for fields in (
        {"name": "alice"}, {"name": "alice"}, {"name": "bob"}, {"name": "carol", "tenant": "alice"},
    )]  # fmt: skip
    salts = [key.salt for key in made]
    assert salts[0] == salts[1] == salts[3] != salts[2]
    with pytest.raises(ConfigError, match="another tenant"):
        add(path, {"name": "alice", "tenant": "bob"})


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"keys":[{"id":"x"}]}', '{"keys":[],"more":1}', f'{{"keys":[{ENTRY},{ENTRY}]}}'],
    ids=["empty", "list", "bad id", "unknown field", "same id twice"],
)
def test_a_file_of_another_format_is_refused_in_one_line(path, content):
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        table(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_others_may_write_is_refused(path):
    write_api_keys(path, [])
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod go-w"):
        read_api_keys(path)


def test_the_command_makes_lists_and_revokes(path, capsys):
    options = ["--name", "alice", "--priority", "-2", "--requests-per-minute", "60", "--days", "30"]
    assert main(["api", "add", str(path), *options]) == 0
    secret, _ = capsys.readouterr().out.splitlines()
    key = table(path, time.time).find(secret)
    assert (key.priority, key.requests_per_minute) == (-2, 60)
    assert main(["api", "list", str(path)]) == 0
    line = capsys.readouterr().out
    assert re.fullmatch(rf"{key.id} alice +priority -2, 60 requests per minute, until .* UTC\n", line)
    assert main(["api", "revoke", str(path), key.id]) == 0
    assert read_api_keys(path) == []
    capsys.readouterr()
    named = ["add", str(path), "--name"]
    for wrong in (
        ["revoke", str(path), "00000000"], [*named, "a b"], [*named, "a", "--days", "nan"],
        [*named, "a", "--priority", "1000"], ["list", f"{path}x"],
    ):  # fmt: skip
        assert main(["api", *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_key_is_an_operator_s_or_an_observer_s_and_not_both(path, capsys):
    for role in ("operator", "observer"):
        assert main(["api", "add", str(path), "--name", role, f"--{role}"]) == 0
    assert [(key.operator, key.observer) for key in read_api_keys(path)] == [(True, False), (False, True)]
    capsys.readouterr()
    assert main(["api", "list", str(path)]) == 0
    assert [line.split()[1:] for line in capsys.readouterr().out.splitlines()] == [
        ["operator"] * 2,
        ["observer"] * 2,
    ]
    assert main(["api", "add", str(path), "--name", "x", "--operator", "--observer"]) == 2
