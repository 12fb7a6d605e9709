"""Episodes on disk: gzip of JSON lines, a header and then one episode per line.

The same batch gives the same bytes (fixed level, no time stamp, sorted keys), and reading gives the batch back to
the last bit, so that a resumed run can learn from the very episodes that the killed one sampled.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from teamtr.store.atomic import StoreError, read_whole, write_atomic
from teamtr.store.log import decode, encode
from teamtr.types import Episode, Message, Problem, Reply, RolloutBatch, Turn, Verdict

KIND = "teamtr-episodes"
FORMAT = 1


def batch_name(stage: int, step: int) -> str:
    """The file name of the batch sampled before this step of this stage; names sort in the order of time."""
    if stage < 0 or step < 0:
        raise ValueError(f"stage and step count from 0, got stage {stage}, step {step}")
    return f"stage-{stage:04d}-step-{step:02d}.jsonl.gz"


def probe_name(stage: int) -> str:
    """The file name of the batch that a stage's probes take for stale: sampled at its start, learned from by none."""
    return f"probe-{stage:04d}.jsonl.gz"


def write_episodes(path: Path, batch: RolloutBatch) -> None:
    """Write the batch atomically."""
    weights = batch.log_weights_E
    header = {
        "kind": KIND,
        "format": FORMAT,
        "group_size": batch.group_size,
        "problems": [_problem_to_json(problem) for problem in batch.problems],
        "log_weights": None if weights is None else _checked(weights, np.float64, "log_weights_E"),
    }
    lines = [encode(header, "batch", sort_keys=True)]
    for e, episode in enumerate(batch.episodes):
        lines.append(encode(_episode_to_json(episode, f"episode {e}"), f"episode {e}", sort_keys=True))
    write_atomic(path, gzip.compress(b"\n".join(lines) + b"\n", compresslevel=1, mtime=0))


def read_episodes(path: Path) -> RolloutBatch:
    """The batch that was written there. A torn or damaged file is a StoreError that names it."""
    advice = f"restore {path} from a copy, or remove it"
    try:
        header_line, *lines = gzip.decompress(read_whole(path)).splitlines()
        header = decode(header_line)
        if header["kind"] != KIND:
            raise ValueError(f"its kind is {header['kind']!r}")
        if header["format"] != FORMAT:
            raise StoreError(f"{path} has format {header['format']}, this version reads {FORMAT}: update teamtr")
        weights = header["log_weights"]
        return RolloutBatch(
            problems=tuple(_problem_from_json(problem) for problem in header["problems"]),
            episodes=tuple(_episode_from_json(decode(line)) for line in lines),
            group_size=header["group_size"],
            log_weights_E=None if weights is None else np.array(weights, dtype=np.float64),
        )
    except FileNotFoundError as error:
        raise StoreError(f"there is no episode file {path}: check the stage and step in its name") from error
    except (OSError, EOFError, zlib.error) as error:
        raise StoreError(f"{path} is torn or damaged ({error}): {advice}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} does not hold episodes ({error!r}): {advice}") from error


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
        id=body["id"],
        prompt=body["prompt"],
        answer=body["answer"],
        private=body["private"],
        columns=body["columns"],
    )


def _episode_to_json(episode: Episode, where: str) -> dict[str, Any]:
    return {
        "problem_id": episode.problem_id,
        "group_index": episode.group_index,
        "turns": [_turn_to_json(turn, f"{where}, turn {t}") for t, turn in enumerate(episode.turns)],
        "answer": episode.answer,
        "verdict": {
            "kind": episode.verdict.kind,
            "reward": float(episode.verdict.reward),
            "extracted": episode.verdict.extracted,
        },
        "team_version": episode.team_version,
        "replies": [_reply_to_json(reply) for reply in episode.replies],
    }


def _episode_from_json(body: dict[str, Any]) -> Episode:
    verdict = body["verdict"]
    return Episode(
        problem_id=body["problem_id"],
        group_index=body["group_index"],
        turns=tuple(_turn_from_json(turn) for turn in body["turns"]),
        answer=body["answer"],
        verdict=Verdict(kind=verdict["kind"], reward=verdict["reward"], extracted=verdict["extracted"]),
        team_version=body["team_version"],
        replies=tuple(_reply_from_json(reply) for reply in body.get("replies", ())),  # older files have none
    )


def _reply_to_json(reply: Reply) -> dict[str, Any]:
    messages = [{"author": m.author, "text": m.text, "tool_calls": m.tool_calls} for m in reply.messages]
    return {"messages": messages, "ends": reply.ends}


def _reply_from_json(body: dict[str, Any]) -> Reply:
    messages = tuple(Message(m["author"], m["text"], tuple(m["tool_calls"])) for m in body["messages"])
    return Reply(messages, body["ends"])


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
    }


def _turn_from_json(body: dict[str, Any]) -> Turn:
    return Turn(
        agent=body["agent"],
        round=body["round"],
        context_ids=np.array(body["context_ids"], dtype=np.int32),
        token_ids=np.array(body["token_ids"], dtype=np.int32),
        # Written with the digits of a float64, so that the way back through one rounds nothing.
        sampler_logprobs=np.array(body["sampler_logprobs"], dtype=np.float32),
        finish=body["finish"],
        agent_version=body["agent_version"],
        text=body["text"],
    )


def _checked(array: NDArray[Any], dtype: DTypeLike, where: str) -> NDArray[Any]:
    """The array, if it is what the record promises: another type would come back as other numbers."""
    if array.dtype != dtype or array.ndim != 1:
        raise StoreError(
            f"{where} is {array.dtype} with {array.ndim} axes, the record says {np.dtype(dtype)} with one: "
            "convert it where it is made"
        )
    return array
