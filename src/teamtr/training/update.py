"""One agent's update: maximize the surrogate, measure the exact KL, backtrack, accept or restore.

The steps, numbered as in the code:

1. skip a batch without a learning signal (silent agent, equal rewards, nothing finite);
2. freeze the old policy, measure the noise floor of scoring (``scoring``) and compute the critic's values (in plans
   with one); the following steps run once, or twice if the update is cross-fitted (``TrainingBatch.folds``):
3. optimize: epochs of minibatches under a KL penalty, the first step scaled to the radius, early stopping;
4. gate: accept if the upper bound of the exact KL is within the radius, else move back along the line to the old
   parameters, where the KL falls with the square of the step; restore bit for bit if no candidate passes. It checks
   some episodes of every problem first, and all of them if those do not settle it;
5. adapt beta, the step scale and (in plans that do so, after the last fold) the radius for this agent's next update.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from teamtr.answers import ValueStats
from teamtr.batches import AgentBatch, Verified
from teamtr.ports import Learner, Snapshot
from teamtr.presets import Plan, Radii, Region
from teamtr.progress import working
from teamtr.randomness import generator
from teamtr.reports import Certificate, CriticReport, Outcome, UpdateReport
from teamtr.theory.control import adapt_beta, adapt_radius, adapt_step_scale
from teamtr.theory.gain import gain_by_message
from teamtr.theory.kl import discounted_kl, per_token
from teamtr.theory.objective import Objective
from teamtr.theory.zeta import zeta_clip, zeta_ratio
from teamtr.training.batch import Fold, Optimization, TrainingBatch
from teamtr.training.certify import CertificateInputs, certify
from teamtr.training.gate import GateResult, Start, gate
from teamtr.training.scoring import VERIFIABLE_SHARE, mismatch, score_old
from teamtr.types import AgentState, Floats

FILL = 0.8
"""The share of the radius that steps aim for; the rest is a margin for the upper bound."""

KL_SUBSAMPLE = 64
"""Most messages on which the first step and early stopping are measured; neither decides on acceptance."""
KL_SUBSAMPLE_TOKENS = 4096
"""Most tokens that these messages have together. The KL of a long message is a sum over many tokens, so that KLs of
messages of about one length differ little, and few of them suffice. Where lengths differ much, this is a rough
estimate."""
KL_SUBSAMPLE_LEAST = 8
"""So many messages are measured however long they are."""


@dataclass(frozen=True)
class Update:
    """One update: the report on the policy that was kept, and the state that the agent's next update begins with.

    ``log_ratio_M`` is log new(m) - log old(m) of every message of the batch; None if the gate decided on a subsample.
    ``verified`` says how much of each message may be kept, if the plan redraws partially and the update was accepted.
    """

    report: UpdateReport
    state: AgentState
    log_ratio_M: Floats | None
    verified: Verified | None = None


def update_agent(
    learner: Learner,
    data: TrainingBatch,
    plan: Plan,
    optimization: Optimization,
    state: AgentState,
    *,
    seed: int,
    certificate_inputs: CertificateInputs | None = None,
    holdout_seed: int | None = None,
) -> Update:
    """Algorithm 1, line 7, with the gate of eq:tr made exact.

    ``holdout_seed`` draws the problems held out for certificates. Agents that are updated in turn on the same problems
    need the same seed: problems that one agent was trained on are not a fair test of a team that includes it.
    """
    known_range = certificate_inputs is not None and certificate_inputs.reward_range is not None
    if optimization.certify_share > 0.0 and data.fresh and known_range:
        data = data.hold_out(
            optimization.certify_share, generator(seed if holdout_seed is None else holdout_seed, "aside")
        )
        if data.holdout_P is None:  # too few problems: what was asked for are certificates that hold
            certificate_inputs = None
    clock = _Clock(data.messages.agent)
    spent = dict(learner.tokens)
    radius, version = state.radius_nats, learner.version()
    base = _before(learner.agent, data, plan, state, version)
    folds = data.folds(plan.objective, cross_fit=optimization.cross_fit, rng=generator(seed, "halves"))

    # 1. skip a batch without a learning signal
    if skip := _cannot_teach(data, folds, plan.objective):
        outcome, reason = skip
        return Update(replace(base, outcome=outcome, reason=reason), state, np.zeros(len(data.messages)))

    before = learner.snapshot()
    try:
        # 2. freeze the old policy, measure the floor
        with clock.phase("score"):
            scores = score_old(
                learner,
                data,
                before,
                plan.radii,
                radius,
                reference=plan.objective.has_reference,
                from_sampler=optimization.score == "sampler",
                seed=seed,
            )
            if not scores.finite:
                reason = f"{int((~np.isfinite(scores.logp_M)).sum())} messages have a non-finite log-probability"
                refused = replace(base, outcome="skipped_non_finite", reason=reason)
                return Update(refused, state, np.zeros(len(data.messages)))
            if plan.critic is not None:
                data = data.with_values(learner.values(), plan.critic, plan.gamma)
                base = replace(base, **_clipped(data))
            distances = mismatch(learner, data)
        start, parts, tries = Start.frozen(before, data), [], []
        for fold in folds:
            allowed = fold.radius_share * radius
            # 3. optimize
            with clock.phase("train"):
                part = _optimize(learner, data, fold, before, plan, optimization, state, allowed, seed)
            # 4. gate
            with clock.phase("gate"):
                moved = learner.version() != version
                tried = gate(learner, data, start, fold.judge_M, plan, optimization, allowed, seed, moved=moved)
                if tried.accepted and fold is not folds[-1]:
                    start, version = _standing(learner, data), learner.version()
            # 5. steer
            state = _steer(state, part, tried, plan.region, allowed)
            parts.append(part)
            tries.append(tried)
        kept = _whole(tries)
        report = replace(
            base,
            noise_floor=scores.noise_floor,
            mismatch_kl=scores.mismatch_kl,
            sampler_scored=scores.sampler_scored,
            own_scores=scores.own_scores,
            **distances,
            ratio_clip_rate=float(np.mean([part.clip_rate for part in parts])),
            zeta_ratio=zeta_ratio(
                data.advantages_M[kept.subsample.rows],
                kept.divergence.log_ratio_M,
                clip_low=plan.objective.clip_low,
                clip_high=plan.objective.clip_high,
            ),
            steps=sum(part.steps for part in parts),
            backtracks=kept.backtracks,
            fraction=kept.fraction,
            kl_rejected=_rejected(tries, radius),
            version_after=learner.version(),
            critic=_critic_report(data, parts),
            **_outcome(kept, parts, scores.noise_floor, radius, plan.region),
            **_distances(kept, data, plan.gamma),
        )
        if kept.accepted and certificate_inputs is not None and data.fresh:
            with clock.phase("gate"):
                certificates = _certificates(learner, kept, data, certificate_inputs, plan, optimization, report, seed)
            report = replace(report, certificates=certificates)
        tokens = {k: learner.tokens[k] - spent.get(k, 0) for k in learner.tokens}
        report = replace(report, tokens=tokens, seconds=clock.seconds)
        everything = len(kept.subsample.rows) == len(data.messages)
        log_ratio_M = kept.divergence.log_ratio_M if everything else None
        verified = None
        if plan.resample.partial and kept.accepted:
            with clock.phase("gate"):
                verified = _verify(learner, data.messages, seed)
        return Update(report, _settle(state, kept, plan.radii, radius), log_ratio_M, verified)
    except BaseException:
        learner.restore(before)
        raise
    finally:
        learner.end()


def _before(agent: str, data: TrainingBatch, plan: Plan, state: AgentState, version: str) -> UpdateReport:
    """The report of an update as far as it is known before the update is tried."""
    advantages = data.advantages
    return UpdateReport(
        agent=agent,
        outcome="restored",
        reason="",
        radius=state.radius_nats,
        unit="token" if plan.radii.per_token else "message",
        beta=state.beta,
        step_scale=state.step_scale,
        messages=len(data.messages),
        groups=len(advantages.informative_P),
        groups_without_signal=int((~advantages.informative_P & ~advantages.non_finite_P).sum()),
        groups_non_finite=int(advantages.non_finite_P.sum()),
        advantage_clip_rate=advantages.clip_rate,
        zeta_norm=plan.advantage.error(data.returns_PG),
        zeta_clip=zeta_clip(advantages.raw_PG, advantages.values_PG),
        groups_aside=0 if data.holdout_P is None else int(data.holdout_P.sum()),
        version_before=version,
        version_after=version,
    )


# -- 1 -------------------------------------------------------------------------------------------------------


def _cannot_teach(data: TrainingBatch, folds: Sequence[Fold], objective: Objective) -> tuple[Outcome, str] | None:
    advantages = data.advantages
    if len(data.messages) == 0:
        return "skipped_silent", "the agent never spoke in this batch"
    if advantages.non_finite_P.all():
        return "skipped_non_finite", "every group holds a reward that is not finite"
    if not np.isfinite(data.advantages_M).all():
        return "skipped_non_finite", "an episode weight is not finite"
    if not data.gradient_M(objective).any():
        aside = "" if data.holdout_P is None else ", or was set aside"
        cut = ", or only messages of it that were cut" if data.filter_cut and data.messages.cut_M.any() else ""
        return "skipped_no_signal", f"every group it spoke in had equal rewards{aside}{cut}"
    if not folds:
        return "skipped_no_signal", "the agent spoke in one problem only: no other can judge what it learns from it"
    return None


def _subsample(rows: np.ndarray, lengths_M: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Messages whose KL stands for that of all ``rows``."""
    some = rng.permutation(rows)[:KL_SUBSAMPLE]
    return np.sort(some[: max(KL_SUBSAMPLE_LEAST, int((lengths_M[some].cumsum() <= KL_SUBSAMPLE_TOKENS).sum()))])


