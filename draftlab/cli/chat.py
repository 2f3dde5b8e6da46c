"""`draftlab chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from draftlab.cli.console import (
    Debug,
    HeadOption,
    RunOption,
    TargetOption,
    TrustRemoteCode,
    monitor,
    output,
)
from draftlab.cli.errors import guard
from draftlab.errors import UserError
from draftlab.formatting import count_text, visible

if TYPE_CHECKING:
    from draftlab.engine.sampling import Generation

DRAFTED = "underline green"
NOT_KEPT = "the conversation is not kept"


def chat(
    run_name: RunOption = None,
    head: HeadOption = None,
    target: TargetOption = None,
    k: Annotated[
        int | None, typer.Option(min=1, help="Drafts a step; by default the head's, at most 4.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampled answers.")] = 0,
    system: Annotated[str | None, typer.Option(help="System message.", metavar="TEXT")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Time each answer without drafts, too.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    max_length: Annotated[int, typer.Option(min=2, help="Most tokens of a conversation.")] = 4096,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Chat with a target whose answers a head drafts. Accepted drafts are green and underlined.

    Each line of the input is a message. An empty line, or the input's end, ends the chat.
    """
    with guard(debug, NOT_KEPT):
        from draftlab.engine.sampling import Sampling
        from draftlab.run.api import load_trained_head
        from draftlab.run.chat import Chat
        from draftlab.run.head_workspace import open_head
        from draftlab.target_model.loading import load_target, load_tokenizer
        from draftlab.text.prompts import describe_arguments

        workspace = open_head(
            run_name, head, target, trust_remote_code=trust_remote_code, monitor=monitor
        )
        loaded, tokenizer = load_target(workspace.target), load_tokenizer(workspace.target)
        trained = load_trained_head(workspace.head, loaded, tokenizer)
        k = k or trained.config.default_k
        trained.check_drafts(k)
        arguments, *others = workspace.target.modes
        if others:
            monitor.say(
                f"chat: template arguments {describe_arguments(arguments) or 'none'}, the first of "
                f"{1 + len(others)} in target.template_arguments"
            )
        session = Chat(
            loaded,
            trained,
            tokenizer,
            k=k,
            sampling=Sampling(temperature, seed=seed),
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            system=system,
            arguments=arguments,
        )
        for message in _messages():
            try:
                answer = session.answer(message, _show)
            except KeyboardInterrupt:  # within a line of the answer
                output.print()
                raise
            output.print()
            output.print(Text(_figures(answer, k, session.plain() if plain else None), "dim"))


def _messages() -> Iterator[str]:
    """Yield the lines of the input up to an empty one; on a terminal they are asked for."""
    asks = sys.stdin.isatty()
    while True:
        try:
            line = output.input("> ") if asks else sys.stdin.readline()
            line.encode()
        except EOFError:
            return
        except UnicodeError as error:  # of encode, where Python keeps such bytes as surrogates
            what, do = f"expected text in UTF-8, found {error}", "convert it, as with iconv"
            raise UserError(what, where="stdin", do=do) from None
        if not line.strip():
            return
        yield line.strip()


def _show(piece: str, drafted: bool) -> None:
    style = DRAFTED if drafted else ""
    output.print(Text(visible(piece), style), end="", soft_wrap=True)


def _figures(answer: Generation, k: int, plain: Generation | None) -> str:
    """Return the figures of an answer: tokens a second are those after the first token."""
    figures = [count_text(len(answer.token_ids), "token")]
    if answer.counters.acceptance_length is not None:
        figures.append(f"AL {answer.counters.acceptance_length:.2f} at K = {k}")
    if answer.tpot_s:
        figures.append(f"{1 / answer.tpot_s:.1f} tokens/s")
        if plain is not None and plain.tpot_s:
            same = "the same tokens" if plain.token_ids == answer.token_ids else "other tokens"
            speedup = f"{plain.tpot_s / answer.tpot_s:.2f}×"
            figures.append(f"without drafts {1 / plain.tpot_s:.1f} ({same}): {speedup}")
    if answer.finish == "length":
        figures.append("cut at the limit (--max-new-tokens, --max-length)")
    return " · ".join(figures)
