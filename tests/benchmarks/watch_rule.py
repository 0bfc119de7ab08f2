"""Trials of the rule for changes of the step time beside textbook detectors, on correlated noise.

    python tests/benchmarks/watch_rule.py [STREAMS]

A stream has 1,000 points, a week of one each ten minutes: noise of 2 % (Student's t with 4 degrees
of freedom, as an autoregressive process), 1 % of single points 1.5 times as long. With checkpoints,
each 40th point is 10 % longer; with restarts, a new level begins each 200 points, up to 3 % away.
Printed for each detector, by autocorrelation: false alarms per stream, and for steps that become
longer at point 500 the share of streams in which it is found within ten points, and the median
delay in points. The textbook detectors learn the level from 50 points, anew after an alarm or a
restart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from statistics import mean, median
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from stepsplit.analyzer.watch.levels import LEAST_MADS, OnlineLevel, Point

Stream = npt.NDArray[np.float64]

POINTS, ONSET, WITHIN = 1_000, 500, 10

STEP_NS = 100e6

RESTART_POINTS, LEARNED = 200, 50


def draw_stream(rng: np.random.Generator, correlation: float, checkpoints: bool) -> Stream:
    """The step times of a stream, in ns."""
    shocks = rng.standard_t(4, POINTS) / np.sqrt(2) * np.sqrt(1 - correlation**2)
    noise = np.empty(POINTS)
    noise[0] = shocks[0]
    for i in range(1, POINTS):
        noise[i] = correlation * noise[i - 1] + shocks[i]
    times = STEP_NS * (1 + 0.02 * noise)
    times[rng.random(POINTS) < 0.01] *= 1.5
    if checkpoints:
        times[::40] *= 1.1
    return times


# Detectors: the first alarm in a part of a stream, or None.

Detector = Callable[[Stream], int | None]


def _standardize(part: Stream) -> Stream:
    """Deviations from the median of the learned points, by their robust standard deviation."""
    usual = np.median(part[:LEARNED])
    deviation = 1.4826 * np.median(np.abs(part[:LEARNED] - usual))
    return (part - usual) / max(float(deviation), 1.0)


def detect_by_ewma(part: Stream) -> int | None:
    """EWMA with a weight of 0.2, beyond three of its standard deviations."""
    average, limit = 0.0, 3 * np.sqrt(0.2 / 1.8)
    for at, value in enumerate(_standardize(part)[LEARNED:].tolist(), LEARNED):
        average += 0.2 * (value - average)
        if abs(average) > limit:
            return at
    return None


def _detect_by_cusum(part: Stream, clip: float, height: float) -> int | None:
    above = below = 0.0
    values = np.clip(_standardize(part)[LEARNED:], -clip, clip)
    for at, value in enumerate(values.tolist(), LEARNED):
        above, below = max(0.0, above + value - 0.5), max(0.0, below - value - 0.5)
        if max(above, below) > height:
            return at
    return None


def detect_by_page_hinkley(part: Stream) -> int | None:
    """Page-Hinkley on relative values, with a tolerance of 1 % and a threshold of 25 %."""
    total = least = most = 0.0
    relative = part[LEARNED:] / np.median(part[:LEARNED]) - 1
    for at, value in enumerate(relative.tolist(), LEARNED):
        total += value
        least, most = min(least, total - 0.01), max(most, total + 0.01)
        if max(total - least, most - total) > 0.25:
            return at
    return None


def _detect_by_ratio(part: Stream, in_a_row: int) -> int | None:
    row = 0
    for at in range(LEARNED, len(part)):
        row = row + 1 if part[at] > 1.1 * np.median(part[at - LEARNED : at]) else 0
        if row == in_a_row:
            return at
    return None


HAZARD, MOST_RUN = 1 / 250, 300

SHORT_RUN = 10


def detect_by_bayes(part: Stream) -> int | None:
    """Bayesian online change points (Adams and MacKay 2007, arXiv:0710.3742) of relative values.

    Alarms where a run of under ten points has a probability above 0.9 and a mean 10 % away. The
    values of a run are normal, with a normal-inverse-gamma prior as wide as the noise of a stream.
    """
    weights, alpha, beta = np.ones(1), np.ones(1), np.full(1, 0.02**2)
    means, counts = np.zeros(1), np.full(1, 0.01)
    for at, value in enumerate((part / np.median(part[:LEARNED]) - 1).tolist()):
        scale = np.sqrt(beta * (counts + 1) / (alpha * counts))
        tail = np.log1p(((value - means) / scale) ** 2 / (2 * alpha)) * (alpha + 0.5)
        # The density of Student's t with 2 alpha degrees of freedom.
        gammas = gammaln(alpha + 0.5) - gammaln(alpha) - np.log(2 * np.pi * alpha) / 2
        likely = weights * np.exp(gammas - tail) / scale
        weights = np.append(HAZARD * likely.sum(), (1 - HAZARD) * likely)[:MOST_RUN]
        weights /= weights.sum()
        beta = np.append(beta[0], beta + counts * (value - means) ** 2 / (2 * (counts + 1)))
        means = np.append(means[0], (counts * means + value) / (counts + 1))
        counts, alpha = np.append(counts[0], counts + 1), np.append(alpha[0], alpha + 0.5)
        means, counts, alpha, beta = (a[:MOST_RUN] for a in (means, counts, alpha, beta))
        is_sure = at >= LEARNED and weights[:SHORT_RUN].sum() > 0.9
        if is_sure and abs(means[1 + np.argmax(weights[1:SHORT_RUN])]) > 0.1:
            return at
    return None


DETECTORS: Mapping[str, Detector | float] = {
    "stepsplit": LEAST_MADS,
    "stepsplit with 4 MAD": 4.0,
    "EWMA 0.2, 3 sigma": detect_by_ewma,
    "CUSUM k 0.5, h 5": lambda part: _detect_by_cusum(part, np.inf, 5),
    "CUSUM clipped at 4 sigma, h 10": lambda part: _detect_by_cusum(part, 4, 10),
    "Page-Hinkley": detect_by_page_hinkley,
    "above 1.1 x median of 50": lambda part: _detect_by_ratio(part, 1),
    "the same, 3 in a row": lambda part: _detect_by_ratio(part, 3),
    "Bayesian, 10 % away": detect_by_bayes,
}


def find_alarms(times: Stream, detect: Detector | float, restarts: bool = False) -> list[int]:
    """The points of a detector's alarms; a number: of the rule of stepsplit with so many MAD."""
    if isinstance(detect, float):
        with patch("stepsplit.analyzer.watch.levels.LEAST_MADS", detect):
            return find_changes(times, RESTART_POINTS if restarts else 0)
    found, begin = [], 0
    while begin < len(times):
        end = (
            min(len(times), (begin // RESTART_POINTS + 1) * RESTART_POINTS) if restarts else POINTS
        )
        at = detect(times[begin:end])
        found += [] if at is None else [begin + at]
        begin = end if at is None else begin + at + 1
    return found


def find_changes(times: Stream, restart_points: int = 0) -> list[int]:
    """The points at which the rule reports a change."""
    level, found = OnlineLevel(), []
    for number, value in enumerate(times.tolist()):
        if restart_points and number % restart_points == 0:
            level = OnlineLevel()
        level, change = level.add(Point(number, number, value, value))
        if change is not None and not change.is_over:
            found.append(number)
    return found


# Trials.


def count_false(
    streams: int, detect: Detector | float, correlation: float, checkpoints: bool, restarts: bool
) -> float:
    """The mean number of false alarms of a stream."""
    rng, counts = np.random.default_rng(1), []
    for _ in range(streams):
        times = draw_stream(rng, correlation, checkpoints)
        if restarts:
            levels = rng.uniform(0.97, 1.03, POINTS // RESTART_POINTS)
            times *= np.repeat(levels, RESTART_POINTS)
        counts.append(len(find_alarms(times, detect, restarts)))
    return mean(counts)


def measure_delay(
    streams: int, detect: Detector | float, correlation: float, growth: float
) -> tuple[float, float]:
    """The share of streams in which the change is found in time, and the median delay."""
    rng, delays = np.random.default_rng(2), []
    for _ in range(streams):
        times = draw_stream(rng, correlation, checkpoints=False)
        times[ONSET:] *= 1 + growth
        after = [each - ONSET for each in find_alarms(times, detect) if each >= ONSET]
        delays += [after[0]] if after and after[0] < WITHIN else []
    return len(delays) / streams, median(delays) if delays else float("nan")


def format_row(name: str, detect: Detector | float, streams: int, correlation: float) -> str:
    """A row of the table."""
    kinds = ((False, False), (True, False), (False, True))
    false = [count_false(streams, detect, correlation, *kind) for kind in kinds]
    found = [measure_delay(streams, detect, correlation, growth) for growth in (0.10, 0.05)]
    cells = [f"{each:.2f}" for each in false]
    cells += [f"{share:.0%} / {delay:g}" for share, delay in found]
    return f"| {name} | {correlation:g} | {' | '.join(cells)} |\n"


def main() -> None:
    """Prints the table."""
    streams = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    say = sys.stdout.write
    say("| rule | AR | false | with checkpoints | with restarts | +10 % | +5 % |\n")
    say("|---|---|---|---|---|---|---|\n")
    for name, detect in DETECTORS.items():
        for correlation in (0.0, 0.5, 0.9):
            say(format_row(name, detect, streams, correlation))


if __name__ == "__main__":
    main()