def messages_measured(tokens: float) -> int:
    """How many messages of this length are measured after a first step, if there are as many."""
    return min(KL_SUBSAMPLE, max(KL_SUBSAMPLE_LEAST, int(KL_SUBSAMPLE_TOKENS / tokens)))


# -- 3 -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Optimized:
    steps: int
    step_scale: float
    clip_rate: float
    broken: int  # steps discarded because of a non-finite loss or gradient
    values: tuple[ValueStats, ...] = ()  # of the critic's steps


def _optimize(
    learner: Learner,
    data: TrainingBatch,
    fold: Fold,
    before: Snapshot,
    plan: Plan,
    optimization: Optimization,
    state: AgentState,
    radius: float,
    seed: int,
) -> _Optimized:
    """Epochs of minibatches over the fold's messages."""
    useful, fits = np.flatnonzero(fold.train_M), []
    total = optimization.epochs * min(optimization.minibatches, len(useful))
    scale, steps, broken, clip_rates = state.step_scale, 0, 0, [0.0]
    with working("steps", total, "steps") as work:
        for epoch in range(optimization.epochs):
            shuffled = generator(seed, "epoch", epoch).permutation(useful)
            for rows in np.array_split(shuffled, min(optimization.minibatches, len(useful))):
                rows = np.sort(rows)
                stats = learner.step(
                    rows,
                    data.step_advantages(rows),
                    plan.objective,
                    beta=state.beta,
                    learning_rate=optimization.learning_rate * scale,
                )
                if plan.critic is not None and data.tokens is not None:
                    rate, clip = optimization.value_learning_rate, plan.critic.value_clip
                    targets = [data.tokens.targets[m] for m in rows]
                    fits.append(learner.fit_values(rows, targets, clip=clip, learning_rate=rate))
                broken += not stats.applied
                clip_rates.append(stats.ratio_clip_rate)
                steps += 1
                work.advance()
                if steps == 1 and plan.region.gate and fold.opens:
                    some = _subsample(rows, data.messages.lengths_M, generator(seed, "first step"))
                    scale *= _fit_first_step(learner, data, before, plan.radii, some, limit=radius / total)
            if plan.region.gate and epoch + 1 < optimization.epochs:
                some = _subsample(useful, data.messages.lengths_M, generator(seed, "early stop", epoch))
                kl_M = data.kl_in_radius_units(learner.measure(some).full_M, plan.radii, some)
                if not data.mean(kl_M, some) <= radius:
                    break  # already outside the radius: more steps would only need more backtracking
    return _Optimized(steps, scale, float(np.mean(clip_rates[1:])), broken, tuple(fits))


