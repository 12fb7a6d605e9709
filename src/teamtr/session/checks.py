"""Checks before training: the KL noise floor of scoring against the radius, and a self-test of the grader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from teamtr.calls import name_of
from teamtr.errors import Refused, UserError
from teamtr.ports import Engine, Learner, Snapshot
from teamtr.presets import Radii
from teamtr.progress import working
from teamtr.randomness import generator, seed_of
from teamtr.rollout import RolloutContext, certified_range, credited
from teamtr.rollout.outcome import grades_dialogue
from teamtr.session.build import Session
from teamtr.session.trial import Trial, try_out
from teamtr.session.without_effect import without_effect
from teamtr.team import team_answer
from teamtr.team.router import closers_of, next_turn, speakers_of
from teamtr.text import counted
from teamtr.theory.overlong import cache_tokens
from teamtr.training.batch import TrainingBatch
from teamtr.training.scoring import VERIFIABLE_SHARE, floor_rows, noise_floor
from teamtr.types import Problem, Transcript, Turn

KNOWN_PROBLEMS = 3
FEW = 10
LOOKED_AT = 256
EXACT = ("fp64", "fp32")
PERTURBATIONS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
NOTHING = 1e-3
"""Share of the radius below which a KL counts as 0: a hundredth of what a noise floor may have."""


@dataclass(frozen=True)
class Floor:
    """The noise floor of one agent's scoring and its radius, both in nats per ``unit``; ``tokens``: mean length of the
    messages that it was measured on."""

    agent: str
    precision: str
    messages: int
    noise_floor: float
    radius: float
    unit: str = "message"
    tokens: float = 1.0

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
    """The KL noise floor exceeds a tenth of the radius."""


class GraderNotTrusted(Refused):
    """The grader misgrades known answers, or fails on every reply that it was tried with."""


def self_test(session: Session) -> list[str]:
    """Send answers known to be right or wrong through the path of a real message: the tokenizer of each speaker, the
    team's answer rule, extraction and grader. Returns warnings; raises GraderNotTrusted if one is misgraded. If a task
    has no known answers, its grader must at least not fail on every reply."""
    task, seed = session.task, session.team_file.seed
    problems = task.problems("train")
    if not problems:
        raise UserError("the task has no problem to train on: lower task.held_out, or give task.train")
    rng = generator(seed, "self-test")
    picked = [problems[i] for i in rng.permutation(len(problems))[:KNOWN_PROBLEMS]]
    known = [_Known(p, "gold", gold, True) for p in picked if (gold := task.gold(p)) is not None]
    known += [_Known(p, answer.kind, answer.reply, False) for p in picked for answer in task.wrong(p, rng)]
    if not known:
        _require_an_answer(session, problems)
        return []
    context = session.context
    said = [_spoken(context, each.reply) for each in known]
    texts = [Transcript(turns) for turns in said]
    answers = [team_answer(turns, context.answer, task.extract) for turns in said]
    verdicts = task.grade([(k.problem, answer, text) for k, answer, text in zip(known, answers, texts, strict=True)])
    failed = [
        f"  problem {each.problem.id}, {each.kind}: graded {verdict.kind}, read as {verdict.extracted!r}"
        for each, verdict in zip(known, verdicts, strict=True)
        if verdict.right != each.is_right
    ]
    failed += [
        f"  problem {each.problem.id}, gold: no answer is found in it when votes are counted"
        for each, answer in zip(known, answers, strict=True)
        if each.is_right and task.extract(answer) is None
    ]
    if failed:
        raise GraderNotTrusted(
            "grader self-test failed: reference answers were misgraded, so rewards would mean nothing:\n"
            + "\n".join(failed[:10])
            + "\nIf only gold answers fail, the model's tokenizer may not be able to write them; else fix the task."
        )
    if grades_dialogue(context, problems[0]):
        return []  # the right answer is a dialogue, not a single message
    return _too_short(session, [turns for each, turns in zip(known, said, strict=True) if each.is_right])


def doubts(session: Session) -> list[str]:
    """Warnings about what makes it unlikely that something is learned, or that learning can be measured. Raises
    UserError if there is nothing to measure it on."""
    settings, task = session.team_file, session.task
    problems, found = task.problems("train"), []
    for name in session.team.trainable:
        if not session.context.router.turns_of(name):
            found.append(
                f"agent {name!r} never speaks under team.router and is never updated: set frozen: true, or let it speak"
            )
    found += _uncertified(session)
    found += without_effect(session)
    if len(problems) < (wanted := session.plan.problems):
        matched = "" if wanted == settings.plan.problems else f" (plan.match: {settings.plan.match})"
        found.append(
            f"{counted(len(problems), 'problem')} to train on, and plan.problems is {wanted}{matched}: every batch has "
            "all of them"
        )
    held_out = len(task.problems("test")) if settings.eval.every else FEW
    if not held_out:
        raise UserError(
            "the task has no held-out problem to evaluate on: raise task.held_out, give task.test, or set eval.every: 0"
        )
    if held_out < FEW:
        found.append(f"{counted(held_out, 'held-out problem')}: too few for informative intervals")
    untaught = not settings.warmup.tokens and not task.format_examples(generator(settings.seed, "form"), 1)
    if untaught and settings.tiny.warmup_steps and any(agent.model == "tiny" for agent in settings.team.agents):
        found.append(
            "the built-in tiny model gets no warm-up, because this task has no examples of messages: it starts with "
            "random letters; use a pretrained model, or try a task such as code"
        )
    codecs = {id(tokenizer): codec for codec in session.context.codecs.values() if (tokenizer := _tokenizer(codec))}
    for codec in codecs.values():
        unknown, looked_at = _tokenizer(codec).unk_token_id, problems[:LOOKED_AT]
        # Without the end token, which in some tokenizers (GPT-2's) is also the unknown token.
        strange = sum(unknown is not None and unknown in codec.encode_message(p.prompt)[:-1] for p in looked_at)
        if strange:
            found.append(f"{strange} of {len(looked_at)} problems have characters that the tokenizer does not know")
    return found


def _uncertified(session: Session) -> list[str]:
    """A warning that names the agents whose updates have no certificates because of the plan."""
    plan, router, team = session.plan, session.context.router, session.team
    speaking = [name for name in team.trainable if router.turns_of(name)]
    reward_range = session.task.reward_range
    without = [name for name in speaking if certified_range(plan, reward_range, team, router, name) is None]
    if reward_range is None or not without:
        return []
    if plan.dynamic_sampling.on:
        why = "its groups are chosen by their rewards, and would overstate every gain"
        return [f"plan.dynamic_sampling: true: no certificates: {why}"]
    why = {
        "own": "a gain of its own reward is none of the team's",
        "difference": "others read what it says, so that a gain of the difference is none of the team's",
    }[plan.credit]
    return [f"plan.credit: {plan.credit}: no certificates for {', '.join(without)}: {why}"]


def untaught_share(session: Session, trial: Trial) -> float | None:
    """The share of the trial's groups that teach an agent nothing, of the agent for whom it is least; None if nobody is
    trained."""
    plan, limits = session.plan, session.team.limits
    speaking = [name for name in session.team.trainable if session.context.router.turns_of(name)]
    found = [credited(trial.batch, name, plan, limits).advantages.informative_P for name in speaking]
    return min((float(1.0 - informative_P.mean()) for informative_P in found), default=None)


def callable_tools(session: Session) -> dict[str, list[str]]:
    """The names of the tools that each agent can call in the first problem; agents without any are left out."""
    problem, context = session.task.problems("train")[0], session.context
    found = {agent.name: list(map(name_of, context.offered(agent, problem))) for agent in session.team}
    return {name: tools for name, tools in found.items() if tools}


def _tokenizer(codec: Any) -> Any:
    return getattr(codec, "tokenizer", None)


def _require_an_answer(session: Session, problems: Sequence[Problem]) -> None:
    """Grade a right answer (an empty text if none is known), a number and a sentence; raise if the grader fails on all
    of them."""
    failures = session.task.failures
    before, known = Counter(failures), problems[0].answer
    replies = ("" if known is None else str(known), "0", "I do not know.")
    said = [Transcript(_by_everyone(session.context, partial(_written, reply))) for reply in replies]
    verdicts = session.task.grade([(problems[0], reply, texts) for reply, texts in zip(replies, said, strict=True)])
    failed = Counter(failures) - before
    failures.clear()
    failures.update(before)
    if all(verdict.kind in ("crash", "timeout") for verdict in verdicts):
        raise GraderNotTrusted(
            f"the grader failed on all {len(verdicts)} replies it was tried with, so nothing could be learned:\n"
            + "\n".join(f"  {why}" for why in failed)
            + "\nA grader must give a reward for any text, 0 if it cannot read it. If it is only slow, raise "
            "task.seconds_per_item."
        )


@dataclass(frozen=True)
class _Known:
    problem: Problem
    kind: str
    reply: str
    is_right: bool


def _spoken(context: RolloutContext, reply: str) -> list[Turn]:
    """An episode in which every agent says the reply, encoded and decoded by its own tokenizer."""

    @cache
    def message(name: str) -> Turn:
        codec = context.codecs[name]
        token_ids = codec.encode_message(reply)
        nothing = np.zeros(0, np.int32), token_ids, np.zeros(len(token_ids), np.float32)
        return Turn(name, 0, *nothing, "stop", "", codec.decode(token_ids))

    return _by_everyone(context, message)


def _written(reply: str, name: str) -> Turn:
    """A turn with exactly this text, without a tokenizer."""
    return Turn(name, 0, np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), "stop", "", reply)


def _by_everyone(context: RolloutContext, message: Callable[[str], Turn]) -> list[Turn]:
    """An episode of these messages in the router's order. If an agent gives the answer and the router never calls it,
    it speaks last."""
    turns: list[Turn] = []
    names = tuple(context.codecs)
    while upcoming := next_turn(context.router, turns, names):
        turns.append(replace(message(upcoming.agent), round=upcoming.round))
    if context.answer in names and all(turn.agent != context.answer for turn in turns):
        turns.append(message(context.answer))
    return turns


def _too_short(session: Session, golds: list[list[Turn]]) -> list[str]:
    """A warning for each answering agent that cannot write the shortest of these right answers, or only with a length
    punishment."""
    rule, router, names = session.context.answer, session.context.router, session.team.names
    cache = session.plan.overlong.cache
    answering = {"last": closers_of(router, names), "majority": speakers_of(router, names)}.get(rule, (rule,))
    warnings = []
    for agent in session.team:
        needed = min((len(t.token_ids) for turns in golds for t in turns if t.agent == agent.name), default=0)
        if agent.name in answering and needed > agent.max_tokens:
            warnings.append(
                f"agent {agent.name!r} may write {agent.max_tokens} tokens, but the shortest of {len(golds)} right "
                f"answers takes {needed}: raise max_tokens"
            )
        elif agent.name in answering and needed > agent.max_tokens - cache_tokens(agent.max_tokens, cache):
            warnings.append(
                f"agent {agent.name!r}: the shortest of {len(golds)} right answers takes {needed} of "
                f"{agent.max_tokens} tokens and is punished for its length: raise max_tokens, or lower "
                "plan.overlong_cache"
            )
    return warnings


def measure_floors(session: Session, trial: Trial | None = None) -> list[Floor]:
    """Measure every trainable agent's noise floor on some of its own messages in a few episodes of the current team,
    which are sampled if they are not given. Changes no weights.

    With ``precision: auto``, an agent whose radius is not visible is switched to the next finer precision.
    """
    batch, seed = (trial or try_out(session)).batch, session.team_file.seed
    floors = []
    for name in session.team.trainable:
        found = credited(batch, name, session.plan, session.team.limits)
        data = TrainingBatch(batch.of(name), found.advantages, found.returns_PG)
        if len(data.messages) == 0:
            continue
        own_seed = seed_of(seed, "preflight", name)
        data = replace(data, messages=data.messages.rows(floor_rows(data, own_seed)))
        rounding = _Rounding(session.engine, name, data, session.plan.radii, own_seed)
        for precision in _finer(session, name):
            session.engine.set_precision(name, precision)
            with working(f"noise floor of {name} in {precision}"):
                measured = rounding.floor()
            floor = Floor(
                agent=name,
                precision=precision,
                messages=len(data.messages),
                noise_floor=measured,
                radius=session.plan.radii.nats,
                unit="token" if session.plan.radii.per_token else "message",
                tokens=float(data.messages.lengths_M.mean()),
            )
            if floor.visible:
                break
        floors.append(floor)
    return floors


def _finer(session: Session, agent: str) -> tuple[str, ...]:
    """The precisions to try: the agent's current one, and with ``auto`` all finer ones."""
    info = session.engine.info(agent)
    return info.precisions if session.team_file.learner.precision == "auto" else (info.precision,)


