"""Shared by the parity programs: environments, the head under test, its answers."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # also for `eval` in the programs
from draftlab.engine.counters import Counters
from draftlab.engine.drafter import HeadDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.export.settings import ExportSettings
from draftlab.files import write_json
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.folder import load_head
from draftlab.progress import Monitor
from draftlab.run.api import export_head
from draftlab.run.head_workspace import HeadWorkspace, open_head
from draftlab.run.resolve import REFERENCE
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import stop_ids
from draftlab.text.suites import load_suite

HERE = Path(__file__).resolve().parent
HELD_OUT = "embedded:heldout"
GREEDY = Sampling()
EQUAL, DIFFERENT, UNUSABLE, SKIPPED = 0, 1, 2, 77


@dataclass(frozen=True)
class Subject:
    """A head, its target and prompts, in float32 on the CPU.

    Attributes:
        name: the head's name in tables.
        folder: the head's folder.
        prompts: ids and token ids of the first prompts.
        stops: tokens that end an answer.
    """

    name: str
    folder: Path
    head: Eagle3Head
    settings: TargetSettings
    target: Target
    prompts: tuple[tuple[str, tuple[int, ...]], ...]
    stops: frozenset[int]

    def requests(self, max_new_tokens: int, sampling: Sampling = GREEDY) -> list[Request]:
        """Return a request for each prompt."""
        return [Request(i, ids, max_new_tokens, sampling, self.stops) for i, ids in self.prompts]

    def export(self, place: Path, k: int | None = None, layout: str = "speculators") -> None:
        """Export the head in another program's layout, in float32."""
        export_head(
            self.folder,
            self.settings,
            place,
            layout,
            settings=ExportSettings(k=k, dtype="float32"),
            monitor=Monitor(),
        )


def subject_options(
    parser: ArgumentParser,
    prompts: int,
    *,
    random: bool = True,
    new_tokens: int | None = None,
    k: int = 4,
) -> None:
    """Add the options that choose a subject.

    Args:
        prompts: the default of --prompts.
        random: whether random heads can be chosen.
        new_tokens, k: the defaults of --max-new-tokens and --k, options of programs that decode
            with drafts.
    """
    parser.add_argument("--head", help="head folder or 'reference'; default: the latest run's")
    parser.add_argument("--target", help="its target; default: the run's, or the embedded one")
    parser.add_argument("--suite", default=HELD_OUT, help="default: the embedded target's")
    parser.add_argument("--prompts", type=int, default=prompts, help="first prompts of the suite")
    if new_tokens is not None:
        parser.add_argument("--k", type=int, default=k, help="drafts a step")
        parser.add_argument("--max-new-tokens", type=int, default=new_tokens)
    if random:
        parser.add_argument(
            "--random",
            nargs="?",
            const="",
            type=_pattern,
            metavar="PATTERN",
            help="random heads of all shapes (whose name matches PATTERN) instead of the head",
        )


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ArgumentTypeError(f"expected a regular expression, found {text}: {error}") from error


def load_subject(
    head: str | None, target: str | None, prompts: int, suite: str = HELD_OUT
) -> Subject:
    """Load the requested head; by default the latest run's, else the reference head."""
    chosen = choose(head, target)
    settings = chosen.target.model_copy(update={"dtype": "float32", "device": "cpu"})
    loaded, tokenizer = load_target(settings), load_tokenizer(settings)
    folder = chosen.head
    return Subject(
        folder.parent.name if folder.name == "head" else folder.name,
        folder,
        load_head(
            folder, target_tensors=loaded.parts.shared_tensors, dtype=torch.float32, device="cpu"
        ),
        settings,
        loaded,
        load_suite(suite, tokenizer, Monitor()).prompts[:prompts],
        stop_ids(tokenizer, loaded.folder),
    )


def choose(head: str | None, target: str | None) -> HeadWorkspace:
    """Return the requested head; by default the latest run's, else the reference head."""
    if head is None:
        try:
            return open_head(None, None, target)
        except UserError as error:
            print(f"{error}\nno run has a head, so the reference head is compared", file=sys.stderr)
            head = REFERENCE
    return open_head(None, head, target)


def decoded(
    target: Target,
    requests: Sequence[Request],
    drafter: HeadDrafter | None,
    *,
    batch: int,
    max_length: int,
) -> list[Generation]:
    """Decode with draftlab; return answers in the order of the requests."""
    engine = Engine(target, drafter, batch=batch, max_length=max_length)
    done = {generation.id: generation for generation in engine.generate(requests)}
    return [done[request.id] for request in requests]


def figures(counters: Counters) -> str:
    """Return counters as tables show them."""
    return f"{counters.drafts:,} / {counters.accepted:,} / {list(counters.accepted_at)}"


def prepare(name: str) -> Path | None:
    """Return the interpreter of a parity environment, installed if missing; None: impossible."""
    script = HERE / f"setup_{name}.sh"
    done = subprocess.run(["bash", str(script)], stderr=subprocess.PIPE, text=True)
    lines = done.stderr.strip().splitlines()
    if done.returncode:
        print(f"SKIPPED: the {name} environment cannot be installed here:", *lines[-6:], sep="\n  ")
        return None
    folder = next(
        line.split(": ", 1)[1]
        for line in reversed(lines)
        if line.startswith(("ready: ", "built: "))
    )
    return Path(folder.rsplit(" (", 1)[0]) / "bin" / "python"


def client(python: Path, program: str, requests: Mapping[Path, dict[str, Any]]) -> None:
    """Run a client program in its own environment, once for all requests.

    Args:
        requests: each request by the file of its answer.

    Raises:
        UserError: the program failed; the error has the end of its output.
    """
    command = [str(python), str(HERE / program)]
    for answer, request in requests.items():
        file = answer.with_suffix(".request.json")
        write_json(file, request)
        command += [str(file), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{program} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def run_program(run: Callable[[Namespace], int], parser: ArgumentParser) -> int:
    """Parse the command line and run a program; print a UserError and return UNUSABLE."""
    options = parser.parse_args()
    packages = ("draftlab", "torch", "transformers")
    print(", ".join(f"{name} {metadata.version(name)}" for name in packages), flush=True)
    try:
        return run(options)
    except UserError as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        return UNUSABLE
