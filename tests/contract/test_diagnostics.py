"""Diagnostics are functions of the log: each against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from made_run import gap_record, made_batch
from teamtr.analysis.diagnostics.accounting import overhead, sampled_by_update, spent_by_agent
from teamtr.analysis.diagnostics.contexts import FORMS, Heard, finest_repeating, heard_by, statement
from teamtr.analysis.diagnostics.coordination import coordination
from teamtr.analysis.diagnostics.drift import context_drift
from teamtr.analysis.diagnostics.kl_reliability import kl_reliability
from teamtr.analysis.diagnostics.order import order_of, order_sensitivity
from teamtr.analysis.diagnostics.probes import probed, stale_gap_by_stage, token_kls
from teamtr.analysis.diagnostics.stability import stability
from teamtr.analysis.diagnostics.subsampling import subsample_reliability
from teamtr.analysis.diagnostics.tracking import certificate_tracking, gains, rank_correlation, stale_updates
from teamtr.analysis.diagnostics.zeta import zeta_proxy
from teamtr.records import number, whole
from teamtr.team import Agent, Blind, Everything
from teamtr.theory.weights import weight_degeneracy
from teamtr.training.probe import subsampled_means


def test_numbers_are_read_without_trust():
    record = {"a": 1, "b": math.nan, "c": "3", "d": True, "e": None, "f": 2.9}
    assert [number(record, key) for key in "abcdefg"] == [1.0, None, None, None, None, 2.9, None]
    assert whole(record, "f") == 2
    assert number(["not", "a", "record"], "a") is None


def test_sampled_kl_against_exact_by_hand():
    updates = [
        {"kl_full": 0.008, "kl_k1": 0.012, "kl_k3": 0.009, "radius": 0.01},  # near, k1 flips
        {"kl_full": 0.002, "kl_k1": 0.000, "kl_k3": 0.003, "radius": 0.01},  # far, no flip
        {"kl_full": 0.012, "kl_k1": 0.013, "kl_k3": 0.009, "radius": 0.01},  # near and outside, k3 flips
        {"kl_full": 0.0, "kl_k1": 0.0, "kl_k3": 0.0, "radius": 0.01},  # nothing moved
        {"kl_full": 0.5, "kl_k1": 0.0, "kl_k3": 0.0, "radius": 0.01, "unit": "token"},  # another unit
        {"kl_full": 0.5, "kl_k1": math.nan, "kl_k3": 0.0, "radius": 0.0},
    ]
    k1, k3 = kl_reliability(updates)
    assert (k1.name, k1.updates, k1.near_updates) == ("kl_k1", 3, 2)
    assert k1.bias_in_radii == pytest.approx((0.4 - 0.2 + 0.1) / 3)
    assert k1.rmse_in_radii == pytest.approx(math.sqrt((0.16 + 0.04 + 0.01) / 3))
    assert k1.flip_rate == pytest.approx(1 / 3)
    assert k1.near_flip_rate == pytest.approx(1 / 2)
    assert k3.flip_rate == pytest.approx(1 / 3)
    assert kl_reliability([])[0].flip_rate is None


def certified(update: int, ours: float, paper: float, **more):
    certificates = [{"kind": "turn_aware", "lower_bound": ours}, {"kind": "single_step", "lower_bound": paper}]
    return {"update": update, "certificates": certificates, **more}


def measured(update: int, estimate: float, width: float = 0.01):
    return {"update": update, "estimate": estimate, "lower": estimate - width, "upper": estimate + width}


def test_certificates_against_gains_by_hand():
    updates = [
        certified(1, 0.01, -2.0),
        certified(2, 0.05, -1.0, measured_before=measured(1, 0.02)),
        certified(3, -0.01, -3.0, measured_before=measured(2, 0.03)),  # 0.04 < 0.05: violated
        certified(4, 0.02, -1.5, measured_before=measured(3, -0.02)),  # -0.01 against -0.01: not violated
    ]
    ours = certificate_tracking(updates)["turn_aware"]
    assert ours.updates == (1, 2, 3)  # nothing measured update 4
    assert ours.violations == 1
    assert ours.violation_rate == pytest.approx(1 / 3)
    assert ours.positive == 2
    assert ours.rank_correlation == pytest.approx(1.0)
    paper = certificate_tracking(updates)["single_step"]
    assert (paper.violations, paper.positive) == (0, 0)


def test_an_exact_gain_takes_precedence_and_has_no_width():
    updates = [
        certified(1, 0.2, 0.0, exact_success=[0.5, 0.6]),
        certified(2, 0.0, 0.0, exact_success=[None, 0.6], measured_before=measured(1, 0.9)),
    ]
    found = gains(updates)
    assert found[1].exact
    assert found[1].estimate == found[1].upper == pytest.approx(0.1)
    assert 2 not in found
    assert certificate_tracking(updates)["turn_aware"].violations == 1


def test_rank_correlation_is_spearmans():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 6, 50), rng.normal(size=50)  # ties on one side
    assert rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert rank_correlation([1, 2, 3], [5, 5, 5]) is None
    assert rank_correlation([1, 2], [1, 2]) is None
    with pytest.raises(ValueError, match="pairs"):
        rank_correlation([1, 2, 3], [1, 2])


def test_weight_degeneracy_by_hand():
    equal = weight_degeneracy(np.zeros(8))
    assert (equal.effective_share, equal.largest, equal.above_ten) == (pytest.approx(1.0), 1.0, 0.0)
    found = weight_degeneracy(np.log([1.0, 1.0, 1.0, 11.0]))
    assert found.effective_share == pytest.approx(14.0**2 / (4 * (3 + 121)))
    assert found.largest == pytest.approx(11.0)
    assert found.above_ten == pytest.approx(0.25)
    assert found.p95 == pytest.approx(1 + 10 * 0.85)  # between the third and the fourth, linearly
    with pytest.raises(ValueError, match="finite"):
        weight_degeneracy([0.0, math.inf])


def test_total_variation_by_weights():
    """Two laws on four outcomes, each outcome as often as the first law says: exactly half the sum of differences."""
    before, after = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.3, 0.2, 0.4])
    drawn = np.repeat(np.arange(4), (10 * before).astype(int))
    found = weight_degeneracy(np.log(after / before)[drawn])
    assert found.total_variation == pytest.approx(0.5 * np.abs(before - after).sum())
    assert found.total_variation_error == pytest.approx(0.75 * math.sqrt(0.4 * 0.6 / 10))
    assert weight_degeneracy([900.0, -900.0]).total_variation == 0.5  # however heavy the tail


def test_subsampled_means_by_enumeration():
    """All halves of four positions: the draws have the mean and the spread of these, and nothing beyond them."""
    values = np.array([0.0, 0.1, 0.5, 1.0])
    halves = [2.0 * (values[i] + values[j]) / 3 for i in range(4) for j in range(i)]  # 3 messages
    drawn = np.concatenate([subsampled_means(values, 3, 0.5, np.random.default_rng(k)) for k in range(100)])
    assert set(np.round(drawn, 9)) == set(np.round(halves, 9))
    assert drawn.mean() == pytest.approx(np.mean(halves), abs=5 * np.std(halves) / math.sqrt(len(drawn)))
    assert drawn.std() == pytest.approx(np.std(halves), rel=0.1)
    np.testing.assert_allclose(subsampled_means(values, 3, 1.0, np.random.default_rng(0)), values.sum() / 3)
    with pytest.raises(ValueError, match="share"):
        subsampled_means([], 1, 0.5, np.random.default_rng(0))


def sampled(k1: float, exact: float, draws: list[float], **more):
    logged = {"k1": k1, "exact": exact, "draws": [{"share": 0.25, "k1": draws}, {"share": 0.5, "k1": "torn"}]}
    return {"radius": 0.01, "probe": {"token_shift": {"sampled_kl": logged}}, **more}


def test_reliability_of_subsampled_kl_by_hand():
    updates = [
        sampled(0.009, 0.006, [0.008, 0.011]),  # near: one of two flips, and lies on the other side of the exact KL
        sampled(0.005, 0.012, [0.005, 0.006]),  # far; all of its draws are below the radius, the exact KL is not
        sampled(0.009, 0.006, [9.0], unit="token"),
        {"radius": 0.01, "probe": None},
    ]
    (found,) = subsample_reliability(updates)
    assert (found.share, found.updates, found.near_updates) == (0.25, 2, 1)
    assert found.median_in_radii == pytest.approx(0.1)  # of 0.1, 0.2, 0, 0.1
    assert found.p90_in_radii == pytest.approx(0.17)
    assert found.near_flip_rate == pytest.approx(1 / 2)
    assert found.exact_flip_rate == pytest.approx(3 / 4)
    assert subsample_reliability([]) == ()


def test_statements_are_read_out_of_messages():
    long = "I have thought about it for a long time, and after all of that "
    assert statement(long + "the answer is \\boxed{\\frac{1}{2}}, not \\boxed{ X }") == "x"
    assert statement(long + "\\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert statement(long + "I count 1,234 or rather -7.0 of them.") == "-7"
    assert statement(long + "nobody knows") == ""
    assert statement("  Twelve   Sheep ") == "twelve sheep"


def test_forms_of_contexts():
    def heard(*texts: str) -> Heard:
        return Heard("p", "|".join(texts).encode(), tuple(zip("abc", texts, strict=False)))

    long = "Some words that nobody will ever say again: "
    first, second = heard(long + "7", "8", "7"), heard(long[::-1] + " 7", "8", "7")
    assert FORMS["identity"](first) != FORMS["identity"](second)
    assert FORMS["statements"](first) == FORMS["statements"](second) == ("p", (("a", "7"), ("b", "8"), ("c", "7")))
    assert (
        FORMS["agreement"](first) == FORMS["agreement"](heard("x", "y", "x")) == ("p", (("a", 0), ("b", 1), ("c", 0)))
    )
    assert FORMS["agreement"](first) != FORMS["agreement"](heard("x", "y", "y"))
    assert finest_repeating([("identity", 0.1), ("statements", 0.7), ("agreement", 1.0)]) == "statements"
    assert finest_repeating([("identity", 0.1)]) is None


def test_a_blind_agent_has_heard_nothing_of_its_round():
    batch = made_batch(("left", "right"), problems=1, group=2, environment=True)
    seeing, blind = (heard_by(Agent("right", "", sees=sees), batch) for sees in (Everything(), Blind()))
    assert [[author for author, _ in heard.said] for heard in seeing] == [["world", "left"]] * 2
    assert [[author for author, _ in heard.said] for heard in blind] == [["world"]] * 2
    assert seeing[0].context == batch.episodes[0].turns[1].context_ids.tobytes()


def test_which_updates_were_stale_by_the_log():
    """Two stages of three updates. The first samples once; in the second its first update changed nothing."""
    versions = [("a", "b"), ("a", "b"), ("a", "b"), ("b", "b"), ("b", "c"), ("b", "c")]
    totals = [100, 100, 100, 200, 200, 200]
    updates = [
        {
            **certified(k + 1, 0.5, -1.0, exact_success=[0.0, 0.1]),
            "step": k % 3,
            "outcome": "accepted" if before != after else "restored",
            "version_before": before,
            "version_after": after,
            "sampled_tokens_total": total,
        }
        for k, ((before, after), total) in enumerate(zip(versions, totals, strict=True))
    ]
    assert stale_updates(updates) == {2, 3, 6}
    found = certificate_tracking(updates)["turn_aware"]
    assert found.updates == (1, 4, 5)
    assert (found.violations, found.not_applicable) == (3, 3)
    fresh = [{**u, "sampled_tokens_total": 100 * (k + 1)} for k, u in enumerate(updates)]
    assert stale_updates(fresh) == frozenset()
    assert stale_updates([{**u, "sampled_tokens_total": None} for u in updates]) == frozenset()  # not known
    fresh[1]["rollouts"] = {"action": "redraw"}
    assert stale_updates(fresh) == {2}  # tokens were sampled, and yet it is no batch of the team as it was


def evaluation(stage: int, success_P: list[float], *, ids: str = "pqrs") -> dict:
    mean = float(np.mean(success_P))
    return {"stage": stage, "avg_at_k": mean, "samples": 5, "success_P": success_P, "problem_ids": list(ids)}


def test_stability_is_the_deviation_of_improvements_on_the_same_problems():
    updates = [{"stage": s, "step": 0, "update": s, "reward": 0.1 * s, "outcome": "accepted"} for s in range(3)]
    updates[1]["measured_before"] = measured(0, -0.02)  # wholly below zero
    updates[2]["measured_before"] = measured(1, -0.005)
    evals = [evaluation(0, [0, 0.4, 0, 0]), evaluation(2, [0.2, 0.4, 0.4, 0.2]), evaluation(4, [0.4, 0.4, 0.4, 0.4])]
    found = stability(updates, evals)
    assert found.stages == (2, 4)
    assert found.improvements == pytest.approx((0.2, 0.1))
    assert found.deviation == pytest.approx(np.std([0.2, 0.1], ddof=1))
    # p (1 - p) / (K - 1) / P^2 summed over problems. Of improvements b - a and c - b half the square of c - 2 b + a.
    first, second, third = 0.24 / 64, (2 * 0.16 + 2 * 0.24) / 64, 4 * 0.24 / 64
    assert found.noise == pytest.approx(np.sqrt((first + 4 * second + third) / 2))
    assert found.worst == pytest.approx(0.1)
    assert (found.judged, found.regressing) == (2, 1)
    assert stability(updates, evals[:2]).deviation is None
    assert stability(updates, [evals[0], evaluation(2, [1, 1, 1, 1], ids="wxyz")]).improvements == ()


@pytest.mark.parametrize("count", [3, 5])
def test_what_sampling_alone_would_show_is_the_spread_of_few_improvements(count):
    """Over many short runs of an untrained team, mean squares within four standard errors."""
    rng = np.random.default_rng(0)
    hard_P, ids = rng.uniform(size=16), [str(k) for k in range(16)]

    def squares() -> tuple[float, float]:
        drawn = [(rng.binomial(4, hard_P) / 4).tolist() for _ in range(count)]
        found = stability([], [{**evaluation(s, p), "samples": 4, "problem_ids": ids} for s, p in enumerate(drawn)])
        return found.deviation**2, found.noise**2

    apart = np.array([seen - expected for seen, expected in (squares() for _ in range(1500))])
    assert abs(apart.mean()) < 4 * apart.std() / np.sqrt(len(apart))


def test_an_untrained_team_is_as_steady_as_sampling():
    """The rewards of training batches differ by their problems, by far more than an untrained team changes."""
    rng = np.random.default_rng(0)
    hard_P = rng.uniform(size=64)
    updates = [{"stage": s, "step": 0, "update": s, "reward": rng.choice(hard_P, 8).mean()} for s in range(200)]
    ids = [str(k) for k in range(64)]
    evals = [
        {**evaluation(s, (rng.binomial(4, hard_P) / 4).tolist()), "samples": 4, "problem_ids": ids} for s in range(200)
    ]
    found = stability(updates, evals)
    batches = np.std(np.diff([u["reward"] for u in updates]), ddof=1)
    assert found.deviation == pytest.approx(found.noise, rel=0.2)
    assert found.deviation < 0.4 * batches


def test_coordination_skips_what_was_not_recorded():
    evals = [
        {"stage": 0, "avg_at_k": 0.5, "consensus_on_correct": 0.3},
        {"stage": 1, "avg_at_k": 0.6, "consensus_on_correct": None},
    ]
    (found,) = coordination(evals)
    assert (found.stage, found.success, found.consensus) == (0, 0.5, 0.3)
    assert found.alone == pytest.approx(0.2)


def test_order_sensitivity_against_the_spread_of_runs():
    found = order_sensitivity({"a > b": [0.8, 0.9], "b > a": [0.6, 0.6]})
    assert found.means == {"a > b": pytest.approx(0.85), "b > a": 0.6}
    assert found.spread == pytest.approx(0.25)
    assert found.within == pytest.approx(math.sqrt(0.005 / 2))
    assert order_sensitivity({"a": [0.1], "b": [0.3]}).within is None
    with pytest.raises(ValueError, match="at least one"):
        order_sensitivity({"a": []})


def test_order_of_a_run():
    stage = [{"stage": 0, "step": 1, "agent": "b"}, {"stage": 0, "step": 0, "agent": "a"}]
    assert order_of(stage) == "a > b"
    assert order_of([*stage, {"stage": 1, "step": 0, "agent": "a"}]) == "a > b"  # an unfinished stage says nothing
    assert order_of([*stage, *({**u, "stage": 1, "step": 1 - u["step"]} for u in stage)]) == "varies"
    assert order_of([]) == "unknown"


def test_overhead_against_one_batch_a_stage():
    totals = [100, 200, 300, 420, 520]
    updates = [{"step": s, "sampled_tokens_total": t} for s, t in zip([0, 1, 2, 0, 1], totals, strict=True)]
    assert sampled_by_update(updates) == [100, 100, 100, 120, 100]
    found = overhead(updates, {"a": {"sample": 26.0, "train": 10.0}, "team": {"grade": 4.0}})
    assert (found.sampled_tokens, found.naive_tokens) == (520, 220)
    assert found.token_ratio == pytest.approx(520 / 220)
    assert found.seconds == 40.0
    assert found.naive_seconds == pytest.approx(40.0 - 26.0 * (1 - 220 / 520))
    assert overhead(updates).seconds_ratio is None
    assert overhead([]).token_ratio is None
    numbered = [{**update, "update": k + 1} for k, update in enumerate(updates)]
    assert sampled_by_update(numbered) == [100, 100, 100, 120, 100]
    assert sampled_by_update(numbered[1:]) == [0, 100, 120, 100], "how much was sampled before a lost line is not known"


def test_spent_by_agent_adds_up():
    updates = [
        {"agent": "a", "seconds": {"train": 1.0, "gate": 0.5}},
        {"agent": "b", "seconds": {"train": 2.0}},
        {"agent": "a", "seconds": {"train": 3.0, "newer": "text"}},
        {"agent": "a"},
    ]
    assert spent_by_agent(updates, "seconds") == {"a": {"train": 4.0, "gate": 0.5, "newer": 0.0}, "b": {"train": 2.0}}


def test_context_drift_by_hand_and_by_chance():
    rng = np.random.default_rng(0)
    moved = context_drift(["x"] * 3 + ["y"], ["y"] * 4, rng=rng)
    assert moved.total_variation == pytest.approx(0.75)
    assert moved.corrected == pytest.approx(math.sqrt(0.75**2 - moved.chance**2))
    assert moved.repeated == 1.0
    same = context_drift(list("aabb") * 50, list("abab") * 50, rng=rng)
    assert same.total_variation == 0.0
    assert same.excess == 0.0
    free = context_drift([f"{k}" for k in range(40)], [f"{k}!" for k in range(40)], rng=rng)
    assert (free.total_variation, free.repeated) == (pytest.approx(1.0), 0.0)
    assert free.excess == pytest.approx(0.0)  # nothing repeats, so chance explains everything


def test_chance_stays_within_a_problem():
    """Contexts that name their problem: two batches of one law differ little, and chance must know that."""
    rng = np.random.default_rng(2)
    problems = np.repeat(np.arange(32), 16)

    def contexts(p: float) -> list[tuple[int, int]]:
        return [(int(k), int(c)) for k, c in zip(problems, rng.random(len(problems)) < p, strict=True)]

    strata = (problems.tolist(), problems.tolist())
    blind = context_drift(contexts(0.5), contexts(0.5), rng=rng)
    same = context_drift(contexts(0.5), contexts(0.5), rng=rng, strata=strata)
    moved = context_drift(contexts(0.5), contexts(0.7), rng=rng, strata=strata)
    assert blind.chance > 1.2 * same.chance  # shuffling over problems exaggerates chance
    assert same.total_variation == pytest.approx(same.chance, abs=0.05)
    assert moved.excess > 0.05
    with pytest.raises(ValueError, match="its problem"):
        context_drift(["a"], ["b"], rng=rng, strata=(["p"], []))


def test_context_drift_finds_the_true_distance():
    """Two laws 0.3 apart, many samples: total variation within sampling error of the truth, far above chance."""
    rng = np.random.default_rng(1)
    before, after = rng.choice(4, 20_000, p=[0.4, 0.3, 0.2, 0.1]), rng.choice(4, 20_000, p=[0.1, 0.3, 0.2, 0.4])
    found = context_drift(before.tolist(), after.tolist(), rng=rng, draws=20)
    assert found.total_variation == pytest.approx(0.3, abs=0.015)
    assert found.chance < 0.02


def test_probes_are_read_back():
    shift = {"before_R": [0.6, 0.3, 0.1], "after_R": [0.7, 0.2, 0.1], "moved_R": [0.1, 0.2, 0.0], "flipped": 0.25}
    place = {"update": 2, "stage": 0, "step": 1, "agent": "b"}
    updates = [
        {"update": 1, "stage": 0, "step": 0, "agent": "a", "probe": {"token_shift": shift}},
        {**place, "probe": {"gap": gap_record(0.2), "weights": {"effective_share": 0.8, "newer": "x"}}},
        {**place, "update": 3, "step": 2, "probe": {"gap": gap_record(-0.1), "token_shift": {"before_R": [1]}}},
        {**place, "update": 5, "step": 3, "probe": {"fresh": 0.3, "stale": 0.1, "gap": 0.2}},  # an older log
        {**place, "update": 4, "probe": None},
        {**place, "update": None, "probe": {"fresh": 0.3, "stale": 0.1}},
    ]
    first, second, third, older = probed(updates)
    assert first.gap is None
    assert first.shift is not None
    assert first.shift["flipped"] == 0.25
    assert second.gap is not None
    assert (second.gap.estimate, second.gap.error) == (0.2, pytest.approx(0.01, rel=1e-3))
    assert older.gap is None, "it counted the optimism of the update's own batch"
    assert second.weights == {"effective_share": 0.8}
    assert third.shift is None
    assert first.shift["stretched"] is None
    longer = {"times": 3.0, "kl": 0.5, "moved_R": [1.0, 2.0, 0.1], "flipped": 0.5}
    tokens = [{"episode": 4, "turn": 1, "kl": [0.1, 0.2]}, {"episode": 5, "turn": 1, "kl": [None]}, "torn"]
    more = {**shift, "stretched": longer, "sampled_kl": {"tokens": tokens}}
    (read,) = probed([{**place, "probe": {"token_shift": more}}])
    assert read.shift is not None
    assert read.shift["stretched"] == longer
    assert token_kls([{**place, "probe": {"token_shift": more}}]) == {(0, 1): {(4, 1): [0.1, 0.2]}}
    (delta,) = stale_gap_by_stage((first, second, third, older)).values()
    assert delta.total == pytest.approx(0.3)
    assert delta.noise == pytest.approx(2 * 0.01 * np.sqrt(2 / np.pi), rel=1e-3)


def test_zeta_proxy_by_hand():
    terms = {"surrogate": 0.1, "occupancy": -3.0, "estimation": -1.0}
    kept = {"outcome": "accepted", "zeta_norm": 0.1, "zeta_clip": 0.2, "zeta_ratio": 0.0}
    kept["certificates"] = [{"kind": "single_step", "terms": terms}]
    found = zeta_proxy([kept, {"outcome": "accepted", "zeta_norm": 0.1}, {"outcome": "restored", "zeta_norm": 9.0}])
    assert found is not None
    assert found.updates == 2
    assert found.proxy.mean == found.proxy.p50 == pytest.approx(0.2)
    assert found.proxy.p90 == pytest.approx(0.28)
    assert (found.zeta_norm.mean, found.zeta_clip.mean, found.zeta_clip.p90) == pytest.approx((0.1, 0.1, 0.18))
    assert found.penalty_share is not None
    assert found.penalty_share.mean == pytest.approx(0.25)
    staged = [{**kept, "stage": s, "zeta_clip": 0.2 * s} for s in (0, 0, 1)]
    table = zeta_proxy(staged)
    assert table is not None
    assert (table.per_stage.mean, table.per_stage.p50) == pytest.approx((0.25, 0.25)), "0.1 + 0.1, and 0.1 + 0.2"
    assert zeta_proxy([]) is None


def test_a_whole_number_beyond_any_float_is_no_number():
    assert number({"x": 10**400}, "x") is None
