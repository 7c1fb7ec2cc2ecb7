"""Runs processes under the audit hook of `sitecustomize` and reads what it reported."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent


def watched_environment(report: Path, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`env` in which every Python process reports violations to the file `report`."""
    path = os.pathsep.join(part for part in (str(HERE), env.get("PYTHONPATH", "")) if part)
    return {**env, "PYTHONPATH": path, "AUDIT_REPORT": str(report)}


def violations(report: Path) -> list[dict]:
    """What was reported so far, oldest first."""
    if not report.exists():
        return []
    return [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
