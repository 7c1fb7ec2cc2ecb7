"""Reads the hostile input of this folder; see README.md."""

import json
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """One line of a file."""

    name: str
    hex: str
    why: str
    expect: str


def load(kind: str) -> list[Case]:
    """All cases of one kind."""
    lines = (HERE / f"{kind}.tsv").read_text("ascii").splitlines()
    return [Case(*line.split("\t")) for line in lines if line and not line.startswith("#")]


def http_requests() -> list[Case]:
    """Requests as bytes; `hex` holds them in hexadecimal."""
    cases = []
    for line in (HERE / "http_requests.jsonl").read_text("utf-8").splitlines():
        found = json.loads(line)
        text = "".join(part if isinstance(part, str) else part[0] * part[1] for part in found["bytes"])
        cases.append(Case(found["name"], text.encode("latin-1").hex(), found["why"], found["expect"]))
    return cases


def templates() -> list[tuple[str, str, bool]]:
    """Chat templates: name, text, and whether it is to be rendered."""
    cases = []
    for line in (HERE / "jinja_bombs.jsonl").read_text("utf-8").splitlines():
        found = json.loads(line)
        text = "".join(part if isinstance(part, str) else part[0] * part[1] for part in found["text"])
        cases.append((found["name"], text, found["expect"] == "ok"))
    return cases


def data(case: Case) -> bytes:
    """The hostile value itself."""
    return b"".join(steps(case))


def steps(case: Case) -> list[bytes]:
    """The byte strings to send one after another, the other side's answer awaited in between."""
    return [_bytes_of(step) for step in case.hex.split(";")]


def _bytes_of(text: str) -> bytes:
    """'dd00989680 + c0*3' -> bytes."""
    out = bytearray()
    for term in text.split("+"):
        run, _, count = term.strip().partition("*")
        out += bytes.fromhex(run) * int(count or 1)
    return bytes(out)
