"""The chat page, which shows who said what: a single file that connects only to its own server.

Model output is inserted with ``textContent`` only. The Content-Security-Policy allows only our one script and one style
sheet, by their hashes. The key is in the fragment of the link (after ``#``), which a browser does not send.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files


@cache
def _asset(name: str) -> str:
    return (files("teamtr.serving") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def page_policy() -> str:
    """The Content-Security-Policy of the page."""
    return (
        f"default-src 'none'; script-src {_hash(_asset('chat.js'))}; style-src {_hash(_asset('chat.css'))}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@cache
def chat_page() -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>TeamTR</title>
<style>{_asset("chat.css")}</style>
</head>
<body>
<header>
<h1 id="title">TeamTR</h1>
<label>Ask <select id="model"></select></label>
<label><input type="checkbox" id="show" checked> show the discussion</label>
<button id="clear" type="button">New conversation</button>
</header>
<main id="talk" aria-live="polite"><noscript>This page needs its own script.</noscript></main>
<form id="form">
<div class="row">
<textarea id="question" rows="2" placeholder="Your message" aria-label="Your message"></textarea>
<button id="send" type="submit">Send</button>
</div>
<p id="note" role="status"></p>
</form>
<script>{_asset("chat.js")}</script>
</body>
</html>
"""
