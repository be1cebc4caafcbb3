"""When requests arrive in an open loop. Pure: the same arguments give the same times."""

from __future__ import annotations

import random


def poisson_arrivals(
    rate: float, *, seed: int, num_requests: int | None = None, duration: float | None = None
) -> list[float]:
    """Return arrival times in seconds after the start, rising, of a Poisson process of `rate` requests a second.

    Gaps are independent and exponential with mean 1/rate, so arrivals bunch as those of many independent users do.
    Give `num_requests`, or `duration` in seconds, or both for whichever ends first. A longer run begins with the
    arrivals of a shorter one. Raises ValueError.
    """
    if not rate > 0:
        raise ValueError("the rate must be above 0")
    if num_requests is None and duration is None:
        raise ValueError("give a number of requests or a duration")
    generator = random.Random(f"{seed}/arrivals")
    arrivals: list[float] = []
    now = 0.0
    while num_requests is None or len(arrivals) < num_requests:
        now += generator.expovariate(rate)
        if duration is not None and now >= duration:
            break
        arrivals.append(now)
    return arrivals
