"""Hostile chat templates are stopped, by counting and with a reason.  No engine."""

from __future__ import annotations

import json
import threading
import tracemalloc

import pytest

from gateway.config import GatewayConfig
from gateway.errors import BadRequest
from gateway.marks import Marks
from gateway.prompt import INLINE_WORK, Prompts
from gateway.render import Template
from gateway.sandbox import BadTemplate
from gateway.state import Gateway
from gateway.tools import load
from gateway.work import WORK, Stopped, allowance
from tests.asking import EOS, post, saying, tokenizer
from tests.prompting import CHATML, TOOLS, chat, prompts, user

GROW = "{%% set n = namespace(x=%s, y=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}"
MEGA = "{% set x = 'x' * 1000000 %}"


def growing(start: str, step: str, after: str = "") -> str:
    """A template that does a step 60 times."""
    return GROW % (start, start, step) + after


ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "a loop that skips": "{% for a in range(99999) %}{% for b in range(99999) if false %}"
    "{% endfor %}{% endfor %}",
    "a long body": "{% for a in range(99999) %}" + "{% set x = 1 %}" * 500 + "{% endfor %}",
    "text times": "{{ 'x' * 10**10 }}",
    "times text": "{{ 10**10 * 'x' }}",
    "a list times": "{{ ([0] * 10**9) | length }}",
    "text plus": growing("'xxxx'", "{% set n.x = n.x + n.x %}"),
    "text with text": growing("'xxxx'", "{% set n.x = n.x ~ n.x %}"),
    "a block": growing("'xxxx'", "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
    "a list plus": growing("[1]", "{% set n.x = n.x + n.x %}"),
    "nested lists": growing("[1]", "{% set n.x = [n.x, n.x] %}", "{{ n.x }}"),
    "nested keys": growing("(1,)", "{% set n.x = (n.x, n.x) %}", "{{ {n.x: 1} }}"),
    "nested objects": growing("1", "{% set n.x = dict(a=n.x, b=n.x) %}", "{{ n.x | tojson }}"),
    "equal lists": growing(
        "[1]", "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}", "{{ n.x == n.y }}"
    ),
    "a tree of macros": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "a tree of callers": "{% macro m(n) %}{% if n %}{% call m(n-1) %}{% endcall %}{% call m(n-1) %}"
    "{% endcall %}{% endif %}{{ caller() }}{% endmacro %}{% call m(60) %}x{% endcall %}",
    "output": MEGA + "{% for i in range(99999) %}{{ x }}{% endfor %}",
    "a join": MEGA + "{{ range(99999) | join(x) }}",
    "a method's join": MEGA + "{{ x.join(['a'] * 99999) }}",
    "a replacement": MEGA + "{{ x | replace('x', x) }}",
    "a method's replacement": MEGA + "{{ x.replace('x', x) }}",
    "many fields": MEGA + "{{ ('%(a)s' * 9999) % {'a': x} }}",
    "many braces": MEGA + "{{ ('{a}' * 9999).format(a=x) }}",
    "a search": MEGA + "{% for i in range(99999) %}{{ 'y' in x }}{% endfor %}",
    "a method's search": MEGA + "{% for i in range(99999) %}{{ x.find('y') }}{% endfor %}",
    "pieces": MEGA + "{% for i in range(99999) %}{{ x.split('x') | length }}{% endfor %}",
    "letters": MEGA + "{% for i in range(99999) %}{% set y = x | list %}{% endfor %}",
    "slices": MEGA + "{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "sorting": "{% for i in range(99) %}{% set y = range(99999) | sort %}{% endfor %}",
    "mapping": "{% for i in range(99) %}{% set y = range(99999) | map('string') | list %}"
    "{% endfor %}",
    "rejecting": "{% for i in range(99) %}{{ range(99999) | reject('number') | list }}{% endfor %}",
    "indented JSON": growing(
        "[1]", "{% set n.x = [n.x] %}", "{{ ([n.x]*9999) | tojson(indent=9) }}"
    ),
    "a loop that calls itself": "{% for x in [[1]] recursive %}{{ loop([[1], [1]]) }}{% endfor %}",
}  # fmt: skip
TOO_LARGE = {
    "a range": ("{{ range(10**12) | length }}", "range of more than 100,000"),
    "a width": ("{{ '%1000000000d' % 1 }}", "width above"),
    "a width of its own": ("{{ '%*d' % (1000000000, 1) }}", "width above"),
    "a filter's width": ("{{ '%1000000000d' | format(1) }}", "width above"),
    "a format": ("{{ '{:1000000000}'.format(1) }}", "width above"),
    "a format in a format": ("{{ '{:{w}}'.format(1, w=1000000000) }}", "width above"),
    "a format's map": ("{{ '{a:1000000000}'.format_map({'a': 1}) }}", "width above"),
    "a padding": ("{{ 'x'.zfill(10**10) }}", "width or precision"),
    "an indent": ("{{ 'x\ny' | indent(10**10) }}", "width or precision"),
    "a precision": ("{{ 1.5 | round(10**9, 'ceil') }}", "width or precision"),
    "JSON's indent": ("{{ [1] | tojson(indent=10**9) }}", "width or precision"),
    "a power": ("{{ 9 ** 99999 }}", "integer of more than 4,096 bits"),
    "a square": (growing("9", "{% set n.x = n.x * n.x %}"), "integer of more than 4,096 bits"),
    "a sum": (growing("9 ** 999", "{% set n.x = n.x + n.x %}" * 30), "integer of more than"),
    "a date": ("{{ strftime_now('%1000000000Y') }}", "a date in a form of widths"),
    "itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself too deeply"),
}
FORBIDDEN = {
    "classes": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ ().__class__.__base__.__subclasses__() }}",
    "globals": "{{ namespace.__init__.__globals__ }}",
    "a list's insides": "{{ messages.append(1) }}",
    "a message's insides": "{{ messages[0].update({}) }}",
    "codecs": "{{ 'x'.encode('idna') }}",
}
NO_TEMPLATE = {
    "a file": "{% include '/etc/passwd' %}",
    "a module": "{% import '/etc/passwd' as x %}",
    "a parent": "{% extends '/etc/passwd' %}",
    "escapes": "{% autoescape true %}{% endautoescape %}",
    "an unknown filter": "{{ 'x' | batch(10**9) | list }}",
    "deep loops": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    "deep parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "many digits": "{{ " + "9" * 5_000 + " }}",
    "a long source": "x" * (512 * 1024 + 1),
}


