"""Every diagnostic on a tabular run against the exact value: equal where both look at the same episodes, within its
interval where it estimates something of the team itself.

The truth comes from ``theory.tabular`` by enumeration of all conversations, never from the function under test. Bounds
of intervals are five standard errors, themselves exact, so that a test fails by chance about once in a million times.
``docs/report.md`` says which figures have no tabular truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
from scipy import stats

from tabular_run import (
    A_CLIP,
    EPISODES,
    GROUP,
    PROBLEMS,
    SPACE,
    TARGETS,
    TabularRun,
    histories,
    tabular_run,
    texts_of,
)
from tabular_truth import GateCheck, return_error, seen, variance, weights_of
from teamtr.analysis.diagnostics.accounting import overhead
from teamtr.analysis.diagnostics.coordination import coordination
from teamtr.analysis.diagnostics.kl_reliability import kl_reliability
from teamtr.analysis.diagnostics.order import order_sensitivity
from teamtr.analysis.diagnostics.probes import probed, stale_gap_by_stage, token_kls
from teamtr.analysis.diagnostics.reuse import decisions, tokens_by_choice
from teamtr.analysis.diagnostics.stability import stability
from teamtr.analysis.diagnostics.subsampling import subsample_reliability
from teamtr.analysis.diagnostics.tracking import certificate_tracking, gains, stale_updates
from teamtr.analysis.diagnostics.zeta import zeta_proxy
from teamtr.analysis.report import build_report
from teamtr.theory.tabular import EpisodicTeam, kl, log_softmax
from teamtr.training.probe import STRETCH
from teamtr.types import Floats

ERRORS = 5.0


@dataclass(frozen=True)
class Row:
    """``value`` is what the diagnostic says; the truth allows it ``low`` to ``high``."""

    what: str
    value: float
    low: float
    high: float


def same(what: str, value: float, truth: float, tolerance: float = 1e-7) -> Row:
    slack = tolerance * max(abs(truth), 1e-3)
    return Row(what, value, truth - slack, truth + slack)


def near(what: str, value: float, truth: float, error: float) -> Row:
    return Row(what, value, truth - ERRORS * error, truth + ERRORS * error)


@dataclass(frozen=True)
class Runs:
    """``main`` is fresh, ``reverse`` in the other order, ``naive`` reuses its rollouts."""

    main: TabularRun
    reverse: TabularRun
    naive: TabularRun

    @cached_property
    def report(self) -> dict:
        return dict(build_report(self.main.folder, most_batches=100).data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("tabular")
    return Runs(
        main=tabular_run(folder / "main", stages=3),
        reverse=tabular_run(folder / "reverse", preset="reverse_order", stages=1),
        naive=tabular_run(folder / "naive", preset="naive_sequential", stages=1),
    )


# -- the table ---------------------------------------------------------------------------------------------------


def exact_kl(runs: Runs) -> Iterator[Row]:
    """The gate's KL, k1 and k3 on the batch; and k1 as an estimate of the KL at the same contexts."""
    for s in seen(runs.main):
        number = s.update["update"]
        context, word = s.numbers(s.update["step"])
        ratio = s.log_ratio(s.update["step"])
        yield same(f"kl_full {number}", s.update["kl_full"], SPACE.per_message(s.token_kl)[context, word].mean())
        yield same(f"kl_k1 {number}", s.update["kl_k1"], -ratio.mean())
        old, new = (team.token_logp[s.agent][0] for team in (s.step.old, s.step.new))
        k3 = np.expm1(new - old) - (new - old)
        own = SPACE.path_AKV[word]
        yield same(f"kl_k3 {number}", s.update["kl_k3"], (own * k3[context]).sum() / len(word))
        law, logs = s.step.old.policies[s.agent][0], (s.step.new.logp[s.agent] - s.step.old.logp[s.agent])[0]
        spread = np.array([variance(law[h], logs[h]) for h in range(len(law))])
        yield near(
            f"k1 of the KL {number}",
            s.update["kl_k1"],
            s.step.kl[s.agent][0][context].mean(),
            np.sqrt(spread[context].sum()) / len(context),
        )


