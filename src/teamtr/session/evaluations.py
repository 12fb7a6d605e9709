"""Evaluations that can be killed, resumed and graded again: their episodes are kept, chunk by chunk.

    evals/test-k64-1f0c9a2b/                             one folder for each team, split, K and temperature
      settings.json                                      which
      problems-00000-00008-77d0f3aa-5c0e1b22.jsonl.gz    the episodes of these problems, written when all were played
      report.json                                        the figures of the last evaluation

A chunk's name holds a hash of what its problems ask, so that other data are never taken for the same, and a hash of
the answers and the grader: when those have changed, the kept replies are graded again. A chunk's randomness comes from
its place, so that an evaluation that was killed ends with the same figures. A chunk that is there is not sampled again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from teamtr.errors import UserError
from teamtr.evaluation.evaluate import Scores, scores_of
from teamtr.randomness import seed_of
from teamtr.reports import EvalReport
from teamtr.rollout import Ledger, RolloutContext, play
from teamtr.session.build import Session
from teamtr.session.inputs import grader_id, problem_digest
from teamtr.store import read_episodes, write_atomic, write_episodes
from teamtr.store.atomic import remove_leftovers
from teamtr.store.log import encode
from teamtr.team import Team, team_answer
from teamtr.types import Problem, RolloutBatch

EPISODES_PER_CHUNK = 512

Progress = Callable[[int, int, Scores], None]
"""Called after each chunk with how many problems are done, of how many, and the chunk's scores."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a team: which problems, how often, and where its episodes are kept.

    ``stage`` names the randomness beside the seed: a team is evaluated with the same after the same number of stages.
    """

    session: Session
    team: Team
    folder: Path
    split: str
    samples: int
    temperature: float | None
    stage: int
    limit: int | None = None

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
    ) -> Evaluation:
        """What is not given is as the team file says; what that leaves open, as the paper evaluates the task."""
        settings = session.team_file.eval
        chosen = samples or settings.samples or session.task.samples
        warmth = settings.temperature if temperature is None else temperature
        made = cls(session, team, evals, split, chosen, warmth, stage, limit or settings.problems)
        return replace(made, folder=evals / f"{split}-k{chosen}-{_digest(made.settings)}")

    @property
    def settings(self) -> dict[str, Any]:
        """What the episodes depend on besides the problems."""
        return {
            "team_version": self.team.version,
            "team": self.session.team_file.team.model_dump(mode="json"),
            "split": self.split,
            "samples": self.samples,
            "temperature": self.temperature,
            "seed": self.seed,
            "episodes_per_chunk": EPISODES_PER_CHUNK,
        }

    @property
    def seed(self) -> int:
        return seed_of(self.session.team_file.seed, "eval", self.split, self.stage)

    def run(
        self,
        *,
        regrade: bool = False,
        ledger: Ledger | None = None,
        progress: Progress = lambda done, of, scores: None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> EvalReport:
        """Play what is not there yet, grade it, and report. With ``regrade`` nothing is played, all is graded anew.
        ``tell`` hears what is done to kept replies."""
        problems = self.session.task.problems(self.split)[: self.limit]
        if not problems:
            raise UserError(f"the split {self.split!r} has no problems: choose another with --split")
        context, parts, grader = self.session.context, [], grader_id(self.session)
        remove_leftovers(self.folder, recursive=False)
        write_atomic(self.folder / "settings.json", encode(self.settings, "the settings") + b"\n")
        for chunk in _chunks(problems, max(1, EPISODES_PER_CHUNK // self.samples)):
            file = self.folder / chunk.file_name(grader, interactive=context.task.environment is not None)
            kept = _kept(file)
            if regrade and kept is None:
                raise UserError(
                    f"{file.parent} holds no episodes of {file.stem.removesuffix('.jsonl')}, so that there is nothing "
                    "to grade again: evaluate first, with the same split, samples, temperature and limit"
                )
            if kept is None:
                batch = self._played(chunk, ledger)
                write_episodes(file, batch)
            elif kept == file and not regrade:
                batch = replace(read_episodes(file), problems=tuple(chunk.problems))
            else:
                batch = _graded_again(context, read_episodes(kept), chunk.problems)
                write_episodes(file, batch)
                if kept != file:
                    tell(f"problems {chunk.first} to {chunk.last}: answers or grader have changed, graded again")
                    kept.unlink(missing_ok=True)
            parts.append(scores_of(context, batch))
            progress(chunk.last, len(problems), parts[-1])
        report = Scores.together(parts).report(self.seed)
        write_atomic(self.folder / "report.json", encode(report.as_record(), "the report") + b"\n")
        return report

    def _played(self, chunk: _Chunk, ledger: Ledger | None) -> RolloutBatch:
        return play(
            self.session.context,
            self.team,
            chunk.problems,
            self.samples,
            seed=seed_of(self.seed, "chunk", chunk.first),
            temperature=self.temperature,
            ledger=ledger,
        )


@dataclass(frozen=True)
class _Chunk:
    first: int
    problems: Sequence[Problem]

    @property
    def last(self) -> int:
        return self.first + len(self.problems)

    def file_name(self, grader: str, *, interactive: bool) -> str:
        """What an environment says may depend on all of a problem: then nothing is kept of another."""
        graded = _digest([grader, *map(problem_digest, self.problems)])
        asked = graded if interactive else _digest([[p.id, p.prompt, p.private] for p in self.problems])
        return f"problems-{self.first:05d}-{self.last:05d}-{asked}-{graded}.jsonl.gz"


def _kept(file: Path) -> Path | None:
    """The file, or one with replies to the same questions that another grader judged, or by other answers."""
    if file.exists():
        return file
    asked = file.name.removesuffix(".jsonl.gz").rpartition("-")[0]
    others = [*file.parent.glob(f"{asked}-*.jsonl.gz"), *file.parent.glob(f"{asked}.jsonl.gz")]
    return max(others, key=lambda other: other.stat().st_mtime_ns, default=None)


def _chunks(problems: Sequence[Problem], size: int) -> Iterator[_Chunk]:
    for first in range(0, len(problems), size):
        yield _Chunk(first, problems[first : first + size])


def _graded_again(context: RolloutContext, batch: RolloutBatch, problems: Sequence[Problem]) -> RolloutBatch:
    """The same episodes with the verdicts of today's grader, on the answers that today's extraction finds."""
    answers = [team_answer(episode.turns, context.answer, context.task.extract) for episode in batch.episodes]
    asked = [
        (problems[e // batch.group_size], answer, [turn.text for turn in episode.turns])
        for e, (episode, answer) in enumerate(zip(batch.episodes, answers, strict=True))
    ]
    episodes = [
        replace(episode, answer=answer, verdict=verdict)
        for episode, answer, verdict in zip(batch.episodes, answers, context.task.grade(asked), strict=True)
    ]
    return replace(batch, problems=tuple(problems), episodes=tuple(episodes))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
