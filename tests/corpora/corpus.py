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


def schemas() -> list[tuple[str, str, bool]]:
    """JSON schemas, patterns of strings among them: name, text, and whether it must be refused."""
    cases = []
    for line in (HERE / "grammar_bombs.jsonl").read_text("utf-8").splitlines():
        found = json.loads(line)
        if found["type"] == "grammar":  # a client cannot send one
            continue
        text = "".join(part if isinstance(part, str) else part[0] * part[1] for part in found.get("text", ()))
        if found["type"] == "regex":
            text = json.dumps({"type": "string", "pattern": text})
        elif "schema" in found:
            text = json.dumps(found["schema"])
        elif "make" in found:
            text = _made(found["make"])
        cases.append((found["name"], text, found["expect"] == "400"))
    return cases


def _made(how: dict) -> str:
    """A schema of many parts, by the name of its kind and their number."""
    count = how.get("n", 0)
    match how["gen"]:
        case "nest":  # as text: too deep to be written by a recursive encoder
            return how["open"] * count + '{"type":"string"}' + how["close"] * count
        case "enum":
            return json.dumps({"enum": [f"v{i}" for i in range(count)]})
        case "properties":
            parts = {f"p{i}": {"type": "string"} for i in range(count)}
            return json.dumps({"type": "object", "properties": parts, "required": list(parts)})
        case "ref_doubling":  # each definition names the one below it twice
            defs = {"d0": {"type": "string"}}
            for i in range(count):
                below = {"$ref": f"#/$defs/d{i}"}
                defs[f"d{i + 1}"] = {
                    "type": "object",
                    "properties": {"a": below, "b": below},
                    "required": ["a", "b"],
                }
            return json.dumps({"$defs": defs, "$ref": f"#/$defs/d{count}"})
        case "anyof_tree":
            return json.dumps(_tree(how["width"], how["depth"]))
    raise ValueError(how["gen"])


def _tree(width: int, depth: int) -> dict:
    if not depth:
        return {"type": "string"}
    below = _tree(width, depth - 1)
    return {
        "anyOf": [
            {"type": "object", "properties": {f"k{i}": below}, "required": [f"k{i}"]} for i in range(width)
        ]
    }


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