def sampled_against_exact(runs: Runs) -> Iterator[Row]:
    """Bias, error and flips over updates, from enumerated figures."""
    truth = []
    for s in seen(runs.main):
        context, word = s.numbers(s.update["step"])
        exact, ratio = SPACE.per_message(s.token_kl)[context, word].mean(), s.log_ratio(s.update["step"])
        truth.append((-ratio.mean() - exact) / 0.05)
        assert abs(exact - 0.05) > 1e-6
    k1 = kl_reliability(runs.main.updates)[0]
    yield same("bias", k1.bias_in_radii, np.mean(truth))
    yield same("error", k1.rmse_in_radii, np.sqrt(np.mean(np.square(truth))))
    yield same("updates", k1.updates, len(truth))


def subsampled_kl(runs: Runs) -> Iterator[Row]:
    """Estimates from some of the positions: their whole, their exact mean, and their exact spread."""
    drawn = {0.25: [], 0.5: []}
    for s in seen(runs.main):
        logged = s.update["probe"]["token_shift"]["sampled_kl"]
        old, new = (team.token_logp[s.agent][0] for team in (s.step.old, s.step.new))
        values = np.array([(old - new)[place] for place in s.positions])
        number, messages = s.update["update"], logged["messages"]
        yield same(f"k1 of all positions {number}", logged["k1"], values.sum() / messages)
        exact = sum(s.token_kl[h, k] for h, k, _ in s.positions) / messages
        yield same(f"exact KL of the probed messages {number}", logged["exact"], exact)
        for draws in logged["draws"]:
            n = round(draws["share"] * len(values))
            error = len(values) / messages * np.sqrt(values.var(ddof=1) / n * (1 - n / len(values)))
            drawn[draws["share"]] += [(x - logged["k1"]) / error for x in draws["k1"]]
        shown = token_kls([s.update])[s.update["stage"], s.update["step"]]
        logged_values = np.concatenate(list(shown.values()))
        by_position = np.array([s.token_kl[h, k] for h, k, _ in s.positions])
        gap = np.abs(logged_values - by_position).max()
        yield Row(f"KL by position {number}", gap, 0.0, 1e-3 * by_position.max())
    for share, deviations in drawn.items():
        yield near(f"mean of draws {share}", float(np.mean(deviations)), 0.0, 1 / np.sqrt(len(deviations)))
        yield near(f"spread of draws {share}", float(np.var(deviations)), 1.0, np.sqrt(2 / len(deviations)))
    found = {k.share: k for k in subsample_reliability(runs.main.updates)}
    yield same("probed updates", found[0.25].updates, len(runs.main.updates))
    assert found[0.25].median_in_radii > found[0.5].median_in_radii > 0


def stale_gap(runs: Runs) -> Iterator[Row]:
    """Surrogates of a step under the team before it and under the team that began the stage, by endless rollouts: in a
    plan that samples anew and in one that reuses, whose own batch can tell neither."""
    for run in (runs.main, runs.naive):
        total: dict[int, float] = {}
        for s, p in zip(seen(run), probed(run.updates), strict=True):
            if s.update["step"] == 0:
                assert p.gap is None
                continue
            assert p.gap is not None
            number, stage = f"{s.update['update']} of {run.folder.name}", s.update["stage"]
            exact, errors = {}, {}
            for which, team in (("fresh", s.step.old), ("stale", run.stage_start(s.update))):
                law, moved = team.visits[3][0], _moved(s, team)
                # A group of G has its own mean and deviation: a part of 1/G of the whole. Clipping takes some more.
                errors[which] = np.sqrt(variance(law, moved) / EPISODES) + abs(law @ moved) / GROUP / ERRORS
                exact[which] = float(law @ moved)
                yield near(f"{which} surrogate {number}", getattr(p, which), exact[which], errors[which])
            yield same(f"gap {number}", p.gap.estimate, p.fresh - p.stale)
            error = np.hypot(errors["fresh"], errors["stale"])
            yield near(f"gap of the teams {number}", p.gap.estimate, exact["fresh"] - exact["stale"], error)
            yield Row(f"standard error {number}", p.gap.error, 0.3 * error, 3 * error)
            total[stage] = total.get(stage, 0.0) + abs(p.fresh - p.stale)
        for stage, gap in stale_gap_by_stage(probed(run.updates)).items():
            yield same(f"Delta_stale of stage {stage}", gap.total, total[stage])


