"""The frame of small pages, those of attacks and audits: self-contained, light and dark, no script."""

from __future__ import annotations

import base64
from typing import Any

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="release" content="{{ release }}"><meta name="color-scheme" content="light dark">
<title>{{ title }} · Shoal</title><link rel="icon" href="data:,">
<style>
:root { --paper: #fbfbf9; --ink: #1a1d21; --soft: #5b6470; --rule: #e4e5e1; --bad: #a63314; --good: #0f6b5c; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #111417; --ink: #e8eaec; --soft: #a3adb8; --rule: #2a3037; --bad: #ff9a7c; --good: #6fd3bf; }
}
body { margin: 0 auto; max-width: 1200px; padding: 32px; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 30px; letter-spacing: -.02em; line-height: 1.2; margin: 0 0 8px; } h2 { margin-top: 36px; }
h3 { font-size: 16px; margin: 0; } p { max-width: 80ch; color: var(--soft); }
ul { margin: 0 0 20px; padding-left: 20px; max-width: 80ch; color: var(--soft); }
figure { margin: 24px 0; padding: 12px; overflow-x: auto; background: #fff; border: 1px solid var(--rule);
  border-radius: 12px; }
img { display: block; max-width: none; } @media (min-width: 900px) { img { max-width: 100%; } }
picture img { max-width: 100%; height: auto; }
@media (max-width: 700px) { body { padding: 20px 14px; } figure { padding: 6px; } }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13.5px; }
th, td { text-align: left; padding: 7px 18px 7px 0; border-bottom: 1px solid var(--rule); font-weight: 400;
  vertical-align: top; }
thead th { color: var(--soft); } .leaks, .VIOLATED { color: var(--bad); } .consistent { color: var(--good); }
.figures th, .figures td { white-space: nowrap; }
pre { overflow-x: auto; border: 1px solid var(--rule); border-radius: 8px; padding: 12px; font-size: 12.5px; }
@media print {
  :root { --paper: #fff; --ink: #1a1d21; --soft: #5b6470; --rule: #e4e5e1; --bad: #a63314; --good: #0f6b5c; }
  img { max-width: 100%; } pre { white-space: pre-wrap; }
  table.figures { font-size: 7pt; } .figures th, .figures td { white-space: normal; padding-right: 5px; }
}
</style></head><body><main>
<h1>{{ title }}</h1>
"""
_FOOT = """
{% if command %}<p>Command</p><pre tabindex="0">{{ command }}</pre>{% endif %}
</main></body></html>
"""


def render(body: str, png: bytes, **context: Any) -> str:
    """Fill a page.

    Args:
        body: The page's own part, a jinja2 template; `picture` is the image in base64.
        png: The image.
        context: Values for the template; `title`, `release` and `command` are needed.

    Returns:
        The page as HTML.
    """
    import jinja2

    template = jinja2.Environment(autoescape=True).from_string(_HEAD + body + _FOOT)
    return template.render(context | {"picture": base64.b64encode(png).decode()})
