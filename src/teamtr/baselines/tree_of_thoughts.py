"""Tree of thoughts: steps of a solution are proposed and rated, and only the best are continued (arXiv 2305.10601)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from teamtr.baselines.cast import Cast, Draws, Scene, Speaker
from teamtr.baselines.method import Method, setting
from teamtr.baselines.rating import SCALE, rating
from teamtr.baselines.registry import method
from teamtr.rollout import EpisodeState
from teamtr.team import Schedule
from teamtr.types import Problem, Turn

STEP = "Solve the problem in {depth} steps. Write step {step} and nothing else."
LAST_STEP = "Solve the problem in {depth} steps. Write step {step}, the last, which states the answer."
TOLD = f"How likely do the thinker's steps lead to the right answer? {SCALE}"


@method("tree_of_thoughts")
@dataclass(frozen=True)
class TreeOfThoughts(Method):
    """Breadth-first search over ``depth`` steps: every kept path is continued ``breadth`` times, every continuation is
    rated once, and the best ``beam`` are kept (the first of equals). The last step of the best-rated path is the
    answer. One model proposes and rates."""

    calls: ClassVar[bool] = False
    breadth: int = setting(3, "Continuations of every path that is kept.")
    depth: int = setting(3, "Steps of a path; the last one states the answer.")
    beam: int = setting(2, "Paths that are kept after every step.")

    @property
    def width(self) -> int:
        return max(self.nodes)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The number of steps proposed at each depth; rating them takes as many messages again."""
        counts = [self.breadth]
        for _ in range(self.depth - 1):
            counts.append(min(self.beam, counts[-1]) * self.breadth)
        return tuple(counts)

    def span(self, cast: Cast) -> int:
        return self.depth

    def attempts(self, cast: Cast, problems: Sequence[Problem], draws: Draws) -> list[EpisodeState]:
        said: list[list[Turn]] = [[] for _ in problems]
        kept: list[list[list[Turn]]] = [[[]] for _ in problems]
        for depth in range(self.depth):
            scene = self._scene(cast, depth)
            nodes = [
                [scene.begin(problem, path) for path in paths for _ in range(self.breadth)]
                for problem, paths in zip(problems, kept, strict=True)
            ]
            scene.play([node for row in nodes for node in row], draws.named("depth", depth))
            for e, row in enumerate(nodes):
                said[e] += [turn for node in row for turn in node.turns[depth:]]
                best = sorted(row, key=lambda node: -rating(node.turns[-1].text))  # stable: the first of equals
                kept[e] = [node.turns[:-1] for node in best[: self.beam]]
        return [EpisodeState(problem, turns=turns) for problem, turns in zip(problems, said, strict=True)]

    def answer(self, cast: Cast, turns: Sequence[Turn]) -> str:
        leaves = [turn for turn in turns if turn.round == self.depth - 1]
        step, _ = max(list(pairwise(leaves))[::2], key=lambda said: rating(said[1].text))
        return step.text

    def _scene(self, cast: Cast, depth: int) -> Scene:
        """The next step and its rating, after a path of ``depth`` steps. The thinker never sees a rating."""
        told = (LAST_STEP if depth == self.depth - 1 else STEP).format(depth=self.depth, step=depth + 1)
        thinker = Speaker("thinker", cast.answering, told)
        evaluator = Speaker("evaluator", cast.answering, TOLD)
        router = Schedule((*((thinker.name,),) * depth, (thinker.name, evaluator.name)))
        return cast.scene([thinker, evaluator], router)
