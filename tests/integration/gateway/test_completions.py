"""/v1/completions over HTTP, with real gRPC behind it."""

from pathlib import Path

import pytest

from support.gateway_house import error_of, open_house

pytestmark = pytest.mark.integration


async def test_token_ids_in_and_out_of_a_base_without_tokenizer(tmp_path: Path) -> None:
    async with open_house(tmp_path, with_text=False) as house:
        answer = await house.complete(prompt=[5, 6, 7], max_tokens=4, temperature=0, ignore_eos=True)
        body = answer.json()
        assert answer.status_code == 200, body
        request = house.engine.requests[0]
        choice = body["choices"][0]
        assert choice["token_ids"] == [house.engine.foretold(request, i) for i in range(4)]
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        assert list(request.token_ids) == [5, 6, 7]
        assert body["usage"]["total_tokens"] == 7
        assert "x-adapter-digest" not in answer.headers


async def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    async with open_house(tmp_path, with_text=False) as house:
        answer = await house.complete(prompt="hello")
        assert answer.status_code == 400
        assert "no tokenizer" in error_of(answer)["message"]
        assert not house.engine.requests
