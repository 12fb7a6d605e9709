"""Episodes on disk: gzipped JSON lines, a header and then one episode per line.

The same batch gives the same bytes (fixed level, no time stamp, sorted keys), and reading restores the batch
bit for bit, so that a resumed run can train on exactly the episodes that the killed one sampled.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from teamtr.batches import RolloutBatch
from teamtr.store.atomic import StoreError, read_whole, write_atomic
from teamtr.store.log import decode, encode
from teamtr.types import Breakdown, Episode, Finish, Message, Problem, Reply, Turn, Verdict, VerdictKind

KIND = "teamtr-episodes"
FORMAT = 1
MOST_BYTES = 4 << 30
"""Maximum size of a file, also when unpacked."""
LONGEST_LINE = 256 << 20
"""Maximum bytes of a line: the problems of a batch, or one episode."""
MOST_TIMES = 300
"""Maximum ratio of a file's unpacked size to its size on disk. The level that batches are written with reaches 229, for
zeros only; a file made to exhaust memory reaches four times as much."""
_FINISHES, _VERDICT_KINDS = get_args(Finish), get_args(VerdictKind)
_WHOLE_NUMBERS, _NUMBERS = frozenset({int}), frozenset({int, float})
_LEAST_ID, _MOST_ID = np.iinfo(np.int32).min, np.iinfo(np.int32).max


def batch_name(stage: int, step: int) -> str:
    """The file name of the batch sampled before this step of this stage; names sort chronologically."""
    if stage < 0 or step < 0:
        raise ValueError(f"stage and step count from 0, got stage {stage}, step {step}")
    return f"stage-{stage:04d}-step-{step:02d}.jsonl.gz"


def probe_name(stage: int) -> str:
    """The file name of the stale batch of a stage's probes: sampled at the start of the stage, never trained on."""
    return f"probe-{stage:04d}.jsonl.gz"


def write_episodes(path: Path, batch: RolloutBatch) -> None:
    """Write the batch atomically."""
    header = {
        "kind": KIND,
        "format": FORMAT,
        "group_size": batch.group_size,
        "problems": [_problem_to_json(problem) for problem in batch.problems],
    }
    lines = [encode(header, "batch", sort_keys=True)]
    for e, episode in enumerate(batch.episodes):
        lines.append(encode(_episode_to_json(episode, f"episode {e}"), f"episode {e}", sort_keys=True))
    write_atomic(path, gzip.compress(b"\n".join(lines) + b"\n", compresslevel=1, mtime=0))


