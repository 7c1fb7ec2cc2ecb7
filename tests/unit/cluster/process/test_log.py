"""Log lines: one record is one line, fields are data, users' text stays out."""

import io
import json
import logging

import pytest
from baton.cluster.process.log import PACKAGE, configure, fields

ROOM = "ab12cd34" * 4


@pytest.fixture
def lines():
    root, ours = logging.getLogger(), logging.getLogger(PACKAGE)
    before = (root.handlers[:], root.level, ours.level)
    stream = io.StringIO()

    def start(**kwargs):
        root.handlers = []  # pytest's own would be closed by force=True
        configure("prefill", "3f2a" * 8, stream=stream, **kwargs)
        return stream

    yield start
    root.handlers, root.level = before[0], before[1]
    ours.setLevel(before[2])


def test_text_shows_role_instance_room_first_and_fields(lines):
    out = lines()
    logging.getLogger("baton.x").info(
        "prefill completed", extra=fields(tokens=812, ms=41.23456, room=ROOM, why="a b")
    )
    _, rest = out.getvalue().split(" ", 1)
    assert rest == 'INFO  prefill[3f2a] prefill completed room=ab12cd34.. tokens=812 ms=41.23 why="a b"\n'


def test_json_is_one_object_per_line_with_full_ids(lines):
    out = lines(log_format="json")
    logging.getLogger("baton.x").warning(
        "slow %s", "hand-off", extra=fields(room=ROOM, ms=3, level="not ours")
    )
    document = json.loads(out.getvalue())
    assert document["room"] == ROOM
    assert (document["level"], document["message"], document["ms"]) == ("warning", "slow hand-off", 3)
    assert document["role"] == "prefill"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_record_cannot_forge_another_line(lines, log_format):
    out = lines(log_format=log_format)
    logging.getLogger("baton.x").info("a\nb", extra=fields(reason="x\n12:00:00 INFO forged"))
    assert out.getvalue().count("\n") == 1


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_prompts_are_withheld(lines, log_format):
    out = lines(log_format=log_format)
    extra = fields(prompt="secret words", prompt_ids=[71, 72, 73], text="secret")
    logging.getLogger("baton.x").info("got", extra=extra)
    assert "secret" not in out.getvalue()
    assert "72" not in out.getvalue().partition("got")[2]
    assert "3 withheld" in out.getvalue()


def test_level_is_ours_and_other_libraries_speak_from_warning_on(lines):
    out = lines(level="info")
    logging.getLogger("baton.x").debug("no")
    logging.getLogger("httpx").info("no")
    logging.getLogger("httpx").warning("yes")
    assert out.getvalue().count("\n") == 1
    assert "yes" in out.getvalue()


def test_an_exception_is_logged_with_its_traceback(lines):
    out = lines(log_format="json")
    try:
        raise KeyError("k")
    except KeyError:
        logging.getLogger("baton.x").exception("crashed")
    assert "Traceback" in json.loads(out.getvalue())["error"]


def test_configuring_again_replaces_the_handler(lines):
    lines()
    out = lines()
    logging.getLogger("baton.x").info("once")
    assert out.getvalue().count("once") == 1
