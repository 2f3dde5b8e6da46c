"""Chat templates are strangers' programs: they are refused before they take much time or memory."""

from __future__ import annotations

import threading
import time
import tracemalloc

import pytest

from draftlab.errors import UserError
from draftlab.text import template_meter
from draftlab.text.chat_template import RenderError, render_text
from tests.helpers.messages import assistant, user
from tests.helpers.template_families import FAMILIES, family_tokenizer
from tests.helpers.toys import toy_tokenizer

MESSAGES = [user("count to two"), assistant("one, two"), user("once more")]
LONG = "{% set s = 'a' * 1000000 %}"
DOUBLE = (
    "{%% set n = namespace(s=%s) %%}{%% for i in range(60) %%}{%% set n.s = %s %%}{%% endfor %%}"
)

TOO_LONG = {
    "a loop without end": "{% for i in range(10**9) %}{% endfor %}",
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}" + "{% endfor %}" * 2,
    "nested loops over a text": "".join(f"{{% for v{i} in 'abcdefghij' %}}" for i in range(15))
    + "{% endfor %}" * 15,
    "a filtered loop": "{% set s = range(99999)|list %}{% for a in s %}{% for b in s if b < 0 %}"
    "{% endfor %}{% endfor %}",
    "searches": "{% set s = range(99999)|list %}{% for x in s if -x in s %}{% endfor %}",
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a block that calls itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "a recursive loop": "{% for a in range(99) recursive %}{{ loop(range(99)) }}{% endfor %}",
    "brackets": f"{{{{ {'(' * 3000}1{')' * 3000} }}}}",
    "blocks": "{% if 1 %}" * 900 + "{% endif %}" * 900,
    "a large number": "{{ 10 ** (10 ** 9) }}",
    "a number that is squared": DOUBLE % ("7", "n.s * n.s"),
    "sums of lists": "{{ range(99999) | map('string') | map('list') | sum(start=[]) }}",
}
TOO_LARGE = {
    "a repeated text": "{{ 'a' * 10**10 }}",
    "a repeated list": "{{ [1] * 10**9 }}",
    "a doubled text": DOUBLE % ("'a'", "n.s + n.s") + "{{ n.s }}",
    "a joined text": DOUBLE % ("'a'", "n.s ~ n.s") + "{{ n.s }}",
    "many terms": DOUBLE % ("'a'", f"{'n.s + ' * 50}n.s") + "{{ n.s }}",
    "a block that is set": "{% set n = namespace(s='a') %}{% for i in range(60) %}"
    "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
    "a doubled argument": "{% macro f(x) %}{{ f(x=x + x) }}{% endmacro %}{{ f(x='aaaaaaaa') }}",
    "a list that holds itself twice": DOUBLE % ("['a']", "[n.s, n.s]") + "{{ n.s }}",
    "a mapping that does": DOUBLE % ("['a']", "dict(a=n.s, b=n.s)") + "{{ n.s | tojson }}",
    "a namespace that does": DOUBLE % ("['a']", "namespace(a=n.s, b=n.s)") + "{{ n.s }}",
    "a written text": LONG + "{% for i in range(99999) %}{{ s }}{% endfor %}",
    "a macro's text": LONG
    + "{% macro f() %}{% for i in range(9999) %}{{ s }}{% endfor %}{% endmacro %}{{ f() }}",
    "a width in %": "{{ '%1000000000d' % 1 }}",
    "a computed width": "{{ '%*d' % (10**9, 1) }}",
    "a width in format": "{{ '{:1000000000}'.format(1) }}",
    "a nested width": "{{ '{:{w}}'.format(1, w='1000000000') }}",
    "the filter format": "{{ '%1000000000d' | format(1) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "center": "{{ 'a' | center(10**10) }}",
    "indent": "{{ 'a\n' | indent(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**10) }}",
    "join": LONG + "{{ s.join(s) }}",
    "the filter join": LONG + "{{ s | join(s) }}",
    "replace": LONG + "{{ s.replace('a', s) }}",
    "the filter replace": LONG + "{{ s | replace('a', s) }}",
    "replace by map": LONG + "{{ s | map('replace', 'a', s) | list }}",
    "a filter block": "{% filter replace('a', 'b' * 10**9) %}a{% endfilter %}",
    "bytes": "{{ (1).to_bytes(10**10) }}",
    "a text of its own": "{{ 'ab'.translate({97: 'a' * 1000}) }}",
    "indented JSON": "{{ messages | tojson(indent=10**9) }}",
    "separators of JSON": "{{ messages | tojson(separators=('a' * 9999, ':')) }}",
}
OUTSIDE = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "the caller's messages": "{{ messages.append(1) }}",
    "a private name": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_meter, "MAX_SECONDS", 0.3)


