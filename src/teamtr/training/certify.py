"""Certificates of a kept step: lower bounds on its true gain, from measured divergences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from teamtr.answers import Divergence
from teamtr.randomness import generator
from teamtr.reports import Certificate
from teamtr.theory.certificates import (
    by_own_turn,
    single_step_certificate,
    surrogate_by_problem,
    turn_aware_certificate,
)
from teamtr.theory.gain import surrogate_gain
from teamtr.theory.intervals import bootstrap_upper, mean_interval
from teamtr.theory.kl import discounted_kl
from teamtr.training.batch import TrainingBatch
from teamtr.training.gate import Subsample


@dataclass(frozen=True)
class CertificateInputs:
    """What a certificate requires of the task: how often the agent may speak in an episode, the total turns of an
    episode, and the range of returns (None: unknown, so no certificate; see ``tasks.Task`` on discounts). Returns that
    spread wider than their range have no certificate either."""

    turns: int
    horizon: int
    reward_range: float | None


def certify(
    divergence: Divergence,
    data: TrainingBatch,
    inputs: CertificateInputs,
    *,
    gamma: float,
    a_max: float,
    zeta: float,
    confidence: float = 0.95,
    seed: int = 0,
    subsample: Subsample | None = None,
) -> tuple[Certificate, ...]:
    """Lower bounds on the true gain of a kept step, from episodes of the team before it.

    Ours uses the surrogate minus the half-width of its 95 % interval, and KLs scaled to their upper bound. On problems
    that the step was trained on, both surrogates are optimistic, badly so in small batches: then the bounds are
    diagnostics, not guarantees. Held-out problems do not have this bias. ``divergence`` covers the messages of
    ``subsample``, or all messages.

    The paper's bound uses D_tok of eq:kltokdef, (1 - gamma) times the discounted sum of a turn's KLs. Without a
    discount, gamma is taken from an episode of ``inputs.horizon`` turns; see ``single_step_certificate``. The bound
    needs a largest advantage (``a_max``), which a critic's estimates do not have: with a critic only ours is returned.
    ``a_max`` and ``zeta`` are of advantages of episodes, whose return is discounted to the first turn. The advantage at
    turn t, of which the paper's A_max and zeta speak, is gamma^-t times that: at most gamma^(1 - horizon) times.
    """
    returns_PG, batch, problem_P = data.returns_PG, data.messages, data.clusters_P
    if inputs.reward_range is None or len(np.unique(problem_P)) < 2 or not np.isfinite(returns_PG).all():
        return ()
    if np.ptp(returns_PG) > inputs.reward_range * (1.0 + 1e-9):
        return ()  # the range that the task states is too small: see ``tasks.Task`` on discounts
    rows = np.arange(len(batch)) if subsample is None else subsample.rows
    episode_M, episodes = batch.episode_M[rows], returns_PG.size
    each_stands_for = 1.0 if subsample is None else episodes / subsample.episodes
    upper = bootstrap_upper(
        divergence.full_M, batch.cluster_M[rows], confidence=confidence, rng=generator(seed, "bootstrap")
    )
    mean = float(divergence.full_M.mean())
    caution = upper / mean if mean > 0.0 else 1.0
    kl_M = caution * each_stands_for * divergence.full_M
    kl_by_turn_K = by_own_turn(kl_M, episode_M, episodes, inputs.turns)
    gains_P = each_stands_for * surrogate_by_problem(divergence.log_ratio_M, episode_M, returns_PG)
    surrogate = mean_interval(gains_P, problem_P=problem_P)
    ours = turn_aware_certificate(
        surrogate.estimate,
        kl_by_turn_K,
        inputs.reward_range,
        sampling_error=surrogate.estimate - surrogate.lower,
    )
    with np.errstate(over="ignore"):
        at_last_turn = float(np.power(gamma, 1.0 - inputs.horizon))
    if not math.isfinite(a_max * at_last_turn):
        return (ours,)
    if gamma < 1.0:
        d_tok = discounted_kl(kl_M, batch.turn_M[rows], episode_M, gamma, episodes)
    else:
        gamma, d_tok = 1.0 - 1.0 / inputs.horizon, float(kl_by_turn_K.sum()) / inputs.horizon
    papers = single_step_certificate(
        surrogate_gain(divergence.log_ratio_M, data.advantages_M[rows]) * len(batch) / episodes,
        d_tok,
        zeta * at_last_turn,
        gamma,
        a_max * at_last_turn,
    )
    return ours, papers
