"""Names through the API: versions, aliases, rollback, tombstones, pages, verification, and the switch for all of it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from infinilora.protocol import keys
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import DirectoryBlobs
from support.gateway_house import House, error_of, open_house

pytestmark = pytest.mark.integration


async def create(house: House, name: str, seed: int, **more: Any) -> dict[str, Any]:
    source = house.adapter_dir(f"s{seed}", seed=seed)
    answer = await house.http.post("/v1/adapters", json={"name": name, "source": f"file://{source}"} | more)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def post(house: House, path: str, **body: Any) -> httpx.Response:
    return await house.http.post(f"/v1/adapters/{path}", json=body)


async def used(house: House, model: str) -> str:
    """The digest that a request for this model is bound to; the error's code if there is none."""
    answer = await house.complete(model, max_tokens=1)
    if answer.status_code != 200:
        return str(error_of(answer)["code"])
    assert house.engine.requests[-1].digest == answer.headers["x-adapter-digest"]
    return answer.headers["x-adapter-digest"]


async def test_a_version_number_means_one_digest_for_ever(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        first = await create(house, "a", 1)
        second = await create(house, "a", 2, replace=True)
        assert (await house.http.delete("/v1/adapters/a")).json()["deleted"] is True
        for name in ("a", "a@v1", "a@v2", f"a@{first['digest']}"):
            assert await used(house, name) == "adapter_not_found"
        again = await create(house, "a", 3)
        assert (again["version"], [v["version"] for v in again["versions"]]) == (3, [3])
        assert await used(house, "a@v1") == "adapter_not_found"
        back = await create(house, "a", 1, replace=True)
        assert (back["version"], back["digest"]) == (4, first["digest"])
        assert len({first["digest"], second["digest"], again["digest"]}) == 3


async def test_a_refused_body_names_its_field(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        for path, body, field in (
            ("", {"name": "a"}, "source"),
            ("", {"name": "a", "source": "file:///x", "replace": "yes"}, "replace"),
            ("", {"name": "a", "source": "file:///x", "pinned": True}, "pinned"),
            ("", {"name": "a", "source": "file:///x", "tenant": "b/c"}, "tenant"),
            ("/a/rollback", {"to": "1"}, "to"),
        ):
            answer = await house.http.post(f"/v1/adapters{path}", json=body)
            assert (answer.status_code, error_of(answer)["param"]) == (400, field), answer.text


async def test_two_versions_are_served_at_once_and_an_earlier_one_comes_back(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        digests = [(await create(house, "a", seed, replace=True))["digest"] for seed in (1, 2, 3)]
        assert [await used(house, f"a@v{n}") for n in (1, 2, 3)] == digests
        back = (await post(house, "a/rollback")).json()
        assert (back["version"], back["digest"], back["changed"]) == (2, digests[1], True)
        assert await used(house, "a") == digests[1]
        to = (await post(house, "a/rollback", to=1)).json()
        assert (to["version"], await used(house, "a")) == (1, digests[0])
        assert (await post(house, "a/rollback", to=1)).json()["changed"] is False
        nothing = await post(house, "a/rollback")
        assert (nothing.status_code, error_of(nothing)["code"]) == (409, "conflict")
        missing = await post(house, "a/rollback", to=9)
        assert missing.status_code == 400
        assert "v1, v2, v3" in error_of(missing)["message"]
        assert (await post(house, "nope/rollback")).status_code == 404
        assert (await post(house, "a/rollback", to=3)).json()["version"] == 3


async def test_an_alias_means_an_adapter_a_version_or_a_digest_and_moves_at_once(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        one = (await create(house, "a", 1))["digest"]
        two = (await create(house, "a", 2, replace=True))["digest"]
        other = (await create(house, "b", 3))["digest"]
        for target, meant in (("a", two), ("a@v1", one), (f"a@{two}", two), ("b", other), ("default/a@v1", one)):
            made = (await post(house, "prod/alias", target=target)).json()
            assert (made["id"], made["digest"], made["changed"]) == ("prod", meant, True)
            assert await used(house, "prod") == meant
            assert await used(house, "default/prod") == meant
        assert (await post(house, "prod/alias", target="a@v1")).json()["changed"] is False
        shown = (await house.http.get("/v1/adapters/prod")).json()
        assert (shown["id"], shown["name"], shown["alias_of"], shown["aliases"]) == ("prod", "a", "a@v1", ["prod"])
        assert (await house.http.get("/v1/adapters/b")).json()["aliases"] == []
        models = {m["id"]: m["digest"] for m in (await house.http.get("/v1/models")).json()["data"]}
        assert models == {"tiny": house.card.fingerprint, "a": two, "b": other, "prod": one}
        assert (await house.http.get("/v1/models/prod")).json()["digest"] == one
        assert {a["id"] for a in (await house.http.get("/v1/adapters")).json()["data"]} == {"a", "b"}
        assert error_of(await house.complete("prod@v1"))["code"] == "invalid_request"

        gone = (await house.http.delete("/v1/adapters/prod")).json()
        assert (gone["id"], gone["object"], gone["deleted"]) == ("prod", "alias", True)
        assert await used(house, "prod") == "adapter_not_found"
        assert await used(house, "a") == two


async def test_an_alias_shadows_nothing_and_nothing_shadows_it(tmp_path: Path) -> None:
    async with open_house(tmp_path, model_aliases="base-v1=tiny") as house:
        await house.seed("a")
        await house.seed("b")
        assert (await post(house, "prod/alias", target="a")).status_code == 200
        for name, target, status in (
            ("tiny", "a", 409),
            ("base-v1", "a", 409),
            ("b", "a", 409),
            ("x", "prod", 409),
            ("x", "tiny", 404),
            ("x", "base:tiny", 400),
            ("x", "other/a", 400),
            ("x", "nope", 404),
            ("x", "a@v7", 404),
            ("x", "a@latest", 400),
            ("a b", "a", 400),
        ):
            answer = await post(house, f"{name}/alias", target=target)
            assert answer.status_code == status, (name, target, answer.text)
            assert error_of(answer)["message"]
        source = house.adapter_dir("p")
        taken = await house.http.post("/v1/adapters", json={"name": "prod", "source": f"file://{source}"})
        assert (taken.status_code, error_of(taken)["code"]) == (409, "conflict")
        assert "'prod'" in error_of(taken)["message"]
        assert (await house.http.delete("/v1/adapters/a")).status_code == 200
        assert await used(house, "prod") == "adapter_not_found"
        assert (await house.http.get("/v1/adapters/prod")).status_code == 404
        await create(house, "prod", 1)


async def test_racing_writers_of_one_name_leave_one_kind_of_it(tmp_path: Path) -> None:
    async with open_house(tmp_path, max_ingests=4) as house:
        await house.seed("a")
        source = house.adapter_dir("p")
        body = {"name": "x", "source": f"file://{source}"}
        answers = await asyncio.gather(
            house.http.post("/v1/adapters", json=body),
            *(post(house, "x/alias", target="a") for _ in range(5)),
            *(house.http.delete("/v1/adapters/x") for _ in range(5)),
            house.http.post("/v1/adapters", json=body),
        )
        assert {answer.status_code for answer in answers} <= {200, 404, 409}
        held = [
            await house.store.get(keys.alias("default", "x"), dict),
            await house.store.get(keys.adapter("default", "x"), dict),
        ]
        is_alias, is_adapter = held[0] is not None, held[1] is not None
        assert not (is_alias and is_adapter)
        named = (await house.http.get("/v1/adapters/a")).json()["aliases"]
        assert named == (["x"] if is_alias else [])


async def test_pages_walk_through_all_names_once(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        for number in range(25):
            await house.seed(f"n{number:02}")
        for path, first in (("/v1/adapters", []), ("/v1/models", ["tiny"])):
            seen, after = [], ""
            while True:
                answer = (await house.http.get(path, params={"limit": 10} | ({"after": after} if after else {}))).json()
                ids = [item["id"] for item in answer["data"]]
                assert (answer["first_id"], answer["last_id"]) == (ids[0], ids[-1])
                seen += ids
                after = ids[-1]
                if not answer["has_more"]:
                    break
            assert seen == first + [f"n{number:02}" for number in range(25)]
        whole = (await house.http.get("/v1/adapters")).json()
        assert (len(whole["data"]), whole["has_more"]) == (25, False)
        for query in ("limit=0", "limit=1001", "limit=x", "limit=-1", "limit=", "after=a b"):
            answer = await house.http.get(f"/v1/adapters?{query}")
            assert answer.status_code == 400, query
        empty = (await house.http.get("/v1/adapters?after=zzz")).json()
        assert (empty["data"], empty["first_id"], empty["has_more"]) == ([], None, False)


async def test_a_pin_is_kept_with_the_name(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        await house.seed("a")
        assert (await post(house, "a/pin")).json()["pinned"] is True
        assert (await post(house, "a/pin", pinned=True)).json()["changed"] is False
        assert (await house.http.get("/v1/adapters/a")).json()["pinned"] is True
        assert (await post(house, "a/pin", pinned=False)).json()["pinned"] is False


async def test_verification_reads_and_hashes_everything_that_is_stored(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        made = await create(house, "a", 1)
        whole = (await post(house, "a/verify")).json()
        assert (whole["ok"], whole["faults"], whole["digest"], whole["version"]) == (True, [], made["digest"], 1)
        stored = tmp_path / "store" / keys.packed(Digest(made["digest"]))
        assert whole["bytes"] == stored.stat().st_size
        good = stored.read_bytes()
        for damage, named in (
            (good[:-1] + bytes([good[-1] ^ 1]), ""),
            (good[:-40], "bytes"),
            (good[:4], "header"),
            (b"", "header"),
        ):
            stored.chmod(0o644)
            stored.write_bytes(damage)
            found = (await post(house, "a/verify", version=1)).json()
            assert (found["ok"], found["num_faults"]) == (False, len(found["faults"])), damage[:8]
            assert found["num_faults"] == 1 or not named
            assert named in found["faults"][0]
        stored.unlink()
        missing = (await post(house, "a/verify")).json()
        assert (missing["ok"], missing["blocks"]) == (False, 0)
        assert "nothing in the store" in missing["faults"][0]
        assert (await post(house, "nope/verify")).status_code == 404
        assert (await post(house, "a/verify", version=7)).status_code == 400


async def test_verification_tests_what_is_stored_against_what_its_files_computed(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        digests = [Digest((await create(house, name, seed))["digest"]) for seed, name in enumerate("ab")]
        kept = [tmp_path / "store" / keys.reference(digest) for digest in digests]
        good = kept[1].read_bytes()
        tested = (await post(house, "b/verify")).json()["self_test"]
        assert tested["parts"] == sum(len(site.parts) for site in house.card.sites)
        assert tested["error"] < 1e-6
        for wrong, told in (
            (kept[0].read_bytes().replace(digests[0].encode(), digests[1].encode()), "self-test: layer 0 site qkv"),
            (kept[0].read_bytes(), "reference answers: digest"),
            (good[:-9], "reference answers"),
        ):
            kept[1].write_bytes(wrong)
            found = (await post(house, "b/verify")).json()
            assert found["ok"] is False
            assert told in found["faults"][0]
        kept[1].unlink()
        old = (await post(house, "b/verify")).json()
        assert (old["ok"], old["self_test"]) == (True, None)
        assert (await create(house, "b", 1))["changed"] is False
        assert kept[1].read_bytes() == good


async def test_a_file_that_is_deleted_while_it_is_verified_is_said_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_range = DirectoryBlobs.get_range

    def gone(self: DirectoryBlobs, name: str, offset: int, num_bytes: int, *, etag: str | None = None) -> bytes:
        read = get_range(self, name, offset, num_bytes, etag=etag)
        if name.startswith("adapters/") and offset == 0 and num_bytes > 8:
            self.delete(name)
        return read

    async with open_house(tmp_path) as house:
        await create(house, "a", 1)
        monkeypatch.setattr(DirectoryBlobs, "get_range", gone)
        found = (await post(house, "a/verify")).json()
        assert (found["ok"], found["num_faults"], found["self_test"]) == (False, 1, None)
        assert "nothing in the store" in found["faults"][0]


async def test_what_is_refused_after_it_was_packed_is_noted_for_deletion(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        kept = await create(house, "a", 1)
        source = house.adapter_dir("s2", seed=2)
        answer = await house.http.post("/v1/adapters", json={"name": "a", "source": f"file://{source}"})
        assert answer.status_code == 409
        condemned = [digest for digest, _ in await house.store.journal(keys.CONDEMNED, 0, 10)]
        stored = {f"sha256:{path.stem}" for path in (tmp_path / "store" / "adapters").iterdir()}
        assert kept["digest"] in stored
        assert stored <= set(condemned)


async def test_what_was_stored_for_an_answer_that_was_lost_is_noted_for_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file = DirectoryBlobs.put_file

    def written_and_cut(self: DirectoryBlobs, name: str, path: Path, *, if_absent: bool = False) -> bool:
        done = put_file(self, name, path, if_absent=if_absent)
        if name.startswith("adapters/"):
            raise Unavailable("the object store does not answer", retry_after_s=1.0)
        return done

    async with open_house(tmp_path) as house:
        monkeypatch.setattr(DirectoryBlobs, "put_file", written_and_cut)
        source = house.adapter_dir("s1", seed=1)
        answer = await house.http.post("/v1/adapters", json={"name": "a", "source": f"file://{source}"})
        assert answer.status_code == 503
        condemned = [digest for digest, _ in await house.store.journal(keys.CONDEMNED, 0, 10)]
        assert [f"sha256:{path.stem}" for path in (tmp_path / "store" / "adapters").iterdir()] == condemned


@pytest.mark.parametrize("name", ["packed", "reference"])
@pytest.mark.parametrize("how", ["cut", "altered"])
async def test_what_is_damaged_in_the_store_is_whole_again_once_it_is_registered_anew(
    tmp_path: Path, name: str, how: str
) -> None:
    """Nobody has tried to load it: no process says that it failed."""
    async with open_house(tmp_path) as house:
        made = await create(house, "a", 1)
        stored = tmp_path / "store" / getattr(keys, name)(Digest(made["digest"]))
        whole = stored.read_bytes()
        stored.write_bytes(whole[:-40] if how == "cut" else whole[:-40] + whole[-40:].swapcase()[::-1])
        assert (await post(house, "a/verify")).json()["ok"] is False
        assert (await create(house, "a", 1))["changed"] is False
        assert (await post(house, "a/verify")).json()["ok"] is True


async def test_a_gateway_whose_adapter_api_is_off_says_so_and_goes_on_serving(tmp_path: Path) -> None:
    async with open_house(tmp_path, adapter_api="off") as house:
        digest = await house.seed("a")
        for method, path in (
            ("POST", ""),
            ("GET", ""),
            ("GET", "/a"),
            ("DELETE", "/a"),
            ("POST", "/a/alias"),
            ("POST", "/a/rollback"),
            ("POST", "/a/verify"),
        ):
            answer = await house.http.request(method, f"/v1/adapters{path}")
            error = error_of(answer)
            assert (answer.status_code, error["code"], error["type"]) == (403, "feature_off", "permission_error")
            assert "INFINILORA_ADAPTER_API" in error["message"]
        assert await used(house, "a") == digest


async def test_without_keys_any_tenant_may_be_named_and_with_keys_only_ones_own(tmp_path: Path) -> None:
    async with open_house(tmp_path / "open") as house:
        made = await create(house, "a", 1, tenant="red")
        assert made["tenant"] == "red"
        assert await used(house, "red/a") == made["digest"]
        assert await used(house, "a") == "adapter_not_found"
        assert (await house.http.get("/v1/adapters")).json()["data"] == []
        assert [a["id"] for a in (await house.http.get("/v1/adapters?tenant=red")).json()["data"]] == ["a"]
        assert (await post(house, "x/alias", target="a", tenant="red")).json()["tenant"] == "red"
        assert (await house.http.get("/v1/adapters?tenant=a b")).status_code == 400
    async with open_house(tmp_path / "keyed", api_keys="k1:red,k2:blue") as house:
        red = {"authorization": "Bearer k1"}
        body = {"name": "a", "source": f"file://{house.adapter_dir('a')}"}
        foreign = await house.http.post("/v1/adapters", json=body | {"tenant": "blue"}, headers=red)
        assert (foreign.status_code, error_of(foreign)["code"]) == (403, "adapter_forbidden")
        own = await house.http.post("/v1/adapters", json=body | {"tenant": "red"}, headers=red)
        assert (own.status_code, own.json()["tenant"]) == (200, "red")
        assert (await house.http.get("/v1/adapters?tenant=blue", headers=red)).status_code == 403


async def test_a_tenant_in_the_query_counts_for_every_way_to_register(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        source = house.adapter_dir("a")
        files = [("files", (path.name, path.read_bytes())) for path in source.iterdir()]
        body = {"name": "a", "source": f"file://{source}"}
        named = await house.http.post("/v1/adapters?tenant=red", json=body)
        sent = await house.http.post("/v1/adapters?tenant=blue", data={"name": "a"}, files=files)
        assert (named.json()["tenant"], sent.json()["tenant"]) == ("red", "blue")
        assert await used(house, "a") == "adapter_not_found"
        torn = await house.http.post("/v1/adapters?tenant=red", json=body | {"tenant": "blue"})
        assert (torn.status_code, error_of(torn)["param"]) == (400, "tenant")


async def test_what_changes_an_adapter_is_told_an_alias_when_it_is_one(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        await house.seed("a")
        await post(house, "prod/alias", target="a")
        for verb in ("rollback", "pin"):
            answer = await post(house, f"prod/{verb}")
            assert (answer.status_code, error_of(answer)["code"]) == (409, "conflict")
            assert "alias of 'a'" in error_of(answer)["message"]
        version = await post(house, "prod/verify", version=7)
        assert (version.status_code, error_of(version)["param"]) == (400, "version")


def declares(source: Path, base: object) -> Path:
    config = source / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": base}))
    return source


async def test_a_declared_base_that_is_another_one_here_is_warned_of_or_refused(tmp_path: Path) -> None:
    aliases = "Llama-Other=llama-other-served-elsewhere,org/ours=tiny"
    async with open_house(tmp_path / "warn", model_aliases=aliases) as house:
        for number, declared in enumerate((None, "/home/joe/model", "org/ours", "hub/tiny", "org/llama-other")):
            source = declares(house.adapter_dir(f"a{number}", seed=number), declared)
            body = {"name": f"a{number}", "source": f"file://{source}"}
            made = (await house.http.post("/v1/adapters", json=body)).json()
            assert made["declared_base"] == declared
            codes = [warning["code"] for warning in made["warnings"]]
            assert codes == (["declared_base"] if declared == "org/llama-other" else []), declared
        shown = (await house.http.get("/v1/adapters/a4")).json()
        assert "org/llama-other" in shown["warnings"][0]["text"]
    async with open_house(tmp_path / "refuse", model_aliases=aliases, declared_base="refuse") as house:
        source = declares(house.adapter_dir("a"), "org/llama-other")
        answer = await house.http.post("/v1/adapters", json={"name": "a", "source": f"file://{source}"})
        assert (answer.status_code, error_of(answer)["code"]) == (422, "adapter_invalid")
        for part in ("'a'", "adapter_config.json", "org/llama-other", "'tiny'", "INFINILORA_DECLARED_BASE"):
            assert part in error_of(answer)["message"]
        assert not [path for path in (tmp_path / "refuse" / "store").glob("adapters/*") if path.is_file()]
