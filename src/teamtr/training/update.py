"""One agent's update: climb the surrogate, measure the exact KL, back off, accept or restore.

The order of things, numbered as in the code:

1. skip what cannot teach (silent agent, no signal, nothing finite);
2. freeze the old policy and measure the noise floor of scoring;
   3 and 4 once, or twice where the update is cross-fitted (``Lesson.legs``):
3. climb: epochs of minibatches under a KL penalty, the first step scaled to the radius, early stop;
4. gate: accept when the upper bound of the exact KL is within the radius, else move back along the line to the
   old parameters, where KL falls with the square of the step; restore bit for bit when nothing is left. It looks at
   some episodes of every problem first, and at all of them where those do not settle it;
5. steer beta, the step scale and (if asked) the radius for the next update of this agent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from teamtr.ports import Learner
from teamtr.presets import Objective, Radii, Region
from teamtr.randomness import generator, seed_of
from teamtr.theory.certificates import (
    by_own_turn,
    single_step_certificate,
    surrogate_by_problem,
    turn_aware_certificate,
)
from teamtr.theory.control import adapt_beta, adapt_radius, adapt_step_scale
from teamtr.theory.intervals import bootstrap_upper, mean_interval
from teamtr.theory.kl import discounted_kl, per_token
from teamtr.theory.surrogate import gain_by_message, surrogate_gain
from teamtr.theory.zeta import zeta_clip, zeta_norm, zeta_ratio
from teamtr.training.batch import Leg, Lesson, Optimisation
from teamtr.training.gate import Kept, Look, Start, gate
from teamtr.types import AgentBatch, AgentState, Certificate, Divergence, Floats, Outcome, UpdateReport

FILL = 0.8
"""The share of the radius that steps aim for; the rest is room for the upper bound."""

VERIFIABLE_SHARE = 0.1
"""A noise floor above this share of the radius makes an update unverifiable."""

GLANCE = 64
"""Messages that the first step's size and the early stop are measured on: neither decides."""

FLOOR_PERTURBATION = 1e-6
FLOOR_MESSAGES = 16
"""Rounding is alike in all messages of a batch: a few tell."""


@dataclass(frozen=True)
class Stakes:
    """What a certificate must know of the game: how often the agent may speak in an episode, how many turns an
    episode has in all, and the range of returns (None: not known, no certificate; ``ports.Task`` on discounts)."""

    turns: int
    horizon: int
    reward_range: float | None


@dataclass(frozen=True)
class Update:
    """The report of what was kept, and log new(m) - log old(m) of every message of the batch under it; None where
    the gate was content with some of them."""

    report: UpdateReport
    log_ratio_M: Floats | None


