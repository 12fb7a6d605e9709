"""How staleness grows with the number of agents: the growth of the bounds next to exact measurements.

rem:quad2lin bounds what a stage loses by stale evaluation by O(n^2 sqrt(delta)) and by fresh evaluation by
O(n sqrt(delta)), and tab:scaling fits exponents to measurements. The growth of a bound says nothing about the growth of
the bounded quantity. Here small teams of several task families take exact natural-gradient steps that fill their
radius. For every step the following are computed from the whole tree of histories:

    gap        |L_i^seq - L_i^stale|: the stale surrogate of eq:surrogate_stale (old states, new advantages)
    gap_naive  |L_i^seq - L_i^naive|: what naive sequential training really optimizes (old states *and* old advantages)
    error      |gain - L_i^seq|: what the fresh surrogate misses of the step's true gain
    drift      TV(d of the intermediate team, d of the stage-start team), turns weighted equally (D_occ of tab:scaling)

each summed over the steps of a stage and averaged over stages and teams.

The bounds' own exponents are 2 and 1 at a fixed discount. They are fitted on the same n as the measurements, because
n (n - 1) / 2 is no power law: over n = 2..8 its fitted exponent is 2.39, over n = 4..8 it is 2.22. A verdict is based
on the larger n (``tail``): at n = 2 there is one pair of agents, and symmetric games may start where it is not coupled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from teamtr.randomness import generator
from teamtr.theory.certificates import step_penalty, turn_aware_penalties
from teamtr.theory.occupancy import stale_gap, tv_by_kl
from teamtr.theory.power_law import PowerLaw, fit_power_law, slope
from teamtr.theory.tabular import EpisodicStep, EpisodicTeam, Ints, MessageSpace, tv, update_episodic
from teamtr.types import Floats

BIT = MessageSpace(2, 1)
ZERO = 1e-12
"""A measured sum below this is rounding."""

Rule = Literal["fresh", "stale"]
SpeakingOrder = Literal["forward", "reverse"]


# -- task families -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A kind of team for every number of agents. ``build(rng, size, n)`` draws ``size`` teams."""

    name: str
    says: str
    n: tuple[int, ...]
    build: Callable[[np.random.Generator, int, int], EpisodicTeam]


def bits(count: int) -> Ints:
    """All words of ``count`` bits, in order: history h is row h."""
    return (np.arange(2**count)[:, None] >> np.arange(count - 1, -1, -1)) & 1


def build_team(
    rng: np.random.Generator,
    size: int,
    *,
    speakers: Sequence[int],
    seen: Sequence[Ints],
    problems: int,
    reward: Floats,
    spread: float,
) -> EpisodicTeam:
    """Teams that say one bit per turn. ``seen[t][h]`` identifies what the speaker of turn t sees of history h: it
    cannot distinguish histories with equal numbers."""
    rows, used = [], 0
    for seen_N in seen:
        _, kind_N = np.unique(seen_N, return_inverse=True)
        rows.append(used + kind_N.astype(np.int64))
        used += int(kind_N.max()) + 1
    return EpisodicTeam(
        space=BIT,
        logits_BnRKV=spread * rng.standard_normal((size, 1 + max(speakers), used, 1, 2)),
        rows=tuple(rows),
        active=tuple(np.full((size, len(rows_N)), who) for rows_N, who in zip(rows, speakers, strict=True)),
        start_BX=np.full((size, problems), 1.0 / problems),
        reward_BN=np.broadcast_to(reward, (size, reward.shape[-1])),
    )


def _one_turn_each(
    rng: np.random.Generator, size: int, n: int, reward: Floats, *, blind: bool, spread: float
) -> EpisodicTeam:
    seen = [np.zeros(2**t, dtype=np.int64) if blind else np.arange(2**t) for t in range(n)]
    return build_team(rng, size, speakers=range(n), seen=seen, problems=1, reward=reward, spread=spread)


def _exactly_one(n: int) -> Floats:
    return np.asarray((bits(n).sum(axis=1) == 1).astype(np.float64))


def blind_roles(rng: np.random.Generator, size: int, n: int) -> EpisodicTeam:
    return _one_turn_each(rng, size, n, _exactly_one(n), blind=True, spread=0.2)


def visible_roles(rng: np.random.Generator, size: int, n: int) -> EpisodicTeam:
    return _one_turn_each(rng, size, n, _exactly_one(n), blind=False, spread=0.2)