def template(source: str) -> Template:
    return Template(source, Marks([]), {}, objects=True)


@pytest.mark.parametrize("name", ENDLESS)
def test_work_without_an_end_is_stopped_at_the_limit(name):
    limit = 10_000 if "tree" in name else 300_000  # tracing memory makes calls slow
    tracemalloc.start()
    with pytest.raises(Stopped, match=f"more than {limit:,} units of work|itself too deeply"):
        template(ENDLESS[name]).render([user("x")], (), {}, limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 1024 * 1024


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_would_be_too_large_is_never_made(name):
    source, said = TOO_LARGE[name]
    with pytest.raises(BadRequest, match=said) as caught:
        template(source).render([user("x")], (), {})
    assert caught.value.code == "chat_template_limit"
    assert caught.value.message.startswith("The model's chat template ")


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_no_template_may_call_is_refused(name):
    with pytest.raises(BadRequest) as caught:
        template(FORBIDDEN[name]).render([user("x")], (), {})
    assert caught.value.code == "chat_template_forbidden"


@pytest.mark.parametrize("name", NO_TEMPLATE)
def test_what_cannot_be_a_chat_template_is_refused_when_it_is_read(name):
    with pytest.raises(BadTemplate, match="The model's chat template "):
        template(NO_TEMPLATE[name])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (ENDLESS["loops in loops"], "takes more than 4,000,000 units of work"),
        (TOO_LARGE["a range"][0], "asks for a range of more than 100,000 numbers"),
        (TOO_LARGE["itself"][0], "calls itself too deeply"),
        (FORBIDDEN["codecs"], "calls .encode of a str"),
        (FORBIDDEN["classes"], "reads what no template may"),
        ("{% if tools %}" + ENDLESS["text plus"] + "{% endif %}", "takes more than"),
        ("{% for m in messages if m.tool_calls %}{{ 9 ** 99999 }}{% endfor %}", "makes an integer"),
    ],
)
def test_a_server_does_not_start_with_a_template_that_is_stopped_at_once(source, said):
    with pytest.raises(BadTemplate) as caught:
        prompts(template=CHATML + source)
    assert str(caught.value).startswith("The model's chat template ") and said in str(caught.value)
    assert "--chat-template" in str(caught.value)