def _clipped(data: TrainingBatch) -> dict[str, Any]:
    """What clipping does to the advantages of a critic, which are known only once its values are."""
    if data.tokens is None:
        return {}
    return {"advantage_clip_rate": data.tokens.clip_rate, "zeta_clip": data.tokens.clip_error}


def _critic_report(data: TrainingBatch, parts: Sequence[_Optimized]) -> CriticReport | None:
    """The critic's accuracy on the returns before it was trained on them, and the figures of its training steps."""
    if data.tokens is None:
        return None
    rows, fits = np.flatnonzero(data.train_M & data.finite_M), [fit for part in parts for fit in part.values]
    return CriticReport(
        explained_variance=data.tokens.explained_variance(rows),
        value_error=data.tokens.value_error(rows),
        loss=float(np.mean([fit.loss for fit in fits])),
        clip_rate=float(np.mean([fit.clip_rate for fit in fits])),
        thrown_away=sum(not fit.applied for fit in fits),
    )


def _fit_first_step(
    learner: Learner, data: TrainingBatch, before: Snapshot, radii: Radii, rows: np.ndarray, *, limit: float
) -> float:
    """Shorten the first step if it used more than its share of the radius; returns the factor applied.

    Adam's first step is a sign step whose length does not depend on the radius; the KL grows with its square.
    """
    kl = data.mean(data.kl_in_radius_units(learner.measure(rows).full_M, radii, rows), rows)
    if not np.isfinite(kl):
        learner.move(before, before, 0.0)
        return 0.1
    if kl <= limit:
        return 1.0
    fraction = float(np.sqrt(limit / kl))
    learner.move(before, learner.snapshot(), fraction)
    return fraction


