"""A radius must be seen to be kept: scoring that rounds too coarsely is found out before training."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from teamtr.batches import AgentBatch
from teamtr.config import loads
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.presets import Radii
from teamtr.randomness import seed_of
from teamtr.session import checks
from teamtr.session.build import build
from teamtr.session.trial import try_out
from teamtr.training.batch import TrainingBatch
from teamtr.training.certify import CertificateInputs
from teamtr.training.scoring import FLOOR_MESSAGES, floor_rows
from teamtr.training.update import update_agent
from teamtr.types import AgentState

pytestmark = pytest.mark.long

TEAM = """
name: small
task: {name: code, symbols: AB, held_out: 0.5, skill: 0.8}
tiny: {layers: 1, width: 32, heads: 2, warmup_steps: 40, warmup_learning_rate: 1e-2}
team:
  model: tiny
  agents:
    - {name: left, max_tokens: 2}
    - {name: right, max_tokens: 2}
    - {name: speaker, max_tokens: 3}
learner: {precision: bf16}
"""


def test_float32_sees_the_radius_and_measuring_changes_nothing():
    session = build(loads(TEAM, "team", ["learner.precision=fp32"]))
    before = {name: learner.fingerprint() for name, learner in session.engine.learners.items()}
    floors = checks.measure_floors(session)
    assert all(floor.noise_floor < 1e-9 for floor in floors)
    checks.require_visible(session, floors)
    assert before == {name: learner.fingerprint() for name, learner in session.engine.learners.items()}


def test_bf16_is_measurably_worse_than_fp32():
    """Even on a tiny model; whether it is refused is a matter of the floor, not of the name."""
    exact = checks.measure_floors(build(loads(TEAM, "team", ["learner.precision=fp32"])))
    coarse = checks.measure_floors(build(loads(TEAM, "team")))
    assert all(c.noise_floor > 100 * e.noise_floor for c, e in zip(coarse, exact, strict=True))
    assert {c.precision for c in coarse} == {"bf16"}


def test_each_precision_scores_a_few_messages_once_and_sees_what_it_sees_alone(monkeypatch):
    """Perturbations are measured against one scoring; the floor is that of a scoring for each. float32 takes long on a
    card: it scores no more messages than tell the floor."""
    session, begun = build(loads(TEAM, "team", ["task.symbols=ABCD", "plan.radius_nats_per_message=0.005"])), []
    engine, trial = session.engine, try_out(session)
    learner = engine.learner("right")
    begin = type(learner).begin

    def counted(self, batch, **options):
        if self is learner:
            begun.append((engine.info("right").precision, len(batch)))
        return begin(self, batch, **options)

    monkeypatch.setattr(type(learner), "begin", counted)
    [floor] = [floor for floor in checks.measure_floors(session, trial) if floor.agent == "right"]
    assert begun == [("fp32", FLOOR_MESSAGES), ("bf16", FLOOR_MESSAGES)]
    said = trial.batch.of("right")
    assert floor.messages == FLOOR_MESSAGES < len(said)

    seed = seed_of(session.team_file.seed, "preflight", "right")
    before, messages = learner.snapshot(), said.rows(floor_rows(TrainingBatch(said, None, None), seed))

    def alone(relative, precision):
        engine.set_precision("right", precision)
        learner.begin(messages)
        learner.perturb(relative, seed)
        measured = float(learner.measure().full_M.mean())
        learner.restore(before)
        learner.end()
        return measured

    pairs = [(alone(size, "fp32"), alone(size, "bf16")) for size in checks.PERTURBATIONS]
    radius = session.plan.radii.nats
    within = [(true, seen) for true, seen in pairs if true <= radius]
    told = [(true, seen) for true, seen in within if true > checks.NOTHING * radius]
    assert 0 < len(told) < len(within) < len(pairs)
    assert floor.noise_floor == max(abs(seen - (true if (true, seen) in told else 0.0)) for true, seen in within)


@pytest.mark.parametrize("worst", [None, *checks.PERTURBATIONS])
def test_every_perturbation_that_stays_within_the_radius_counts(monkeypatch, worst):
    """Also those that float32 was not asked of, whose KL is next to nothing: they count as 0."""
    session = build(loads(TEAM, "team"))
    radius, asked = session.plan.radii.nats, []
    shares = dict(zip(checks.PERTURBATIONS, (5e-7, 5e-5, 5e-3, 0.5, 50.0), strict=True))

    def perturbed(rounding, relative, before):
        if rounding.engine.info(rounding.agent).precision == "fp32":
            asked.append(relative)
            return shares[relative] * radius
        return (0.8 if relative == worst else shares[relative]) * radius

    monkeypatch.setattr(checks._Rounding, "_perturbed", perturbed)
    monkeypatch.setattr(checks, "noise_floor", lambda *_, **__: 1e-9 * radius)
    floor = checks.measure_floors(session)[0]
    assert asked[:5] == [1e-1, 1e-2, 1e-3, 1e-4, 1e-1], "of two agents: the smallest is less"
    expected = {None: 5e-5, 1e-1: 5e-5, 1e-2: 0.3, 1e-3: 0.795}.get(worst, 0.8)
    assert floor.share == pytest.approx(expected, rel=1e-9)
    assert floor.visible == (worst in (None, 1e-1))


def test_a_perturbation_that_is_read_as_no_number_is_not_passed_over(monkeypatch):
    """The negligible one is read well here, a larger one is not."""
    session = build(loads(TEAM, "team"))
    learner, trial = session.engine.learner("right"), try_out(session)
    measure, seen = type(learner).measure, []

    def overflowing(self, rows=None):
        found = measure(self, rows)
        if self is not learner or session.engine.info("right").precision == "fp32":
            return found
        seen.append(found)
        return found if len(seen) == 1 else replace(found, full_M=np.full_like(found.full_M, np.nan))

    monkeypatch.setattr(type(learner), "measure", overflowing)
    [floor] = [floor for floor in checks.measure_floors(session, trial) if floor.agent == "right"]
    assert len(seen) > 1
    assert not floor.visible


def test_what_float32_reads_as_no_number_is_not_passed_over_either(monkeypatch):
    """A floor that nothing was compared with would be that of the negligible perturbation alone."""
    session, perturbed = build(loads(TEAM, "team")), checks._Rounding._perturbed

    def broken(rounding, relative, before):
        precise = rounding.engine.info(rounding.agent).precision == "fp32"
        return float("nan") if precise else perturbed(rounding, relative, before)

    monkeypatch.setattr(checks._Rounding, "_perturbed", broken)
    assert not any(floor.visible for floor in checks.measure_floors(session))


def test_a_dead_zone_is_not_a_perfect_instrument(monkeypatch):
    """Scoring so coarse that a negligible change vanishes reads a floor of 0 and is refused all the same."""
    features = TransformerPolicy.features

    def rounded(self, prompts, messages):
        hidden = features(self, prompts, messages)
        return hidden if self.precision == "fp32" else (hidden * 2).round() / 2

    monkeypatch.setattr(TransformerPolicy, "features", rounded)
    session = build(loads(TEAM, "team"))
    monkeypatch.setattr(checks, "PERTURBATIONS", ())
    floors = checks.measure_floors(session)
    assert all(f.visible for f in floors), f"a negligible change must vanish here: {[str(f) for f in floors]}"
    monkeypatch.undo()
    monkeypatch.setattr(TransformerPolicy, "features", rounded)
    floors = checks.measure_floors(session)
    assert any(not f.visible for f in floors), [str(f) for f in floors]
    with pytest.raises(checks.RadiusNotVisible, match=r"noise floor .* in bf16"):
        checks.require_visible(session, floors)


@pytest.mark.parametrize("precise", [True, False])
def test_a_measurement_that_breaks_off_leaves_weights_and_precision_as_they_were(monkeypatch, precise):
    """Between a perturbation and the way back from it."""
    session = build(loads(TEAM, "team"))
    before = {name: learner.fingerprint() for name, learner in session.engine.learners.items()}
    trial, learner = try_out(session), session.engine.learner("left")
    measure = type(learner).measure

    def broken(self, rows=None):
        if (session.engine.info("left").precision == "fp32") == precise:
            raise RuntimeError("injected")
        return measure(self, rows)

    monkeypatch.setattr(type(learner), "measure", broken)
    with pytest.raises(RuntimeError, match="injected"):
        checks.measure_floors(session, trial)
    assert session.engine.info("left").precision == "bf16"
    assert before == {name: learner.fingerprint() for name, learner in session.engine.learners.items()}


def test_without_a_gate_there_is_nothing_to_see():
    session = build(loads(TEAM, "team", ["plan.preset=no_trust_region"]))
    floor = checks.Floor("left", "bf16", 1, noise_floor=1.0, radius=0.01)
    checks.require_visible(session, [floor])


@pytest.mark.parametrize(("coarse", "settled"), [((), "fp16"), (("fp16",), "tf32"), (("fp16", "tf32"), "fp32")])
def test_auto_takes_the_cheapest_arithmetic_that_sees_the_radius(monkeypatch, coarse, settled):
    session = build(loads(TEAM, "team", ["learner.precision=auto"]))
    for learner in session.engine.learners.values():
        learner.policy.precision = "fp16"  # where auto begins on a GPU

    def floor(rounding):
        return 1.0 if rounding.engine.info(rounding.agent).precision in coarse else 1e-6

    monkeypatch.setattr(checks._Rounding, "floor", floor)
    floors = checks.measure_floors(session)
    assert {f.precision for f in floors} == {settled}
    assert {learner.policy.precision for learner in session.engine.learners.values()} == {settled}


def test_a_named_precision_is_never_exchanged_for_another(monkeypatch):
    session = build(loads(TEAM, "team", ["learner.precision=fp16"]))
    monkeypatch.setattr(checks._Rounding, "floor", lambda _: 1.0)
    assert {f.precision for f in checks.measure_floors(session)} == {"fp16"}


def coarsely(monkeypatch) -> None:
    """Features in any precision but float32 are off, and otherwise off whenever weights are: as rounding is."""
    features = TransformerPolicy.features

    def off(self, prompts, messages):
        hidden = features(self, prompts, messages)
        if self.precision == "fp32":
            return hidden
        moved = sum(float(p.detach().double().sum()) for p in self.parameters().values())
        rng = torch.Generator().manual_seed(abs(hash(moved)) % 2**31)
        return hidden + 1e-3 * torch.randn(hidden.shape, generator=rng)

    monkeypatch.setattr(TransformerPolicy, "features", off)


def test_float32_is_asked_once_for_all_that_are_compared_with_it(monkeypatch):
    """On a card it takes ten times as long as the others. The last time it is a candidate itself."""
    coarsely(monkeypatch)
    session, begun = build(loads(TEAM, "team", ["learner.precision=auto", "plan.radius_nats_per_message=1e-8"])), []
    learner = session.engine.learner("right")
    learner.policy.precision = "fp16"  # where auto begins on a GPU
    begin = type(learner).begin

    def counted(self, batch, **options):
        if self is learner:
            begun.append(self.policy.precision)
        return begin(self, batch, **options)

    monkeypatch.setattr(type(learner), "begin", counted)
    [floor] = [floor for floor in checks.measure_floors(session) if floor.agent == "right"]
    assert floor.precision == "fp32"
    assert begun == ["fp32", "fp16", "tf32", "fp32"]


def test_a_radius_per_token_is_seen_from_where_the_refusal_says_and_gates_long_messages(monkeypatch):
    """Rounding adds up over a message: what is too much for a radius per message is told per token, and with that
    radius an update is measured, gated, certified and reported in nats per token."""
    coarsely(monkeypatch)
    text = TEAM.replace("{name: right, max_tokens: 2}", "{name: right, max_tokens: 60}")
    session = build(
        loads(text, "team", ["learner.precision=tf32", "plan.radius_nats_per_message=1e-9", "tiny.warmup_steps=0"])
    )
    trial = try_out(session)
    floors = [floor for floor in checks.measure_floors(session, trial) if floor.agent == "right"]
    assert 30 < floors[0].tokens <= 60, "or messages are not long"
    with pytest.raises(checks.RadiusNotVisible) as refused:
        checks.require_visible(session, floors)
    told = re.search(r"plan\.radius_nats_per_token, which is seen from about (\S+) on: (\S+) nats", str(refused.value))
    assert told is not None, str(refused.value)
    seen = float(told[1])
    assert seen == pytest.approx(10 * floors[0].noise_floor / floors[0].tokens, rel=0.1)
    assert float(told[2]) == pytest.approx(10 * floors[0].noise_floor, rel=0.1)

    radius, own = 3 * seen, trial.batch.of("right")
    plan = replace(session.plan, radii=Radii(radius, per_token=True))
    returns_PG = np.random.default_rng(0).random((int(own.problem_M.max()) + 1, trial_group(own)))
    data = TrainingBatch(own, plan.advantage.estimate(returns_PG), returns_PG)
    state = AgentState(beta=1.0, step_scale=1.0, radius_nats=radius)
    inputs = CertificateInputs(turns=1, horizon=3, reward_range=1.0)
    learner, optimization = session.engine.learner("right"), replace(session.optimization, epochs=1)
    report = update_agent(learner, data, plan, optimization, state, seed=1, certificate_inputs=inputs).report
    assert report.outcome.startswith("accepted"), (report.outcome, report.reason)
    assert report.unit == "token"
    assert 0 < report.noise_floor <= 0.1 * report.radius
    assert 0 < report.kl_upper <= report.radius
    assert report.kl_full > 10 * report.kl_upper, "that of a message, which has tens of tokens"
    assert len(report.certificates) == 2


def trial_group(own: AgentBatch) -> int:
    return len(np.unique(own.episode_M[own.problem_M == 0]))
