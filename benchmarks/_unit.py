"""What a number that is tracked counts, and which way is better."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Track = TypeVar("Track", bound=Callable)


def counts(unit: str, *, less_is_better: bool | None = True) -> Callable[[Track], Track]:
    """Mark a `track_` method: without it the dashboard takes more of anything to be better.

    With None neither is: a change is told, and is no regression.
    """

    def mark(track: Track) -> Track:
        track.unit, track.less_is_better = unit, less_is_better
        return track

    return mark
