"""Records of adapters: old bytes keep their digest, vectors have their places, old records are read."""

import hashlib

import msgspec
import pytest

from infinilora.protocol import keys
from infinilora.protocol.adapter import (
    NUM_SITES,
    PARTS,
    AdapterRecord,
    AliasRecord,
    DigestRecord,
    PartEntry,
    PartSpan,
    Site,
    block_spans,
    decode_manifest,
    encode_manifest,
    manifest_digest,
)
from infinilora.protocol.ids import Digest

OLD_MANIFEST = (
    b'{"base":"sha256:' + b"1" * 64 + b'","dtype":"F32","num_layers":1,"pack_version":1,"sites":[{"in_dim":4,"layer":0,'
    b'"num_bytes":64,"num_experts":0,"offset":0,"out_dim":3,"parts":[{"name":"o","out_dim":3,"out_offset":0,"rank":2,'
    b'"scale":0.5}],"sha256":["'
    + b"3" * 64
    + b'"],"site":1}],"source_digest":"sha256:'
    + b"2" * 64
    + b'","warnings":[]}'
)
OLD_VERSION = (
    b'{"version":3,"digest":"sha256:aa","created_at":"2026-11-01","source":"s3://x","num_bytes":9,"max_rank":4}'
)
OLD_RECORD = (
    b'{"tenant":"t","name":"n","base":"sha256:bb","revision":7,"current":"sha256:aa","versions":[' + OLD_VERSION + b"]}"
)


def test_a_manifest_written_before_there_were_vectors_keeps_its_bytes_and_its_digest() -> None:
    manifest = decode_manifest(OLD_MANIFEST)
    assert not manifest.sites[0].parts[0].has_bias
    assert encode_manifest(manifest) == OLD_MANIFEST
    assert manifest_digest(manifest) == "sha256:" + hashlib.sha256(OLD_MANIFEST).hexdigest()


def test_vectors_are_part_of_the_digest() -> None:
    old = decode_manifest(OLD_MANIFEST)
    site = old.sites[0]
    part = msgspec.structs.replace(site.parts[0], has_bias=True)
    new = msgspec.structs.replace(old, sites=(msgspec.structs.replace(site, parts=(part,)),))
    assert manifest_digest(new) != manifest_digest(old)
    assert decode_manifest(encode_manifest(new)) == new


def test_a_block_without_vectors_lies_as_it_always_did() -> None:
    parts = (PartEntry("q", 2, 1.0, 6, 0), PartEntry("k", 3, 1.0, 5, 6))
    # A_q 2x4, A_k 3x4, Bt_q 2x6, Bt_k 3x5 numbers of two bytes: at 0, 16, 40, 64, to 94, padded to 128
    assert block_spans(parts, 4, "BF16") == ((PartSpan(0, 40), PartSpan(16, 64)), 128)


def test_vectors_come_after_all_bt_at_multiples_of_64() -> None:
    parts = (
        PartEntry("q", 2, 1.0, 20, 0, has_bias=True, has_colscale=True),
        PartEntry("k", 3, 1.0, 5, 20),
        PartEntry("v", 1, 1.0, 5, 25, has_colscale=True),
    )
    # A: 16 + 24 + 8 bytes; Bt: 80 + 30 + 10 from 48 to 168, padded to 192; vectors of 80, 80 and 20 bytes, padded
    assert block_spans(parts, 4, "BF16") == (
        (PartSpan(0, 48, 192, 320), PartSpan(16, 128), PartSpan(40, 158, -1, 448)),
        512,
    )


def test_records_written_before_the_new_fields_are_read() -> None:
    old = msgspec.json.decode(OLD_RECORD, type=AdapterRecord)
    assert (old.last_version, old.aliases) == (0, ())
    assert (old.versions[0].version, old.versions[0].warnings, old.versions[0].narrowed) == (3, (), "")


@pytest.mark.parametrize(
    "value",
    [
        AliasRecord(tenant="t", name="prod", target="n@v3", revision=2),
        DigestRecord(state="dying"),
        DigestRecord(refs=("t/n@v1", "t/m@v4")),
    ],
)
def test_records_of_names_and_digests_survive_the_store(value: msgspec.Struct) -> None:
    assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value


def test_every_site_has_parts_and_a_bit_of_a_mask_of_32() -> None:
    assert set(PARTS) == set(Site)
    assert sorted(Site) == list(range(NUM_SITES))
    assert max(Site) < 32


def test_the_gate_of_the_shared_expert_is_a_site_of_its_own() -> None:
    assert (Site(11).label, PARTS[Site(11)]) == ("shared_gate", ("shared_gate",))


def test_no_two_kinds_of_facts_share_a_key() -> None:
    made = [
        keys.adapter("t", "n"),
        keys.alias("t", "n"),
        keys.digest(Digest("sha256:aa")),
        keys.REGISTRY_JOURNAL,
        keys.REGISTRY_REVISION,
        keys.CONDEMNED,
    ]
    assert len(set(made)) == len(made)
