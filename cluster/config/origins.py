"""The form of `--allowed-origins`: origins of web pages, or `*`."""

from urllib.parse import urlsplit

ANY = "*"


def origins_fault(text: str) -> str:
    """The fault of a list of origins, as the end of a sentence that begins with it; "" if valid."""
    if text in ("", ANY):
        return ""
    for origin in text.split(","):
        if origin == ANY:
            return "names * beside origins: write * alone, or the origins"
        fault = _origin_fault(origin)
        if fault:
            return fault
    return ""


def _origin_fault(origin: str) -> str:
    try:
        parts = urlsplit(origin)
        _ = parts.port
    except ValueError:
        parts = None
    if parts is None or not parts.scheme or not parts.netloc or origin != origin.strip():
        return f"holds {origin!r}, which is no origin: write such as https://app.example.com, or * for all"
    if origin != f"{parts.scheme}://{parts.netloc}":
        return f"holds {origin!r}: an origin is scheme, host and port only, such as {parts.scheme}://{parts.netloc}"
    if origin != origin.lower() or not origin.isascii():
        return f"holds {origin!r}: browsers send origins in lower case and ASCII"
    return ""