def update_agent(
    learner: Learner,
    lesson: Lesson,
    *,
    region: Region,
    objective: Objective,
    radii: Radii,
    optimisation: Optimisation,
    gamma: float,
    a_clip: float,
    eps_norm: float,
    normalise: bool,
    seed: int,
    stakes: Stakes | None = None,
    aside_seed: int | None = None,
) -> Update:
    """Algorithm 1, line 7, with the gate of eq:tr made exact.

    ``aside_seed`` draws the problems set aside for certificates. Agents that are updated one after the other on the
    same problems need the same one: what one has climbed on is no fair judge of a team that it is part of.
    """
    if optimisation.certify_share > 0.0 and lesson.fresh and stakes is not None and stakes.reward_range is not None:
        draw = generator(seed if aside_seed is None else aside_seed, "aside")
        lesson = lesson.set_aside(optimisation.certify_share, draw)
    clock = _Clock()
    spent = dict(learner.tokens)
    radius = learner.state.radius_nats
    version = learner.version()
    base = UpdateReport(
        agent=learner.agent,
        outcome="restored",
        reason="",
        radius=radius,
        unit="token" if radii.per_token else "message",
        beta=learner.state.beta,
        step_scale=learner.state.step_scale,
        messages=len(lesson.batch),
        groups=len(lesson.advantages.informative_P),
        groups_without_signal=int((~lesson.advantages.informative_P & ~lesson.advantages.non_finite_P).sum()),
        groups_non_finite=int(lesson.advantages.non_finite_P.sum()),
        advantage_clip_rate=lesson.advantages.clip_rate,
        zeta_norm=zeta_norm(lesson.returns_PG, a_clip=a_clip, eps_norm=eps_norm, normalise=normalise),
        zeta_clip=zeta_clip(lesson.advantages.raw_PG, lesson.advantages.values_PG),
        groups_aside=0 if lesson.aside_M is None else len(np.unique(lesson.batch.problem_M[lesson.aside_M])),
        version_before=version,
        version_after=version,
    )

    legs = lesson.legs(objective, cross_fit=optimisation.cross_fit, rng=generator(seed, "halves"))

    # 1. skip what cannot teach
    if skip := _cannot_teach(lesson, legs, objective):
        outcome, reason = skip
        return Update(replace(base, outcome=outcome, reason=reason), np.zeros(len(lesson.batch)))

    before = learner.snapshot()
    try:
        # 2. freeze the old policy, measure the floor
        with clock.phase("score"):
            logp_M = learner.begin(lesson.batch, reference=objective.has_reference)
            if not np.isfinite(logp_M).all():
                reason = f"{int((~np.isfinite(logp_M)).sum())} messages have a non-finite log-probability"
                return Update(replace(base, outcome="skipped_non_finite", reason=reason), np.zeros(len(lesson.batch)))
            mismatch = _mismatch(learner, lesson.batch)
            floor = noise_floor(learner, lesson, before, radii, seed=seed)
        start, state, climbs, tries = Start.frozen(before, lesson), learner.state, [], []
        for leg in legs:
            allowed = leg.radius_share * radius
            # 3. climb
            with clock.phase("train"):
                climb = _climb(learner, lesson, leg, before, region, objective, radii, optimisation, allowed, seed)
            # 4. gate
            with clock.phase("gate"):
                moved = learner.version() != version
                tried = gate(
                    learner, lesson, start, leg.judge_M, region, radii, optimisation, allowed, seed, moved=moved
                )
                if tried.accepted and leg is not legs[-1]:
                    start, version = _standing(learner, lesson), learner.version()
            # 5. steer
            state = learner.state = _steer(state, climb, tried, region, allowed)
            climbs.append(climb)
            tries.append(tried)
        kept = _whole(tries)
        learner.state = _settle(state, kept, radii, radius)
        report = replace(
            base,
            noise_floor=floor,
            **mismatch,
            ratio_clip_rate=float(np.mean([climb.clip_rate for climb in climbs])),
            zeta_ratio=zeta_ratio(
                lesson.advantages_M[kept.look.rows],
                kept.divergence.log_ratio_M,
                clip_low=objective.clip_low,
                clip_high=objective.clip_high,
            ),
            steps=sum(climb.steps for climb in climbs),
            backtracks=kept.backtracks,
            fraction=kept.fraction,
            kl_rejected=_rejected(tries, radius),
            version_after=learner.version(),
            **_outcome(kept, climbs, floor, radius, region),
            **_distances(kept, lesson, gamma),
        )
        if kept.accepted and stakes is not None and lesson.fresh:
            with clock.phase("gate"):
                settings = {"gamma": gamma, "a_clip": a_clip, "zeta": report.zeta, "seed": seed}
                worth = _worth(learner, kept, lesson, stakes, confidence=optimisation.confidence, **settings)
            report = replace(report, certificates=worth)
        tokens = {k: learner.tokens[k] - spent.get(k, 0) for k in learner.tokens}
        report = replace(report, tokens=tokens, seconds=clock.seconds)
        everything = len(kept.look.rows) == len(lesson.batch)
        return Update(report, kept.divergence.log_ratio_M if everything else None)
    except BaseException:
        learner.restore(before)
        raise
    finally:
        learner.end()


