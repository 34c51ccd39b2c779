"""What theory predicts for Guess & Check, in float64.

Sources: volume hypothesis (arXiv 2506.03931), SSM poisoning (arXiv 2410.10473). S is treated as
Gaussian with its exact first two moments, conditioned on WᵀS = 0. It is an approximation: about
1.3 % high at d = 150 for w = e_1, much more when |w_1| is small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from muster_recipes.ssm.problem import Problem

#: Share of the largest below which a singular value of WᵀSigma W stands for a dependence.
_DEPENDENT = 1e-12


@dataclass(frozen=True)
class Asymptote:
    """L(d) ≈ a + b / d for large d and one sequence."""

    a: float
    b: float

    def at(self, dim: int) -> float:
        return self.a + self.b / dim


def mean_power_sum(power: int, dim: int) -> float:
    """E[Σ_j a_j^p] of d entries a_j ~ N(0, 1/d), for p >= 1: d^(1 - p/2) (p - 1)!!, or 0 for odd p.

    Factor by factor, because (p - 1)!! alone is beyond a float from p = 302 on.
    """
    return 0.0 if power % 2 else math.prod(i / dim for i in range(power - 1, 1, -2))


def prior_mean(problem: Problem, dim: int) -> float:
    """E[‖S‖²] over all draws, exactly: ‖mu‖² + tr Sigma."""
    mu, sigma = _moments(problem, dim)
    return sum(mean * mean for mean in mu) + sum(sigma[m][m] for m in range(len(mu)))


def conditional_mean(problem: Problem, dim: int) -> float:
    """L(d) = ‖mu_c‖² + tr Sigma_c under WᵀS = 0, for any number of sequences."""
    import numpy as np

    mu, sigma = map(np.array, _moments(problem, dim))
    w = np.array(problem.w, dtype=np.float64).T  # K × N
    # Only the span of W counts. With columns of unit variance the pseudo-inverse's cut-off drops
    # sequences that depend on others, and not a lag whose variance d^(1-2m) is merely small.
    spread = np.sqrt(np.einsum("kn,kl,ln->n", w, sigma, w))
    w = w / np.where(spread > 0, spread, 1.0)
    gain = sigma @ w @ np.linalg.pinv(w.T @ sigma @ w, rcond=_DEPENDENT, hermitian=True)
    mu_c = mu - gain @ (w.T @ mu)
    sigma_c = sigma - gain @ (w.T @ sigma)
    return float(mu_c @ mu_c + sigma_c.trace())


def asymptote(problem: Problem) -> Asymptote | None:
    """A and B of L ≈ A + B/d for one sequence; None for several, or where w_1 = 0.

    With w_1 = 0 the leading covariance e_1 e_1ᵀ does not touch the constraint, and the expansion
    divides by zero. None, too, where w_1 is so small that no float holds B.
    """
    import numpy as np

    if len(problem.w) != 1 or problem.w[0][0] == 0.0:
        return None
    # The scale of w does not count; with w_1 = 1 no fourth power of it is left.
    w = np.array(problem.w[0], dtype=np.float64) / problem.w[0][0]
    lags = len(w)
    mu0, mu1 = -np.array(problem.h, dtype=np.float64), np.zeros(lags)
    sigma0, sigma1 = np.zeros((lags, lags)), np.zeros((lags, lags))
    sigma0[0, 0] = 1.0
    if lags >= 2:
        mu0[1] += 1.0
        sigma1[1, 1] = 2.0
    if lags >= 3:
        sigma1[0, 2] = sigma1[2, 0] = 3.0
    if lags >= 4:
        mu1[3] = 3.0
    with np.errstate(over="ignore", invalid="ignore"):
        f0 = w @ mu0
        f1 = w @ mu1 - f0 * (w @ sigma1 @ w)
        muc0 = mu0 - f0 * (sigma0 @ w)
        muc1 = mu1 - f0 * (sigma1 @ w) - f1 * (sigma0 @ w)
        cut = w @ sigma0 @ sigma1 @ w + w @ sigma1 @ sigma0 @ w - w @ sigma1 @ w
        a, b = float(muc0 @ muc0), float(2 * muc0 @ muc1 + sigma1.trace() - cut)
    return Asymptote(a, b) if math.isfinite(a + b) else None


def acceptance_rate(problem: Problem, dim: int, eps: float) -> float | None:
    """Predicted share of accepted draws, p ≈ 2√eps φ((w·mu)/s)/s, s² = w·Sigma w; N = 1 only."""
    if len(problem.w) != 1:
        return None
    # Plain arithmetic: the process that plans asks for every cell, and stays free of numpy.
    mu, sigma = _moments(problem, dim)
    w = problem.w[0]
    lags = range(len(w))
    variance = sum(w[m] * sigma[m][n] * w[n] for m in lags for n in lags)
    if not 0.0 < variance < math.inf:
        return None
    spread = math.sqrt(variance)
    z = sum(w[m] * mu[m] for m in lags) / spread
    return min(1.0, 2 * math.sqrt(eps) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / spread)


def _moments(problem: Problem, dim: int) -> tuple[list[float], list[list[float]]]:
    """mu [K] and Sigma [K, K] of S for a_j ~ N(0, 1/d)."""
    h = problem.h
    lags = range(1, len(h) + 1)
    sums = {power: mean_power_sum(power, dim) for power in range(1, 2 * len(h) + 1)}
    mu = [sums[m] - h[m - 1] for m in lags]
    # The entries are independent: Cov(Σ a^m, Σ a^n) = d (E[a^(m+n)] - E[a^m] E[a^n]).
    sigma = [[sums[m + n] - sums[m] * sums[n] / dim for n in lags] for m in lags]
    return mu, sigma
