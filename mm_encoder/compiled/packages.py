"""The directory of compiled towers. A package is a shared library and a manifest, both named by its key.

A shared library is code: whoever can write it can run anything in this process. So the directory and its
files must belong to the user and be writable by nobody else, and a library must have the digest that its
manifest says.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..config import expand_home, user_cache
from ..errors import RuntimeMismatchError
from .identity import key_of

VARIABLE = "MM_ENCODER_COMPILED"
"""Environment variable with the directory of packages."""


class Package(NamedTuple):
    """A package whose files are what they were when it was compiled."""

    library: Path
    digest: str
    """SHA-256 of the library, in hex."""


class Packages:
    """The packages in one directory, by default `mm-encoder/compiled` in the user's cache directory. Raises
    RuntimeMismatchError if that is not known.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        chosen = directory or os.environ.get(VARIABLE)
        try:
            if chosen:
                self.directory = expand_home(VARIABLE, chosen).absolute()
            else:
                self.directory = user_cache(VARIABLE) / "compiled"
        except ValueError as error:
            raise RuntimeMismatchError(f"the directory of compiled towers is not known: {error}") from None

    def find(self, identity: Mapping[str, str]) -> Package:
        """Return the package of an identity, after checking it.

        Raises RuntimeMismatchError saying why there is none that can be used; nothing has been loaded then.
        """
        manifest_path = self.directory / f"{key_of(dict(identity))}.json"
        if not manifest_path.exists():
            raise RuntimeMismatchError(f"there is no compiled tower for this in {self.directory}")
        _require_own_directory(self.directory)
        _require_own(manifest_path)
        try:
            manifest = json.loads(manifest_path.read_bytes())
            library = self.directory / str(manifest["library"])
            wanted = str(manifest["sha256"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RuntimeMismatchError(f"the manifest {manifest_path} cannot be read: {error}") from None
        _require_own(library)
        if library.parent != self.directory or manifest.get("identity") != dict(identity):
            raise RuntimeMismatchError(f"the manifest {manifest_path} is of another tower; delete it")
        found = _sha256(library)
        if found != wanted:
            raise RuntimeMismatchError(
                f"{library} is damaged: its SHA-256 is {found}, not {wanted}; delete it"
            )
        return Package(library, found)

    @contextmanager
    def building(self, identity: Mapping[str, str]) -> Iterator[Path]:
        """Lock the package of an identity, wait for whoever is building it, and yield an empty directory to
        build in. Raises RuntimeMismatchError if the directory cannot be used.
        """
        key = key_of(dict(identity))
        if re.search(r"\s", str(self.directory)):
            raise RuntimeMismatchError(
                f"towers cannot be compiled in {str(self.directory)!r}, as Torch's compiler takes no white "
                f"space in paths; set {VARIABLE} to another directory"
            )
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_own_directory(self.directory)
            lock = os.open(self.directory / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RuntimeMismatchError(
                f"compiled towers cannot be kept in {self.directory}: {error.strerror}; set {VARIABLE} to a "
                "directory that this user can write"
            ) from None
        folder = self.directory / f"{key}.building"
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # which the kernel releases when a process dies
            try:
                shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
                folder.mkdir(mode=0o700)
                yield folder
            finally:  # only who has the lock may remove it
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise RuntimeMismatchError(f"a tower cannot be compiled in {folder}: {error}") from error
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also for a process that was forked meanwhile
            os.close(lock)

    def keep(self, identity: Mapping[str, str], built: Path) -> Package:
        """Move a library that was built into its place; to be called inside `building`. Raises OSError."""
        key, digest = key_of(dict(identity)), _sha256(built)
        library = self.directory / f"{key}-{digest[:16]}.so"
        manifest = built.with_suffix(".json")
        text = json.dumps({"identity": dict(identity), "library": library.name, "sha256": digest}, indent=1)
        manifest.write_text(text + "\n", encoding="utf-8")
        for path in (built, manifest):
            path.chmod(0o600)
        os.replace(built, library)
        os.replace(manifest, self.directory / f"{key}.json")  # from now on it can be found
        for old in self.directory.glob(f"{key}-*.so"):
            if old != library:
                with suppress(OSError):
                    old.unlink()  # processes that have loaded it keep it
        return Package(library, digest)


def _require_own_directory(directory: Path) -> None:
    """Raise RuntimeMismatchError if others could write the directory, or put another one in its place."""
    _require_own(directory, regular=False)
    for parent in directory.resolve().parents:
        found = parent.stat()
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
        if others or found.st_uid not in (os.geteuid(), 0):
            raise RuntimeMismatchError(
                f"{parent} belongs to another user or can be written by others, who could replace what is in "
                f"it; chmod go-w it, or set {VARIABLE} to a directory elsewhere"
            )


def _require_own(path: Path, *, regular: bool = True) -> None:
    """Raise RuntimeMismatchError unless the path is the user's own and writable by nobody else."""
    try:
        found = path.lstat()
    except (OSError, ValueError) as error:
        raise RuntimeMismatchError(f"{path!r} cannot be used: {error}") from None
    if stat.S_ISLNK(found.st_mode):
        raise RuntimeMismatchError(
            f"{path} is a symbolic link; compiled towers are loaded from plain files only"
        )
    if regular and not stat.S_ISREG(found.st_mode):
        raise RuntimeMismatchError(f"{path} is not a regular file; remove it")
    if found.st_uid not in (os.geteuid(), 0):
        raise RuntimeMismatchError(f"{path} belongs to user {found.st_uid}; it must be this user's or root's")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeMismatchError(f"{path} can be written by other users; chmod go-w it, or set {VARIABLE}")


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RuntimeMismatchError(f"{path} cannot be read: {error.strerror}") from None
