"""Names in memory: small, in order, a page at a time."""

import hashlib
import sys

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from infinilora.gateway.mirror import Mirror
from infinilora.protocol.adapter import AdapterRecord, AdapterWarning, AliasRecord, VersionRecord
from infinilora.protocol.ids import Digest, Fingerprint

ONE, TWO = Fingerprint("sha256:" + "1" * 64), Fingerprint("sha256:" + "2" * 64)


def digest(text: str) -> Digest:
    return Digest("sha256:" + hashlib.sha256(text.encode()).hexdigest())


def record(name: str, *, base: Fingerprint = ONE, versions: int = 1) -> AdapterRecord:
    made = [
        VersionRecord(
            version=number,
            digest=digest(f"{name}/{number}"),
            created_at=f"2026-11-30T02:00:{number:02}+00:00",
            source="s3://bucket/adapters/" + name,
            num_bytes=9_830_400 + len(name),
            max_rank=16,
            num_tensors=420,
            warnings=(AdapterWarning(code="x", text="ünï"),) if number == 2 else (),
        )
        for number in range(1, versions + 1)
    ]
    return AdapterRecord(
        tenant="t",
        name=name,
        base=base,
        revision=versions,
        current=made[-1].digest,
        versions=tuple(made),
        last_version=versions,
    )


def test_what_was_put_is_what_is_got() -> None:
    mirror = Mirror()
    for made in (record("a"), record("b", versions=3), msgspec.structs.replace(record("c"), fallback="base")):
        mirror.put(made)
        assert mirror.get("t", made.name) == made
    assert mirror.get("other", "a") is None
    assert len(mirror) == 3


def test_a_record_takes_few_bytes() -> None:
    mirror = Mirror()
    mirror.put(record("customer-000123"))
    held = mirror._tenants["t"].held["customer-000123"]
    assert sys.getsizeof(held) <= 300


def test_only_names_of_served_bases_are_asked_for_and_aliases_count_as_their_adapters() -> None:
    mirror = Mirror()
    for number in range(6):
        mirror.put(record(f"a{number}", base=TWO if number % 2 else ONE))
    mirror.put_alias(AliasRecord(tenant="t", name="b-one", target="a0@v1", revision=1))
    mirror.put_alias(AliasRecord(tenant="t", name="b-two", target="a1", revision=1))
    mirror.put_alias(AliasRecord(tenant="t", name="b-gone", target="nothing", revision=1))
    assert [entry.name for entry in mirror.page("t", "", 10, bases={ONE})] == ["a0", "a2", "a4", "b-one"]
    assert [entry.name for entry in mirror.page("t", "a1", 2, bases={TWO})] == ["a3", "a5"]
    assert [entry.name for entry in mirror.page("t", "", 10, bases=set())] == []
    assert [entry.name for entry in mirror.page("t", "", 10)] == [f"a{number}" for number in range(6)]


NAMES = st.text("abC1.-_", min_size=1, max_size=3).map(lambda text: "n" + text)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "drop", "alias", "drop alias", "page"]), NAMES), max_size=60)


@given(STEPS, st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_pages_hold_every_name_once_and_in_order(steps: list[tuple[str, str]], limit: int) -> None:
    mirror, adapters, aliases = Mirror(), set[str](), set[str]()
    for step, name in steps:
        match step:
            case "put" if name not in aliases:
                mirror.put(record(name))
                adapters.add(name)
            case "drop":
                mirror.drop("t", name)
                adapters.discard(name)
            case "alias" if name not in adapters:
                mirror.put_alias(AliasRecord(tenant="t", name=name, target="x", revision=1))
                aliases.add(name)
            case "drop alias":
                mirror.drop_alias("t", name)
                aliases.discard(name)
            case _:
                mirror.page("t", "", 1)
    seen: list[str] = []
    while page := mirror.page("t", seen[-1] if seen else "", limit):
        assert len(page) <= limit
        seen += [entry.name for entry in page]
    assert seen == sorted(adapters)
    assert len(mirror) == len(adapters)
    assert all(mirror.alias("t", name) is not None for name in aliases)