@dataclass
class _Rounding:
    """The effect of rounding on one agent's KL. Every precision scores the messages only once, because that takes as
    long as a measurement. Float32 is measured once for all precisions that are compared with it, because on a card it
    takes ten times as long."""

    engine: Engine
    agent: str
    data: TrainingBatch
    radii: Radii
    seed: int

    def floor(self) -> float:
        """The KL that rounding produces in the current precision: after a negligible perturbation, or as an error
        relative to float32.

        In low precision a negligible change can vanish altogether (e.g. of an adapter next to a frozen base). This
        reads as a floor of 0, although steps of realistic size are measured wrongly. So perturbations of several sizes,
        whose true KL is within the radius, are measured in this precision and compared with float32; the largest
        difference counts.
        """
        truth = {} if self.engine.info(self.agent).precision in EXACT else self._true_kls
        with self._scored() as before:
            floors = [noise_floor(self._learner, self.data, before, self.radii, seed=self.seed)]
            for relative, kl in truth.items():
                floors.append(abs(self._perturbed(relative, before) - kl))
        return float(np.max(floors))  # propagates NaN, which Python's max may drop

    @cached_property
    def _true_kls(self) -> dict[float, float]:
        """KL in float32, of perturbations that stay within the radius. The largest are measured first; once a KL is
        negligible next to the radius, it and those of all smaller perturbations count as 0."""
        own = self.engine.info(self.agent).precision
        self.engine.set_precision(self.agent, "fp32")
        within: dict[float, float] = {}
        try:
            with self._scored() as before:
                for relative in reversed(PERTURBATIONS):
                    if (kl := self._perturbed(relative, before)) <= NOTHING * self.radii.nats:
                        smaller = [other for other in PERTURBATIONS if other <= relative]
                        return within | dict.fromkeys(smaller, 0.0)
                    if not kl > self.radii.nats:  # true for NaN as well: the floor is then NaN, and refused
                        within[relative] = kl
                return within
        finally:
            self.engine.set_precision(self.agent, own)

    @property
    def _learner(self) -> Learner:
        return self.engine.learner(self.agent)

    @contextmanager
    def _scored(self) -> Iterator[Snapshot]:
        before = self._learner.snapshot()
        try:
            self._learner.begin(self.data.messages)
            yield before
        finally:
            self._learner.restore(before)
            self._learner.end()

    def _perturbed(self, relative: float, before: Snapshot) -> float:
        self._learner.perturb(relative, self.seed)
        kl = float(self.data.kl_in_radius_units(self._learner.measure().full_M, self.radii).mean())
        self._learner.restore(before)
        return kl


