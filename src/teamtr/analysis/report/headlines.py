"""The five questions of whoever trains a team, each answered in a sentence from the report's data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from teamtr.reports import was_kept

Data = Mapping[str, Any]
Answer = dict[str, str]
MOST_QUOTED, LONGEST_QUOTE = 4, 40
"""Messages, and characters of each, of the conversation at the top of a report."""


def headlines(data: Data) -> list[Answer]:
    """Question, answer and tone ("good", "bad" or "plain") of each."""
    return [_improves(data), _inside(data), _stale(data), _says(data), _costs(data)]


def _answer(question: str, tone: str, headline: str, text: str) -> Answer:
    return {"question": question, "tone": tone, "headline": headline, "text": text}


def _improves(data: Data) -> Answer:
    question, evals = "Does it improve?", data["evals"]
    if len(evals) >= 2:
        first, last = evals[0], evals[-1]
        points = 100 * (last["success"] - first["success"])
        sure = None not in (first["high"], last["low"]) and last["low"] > first["high"]
        worse = None not in (first["low"], last["high"]) and last["high"] < first["low"]
        tone = "good" if sure else "bad" if worse else "plain"
        verdict = "" if sure or worse else " The intervals overlap: more held-out problems would tell."
        text = (
            f"Held-out success went from {_percent(first['success'])}{_range(first)} to {_percent(last['success'])}"
            f"{_range(last)} in {last['stage']} stages.{verdict}"
        )
        return _answer(question, tone, f"{points:+.0f} points", text)
    rewards = [u["reward"] for u in data["updates"] if u["reward"] is not None]
    if len(rewards) >= 2:
        text = f"The reward of training batches went from {rewards[0]:.3f} to {rewards[-1]:.3f}; "
        return _answer(question, "plain", f"{rewards[-1] - rewards[0]:+.3f} reward", text + "evaluations are missing.")
    return _answer(question, "plain", "not known", "There are too few evaluations and updates to tell.")


def _silent(updates: list[Data]) -> str:
    """What is told of batches in which every group's episodes earned the same."""
    silent = sum(u["outcome"] == "skipped_no_signal" for u in updates)
    return f" {silent} had no signal: in every group all episodes earned the same." if silent else ""


def _inside(data: Data) -> Answer:
    question, updates = "Is each update inside its region?", data["updates"]
    kept = [u for u in updates if was_kept(u["outcome"])]
    if not kept:
        told = f"{len(updates)} updates were made, none was kept.{_silent(updates)}"
        return _answer(question, "plain", "no update kept", told)
    outside = sum(u["outside"] for u in kept)
    fills = [u["kl_upper"] / u["radius"] for u in kept if u["kl_upper"] is not None and u["radius"]]
    backed = sum((u["backtracks"] or 0) > 0 for u in kept)
    restored = sum(u["outcome"] == "restored" for u in updates)
    fullest = f" The fullest used {_percent(max(fills))} of its radius." if fills else ""
    ungated = " This plan has no gate." if data["run"]["gated"] is False else ""
    text = (
        f"Judged by the upper bound of the exact KL.{fullest} {backed} stepped back to get inside, {restored} of "
        f"{len(updates)} were restored.{_silent(updates)}{ungated}"
    )
    headline = f"{len(kept) - outside} of {len(kept)} inside"
    return _answer(question, "bad" if outside else "good", headline, text)


def _stale(data: Data) -> Answer:
    question = "Would stale rollouts have fooled it?"
    weights, steps = data["weights"], data["staleness"]
    if weights is not None:
        text = (
            f"This run reuses rollouts. After update {weights['update']} they were worth "
            f"{_percent(weights['effective_share'])} of as many fresh ones (ESS/B); the largest weight was "
            f"{weights['largest']:.2g}."
        )
        return _answer(question, "bad" if weights["effective_share"] < 0.9 else "plain", "rollouts reused", text)
    if data["probes"] and data["probes"]["by_stage"]:
        return _probed(question, data)
    if not steps:
        text = "Not measured: it needs stored episodes of at least two steps of one stage (`teamtr report` reads them)."
        return _answer(question, "plain", "not measured", text)
    seen = [s for s in steps if s["drift"] is not None and s["drift"]["repeated"] >= 0.5]
    moved = [s for s in steps if s["moved"] is not None and not s["moved"]["lower"] <= 0.0 <= s["moved"]["upper"]]
    largest = max(seen, key=lambda s: s["drift"]["excess"], default=None)
    if largest is None:
        contexts = "Contexts do not repeat, not even by what was stated in them, so their drift cannot be counted."
    elif largest["drift"]["excess"] < 0.005:
        contexts = "Within a stage contexts moved no more than chance moves them."
    else:
        moved_by = _percent(largest["drift"]["excess"])
        how = {"statements": ", by what was stated", "agreement": ", by who agrees with whom"}.get(largest["form"], "")
        contexts = f"Within a stage the contexts of {largest['agent']} moved by up to {moved_by} beyond chance{how}."
    text = (
        f"{contexts} In {len(moved)} of {len(steps)} later steps the same problems already paid differently than at "
        "the stage's start (95 % intervals)."
    )
    # One interval in twenty misses zero by chance; a tenth of them is taken to mean something.
    fooled = len(moved) > 0.1 * len(steps) or (largest is not None and largest["drift"]["excess"] > 0.05)
    fresh = " Every update here saw fresh ones." if data["run"]["fresh"] else ""
    return _answer(question, "plain", "somewhat" if fooled else "hardly", text + fresh)


