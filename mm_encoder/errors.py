"""Everything this library raises on purpose.

    MMEncoderError
    ├─ MediaError (also ValueError)         the caller's media is at fault
    │  ├─ MediaDecodeError                  empty, truncated, corrupt, no frame
    │  ├─ UnsupportedMediaError             recognised or not, but not decoded here; names the kind
    │  └─ MediaTooLargeError                bytes or pixels over the limit; decided from the header
    ├─ PlanMismatchError (also ValueError)  plan or expected_tokens disagree with the source
    ├─ CheckpointError                      config, processor or weights are not what the family needs
    ├─ RuntimeMismatchError                 built for another runtime than this host; says in what
    ├─ EncoderClosedError                   the encoder was closed
    ├─ EncoderBusyError                     no room in the queue within the caller's `timeout`
    ├─ DeadlineExceededError                the caller's `deadline` passed before the tower began
    ├─ ForkedProcessError                   the encoder was made before this process was forked
    ├─ ReplicaError                         the engine is at fault; chained to its cause
    │  └─ DeviceOutOfMemoryError            that job did not fit; the encoder goes on
    └─ CacheError                           the cache cannot be opened as asked
       └─ CacheLockedError                  its directory belongs to another encoder; names the path

Arguments of the wrong type or out of range raise TypeError or ValueError as anywhere in Python.
"""


class MMEncoderError(Exception):
    """Base of every error of this library."""


class MediaError(MMEncoderError, ValueError):
    """The media that the caller gave cannot be encoded; another item may be fine."""


class MediaDecodeError(MediaError):
    """The media is empty, truncated or corrupt."""


class UnsupportedMediaError(MediaError):
    """The media is of a kind that is not decoded here; the message names the kind."""


class MediaTooLargeError(MediaError):
    """The media exceeds `MediaLimits`, or its sides a family's bounds; decided before any pixel is
    allocated.
    """


class PlanMismatchError(MMEncoderError, ValueError):
    """The number of rows differs from what the caller expected; the message has both."""


class CheckpointError(MMEncoderError):
    """A checkpoint's config, processor file or tensors are missing, unexpected or not supported."""


class RuntimeMismatchError(MMEncoderError):
    """The installed wheel was built for another runtime than this host, or is damaged; raised by the import.
    The message has each field that differs, as built and as here.
    """


class EncoderClosedError(MMEncoderError):
    """The encoder was closed before this call or before it could do this work."""


class EncoderBusyError(MMEncoderError):
    """The queue had no room within the `timeout` that the caller gave; nothing was begun."""


class DeadlineExceededError(MMEncoderError):
    """The caller's `deadline` passed before a replica took the image, which was dropped."""


class ForkedProcessError(MMEncoderError):
    """The encoder's threads live in the parent process; make a new encoder, best in a spawned process."""


class ReplicaError(MMEncoderError):
    """A replica failed while encoding, or none is left; `__cause__` is what it failed with."""


class DeviceOutOfMemoryError(ReplicaError):
    """Device or host memory did not suffice for this job; the encoder goes on with the next."""


class CacheError(MMEncoderError):
    """The cache cannot be opened as asked. Once it is open, its faults are misses, counted and logged."""


class CacheLockedError(CacheError):
    """The cache's directory is in use by another encoder; the message names it."""