# -- 4 and 5 -------------------------------------------------------------------------------------------------


def _standing(learner: Learner, data: TrainingBatch) -> Start:
    """The start of the next fold: the learner's current parameters and gain."""
    return Start(learner.snapshot(), gain_by_message(learner.measure().log_ratio_M, data.advantages_M))


def _whole(tries: Sequence[GateResult]) -> GateResult:
    """The result over all folds: that of the last accepted one, with gains and backtracks summed over folds."""
    last = next((tried for tried in reversed(tries) if tried.accepted), tries[-1])
    return replace(
        last,
        gain=sum(tried.gain for tried in tries),
        fraction=float(np.mean([tried.fraction for tried in tries])),
        backtracks=sum(tried.backtracks for tried in tries),
    )


def _rejected(tries: Sequence[GateResult], radius: float) -> float | None:
    """The upper KL bound of the first candidate that was outside the update's radius and was not kept."""
    refused = (tried.reached for tried in tries if tried.backtracks or not tried.accepted)
    return next((upper for upper in refused if not upper <= radius), None)


def _steer(state: AgentState, part: _Optimized, kept: GateResult, region: Region, radius: float) -> AgentState:
    """Adapts beta and the step scale for this agent's next fold or update."""
    finite = np.isfinite(kept.reached)
    scale = adapt_step_scale(part.step_scale, kept.reached, FILL * radius)
    beta = adapt_beta(state.beta, kept.reached, radius) if region.adapt_beta and finite else state.beta
    return replace(state, beta=beta, step_scale=scale if region.gate else state.step_scale)


