"""The settings of answers and of the server that gives them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from draftlab.settings import ServerUrls, Settings, SingleOrList
from draftlab.target_model.settings import TemplateMix, VllmSettings

AnswerBackend = Literal["paged", "vllm", "openai"]


class ServerSettings(Settings):
    """Running servers with OpenAI's completions interface, and how they are asked."""

    url: ServerUrls | None = None
    """Address, such as http://localhost:8000, or those of several servers of the same target. The
    key of the environment variable OPENAI_API_KEY is sent to this machine, to
    https://api.openai.com and to the server that OPENAI_BASE_URL names, and to no other: a recipe
    may be a stranger's."""
    model: str | None = None
    """The server's name of the target; None: the only model that it serves."""
    attempts: Annotated[int, Field(ge=1)] = 8
    """Attempts of a request before the run ends; the waits between them grow from 1 to 60 s."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds to wait for one answer."""


MAX_AT_ONCE = 1024
"""Most requests that one measurement of a server has running: each has a thread."""


class BenchSettings(Settings):
    """What `draftlab bench` asks a running server."""

    suite: str | None = Field(default=None, min_length=1)
    """Prompts, as in `eval --suite`; None: those of the report of --head."""
    raw: bool = False
    """Use the prompts as plain text, without the chat template."""
    template_arguments: TemplateMix | None = None
    """Template arguments, such as {"enable_thinking": true}, or a list of such objects."""
    max_prompts: Annotated[int, Field(ge=1)] | None = 64
    """Number of prompts, drawn by the seed from all of the suite as `eval` draws them; None: all.
    They are repeated as whole, until there are four requests for each that runs at once."""
    seed: int = 0
    """Seed of the prompts and of the arrivals; answers are sampled without one."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature; 0 is greedy decoding."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    """Largest number of tokens in an answer."""
    concurrency: Annotated[
        tuple[Annotated[int, Field(ge=1, le=MAX_AT_ONCE)], ...], SingleOrList, Field(min_length=1)
    ] = (1,)
    """Requests that run at once, one or several numbers: each finished one is replaced by the next
    (closed loop)."""
    rate: Annotated[tuple[Annotated[float, Field(gt=0)], ...] | None, SingleOrList] = Field(
        default=None, min_length=1
    )
    """Requests a second, one or several numbers, that arrive at random times (a Poisson process,
    open loop) at a server that is idle at first, in place of --concurrency."""
    model: str | None = None
    """The server's name of the target; None: the only model that it serves."""
    attempts: Annotated[int, Field(ge=1)] = 4
    """Attempts of a request that the server refuses as busy (429, 5xx)."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which an answer counts as failed."""


class RegenerateSettings(Settings):
    """How the target answers the prompts."""

    enabled: bool = True
    """Whether the target writes the answers; False keeps the given ones (off-policy)."""
    temperatures: Annotated[
        tuple[Annotated[float, Field(ge=0)], ...], SingleOrList, Field(min_length=1)
    ] = (0.0, 0.8)
    """Answer s of prompt i is sampled at temperatures[(i + s) modulo their number]; 0 is greedy."""
    samples: Annotated[int, Field(ge=1)] = 1
    """Answers to each prompt; the second and later ones get ids such as `prompt-7~1`."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Sample from this many of the most probable tokens; None: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the most probable tokens with this total probability; None: all."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 1024
    """Maximum length of an answer, in tokens. Chat models often write several hundred; the share of
    answers that were cut is printed."""
    batch: Annotated[int, Field(ge=1)] = 64
    """Prompts decoded at once."""
    piece: Annotated[int, Field(ge=1)] = 256
    """Conversations written at a time; a restart repeats fewer than this many, and an interruption
    says how many. At the end of a piece fewer than `batch` are left to decode: use 16 times
    `batch`, but with several GPUs a few pieces for each. A server (openai) has no pieces:
    conversations are written in order as soon as they are answered."""
    backend: AnswerBackend = "paged"
    """What decodes. paged: draftlab's engine. vllm: an installed vLLM in its own process, on
    `target.gpus` GPUs (tensor parallel). openai: a running server, see `server`."""
    server: ServerSettings = Field(default=ServerSettings(), validate_default=True)
    """The server of the backend "openai"."""

    @field_validator("server")
    @classmethod
    def _check_server(cls, server: ServerSettings, info: ValidationInfo) -> ServerSettings:
        if info.data.get("backend") == "openai" and server.url is None:
            raise ValueError("expected the server's address in server.url for backend openai")
        return server

    vllm: VllmSettings = VllmSettings()
    """Settings of the backend "vllm"."""
