"""What a rollout hands on and books: temperature, history, seeds, tokens, seconds; and how a data is cut in parts."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from small import World
from teamtr.answers import Sample
from teamtr.rollout import Ledger, collect, play
from teamtr.streams import InTurns
from teamtr.theory.objective import Objective


class Watched(InTurns):
    """Hands every call on to the engine and remembers it."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.calls: list[dict] = []

    def version(self, name: str) -> str:
        return self.engine.version(name)

    def sample(self, name: str, prompts, noise_BT, **settings) -> list[Sample]:
        samples = self.engine.sample(name, prompts, noise_BT, **settings)
        self.calls.append({"name": name, "prompts": prompts, "noise": noise_BT, "samples": samples, **settings})
        return samples


def watched(world: World, **changes):
    engine = Watched(world.engine)
    return engine, replace(world.context, sampler=engine, **changes)


def test_the_sampler_gets_the_temperature_and_the_limit_that_were_asked_for():
    world = World()
    engine, context = watched(world)
    play(context, world.team, context.task.problems("train"), 2, seed=1, temperature=0.25)
    assert [(c["name"], c["decoding"].temperature, c["noise"].shape) for c in engine.calls] == [
        ("x", 0.25, (6, 3)),
        ("y", 0.25, (6, 3)),
    ]


def test_no_two_turns_share_their_noise():
    world = World(rounds=3)
    engine, context = watched(world)
    play(context, world.team, context.task.problems("train"), 2, seed=1)
    rows = {row.tobytes() for c in engine.calls for row in c["noise"]}
    assert len(engine.calls) == 6
    assert len(rows) == 6 * 6


@pytest.mark.parametrize("style", ["transcript", "chat"])
def test_history_is_told_in_the_style_of_the_team(style: str):
    world = World(rounds=2)
    told: list[list[dict[str, str]]] = []

    class Listening:
        def __init__(self, codec) -> None:
            self.codec = codec
            self.decode = codec.decode

        def encode(self, messages):
            told.append(list(messages))
            return self.codec.encode(messages)

    codecs = {name: Listening(codec) for name, codec in world.context.codecs.items()}
    play(
        replace(world.context, codecs=codecs, history=style),
        world.team,
        world.context.task.problems("train"),
        1,
        seed=1,
    )
    roles = [m["role"] for m in told[-1] if m["role"] != "system"]
    assert roles == (["user"] if style == "transcript" else ["user", "assistant", "user"])


def test_every_token_and_every_second_is_booked(monkeypatch):
    ticks = count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    world, ledger = World(rounds=2), Ledger()
    engine, context = watched(world)
    play(context, world.team, context.task.problems("train"), 2, seed=1, ledger=ledger)
    for name in ("x", "y"):
        calls = [c for c in engine.calls if c["name"] == name]
        assert ledger.prompt_tokens[name] == sum(len(p) for c in calls for p in c["prompts"])
        assert ledger.sampled_tokens[name] == sum(len(s.token_ids) for c in calls for s in c["samples"])
        assert ledger.seconds[name] == len(calls) == 2, "from one reading of the clock to the next, twice"
    assert (ledger.grading_seconds, ledger.environment_seconds) == (1.0, 0.0)
    assert ledger.episodes == 6
    play(context, world.team, context.task.problems("train"), 2, seed=2, ledger=ledger)
    assert (ledger.episodes, ledger.grading_seconds, ledger.seconds["x"]) == (12, 2.0, 4.0)


def test_the_first_round_of_a_batch_and_its_redraws_have_seeds_of_their_own():
    world, rounds = World(reward=lambda k, value: 0.0), []
    problems = world.context.task.problems("train")
    found = collect(
        world.context,
        world.team,
        problems[:1],
        2,
        seed=lambda r: rounds.append(r) or 100 + r,
        reserve=problems[1:],
        limit=1,
    )
    assert (found.rounds, found.ended) == (1, "limit")
    assert rounds == [0, 1]


# -- the parts of a data -----------------------------------------------------------------------------------


def training_batch_of(world: World, group: int = 4):
    return world.training_batch("x", world.collect(world.team, 0, group=group))


def test_what_is_set_aside_is_never_climbed_on_not_even_towards_a_reference():
    world = World()
    data = training_batch_of(world)
    first_M = data.messages.problem_M == 0
    data = replace(data, holdout_P=np.arange(3) == 0)
    assert first_M.any()
    assert not (data.gradient_M(Objective(reference_kl=0.1)) & first_M).any()
    assert not (data.gradient_M(Objective()) & first_M).any()


@pytest.mark.parametrize(("problems", "first_half"), [(2, 1), (3, 2)])
def test_cross_fitting_halves_the_problems(problems: int, first_half: int):
    world = World()
    batch = play(world.context, world.team, world.context.task.problems("train")[:problems], 8, seed=3)
    data = world.training_batch("x", batch)
    assert data.informative_M.all()
    first, second = data.folds(Objective(), cross_fit=True, rng=np.random.default_rng(0))
    assert len(np.unique(data.messages.cluster_M[first.train_M])) == first_half
    assert np.array_equal(first.train_M, second.judge_M)
    assert np.array_equal(first.judge_M, second.train_M)
    assert (first.opens, second.opens) == (True, False)
    assert (first.radius_share, second.radius_share) == (0.25, 1.0)


def test_a_mean_under_small_weights_and_under_none():
    data = training_batch_of(World(), group=2)
    values_M = np.arange(float(len(data.messages)))
    tiny = replace(data, contexts_M=np.full(data.returns_PG.size, 1e-3))
    assert tiny.mean(values_M) == pytest.approx(values_M.mean())
    assert replace(data, contexts_M=np.zeros(data.returns_PG.size)).mean(values_M) == np.inf