LATER = CHATML + "{% if messages[-1].content == 'boom' %}@{% endif %}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("source", "code"),
    [
        (ENDLESS["nested lists"], "chat_template_limit"),
        (ENDLESS["loops in loops"], "chat_template_limit"),
        (FORBIDDEN["codecs"], "chat_template_forbidden"),
    ],
)
def test_a_request_that_a_template_cannot_serve_gets_a_typed_error(source, code, stream):
    made = Prompts(tokenizer(), LATER.replace("@", source), max_len=4096, format=load("hermes"),
                   stop_ids=[EOS])  # fmt: skip
    link = saying("ok")
    gateway = Gateway.open(GatewayConfig(), link, made, "tiny")
    answer = post(gateway, messages=[{"role": "user", "content": "boom"}], stream=stream)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == code and error["param"] == "messages"
    assert error["message"].startswith("The model's chat template ") and link.submits == []
    assert post(gateway, stream=stream).status_code == 200


def test_a_template_that_works_long_works_off_the_loop(monkeypatch):
    source = CHATML + "{% for m in messages %}{% for i in range(99) %}{% for j in range(@) %}" + (
        "{% endfor %}{% endfor %}{% endfor %}")
    for count, inline in ((INLINE_WORK // 200, True), (INLINE_WORK // 50, False)):
        made = prompts(template=source.replace("@", str(count)))
        threads: list[int] = []
        render = made._plain.render
        monkeypatch.setattr(made._plain, "render", lambda *given, render=render, seen=threads: (
            seen.append(threading.get_ident()), render(*given))[1])  # fmt: skip
        chat(made, [user("x")])
        assert (threads[-1] == threading.get_ident()) is inline
        assert len(threads) == (1 if inline else 2)


def test_the_limit_grows_with_the_request_and_an_honest_template_stays_far_below_it():
    made = prompts(max_len=10**7)
    history = [user("word " * 40)] * 2_000
    for tools in ((), TOOLS):
        made._with_tools.render(history, tools, {})
        work = made._with_tools._work
        shown = len(json.dumps(TOOLS)) if tools else 0
        assert work.limit == allowance(2_000 * (200 + 64) + shown)
        assert work.limit > WORK
        assert work.left > 0.9 * work.limit


def test_what_honest_templates_do_prints_as_jinja_prints_it():
    from jinja2 import Environment

    source = (
        "{% set n = namespace(a=1, b=[]) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ 7 // 2 }}{{ 2 ** 5 }}"
        "{{ 'a' ~ 1 ~ none ~ [1, 'b'] }}{{ 'x' * 3 + 'y' }}{{ '%05.1f|%s' % (1.5, 'z') }}"
        "{{ '{:>5}{}'.format('a', 2) }}{{ [3, 1, 2] | sort | join(',') }}{{ (1, 2)[1:] }}"
        "{% for a, b in {'k': 1, 'l': 2} | dictsort %}{{ loop.index }}{{ a }}{{ b }}{% endfor %}"
        "{% for x in [1, 2, 3] if x != 2 %}{{ x }}{{ loop.last }}{% else %}none{% endfor %}"
        "{{ 1 < 2 < 3 }}{{ 3 in [1, 2] }}{{ 'b' not in 'abc' }}{{ 'k' in {'k': 1} }}"
        "{{ messages[0].content.split('e') | last }}{{ messages | map(attribute='role') | list }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ none is none }}"
        "{% macro m(x, y=2) %}<{{ x }}{{ y }}{{ caller() if caller else '' }}>{% endmacro %}"
        "{{ m(1) }}{{ m(1, y=3) }}{% call m(5) %}in{% endcall %}{{ 'a\nb' | indent(2, true) }}"
        "{{ ' x ' | trim }}{{ 'abc' | replace('b', 'x') }}{{ 'abc'[::-1] }}{{ [1, 2] | sum }}"
        "{{ undefined_one | default('d') }}{{ 3.14159 | round(2) }}{{ 'a,b'.split(',') }}"
        "{% filter upper %}up{% endfilter %}{% set z %}block{% endset %}{{ z }}"
        "{{ loop is defined }}"
    )  # fmt: skip
    variables = [{"role": "user", "content": "hello"}]
    wanted = Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    found = template(source).text([user("hello")], (), {})
    assert found == wanted.render(messages=variables)


def test_an_item_of_a_loop_and_a_call_cost_by_what_is_in_them():
    def spent(body: str, times: int = 1_000) -> int:
        made = template(f"{{% for a in range({times}) %}}{body}{{% endfor %}}")
        made.text([user("x")], (), {}, 10**9)
        return 10**9 - made._work.left

    assert spent("") < 2_000
    assert spent("{% set x = a %}" * 160) > 20_000
    assert spent("{{ a | string }}") - spent("") > 2_000
    assert spent("{{ 'abc'.strip() }}") - spent("") > 4_000
    assert spent("{{ 'x' * 8000 }}") - spent("") > 1_000_000
