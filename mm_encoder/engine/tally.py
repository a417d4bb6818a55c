"""Counts and times of jobs: a few additions per job, percentiles only on request."""

from __future__ import annotations

from collections import Counter, deque
from concurrent.futures import CancelledError

from ..contract import EncoderStats, StageTimes
from ..errors import (
    DeadlineExceededError,
    EncoderBusyError,
    EncoderClosedError,
    MediaError,
    PlanMismatchError,
)
from ..locks import AskableLock, guarded
from .faults import Joined
from .job import Job

_RECENT = 1024
_OUTCOMES: dict[type[BaseException], str] = {
    CancelledError: "cancelled",
    Joined: "joined",
    DeadlineExceededError: "late",
    EncoderBusyError: "refused",
    EncoderClosedError: "refused",
}


class Tally:
    """Counts every job once when it begins and once when it ends. Called under the scheduler's lock.

    Requests are those that have ended and those under way, so that no two counts can disagree.
    """

    def __init__(self, lock: AskableLock) -> None:
        self._lock = lock
        self._under_way: set[int] = set()
        self._ended: dict[str, int] = dict.fromkeys(("succeeded", "failed", *_OUTCOMES.values()), 0)
        self._errors: Counter[str] = Counter()
        self._recent: deque[dict[str, float]] = deque(maxlen=_RECENT)
        self.last_error: str | None = None
        """The last failure of the engine; invalid images do not count."""

    def begun(self, job: Job) -> None:
        """Count a new job, which has its number."""
        self._under_way.add(job.number)

    def ended(self, job: Job, error: BaseException | None) -> None:
        """Count a job's first outcome; `error` is None for a result."""
        if not job.counted and job.number in self._under_way:
            outcome = "succeeded" if error is None else _OUTCOMES.get(type(error), "failed")
            # One line without a call, between whose parts no interrupt can come.
            self._ended[outcome], job.counted = self._ended[outcome] + 1, True
            if outcome == "succeeded":
                self._recent.append(job.timings)
            elif outcome == "failed":
                self._errors[type(error).__name__] += 1
                if not isinstance(error, (MediaError, PlanMismatchError)):
                    self.last_error = f"{type(error).__name__}: {error}"
        self._under_way.discard(job.number)

    @guarded
    def snapshot(self) -> EncoderStats:
        """Return all counts so far."""
        ended, in_flight = dict(self._ended), len(self._under_way)
        recent, errors = list(self._recent), tuple(sorted(self._errors.items()))
        return EncoderStats(
            requests=sum(ended.values()) + in_flight,
            in_flight=in_flight,
            succeeded=ended["succeeded"],
            failed=ended["failed"],
            cancelled=ended["cancelled"],
            late=ended["late"],
            refused=ended["refused"],
            joined=ended["joined"],
            errors=errors,
            stages=_percentiles(recent),
        )


def _percentiles(recent: list[dict[str, float]]) -> tuple[StageTimes, ...]:
    stages: dict[str, list[float]] = {}
    for timings in recent:
        for stage, ms in timings.items():
            stages.setdefault(stage, []).append(ms)
        stages.setdefault("total", []).append(sum(timings.values()))
    if stages:
        stages["total"] = stages.pop("total")  # last
    return tuple(StageTimes(stage, *nearest_rank(times, 50, 95, 99)) for stage, times in stages.items())


def nearest_rank(values: list[float], *percents: int) -> list[float]:
    """Return percentiles by the nearest-rank method: the smallest values that `percents` do not exceed."""
    ordered = sorted(values)
    return [ordered[max(0, -(-len(ordered) * percent // 100) - 1)] for percent in percents]
