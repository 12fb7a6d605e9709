"""Evaluations that can be killed, resumed and graded again: episodes are stored in chunks.

    evals/test-k64-1f0c9a2b/                             one folder per team, split, K, temperature and seed
      settings.json                                      these settings
      seconds.json                                       how long each chunk took when it was played
      problems-00000-00008-77d0f3aa-5c0e1b22.jsonl.gz    the episodes of these problems, written when all were played
      report.json                                        the figures of the last evaluation
    evals/test-debate-k1-20c3b9aa/                       the same for an inference-time method (``teamtr.baselines``)

A chunk's name contains a hash of its problems' questions, so that other data are never mistaken for them, and a hash of
the answers and the grader: if those have changed, the stored replies are graded again. A chunk's randomness depends on
its position, so that a killed evaluation ends with the same figures. A stored chunk is not sampled again.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from teamtr.baselines import Cast, Method, play_method
from teamtr.baselines.team import AsWritten
from teamtr.batches import RolloutBatch
from teamtr.errors import UserError
from teamtr.evaluation.evaluate import Scores, scores_of
from teamtr.randomness import seed_of
from teamtr.reports import EvalReport
from teamtr.rollout import Ledger
from teamtr.session.build import Session
from teamtr.session.environment import library_digest
from teamtr.session.inputs import grader_id, problem_digest
from teamtr.store import read_episodes, write_atomic, write_episodes
from teamtr.store.atomic import remove_leftovers
from teamtr.store.log import decode, encode
from teamtr.team import Team
from teamtr.types import Episode, Problem, Transcript

EPISODES_PER_CHUNK = 512
LOOKED_AT = 4
"""Number of chunks that are searched for conversations to show."""

AS_WRITTEN = AsWritten()

Progress = Callable[[int, int, Scores], None]
"""Called after each chunk with the number of problems done, the number of all, and the chunk's scores."""


@dataclass(frozen=True)
class Spent:
    """The cost of an evaluation's answers when they were played. ``seconds`` is None if it was not recorded."""

    answers: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    seconds: float | None = 0.0

    @classmethod
    def on(cls, batch: RolloutBatch, seconds: float | None) -> Spent:
        turns = [turn for episode in batch.episodes for turn in episode.turns]
        sampled, read = sum(len(turn.token_ids) for turn in turns), sum(len(turn.context_ids) for turn in turns)
        return cls(len(batch.episodes), sampled, read, seconds)

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.answers + other.answers,
            self.sampled_tokens + other.sampled_tokens,
            self.prompt_tokens + other.prompt_tokens,
            None if self.seconds is None or other.seconds is None else self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Sample:
    """A conversation of an evaluation, for display."""

    problem: Problem
    episode: Episode