def _settle(state: AgentState, kept: GateResult, radii: Radii, radius: float) -> AgentState:
    """Ends an update: counts it and, if the plan adapts radii, sets the next radius from the KL that was used."""
    if radii.adapt and kept.accepted:
        radius = adapt_radius(radius, kept.used, radii.nats)
    return replace(state, radius_nats=radius, updates=state.updates + 1)


def _outcome(
    kept: GateResult, parts: Sequence[_Optimized], floor: float, radius: float, region: Region
) -> dict[str, Any]:
    thrown = sum(part.broken for part in parts)
    broken = f"; {thrown} non-finite steps thrown away" if thrown else ""
    if not kept.accepted:
        return {"outcome": "restored", "reason": kept.reason + broken}
    if region.gate and not floor <= VERIFIABLE_SHARE * radius:
        reason = f"the noise floor {floor:.2g} is above a tenth of the radius {radius:.2g}"
        return {"outcome": "accepted_unverifiable", "reason": reason + broken}
    return {"outcome": "accepted", "reason": broken.lstrip("; ")}


def _distances(kept: GateResult, data: TrainingBatch, gamma: float) -> dict[str, Any]:
    d, rows, batch, episodes = kept.divergence, kept.subsample.rows, data.messages, data.returns_PG.size
    weights_M = np.ones(len(rows)) if data.contexts_M is None else data.contexts_M[rows]
    discounted = discounted_kl(weights_M * d.full_M, batch.turn_M[rows], batch.episode_M[rows], gamma, episodes)
    return {
        "messages_measured": len(rows),
        "kl_full": data.mean(d.full_M, rows),
        "kl_upper": kept.upper,
        "kl_k1": data.mean(d.k1_M, rows),
        "kl_k3": data.mean(d.k3_M, rows),
        "kl_discounted": discounted * episodes / kept.subsample.episodes,
        "kl_per_token": per_token(d.full_M, batch.lengths_M[rows], weights_M),
        "kl_reference": None if d.reference_M is None else per_token(d.reference_M, batch.lengths_M[rows], weights_M),
        "surrogate": kept.gain,
    }


def _verify(learner: Learner, batch: AgentBatch, seed: int) -> Verified:
    rng = generator(seed, "verify")
    return learner.verify(rng.random(int(batch.lengths_M.sum())), rng.random(len(batch)))


# -- certificates --------------------------------------------------------------------------------------------


def _certificates(
    learner: Learner,
    kept: GateResult,
    data: TrainingBatch,
    inputs: CertificateInputs,
    plan: Plan,
    optimization: Optimization,
    report: UpdateReport,
    seed: int,
) -> tuple[Certificate, ...]:
    """Certificates from the held-out problems if there are any, otherwise from the problems trained on. None if the
    agent is silent in all held-out problems, or if the range of returns is not known."""
    if inputs.reward_range is None:
        return ()
    settings: dict[str, Any] = {
        "gamma": plan.gamma,
        "a_max": plan.advantage.largest(data.returns_PG.shape[1], inputs.reward_range),
        "zeta": report.zeta,
        "confidence": optimization.confidence,
        "seed": seed,
    }
    if data.holdout_P is None:
        return certify(kept.divergence, data, inputs, subsample=kept.subsample, **settings)
    holdout, rows = data.holdout()
    return certify(learner.measure(rows), holdout, inputs, **settings) if len(rows) else ()


_PHASES = {"score": "scoring", "train": "training", "gate": "gate of"}


@dataclass
class _Clock:
    agent: str
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with working(f"{_PHASES[name]} {self.agent}"):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