def visible_chain(rng: np.random.Generator, size: int, n: int) -> EpisodicTeam:
    said = bits(n)
    reward = np.asarray((said[:, 1:] == said[:, :-1]).mean(axis=1))
    return _one_turn_each(rng, size, n, reward, blind=False, spread=0.5)


def blind_agreement(rng: np.random.Generator, size: int, n: int) -> EpisodicTeam:
    reward = np.isin(bits(n).sum(axis=1), (0, n)).astype(np.float64)
    return _one_turn_each(rng, size, n, reward, blind=True, spread=0.2)


def random_team(rng: np.random.Generator, size: int, n: int) -> EpisodicTeam:
    return _one_turn_each(rng, size, n, rng.random((size, 2**n)), blind=False, spread=1.0)


def separate_tasks(rng: np.random.Generator, size: int, n: int) -> EpisodicTeam:
    return _one_turn_each(rng, size, n, np.asarray(bits(n).mean(axis=1)), blind=True, spread=0.5)


def two_rounds(rng: np.random.Generator, size: int, n: int) -> EpisodicTeam:
    """Exactly one volunteers in the second round; all agents see the first round."""
    seen = [np.zeros(1, dtype=np.int64)] * n + [np.arange(2**n)] * n
    seen = [np.repeat(what, 2**t // len(what)) if t else what for t, what in enumerate(seen)]
    reward = np.tile(_exactly_one(n), 2**n)
    speakers = [*range(n), *range(n)]
    return build_team(rng, size, speakers=speakers, seen=seen, problems=1, reward=reward, spread=0.2)


def code_exchange(rng: np.random.Generator, size: int, n: int) -> EpisodicTeam:
    """n - 1 agents hold a private bit each and say one; the last agent sees their messages and must say all bits in
    turn."""
    holders = n - 1
    problems = 2**holders
    code = bits(holders)
    seen, turns = [], 2 * holders
    for t in range(turns):
        history = np.arange(problems * 2**t)
        problem, said = history // 2**t, history % 2**t
        seen.append(2 * said + code[problem, t] if t < holders else said)
    last = np.arange(problems * 2**turns)
    answer = bits(holders)[last % 2**holders]
    reward = np.asarray((answer == code[last // 2**turns]).mean(axis=1))
    speakers = [*range(holders), *[holders] * holders]
    return build_team(rng, size, speakers=speakers, seen=seen, problems=problems, reward=reward, spread=0.5)


UP_TO_8, UP_TO_5 = (2, 3, 4, 5, 6, 7, 8), (2, 3, 4, 5)
FAMILIES: tuple[Family, ...] = (
    Family("blind_roles", "exactly one of n says 1; nobody hears anybody", UP_TO_8, blind_roles),
    Family("visible_roles", "exactly one of n says 1; all hear what was said before", UP_TO_8, visible_roles),
    Family("visible_chain", "each should repeat the one before; share of pairs that agree", UP_TO_8, visible_chain),
    Family("blind_agreement", "all say the same; nobody hears anybody", UP_TO_8, blind_agreement),
    Family("random", "a random reward for every history; all is heard", UP_TO_8, random_team),
    Family("separate_tasks", "each is paid for its own message: no coupling", UP_TO_8, separate_tasks),
    Family("two_rounds", "exactly one says 1 in the second round; the first is heard", UP_TO_5, two_rounds),
    Family("code_exchange", "n - 1 hold a bit each; the last repeats what it hears", UP_TO_5, code_exchange),
)


# -- one stage, exactly ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageMeasures:
    """Sums over the steps of one stage, one entry per team, and the bounds on them."""

    after: EpisodicTeam
    measured: dict[str, Floats]
    bounds: dict[str, Floats]


def measure_stage(
    rng: np.random.Generator, start: EpisodicTeam, radius: float, rule: Rule, order: SpeakingOrder = "forward"
) -> StageMeasures:
    """Every agent takes one natural-gradient step that fills ``radius`` (nats per message); computes all sums and
    bounds.

    "fresh": each step is computed on the intermediate team; "stale": all on the stage-start team. "forward" updates
    agents in the order in which they first speak, "reverse" from the last to the first.

    The paper's bounds are in the discounted unit; as it prescribes for H turns, gamma = 1 - 1/H and D_tok = (the sum of
    the episode's KLs) / H. A_max is the exact largest |A| of the team before the step.
    """
    team, size, turns = start, len(start.start_BX), start.horizon
    agents = range(start.agents) if order == "forward" else range(start.agents)[::-1]
    everyone = tuple(range(start.agents))
    gamma = 1.0 - 1.0 / turns
    names = ("gap", "gap_naive", "error", "drift", "lowered")
    measured = {name: np.zeros(size) for name in names}
    bounds = {name: np.zeros(size) for name in ("paper_fresh", "paper_stale_extra", "drift_by_kl", "ours_fresh")}
    deltas: list[Floats] = []
    for agent in agents:
        measured["drift"] += _drift(team, start)
        source = team if rule == "fresh" else start
        table = update_episodic(rng, source, agent, kinds=("natural",), radius_B=np.full(size, radius)).logits_BnRKV
        step = EpisodicStep(team, team.replace_agent(agent, table[:, agent]), (agent,))
        naive = EpisodicStep(start, start.replace_agent(agent, table[:, agent]), (agent,))
        on_old_states = sum(
            np.einsum("bn,bn->b", visits, f) for visits, f in zip(start.visits, step.expected_advantage, strict=False)
        )
        measured["gap"] += np.abs(step.surrogate_B - on_old_states)
        measured["gap_naive"] += np.abs(step.surrogate_B - naive.surrogate_B)
        measured["error"] += np.abs(step.gain_B - step.surrogate_B)
        measured["lowered"] += (step.gain_B < -ZERO) / start.agents
        a_max = np.max([np.abs(a).max(axis=(1, 2)) for a in team.advantages], axis=0)
        delta = step.kl_by_turn_BK.sum(axis=1) / turns
        bounds["paper_fresh"] += step_penalty(delta, gamma, a_max)
        if deltas:
            bounds["paper_stale_extra"] += stale_gap(gamma, np.stack(deltas, axis=-1), a_max)
        so_far = EpisodicStep(start, team, everyone)
        bounds["drift_by_kl"] += tv_by_kl(so_far.kl_by_turn_BK.sum(axis=1))
        own = turn_aware_penalties(step.kl_by_turn_BK, team.reward_range_B, turns=step.turns_B)
        bounds["ours_fresh"] += own.sum(axis=-1)
        deltas.append(delta)
        team = step.new
    whole = EpisodicStep(start, team, everyone)
    every = turn_aware_penalties(whole.kl_by_turn_BK, start.reward_range_B, turns=whole.turns_B)
    bounds["ours_stale"] = every.sum(axis=-1)
    measured["gain"] = whole.gain_B
    measured["joint_error"] = np.abs(whole.gain_B - whole.surrogate_B)
    return StageMeasures(team, measured, bounds)


def _drift(team: EpisodicTeam, start: EpisodicTeam) -> Floats:
    """TV of the two occupancies: histories of different turns are different states, and each turn has 1/H of the
    mass."""
    return np.asarray(np.mean([tv(a, b) for a, b in zip(team.visits[:-1], start.visits[:-1], strict=True)], axis=0))


# -- the lab -------------------------------------------------------------------------------------------------------

CLAIMS = {"gap": "stale", "gap_naive": "stale", "drift": "stale", "error": "fresh"}
"""The claimed growth that each measured sum is compared with: n^2 for stale evaluation, n for fresh."""

UNFITTED = ("lowered", "gain")

CURVED = 0.1
"""Exponents closer than this count as equal: neither curve is an exact power law, so their fits cannot agree better."""

UNDECIDED = 0.75
"""An interval wider than this is compatible with almost any claim."""

NOTE = (
    "Over a stage of steps of one radius the drift cannot grow like n^2 for large n: by the chain rule the total "
    "variation before step i is at most sqrt(KL / 2) with KL the sum of i - 1 radii (drift_by_kl), so its sum grows "
    "like n^1.5; larger exponents here are those of small n. All intervals are over teams alone."
)


@dataclass(frozen=True)
class FamilyScaling:
    """One family under one rule and order: means per n, fitted exponents, and verdicts."""

    family: str
    says: str
    rule: Rule
    order: SpeakingOrder
    n: tuple[int, ...]
    measured: dict[str, tuple[float, ...]]
    bounds: dict[str, tuple[float, ...]]
    exponents: dict[str, PowerLaw | None]
    """Over all n."""
    tail: dict[str, PowerLaw | None]
    """Over the larger n alone, ``n[tail_from:]``."""
    tail_from: int
    claimed: dict[str, float]
    """The exponents of n (n - 1) / 2 ("stale") and of n ("fresh"), fitted on ``n[tail_from:]``."""
    verdicts: dict[str, str]


@dataclass(frozen=True)
class ScalingReport:
    """Results of ``scaling``."""

    radius: float
    teams: int
    stages: int
    seed: int
    families: tuple[FamilyScaling, ...]

    def as_record(self) -> dict[str, Any]:
        return asdict(self) | {"note": NOTE}

    def of(self, family: str, rule: Rule, order: SpeakingOrder) -> FamilyScaling:
        found = [f for f in self.families if (f.family, f.rule, f.order) == (family, rule, order)]
        if not found:
            raise KeyError(f"no {family!r} with rule {rule!r} and order {order!r} in this report")
        return found[0]


def scaling(
    families: Sequence[Family] = FAMILIES,
    *,
    teams: int = 16,
    stages: int = 3,
    radius: float = 0.01,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> ScalingReport:
    """Measure and fit every family, under both rules and both orders."""
    found = []
    for family in families:
        for rule in ("fresh", "stale"):
            for order in ("forward", "reverse"):
                if progress is not None:
                    progress(f"{family.name}, {rule}, {order}")
                found.append(_scale(family, rule, order, teams, stages, radius, seed))
    return ScalingReport(radius, teams, stages, seed, tuple(found))


def _scale(
    family: Family, rule: Rule, order: SpeakingOrder, teams: int, stages: int, radius: float, seed: int
) -> FamilyScaling:
    measured: dict[str, list[Floats]] = {}
    bounds: dict[str, list[Floats]] = {}
    for n in family.n:
        # The same teams for every rule and order: their seed depends on the family and n alone.
        team = family.build(generator(seed, "scaling", family.name, n), teams, n)
        rng = generator(seed, "scaling", "updates", n)
        for stage in range(stages):
            got = measure_stage(rng, team, radius, rule, order)
            for into, values in ((measured, got.measured), (bounds, got.bounds)):
                for name, value_B in values.items():
                    if stage == 0:
                        into.setdefault(name, []).append(value_B / stages)
                    else:
                        into[name][-1] = into[name][-1] + value_B / stages
            team = got.after
    tail_from = 2 if len(family.n) > 5 else 1
    larger = family.n[tail_from:]
    claimed = {
        "stale": float(slope(larger, np.array([k * (k - 1) / 2.0 for k in larger]))),
        "fresh": float(slope(larger, np.array(larger, dtype=np.float64))),
    }
    rng = generator(seed, "scaling", "bootstrap", family.name)
    every = {name: np.array(values) for name, values in (measured | bounds).items() if name not in UNFITTED}
    exponents = {name: fit_power_law(family.n, values, rng) for name, values in every.items()}
    tail = {name: fit_power_law(larger, values[tail_from:], rng) for name, values in every.items()}
    return FamilyScaling(
        family=family.name,
        says=family.says,
        rule=rule,
        order=order,
        n=family.n,
        measured={name: tuple(float(v.mean()) for v in values) for name, values in measured.items()},
        bounds={name: tuple(float(v.mean()) for v in values) for name, values in bounds.items()},
        exponents=exponents,
        tail=tail,
        tail_from=tail_from,
        claimed=claimed,
        verdicts={
            name: verdict(tail[name], every[name].mean(axis=1), claimed[claim], larger)
            for name, claim in CLAIMS.items()
        },
    )


def verdict(fit: PowerLaw | None, means_N: Floats, claimed: float, n: Sequence[int]) -> str:
    """Whether the measured sum grows as the bound does, as text. An interval that contains the claim and is wider than
    ``UNDECIDED`` decides nothing."""
    if (np.asarray(means_N) <= ZERO).all():
        return "no: it is zero for every n"
    if fit is None:
        return "no power law: it is zero for some n"
    numbers = f"{fit.text()} against {claimed:.2f} over n = {n[0]}..{n[-1]}"
    if fit.low - CURVED <= claimed <= fit.high + CURVED:
        return f"undecided, too noisy: {numbers}" if fit.high - fit.low > UNDECIDED else f"yes: {numbers}"
    return f"no, it grows {'more slowly' if fit.high < claimed else 'faster'}: {numbers}"
