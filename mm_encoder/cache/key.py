"""Cache keys: SHA-256 over named fields for everything that a result depends on.

Every name and value is preceded by its length, so two different lists of fields never hash the same bytes.
No digest is truncated.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from ..config import ImageOptions
from ..numerics import Settings

FORMAT = 2
"""Version of the keys and their meaning; changing it makes every older entry a miss."""


def digest(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return the SHA-256 of (name, value) pairs, each text preceded by its length, in the given order."""
    hasher = hashlib.sha256()
    for pair in fields:
        for text in pair:
            data = text.encode(errors="surrogatepass")
            hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()


class Keys:
    """Key factory of one encoder. `identity` names everything that all its results depend on, in any order.

    `settings` returns the process-wide settings that may change at any time. It is called for each key,
    unless `under` says what a result was computed with.
    `bump` starts a new epoch, which changes every key from then on.
    """

    def __init__(self, identity: Mapping[str, str], settings: Callable[[], Settings] = tuple) -> None:
        self._settings = settings
        self._settings_digest = lru_cache(64)(digest)  # a few, which are used for every key
        self.identity = {"key format": str(FORMAT), **dict(sorted(identity.items())), "epoch": ""}
        self.prefix = digest(self.identity.items())

    def bump(self) -> None:
        """Start a new epoch. Its name is random, so that epochs of different processes never coincide."""
        self.identity = {**self.identity, "epoch": secrets.token_hex(32)}
        self.prefix = digest(self.identity.items())

    def fields(self, mm_hash: str, options: ImageOptions | None) -> dict[str, str]:
        """Return all the fields that the key of one image covers."""
        return {**self.identity, **dict(self._settings()), **_image(mm_hash, options)}

    def key(self, mm_hash: str, options: ImageOptions | None, under: Settings | None = None) -> bytes:
        """Return the 32-byte key of one image; its `mm_hash` covers model name, kind and content."""
        settings = self._settings_digest(self._settings() if under is None else under)
        return hashlib.sha256(self.prefix + settings + digest(_image(mm_hash, options).items())).digest()


def _image(mm_hash: str, options: ImageOptions | None) -> dict[str, str]:
    orientation = str((options or ImageOptions()).exif_orientation)
    return {"content": mm_hash, "exif_orientation": orientation}