@pytest.mark.parametrize("name", [*TOO_LONG, *TOO_LARGE, *OUTSIDE])
def test_a_template_is_refused_before_it_takes_much(name: str) -> None:
    tokenizer = toy_tokenizer((TOO_LONG | TOO_LARGE | OUTSIDE)[name])
    start = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"chat template is refused: (it |access)") as caught:
            render_text(tokenizer, MESSAGES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not isinstance(caught.value, RenderError)  # which would drop one conversation
    assert "chat_template.jinja" in caught.value.do
    assert time.thread_time() - start < 20  # tracemalloc slows it down several times
    assert peak < 400e6


@pytest.mark.parametrize("template", ["{% include '/etc/passwd' %}", "{% import 'os' as os %}"])
def test_a_template_reads_no_file(template: str) -> None:
    with pytest.raises(UserError, match="refused: it reads another template in line 1"):
        render_text(toy_tokenizer(template), MESSAGES)


def test_the_limits_hold_in_a_thread() -> None:
    found: list[Exception] = []

    def work() -> None:
        try:
            render_text(toy_tokenizer(TOO_LONG["nested ranges"]), MESSAGES)
        except UserError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert "computes for more than" in str(found[0])


def test_a_syntax_error_names_the_template_and_its_line() -> None:
    with pytest.raises(UserError, match="not a Jinja template") as caught:
        render_text(toy_tokenizer("line one\n{{ "), MESSAGES)
    assert not isinstance(caught.value, RenderError)
    assert caught.value.where.endswith("line 2")


def test_a_long_message_of_a_template_is_cut() -> None:
    with pytest.raises(RenderError) as caught:
        render_text(toy_tokenizer("{{ raise_exception('no' * 1000000) }}"), MESSAGES)
    assert len(caught.value.what) < 500


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("prompt", [True, False])
def test_ordinary_templates_render_as_in_transformers(name: str, prompt: bool) -> None:
    tokenizer = family_tokenizer(name, "count to two")
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
    assert render_text(tokenizer, MESSAGES, generation_prompt=prompt) == expected


OPERATIONS = """\
{%- set n = namespace(total=0, names=[]) -%}
{%- for m in messages if m.role != 'system' -%}
{{ loop.index0 % 2 }} {{ '%s-%03d' % (m.role, loop.index) }} {{ '{:>9}|{}'.format(m.role, 1) }}
{{ m.content.replace('o', '0').split(' ') | join('+') }} {{ m | tojson(indent=2) }}
{%- set n.total = n.total + m.content | length * 2 -%}
{%- set n.names = n.names + [m.role ~ '/' ~ loop.length, (1, 2)] -%}
{%- if loop.index > 2 %}{% break %}{% endif -%}
{%- endfor -%}
{% macro twice(x, y=3) %}{{ x + x + '!' * y }}{% endmacro -%}
{{ n.total }} {{ n.names }} {{ twice('a<b' | safe) }} {{ 'a' + 'b' + 'c' + 'd' + 'e' + 'f' + 'g'
+ 'h' + 'i' + 'j' + 'k' }} {{ 2 ** 10 + 7 % 4 }} {{ dict(a=1) | items | list }} {{ '=' * 9 }}
{{ messages | map(attribute='role') | unique | list }} {{ messages[1:] | length }}
{% with a = 'x' + 'y' %}{{ a | upper }}{{ a | indent(2, first=true) | trim }}{% endwith %}
{% for k, v in messages[0] | dictsort %}{{ k }}={{ v | default('none') }}{% else %}empty{% endfor %}
{{ [[1, 2], [3]] | sum(start=0, attribute='0') }} {{ strftime_now('%%') }}
{% filter upper %}text{% endfilter %}{% macro boxed() %}[{{ caller('z') }}]{% endmacro %}
{% call(text) boxed() %}{{ text * 2 }}{% endcall %}
"""


def test_every_operation_computes_what_it_does_in_transformers() -> None:
    tokenizer = toy_tokenizer(OPERATIONS)
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert "user-001" in expected
    assert render_text(tokenizer, MESSAGES) == expected


def test_the_limit_grows_with_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_meter, "MAX_CHARACTERS", 1000)
    copies = "{% for m in messages %}" + "{{ m.content | trim }}" * 20 + "{% endfor %}"
    assert len(render_text(toy_tokenizer(copies), [user("a" * 50_000)])) == 1_000_000
    with pytest.raises(UserError, match="characters"):
        render_text(toy_tokenizer(copies * 3), [user("a" * 50_000)])