def _probed(question: str, data: Data) -> Answer:
    """From the probes: how far stale rollouts misjudge updates, on batches that no update learned from."""
    judged = [probe for probe in data["probes"]["updates"] if probe["gap"] is not None]
    told = [probe for probe in judged if not probe["gap"]["lower"] <= 0.0 <= probe["gap"]["upper"]]
    stages = data["probes"]["by_stage"].values()
    gap, noise = (sum(stage[key] for stage in stages) / len(judged) for key in ("total", "noise"))
    shares = [probe["weights"]["effective_share"] for probe in judged if "effective_share" in probe["weights"]]
    worth = (
        f" Reused, they were worth at least {_percent(min(shares))} of as many fresh ones (ESS/B)." if shares else ""
    )
    text = (
        f"In {len(told)} of {len(judged)} probed updates rollouts of the team that began the stage say something else "
        f"than fresh ones of what the update is worth (95 % intervals). They are {gap:.2g} apart on average, where "
        f"sampling alone would show {noise:.2g}.{worth}"
    )
    # One interval in twenty misses zero by chance; a tenth of them is taken to mean something.
    return _answer(question, "plain", "somewhat" if len(told) > 0.1 * len(judged) else "hardly", text)


def _says(data: Data) -> Answer:
    question, batches = "What do the agents say to each other?", data["batches"]
    if not batches:
        return _answer(question, "plain", "not stored", "No episodes are stored with this run.")
    verdicts = data["evals"][-1]["verdicts"] if data["evals"] else {}
    told = ", ".join(f"{count} {kind}" for kind, count in verdicts.items())
    text = _quoted(data["example"]) if data["example"] else ""
    text += f"{len(batches)} batches are stored; read them under Conversations."
    text += f" Verdicts of the last evaluation: {told}." if told else ""
    return _answer(question, "plain", f"{data['cost']['episodes']:,} episodes", text)


def _quoted(episode: Data) -> str:
    """The beginning of one conversation, its first words each."""
    said = episode["said"][:MOST_QUOTED]
    quotes = [f"{message['who']} “{_first_words(message['text'])}”" for message in said]
    more = len(episode["said"]) - len(said)
    after = f", and {more} more" if more else ""
    return f"One of the last: {', '.join(quotes)}{after}; verdict: {episode['verdict']}. "


def _first_words(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_QUOTE else f"{line[: LONGEST_QUOTE - 1]}…"


def _costs(data: Data) -> Answer:
    cost, run = data["cost"], data["run"]
    ratio = cost["overhead"]["token_ratio"]
    against = (
        f" Sampling anew before every update took {ratio:.2f} times the tokens of naive sequential training"
        if ratio is not None and ratio > 1.001
        else ""
    )
    time_ratio = cost["overhead"]["seconds_ratio"]
    against += f" and about {time_ratio:.2f} times its time." if against and time_ratio else "." if against else ""
    text = f"{len(data['updates'])} updates in {clock(run['seconds'])}, {cost['episodes']:,} episodes.{against}"
    return _answer("What did it cost?", "plain", f"{cost['sampled_tokens']:,} tokens", text)


def clock(seconds: float | None) -> str:
    """A length of time for a person."""
    if seconds is None:
        return "an unknown time"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _percent(share: float) -> str:
    return f"{_points(share)} %"


def _range(row: Data) -> str:
    return "" if None in (row["low"], row["high"]) else f" ({_points(row['low'])} to {_points(row['high'])})"


def _points(share: float) -> str:
    """Half a point goes up, as in the browser (Python's own goes to the even one): the page says a number one way."""
    return f"{100 * share + 1e-9:.0f}"
