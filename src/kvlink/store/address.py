"""Addresses: what tells a place behind a network from a folder, and how one is shown."""

from urllib.parse import urlsplit


def is_address(named: object) -> bool:
    """Whether a caller named a place by a URL (`redis://...`, `s3://...`) and not a folder."""
    return isinstance(named, str) and "://" in named


def without_secrets(url: str) -> str:
    """Return a URL without user, password and query."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2] + parts.path
    return f"{parts.scheme}://{place}" if parts.scheme else place
