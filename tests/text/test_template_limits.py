"""Chat templates are strangers' programs: they are refused before they take much time or memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.text import template_process
from draftlab.text.chat_template import Chat, RenderError, render, render_text, rendered
from tests.helpers.messages import assistant, user
from tests.helpers.template_families import FAMILIES, family_tokenizer
from tests.helpers.toys import toy_tokenizer

MESSAGES = [user("count to two"), assistant("one, two"), user("once more")]
LONG = "{% set s = 'a' * 1000000 %}"


def repeated(start: str, step: str) -> str:
    """Return a template that computes `n.s` anew again and again."""
    loop = "{% set n = namespace(s=START) %}{% for i in range(99999) %}{% set n.s = STEP %}"
    return loop.replace("START", start).replace("STEP", step) + "{% endfor %}"


# What the kernel's limits of time, memory and output end, and what the sandbox refuses.
REFUSED = {
    "a loop without end": "{% for i in range(10**9) %}{% endfor %}",
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "brackets": f"{{{{ {'(' * 3000}1{')' * 3000} }}}}",
    "blocks": "{% if 1 %}" * 900 + "{% endif %}" * 900,
    "a long source": "{{ 1 }}" * 40_000,
    "a power": "{{ 10 ** (10 ** 9) }}",
    "keys that collide": repeated("[]", "n.s + [[i * (2**61 - 1), i]]") + "{{ dict(n.s) }}",
    "a doubled text": repeated("'a'", "n.s ~ n.s"),
    "kept slices": LONG + repeated("[]", "[n.s, s[1:]]"),
    "a list that holds itself twice": "{% set n = namespace(s=['a']) %}{% for i in range(60) %}"
    "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "a text that just fits in its memory": LONG + "{% for i in range(90) %}{{ s }}{% endfor %}",
    "a width in %": "{{ '%3000000000d' % 1 }}",
    "a format of times": "{{ strftime_now('%c' * 10**8) }}",
    "join": LONG + "{{ s.join(s) }}",
    "indented JSON": "{{ messages | tojson(indent=10**9) }}",
    "another file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "the caller's messages": "{{ messages.append(1) }}",
    "a private name": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_SECONDS", 1)


def worker() -> subprocess.Popen:
    """Return the process that renders for this one."""
    render_text(toy_tokenizer("x"), Chat(MESSAGES))
    process = template_process._worker(os.getpid())._process
    assert process is not None
    return process


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_is_refused_before_it_takes_much(name: str) -> None:
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="chat template is refused: ") as caught:
            render_text(toy_tokenizer(REFUSED[name]), Chat(MESSAGES))
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert not isinstance(caught.value, RenderError)  # which would drop one conversation
    assert "chat_template.jinja" in caught.value.do
    assert "'once more'" in caught.value.where
    assert time.monotonic() - start < 30  # on a machine with other work
    assert render_text(toy_tokenizer("x"), Chat(MESSAGES)) == "x"


def test_a_long_source_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are chats that can be read twice."""
    monkeypatch.setattr(template_process, "MAX_SOURCE", 3)
    chats = [{"messages": []}, {"messages": []}]
    results = list(template_process.render_template("long", chats))
    assert [result.kind for result in results] == ["refused"] * 2


def test_a_refused_template_keeps_no_memory_from_the_next() -> None:
    with pytest.raises(UserError, match="fills the memory"):
        render_text(toy_tokenizer(REFUSED["kept slices"]), Chat(MESSAGES))
    assert render_text(toy_tokenizer("{{ ('a' * 10**8) | length }}"), Chat(MESSAGES)) == "100000000"


def test_the_conversation_that_exceeds_a_limit_is_named() -> None:
    """The others of its batch are rendered."""
    tokenizer = toy_tokenizer("{{ 'a' * (10 ** (messages[0].content | int)) }}")
    chats = [Chat([user(text)]) for text in ("0", "1", "30", "2")]
    results = render(tokenizer, chats)
    assert [rendered(next(results)) for _ in range(2)] == ["a", "a" * 10]
    with pytest.raises(UserError, match="a chat that ends with '30'"):
        next(results)


def test_a_killed_process_and_one_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_MAX_WAIT_S", 0.5)
    for sent, words in ((signal.SIGSTOP, "takes more than"), (signal.SIGKILL, "code -9")):
        os.kill(worker().pid, sent)
        with pytest.raises(UserError, match=words):
            render_text(toy_tokenizer("x"), Chat(MESSAGES))


