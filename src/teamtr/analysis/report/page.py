"""The page: one HTML file that holds its data, its style and its script, and may ask nobody for anything.

Model text is hostile until proven otherwise. It enters the page only as JSON (or as compressed bytes) inside a script
element that is never executed, with every character escaped that could end it; the script writes it with
``textContent`` alone. The Content-Security-Policy allows the one script and the one style of ours, by their hash, and
nothing from anywhere: a slip in the script would still load and run nothing.
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
"""Before the scripts of sections; ``main.js`` comes last and puts the page together."""
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
    """The page that asks its own server for runs."""
    return _page("TeamTR", {"mode": "live"}, "", connect="'self'")


def shown_plainly(data: Data) -> list[dict[str, Any]]:
    """What the sections show of a report's data, as the page's script takes it."""
    return [section.as_plain() for section in shown(data)]


def embedded_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever the strings hold."""
    text = to_json(value)
    for character, escape in _UNSAFE.items():
        text = text.replace(character, escape)
    return text


def to_json(value: Any) -> str:
    """JSON in ASCII. Almost nothing holds a number that JSON lacks, so only what does is walked through."""
    try:
        return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def plain(value: Any) -> Any:
    """The same value with numbers that JSON lacks written as text ("nan", "inf"): shown, never plotted."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _blob(payload: Mapping[str, Any]) -> str:
    """Compressed, so that it costs nothing until it is looked at; base64 holds no character that needs escaping."""
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
