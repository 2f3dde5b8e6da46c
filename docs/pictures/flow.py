"""Draw the README's picture, for light and for dark pages: `python docs/pictures/flow.py`."""

from __future__ import annotations

from pathlib import Path

COLOURS = {
    "light": {"ink": "#1f2328", "soft": "#59636e", "box": "#f6f8fa", "edge": "#818b98"},
    "dark": {"ink": "#f0f6fc", "soft": "#9198a1", "box": "#151b23", "edge": "#656c76"},
}
STAGES = (
    ("prompts", "prepare", "the target answers"),
    ("hidden states", "record", "of the target's layers"),
    ("draft head", "train", "guesses the next tokens"),
    ("report", "eval", "AL, TPOT, speed-up"),
    ("server", "export", "vLLM, SGLang, …"),
)
TOKENS = (("the", True), ("quick", True), ("brown", True), ("dog", False), ("fox", None))
"""Drafts that the target accepts (True) and rejects (False), and its own token (None)."""


def draw(ink: str, soft: str, box: str, edge: str) -> str:
    """Return the picture as SVG: the stages, and one step of speculative decoding."""
    shapes = []

    def text(x: float, y: float, words: str, size: float, fill: str, more: str = "") -> None:
        shapes.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="middle" {more}>'
            f"{words}</text>"
        )

    def rectangle(x: float, y: float, width: float, height: float, stroke: str) -> None:
        shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{box}" '
            f'stroke="{stroke}"/>'
        )

    for number, (name, verb, note) in enumerate(STAGES):
        x = 10 + 165 * number
        rectangle(x, 28, 140, 62, edge)
        text(x + 70, 20, verb, 12, soft, 'font-family="monospace"')
        text(x + 70, 54, name, 15, ink, 'font-weight="600"')
        text(x + 70, 76, note, 10.5, soft)
        if number:
            shapes.append(
                f'<path d="M{x - 23} 59h18m-6 -5l6 5l-6 5" fill="none" stroke="{edge}" '
                'stroke-width="1.5"/>'
            )
    text(120, 142, "one step: the head drafts 4 tokens,", 12, soft)
    text(120, 160, "the target verifies them in one pass", 12, soft)
    for number, (word, accepted) in enumerate(TOKENS):
        colour = {True: "#2da44e", False: "#cf222e", None: "#0969da"}[accepted]
        x = 250 + 112 * number
        rectangle(x, 126, 96, 32, colour)
        struck = 'text-decoration="line-through"' if accepted is False else ""
        text(x + 48, 147, word, 14, colour, f'font-family="monospace" {struck}')
        caption = {True: "accepted", False: "rejected", None: "the target's own"}[accepted]
        text(x + 48, 174, caption, 11, soft)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 830 184" width="830" '
        f'font-family="system-ui, sans-serif">{"".join(shapes)}</svg>\n'
    )


if __name__ == "__main__":
    for name, colours in COLOURS.items():
        Path(__file__).with_name(f"flow_{name}.svg").write_text(draw(**colours), encoding="utf-8")
