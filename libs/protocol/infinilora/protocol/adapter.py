"""What an adapter and a base model are to every process: sites, geometry, the manifest, the packed layout.

Knows no files, no PEFT names and no tensors: `weights` writes what is described here, `pool` reads it.

The packed data section, layer by layer and site by site (ascending), each *block* padded to 64 bytes:

    dense site   | A_q [r_q, in] | A_k [r_k, in] | A_v [r_v, in] | Bt_q [r_q, out_q] | Bt_k ... | pad |
    MoE site     one such block for each expert 0..E-1, all of one size
    vectors      after all Bt of a block, each fp32 [out] at a multiple of 64: bias_q | colscale_q | bias_k ...

A is row-major as PEFT stores it; Bt is B transposed, so that a row of Bt is read along the output. Only parts that say
so have vectors: y = y * colscale + (scale * (x A^T) Bt + bias). A block without any lies as it did before v2.
"""

import enum
from collections.abc import Sequence
from typing import Literal

import msgspec

from infinilora.protocol.ids import Digest, Fingerprint, digest_of

PACK_VERSION = 2
READABLE_PACKS = frozenset({1, 2})
"""Versions that are read; only the newest is written. What is stored under a name is never rewritten."""
FINGERPRINT_VERSION = 2
"""Of the fingerprints that engines compute."""
BLOCK_ALIGN = 64
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
VECTOR_BYTES = 4
"""Bytes of a number of a bias or a column scale: fp32 whatever the manifest's dtype."""


class Site(enum.IntEnum):
    """Where a delta is added. The number is the site's index on the wire and in masks."""

    QKV = 0
    O = 1  # noqa: E741 - the site's name
    GATE_UP = 2
    DOWN = 3
    MOE_GATE_UP = 4
    MOE_DOWN = 5
    SHARED_GATE_UP = 6
    SHARED_DOWN = 7
    ROUTER = 8
    LM_HEAD = 9
    EMBED = 10
    SHARED_GATE = 11

    @property
    def label(self) -> str:
        return self.name.lower()


NUM_SITES = len(Site)
MOE_SITES = frozenset({Site.MOE_GATE_UP, Site.MOE_DOWN})

PARTS: dict[Site, tuple[str, ...]] = {
    Site.QKV: ("q", "k", "v"),
    Site.O: ("o",),
    Site.GATE_UP: ("gate", "up"),
    Site.DOWN: ("down",),
    Site.MOE_GATE_UP: ("gate", "up"),
    Site.MOE_DOWN: ("down",),
    Site.SHARED_GATE_UP: ("gate", "up"),
    Site.SHARED_DOWN: ("down",),
    Site.ROUTER: ("router",),
    Site.LM_HEAD: ("lm_head",),
    Site.EMBED: ("embed",),
    Site.SHARED_GATE: ("shared_gate",),
}
"""The projections fused at a site, in the order of their columns."""


class PartGeometry(msgspec.Struct, frozen=True):
    """One projection of a site in the base model. `module` holds `{expert}` where experts differ."""

    name: str
    module: str
    out_dim: int
    out_offset: int


class SiteGeometry(msgspec.Struct, frozen=True):
    """A site of one layer of a base model: input width, output width, experts (0: dense), parts."""

    layer: int
    site: Site
    in_dim: int
    out_dim: int
    num_experts: int
    parts: tuple[PartGeometry, ...]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A weight of the base by its values: what a copy of it is compared with. sha256 of the bytes in `dtype`."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


class BaseCard(msgspec.Struct, frozen=True, kw_only=True):
    """What gateway and ingest know of a base model. Published by an engine at `keys.base_card`."""

    fingerprint: Fingerprint
    fingerprint_version: int = 1
    """1: of a sample of the weights, so that unlike bases may share one. FINGERPRINT_VERSION: of all of them."""
    name: str
    model_type: str
    num_layers: int
    hidden_dim: int
    vocab_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    tokenizer_files: tuple[str, ...] = ()
    sites: tuple[SiteGeometry, ...]
    tables: dict[str, Table] = {}
    """The weights of embedding and head by module: trainers save copies of them beside an adapter."""

    def geometry(self) -> dict[tuple[int, Site], SiteGeometry]:
        return {(s.layer, s.site): s for s in self.sites}


class PartEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One projection of a packed site. `scale` is alpha / rank, or alpha / sqrt(rank) for rsLoRA.

    What an adapter does not have is not written, so that a manifest older than a field keeps its bytes and its digest.
    """

    name: str
    rank: int
    scale: float
    out_dim: int
    out_offset: int
    has_bias: bool = False
    """A vector [out] that is added to the delta as it is: whatever scales it is in it."""
    has_colscale: bool = False
    """A vector [out] that the base model's output is multiplied by before the delta is added (DoRA)."""


