"""An application served inside a service's task."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from infinilora.protocol.errors import InvalidRequest, Unavailable
from infinilora.runtime.web import WebServer
from support.ipv6 import needs_ipv6


def hello() -> FastAPI:
    app = FastAPI()

    @app.get("/")
    async def greet() -> dict[str, str]:
        return {"hello": "world"}

    return app


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=needs_ipv6)])
async def test_it_answers_while_it_runs_and_stops_when_asked(host: str) -> None:
    with WebServer(hello(), f"{host}:0", grace_s=1) as web:
        assert web.address.startswith(f"{host}:")
        task = asyncio.get_running_loop().create_task(web.run())
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.get(f"http://{web.address}/")
        assert answer.json() == {"hello": "world"}
        await web.stop()
        await task


@pytest.mark.parametrize("listen", ["127.0.0.1:none", "nowhere", ":8000", "127.0.0.1:99999999", "::1:8000"])
async def test_an_address_that_is_none_is_named(listen: str) -> None:
    with pytest.raises(InvalidRequest, match="wanted host:port"):
        WebServer(hello(), listen, grace_s=1)


async def test_a_port_in_use_is_named() -> None:
    with WebServer(hello(), "127.0.0.1:0", grace_s=1) as web, pytest.raises(Unavailable, match="cannot listen"):
        WebServer(hello(), web.address, grace_s=1)