@dataclass(frozen=True)
class Evaluated:
    """The report of an evaluation, the cost of its answers, how many of them were already stored, and their files."""

    report: EvalReport
    spent: Spent
    kept: int
    files: tuple[Path, ...] = ()

    def samples(self, count: int) -> list[Sample]:
        """``count`` conversations of different problems, right and wrong ones alternately as far as the first chunks
        contain both."""
        found: dict[bool, list[Sample]] = {True: [], False: []}
        for file in self.files[:LOOKED_AT]:
            batch = read_episodes(file)
            for e, episode in enumerate(batch.episodes):
                found[episode.verdict.right].append(Sample(batch.problems[e // batch.group_size], episode))
            if all(len(some) >= count for some in found.values()):
                break
        chosen: dict[str, Sample] = {}
        while len(chosen) < count and any(found.values()):
            for some in found.values():
                fresh = next((k for k, sample in enumerate(some) if sample.problem.id not in chosen), len(some))
                for sample in some[fresh : fresh + 1] if len(chosen) < count else ():
                    chosen[sample.problem.id] = sample
                del some[: fresh + 1]
        return list(chosen.values())


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a team, or of a method played by its agents: the problems, the number of attempts, and the
    folder of the episodes.

    ``stage`` and ``repeat`` determine the randomness together with the seed: after the same number of stages, a team is
    evaluated with the same randomness; every repeat has its own.
    """

    session: Session
    cast: Cast
    folder: Path
    split: str
    samples: int
    temperature: float | None
    stage: int
    limit: int | None = None
    method: Method = AS_WRITTEN
    repeat: int = 0

    @classmethod
    def of(
        cls,
        session: Session,
        team: Team,
        evals: Path,
        *,
        stage: int,
        split: str = "test",
        limit: int | None = None,
        samples: int | None = None,
        temperature: float | None = None,
        method: Method = AS_WRITTEN,
        agent: str | None = None,
        max_tokens: int | None = None,
        repeat: int = 0,
    ) -> Evaluation:
        """Settings that are not given come from the team file, and those that it leaves open from the paper's
        evaluation of the task. ``agent`` and ``max_tokens`` are for methods (``Cast``)."""
        settings = session.team_file.eval
        chosen = samples or settings.samples or session.task.samples
        warmth = settings.temperature if temperature is None else temperature
        cast = Cast(session.context, team, agent, max_tokens)
        made = cls(session, cast, evals, split, chosen, warmth, stage, limit or settings.problems, method, repeat)
        name = f"{split}-k{chosen}" if made.is_of_team else f"{split}-{method.name}-k{chosen}"
        return replace(made, folder=evals / f"{name}-{_digest(made.settings)}")

    @property
    def is_of_team(self) -> bool:
        """Whether the team itself is evaluated, as its file describes it."""
        return isinstance(self.method, AsWritten)

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the episodes depend on besides the problems."""
        by_method = {
            "method": self.method.settings,
            "agent": self.cast.agent,
            "max_tokens": self.cast.max_tokens,
            "prompts": library_digest("baselines")[:8],
        }
        return {
            "team_version": self.cast.team.version,
            "team": self.session.team_file.without_places().team.model_dump(mode="json"),
            "split": self.split,
            "samples": self.samples,
            "temperature": self._warmth,
            "seed": self.seed,
            "episodes_per_chunk": EPISODES_PER_CHUNK,
            **({} if self.is_of_team else by_method),
            **(
                {}
                if self.cast.context.tools is None
                else {"tools": self.session.team_file.without_places().tools.model_dump(mode="json")}
            ),
        }

    @property
    def _warmth(self) -> float | None:
        """The temperature of sampling; None for 1.0 unless the evaluation itself sets it."""
        trained_at = self.session.team_file.sampling.temperature
        return trained_at if self.temperature is None and trained_at != 1.0 else self.temperature

    @property
    def seed(self) -> int:
        first = seed_of(self.session.team_file.seed, "eval", self.split, self.stage)
        return seed_of(first, "repeat", self.repeat) if self.repeat else first

    def run(
        self,
        *,
        regrade: bool = False,
        ledger: Ledger | None = None,
        progress: Progress = lambda done, of, scores: None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Evaluated:
        """Play what is not stored yet, grade it, and report. With ``regrade``, nothing is played and everything is
        graded again. ``tell`` receives messages about stored replies that are graded again."""
        problems = self.session.task.problems(self.split)[: self.limit]
        if not problems:
            raise UserError(f"the split {self.split!r} has no problems: choose another with --split")
        self.require()
        context, parts, grader = self.session.context, [], grader_id(self.session)
        files: list[Path] = []
        spent, played, clock = Spent(), 0, _Clock(self.folder / "seconds.json")
        remove_leftovers(self.folder, recursive=False)
        write_atomic(self.folder / "settings.json", encode(self.settings, "the settings") + b"\n")
        for chunk in _chunks(problems, max(1, EPISODES_PER_CHUNK // (self.samples * self.method.width))):
            # Replies of an environment or a tool depend on code of the task or the user, as grading does.
            answered = context.task.environment is not None or context.tools is not None
            file = self.folder / chunk.file_name(grader, interactive=answered)
            kept = _kept(file)
            if regrade and kept is None:
                raise UserError(
                    f"{file.parent} holds no episodes of {file.stem.removesuffix('.jsonl')}, so that there is nothing "
                    "to grade again: evaluate first, with the same split, samples, temperature and limit"
                )
            if kept is None:
                started = time.perf_counter()
                batch = self._played(chunk, ledger)
                clock.note(_asked(file), time.perf_counter() - started)  # first, so that a stored chunk has its time
                write_episodes(file, batch)
                played += len(batch.episodes)
            elif kept == file and not regrade:
                batch = replace(read_episodes(file), problems=tuple(chunk.problems))
            else:
                batch = self._graded_again(read_episodes(kept), chunk.problems)
                write_episodes(file, batch)
                if kept != file:
                    tell(f"problems {chunk.first} to {chunk.last}: answers or grader have changed, graded again")
                    kept.unlink(missing_ok=True)
            files.append(file)
            parts.append(scores_of(context, batch, consensus=self.is_of_team))
            spent += Spent.on(batch, clock.seconds.get(_asked(file)))
            progress(chunk.last, len(problems), parts[-1])
        report = Scores.together(parts).report(self.seed, problems)
        write_atomic(self.folder / "report.json", encode(report.as_record(), "the report") + b"\n")
        return Evaluated(report, spent, kept=spent.answers - played, files=tuple(files))

    def require(self) -> None:
        """Raises UserError if this team cannot play this method on this task."""
        self.method.require(self.cast, self.temperature)
        if self.session.task.grades_conversation and not self.is_of_team:
            raise UserError(
                f"{self.session.task.name} grades what every agent of the team says, and {self.method.name} gives one "
                "answer: evaluate the team itself, without --method"
            )

    def _played(self, chunk: _Chunk, ledger: Ledger | None) -> RolloutBatch:
        return play_method(
            self.method,
            self.cast,
            chunk.problems,
            self.samples,
            seed=seed_of(self.seed, "chunk", chunk.first),
            temperature=self.temperature,
            ledger=ledger,
        )

    def _graded_again(self, batch: RolloutBatch, problems: Sequence[Problem]) -> RolloutBatch:
        """The same episodes with verdicts of the current grader, on the answers that the current extraction finds."""
        of = [problems[e // batch.group_size] for e in range(len(batch.episodes))]
        answers = [
            self.method.graded(self.cast, problem, episode.turns, episode.replies)
            for problem, episode in zip(of, batch.episodes, strict=True)
        ]
        asked = [
            (problem, answer, Transcript(episode.turns, episode.replies))
            for problem, answer, episode in zip(of, answers, batch.episodes, strict=True)
        ]
        episodes = [
            replace(episode, answer=answer, verdict=verdict)
            for episode, answer, verdict in zip(batch.episodes, answers, self.session.task.grade(asked), strict=True)
        ]
        return replace(batch, problems=tuple(problems), episodes=tuple(episodes))


class _Clock:
    """The time that each chunk took, stored in a file: it is measured only once and must outlive the process."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds = _noted(file)

    def note(self, chunk: str, seconds: float) -> None:
        self.seconds[chunk] = seconds
        write_atomic(self.file, encode(self.seconds, "the seconds", sort_keys=True) + b"\n")


def _noted(file: Path) -> dict[str, float]:
    """The stored times that are numbers: a damaged file does not stop an evaluation."""
    try:
        found = decode(file.read_bytes())
    except (OSError, ValueError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {chunk: float(took) for chunk, took in pairs if type(took) in (int, float) and math.isfinite(took)}


@dataclass(frozen=True)
class _Chunk:
    first: int
    problems: Sequence[Problem]

    @property
    def last(self) -> int:
        return self.first + len(self.problems)

    def file_name(self, grader: str, *, interactive: bool) -> str:
        """The chunk's file name. Replies of an environment may depend on everything in a problem, so none are kept if
        anything in it has changed."""
        graded = _digest([grader, *map(problem_digest, self.problems)])
        asked = graded if interactive else _digest([[p.id, p.prompt, p.private] for p in self.problems])
        return f"problems-{self.first:05d}-{self.last:05d}-{asked}-{graded}.jsonl.gz"


def _kept(file: Path) -> Path | None:
    """The file, or one with replies to the same questions that were graded differently or against other answers."""
    if file.exists():
        return file
    asked = _asked(file)
    others = [*file.parent.glob(f"{asked}-*.jsonl.gz"), *file.parent.glob(f"{asked}.jsonl.gz")]
    return max(others, key=lambda other: other.stat().st_mtime_ns, default=None)


def _asked(file: Path) -> str:
    """The part of a chunk's name that identifies its questions."""
    return file.name.removesuffix(".jsonl.gz").rpartition("-")[0]


def _chunks(problems: Sequence[Problem], size: int) -> Iterator[_Chunk]:
    for first in range(0, len(problems), size):
        yield _Chunk(first, problems[first : first + size])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
