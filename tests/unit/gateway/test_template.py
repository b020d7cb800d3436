"""Chat templates: what they see, and what they do not get to."""

import pytest

from infinilora.gateway.template import ChatTemplate, read_template
from infinilora.protocol.errors import InvalidRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(MESSAGES)


def test_templates_see_messages_and_special_tokens() -> None:
    source = "{{ bos_token }}{% for m in messages %}\n    [{{ m.role }}] {{ m['content'] | tojson }}\n{% endfor %}"
    assert render(source, bos_token="<s>") == '<s>    [user] "hi"\n'


def test_a_templates_own_complaint_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        *(
            "{{ messages.__class__.__mro__ }}",
            "{{ ''.__class__.__base__.__subclasses__() }}",
            "{{ messages.append(1) }}",
        ),
        *(
            "{% for i in range(999999999) %}x{% endfor %}",
            "{% include '/etc/passwd' %}",
            "{{ 1 / 0 }}",
            "{{ missing.a }}",
        ),
    ],
)
def test_a_template_reaches_nothing_and_fails_alone(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


def test_a_template_that_does_not_compile_is_said() -> None:
    with pytest.raises(InvalidRequest, match="does not compile"):
        render("{% for %}")


def test_where_templates_come_from() -> None:
    named = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    for jinja, config, text in (
        ("j", {"chat_template": "c"}, "j"),
        (None, {"chat_template": "c"}, "c"),
        (None, named, "d"),
    ):
        template = read_template(jinja, config)
        assert template is not None
        assert template.render(MESSAGES) == text
    assert read_template(None, {}) is None
