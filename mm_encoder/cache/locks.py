"""Advisory locks on a cache's directory.

They use flock: it can be shared, every open() is a separate owner even within a process, the kernel releases
it when a process dies, and a forked child that closes its copy does not unlock its parent. A child closes its
copy at once, because the lock would otherwise outlive the parent.

A lock is on an inode and not on a name: a cleaner of old files may remove the file's name under its owner,
and the next to come would lock a new file. So the directory itself is locked as well, where the file system
can.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import repeat

from ..errors import CacheError, CacheLockedError

# A directory on some network file systems, where the file alone is locked.
_NOT_LOCKABLE = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP}


class Lock:
    """A lock on a directory and on its file `name`, until `release` is called or the object is collected."""

    def __init__(
        self, path: str, name: str, check: Callable[[], object], *, shared: bool, remedy: str = ""
    ) -> None:
        """Lock without waiting. `check` is called before the file is created, which marks the directory.

        Raises CacheLockedError, whose message ends with `remedy`, CacheError, or what `check` raises.
        """
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        with ExitStack() as opened:
            try:
                folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                opened.callback(os.close, folder)
                try:
                    fcntl.flock(folder, kind)
                except OSError as error:
                    if error.errno not in _NOT_LOCKABLE:
                        raise
                check()
                file = open_file(path, name)
                opened.callback(os.close, file)
                fcntl.flock(file, kind)
            except BlockingIOError:
                raise CacheLockedError(
                    f"the cache directory {path} is in use by another encoder; use another directory{remedy}"
                ) from None
            except OSError as error:
                raise CacheError(f"the cache directory {path} cannot be locked: {error.strerror}") from error
            self.release = Closer(self, file, folder)
            opened.pop_all()


def open_file(path: str, name: str) -> int:
    """Open a file of the directory, created if it is missing, to be locked. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.path.join(path, name)
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(file).st_mode):
            raise OSError(errno.EINVAL, f"{file} is not a regular file; remove it")
    return os.open(file, flags, 0o666)


class Closer:
    """Unlocks and closes descriptors: when called, when `owner` is collected, or in a forked child. A call
    that was interrupted may be repeated.
    """

    def __init__(self, owner: object, *descriptors: int) -> None:
        self._left = list(descriptors)
        self._close = partial(_unlock_and_close, self._left, os.getpid())
        # The kernel does it at exit, and a thread may still be writing then.
        weakref.finalize(owner, self._close).atexit = False
        os.register_at_fork(after_in_child=self._close)

    @property
    def alive(self) -> bool:
        """Whether the descriptors are open."""
        return bool(self._left)

    def __call__(self) -> None:
        """Unlock and close, if that was not done."""
        self._close()


def _unlock_and_close(left: list[int], owner: int) -> None:
    # LOCK_UN, as a child forked outside Python may hold a copy of the descriptor; a child never unlocks.
    if os.getpid() == owner:
        for descriptor in left:
            with suppress(OSError):  # a directory that cannot be locked
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    # One call, so that no interrupt comes between forgetting and closing: closed twice, the number may be
    # that of another file by then.
    deque(map(os.close, map(list.pop, repeat(left, len(left)))), maxlen=0)
