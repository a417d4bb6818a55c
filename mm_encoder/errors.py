"""Everything this library raises on purpose.

    MMEncoderError
    ├─ MediaError (also ValueError)         the caller's media is invalid
    │  ├─ MediaDecodeError                  empty, truncated, corrupt, no frame, of no known kind
    │  ├─ UnsupportedMediaError             of a kind that is not decoded here; names it
    │  └─ MediaTooLargeError                bytes or pixels over the limit; decided from the header
    ├─ PlanMismatchError (also ValueError)  plan or expected_tokens disagree with the source
    ├─ CheckpointError                      config, processor or weights are not what the family needs
    ├─ RuntimeMismatchError                 built for another runtime than this host; says in what
    ├─ EncoderClosedError                   the encoder was closed
    ├─ EncoderBusyError                     no slot or bytes became free within `timeout`
    ├─ DeadlineExceededError                the caller's `deadline` passed before the tower began
    ├─ ForkedProcessError                   threads that this call needs are in the parent of a fork()
    ├─ ReplicaError                         the engine failed; chained to its cause
    │  └─ DeviceOutOfMemoryError            that job did not fit; the encoder goes on
    └─ CacheError                           the cache cannot be opened as configured
       └─ CacheLockedError                  another encoder uses its directory; has the path

Arguments of the wrong type or out of range raise TypeError or ValueError as anywhere in Python. What the
system refuses while an image is read (a descriptor, a read) is the OSError that it gave; a path that is
missing, a folder or not permitted is a MediaError.
"""


class MMEncoderError(Exception):
    """Base of every error of this library."""


class MediaError(MMEncoderError, ValueError):
    """The caller's media cannot be encoded; another item may be fine."""


class MediaDecodeError(MediaError):
    """The media is empty, truncated or corrupt, or of no kind of media that is known here."""


class UnsupportedMediaError(MediaError):
    """The media is of a kind that is not decoded here; the message names the kind."""


class MediaTooLargeError(MediaError):
    """The media exceeds `MediaLimits`, or its sides a family's bounds; raised before a pixel is allocated."""


class PlanMismatchError(MMEncoderError, ValueError):
    """The number of rows differs from the caller's expectation; the message has both numbers."""


class CheckpointError(MMEncoderError):
    """A checkpoint's config, processor file or tensors are missing, unexpected or not supported."""


class RuntimeMismatchError(MMEncoderError):
    """The installed wheel was built for another runtime than this host's, or is damaged; raised at import.
    The message has each field that differs, as built and as here. Or a compiled tower was asked for that
    cannot be compiled or used here; raised by `Encoder`.
    """


class EncoderClosedError(MMEncoderError):
    """The encoder was closed before this call, or before it could encode the image."""


class EncoderBusyError(MMEncoderError):
    """No slot or bytes became free within the caller's `timeout`; the image was not started."""


class DeadlineExceededError(MMEncoderError):
    """The caller's `deadline` passed before a replica took the image, which is not encoded."""


class ForkedProcessError(MMEncoderError):
    """The encoder was created before fork(), and its threads are in the parent: create one in the child. Or a
    planner prepared inputs there, and the threads of Torch's pool are in the parent.
    """


class ReplicaError(MMEncoderError):
    """A replica failed while encoding, or none is left; `__cause__` is the original error."""


class DeviceOutOfMemoryError(ReplicaError):
    """Device or host memory did not suffice for this image; the encoder goes on with the next."""


class CacheError(MMEncoderError):
    """The cache cannot be opened. Once it is open, failures are misses, counted and logged."""


class CacheLockedError(CacheError):
    """Another encoder uses the cache's directory, whose path is in the message."""
