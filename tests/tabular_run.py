"""A real training run of tabular agents whose conversations can all be enumerated: its log beside exact values.

Three agents speak once each and see the messages before. A message has at most two of three tokens, so there are seven
messages and 3 x 343 conversations, and ``theory.tabular.EpisodicTeam`` computes the probability of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from teamtr.batches import RolloutBatch
from teamtr.chat import render
from teamtr.config import dump, loads
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.engines.tabular import TabularPolicy
from teamtr.rollout import RolloutContext
from teamtr.session.build import build
from teamtr.session.driver import Driver
from teamtr.store import Log, RunFolder, batch_name, read_episodes
from teamtr.tasks import Task
from teamtr.team import Agent, Schedule, Team
from teamtr.theory.tabular import EpisodicStep, EpisodicTeam, MessageSpace
from teamtr.types import Floats, Ids, Problem, Verdict

NAMES = ("a1", "a2", "a3")
LETTERS = ".ab"  # id 0 ends a message
TARGETS = {"a": "a", "b": "b", "c": "a"}
SPACE = MessageSpace(3, 2, ends=True)
PROBLEMS, GROUP, SEED = 12, 32, 1
EPISODES = PROBLEMS * GROUP
A_CLIP = 1.2
TEAM = """\
name: tabular
seed: 1
task: {name: roles}
team: {model: tabular, max_tokens: 2, agents: [{name: a1}, {name: a2}, {name: a3}]}
plan: {preset: PRESET, stages: STAGES, problems: 12, group_size: 32, a_clip: CLIP, radius_nats_per_message: RADIUS}
learner: {learning_rate: 0.05, micro_batch: 4096, gate_share: 1.0}  # figures of all messages, to be compared exactly
eval: {every: EVERY, problems: 12, samples: 32}
diagnostics: {every: 1}
"""


class LetterCodec:
    """A codec whose prompt tokens are the characters of the text and whose message tokens are letters."""

    def encode(self, messages: Sequence[dict[str, str]]) -> Ids:
        return np.array([ord(c) for m in messages for c in m["content"]], dtype=np.int32)

    def encode_message(self, text: str) -> Ids:
        return np.array([*(LETTERS.index(c) for c in text), 0][:2], dtype=np.int32)

    def decode(self, token_ids: Ids) -> str:
        return "".join(LETTERS[i] for i in token_ids if i)


class Letters(Task):
    """Right if the answer begins with the problem's letter; the reward also counts how many agents said so."""

    reward_range = 1.0

    def problems(self, split: str) -> list[Problem]:
        return [Problem(id=f"p{k}", prompt="abc"[k % 3], answer=TARGETS["abc"[k % 3]]) for k in range(PROBLEMS)]

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        return [_verdict(problem.answer, answer, texts) for problem, answer, texts in episodes]


def _verdict(target: str, answer: str, texts: Sequence[str]) -> Verdict:
    share = sum(text.startswith(target) for text in texts) / len(texts)
    right = answer.startswith(target)
    return Verdict("right" if right else "wrong" if answer else "unparsed", 0.5 * right + 0.5 * share)


@dataclass(frozen=True)
class TabularRun:
    """A finished run with its ``records``. ``logits[n]`` are the tables of all agents after n updates."""

    folder: Path
    records: list[dict[str, Any]]
    logits: list[Floats]

    @cached_property
    def updates(self) -> list[dict[str, Any]]:
        return [r for r in self.records if r["kind"] == "update"]

    @cached_property
    def evals(self) -> list[dict[str, Any]]:
        return [r for r in self.records if r["kind"] == "eval"]

    @cached_property
    def teams(self) -> list[EpisodicTeam]:
        return [exact_team(logits) for logits in self.logits]

    def step(self, update: Mapping[str, Any]) -> EpisodicStep:
        """The exact step of this update."""
        number = update["update"]
        agent = NAMES.index(update["agent"])
        return EpisodicStep(self.teams[number - 1], self.teams[number], (agent,))

    def stage_start(self, update: Mapping[str, Any]) -> EpisodicTeam:
        return self.teams[update["update"] - 1 - update["step"]]

    def batch(self, stage: int, step: int) -> RolloutBatch:
        return read_episodes(self.folder / "episodes" / batch_name(stage, step))


