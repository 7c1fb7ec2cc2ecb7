"""HTML pages as single documents with inline style and script.

`head.html` is in the head of each document. The files of `page/` that a document links are put in its place.
The content security policy names the style and the script by their hashes, so the browser runs no other
script, even if a worker's or a client's text contains one. The scripts of a document share one scope: they
become one module, in their order.
"""

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

PAGES = Path(__file__).parent / "page"
STYLE = re.compile(r'<link rel="stylesheet" href="(\w+\.css)">\n')
SCRIPT = re.compile(r'<script src="(\w+\.js)" type="module"></script>\n')


@dataclass(frozen=True)
class HtmlPage:
    """A page with its response headers."""

    body: bytes
    headers: dict[str, str]

    @classmethod
    def read(cls, name: str, parts: dict[str, str] | None = None) -> "HtmlPage":
        """The page in file `name`. Each `<!-- NAME -->` is replaced by the markup `parts[NAME]`."""
        document = _text(name).replace("<!-- head -->\n", _text("head.html"), 1)
        style, script = _joined(document, STYLE), _joined(document, SCRIPT)
        assert "</style" not in style, "would end the element"
        assert "</script" not in script, "would end the element"
        document = STYLE.sub("", document).replace("</head>", f"<style>{style}</style>\n</head>", 1)
        document = SCRIPT.sub("", document)
        for part, markup in (parts or {}).items():
            document = document.replace(f"<!-- {part} -->", markup)
        document = document.replace("</body>", f'<script type="module">{script}</script>\n</body>', 1)
        return cls(document.encode(), _headers(style, script))


def _joined(document: str, link: re.Pattern[str]) -> str:
    names = link.findall(document)
    assert names, link.pattern
    return "\n".join(_text(name) for name in names)


def _text(name: str) -> str:
    return (PAGES / name).read_text(encoding="utf-8")


def _headers(style: str, script: str) -> dict[str, str]:
    policy = (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; "
        "connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    return {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
    }


def _source(text: str) -> str:
    """The source expression of a content security policy for an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
