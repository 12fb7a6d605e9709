"""A radius must be seen to be kept: scoring that rounds too coarsely is found out before training."""

from __future__ import annotations

import pytest

from teamtr.config import loads
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.session import checks
from teamtr.session.build import build

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


def test_without_a_gate_there_is_nothing_to_see():
    session = build(loads(TEAM, "team", ["plan.preset=no_trust_region"]))
    floor = checks.Floor("left", "bf16", 1, noise_floor=1.0, radius=0.01)
    checks.require_visible(session, [floor])


@pytest.mark.parametrize(("coarse", "settled"), [((), "fp16"), (("fp16",), "tf32"), (("fp16", "tf32"), "fp32")])
def test_auto_takes_the_cheapest_arithmetic_that_sees_the_radius(monkeypatch, coarse, settled):
    session = build(loads(TEAM, "team", ["learner.precision=auto"]))
    for learner in session.engine.learners.values():
        learner.policy.precision = "fp16"  # where auto begins on a GPU

    def floor(engine, agent, data, radii, *, seed):
        return 1.0 if engine.info(agent).precision in coarse else 1e-6

    monkeypatch.setattr(checks, "_floor", floor)
    floors = checks.measure_floors(session)
    assert {f.precision for f in floors} == {settled}
    assert {learner.policy.precision for learner in session.engine.learners.values()} == {settled}


def test_a_named_precision_is_never_exchanged_for_another(monkeypatch):
    session = build(loads(TEAM, "team", ["learner.precision=fp16"]))
    monkeypatch.setattr(checks, "_floor", lambda *_, **__: 1.0)
    assert {f.precision for f in checks.measure_floors(session)} == {"fp16"}