def test_the_process_gets_no_secrets_and_few_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    worker().kill()
    with pytest.raises(UserError):
        render_text(toy_tokenizer("x"), Chat(MESSAGES))
    folder = Path(f"/proc/{worker().pid}")
    assert b"secret" not in (folder / "environ").read_bytes()
    limits = (folder / "limits").read_text()
    small = {"file size": 0, "core file size": 0, "open files": 16, "address space": 1 << 30}
    for name, value in small.items():
        assert re.search(rf"Max {name} +{value} ", limits)


def test_the_process_ends_with_its_parent() -> None:
    code = (
        "import os; from draftlab.text.template_process import render_template as render\n"
        "print(next(render('x', [{'messages': []}])), flush=True); os.kill(os.getpid(), 9)"
    )
    # This waits for all that hold the pipes, which the process inherits.
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (ended.stdout, ended.returncode) == (b"x\n", -9), ended.stderr


def test_forks_and_threads_do_not_mix_their_texts() -> None:
    tokenizer = toy_tokenizer("{{ messages[0].content }}")

    def right(number: int) -> bool:
        texts = [f"{number}.{i}" for i in range(100)]
        results = render(tokenizer, [Chat([user(text)]) for text in texts])
        return [rendered(result) for result in results] == texts

    worker()
    with template_process._worker(os.getpid())._lock:  # as if a thread rendered meanwhile
        child = os.fork()
        if not child:
            os._exit(0 if right(99) else 1)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, range(8)))
    assert os.waitpid(child, 0)[1] == 0


def test_a_syntax_error_names_the_template_and_its_line() -> None:
    with pytest.raises(UserError, match="not a Jinja template") as caught:
        render_text(toy_tokenizer("line one\n{{ "), Chat(MESSAGES))
    assert not isinstance(caught.value, RenderError)
    assert caught.value.where.endswith("line 2")


def test_a_long_message_of_a_template_is_cut() -> None:
    with pytest.raises(RenderError) as caught:
        render_text(toy_tokenizer("{{ raise_exception('no' * 1000000) }}"), Chat(MESSAGES))
    assert len(caught.value.what) < 500


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"idefics3"}))  # which gets parts
@pytest.mark.parametrize("prompt", [True, False])
def test_ordinary_templates_render_as_in_transformers(name: str, prompt: bool) -> None:
    tokenizer = family_tokenizer(name, "count to two")
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
    assert render_text(tokenizer, Chat(MESSAGES, generation_prompt=prompt)) == expected


OPERATIONS = """\
{%- set n = namespace(total=0, names=[]) -%}
{%- for m in messages if m.role != 'system' -%}
{{ loop.index0 % 2 }} {{ '%s-%03d' % (m.role, loop.index) }} {{ m | tojson(indent=2) }}
{%- set n.total = n.total + m.content | length * 2 -%}
{%- set n.names = n.names + [m.role ~ '/' ~ loop.length, (1, 2)] -%}
{%- if loop.index > 2 %}{% break %}{% endif -%}
{%- endfor -%}
{{ n.total }} {{ n.names }} {{ dict(a=1) | items | list }} {{ dict.fromkeys('ab', 1) }}
{% generation %}{{ messages | map(attribute='role') | unique | list }}{% endgeneration %}
{% for k, v in messages[0] | dictsort %}{{ k }}={{ v | default('none') }}{% else %}empty{% endfor %}
{{ 'a<b' | safe }} {{ strftime_now('%Y %B') }}
"""


def test_every_operation_computes_what_it_does_in_transformers() -> None:
    tokenizer = toy_tokenizer(OPERATIONS)
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert "user-001" in expected
    assert render_text(tokenizer, Chat(MESSAGES)) == expected


def test_the_limit_grows_with_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_BYTES", 10_000)
    copies = "{% for m in messages %}" + "{{ m.content | trim }}" * 20 + "{% endfor %}"
    assert len(render_text(toy_tokenizer(copies), Chat([user("a" * 50_000)]))) == 1_000_000
    with pytest.raises(UserError, match="it writes more than"):
        render_text(toy_tokenizer(copies * 3), Chat([user("a" * 50_000)]))
