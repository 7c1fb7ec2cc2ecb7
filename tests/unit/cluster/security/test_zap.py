"""Keys on disk, who they admit, and who may say what."""

import logging
import os
import time
from datetime import datetime, timedelta, timezone

import msgspec
import pytest
from baton.__main__ import COMMANDS
from baton.cluster.config.roles import DecodeConfig, PrefillConfig, RouterConfig, UpConfig
from baton.cluster.errors import ConfigError
from baton.cluster.net.drop_log import DropLog
from baton.cluster.net.sockets import check_bind_address
from baton.cluster.process.log_throttle import MAX_SUBJECTS, LogThrottle
from baton.cluster.protocol.messages import FirstToken, Gone, Heartbeat, Hello, Reserved, Tokens, WorkerStats
from baton.cluster.security.keyring import (
    AllowList,
    Peer,
    load_keyring,
    make_key,
    read_key,
    read_peers,
    split_key,
    with_key,
    write_peers,
)
from baton.deploy.keys.keys import add, init, main, remove, rotate
from baton.deploy.up.children import child_config
from baton.router.workers.control import INSTANCES_PER_USER, Speakers

NOW = 1_800_000_000.0
ROOM, P, D = "c" * 32, "1" * 32, "2" * 32


@pytest.fixture
def directory(tmp_path):
    init(tmp_path / "keys", ["router", "prefill", "decode"], "here")
    return tmp_path / "keys"


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# --- files --------------------------------------------------------------------------------------------------


def test_secrets_are_for_their_owner_only(directory):
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    key = read_key(directory, "prefill")
    assert key.secret not in repr(key)
    assert key.secret not in repr(load_keyring(str(directory), "prefill"))
    assert "secret" not in repr(load_keyring(str(directory), "prefill").called())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_secret_that_others_can_read_is_refused(directory, mode):
    (directory / "decode.key").chmod(mode)
    with pytest.raises(ConfigError, match=r"readable by others; chmod 600") as refused:
        load_keyring(str(directory), "decode")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_list_that_others_can_write_is_refused(directory, mode):
    (directory / "peers.json").chmod(mode)
    with pytest.raises(ConfigError, match=r"writable by others; chmod go-w"):
        load_keyring(str(directory), "decode")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(directory):
    os.chown(directory / "decode.key", 12345, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        load_keyring(str(directory), "decode")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"peers": [], "comment": 1}',
        '{"peers": [{"role": "prefill", "name": "p", "public": "00"}]}',
        '{"peers": [{"role": "admin", "name": "p", "public": "%s"}]}' % ("0" * 64),
        '{"peers": [{"role": "prefill", "name": "p/q", "public": "%s"}]}' % ("0" * 64),
        '{"peers": [{"role": "prefill", "name": "p", "public": "%s\\n"}]}' % ("0" * 64),
        '{"peers": [{"role": "prefill", "name": "p", "public": "%s", "until": 1}]}' % ("0" * 64),
        '{"peers": [{"role": "prefill", "name": "p", "public": "%s", "not_after": "tomorrow"}]}' % ("0" * 64),
        '{"peers": [{"role": "prefill", "name": "p", "public": "%s", "not_after": "2030-01-01T00:00:00"}]}'
        % ("0" * 64),
        "[" * 100_000,
    ],
    ids=range(12),
)
def test_a_list_that_is_not_exactly_of_the_format_is_one_line_of_error(directory, text):
    (directory / "peers.json").write_text(text)
    with pytest.raises(ConfigError, match=r"peers\.json: is not a file of") as refused:
        load_keyring(str(directory), "decode")
    assert "\n" not in str(refused.value)


def test_a_key_appears_once_in_the_list(directory):
    peers = read_peers(directory)
    write_peers(directory, [*peers, msgspec.structs.replace(peers[0], role="prefill")])
    with pytest.raises(ConfigError, match="twice"):
        read_peers(directory)


def test_halves_of_two_pairs_are_no_key(directory):
    path = directory / "decode.key"
    path.write_text(
        path.read_text().replace(read_key(directory, "decode").public, make_key("decode", "x").public)
    )
    with pytest.raises(ConfigError, match="do not belong together"):
        read_key(directory, "decode")


def test_the_key_of_another_role_is_refused_under_this_name(directory):
    os.replace(directory / "prefill.key", directory / "decode.key")
    with pytest.raises(ConfigError, match="holds the key of a prefill"):
        read_key(directory, "decode")


def test_a_missing_directory_or_key_names_the_command(directory, tmp_path):
    for place, role in ((tmp_path / "nowhere", "router"), (tmp_path, "router")):
        with pytest.raises(ConfigError, match="baton keys init"):
            load_keyring(str(place), role)
    (directory / "peers.json").unlink()
    with pytest.raises(ConfigError, match="baton keys init"):
        load_keyring(str(directory), "router")
    assert load_keyring("", "router") is None


# --- the list -----------------------------------------------------------------------------------------------