def require_visible(session: Session, floors: list[Floor]) -> None:
    """Raise if the plan has a gate and the KL noise floor exceeds a tenth of the radius."""
    blind = [f for f in floors if not f.visible]
    if blind and session.plan.region.gate:
        raise RadiusNotVisible(
            "the KL noise floor is too high: rounding alone moves a message by more than a tenth of the radius.\n"
            + "\n".join(f"  {f}" for f in blind)
            + f"\n{_remedy(blind)}"
        )


def _remedy(blind: list[Floor]) -> str:
    """Advice: a finer precision if one can be set, otherwise a larger radius or shorter messages. Rounding adds up over
    a message. So does a radius per token, but not one per message."""
    others = f"raise plan.radius_nats_per_{blind[0].unit}, or shorten max_tokens."
    if blind[0].unit == "message":
        worst = max(blind, key=lambda floor: floor.noise_floor / floor.tokens)
        seen = worst.noise_floor / VERIFIABLE_SHARE
        others = (
            f"raise plan.radius_nats_per_message, shorten max_tokens, or set plan.radius_nats_per_token, which is seen "
            f"from about {seen / worst.tokens:.2g} on: {seen:.2g} nats for a message of {worst.tokens:.0f} tokens."
        )
    if all(floor.precision in EXACT for floor in blind):
        return f"Scoring is as fine as it gets: {others}"
    return f"Set learner.precision to fp32 (or tf32 on a GPU), {others}"
