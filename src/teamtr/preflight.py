"""Before training: can the radius be seen at all in the precision of scoring?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from teamtr.build import Workshop
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.torch.policy import CHEAPEST_FIRST
from teamtr.errors import Refused
from teamtr.presets import Radii
from teamtr.randomness import generator, seed_of
from teamtr.rollout import play
from teamtr.theory.advantages import group_advantages
from teamtr.update import VERIFIABLE_SHARE, Lesson, noise_floor

PROBLEMS = 8
GROUP = 4
EXACT = ("fp64", "fp32")
PERTURBATIONS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class Floor:
    """The noise floor of one agent's scoring beside its radius, both in nats per ``unit``."""

    agent: str
    precision: str
    messages: int
    noise_floor: float
    radius: float
    unit: str = "message"

    @property
    def share(self) -> float:
        return self.noise_floor / self.radius

    @property
    def visible(self) -> bool:
        return self.share <= VERIFIABLE_SHARE

    def __str__(self) -> str:
        return (
            f"{self.agent}: noise floor {self.noise_floor:.2g} nats per {self.unit} in {self.precision}, "
            f"{self.share:.2g} of the radius {self.radius:.2g}"
        )


class RadiusNotVisible(Refused):
    """Rounding moves the policy more than the trust region allows."""


def measure_floors(workshop: Workshop) -> list[Floor]:
    """Play a few episodes and measure every trainable agent's floor on its own messages. Changes no weight.

    With ``precision: auto`` an agent whose radius cannot be seen goes on to the next finer arithmetic.
    """
    problems = workshop.task.problems("train")
    seed = workshop.team_file.seed
    pick = generator(seed, "preflight").permutation(len(problems))[:PROBLEMS]
    batch = play(
        workshop.arena,
        workshop.current_team(),
        [problems[i] for i in pick],
        GROUP,
        seed=seed_of(seed, "preflight", "play"),
    )
    returns_PG = batch.returns_PG(workshop.plan.gamma)
    advantages = group_advantages(returns_PG, a_clip=workshop.plan.a_clip, eps_norm=workshop.plan.eps_norm)
    floors = []
    for name in workshop.team.trainable:
        learner = workshop.engine.learner(name)
        lesson = Lesson(batch.of(name), advantages, returns_PG)
        if len(lesson.batch) == 0:
            continue
        for precision in _finer(workshop, learner.policy.precision):
            learner.policy.precision = precision
            floor = Floor(
                agent=name,
                precision=precision,
                messages=len(lesson.batch),
                noise_floor=_floor(learner, lesson, workshop.plan.radii, seed=seed_of(seed, "preflight", name)),
                radius=learner.state.radius_nats,
                unit="token" if workshop.plan.radii.per_token else "message",
            )
            if floor.visible:
                break
        floors.append(floor)
    return floors


def _finer(workshop: Workshop, precision: str) -> tuple[str, ...]:
    """This precision, and with ``auto`` all finer ones."""
    if workshop.team_file.learner.precision != "auto" or precision not in CHEAPEST_FIRST:
        return (precision,)
    return CHEAPEST_FIRST[CHEAPEST_FIRST.index(precision) :]


def _floor(learner: PolicyLearner, lesson: Lesson, radii: Radii, *, seed: int) -> float:
    """The KL that rounding produces: after a negligible perturbation, and beyond it wherever float32 differs.

    In low precision a negligible change can vanish altogether (an adapter's, beside a frozen base), which reads as a
    floor of 0, while a step of the size of real ones is read wrongly. So perturbations of growing size are measured
    in this precision and in float32, as long as their true KL is within the radius; the largest difference counts.
    """
    before = learner.snapshot()
    learner.begin(lesson.batch)
    floor = noise_floor(learner, lesson, before, radii, seed=seed)
    learner.end()
    if learner.policy.precision in EXACT:
        return floor
    for relative in PERTURBATIONS:
        true = _perturbed_kl(learner, lesson, before, radii, relative, seed, precision="fp32")
        if true > learner.state.radius_nats:
            break
        read = _perturbed_kl(learner, lesson, before, radii, relative, seed, precision=learner.policy.precision)
        floor = max(floor, abs(read - true))
    return floor


def _perturbed_kl(
    learner: PolicyLearner, lesson: Lesson, before: Any, radii: Radii, relative: float, seed: int, *, precision: str
) -> float:
    own = learner.policy.precision
    learner.policy.precision = precision
    try:
        learner.begin(lesson.batch)
        learner.perturb(relative, seed)
        return float(lesson.charged_M(learner.measure().full_M, radii).mean())
    finally:
        learner.restore(before)
        learner.end()
        learner.policy.precision = own


def require_visible(workshop: Workshop, floors: list[Floor]) -> None:
    """Refuse a team whose radius drowns in rounding."""
    blind = [f for f in floors if not f.visible]
    if blind and workshop.plan.region.gate:
        raise RadiusNotVisible(
            "the trust region cannot be seen: rounding alone moves a message by more than a tenth of the radius.\n"
            + "\n".join(f"  {f}" for f in blind)
            + "\nSet learner.precision to fp32 (or tf32 on a GPU), raise the radius, or shorten max_tokens."
        )