def test_a_key_is_admitted_in_its_role_until_its_end(directory):
    now = NOW
    key = make_key("prefill", "p0")
    peer = Peer(
        role="prefill", name="p0", public=key.public, not_after=datetime.fromtimestamp(NOW, timezone.utc)
    )
    write_peers(directory, [peer])
    peers = AllowList(directory, clock=lambda: now)
    assert peers.find(key.public, ("prefill",)) == peer
    assert peers.find(key.public, ("decode", "router")) is None
    assert peers.find(make_key("prefill", "p0").public, ("prefill",)) is None
    now = NOW + 0.5
    assert peers.find(key.public, ("prefill",)) is None
    assert peers.of_role("prefill") == []


def test_a_change_of_the_file_is_seen_without_a_restart(directory):
    peers = AllowList(directory)
    key = make_key("decode", "d1").public
    assert peers.find(key, ("decode",)) is None
    add(directory, key, "decode", "d1", 3600, time.time())
    assert peers.find(key, ("decode",)).user == "decode/d1"
    remove(directory, key)
    assert peers.find(key, ("decode",)) is None
    (directory / "peers.json").write_text("{")
    with pytest.raises(ConfigError):  # whoever asks must refuse
        peers.find(key, ("decode",))


def test_during_a_key_change_both_are_admitted_and_the_new_one_goes_first(directory):
    old = read_key(directory, "router").public
    (peer,) = rotate(directory, ["router"], 3600, NOW)
    new = read_key(directory, "router").public
    assert peer.public == new != old
    at = {"now": NOW + 3599}
    peers = AllowList(directory, clock=lambda: at["now"])
    assert [found.public for found in peers.of_role("router")] == [new, old]
    at["now"] = NOW + 3601
    assert [found.public for found in peers.of_role("router")] == [new]


def test_a_second_rotation_does_not_prolong_the_first_key(directory):
    first = read_key(directory, "decode").public
    rotate(directory, ["decode"], 60, NOW)
    rotate(directory, ["decode"], 3600, NOW + 1)
    ends = {peer.public: peer.not_after for peer in read_peers(directory)}
    assert ends[first] == datetime.fromtimestamp(NOW, timezone.utc) + timedelta(seconds=60)
    rotate(directory, ["decode"], 3600, NOW + 100)
    assert first not in {peer.public for peer in read_peers(directory)}


