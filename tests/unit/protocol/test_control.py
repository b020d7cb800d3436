"""Control messages: commands and events as they are read off the bus."""

import msgspec
import pytest

from infinilora.protocol.control import AdapterEvent, Command, Forget
from infinilora.protocol.ids import digest_of

DIGEST = digest_of(b"a")


def test_forget_is_told_from_the_other_commands() -> None:
    text = b'{"command_id":"c","epoch":2,"body":{"type":"forget","digest":"%s"}}' % DIGEST.encode()
    assert msgspec.json.decode(text, type=Command).body == Forget(digest=DIGEST)


def test_a_command_that_no_one_has_heard_of_does_not_parse() -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'burn'"):
        msgspec.json.decode(b'{"command_id":"c","epoch":2,"body":{"type":"burn"}}', type=Command)


@pytest.mark.parametrize("action", ["put", "delete", "alias"])
def test_events_say_what_happened_to_a_name(action: str) -> None:
    text = msgspec.json.encode({"action": action, "tenant": "t", "name": "n", "revision": 1, "digest": DIGEST})
    assert msgspec.json.decode(text, type=AdapterEvent).action == action