def read_episodes(path: Path) -> RolloutBatch:
    """Read a batch. Raises StoreError, with the path, if the file is missing, truncated or damaged."""
    advice = f"restore {path} from a copy, or remove it"
    try:
        lines = _unpacked_lines(_packed(path))
        header = decode(next(lines, b""))
        if header["kind"] != KIND:
            raise ValueError(f"its kind is {header['kind']!r:.80}")
        if header["format"] != FORMAT:
            raise StoreError(f"{path} has format {header['format']!r:.80}, this version reads {FORMAT}: update teamtr")
        return RolloutBatch(
            problems=tuple(_problem_from_json(problem) for problem in header["problems"]),
            episodes=tuple(_episode_from_json(decode(line)) for line in lines),
            group_size=_whole(header["group_size"]),
        )
    except FileNotFoundError as error:
        raise StoreError(f"there is no episode file {path}: check the stage and step in its name") from error
    except (OSError, EOFError, zlib.error) as error:
        raise StoreError(f"{path} is torn or damaged ({error}): {advice}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise StoreError(f"{path} does not hold episodes ({error!r:.200}): {advice}") from error


def _packed(path: Path) -> bytes:
    """All bytes of the file. Raises ValueError if they are more than any batch has."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"it has {size} bytes, which no batch has")
    return read_whole(path)


def _unpacked_lines(packed: bytes) -> Iterator[bytes]:
    """Unpack line by line. Raises ValueError as soon as there is more than a batch can have: a small file may unpack to
    more than fits in memory."""
    most = min(MOST_BYTES, MOST_TIMES * len(packed))
    unpacked = 0
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
        while line := file.readline(LONGEST_LINE + 1):
            unpacked += len(line)
            if unpacked > most:
                raise ValueError(f"it unpacks to more than {most} bytes, which no batch of its size does")
            if len(line) > LONGEST_LINE:
                raise ValueError(f"a line has more than {LONGEST_LINE} bytes")
            yield line.rstrip(b"\r\n")


def _problem_to_json(problem: Problem) -> dict[str, Any]:
    return {
        "id": problem.id,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "private": problem.private,
        "columns": problem.columns,
    }


def _problem_from_json(body: dict[str, Any]) -> Problem:
    return Problem(
        id=_text(body["id"]),
        prompt=_text(body["prompt"]),
        answer=body["answer"],
        private={name: _text(told) for name, told in body["private"].items()},
        columns=dict(body["columns"].items()),
    )


def _episode_to_json(episode: Episode, where: str) -> dict[str, Any]:
    return {
        "problem_id": episode.problem_id,
        "group_index": episode.group_index,
        "turns": [_turn_to_json(turn, f"{where}, turn {t}") for t, turn in enumerate(episode.turns)],
        "answer": episode.answer,
        "verdict": _verdict_to_json(episode.verdict),
        "team_version": episode.team_version,
        "replies": [_reply_to_json(reply) for reply in episode.replies],
        "without": {name: _verdict_to_json(verdict) for name, verdict in episode.without.items()},
        "crossed": {name: list(returns) for name, returns in episode.crossed.items()},
    }


def _episode_from_json(body: dict[str, Any]) -> Episode:
    return Episode(
        problem_id=_text(body["problem_id"]),
        group_index=_whole(body["group_index"]),
        turns=tuple(_turn_from_json(turn) for turn in body["turns"]),
        answer=_text(body["answer"]),
        verdict=_verdict_from_json(body["verdict"]),
        team_version=_text(body["team_version"]),
        replies=tuple(_reply_from_json(reply) for reply in body.get("replies", ())),  # older files have none
        without={_text(name): _verdict_from_json(found) for name, found in body.get("without", {}).items()},
        crossed={_text(name): tuple(map(_number, found)) for name, found in body.get("crossed", {}).items()},
    )


def _verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    made = verdict.breakdown
    return {
        "kind": verdict.kind,
        "reward": float(verdict.reward),
        "extracted": verdict.extracted,
        "breakdown": None if made is None else asdict(made),
    }


def _verdict_from_json(body: dict[str, Any]) -> Verdict:
    made = body.get("breakdown")  # older files have none
    return Verdict(
        kind=_one_of(_VERDICT_KINDS, body["kind"]),
        reward=_number(body["reward"]),
        extracted=None if body["extracted"] is None else _text(body["extracted"]),
        breakdown=None if made is None else _breakdown_from_json(made),
    )


def _breakdown_from_json(body: dict[str, Any]) -> Breakdown:
    return Breakdown(
        shared=_number(body["shared"]),
        by_agent={_text(name): _number(earned) for name, earned in body["by_agent"].items()},
        by_turn=tuple(map(_number, body["by_turn"])),
        parts={_text(name): _number(earned) for name, earned in body["parts"].items()},
    )


def _reply_to_json(reply: Reply) -> dict[str, Any]:
    return {"messages": list(map(_message_to_json, reply.messages)), "ends": reply.ends}


def _reply_from_json(body: dict[str, Any]) -> Reply:
    return Reply(tuple(map(_message_from_json, body["messages"])), _one_of((True, False), body["ends"]))


def _message_to_json(message: Message) -> dict[str, Any]:
    return {"author": message.author, "text": message.text, "tool_calls": message.tool_calls}


def _message_from_json(body: dict[str, Any]) -> Message:
    return Message(_text(body["author"]), _text(body["text"]), tuple(body["tool_calls"]))


def _turn_to_json(turn: Turn, where: str) -> dict[str, Any]:
    return {
        "agent": turn.agent,
        "round": turn.round,
        "context_ids": _checked(turn.context_ids, np.int32, f"{where}: context_ids"),
        "token_ids": _checked(turn.token_ids, np.int32, f"{where}: token_ids"),
        "sampler_logprobs": _checked(turn.sampler_logprobs, np.float32, f"{where}: sampler_logprobs"),
        "finish": turn.finish,
        "agent_version": turn.agent_version,
        "text": turn.text,
        "results": list(map(_message_to_json, turn.results)),
    }


def _turn_from_json(body: dict[str, Any]) -> Turn:
    return Turn(
        agent=_text(body["agent"]),
        round=_whole(body["round"]),
        context_ids=_array(body["context_ids"], np.int32),
        token_ids=_array(body["token_ids"], np.int32),
        # Written with the digits of a float64, so that reading through a float64 does not round.
        sampler_logprobs=_array(body["sampler_logprobs"], np.float32),
        finish=_one_of(_FINISHES, body["finish"]),
        agent_version=_text(body["agent_version"]),
        text=_text(body["text"]),
        results=tuple(map(_message_from_json, body.get("results", ()))),  # older files have none
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} in the place of text")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.80} in the place of a whole number")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r:.80} in the place of a number")
    return float(value)


def _one_of(options: tuple[Any, ...], value: Any) -> Any:
    if type(value) is str and value in options:
        return value
    if not any(value is option for option in options):
        raise ValueError(f"{value!r:.80} in the place of one of {options}")
    return value


def _array(values: Any, dtype: type[np.int32] | type[np.float32]) -> NDArray[Any]:
    """An array from a list that holds only numbers: numpy would also convert text and bools."""
    kinds = _WHOLE_NUMBERS if dtype is np.int32 else _NUMBERS
    if not isinstance(values, list) or not kinds.issuperset(map(type, values)):
        raise TypeError(f"something else in the place of a list of {'whole ' if dtype is np.int32 else ''}numbers")
    if dtype is np.int32 and values and not (min(values) >= _LEAST_ID and max(values) <= _MOST_ID):
        raise TypeError(f"a number beyond {_MOST_ID} in the place of a token's")  # some versions of numpy would wrap it
    return np.array(values, dtype=dtype)


def _checked(array: NDArray[Any], dtype: DTypeLike, where: str) -> NDArray[Any]:
    """The array, if it has the declared type: with another dtype, reading would give other numbers."""
    if array.dtype != dtype or array.ndim != 1:
        raise StoreError(
            f"{where} is {array.dtype} with {array.ndim} axes, the record says {np.dtype(dtype)} with one: "
            "convert it where it is made"
        )
    return array