def test_a_new_key_of_a_peer_ends_its_old_one_and_no_others(directory):
    keys = [make_key("prefill", "p0").public for _ in range(2)]
    add(directory, keys[0], "prefill", "p0", 3600, NOW)
    add(directory, keys[1], "prefill", "p0", 3600, NOW)
    ends = {peer.public: peer.not_after for peer in read_peers(directory)}
    assert ends[keys[0]] is not None
    assert [ends[key] for key in ends if key != keys[0]] == [None] * 4


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_makes_lists_replaces_adds_and_removes(tmp_path, capsys):
    place = str(tmp_path / "a" / "keys")
    assert main(["init", place, "--role", "prefill", "--name", "p0"]) == 0
    role, name, public = capsys.readouterr().out.split()
    assert (role, name, public) == ("prefill", "p0", read_key(tmp_path / "a" / "keys", "prefill").public)
    other = make_key("router", "r").public
    assert main(["add", place, other.upper(), "--role", "router", "--name", "r"]) == 0
    assert main(["rotate", place, "--window-h", "1"]) == 0
    capsys.readouterr()
    assert main(["list", place]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["prefill", "p0"], ["router", "r"], ["prefill", "p0"]]
    assert "until" in lines[0]
    assert lines[2].endswith("own")
    assert main(["remove", place, other]) == 0
    assert [peer.role for peer in read_peers(tmp_path / "a" / "keys")] == ["prefill", "prefill"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--help"),
        (["init"], "DIR"),
        (["init", "{dir}"], "already"),
        (["init", "{dir}", "--role", "admin"], "admin"),
        (["init", "{dir}/peers.json"], "cannot be made"),
        (["init", "{dir}/new", "--name", "a b"], "letters"),
        (["add", "{dir}", "00", "--role", "prefill", "--name", "p"], "hex digits"),
        (["add", "{dir}", "{own}", "--role", "prefill", "--name", "p"], "already"),
        (["add", "{dir}", "0" * 64, "--role", "prefill"], "--name"),
        (["rotate", "{dir}", "--window-h", "nan"], "hours"),
        (["rotate", "{dir}/none"], "init"),
        (["remove", "{dir}", "0" * 64], "list"),
        (["list", "{dir}/none"], "init"),
    ],
)
def test_a_wrong_call_is_one_line_and_changes_nothing(directory, capsys, words, said):
    own = read_key(directory, "router").public
    before = files_of(directory)
    assert main([word.format(dir=directory, own=own) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("baton keys: ")
    assert said in captured.err
    assert files_of(directory) == before


def test_the_command_is_one_of_baton():
    assert COMMANDS["keys"][0] == ".deploy.keys.keys"


# --- settings -----------------------------------------------------------------------------------------------


def test_every_role_takes_keys_and_up_hands_them_on(directory, monkeypatch):
    for cls in (RouterConfig, PrefillConfig, DecodeConfig):
        assert cls(model="m").keys == ""
    monkeypatch.chdir(directory.parent)
    up = UpConfig(model="m", keys="keys")
    for cls in (RouterConfig, PrefillConfig, DecodeConfig):
        assert child_config(cls, up, {}, {}, 1).keys == str(directory), "children run elsewhere"


def test_a_public_address_needs_keys_or_a_trusted_network():
    public = "tcp://0.0.0.0:7100"
    check_bind_address(public, trusted_network=False, has_keys=True)
    check_bind_address(public, trusted_network=True, has_keys=False)
    with pytest.raises(ConfigError, match=r"--keys.*--trusted-network"):
        check_bind_address(public, trusted_network=False, has_keys=False)
    with pytest.raises(ConfigError) as refused:  # HTTP
        check_bind_address(public, trusted_network=False)
    assert "--keys" not in str(refused.value)


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.2:7200", "ipc:///run/baton#1/kv-0"])
def test_an_address_carries_a_key(endpoint):
    key = make_key("prefill", "p").public
    assert split_key(with_key(endpoint, key)) == (endpoint, key)
    assert split_key(endpoint) == (endpoint, "")
    assert split_key(f"{endpoint}#{key[:-1]}") == (f"{endpoint}#{key[:-1]}", "")


# --- who may say what ---------------------------------------------------------------------------------------


def hello(role, instance):
    return Hello(
        role=role, instance=instance, protocol=1, fingerprint="f", model="m", pages_total=4, page_size=16,
        max_context=64, max_running=2,
    )  # fmt: skip


def test_a_key_registers_workers_of_its_role_only():
    speakers = Speakers()
    assert speakers.fault("prefill/p", hello("prefill", P)) == ""
    assert "may not register" in speakers.fault("decode/d", hello("prefill", D))
    assert speakers.fault("decode/d", hello("decode", D)) == "", "a lie leaves nothing behind"


def test_s31_a_key_speaks_the_verbs_of_its_role_only():
    speakers = Speakers()
    for user, role, instance in (("prefill/p", "prefill", P), ("decode/d", "decode", D)):
        assert speakers.fault(user, hello(role, instance)) == ""
    first = FirstToken(room=ROOM, epoch=0, instance=D, token=1)
    reserved = Reserved(room=ROOM, epoch=0, instance=P)
    assert "may not say FirstToken" in speakers.fault("decode/d", first)
    assert "may not say Reserved" in speakers.fault("prefill/p", reserved)
    assert "may not say Tokens" in speakers.fault("prefill/p", Tokens(instance=P, items=[]))
    assert speakers.fault("prefill/p", msgspec.structs.replace(first, instance=P)) == ""
    assert speakers.fault("decode/d", msgspec.structs.replace(reserved, instance=D)) == ""
    assert speakers.fault("decode/d", Gone(room=ROOM, epoch=0, instance=D)) == ""


@pytest.mark.parametrize("user", ["", "router/r", "nobody", "/"])
def test_a_peer_that_is_not_a_worker_may_send_nothing(user):
    speakers = Speakers()
    assert speakers.fault(user, hello("decode", D))
    assert speakers.fault(user, Gone(room=ROOM, epoch=0, instance=D))


def test_a_key_speaks_for_the_instances_that_it_introduced_only():
    speakers = Speakers()
    beat = Heartbeat(instance=D, stats=WorkerStats())
    assert speakers.fault("decode/d", beat), "before its Hello"
    assert speakers.fault("decode/d", hello("decode", D)) == ""
    assert speakers.fault("decode/other", hello("decode", D)), "the instance has a speaker"
    assert speakers.fault("decode/other", beat)
    assert speakers.fault("decode/d", beat) == ""


def test_a_key_that_makes_up_instances_pushes_out_its_own_only():
    speakers = Speakers()
    speakers.fault("decode/d", hello("decode", D))
    for i in range(INSTANCES_PER_USER + 10):
        assert speakers.fault("decode/liar", hello("decode", f"{i:032x}")) == ""
    assert repr(speakers) == f"Speakers({INSTANCES_PER_USER + 1} instances of 2 users)"
    assert speakers.fault("decode/d", Gone(room=ROOM, epoch=0, instance=D)) == ""
    assert speakers.fault("decode/liar", Gone(room=ROOM, epoch=0, instance="0" * 32))


def test_a_log_line_repeats_after_a_pause_and_memory_is_bounded():
    now = [0.0]
    sparingly = LogThrottle(60.0, lambda: now[0])
    assert [sparingly.is_due("a"), sparingly.is_due("a"), sparingly.is_due("b")] == [True, False, True]
    now[0] = 61.0
    assert sparingly.is_due("a")
    said = sum(sparingly.is_due(f"stranger {i}") for i in range(10 * MAX_SUBJECTS))
    assert MAX_SUBJECTS // 2 < said <= MAX_SUBJECTS


def test_malformed_messages_are_logged_once_per_kind_whatever_they_hold(caplog):
    log = DropLog("message dropped", lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        for size in range(100):
            log.say("ab12", f"a frame of {size} bytes is not a message")
        log.say("ab12", "another fault")
        log.say("cd34", "another fault")
    assert [record.fields["peer"] for record in caplog.records] == ["ab12", "ab12", "cd34"]