# -- 1 -------------------------------------------------------------------------------------------------------


def _cannot_teach(lesson: Lesson, legs: Sequence[Leg], objective: Objective) -> tuple[Outcome, str] | None:
    advantages = lesson.advantages
    if len(lesson.batch) == 0:
        return "skipped_silent", "the agent never spoke in this batch"
    if advantages.non_finite_P.all():
        return "skipped_non_finite", "every group holds a reward that is not finite"
    if not np.isfinite(lesson.advantages_M).all():
        return "skipped_non_finite", "an episode weight is not finite"
    if not lesson.climbed_M(objective).any():
        aside = "" if lesson.aside_M is None else ", or was set aside"
        cut = ", or only messages of it that were cut" if lesson.filter_cut and lesson.batch.cut_M.any() else ""
        return "skipped_no_signal", f"every group it spoke in had equal rewards{aside}{cut}"
    if not legs:
        return "skipped_no_signal", "the agent spoke in one problem only: no other can judge what it learns from it"
    return None


# -- 2 -------------------------------------------------------------------------------------------------------


def noise_floor(learner: Learner, lesson: Lesson, before: Any, radii: Radii, *, seed: int) -> float:
    """KL, in the unit of the radius, that rounding alone shows, after a negligible perturbation of the weights.

    Re-batching the same weights shows nothing; a perturbation does (docs/performance.md, "Precision"). Leaves the
    weights as they were, bit for bit.
    """
    rows = _glance(np.arange(len(lesson.batch)), generator(seed, "floor"), FLOOR_MESSAGES)
    learner.perturb(FLOOR_PERTURBATION, seed_of(seed, "perturb"))
    floor = float(lesson.charged_M(learner.measure(rows).full_M, radii, rows).mean())
    learner.restore(before)
    return floor


def _glance(rows: np.ndarray, rng: np.random.Generator, count: int = GLANCE) -> np.ndarray:
    return np.sort(rng.permutation(rows)[:count])


def _mismatch(learner: Learner, batch: AgentBatch) -> dict[str, Any]:
    """How far sampler and learner log-probabilities are apart: a diagnostic, never a step."""
    gaps = [a - b for a, b in zip(learner.token_logprobs(), batch.sampler_logprobs, strict=True)]
    tokens_N = np.abs(np.concatenate(gaps))
    return {
        "mismatch_sampler": float(tokens_N.mean()),
        "mismatch_median": float(np.median(tokens_N)),
        "mismatch_largest": float(tokens_N.max()),
        "mismatch_per_message": float(np.median([abs(gap.sum()) for gap in gaps])),
    }


# -- 3 -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Climb:
    steps: int
    step_scale: float
    clip_rate: float
    broken: int  # steps thrown away because something was not finite


def _climb(
    learner: Learner,
    lesson: Lesson,
    leg: Leg,
    before: Any,
    region: Region,
    objective: Objective,
    radii: Radii,
    optimisation: Optimisation,
    radius: float,
    seed: int,
) -> _Climb:
    """Epochs of minibatches over the leg's messages."""
    advantages_M = lesson.advantages_M
    useful = np.flatnonzero(leg.train_M)
    total = optimisation.epochs * min(optimisation.minibatches, len(useful))
    scale, steps, broken, clip_rates = learner.state.step_scale, 0, 0, [0.0]
    for epoch in range(optimisation.epochs):
        shuffled = generator(seed, "epoch", epoch).permutation(useful)
        for rows in np.array_split(shuffled, min(optimisation.minibatches, len(useful))):
            rows = np.sort(rows)
            stats = learner.step(
                rows,
                advantages_M[rows],
                objective,
                beta=learner.state.beta,
                learning_rate=optimisation.learning_rate * scale,
            )
            broken += not stats.applied
            clip_rates.append(stats.ratio_clip_rate)
            steps += 1
            if steps == 1 and region.gate and leg.opens:
                some = _glance(rows, generator(seed, "first step"))
                scale *= _fit_first_step(learner, lesson, before, radii, some, limit=radius / total)
        if region.gate and epoch + 1 < optimisation.epochs:
            some = _glance(useful, generator(seed, "early stop", epoch))
            kl_M = lesson.charged_M(learner.measure(some).full_M, radii, some)
            if not lesson.mean(kl_M, some) <= radius:
                break  # already outside: more steps only lengthen the way back
    return _Climb(steps, scale, float(np.mean(clip_rates[1:])), broken)


