"""Class D, where the store is: an endpoint of one's own, its region, and TLS by an authority of one's own."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from support.cases import PROMPT, Files, config, keyed, modules
from support.procs import TLS
from support.worlds import GOOD, World, error_of, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]


def stored(world: World) -> str:
    return world.factory.stack._started().shared["INFINILORA_STORE_URL"]


async def of_a_gateway(
    world: World, name: str, env: Mapping[str, str], source: str, *, until: str = "/readyz"
) -> dict[str, Any]:
    """What a gateway that is told this of the store says when an adapter is to come from there; nothing is a yes."""
    api = await world.factory.another_gateway(f"gateway-{name}", dict(env), until=until)
    async with asyncio.timeout(30):
        while True:
            answer = await api.http.post("/v1/adapters", json={"name": f"d14-{name}", "source": source})
            error = {} if answer.is_success else error_of(answer, [502, 503])
            if error.get("code") != "unavailable":
                return error
            await asyncio.sleep(float(answer.headers["retry-after"]))  # it has not heard of the engine yet


@on("L/tls")
async def test_d14_the_store_is_where_it_is_said_to_be(world: World) -> None:
    """By the endpoint that is named, over TLS by the authority that is named, for any region: nowhere else."""
    assert world.proxy is not None
    loras = world.oracle.loras(modules("q_proj", "v_proj"), seed=14)
    uri = world.put("d14/a", Files(config(), keyed(loras)))
    changes = world.oracle.merge(loras, 2.0)
    await world.exact_from(uri, changes, name="d14")
    url, plain = stored(world), f"&ca={TLS / 'ca.pem'}"
    assert url.startswith("s3://cases?endpoint=https://"), url
    assert url.endswith(plain), url
    unset = url.replace("&region=us-east-1", "")
    profile = world.root / "profile"
    keys = world.factory.stack._started().shared
    profile.write_text(
        f"[mine]\naws_access_key_id = {keys['INFINILORA_S3_ACCESS_KEY']}\n"
        f"aws_secret_access_key = {keys['INFINILORA_S3_SECRET_KEY']}\nendpoint_url = {world.proxy.endpoint}\n"
    )
    works = {
        "no-region": {"INFINILORA_STORE_URL": unset},
        "region": {"INFINILORA_STORE_URL": f"{unset}&region=eu-north-7"},
        "profile": {
            "INFINILORA_S3_CREDENTIALS": "file",
            "INFINILORA_S3_CREDENTIALS_FILE": str(profile),
            "INFINILORA_S3_PROFILE": "mine",
        },
    }
    for name, env in works.items():
        assert await of_a_gateway(world, name, env, uri) == {}
        await world.api.wait(f"/v1/models/d14-{name}", lambda _: True, within_s=10)  # the other gateway was told first
        await world.serves(f"d14-{name}", changes)
    refused = {
        "other-ca": (url.replace("ca.pem", "cert.pem"), "`ca` in INFINILORA_STORE_URL"),
        "no-ca": (url.removesuffix(plain), "`ca` in INFINILORA_STORE_URL"),
        "http": (url.removesuffix(plain).replace("https:", "http:"), "endpoint in INFINILORA_STORE_URL"),
    }
    for name, (wrong, says) in refused.items():
        error = await of_a_gateway(world, name, {"INFINILORA_STORE_URL": wrong}, uri, until="/healthz")
        assert error["code"] == "store_refused"
        assert says in error["message"]
        assert "127.0.0.1" not in error["message"]
        assert f"d14-{name}" not in await world.listed()
    await world.api.generate(GOOD, PROMPT, max_tokens=1)
    assert world.proxy.seen == [], "a request went where nothing but an environment variable points"