def tabular_run(folder: Path, *, preset: str = "teamtr", stages: int = 3, radius: float = 0.05) -> TabularRun:
    """Train in this folder with the loop, records and probes of a normal run."""
    settings = {"PRESET": preset, "STAGES": stages, "RADIUS": radius, "CLIP": A_CLIP, "EVERY": 1}
    text = TEAM
    for name, value in settings.items():
        text = text.replace(name, str(value))
    team_file = loads(text, name="tabular")
    session = build(team_file)
    engine = LocalEngine(
        {
            name: PolicyLearner(name, TabularPolicy(3, end_ids=frozenset({0}), spread=0.7, seed=k), micro_batch=4096)
            for k, name in enumerate(NAMES)
        }
    )
    task = Letters()
    session = replace(
        session,
        task=task,
        engine=engine,
        context=RolloutContext(engine, {name: LetterCodec() for name in NAMES}, Schedule.repeated(NAMES), task),
        team=Team(tuple(Agent(name, engine.version(name), max_tokens=2) for name in NAMES)),
    )
    logits = []
    with RunFolder.open(folder) as run:
        run.team_file.write_text(dump(team_file))
        for record in Driver(run, session, lambda: False, accept_changes=False, seconds={}).go(
            run.checkpoints.latest()
        ):
            if record["kind"] in ("start", "update"):
                logits.append(_tables(engine))
    return TabularRun(folder, Log(folder / "log.jsonl").read(), logits)


# -- the truth ---------------------------------------------------------------------------------------------------


def texts_of(history: int, turns: int) -> tuple[str, list[str]]:
    """The problem's letter and the messages of history number ``history`` after this many turns."""
    said = []
    for _ in range(turns):
        history, word = divmod(history, SPACE.size)
        said.append(LetterCodec().decode(np.array(SPACE.words[word])))
    return "abc"[history], said[::-1]


def _prompt(turn: int, history: int) -> Ids:
    letter, said = texts_of(history, turn)
    problem = Problem(id="", prompt=letter)
    spoken = list(zip(NAMES[:turn], said, strict=True))
    agent = NAMES[turn]
    chat = render(agent=agent, system_prompt="", problem=problem, history=spoken, speakers=NAMES)
    return LetterCodec().encode(chat)


def _tables(engine: LocalEngine) -> Floats:
    """Logits by agent, context and prefix."""
    most = 3 * SPACE.size**2
    logits_nRKV = np.zeros((3, most, len(SPACE.prefixes), SPACE.vocabulary))
    for turn, name in enumerate(NAMES):
        policy = engine.learner(name).policy
        assert isinstance(policy, TabularPolicy)
        table = policy.logits.detach().numpy()
        for history in range(3 * SPACE.size**turn):
            prompt = _prompt(turn, history)
            rows = [policy.row(prompt, np.array(prefix, dtype=np.int32)) for prefix in SPACE.prefixes]
            logits_nRKV[turn, history] = table[rows]
    return logits_nRKV


def exact_team(logits_nRKV: Floats) -> EpisodicTeam:
    last = [texts_of(history, 3) for history in range(3 * SPACE.size**3)]
    rewards = [_verdict(TARGETS[letter], said[-1], said).reward for letter, said in last]
    return EpisodicTeam(
        space=SPACE,
        logits_BnRKV=logits_nRKV[None],
        rows=tuple(np.arange(3 * SPACE.size**t) for t in range(3)),
        active=tuple(np.full((1, 3 * SPACE.size**t), t) for t in range(3)),
        start_BX=np.full((1, 3), 1 / 3),
        reward_BN=np.array([rewards]),
    )


WORDS = {word: a for a, word in enumerate(SPACE.words)}


def histories(batch: RolloutBatch) -> Floats:
    """The number of each episode's history before each turn and at its end, (E, 4)."""
    rows = []
    for e, episode in enumerate(batch.episodes):
        row = ["abc".index(batch.problems[e // batch.group_size].prompt)]
        for turn in episode.turns:
            row.append(row[-1] * SPACE.size + WORDS[tuple(turn.token_ids.tolist())])
        rows.append(row)
    return np.array(rows)


def main() -> None:
    """Print our bound beside the exact gain for ten stages: ``python tests/tabular_run.py``."""
    import sys
    import tempfile

    from teamtr.analysis.diagnostics.tracking import certificate_tracking

    with tempfile.TemporaryDirectory() as folder:
        run = tabular_run(Path(folder) / "run", stages=10)
    bounds = {
        u["update"]: next((c["lower_bound"] for c in u["certificates"] if c["kind"] == "turn_aware"), None)
        for u in run.updates
    }
    exact = {u["update"]: float(run.step(u).gain_B[0]) for u in run.updates}
    below = [n for n, bound in bounds.items() if bound is not None and exact[n] < bound]
    measured = certificate_tracking(run.updates)["turn_aware"]
    lines = [f"update {n}: bound {bound:+.4f}, exact gain {exact[n]:+.4f}" for n, bound in bounds.items() if bound]
    lines.append(f"exact gain below the bound: {len(below)} of {len(bounds)}")
    lines.append(f"measured gain, interval and all, below it: {measured.violations} of {len(measured.updates)}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