def _moved(s: GateCheck, team: EpisodicTeam) -> Floats:
    """(w - 1) times the advantage in endless groups of this team's rollouts, by conversation."""
    law, rewards = team.visits[3][0], team.reward_BN[0]
    value = np.zeros(len(law))
    for x in range(3):
        own = np.arange(len(law)) // SPACE.size**3 == x
        mean = law[own] @ rewards[own] / law[own].sum()
        value[own] = (rewards[own] - mean) / np.sqrt(law[own] @ (rewards[own] - mean) ** 2 / law[own].sum())
    contexts = np.arange(len(law)) // SPACE.size ** (3 - s.agent)
    words = np.arange(len(law)) // SPACE.size ** (2 - s.agent) % SPACE.size
    ratio = np.expm1((s.step.new.logp[s.agent] - s.step.old.logp[s.agent])[0][contexts, words])
    return ratio * np.clip(value, -A_CLIP, A_CLIP)


def importance_weights(runs: Runs) -> Iterator[Row]:
    """ESS/B, quantiles, tail, and D_occ by weights, against the law of the weights over all conversations."""
    for s, p in zip(seen(runs.main), probed(runs.main.updates), strict=True):
        if s.update["step"] == 0:
            continue
        number, n = s.update["update"], EPISODES
        law, w = weights_of(s.run.stage_start(s.update), s.step.old)
        second = law @ w**2
        gradient = np.array([2 / second, -1 / second**2])
        spread = gradient @ np.cov(np.stack([w, w**2]), aweights=law, ddof=0) @ gradient
        yield near(f"ESS/B {number}", p.weights["effective_share"], 1 / second, np.sqrt(spread / n))
        for name, q in (("p95", 0.95), ("p99", 0.99)):
            error, found = np.sqrt(q * (1 - q) / n), p.weights[name]
            yield Row(f"{name} {number}: below", law @ (w < found - 1e-9), 0.0, q + ERRORS * error)
            yield Row(f"{name} {number}: up to", law @ (w <= found + 1e-3), q - ERRORS * error, 1.0 + 1e-9)
        yield Row(f"largest {number}", p.weights["largest"], p.weights["p99"] * (1 - 1e-9), w.max() * (1 + 1e-9))
        tail = law @ (w > 10.0)
        yield near(f"above ten {number}", p.weights["above_ten"], tail, np.sqrt(tail * (1 - tail) / n) + 1e-12)
        moved = 0.5 * law @ np.abs(w - 1)
        lost = np.maximum(1 - w, 0.0)
        yield near(f"D_occ by weights {number}", p.weights["total_variation"], moved, np.sqrt(variance(law, lost) / n))
        yield near(f"its error {number}", p.weights["total_variation_error"], np.sqrt(variance(law, lost) / n), 2e-4)
        heard = [
            0.5 * np.abs(a - b).sum()
            for a, b in zip(s.step.old.visits, s.run.stage_start(s.update).visits, strict=True)
        ]
        assert heard[s.agent] <= moved + 1e-12  # no context moves more than whole conversations


def _agreement(history: int, turns: int) -> tuple:
    """By hand: the problem, and for each thing said the first place of the same."""
    letter, said = texts_of(history, turns)
    return (letter, *(said.index(text) for text in said))