class SiteEntry(msgspec.Struct, frozen=True):
    """One packed site: its parts, its byte range in the data section, a sha256 for each block."""

    layer: int
    site: Site
    in_dim: int
    out_dim: int
    num_experts: int
    parts: tuple[PartEntry, ...]
    offset: int
    num_bytes: int
    sha256: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        return self.num_experts or 1

    @property
    def rank(self) -> int:
        """Rows of all A of one block together."""
        return sum(part.rank for part in self.parts)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The canonical description of a packed adapter. Its sha256 is the adapter's digest."""

    pack_version: int = PACK_VERSION
    base: Fingerprint
    dtype: str
    num_layers: int
    source_digest: str
    narrowed_from: str = ""
    """The dtype that the files had, where the owner asked for a smaller one; from version 2 on."""
    sites: tuple[SiteEntry, ...]
    warnings: tuple[str, ...] = ()
    """Of version 1 only: a reworded warning must not be another digest."""

    @property
    def data_bytes(self) -> int:
        return sum(s.num_bytes for s in self.sites)

    @property
    def max_rank(self) -> int:
        return max((p.rank for s in self.sites for p in s.parts), default=0)

    def layer_sites(self) -> tuple[int, ...]:
        """For each layer (lm_head counts as layer `num_layers`) a bit mask of the sites adapted there."""
        masks = [0] * (self.num_layers + 1)
        for entry in self.sites:
            masks[entry.layer] |= 1 << entry.site
        return tuple(masks)

    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of each layer; lm_head is the last."""
        sizes = [0] * (self.num_layers + 1)
        for entry in self.sites:
            sizes[entry.layer] += entry.num_bytes
        return tuple(sizes)


class PartSpan(msgspec.Struct, frozen=True):
    """Byte offsets of a part's A, Bt and vectors from the start of its block; -1: the part has no such vector."""

    a: int
    bt: int
    bias: int = -1
    colscale: int = -1


def block_spans(parts: Sequence[PartEntry], in_dim: int, dtype: str) -> tuple[tuple[PartSpan, ...], int]:
    """Where each part lies in a block, and the block's size in bytes (padded). The one layout rule."""
    width = DTYPE_BYTES[dtype]
    a_at, spans_a = 0, []
    for part in parts:
        spans_a.append(a_at)
        a_at += part.rank * in_dim * width
    bt_at, spans_bt = a_at, []
    for part in parts:
        spans_bt.append(bt_at)
        bt_at += part.rank * part.out_dim * width
    at, spans = _aligned(bt_at), []
    for part, a, bt in zip(parts, spans_a, spans_bt, strict=True):
        vector_bytes = _aligned(part.out_dim * VECTOR_BYTES)
        bias = colscale = -1
        if part.has_bias:
            bias, at = at, at + vector_bytes
        if part.has_colscale:
            colscale, at = at, at + vector_bytes
        spans.append(PartSpan(a=a, bt=bt, bias=bias, colscale=colscale))
    return tuple(spans), at


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_ALIGN) * BLOCK_ALIGN


def encode_manifest(manifest: Manifest) -> bytes:
    """The canonical bytes: sorted keys, no spaces. What the digest is taken of.

    A version's fields are its own: each manifest is written with those that its version has, and keeps its bytes.
    """
    table = msgspec.to_builtins(manifest)
    del table["warnings" if manifest.pack_version >= 2 else "narrowed_from"]
    return msgspec.json.encode(table, order="sorted")


def decode_manifest(data: bytes) -> Manifest:
    return msgspec.json.decode(data, type=Manifest)


def manifest_digest(manifest: Manifest) -> Digest:
    return digest_of(encode_manifest(manifest))


class AdapterWarning(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner should know of an adapter that is served all the same. Peers match on `code`; `text` may change."""

    code: str
    text: str
    count: int = 1
    """How many modules or keys it is about; `text` may name fewer."""


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable version behind a name."""

    version: int
    digest: Digest
    created_at: str
    source: str
    num_bytes: int
    max_rank: int
    num_tensors: int = 0
    """A and B matrices matched to the base model, each expert's counted."""
    warnings: tuple[AdapterWarning, ...] = ()
    narrowed: str = ""
    """The dtype that the owner asked to narrow to; empty: packed as it came."""
    narrow_error: float = 0.0
    """The largest error that narrowing made at any site, of the delta's size there."""
    declared_base: str = ""
    """The base model that the adapter's own config names: words of its trainer, which nothing is looked up by."""


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the registry holds for a name. Written by compare-and-set on `revision`."""

    tenant: str
    name: str
    base: Fingerprint
    revision: int
    current: Digest
    versions: tuple[VersionRecord, ...]
    pinned: bool = False
    fallback: str = "none"
    """`none`: fail closed. `base`: this adapter's owner accepts base output when it cannot be served."""
    last_version: int = 0
    """The highest version ever given under this name, deleted ones too, so that `name@vN` means one digest for ever."""
    aliases: tuple[str, ...] = ()
    """Names of the `AliasRecord`s that point here; written in one script with them."""


class AliasRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Another name for an adapter. Written by compare-and-set on `revision`."""

    tenant: str
    name: str
    target: str
    """`name`, `name@vN` or `name@sha256:...` of the same tenant; never another alias."""
    revision: int


class RegistryLife(msgspec.Struct, frozen=True, kw_only=True):
    """Which registry this is, and how often it has been put back after the store had lost everything."""

    id: str
    """Of its first life, kept by all that follow."""
    number: int = 1
    revision: int = 0
    """Of the life before: how far the mirror had read that this one was put back from."""


class DigestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who still needs a packed file. Compare-and-set between registration and collection decides which comes first."""

    state: Literal["live", "dying"] = "live"
    """`dying`: being dropped from every tier and the store. Only a record without references may become so."""
    epoch: int = 0
    """Of a dying one: the leadership that deletes it. Who leads later takes it over before anything is deleted."""
    refs: tuple[str, ...] = ()
    """`tenant/name@vN` of every version that has this digest."""