def _fit_first_step(
    learner: Learner, lesson: Lesson, before: Any, radii: Radii, rows: np.ndarray, *, limit: float
) -> float:
    """Shorten the first step when it used more than its share of the radius; returns the factor applied.

    Adam's first step is a sign step whose length knows nothing of the radius; KL grows with its square.
    """
    kl = lesson.mean(lesson.charged_M(learner.measure(rows).full_M, radii, rows), rows)
    if not np.isfinite(kl):
        learner.move(before, before, 0.0)
        return 0.1
    if kl <= limit:
        return 1.0
    fraction = float(np.sqrt(limit / kl))
    learner.move(before, learner.snapshot(), fraction)
    return fraction


# -- 4 and 5 -------------------------------------------------------------------------------------------------


def _standing(learner: Learner, lesson: Lesson) -> Start:
    """Where the next leg begins: at what the last one left."""
    return Start(learner.snapshot(), gain_by_message(learner.measure().log_ratio_M, lesson.advantages_M))


def _whole(tries: Sequence[Kept]) -> Kept:
    """What came of all legs: the last that was kept says where the policy stands, and each what it gained."""
    last = next((tried for tried in reversed(tries) if tried.accepted), tries[-1])
    return replace(
        last,
        gain=sum(tried.gain for tried in tries),
        fraction=float(np.mean([tried.fraction for tried in tries])),
        backtracks=sum(tried.backtracks for tried in tries),
    )


def _rejected(tries: Sequence[Kept], radius: float) -> float | None:
    """The bound of the first candidate that was outside the update's radius and did not stay."""
    refused = (tried.reached for tried in tries if tried.backtracks or not tried.accepted)
    return next((upper for upper in refused if not upper <= radius), None)


def _steer(state: AgentState, climb: _Climb, kept: Kept, region: Region, radius: float) -> AgentState:
    """Beta and step scale for this agent's next leg or update."""
    finite = np.isfinite(kept.reached)
    scale = adapt_step_scale(climb.step_scale, kept.reached, FILL * radius)
    beta = adapt_beta(state.beta, kept.reached, radius) if region.adapt_beta and finite else state.beta
    return replace(state, beta=beta, step_scale=scale if region.gate else state.step_scale)


def _settle(state: AgentState, kept: Kept, radii: Radii, radius: float) -> AgentState:
    """The end of an update: it counts, and the next one's radius follows the KL that this one used."""
    if radii.adapt and kept.accepted:
        radius = adapt_radius(radius, kept.used, radii.nats)
    return replace(state, radius_nats=radius, updates=state.updates + 1)


def _outcome(kept: Kept, climbs: Sequence[_Climb], floor: float, radius: float, region: Region) -> dict[str, Any]:
    thrown = sum(climb.broken for climb in climbs)
    broken = f"; {thrown} non-finite steps thrown away" if thrown else ""
    if not kept.accepted:
        return {"outcome": "restored", "reason": kept.reason + broken}
    if region.gate and not floor <= VERIFIABLE_SHARE * radius:
        reason = f"the noise floor {floor:.2g} is above a tenth of the radius {radius:.2g}"
        return {"outcome": "accepted_unverifiable", "reason": reason + broken}
    return {"outcome": "accepted", "reason": broken.lstrip("; ")}


