"""Writes all figures of some runs into one folder: drawings, their numbers as CSV, and a page that explains them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from teamtr.analysis.figures.catalogue import FIGURES, Figure
from teamtr.analysis.figures.drawing import Drawing, Lacking
from teamtr.analysis.figures.paint import Form, csv_text, painted
from teamtr.analysis.figures.runs import Run
from teamtr.errors import UserError
from teamtr.settings.refusals import hint
from teamtr.store import write_atomic
from teamtr.text import in_markdown, visible

PAGE = """\
<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src 'self' file:; style-src 'unsafe-inline'">
<title>{title}</title><style>:root {{ color-scheme: light dark }} body {{ font: 16px/1.5 system-ui, sans-serif;
margin: 2rem auto; max-width: 70rem; padding: 0 1rem }} img {{ max-width: 100%; background: #fff }}
table {{ border-collapse: collapse }}
td, th {{ padding: 0.2rem 0.7rem; text-align: left; border-bottom: 1px solid #8884 }}
td + td {{ white-space: nowrap }} pre {{ overflow-x: auto }}</style></head>
<body>
{body}
</body></html>
"""


@dataclass(frozen=True)
class Gallery:
    """The figures that were drawn, and those that could not be."""

    drawn: tuple[tuple[Figure, Drawing], ...]
    lacking: tuple[tuple[Figure, Lacking], ...]


def hang(runs: Sequence[Run], folder: Path, only: Sequence[str] = (), also: Sequence[Form] = ()) -> Gallery:
    """Draw the figures in ``only`` (empty: all) into ``folder`` as SVG and in the formats of ``also``, with
    ``index.html`` and ``index.md``."""
    known = {figure.name: figure for figure in FIGURES}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise UserError(f"there is no figure {unknown[0]!r}{hint(unknown[0], known, 'there are')}")
    drawn, lacking = [], []
    for figure in [known[name] for name in only] or FIGURES:
        try:
            drawing = figure.draw(runs)
            files = {form: painted(figure.title, drawing, form) for form in dict.fromkeys(("svg", *also))}
            table = csv_text(drawing).encode()
        except Lacking as why:
            lacking.append((figure, why))
            continue
        except ImportError:  # matplotlib: no figure can be drawn
            raise
        except Exception as error:  # an unexpected log must not prevent the other figures
            lacking.append((figure, _unforeseen(error)))
            continue
        for form, file in files.items():
            write_atomic(folder / f"{figure.name}.{form}", file)
        write_atomic(folder / f"{figure.name}.csv", table)
        drawn.append((figure, drawing))
    gallery = Gallery(tuple(drawn), tuple(lacking))
    write_atomic(folder / "index.md", _markdown(runs, gallery).encode())
    write_atomic(folder / "index.html", _page(runs, gallery).encode())
    return gallery


def _unforeseen(error: Exception) -> Lacking:
    told = visible(" ".join(str(error).split()))[:200]
    return Lacking(
        f"the logs hold what this figure cannot read ({type(error).__name__}: {told})",
        "look for a damaged record with teamtr report RUN",
    )


def _markdown(runs: Sequence[Run], gallery: Gallery) -> str:
    parts = ["# Figures", f"Of {in_markdown(', '.join(run.label for run in runs))}."]
    for figure, drawing in gallery.drawn:
        parts += [
            f"## {figure.title}",
            f"![{figure.title}]({figure.name}.svg)",
            f"{in_markdown(drawing.caption)} **Good:** {in_markdown(drawing.good)}. "
            f"Paper: {', '.join(f'`{label}`' for label in figure.paper)}. [Numbers]({figure.name}.csv).",
            *(f"- {in_markdown(note)}" for note in drawing.notes),
        ]
    if gallery.lacking:
        parts += ["## Not drawn", *(f"- {f.title}: {in_markdown(str(why))}" for f, why in gallery.lacking)]
    return "\n\n".join(parts) + "\n"


def _page(runs: Sequence[Run], gallery: Gallery) -> str:
    def safe(text: str) -> str:
        return html.escape(visible(text))

    parts = [f"<h1>Figures</h1><p>Of {safe(', '.join(run.label for run in runs))}.</p>"]
    for figure, drawing in gallery.drawn:
        notes = "".join(f"<li>{safe(note)}</li>" for note in drawing.notes)
        parts.append(
            f'<h2 id="{figure.name}">{safe(figure.title)}</h2><img src="{figure.name}.svg" alt="{safe(figure.title)}">'
            f"<p>{safe(drawing.caption)} <b>Good:</b> {safe(drawing.good)}. Paper: {safe(', '.join(figure.paper))}. "
            f'<a href="{figure.name}.csv">Numbers</a>.</p><ul>{notes}</ul>'
        )
    if gallery.lacking:
        rows = "".join(f"<li>{safe(figure.title)}: {safe(str(why))}</li>" for figure, why in gallery.lacking)
        parts.append(f"<h2>Not drawn</h2><ul>{rows}</ul>")
    return PAGE.format(title="Figures", body="\n".join(parts))