def _played(rng: np.random.Generator, law: Floats, problems: int) -> Floats:
    """Shares of contexts in a batch, drawn from the exact law, which has as many problems of each letter; these are
    told apart, ``problems`` of them, or with 1 they are not."""
    by_letter = law.reshape(3, -1)
    by_letter = by_letter / by_letter.sum(1, keepdims=True)  # times three, a sure one could be above 1 by rounding
    drawn = [rng.multinomial(EPISODES // 3 // problems, by_letter[x], size=problems).ravel() for x in range(3)]
    return np.concatenate(drawn) / EPISODES


def occupancy_drift(runs: Runs) -> Iterator[Row]:
    """D_occ by counting contexts in each form: total variation as batches drawn from the exact laws have it, the truth
    between what chance leaves and all of it."""
    rng = np.random.default_rng(0)
    drifts = {(s["stage"], s["step"]): s["drifts"] for s in runs.report["staleness"]}
    for s in seen(runs.main):
        found = drifts.get((s.update["stage"], s.update["step"]))
        if found is None:
            assert s.update["step"] == 0
            continue
        laws = [team.visits[s.agent][0] for team in (s.run.stage_start(s.update), s.step.old)]
        kinds: dict[tuple, int] = {}
        kind = [kinds.setdefault(_agreement(history, s.agent), len(kinds)) for history in range(len(laws[0]))]
        coarse = [np.bincount(kind, weights=law) for law in laws]
        for form, pair, problems in (
            ("identity", laws, 1),
            ("statements", laws, PROBLEMS // 3),
            ("agreement", coarse, PROBLEMS // 3),
        ):
            drift, truth = found[form], 0.5 * np.abs(pair[0] - pair[1]).sum()
            drawn = [
                0.5 * np.abs(np.subtract(*(_played(rng, law, problems) for law in pair))).sum() for _ in range(200)
            ]
            label, error = f"D_occ by {form}, update {s.update['update']}", np.std(drawn) + 1e-9
            yield near(label, drift["total_variation"], np.mean(drawn), error)
            yield Row(f"{label}: at least", drift["excess"], -1e-9, truth + ERRORS * error)
            yield Row(f"{label}: at most", drift["total_variation"], truth - ERRORS * error, 1.0 + 1e-9)
        assert np.abs(np.subtract(*coarse)).sum() <= np.abs(np.subtract(*laws)).sum() + 1e-12
    estimates = [drifts[u["stage"], u["step"]]["identity"]["corrected"] for u in runs.main.updates if u["step"]]
    steps = [s for s in seen(runs.main) if s.update["step"]]
    pairs = [(s.run.stage_start(s.update).visits[s.agent][0], s.step.old.visits[s.agent][0]) for s in steps]
    exact = [0.5 * np.abs(before - after).sum() for before, after in pairs]
    yield Row("D_occ by identity, corrected for chance", sum(estimates), 0.6 * sum(exact), 1.4 * sum(exact))


def zeta(runs: Runs) -> Iterator[Row]:
    """The parts that clipping makes, exactly; the part of group moments beside the true error of the moments."""
    sums, guessed, true = [], [], []
    for s in seen(runs.main):
        number, step = s.update["update"], s.update["step"]
        raw, clipped = s.advantages(step)
        w = np.exp(s.log_ratio(step))
        ratio = (np.abs(clipped) * np.abs(w - np.clip(w, 0.8, 1.2))).mean()
        yield same(f"zeta_clip {number}", s.update["zeta_clip"], np.abs(raw - clipped).mean())
        yield same(f"zeta_ratio {number}", s.update["zeta_ratio"], ratio)
        sums.append(s.update["zeta_norm"] + np.abs(raw - clipped).mean() + ratio)
        law, rewards = s.step.old.visits[3][0], s.step.old.reward_BN[0]
        batch = s.run.batch(s.update["stage"], step)
        own = np.arange(len(law)) // SPACE.size**3
        means = np.array([law[own == x] @ rewards[own == x] * 3 for x in range(3)])
        deviations = np.sqrt([law[own == x] @ (rewards[own == x] - means[x]) ** 2 * 3 for x in range(3)])
        problem = np.array(["abc".index(p.prompt) for p in batch.problems])[:, None]
        ideal = (batch.returns_PG(1.0) - means[problem]) / deviations[problem]
        true.append(np.abs(np.clip(ideal, -A_CLIP, A_CLIP).ravel() - clipped).mean())
        guessed.append(s.update["zeta_norm"])
    found = zeta_proxy(runs.main.updates)
    yield same("mean", found.proxy.mean, np.mean(sums))
    yield same("median", found.proxy.p50, np.median(sums))
    yield same("P90", found.proxy.p90, np.quantile(sums, 0.9))
    yield same("per stage", found.per_stage.mean, 3 * np.mean(sums))
    terms = [next(c["terms"] for c in u["certificates"] if c["kind"] == "single_step") for u in runs.main.updates]
    estimation, occupancy = (np.array([t[key] for t in terms]).reshape(3, 3) for key in ("estimation", "occupancy"))
    shares = estimation.sum(axis=1) / (estimation + occupancy).sum(axis=1)
    yield same("share of the penalty", found.penalty_share.mean, np.mean(shares))
    yield Row("zeta_norm over the true error of moments", np.mean(guessed) / np.mean(true), 0.75, 1.33)


def clip_rates(runs: Runs) -> Iterator[Row]:
    """Of advantages, exactly. That of ratios is taken along the optimiser's path and has no tabular truth."""
    for s in seen(runs.main):
        raw, clipped = s.advantages(s.update["step"])
        told = np.abs(raw).reshape(PROBLEMS, -1).any(axis=1).repeat(GROUP)
        rate = (raw != clipped)[told].mean()
        yield same(f"advantages {s.update['update']}", s.update["advantage_clip_rate"], rate)
        yield Row(f"ratios {s.update['update']}", s.update["ratio_clip_rate"], 0.0, 1.0)


def steadiness(runs: Runs) -> Iterator[Row]:
    starts = [runs.main.teams[3 * stage] for stage in range(4)]
    found = stability(runs.main.updates, runs.main.evals)
    ends = [texts_of(h, 3) for h in range(3 * SPACE.size**3)]
    right = np.array([said[-1].startswith(TARGETS[x]) for x, said in ends])
    rates = [[3 * team.visits[3][0][own] @ right[own] for own in _by_problem()] for team in starts]
    truth = np.diff(np.mean(rates, axis=1))
    errors = [np.sqrt(np.mean([p * (1 - p) for p in rate]) / EPISODES) for rate in rates]
    error = np.sqrt(2) * max(errors)
    squares = np.square(errors)
    noise = np.sqrt((squares[:-1].sum() + squares[1:].sum() - (squares[0] + squares[-1]) / 3) / 2)
    yield Row("noise", found.noise, 0.8 * noise, 1.2 * noise)
    for k, improvement in enumerate(found.improvements):
        yield near(f"improvement {k}", improvement, truth[k], error)
    yield near("deviation", found.deviation, np.std(truth, ddof=1), np.sqrt(2) * error)
    yield same("judged", found.judged, 6)
    regressing = [float(s.step.gain_B[0]) for s in seen(runs.main)]
    assert min(regressing) > 0
    yield same("regressing", found.regressing, 0)


def _by_problem() -> list[Floats]:
    """The conversations of each of the three kinds of problems."""
    return [np.arange(3 * SPACE.size**3) // SPACE.size**3 == x for x in range(3)]


def _right(texts: list[str], target: str) -> bool:
    stated = [text for text in texts if text]
    return bool(stated) and all(text.startswith(target) for text in stated)


def agreement_on_correct(runs: Runs) -> Iterator[Row]:
    for record, team in ((runs.main.evals[0], runs.main.teams[0]), (runs.main.evals[-1], runs.main.teams[-1])):
        (found,) = coordination([record])
        ends = [texts_of(h, 3) for h in range(3 * SPACE.size**3)]
        consensus = team.visits[3][0] @ np.array([_right(said, TARGETS[x]) for x, said in ends])
        success = team.visits[3][0] @ np.array([said[-1].startswith(TARGETS[x]) for x, said in ends])
        for what, value, truth in (("consensus", found.consensus, consensus), ("success", found.success, success)):
            yield near(f"{what}, stage {record['stage']}", value, truth, np.sqrt(truth * (1 - truth) / EPISODES))
        alone = success - consensus
        yield near(f"alone, stage {record['stage']}", found.alone, alone, 2 * np.sqrt(0.25 / EPISODES))


def order_of_updates(runs: Runs) -> Iterator[Row]:
    chosen = {"a1 > a2 > a3": runs.main, "a3 > a2 > a1": runs.reverse}
    found = order_sensitivity({order: [run.evals[-1]["avg_at_k"]] for order, run in chosen.items()})
    ends = [texts_of(h, 3) for h in range(3 * SPACE.size**3)]
    right = np.array([said[-1].startswith(TARGETS[x]) for x, said in ends])
    truth = {order: float(run.teams[-1].visits[3][0] @ right) for order, run in chosen.items()}
    yield near("spread", found.spread, max(truth.values()) - min(truth.values()), np.sqrt(2 * 0.25 / EPISODES))
    assert {u["agent"]: u["step"] for u in runs.reverse.updates} == {"a3": 0, "a2": 1, "a1": 2}


def token_shift(runs: Runs) -> Iterator[Row]:
    """By rank, at the same positions, for the step that was kept and for one three times as long."""
    for s in seen(runs.main):
        logged, number = s.update["probe"]["token_shift"], s.update["update"]
        places = np.array([(h, k) for h, k, _ in s.positions])
        logits = [s.run.logits[number - 1][s.agent], s.run.logits[number][s.agent]]
        logits.append(logits[0] + STRETCH * (logits[1] - logits[0]))
        old, new, longer = (log_softmax(x[places[:, 0], places[:, 1]]) for x in logits)
        ranks = np.argsort(-old, axis=1, kind="stable")
        for what, values, told in (
            ("before", np.exp(old), logged["before_R"]),
            ("after", np.exp(new), logged["after_R"]),
            ("moved", np.abs(new - old), logged["moved_R"]),
            ("moved when longer", np.abs(longer - old), logged["stretched"]["moved_R"]),
        ):
            truth = np.take_along_axis(values, ranks, axis=1).mean(axis=0)
            for r in range(3):
                yield same(f"{what} {number}, rank {r + 1}", told[r], truth[r], 1e-6)
        yield same(f"flipped {number}", logged["flipped"], (new.argmax(1) != old.argmax(1)).mean())
        exact = kl(old, longer).sum() / logged["sampled_kl"]["messages"]
        yield same(f"KL when longer {number}", logged["stretched"]["kl"], exact)


def mismatch(runs: Runs) -> Iterator[Row]:
    """One engine: nothing but the rounding of the sampler's float32."""
    for update in runs.main.updates:
        for key in ("mismatch_sampler", "mismatch_median", "mismatch_largest", "mismatch_per_message"):
            yield Row(f"{key} {update['update']}", update[key], 0.0, 1e-6)


def certificates(runs: Runs) -> Iterator[Row]:
    """Measured gains cover the exact ones; violations and rank correlation are those of the exact gains."""
    exact = {s.update["update"]: float(s.step.gain_B[0]) for s in seen(runs.main)}
    measured = gains(runs.main.updates)
    covered = sum(gain.lower <= exact[update] <= gain.upper for update, gain in measured.items())
    yield Row("intervals that cover the exact gain", covered, len(measured) - 2, len(measured))
    for update, gain in measured.items():
        teams = runs.main.teams[update - 1], runs.main.teams[update]
        error = np.hypot(*(return_error(team, EPISODES) for team in teams))
        yield near(f"gain {update}", gain.estimate, exact[update], error)
    told = [
        {**u, "exact_success": [0.0, exact[u["update"]]], "certificates": u["certificates"]} for u in runs.main.updates
    ]
    for kind, found in certificate_tracking(told).items():
        bounds = [next(c["lower_bound"] for c in u["certificates"] if c["kind"] == kind) for u in runs.main.updates]
        truth = [exact[u["update"]] for u in runs.main.updates]
        yield same(f"violations of {kind}", found.violations, sum(g < b for g, b in zip(truth, bounds, strict=True)))
        yield same(f"rank correlation of {kind}", found.rank_correlation, stats.spearmanr(bounds, truth).statistic)
        yield same(f"not applicable, {kind}", found.not_applicable, 0)


def stale_certificates(runs: Runs) -> Iterator[Row]:
    """From versions in the stored episodes: which updates changed another team than the one that wrote the batch."""
    batch = runs.naive.batch(0, 0)
    writers = {turn.agent: turn.agent_version for turn in batch.episodes[0].turns}
    now, stale = dict(writers), set()
    for update in runs.naive.updates:
        if now != writers:
            stale.add(update["update"])
        now[update["agent"]] = update["version_after"]
    assert stale == {2, 3}
    yield same("stale updates", float(stale_updates(runs.naive.updates) == stale), 1.0)
    yield same("none in the fresh run", len(stale_updates(runs.main.updates)), 0)
    found = certificate_tracking(runs.naive.updates)
    yield same("not applicable", found["turn_aware"].not_applicable, 2)
    yield same("issued", sum(bool(u["certificates"]) for u in runs.naive.updates), 1)
    yield same("judged", len(found["turn_aware"].updates), 0)  # nothing was played between the updates


def cost(runs: Runs) -> Iterator[Row]:
    """Tokens counted in the stored episodes."""

    def sampled(step: int) -> int:
        batches = [runs.main.batch(stage, step) for stage in range(3)]
        return sum(len(turn.token_ids) for batch in batches for e in batch.episodes for turn in e.turns)

    found = overhead(runs.main.updates)
    yield same("sampled tokens", found.sampled_tokens, sum(map(sampled, range(3))))
    yield same("naive tokens", found.naive_tokens, sampled(0))
    yield same("overhead", found.token_ratio, sum(map(sampled, range(3))) / sampled(0))
    yield same("of a naive run", overhead(runs.naive.updates).token_ratio, 1.0)


def rollouts_that_were_there(runs: Runs) -> Iterator[Row]:
    """What a stage's first rollouts are worth, by the exact weight of every conversation in groups with a signal; and
    what other choices would have cost, by tokens of the stored episodes."""
    batch = runs.naive.batch(0, 0)
    returns = batch.returns_PG(1.0)
    signal = np.repeat(returns.max(axis=1) > returns.min(axis=1), GROUP)
    found = decisions(runs.naive.updates)
    assert [(d.action, d.step) for d in found] == [("sample", 0), ("reuse", 1), ("reuse", 2)]
    for s, decision in zip(seen(runs.naive)[1:], found[1:], strict=True):
        _, weights = weights_of(runs.naive.stage_start(s.update), s.step.old)
        w = weights[histories(batch)[:, 3]][signal]
        yield same(f"share {decision.update}", decision.share, w.sum() ** 2 / (len(w) * (w**2).sum()))
    said = sum(len(turn.token_ids) for e in batch.episodes for turn in e.turns)
    tokens = tokens_by_choice(found)
    yield same("tokens spent", tokens.spent, said)
    yield same("always", tokens.always, 3 * said)
    yield same("never", tokens.never, said)
    fresh, counted = tokens_by_choice(decisions(runs.main.updates)), overhead(runs.main.updates)
    yield same("always, of a fresh run", fresh.always, counted.sampled_tokens)
    yield same("never, of a fresh run", fresh.never, counted.naive_tokens)


TABLE: dict[str, Callable[[Runs], Iterator[Row]]] = {
    check.__name__: check
    for check in (
        exact_kl,
        sampled_against_exact,
        subsampled_kl,
        stale_gap,
        importance_weights,
        occupancy_drift,
        zeta,
        clip_rates,
        steadiness,
        agreement_on_correct,
        order_of_updates,
        token_shift,
        mismatch,
        certificates,
        stale_certificates,
        cost,
        rollouts_that_were_there,
    )
}


@pytest.mark.long
@pytest.mark.parametrize("name", TABLE)
def test_against_the_exact_value(name, runs):
    rows = list(TABLE[name](runs))
    assert rows
    wrong = [row for row in rows if not row.low <= row.value <= row.high]
    assert not wrong, "\n".join(f"{r.what}: {r.value:.6g}, allowed {r.low:.6g} to {r.high:.6g}" for r in wrong)


def test_every_diagnostic_is_in_the_table():
    """A new module in ``diagnostics`` needs a row here, or a word in docs/report.md why it has no tabular truth."""
    from importlib.resources import files

    covered = {
        "accounting",
        "contexts",
        "coordination",
        "drift",
        "kl_reliability",
        "order",
        "probes",
        "reuse",
        "stability",
        "staleness",
        "subsampling",
        "swaps",
        "tracking",
        "zeta",
    }
    modules = {path.name[:-3] for path in files("teamtr.analysis.diagnostics").iterdir() if path.name.endswith(".py")}
    assert modules == covered | {"__init__"}
