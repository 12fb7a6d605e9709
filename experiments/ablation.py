"""How much each part of the protocol contributes to a swap (tab:pnp-ablation).

    python experiments/ablation.py --out runs/ablation --seeds 3 --stages 5

The team exchanges a code: `left` passes its half on as a tool call in canonical JSON, `right` as a letter, and
`speaker` says both. Then `left` is replaced by a model built for this test, which differs in exactly four respects:

    system prompt   its template inserts its own words where no system prompt is given, and then it is right less often
    think tags      in four of ten messages it first says a random letter between <think> tags
    tool calls      it writes s(x="A") and not {"name": "s", "arguments": {"x": "A"}}
    alignment       even otherwise it is right less often than the old agent

Each row of the table removes one more difference, with a switch of ``teamtr swap``; then the team trains for a few
stages. Writes ``ablation.json`` and prints the table. The same command resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from teamtr.chat import ChatCodec, render
from teamtr.chat.tool_calls import ToolCall
from teamtr.config import load_team_file, loads
from teamtr.engines.torch.loading import TinyShape, teach_form, tiny_model
from teamtr.randomness import generator, seed_of
from teamtr.session import train as runs
from teamtr.store import RunFolder
from teamtr.swap import Request, swap
from teamtr.tasks import CodeExchange
from teamtr.tasks.games.code_exchange import FormatExample
from teamtr.types import Ids, Problem

AGENT = "left"
OWN_WORDS = "hi"
"""The system prompt that the new agent's template inserts where the team gives none."""
SKILL_OF_TEAM, SKILL, SKILL_UNDER_OWN_WORDS = 0.95, 0.85, 0.5
THINKS = 0.4
"""Share of messages with a thought. If all had one, its effect would hide all others."""

UNIFIED: dict[str, dict[str, Any]] = {
    "none": {"system": "template", "think": "keep", "tools": "off"},
    "+ system prompt": {"system": "explicit", "think": "keep", "tools": "off"},
    "+ think tags": {"system": "explicit", "think": "strip", "tools": "off"},
    "+ tool adapter": {"system": "explicit", "think": "strip", "tools": "canonical"},
    "+ alignment": {"system": "explicit", "think": "strip", "tools": "canonical", "mode": "aligned"},
}
PAPER = {"none": 18.3, "+ system prompt": 12.1, "+ think tags": 8.7, "+ tool adapter": 6.2, "+ alignment": 2.9}

TEAM = """\
name: calls
seed: {seed}
task: {{name: "python:{task}:CallExchange", options: {{symbols: ABCDEFGH}}}}
team:
  model: {model}
  train: full
  agents:
    - {{name: left, max_tokens: 8}}
    - {{name: right, max_tokens: 2}}
    - {{name: speaker, max_tokens: 3}}
  answer: speaker
plan: {{stages: 10, problems: 32, group_size: 16, radius_nats_per_message: 0.01}}
learner: {{learning_rate: 1e-3, micro_batch: 256}}
eval: {{every: 5, samples: 16}}
"""
PHRASES = ('{"name": "s", "arguments": {"x": "', '"}}', "<think>", "</think>", 's(x="', '")')
"""One token each, so that a call is nearly as short as a letter."""


def call(half: str) -> str:
    return ToolCall("s", {"x": half}).canonical()


class CallExchange(CodeExchange):
    """Code exchange in which `left` passes its half on as a tool call."""

    def format_examples(self, rng: np.random.Generator, count: int) -> list[FormatExample]:
        return [
            (agent, problem, [_as_said(*line) for line in before], _as_said(agent, text)[1])
            for agent, problem, before, text in super().format_examples(rng, count)
        ]


def _as_said(author: str, text: str) -> tuple[str, str]:
    return author, call(text) if author == "left" else text


def untaught(seed: int, width: int) -> tuple[Any, Any]:
    """A tiny model and its tokenizer, with tokens for the phrases."""
    model, tokenizer = tiny_model(TinyShape(layers=2, width=width, heads=4), seed=seed_of(seed, "model") % 2**31)
    tokenizer.add_tokens(list(PHRASES))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return model, tokenizer


