"""The library's logger. A handler of the host that raises must not hurt the thread that logs."""

from __future__ import annotations

import logging
from typing import Any

_LOGGER = logging.getLogger("mm_encoder")


class SafeLogger:
    """The methods of the logger "mm_encoder" that the library uses; none of them raises an Exception."""

    def log(self, level: int, message: str, *values: object, **options: Any) -> None:
        """Log a message; what a handler or a filter raises is dropped."""
        try:
            _LOGGER.log(level, message, *values, **{"stacklevel": 2, **options})
        except Exception:
            pass

    def info(self, message: str, *values: object, **options: Any) -> None:
        """Log at level INFO."""
        self.log(logging.INFO, message, *values, stacklevel=3, **options)

    def warning(self, message: str, *values: object, **options: Any) -> None:
        """Log at level WARNING."""
        self.log(logging.WARNING, message, *values, stacklevel=3, **options)

    def error(self, message: str, *values: object, **options: Any) -> None:
        """Log at level ERROR."""
        self.log(logging.ERROR, message, *values, stacklevel=3, **options)

    def exception(self, message: str, *values: object, **options: Any) -> None:
        """Log at level ERROR, with the exception that is being handled."""
        self.log(logging.ERROR, message, *values, stacklevel=3, exc_info=True, **options)


logger = SafeLogger()
