"""The report page: a self-contained HTML file with its data, style and script, which may not load anything else.

Model text is treated as hostile. It enters the page only as JSON (or as compressed bytes) inside a script element that
is never executed, with every character escaped that could end it; the script writes it only through ``textContent``.
The Content-Security-Policy allows only our one script and one style, by their hashes, and no external resources: even
with an error in the script, nothing else can be loaded or run.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from teamtr.analysis.report.comparison import comparison_sections
from teamtr.analysis.report.section import Data, sections, shown
from teamtr.analysis.report.static import Report
from teamtr.text import visible

_SCRIPTS = ("dom.js", "charts.js", "parts.js", "opening.js")
"""Scripts before those of sections; ``main.js`` comes last and assembles the page."""
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def report_page(report: Report) -> str:
    """The static report as one HTML file."""
    blobs = {name: _blob(payload) for name, payload in report.conversations.items()}
    numbered = {name: f"batch-{k}" for k, name in enumerate(blobs)}
    data = {"mode": "report", "report": report.data, "sections": shown_plainly(report.data), "blobs": numbered}
    held = "\n".join(
        f'<script type="application/octet-stream" id="{numbered[name]}">{blob}</script>' for name, blob in blobs.items()
    )
    return _page(f"{report.data['run']['name']} · TeamTR", data, held, connect="'none'")


def compare_page(comparison: Mapping[str, Any]) -> str:
    """Several runs on one axis, as one HTML file."""
    held = [section.as_plain() for section in comparison_sections(comparison)]
    data = {"mode": "compare", "compare": comparison, "sections": held}
    return _page("Comparison · TeamTR", data, "", connect="'none'")


def live_page() -> str:
    """The page that loads runs from its own server."""
    return _page("TeamTR", {"mode": "live"}, "", connect="'self'")


def shown_plainly(data: Data) -> list[dict[str, Any]]:
    """The contents of all sections as plain values, for the page's script."""
    return [section.as_plain() for section in shown(data)]


def embedded_json(value: Any) -> str:
    """JSON that cannot end its script element, whatever its strings contain."""
    text = to_json(value)
    for character, escape in _UNSAFE.items():
        text = text.replace(character, escape)
    return text


def to_json(value: Any) -> str:
    """JSON in ASCII. Values are converted by ``plain`` only if they contain numbers that JSON lacks, which is rare."""
    try:
        return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def plain(value: Any) -> Any:
    """The same value with numbers that JSON lacks as text ("nan", "inf"), which is shown but never plotted."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _blob(payload: Mapping[str, Any]) -> str:
    """The payload compressed, so that it costs little until it is viewed; base64 needs no escaping."""
    return base64.b64encode(gzip.compress(to_json(payload).encode(), compresslevel=6, mtime=0)).decode()


def _scripts() -> list[str]:
    return [*_SCRIPTS, *(section.script for section in sections() if section.script), "main.js"]


@cache
def _asset(name: str) -> str:
    return (files("teamtr.analysis.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _page(title: str, data: Mapping[str, Any], held: str, *, connect: str) -> str:
    style = _asset("page.css")
    script = "\n".join(['(() => {\n"use strict";', *map(_asset, _scripts()), "})();"])
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{html.escape(visible(title))}</title>
<style>{style}</style>
</head>
<body>
<main id="page"><noscript>This report draws its plots with its own script. Allow it, or use
<code>teamtr report RUN --format md</code>.</noscript></main>
<script type="application/json" id="data">{embedded_json(data)}</script>
{held}
<script>{script}</script>
</body>
</html>
"""
