"""Every command ends a wrong command line with exit code 2 and an error that names what is wrong."""

import os
import socket

import pytest
from baton.__main__ import COMMANDS, main

WRONG = [
    ("", "unknown command"),
    ("versions", "did you mean 'version'"),
    ("version --bogus", "--bogus"),
    ("up", "--model DIR"),
    ("up --modle x", "did you mean '--model'"),
    ("up --model /nope", "--model '/nope'"),
    ("up --model {here} --draft /nope", "--draft '/nope'"),
    ("up --model {here} --port 99999", "--port"),
    ("up --model {here} --host 0.0.0.0", "--host 0.0.0.0: other hosts can connect"),
    ("up --model {here} --host 0.0.0.0", "--api-keys FILE, --tls-cert FILE and --tls-key FILE"),
    ("up --model {here} --host 0.0.0.0", "--trusted-network"),
    ("up --model {here} --kv-cipher curve", "--keys"),
    ("up --config /nope.toml", "--config /nope.toml"),
    ("serve --model {here} --prefill 2", "--prefill 2"),
    ("router --bogus", "--bogus"),
    ("router --model {here} --control-bind tcp://0.0.0.0:7100", "--keys DIR"),
    ("router --model {here} --host 0.0.0.0", "--host 0.0.0.0"),
    ("prefill --model {here} --kv-bind tcp://0.0.0.0:7200", "--kv-bind tcp://0.0.0.0:7200"),
    ("prefill --model {here} --metrics-port 9100 --metrics-host 0.0.0.0", "--metrics-host 0.0.0.0"),
    ("decode --spec-steps x", "--spec-steps"),
    ("chat --bogus", "--bogus"),
    ("top --bogus", "--bogus"),
    ("demo --bogus", "--bogus"),
    ("draft", "COMMAND"),
    ("draft collect --bogus", "--model"),
    ("draft evaluate --model /nope --draft x", "--model '/nope'"),
    ("draft evaluate --model {here} --draft /nope", "--draft '/nope'"),
    ("bench bogus", "'bogus'"),
    ("bench serve --bogus", "--bogus"),
    ("bench transfer --bogus", "--bogus"),
    ("bench router --bogus", "--model"),
    ("bench engine --bogus", "--bogus"),
    ("bench checkpoint", "DIR"),
    ("doctor --roles cook", "'cook'"),
    ("doctor --config /nope.toml", "--config /nope.toml"),
    ("drain", "INSTANCE"),
    ("draft", "required: COMMAND; see `baton draft --help`"),
    ("chat --model x", "unknown argument '--model'; see baton chat --help"),
    ("prefill --page-size -1", "below the smallest allowed, 1 tokens, or auto"),
    ("role", "NODE prefill"),
    ("role 3f2a decoder", "did you mean 'decode'"),
    ("plan", "--model DIR"),
    ("plan --bogus", "--bogus"),
    ("deploy", "KIND"),
    ("deploy systemf", "did you mean 'systemd'"),
    ("deploy systemd", "--prefix"),
    ("keys", "COMMAND"),
    ("keys init", "DIR"),
    ("keys api add", "FILE"),
    ("model --bogus", "--bogus"),
]


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_a_wrong_command_line_ends_with_2(capsys, monkeypatch, tmp_path, line, words):
    monkeypatch.setattr(os, "environ", {**os.environ})  # commands set variables
    (tmp_path / "config.json").write_text("{}")
    try:
        code = main(line.format(here=tmp_path).split(" "))
    except SystemExit as ended:  # argparse's way
        code = ended.code
    told = capsys.readouterr()
    assert (code, told.out) == (2, "")
    assert words in told.err
    assert "Traceback" not in told.err


def test_the_table_has_every_command():
    assert {line.split(" ")[0] for line, _ in WRONG} - {"", "versions"} == set(COMMANDS)


def test_what_is_no_wrong_setting_ends_with_1(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["chat", "--once", "hello", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "nothing listens" in capsys.readouterr().err
