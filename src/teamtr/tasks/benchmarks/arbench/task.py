"""AR-Bench: active reasoning. The team asks for missing information in up to 25 rounds, then gives a final answer.

Three games: guessing numbers (``arbench:gn``), situation puzzles (``arbench:sp``) and detective cases
(``arbench:dc``). A round of the team's router is a round of the game: the team's answer of the round (``team.answer``)
goes to the environment, whose reply opens the next round and states the rounds left. The router's last round is the
final answer, so 25 rounds of the game are ``rounds: 26`` of the router. A message that asks nothing wastes its round.

Final answers are graded as by the benchmark's own evaluators, on the text of the last message alone, so that stored
replies can be graded without playing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from teamtr.errors import UserError
from teamtr.ports import Environment
from teamtr.settings.paths import Anchor
from teamtr.settings.refusals import Refusal
from teamtr.settings.section import unset
from teamtr.settings.values import NonEmpty
from teamtr.tasks.base import Benchmark, Source
from teamtr.tasks.benchmarks.arbench.texts import Texts, fill, texts_of
from teamtr.tasks.config import PlayedConfig, TeamSection
from teamtr.tasks.data.rows import DataError, NoSuchData, Row, read_json_file, read_rows
from teamtr.tasks.data.split import name_of, with_own_ids
from teamtr.tasks.players import Player, PlayerConfig
from teamtr.text import shown
from teamtr.types import Problem, Situation

ENVIRONMENT = "environment"
"""The author of the messages that state the rounds left, in every game."""
ROUNDS = 25
"""Rounds of the benchmark; the router needs one more for the final answer."""


class ArBench(Benchmark):
    """The base class of the three games.

    Args:
        splits: the problems of each split.
        player: plays the referee or the suspects. The attribute ``player`` may also be set later, because the player
            may be an agent of the very team that plays.
        prompts: the benchmark's prompts.json, to use its texts instead of ours.
    """

    class Config(PlayedConfig):
        """Interactive games: the team asks for missing information, round by round."""

        player: PlayerConfig | None = unset("Who plays the referee (arbench:sp) or the suspects (arbench:dc).")
        prompts: NonEmpty | None = unset(
            "The benchmark's prompts.json, relative to the team file; default: our prompts."
        )

        def anchored(self, anchor: Anchor) -> Self:
            prompts = None if self.prompts is None else anchor.path(self.prompts)
            return super().anchored(anchor).model_copy(update={"prompts": prompts})

        def _refusals(self) -> Iterator[Refusal]:
            yield from super()._refusals()
            if self.player is None and self.name != "arbench:gn":
                message = f"task {self.name} needs somebody who plays the other roles: give task.player"
                yield Refusal(("task",), message, (("task", "player"), ("task", "name")))
            if self.player is not None and self.name == "arbench:gn":
                message = "task arbench:gn answers guesses by a rule and needs no task.player"
                yield Refusal(("task", "player"), message, (("task", "name"),), at_key=True)

        def refusals_of(self, team: TeamSection) -> Iterator[Refusal]:
            """At least two rounds, so that the team can ask, and a player that does not change."""
            if team.rounds is not None and team.rounds < 2:
                message = (
                    f"task {self.name} is played in rounds, the last of which is the final answer: set "
                    f"team.router.rounds to {ROUNDS + 1} for the {ROUNDS} rounds of the benchmark, "
                    f"got {team.rounds}"
                )
                yield Refusal(("team", "router", "rounds"), message)
            yield from super().refusals_of(team)

    kind: ClassVar[str]
    samples = 25
    held_out = 1.0

    def __init__(
        self,
        splits: Mapping[str, Sequence[Problem]] | None = None,
        *,
        player: Player | None = None,
        prompts: Path | str | None = None,
    ) -> None:
        super().__init__(splits)
        self.player = player
        self.texts: Texts = texts_of(self.kind, prompts)

    @classmethod
    def from_files(
        cls, files: Mapping[str, Path | str], *, player: Player | None = None, prompts: Path | str | None = None
    ) -> Self:
        """The benchmark on a file per split: jsonl, parquet, or a JSON list as in the benchmark."""
        reader = cls(player=player, prompts=prompts)
        splits = {split: reader.problems_of(cls.rows(file)) for split, file in files.items()}
        return cls(splits, player=player, prompts=prompts)

    @property
    @abstractmethod
    def environment(self) -> Environment:
        """The environment of the game."""

    def require_player(self, role: str) -> Player:
        if self.player is None:
            raise UserError(f"{self.name} can be graded but not played: nobody plays the {role}; give it a player")
        return self.player

    @classmethod
    def rows(cls, source: Source) -> Iterator[Row]:
        """The items of a JSON list may be bare answers."""
        return rows_in(Path(source))

    def problems_of(self, rows: Iterable[Row]) -> Sequence[Problem]:
        """Make ids unique with a suffix: the benchmark's index is not unique in its own test file."""
        return with_own_ids(super().problems_of(rows))


def rows_in(file: Path) -> Iterator[Row]:
    """The rows of a file. In a JSON list, a bare item becomes the ``answer`` of a row, with its index as ``id``."""
    if file.suffix.lower() != ".json":
        yield from read_rows(file)
        return
    if not file.is_file():
        raise NoSuchData(file)
    items = read_json_file(file)
    if not isinstance(items, list):
        raise DataError(f"{file}: a .json file must be a list of rows, found {shown(items)}")
    for place, item in enumerate(items):
        cells = item if isinstance(item, dict) else {"id": place, "answer": item}
        yield Row(f"{file}, item {place}", cells)


def row_id(row: Mapping[str, Any], otherwise: str) -> str:
    """The row's ``id``, else its ``index`` (the benchmark's name for it), else ``otherwise``."""
    return name_of(row, ("id", "index"), otherwise)


def text_in(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise unusable(where, f"{key!r} must be text, found {shown(value)}")
    return value


def unusable(where: str, complaint: str) -> DataError:
    return DataError(f"{where}: {complaint}" if where else complaint)


def budget(texts: Texts, situation: Situation, **fields: object) -> str:
    """The environment's text on the rounds left, or its request for the final answer."""
    left, turn = situation.rounds_left, len(situation.acts) + 1
    if left == 0:
        return fill(texts["final"], **fields)
    if turn == 1:
        return fill(texts["opening"], rounds=left, left=left, turn=turn, **fields)
    return fill(texts["round"], left=left, turn=turn, **fields)
