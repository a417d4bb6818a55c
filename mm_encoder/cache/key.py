"""Identity: what a result depends on, as named fields, and the key that covers them all.

A key is SHA-256 over framed fields: every name and value is preceded by its length, so no two lists of
fields hash the same bytes. Nothing is shortened anywhere.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping

from ..config import ImageOptions

FORMAT = 1
"""Of keys and of what they mean; a change makes every older entry a miss."""


def digest(fields: Iterable[tuple[str, str]]) -> bytes:
    """SHA-256 over framed (name, value) pairs, in their order."""
    hasher = hashlib.sha256()
    for pair in fields:
        for text in pair:
            data = text.encode(errors="surrogatepass")
            hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()


class Keys:
    """Makes the keys of one encoder from `identity`, what all its results depend on, by name.

    The order of `identity` does not matter. `settings` are what the host may change at any time; they are
    asked for each key. `bump` starts a new epoch: all keys are others from then on.
    """

    def __init__(self, identity: Mapping[str, str], settings: Callable[[], Mapping[str, str]] = dict) -> None:
        self._settings = settings
        self.identity = {"key format": str(FORMAT), **dict(sorted(identity.items())), "epoch": ""}
        self.prefix = digest(self.identity.items())

    def bump(self) -> None:
        """Start a new epoch. Its name is random: what one process calls its first is no other's first."""
        self.identity = {**self.identity, "epoch": secrets.token_hex(32)}
        self.prefix = digest(self.identity.items())

    def fields(self, mm_hash: str, options: ImageOptions | None) -> dict[str, str]:
        """Everything that the key of one image covers."""
        return {**self.identity, **self._image(mm_hash, options)}

    def key(self, mm_hash: str, options: ImageOptions | None) -> bytes:
        """The 32 bytes for one image: its `mm_hash` covers model, kind and content."""
        return hashlib.sha256(self.prefix + digest(self._image(mm_hash, options).items())).digest()

    def _image(self, mm_hash: str, options: ImageOptions | None) -> dict[str, str]:
        orientation = str((options or ImageOptions()).exif_orientation)
        return {"content": mm_hash, "exif_orientation": orientation, **self._settings()}
