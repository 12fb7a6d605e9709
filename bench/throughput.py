"""Predictions of the throughput model beside the measured figures: one H200, and CPU cores.

    python bench/throughput.py [--markdown] [--json]

Nothing is run: measured figures are those of docs/performance.md, docs/growth.md and docs/cluster.md, with their
commands (for 8B agents and 4,096 tokens, docs/sizing.md says what is known). Figures that a constant of
``teamtr.planning.rates`` was fitted to are marked; all others are predictions.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import cluster
from common import KEPT_BYTES, SHAPES, report
from teamtr.planning.cards import CARDS
from teamtr.planning.configs import tiny_shape
from teamtr.planning.learning import (
    LearnerCost,
    Selection,
    all_rows,
    gate_seconds,
    score_seconds,
    step_rows,
    train_seconds,
)
from teamtr.planning.memory import memory_of
from teamtr.planning.sampling import Decoder, call_seconds, decoder_of, sample_seconds
from teamtr.planning.seconds import Load
from teamtr.planning.setup import Cluster, Learning, Member, PlannedTurn, Sampling, Setup
from teamtr.planning.shape import ModelShape
from teamtr.planning.stage import Prediction, predict
from teamtr.ports import GB, Demand, Lengths
from teamtr.presets import Plan
from teamtr.session.forecast import Where, forecast

H200 = CARDS["H200"]


def shape_of(name: str) -> ModelShape:
    """The shape of a benchmark model."""
    return ModelShape.of({"tie_word_embeddings": True, **SHAPES[name], "model_type": "qwen3"})


SMALL, QWEN_1_7B = shape_of("small"), shape_of("1.7b")
QWEN_8B = replace(QWEN_1_7B, layers=36, width=4096, inner=12288, heads=32)


@dataclass(frozen=True)
class Figure:
    """A measured figure and its prediction. ``measured``: the least and the most, which differ if it was measured more
    than once. ``fitted``: a constant of the model was fitted to it. ``older``: only measured with the learner before
    its products were joined."""

    what: str
    unit: str
    measured: tuple[float, float]
    predicted: float
    fitted: bool = False
    older: bool = False

    @property
    def ratio(self) -> float:
        """The prediction divided by the nearest measured value."""
        least, most = self.measured
        return self.predicted / min(max(self.predicted, least), most)

    @property
    def note(self) -> str:
        return ", ".join(["fitted"] * self.fitted + ["older learner"] * self.older)


def team(
    shape: ModelShape,
    agents: int,
    problems: int,
    group: int,
    prompt: int,
    tokens: int,
    *,
    micro_batch: int,
    epochs: int = 1,
    pages: int | None = None,
    rank: int | None = 16,
    shared: int = 0,
) -> Setup:
    """A setup of agents that speak once each with the whole conversation as context, as in bench/stage.py."""
    names = [f"a{k}" for k in range(agents)]
    plan = Plan.preset("teamtr", radius=0.05, problems=problems, group_size=group)
    return Setup(
        members=tuple(Member(name, shape, "base", rank) for name in names),
        turns=tuple(PlannedTurn(name, prompt + k * tokens, tokens, prompt) for k, name in enumerate(names)),
        demand=Demand(
            lengths={name: Lengths(prompt + k * tokens, tokens, shared) for k, name in enumerate(names)},
            episodes=problems * group,
            problems=problems,
            messages=dict.fromkeys(names, problems * group),
            checked=dict.fromkeys(names, 0),
            minibatches=4,
            objective=plan.objective,
        ),
        plan=plan,
        cluster=Cluster(H200),
        learning=Learning(epochs=epochs, micro_batch=micro_batch, precision="fp16" if rank else "fp32"),
        sampling=Sampling(precision="bf16", memory=pages),
    )


def figures() -> list[Figure]:
    return [
        *sampling(),
        *long_messages(),
        *steps(),
        *updates(),
        *stages(),
        *small_updates(),
        *memory(),
        *cores(),
        *trained_on_a_core(),
    ]


def sampling() -> Iterator[Figure]:
    """bench/rollout.py: 256 rows of 256 + 128 tokens, and 32 rows of 8,192 + 128, with different prompts or with one
    for every 8 rows."""
    decoder = Decoder(QWEN_1_7B, H200, "bf16", pages=40 << 30)

    def decode(group: int = 1, rows: int = 256, prompt: int = 256) -> float:
        return rows / decoder.step(rows, prompt + 64, prompt if group > 1 else 0, group).seconds

    def whole(group: int = 1, known: int = 0) -> float:
        turn = PlannedTurn("a", 256, 128, 256 if group > 1 else 0, known)
        return 256 * 128 / call_seconds(decoder, turn, Load(256 // group, 256, 1, 1.0), group).seconds

    rate = "tokens/s"
    yield Figure("decode, different prompts", rate, (55_800, 58_800), decode(), fitted=True)
    for rows, measured in ((128, 45_300), (64, 29_600), (32, 17_000), (8, 4_720)):
        yield Figure(f"decode, {rows} rows", rate, (measured, measured), rows / decoder.step(rows, 256 + 48).seconds)
    yield Figure("whole call", rate, (34_800, 36_400), whole())
    yield Figure("whole call, prompts cached", rate, (47_800, 51_200), whole(known=192))
    yield Figure("decode, groups of 8", rate, (77_800, 81_300), decode(8))
    yield Figure("whole call, groups of 8", rate, (69_100, 73_000), whole(8))
    yield Figure("decode behind 8,192 tokens", rate, (3_730, 3_730), decode(1, 32, 8192))
    yield Figure("decode behind 8,192 tokens, groups of 8", rate, (10_600, 10_600), decode(8, 32, 8192))


def long_messages() -> Iterator[Figure]:
    """Two agents: sampling of 16 episodes with 4,096 tokens a message, and stages of 8 or 4 episodes (bench/long.py),
    with the updates of both agents together. Training at 8B is left out: much of it was computed again with a smaller
    loss scale. The rollout at 1.7B was timed as if the KV cache of all rows fitted."""
    found = predict(team(QWEN_1_7B, 2, 2, 8, 256, 4096, micro_batch=4))
    rate = found.sampled_tokens / found.phases["sample"].seconds
    yield Figure("sampling, messages of 4,096 tokens, 16 rows", "tokens/s", (4_200, 4_200), rate)
    for shape, tokens, episodes, pages, messages, recomputed, sampled, forward, trained in (
        ("8b", 8192, 8, None, (1, 16), ("a1",), 134.8, 23.1, None),
        ("8b", 16_384, 8, None, (16, 1), ("a0", "a1"), 341.5, 52.7, None),
        ("1.7b", 32_768, 8, 60 * GB, (16, 1), ("a0", "a1"), 579.7, 43.0, 62.7),
        ("8b", 32_768, 4, 25 * GB, (16, 16), ("a0", "a1"), 904.9, 69.7, None),
    ):
        setup = team(shape_of(shape), 2, 1, episodes, 256, tokens, micro_batch=16, pages=pages)
        one_copy = shape == "8b"
        setup = replace(
            setup,
            learning=replace(setup.learning, base="fp16" if one_copy else "fp32"),
            sampling=replace(setup.sampling, precision="fp16", by_row=one_copy),
        )
        spent = settled_seconds(setup, dict(zip(("a0", "a1"), messages, strict=True)), recomputed)
        what = f"{shape}, messages of {tokens:,} tokens, {episodes} rows"
        yield Figure(f"{what}: sample", "s", (sampled, sampled), spent.pop(("all", "sample")))
        train = sum(spent.pop((agent, "train")) for agent in ("a0", "a1"))
        fitted = (shape, tokens) == ("1.7b", 32_768)  # the rate of attention
        yield Figure(f"{what}: score and gate", "s", (forward, forward), sum(spent.values()), fitted)
        if trained is not None:
            yield Figure(f"{what}: train", "s", (trained, trained), train, fitted)


def settled_seconds(
    setup: Setup, micro_batch: Mapping[str, int], recomputed: Collection[str]
) -> dict[tuple[str, str], float]:
    """Predicted seconds of an update's phases by agent, and of a rollout by all, with the micro-batches and the
    recomputation that a rehearsal settled."""
    episodes = setup.plan.problems * setup.plan.group_size
    found = {("all", "sample"): sample_seconds(setup, memory_of(setup).pages, episodes).seconds}
    for member in setup.members:
        settled = replace(setup, learning=replace(setup.learning, micro_batch=micro_batch[member.name]))
        learner = LearnerCost(settled, member, member.name in recomputed)
        for phase, of in (("score", score_seconds), ("train", train_seconds), ("gate", gate_seconds)):
            found[member.name, phase] = of(learner)[0].seconds
    return found


def steps() -> Iterator[Figure]:
    """bench/step.py: scores of 512 messages, a step on 128 of them and a measurement of 128, for the agent that speaks
    first and the one that speaks third."""
    measured = {
        (32, 0): (1.18, 0.873, 0.389),
        (32, 2): (2.80, 1.775, 0.791),
        (16, 0): (1.68, 1.563, 0.460),
        (16, 2): (2.86, 1.831, 0.810),
    }
    fitted = {(32, 0): ("score", "step"), (32, 2): ("score", "step"), (16, 0): ("score", "step")}
    for (micro_batch, before), seconds in measured.items():
        setup = team(QWEN_1_7B, 3, 64, 8, 256, 256, micro_batch=micro_batch)
        learner, load = LearnerCost(setup, setup.members[before]), Load.learned(setup)
        quarter = step_rows(learner, load)
        found = {
            "score": learner.forward(all_rows(learner, load), 1),
            "step": learner.step(quarter),
            "measure": learner.forward(quarter, 2),
        }
        for (what, spent), known in zip(found.items(), seconds, strict=True):
            name = f"{what}, {micro_batch} messages a pass, contexts of {setup.turns[before].context}"
            yield Figure(name, "s", (known, known), spent.seconds, what in fitted.get((micro_batch, before), ()))


def updates() -> Iterator[Figure]:
    """bench/update.py: 256 messages of 192 tokens after contexts of 385 with no common beginnings, two epochs."""
    setup = team(QWEN_1_7B, 1, 32, 8, 385, 192, micro_batch=32, epochs=2)
    alone = tuple(replace(turn, alike=0) for turn in setup.turns)
    learner = LearnerCost(replace(setup, turns=alone), setup.members[0])
    yield Figure("update: score", "s", (1.17, 1.22), score_seconds(learner)[0].seconds)
    yield Figure("update: train", "s", (4.72, 4.85), train_seconds(learner)[0].seconds)
    yield Figure("update: gate", "s", (0.29, 0.29), gate_seconds(learner)[0].seconds)
    one_pass = learner.step(Selection(32, 256, 8)).seconds
    yield Figure("update: one pass without measurements", "s", (2.27, 2.31), one_pass)


def stages() -> Iterator[Figure]:
    """bench/stage.py: three agents, fresh rollouts before every update. The stage at 1.7B used the sampler's scores,
    which the model does not cover, so its totals are compared without scoring. Also one stage of bench/growth.py."""
    asked = team(QWEN_1_7B, 3, 64, 8, 256, 256, micro_batch=64)
    sampling = replace(asked.sampling, precision="fp16")
    found = predict(replace(asked, learning=replace(asked.learning, kept_features=KEPT_BYTES), sampling=sampling))
    yield from _of_stage("1.7B stage", found, {"sample": 31.72, "train": 18.01, "gate": 1.95}, 52.05)
    measured = zip(found.setup.turns, (5.31, 11.16, 15.23), strict=True)
    for k, (turn, seconds) in enumerate(measured, start=1):
        decoder = decoder_of(found.setup, turn.agent, found.memory.pages[turn.agent])
        own = 3 * call_seconds(decoder, turn, Load(64, 512, 1, 1.0), 8).seconds
        yield Figure(f"1.7B stage: turn {k}, three times", "s", (seconds, seconds), own)
    yield _memory_of("1.7B stage", found, 115.6)
    found = predict(team(QWEN_1_7B, 2, 256, 8, 256, 256, micro_batch=16))
    grown = {"sample": 41.1, "score": 14.8, "train": 44.5, "gate": 4.80}
    yield from _of_stage("stage of 2,048 episodes", found, grown, 105.2)
    yield _memory_of("stage of 2,048 episodes", found, 99.1)
    found = predict(team(QWEN_8B, 3, 32, 8, 256, 256, micro_batch=16))
    before = {"sample": 46.0, "score": 22.0, "train": 55.0, "gate": 4.5}
    yield from _of_stage("8B stage", found, before, 128.0, older=True)
    yield _memory_of("8B stage", found, 121.0)
    for name, problems, tokens, micro_batch, peak in (("8b", 32, 256, 4, 49.8), ("32b", 8, 64, 2, 90.4)):
        setup = team(shape_of(name), 3, problems, 8, 256, tokens, micro_batch=micro_batch, pages=8 << 30)
        yield _memory_of(f"{name.upper()} stage, one copy of the base", predict(one_copy(setup)), peak)


def one_copy(setup: Setup) -> Setup:
    """With ``learner.base: fp16`` and ``sampling.adapters: by_row``."""
    learning = replace(setup.learning, precision="fp16", base="fp16")
    return replace(setup, learning=learning, sampling=replace(setup.sampling, precision="fp16", by_row=True))


def _of_stage(
    name: str, found: Prediction, measured: dict[str, float], whole: float, older: bool = False
) -> Iterator[Figure]:
    """The measured phases and their sum, without a checkpoint, which the benchmark does not write."""
    phases = {phase: found.phases[phase].seconds for phase in measured}
    for phase, seconds in measured.items():
        learned = older and phase != "sample"
        yield Figure(f"{name}: {phase}", "s", (seconds, seconds), phases[phase], older=learned)
    told = "whole" if "score" in phases else "whole, without scoring"
    yield Figure(f"{name}: {told}", "s", (whole, whole), sum(phases.values()), older=older)


def _memory_of(name: str, found: Prediction, peak: float) -> Figure:
    return Figure(f"{name}: memory", "GB", (peak, peak), found.memory.plan.total / GB)


def small_updates() -> Iterator[Figure]:
    """bench/precision.py: scoring, four steps and a measurement of few messages after prompts of 64 tokens, in
    micro-batches of at most 16. Measured with the learner before its products were joined."""
    by_shape = {
        "1.7B": (QWEN_1_7B, 8, {16: (0.97, 0.96, 0.88), 256: (0.96, 0.78, 1.34), 1024: (0.92, 1.16, 3.78)}),
        "135M": (SMALL, 32, {16: (1.06, 1.04, 1.11), 256: (1.07, 1.06, 1.04), 1024: (0.79, 1.17, 0.97)}),
    }
    for name, (shape, messages, table) in by_shape.items():
        for tokens, row in table.items():
            count = min(messages, 8) if tokens == 1024 else messages
            for precision, seconds in zip(("fp16", "tf32", "fp32"), row, strict=True):
                setup = team(shape, 1, count, 1, 64, tokens, micro_batch=16)
                setup = replace(setup, learning=replace(setup.learning, precision=precision))
                learner = LearnerCost(setup, setup.members[0])
                every, quarter = Selection(count, count, -(-count // 16)), Selection(count / 4, count / 4, 1)
                spent = learner.forward(every, 1) + learner.step(quarter) * 4 + learner.forward(every, 2)
                fitted = (name, tokens, precision) == ("1.7B", 1024, "fp32")
                what = f"update of {count} messages of {tokens}, {name}, {precision}"
                yield Figure(what, "s", (seconds, seconds), spent.seconds, fitted, older=True)


def memory() -> Iterator[Figure]:
    """bench/plan.py: memory plans of loaded models, here from their shapes. Then peaks of bench/stage.py."""
    for what, shape, rank, problems, row, tokens, micro_batch, shared, planned in (
        ("135M, adapters, 64 x 226", SMALL, 16, 32, 226, 64, 64, 10, 18.8),
        ("135M, all weights, 64 x 226", SMALL, None, 32, 226, 64, 64, 10, 30.2),
        ("135M, adapters, 64 x 635, 418 shared", SMALL, 16, 32, 635, 64, 64, 418, 29.8),
        ("1.7B, adapters, 16 x 418", QWEN_1_7B, 16, 16, 418, 128, 16, 10, 57.8),
        ("1.7B, adapters, 8 x 1,570", QWEN_1_7B, 16, 4, 1570, 512, 8, 10, 73.1),
    ):
        setup = team(shape, 3, problems, 8, row - tokens, tokens, micro_batch=micro_batch, rank=rank, shared=shared)
        longest = dict.fromkeys(setup.demand.lengths, Lengths(row - tokens, tokens, shared))
        setup = replace(setup, demand=replace(setup.demand, lengths=longest))
        setup = replace(setup, learning=replace(setup.learning, precision="fp16"))  # before floors are measured
        yield Figure(f"plan: {what}", "GB", (planned, planned), memory_of(setup).plan.total / GB)
    for agents, peak in ((1, 37.1), (8, 38.5)):
        setup = team(QWEN_1_7B, agents, 8, 8, 1024, 128, micro_batch=4, pages=12 << 30)
        messages = dict.fromkeys(setup.demand.messages, 64 * 8 // agents)
        longest = dict.fromkeys(setup.demand.lengths, Lengths(1024, 128))
        setup = replace(setup, demand=replace(setup.demand, messages=messages, lengths=longest))
        yield Figure(f"eight turns of {agents} agents", "GB", (peak, peak), memory_of(setup).plan.total / GB)


def cores() -> Iterator[Figure]:
    """docs/cluster.md: sampling with the built-in model in four shards, on two cores and in one process."""

    def seconds(workers: int, problems: int, shards: int = 4) -> float:
        tiny = tiny_shape(layers=4, width=256, heads=4)
        setup = team(tiny, 3, problems, 8, 3, 8, micro_batch=64)
        contexts = zip(setup.turns, (3, 19, 34), strict=True)
        turns = tuple(replace(turn, context=context) for turn, context in contexts)
        cluster = Cluster(CARDS["cpu"], cards=2, workers=workers, shards=shards)
        played = replace(setup, cluster=cluster, turns=turns, learning=Learning(precision="fp32"))
        return 3 * sample_seconds(played, dict.fromkeys(("a0", "a1", "a2"), None), problems * 8).seconds

    alone = seconds(1, 16)
    yield Figure("one core, 16 problems in 4 shards", "s", (15.3, 17.3), alone, fitted=True)
    yield Figure("one core, 32 problems in 4 shards", "s", (23.5, 23.5), seconds(1, 32), fitted=True)
    yield Figure("one core, 16 problems in 1 shard", "s", (10.4, 10.4), seconds(1, 16, shards=1), fitted=True)
    for workers, strong, weak in ((2, 0.57, 0.83), (4, 0.62, 1.53)):
        yield Figure(f"{workers} workers on 2 cores", "ratio", (strong, strong), seconds(workers, 16) / alone)
        more = seconds(workers, 16 * workers) / alone
        yield Figure(f"{workers} workers, {workers} times the problems", "ratio", (weak, weak), more)


def trained_on_a_core() -> Iterator[Figure]:
    """bench/cluster.py: a stage in one process with four shards, run twice while the machine's other core was busy."""
    with tempfile.TemporaryDirectory() as folder:
        _, found = forecast(cluster.team(Path(folder), 16, cluster.parsed([]), "cluster.shards=4"), Where("cpu"))
    measured = {"sample": (22.8, 26.3), "score": (3.7, 5.3), "train": (11.1, 11.9), "gate": (1.7, 1.8)}
    for phase, seconds in measured.items():
        yield Figure(f"one core, a trained stage: {phase}", "s", seconds, found.phases[phase].seconds)
    yield Figure("one core, a trained stage: whole", "s", (39.6, 45.8), found.seconds)


def told_range(measured: tuple[float, float]) -> str:
    return " to ".join(f"{x:,g}" for x in sorted(set(measured)))


def as_markdown(figure: Figure) -> str:
    predicted = f"{figure.predicted:,.0f}" if figure.predicted >= 1000 else f"{figure.predicted:.3g}"
    cells = (f"{told_range(figure.measured)} {figure.unit}", predicted, f"{figure.ratio:.2f}")
    return f"| {' | '.join((figure.what, *cells))} | {figure.note} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="the table of docs/sizing.md, to stdout")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = figures()
    if options.markdown:
        print("\n".join(map(as_markdown, found)))
        return
    rows = [(f.what, f.unit, told_range(f.measured), f.predicted, f.ratio, f.note) for f in found]
    header = ("figure", "unit", "measured", "predicted", "ratio", "")
    record = {"figures": [{**vars(f), "ratio": f.ratio} for f in found]}
    report("predicted beside measured", header, rows, record, options.json)


if __name__ == "__main__":
    main()
