"""When an engine that failed may be started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    first_s: float = 1.0
    """Wait after a second failure in a row; doubled with each further one. The first is followed by a start at once."""
    cap_s: float = 300.0
    """Longest wait; an engine that has lived this long has failed for the first time again."""
    attempts: int = 2
    """Starts that may fail in a row before calls are refused instead of waiting too."""


class Backoff:
    """The failures of one engine. Times are seconds of any one clock."""

    def __init__(self, policy: BackoffPolicy) -> None:
        self.why = ""
        """Of the last failure."""
        self.until_s = 0.0
        """Not to be started before."""
        self._policy = policy
        self._failures = 0
        self._failed_starts = 0
        self._up_s: float | None = None

    def started(self, now_s: float) -> None:
        self._up_s = now_s
        self._failed_starts = 0

    def failed(self, why: str, now_s: float) -> None:
        """A start did not succeed, or a running engine has died."""
        self.why = why
        if self._up_s is None:
            self._failed_starts += 1
        elif now_s - self._up_s >= self._policy.cap_s:
            self._failures = 0
        self._up_s = None
        self._failures += 1
        wait_s = 0.0 if self._failures == 1 else min(self._policy.cap_s, self._policy.first_s * 2.0 ** (self._failures - 2))
        self.until_s = now_s + wait_s

    def refusal(self, now_s: float) -> str | None:
        """Why calls had better not wait until this engine is tried again; None where they may."""
        if self._failed_starts < self._policy.attempts:
            return None
        again = f", tried again in {self.until_s - now_s:.0f} s at the earliest" if now_s < self.until_s else ""
        return f"{self.why} (failed {self._failures} times{again})"
