"""The duration of a wait, without suspensions of the job. `csrc/base/stopwatch.h` is the same."""

from __future__ import annotations

import time

SLICE_SECONDS = 0.1  # the longest sleep of a wait
GRACE_SECONDS = 5.0  # ranks wait longer than the one that can report who is missing
_EXCUSED_SECONDS = 1.0  # after a suspension, while the other processes resume


class Stopwatch:
    """Seconds since it was made in which this process could run.

    Ask at least every `SLICE_SECONDS` or so. If far more time has passed between two looks, the process was
    suspended with its job, by Ctrl-Z or with its container, for example. That time does not count, nor does the next
    second, while the other processes resume one after the other.

    Args:
        longest_look: seconds that may pass between two looks without a suspension.
    """

    def __init__(self, longest_look: float = 1.0) -> None:
        self._longest_look = longest_look
        self._last_look = time.monotonic()
        self._excused_until = 0.0
        self._seconds = 0.0

    def seconds(self) -> float:
        """The seconds counted so far."""
        now = time.monotonic()
        passed, self._last_look = now - self._last_look, now
        if passed > self._longest_look:
            self._excused_until = now + _EXCUSED_SECONDS
        elif now > self._excused_until:
            self._seconds += passed
        return self._seconds


class Deadline:
    """The end of a wait of `seconds`. The time of a suspension does not count.

    Args:
        seconds: how long the wait may last.
        clock: measures them (default: a stopwatch of its own); it is read whenever the deadline is.
    """

    def __init__(self, seconds: float, clock: Stopwatch | None = None) -> None:
        self.seconds = seconds
        self._clock = clock or Stopwatch()
        self._end = self._clock.seconds() + seconds

    def left(self) -> float:
        """Seconds left; raises TimeoutError if there are none."""
        left = self._end - self._clock.seconds()
        if left <= 0:
            raise TimeoutError
        return left

    @property
    def over(self) -> bool:
        """Whether no seconds are left."""
        return self._clock.seconds() >= self._end
