"""Record `draftlab chat` with the head of SmolLM2 as chat_light.svg and chat_dark.svg.

`python docs/pictures/chat.py SmolLM2-135M-Instruct.Q4_1.gguf` asks one question on a CPU.
"""

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI, TerminalTheme
from rich.text import Text

QUESTION = "What is the capital of France, and what is it known for?"
HEAD = "heads/smollm2"
WIDTH = 80
WHITE, BLACK, GREEN = (255, 255, 255), (31, 35, 40), (26, 127, 55)
LIGHT = TerminalTheme(WHITE, BLACK, [BLACK, BLACK, GREEN, *[BLACK] * 5])


def main() -> None:
    """Run the chat and write both pictures."""
    target, here = sys.argv[1], Path(__file__).parent
    verb = ["chat", "--head", HEAD, "--target", target, "--max-new-tokens", "96"]
    answer = subprocess.run(
        [sys.executable, "-m", "draftlab", *verb],
        input=f"{QUESTION}\n",
        env=os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH)},
        cwd=here.parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    for name, theme in (("light", LIGHT), ("dark", MONOKAI)):
        console = Console(record=True, width=WIDTH, file=StringIO())
        console.print(f"$ draftlab chat --head {HEAD} --target {Path(target).name}")
        console.print(f"> {QUESTION}", style="bold")
        console.print(Text.from_ansi(answer))
        console.save_svg(str(here / f"chat_{name}.svg"), title="draftlab chat", theme=theme)


if __name__ == "__main__":
    main()
