"""Cache keys: SHA-256 over named fields for everything that a result depends on.

Every name and value is preceded by its length, so two different lists of fields never hash the same bytes.
No digest is truncated.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping

from ..config import ImageOptions
from ..numerics import Settings

FORMAT = 2
"""Version of the keys and their meaning; changing it makes every older entry a miss."""

_DEFAULT = ImageOptions()


def digest(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return the SHA-256 of (name, value) pairs, each text preceded by its length, in the given order."""
    texts = [text.encode(errors="surrogatepass") for pair in fields for text in pair]
    return hashlib.sha256(b"".join([len(text).to_bytes(8, "little") + text for text in texts])).digest()


class Keys:
    """Key factory of one encoder. `identity` names everything that all its results depend on, in any order.

    `settings` returns the process-wide settings that may change at any time. It is called for each key,
    unless `under` says what a result was computed with.
    `bump` starts a new epoch, which changes every key from then on.
    """

    def __init__(self, identity: Mapping[str, str], settings: Callable[[], Settings] = tuple) -> None:
        self._settings = settings
        self._last_settings: tuple[Settings, bytes] = (), digest(())
        """Those of the last key, and their digest; usually the next key gets the very same object."""
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
        settings, known = self._settings() if under is None else under, self._last_settings
        if known[0] is not settings:
            known = self._last_settings = settings, digest(settings)
        return hashlib.sha256(self.prefix + known[1] + digest(_image(mm_hash, options).items())).digest()


def _image(mm_hash: str, options: ImageOptions | None) -> dict[str, str]:
    orientation = str((options or _DEFAULT).exif_orientation)
    return {"content": mm_hash, "exif_orientation": orientation}
