"""The page of a real evaluation in a real browser: nothing is clipped, wide, narrow and dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftlab.heads.eagle3 import Eagle3Head
from draftlab.report.html import write_html
from draftlab.target_model.model import Target
from tests.helpers.evaluation import evaluate

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no program named chromium on PATH"),
]

FIRST_SCREEN = 900

# A text is clipped if it reaches out of the nearest element around it that is a box.
MEASURE = """
document.querySelectorAll("details").forEach(one => one.open = true);
const clipped = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const text = texts.currentNode, range = document.createRange();
  let box = text.parentElement;
  while (getComputedStyle(box).display === "inline") box = box.parentElement;
  if (!text.data.trim() || ["STYLE", "SCRIPT"].includes(box.tagName)) continue;
  range.selectNodeContents(text);
  const outer = box.getBoundingClientRect();
  for (const inner of range.getClientRects())
    if (inner.left < outer.left - 1 || inner.right > outer.right + 1) clipped.push(text.data);
}
const page = innerWidth;
document.querySelectorAll("body *").forEach(one => {
  const inside = one.parentElement.closest(".scroll");
  if (!inside && one.getBoundingClientRect().right > page + 1) clipped.push(one.outerHTML);
});
const box = one => one.getBoundingClientRect();
const figures = [...document.querySelectorAll("figure")].map(box);
parent.postMessage(JSON.stringify({
  page, clipped,
  width: document.documentElement.scrollWidth,
  bottoms: Object.fromEntries(["h1", ".verdict", ".conditions"].map(
    name => [name, box(document.querySelector(name)).bottom])),
  header: document.querySelector("header").innerText,
  conditions: document.querySelector(".conditions").innerText,
  figures: figures.map(one => [one.left, one.right, one.top]),
  pictures: [...document.images].every(one => one.complete && one.naturalWidth > 0),
  ground: getComputedStyle(document.body).backgroundColor,
}), "*");
"""


def chromium(folder: Path, page: Path, width: int, *options: str, dark: bool) -> str:
    """Run Chromium without a window on a page, and return what it prints."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=5000",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2400",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", *options, page.as_uri(),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return result.stdout


def measured(folder: Path, width: int, *, dark: bool = False) -> dict[str, Any]:
    """Return what `MEASURE` finds in report.html at a width, and take a screenshot of the page.

    The page is in a frame, since a window cannot be as narrow as a phone.
    """
    frame = (
        '<!doctype html><meta name="color-scheme" content="light dark"><body style="margin: 0">'
        '<iframe src="{}" style="border: 0; width: {}px; height: 2400px"></iframe><pre></pre>'
        "<script>onmessage = event => document.querySelector('pre').textContent = event.data"
        "</script>"
    )
    report = (folder / "report.html").read_text(encoding="utf-8")
    script = f"<script>addEventListener('load', () => {{{MEASURE}}})</script></body>"
    (folder / "measured.html").write_text(report.replace("</body>", script), encoding="utf-8")
    page = folder / "frame.html"
    page.write_text(frame.format("report.html", width), encoding="utf-8")
    screenshot = folder / f"{width}_{'dark' if dark else 'light'}.png"
    chromium(folder, page, width, f"--screenshot={screenshot}", dark=dark)
    assert screenshot.read_bytes().startswith(b"\x89PNG")
    page.write_text(frame.format("measured.html", width), encoding="utf-8")
    dom = chromium(folder, page, width, "--dump-dom", dark=dark)
    return json.loads(html.unescape(re.search(r"<pre>(.*)</pre>", dom, re.DOTALL)[1]))


def test_the_page_fits_its_window(target: Target, head: Eagle3Head, tmp_path: Path) -> None:
    settings = {"temperatures": [0, 0.8], "k": [1, 3], "draft_probs": "both"}
    report = evaluate(target, head, head, timing_batches=[1, 2], **settings)
    report.target["name"] = "a/target-with-a-long-name" * 3
    write_html(report, tmp_path)
    wide, narrow = measured(tmp_path, 1200), measured(tmp_path, 400)
    dark = measured(tmp_path, 1200, dark=True)
    for found, width in ((wide, 1200), (narrow, 400), (dark, 1200)):
        assert found["page"] == width
        assert found["width"] <= width
        assert found["clipped"] == []
        assert found["pictures"]
    assert max(wide["bottoms"].values()) <= FIRST_SCREEN
    for name in ("a head", "another", "target-with-a-long-name", "K = "):
        assert name in " ".join(wide["header"].split())  # some spaces do not break
    for name in ("target", "suite", "device", "dtype", "batch", "prompts"):
        assert name in wide["conditions"].split("\n")

    tops = [[top for _, _, top in found["figures"]] for found in (wide, narrow)]
    assert len(tops[0]) >= 4
    assert all(tops[0].count(top) == 2 for top in tops[0][: len(tops[0]) // 2 * 2])
    assert len(set(tops[1])) == len(tops[1])
    lefts, rights = zip(*((left, right) for left, right, _ in wide["figures"]), strict=True)
    assert max(rights) - min(lefts) > 1100  # both columns together are as wide as the page
    assert dark["ground"] != wide["ground"]
