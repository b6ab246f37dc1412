"""The factors that explain sums of figures best: a robust regression in logs, with its uncertainty.

Derivation in docs/measuring.md, "What runs teach". Minimised over effects z, with the logs of the factors
t = Z z, rows i and figures j, is

    sum_i (v + 1) / 2 * log(1 + r_i^2 / (v s_i^2)) + |z|^2 / 2,
    r_i = log y_i - log(c_i + sum_j x_ij exp(t_j)),

the negative log posterior of Student-t errors with v degrees of freedom and normal effects.
"""

from dataclasses import dataclass

import numpy as np

from .prior import Floats

FREEDOM = 4.0
"""Degrees of freedom of an error: a row 5 deviations off counts a seventh of one that agrees (K. Lange, R.
Little, J. Taylor, JASA 84, 1989: 4 works well where it is not estimated)."""
KNOWN = (FREEDOM + 1) / (FREEDOM + 3)
"""Fisher information of a Student-t error, of a normal one's with the same s (same paper)."""
SCALES = (32.0, 8.0, 2.0, 1.0)
"""Times the rows' own deviations, one after the other: at the first all rows pull, at the last those that
disagree with the most have let go. So a profile that is wrong by much is not taken for a run of outliers."""
MOST_ITERATIONS = 50
"""Gauss-Newton steps at each scale; four to eight are enough."""
SMALL = 1e-9
"""Change of the logs that ends the iterations."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Rows of the regression."""

    seconds: Floats
    """x [rows, figures] by the profile."""
    fixed: Floats
    """c [rows]."""
    measured: Floats
    """y [rows]."""
    deviation: Floats
    """s [rows], of the logs."""

    def predicted(self, logs: Floats) -> Floats:
        """[rows] for the logs of the factors [figures]."""
        return self.fixed + self.seconds @ np.exp(logs)

    def residual(self, logs: Floats) -> Floats:
        """Log of measured over predicted [rows]."""
        return np.asarray(np.log(self.measured / self.predicted(logs)))


@dataclass(frozen=True, slots=True)
class Fit:
    """The posterior of the logs of the factors."""

    logs: Floats
    """[figures]."""
    deviation: Floats
    """[figures]."""
    residual: Floats
    """Log of measured over what the factors give [rows]."""
    weight: Floats
    """1 for a row that agrees, near 0 for an outlier [rows]."""


def fit(sums: Sums, design: Floats) -> Fit:
    """Most likely factors for ``design`` [figures, effects], and how sure they are."""
    z = np.zeros(design.shape[1])
    for scale in SCALES:
        z = _settle(sums, design, z, scale * sums.deviation)
    logs = design @ z
    residual = sums.residual(logs)
    weight = _weight(residual, sums.deviation) * FREEDOM / (FREEDOM + 1)
    slope = _slope(sums, logs, design)
    known = KNOWN * weight / sums.deviation**2
    information = (slope * known[:, None]).T @ slope
    covariance = np.linalg.inv(information + np.eye(len(z)))
    # rows that miss by more than their deviations make all of it less sure
    free = max(1.0, len(residual) - float(np.trace(covariance @ information)))
    excess = max(1.0, float(np.sum(weight * (residual / sums.deviation) ** 2)) / free)
    inflated = covariance @ (excess * information + np.eye(len(z))) @ covariance
    spread = np.sqrt(np.einsum("je,ef,jf->j", design, inflated, design))
    return Fit(logs, spread, residual, weight)


def _settle(sums: Sums, design: Floats, z: Floats, deviation: Floats) -> Floats:
    """Gauss-Newton with halved steps, from ``z`` to the nearest minimum."""
    least = _objective(sums, design, z, deviation)
    for _ in range(MOST_ITERATIONS):
        logs = design @ z
        residual = sums.residual(logs)
        slope = _slope(sums, logs, design)
        weighted = slope * (_weight(residual, deviation) / deviation**2)[:, None]
        step = np.linalg.solve(weighted.T @ slope + np.eye(len(z)), weighted.T @ residual - z)
        part = 1.0
        while (found := _objective(sums, design, z + part * step, deviation)) > least and part > SMALL:
            part /= 2
        if found > least:
            return z
        z, least = z + part * step, found
        if np.max(np.abs(design @ step), initial=0.0) < SMALL:
            return z
    return z


def _objective(sums: Sums, design: Floats, z: Floats, deviation: Floats) -> float:
    residual = sums.residual(design @ z)
    misfit = (FREEDOM + 1) / 2 * np.log1p((residual / deviation) ** 2 / FREEDOM)
    return float(np.sum(misfit) + z @ z / 2)


def _weight(residual: Floats, deviation: Floats) -> Floats:
    """How much a row counts [rows]: the Student-t score over that of a normal error."""
    return np.asarray((FREEDOM + 1) / (FREEDOM + (residual / deviation) ** 2))


def _slope(sums: Sums, logs: Floats, design: Floats) -> Floats:
    """Change of a row's log by effect [rows, effects]: each figure by its part of the sum."""
    parts = sums.seconds * np.exp(logs) / sums.predicted(logs)[:, None]
    return np.asarray(parts @ design)
