"""A report section on message lengths, as docs/report.md shows it; tests add it to the report."""

from teamtr.analysis.report.parts import Axis, Chart, Nothing, Part, agent_color, dots
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.section import Data, Section, register
from teamtr.analysis.report.words import num


def compute(run: Reading) -> Data:
    """Mean tokens of a message by stage and agent, in the batches that were read (none on the live page)."""
    lengths: dict[tuple[int, str], list[int]] = {}
    for file, batch in run.sample.batches if run.sample else ():
        for turn in (turn for episode in batch.episodes for turn in episode.turns):
            lengths.setdefault((file.stage, turn.agent), []).append(len(turn.token_ids))
    means = [{"stage": stage, "agent": agent, "tokens": sum(n) / len(n)} for (stage, agent), n in lengths.items()]
    return {"lengths": means}


def show(data: Data) -> list[Part]:
    rows, agents = data["lengths"], data["run"]["agents"]
    if not rows:
        return [Nothing("No stored conversations were read.")]
    series = [
        dots(
            [row for row in rows if row["agent"] == agent],
            "stage",
            "tokens",
            tip=lambda row: f"{row['agent']}, stage {row['stage']}: {num(row['tokens'])}",
            color=agent_color(agents, agent),
            label=agent,
        )
        for agent in agents
    ]
    caption = "Mean over the messages of a stage. Good: no longer than the task needs."
    return [Chart("Tokens of a message", Axis("stage", whole=True), Axis("tokens", low=0), series, caption)]


register(
    Section(
        key="lengths",
        title="Message lengths",
        place=45,  # after Staleness
        lead="Do messages grow?",
        compute=compute,
        show=show,
    )
)