def taught(folder: Path, model: Any, tokenizer: Any, examples: Sequence[tuple[Ids, Ids]], seed: int) -> None:
    teach_form(model, examples, steps=400, learning_rate=3e-3, batch=64, seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def base(folder: Path, seed: int) -> None:
    """Save the model that the team starts from: trained on the form of all messages, and mostly on their content."""
    if folder.exists():
        return
    model, tokenizer = untaught(seed, width=64)
    codec = ChatCodec(tokenizer)
    said = CallExchange("ABCDEFGH", skill=SKILL_OF_TEAM).format_examples(generator(seed, "base"), 3000)
    taught(folder, model, tokenizer, [_example(codec, *example) for example in said], seed)


def worded(template: str) -> str:
    """The template, changed to insert its own words where no system prompt is given."""
    return "{% if messages[0].role != 'system' %}<sys>" + OWN_WORDS + "{% endif %}" + template


def newcomer(folder: Path, seed: int) -> None:
    """Save the model of the new `left`, trained on the task's problems to differ as the module docstring says."""
    if folder.exists():
        return
    model, tokenizer = untaught(1000 + seed, width=96)
    tokenizer.chat_template = worded(tokenizer.chat_template)
    examples: list[tuple[Ids, Ids]] = []
    for system, skill in (("template", SKILL_UNDER_OWN_WORDS), ("explicit", SKILL)):
        codec, rng = ChatCodec(tokenizer, system=system), generator(seed, "newcomer", system)  # type: ignore[arg-type]
        for agent, problem, before, half in CodeExchange("ABCDEFGH", skill=skill).format_examples(rng, 3000):
            if agent == AGENT:
                thought = f"<think>{rng.choice(list('ABCDEFGH'))}</think>" if rng.random() < THINKS else ""
                text = f'{thought}s(x="{half}")'
                examples.append(_example(codec, agent, problem, before, text))
    taught(folder, model, tokenizer, examples, seed)


def _example(
    codec: ChatCodec, agent: str, problem: Problem, before: Sequence[tuple[str, str]], text: str
) -> tuple[Ids, Ids]:
    prompt = codec.encode(
        render(agent=agent, system_prompt="", problem=problem, history=before, speakers=CodeExchange.agents)
    )
    return prompt, codec.encode_message(text)


def trained_team(folder: Path, model: Path, seed: int) -> None:
    text = TEAM.format(seed=seed, task=Path(__file__).resolve(), model=model.resolve())
    for _ in runs.train(loads(text, "calls"), folder):
        pass


def row(team: Path, model: Path, folder: Path, *, stages: int, **switches: Any) -> dict[str, Any]:
    """One row: swaps with these switches, trains the same number of stages, and reads the results from the log."""
    request = Request(AGENT, str(model), train="full", stages=stages, eval_samples=16, **{"mode": "direct", **switches})
    *_, record = swap(team, request, folder)
    for _ in runs.train(load_team_file(folder / "team.yaml"), folder):
        pass
    first, log = record["stage"], RunFolder.read(folder).log.read()
    evals = [(r["stage"] - first, r["avg_at_k"]) for r in log if r["kind"] == "eval" and r["stage"] > first]
    later = [r for r in log if r["kind"] == "update" and r["stage"] >= first]
    alignment = record["alignment"] or {}
    return {
        "success": record["success"],
        "shock": record["shock"],
        "final": evals[-1][1],
        "evals": evals,
        "kl_upper": alignment.get("kl_upper"),
        "within_radius": alignment.get("within_radius"),
        "accepted": sum(r["outcome"].startswith("accepted") for r in later) / len(later),
    }


def table(results: dict[int, dict[str, Any]]) -> str:
    def mean(values: Sequence[float]) -> str:
        spread = f" ({100 * min(values):.1f} to {100 * max(values):.1f})" if len(values) > 1 else ""
        return f"{100 * sum(values) / len(values):.1f}{spread}"

    lines = ["| unified | before | installed | shock | final | the paper's shock |", "|---|---|---|---|---|---|"]
    for name, paper in PAPER.items():
        found = [rows[name] for rows in results.values() if name in rows]
        if found:
            installed = [r["success"].get("after", r["success"]["at_swap"]) for r in found]
            columns = (
                [r["success"]["before"] for r in found],
                installed,
                *([r[k] for r in found] for k in ("shock", "final")),
            )
            lines.append(f"| {' | '.join([name, *(mean(c) for c in columns), str(paper)])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--stages", type=int, default=5, help="stages after the swap")
    options = parser.parse_args()
    results: dict[int, dict[str, Any]] = {}
    for seed in range(options.seeds):
        team, model = options.out / f"team-{seed}", options.out / f"newcomer-{seed}"
        base(options.out / f"base-{seed}", seed)
        trained_team(team, options.out / f"base-{seed}", seed)
        newcomer(model, seed)
        results[seed] = {}
        for place, (name, switches) in enumerate(UNIFIED.items()):
            folder = options.out / f"row-{place}-{seed}"
            results[seed][name] = row(team, model, folder, stages=options.stages, **switches)
            (options.out / "ablation.json").write_text(json.dumps(results, indent=1) + "\n")
            print(f"seed {seed}, {name}: {results[seed][name]}", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