def _distances(kept: Kept, lesson: Lesson, gamma: float) -> dict[str, Any]:
    d, rows, batch, episodes = kept.divergence, kept.look.rows, lesson.batch, lesson.returns_PG.size
    weights_M = np.ones(len(rows)) if lesson.weights_M is None else lesson.weights_M[rows]
    discounted = discounted_kl(weights_M * d.full_M, batch.turn_M[rows], batch.episode_M[rows], gamma, episodes)
    return {
        "messages_measured": len(rows),
        "kl_full": lesson.mean(d.full_M, rows),
        "kl_upper": kept.upper,
        "kl_k1": lesson.mean(d.k1_M, rows),
        "kl_k3": lesson.mean(d.k3_M, rows),
        "kl_discounted": discounted * episodes / kept.look.episodes,
        "kl_per_token": per_token(d.full_M, batch.lengths_M[rows], weights_M),
        "kl_reference": None if d.reference_M is None else per_token(d.reference_M, batch.lengths_M[rows], weights_M),
        "surrogate": kept.gain,
    }


# -- what it is worth ----------------------------------------------------------------------------------------


def _worth(learner: Learner, kept: Kept, lesson: Lesson, stakes: Stakes, **settings: Any) -> tuple[Certificate, ...]:
    """Certificates from the problems that were set aside, or else from those that were climbed on."""
    if lesson.aside_M is None:
        return certify(kept.divergence, lesson, stakes, look=kept.look, **settings)
    aside, rows = lesson.aside()
    return certify(learner.measure(rows), aside, stakes, **settings)


def certify(
    divergence: Divergence,
    lesson: Lesson,
    stakes: Stakes,
    *,
    gamma: float,
    a_clip: float,
    zeta: float,
    confidence: float = 0.95,
    seed: int = 0,
    look: Look | None = None,
) -> tuple[Certificate, ...]:
    """Lower bounds on the true gain of a kept step, from episodes of the team before it.

    Ours takes the surrogate less the half-width of its 95 % interval, and KLs scaled to their upper bound. On problems
    that the step was made from both surrogates are optimistic, on small batches badly so: a diagnostic, no guarantee.
    Problems set aside give a fair one. ``divergence`` is of the messages that ``look`` names, or all.

    The paper's bound takes D_tok of eq:kltokdef, (1 - gamma) times the discounted sum of a turn's KLs. Without a
    discount it is taken as an episode of ``stakes.horizon`` turns, see ``single_step_certificate``.
    """
    returns_PG, batch = lesson.returns_PG, lesson.batch
    if stakes.reward_range is None or len(returns_PG) < 2 or not np.isfinite(returns_PG).all():
        return ()
    rows = np.arange(len(batch)) if look is None else look.rows
    episode_M, episodes = batch.episode_M[rows], returns_PG.size
    each_stands_for = 1.0 if look is None else episodes / look.episodes
    upper = bootstrap_upper(
        divergence.full_M, batch.cluster_M[rows], confidence=confidence, rng=generator(seed, "bootstrap")
    )
    mean = float(divergence.full_M.mean())
    caution = upper / mean if mean > 0.0 else 1.0
    kl_M = caution * each_stands_for * divergence.full_M
    kl_by_turn_K = by_own_turn(kl_M, episode_M, episodes, stakes.turns)
    surrogate = mean_interval(each_stands_for * surrogate_by_problem(divergence.log_ratio_M, episode_M, returns_PG))
    ours = turn_aware_certificate(
        surrogate.estimate,
        kl_by_turn_K,
        stakes.reward_range,
        sampling_error=surrogate.estimate - surrogate.lower,
    )
    if gamma < 1.0:
        d_tok = discounted_kl(kl_M, batch.turn_M[rows], episode_M, gamma, episodes)
    else:
        gamma, d_tok = 1.0 - 1.0 / stakes.horizon, float(kl_by_turn_K.sum()) / stakes.horizon
    papers = single_step_certificate(
        surrogate_gain(divergence.log_ratio_M, lesson.advantages_M[rows]) * len(batch) / episodes,
        d_tok,
        zeta,
        gamma,
        min(a_clip, float(np.sqrt(returns_PG.shape[1] - 1))),
    )
    return ours, papers


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
