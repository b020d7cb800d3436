"""The packed file: an adapter as one safetensors object, laid out so that a layer or an expert is one range.

    | header bytes u64 | JSON header, padded | data section, from a multiple of 64 on            |
                         __metadata__.infinilora = the manifest      blocks as protocol/adapter.py lays them

Written once, read by ranges; every block carries its sha256 in the manifest, and the manifest's own sha256 is
the adapter's digest. Knows plans and bytes, not PEFT.
"""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec
import numpy as np

from infinilora.protocol.adapter import (
    BLOCK_ALIGN,
    READABLE_PACKS,
    VECTOR_BYTES,
    Manifest,
    PartEntry,
    SiteEntry,
    block_spans,
    decode_manifest,
    encode_manifest,
)
from infinilora.protocol.errors import AdapterFailed, Internal
from infinilora.protocol.ids import Digest, digest_of
from infinilora.weights.plan import AdapterPlan, SitePlan, fill
from infinilora.weights.tensorfile import LENGTH_BYTES, MAX_HEADER_BYTES, NUMPY_DTYPES, Array

_METADATA_KEY = "infinilora"
_NO_HASH = "0" * 64


def write_packed(plan: AdapterPlan, out: BinaryIO) -> Manifest:
    """Write the packed file to a seekable file at its position 0. The same plan gives the same bytes."""
    entries = _lay_out(plan)
    draft = _header(_manifest(plan, entries))
    out.seek(0)
    out.write(draft)
    with ThreadPoolExecutor(1) as pool:  # hashes one site while the next is put together
        hashes: list[Future[tuple[str, ...]]] = []
        for site, entry in zip(plan.sites, entries, strict=True):
            blocks = _write_site(plan, site, entry, out)
            if hashes:
                hashes[-1].result()  # no more than two sites are in memory
            hashes.append(pool.submit(_hash_blocks, blocks))
    hashed = [msgspec.structs.replace(entry, sha256=done.result()) for entry, done in zip(entries, hashes, strict=True)]
    manifest = _manifest(plan, hashed)
    header = _header(manifest)
    if len(header) != len(draft):
        raise Internal(f"packed header changed its size: {len(draft)} then {len(header)} bytes")
    out.seek(0)
    out.write(header)
    out.flush()
    return manifest


def _lay_out(plan: AdapterPlan) -> list[SiteEntry]:
    entries, offset = [], 0
    for site in plan.sites:
        geometry = site.geometry
        parts = tuple(part.entry for part in site.parts)
        _, block_bytes = block_spans(parts, geometry.in_dim, plan.dtype)
        num_blocks = geometry.num_experts or 1
        entries.append(
            SiteEntry(
                layer=geometry.layer,
                site=geometry.site,
                in_dim=geometry.in_dim,
                out_dim=geometry.out_dim,
                num_experts=geometry.num_experts,
                parts=parts,
                offset=offset,
                num_bytes=num_blocks * block_bytes,
                sha256=(_NO_HASH,) * num_blocks,
            )
        )
        offset += num_blocks * block_bytes
    return entries


def _manifest(plan: AdapterPlan, entries: list[SiteEntry]) -> Manifest:
    return Manifest(
        base=plan.base,
        dtype=plan.dtype,
        num_layers=plan.num_layers,
        source_digest=plan.source.source_digest,
        narrowed_from=narrowed_from(plan),
        sites=tuple(entries),
    )


def narrowed_from(plan: AdapterPlan) -> str:
    """The dtype that would hold the adapter exactly, where it is packed in a smaller one; else empty."""
    kinds = {info.dtype for info in plan.source.tensors.tensors.values()}
    is_wider = plan.has_gains or plan.has_dora or plan.has_computed or kinds != {plan.dtype}
    return "F32" if plan.dtype != "F32" and is_wider else ""


def _write_site(plan: AdapterPlan, site: SitePlan, entry: SiteEntry, out: BinaryIO) -> Array:
    """Write a site and give its bytes [blocks, bytes of each]."""
    blocks = np.zeros((entry.num_blocks, entry.num_bytes // entry.num_blocks), np.uint8)
    for block, data in enumerate(blocks):
        for part, (a, bt) in zip(site.parts, part_arrays(entry, plan.dtype, data), strict=True):
            fill(part, block, plan.source.tensors, a, bt)
        _fill_vectors(plan, site, entry, data)
    out.write(blocks.data)
    return blocks


def _fill_vectors(plan: AdapterPlan, site: SitePlan, entry: SiteEntry, data: Array) -> None:
    biases, colscales = part_biases(entry, plan.dtype, data), part_colscales(entry, plan.dtype, data)
    for part, bias, colscale in zip(site.parts, biases, colscales, strict=True):
        if part.bias is not None and bias is not None:
            bias[...] = part.bias.read(plan.source.tensors)
        if part.dora is not None and colscale is not None:
            colscale[...] = part.dora.factors
            if part.dora.bias is not None and bias is not None:
                bias[...] = part.dora.bias


def _hash_blocks(blocks: Array) -> tuple[str, ...]:
    return tuple(hashlib.sha256(block.data).hexdigest() for block in blocks)


def part_arrays(entry: SiteEntry, dtype: str, block: Array) -> list[tuple[Array, Array]]:
    """(a [rank, in], bt [rank, out]) of each part as views of one block of bytes (uint8)."""
    spans, _ = block_spans(entry.parts, entry.in_dim, dtype)
    kind = NUMPY_DTYPES[dtype]

    def view(at: int, rows: int, cols: int) -> Array:
        return block[at : at + rows * cols * kind.itemsize].view(kind).reshape(rows, cols)

    return [
        (view(span.a, part.rank, entry.in_dim), view(span.bt, part.rank, part.out_dim))
        for part, span in zip(entry.parts, spans, strict=True)
    ]


def part_biases(entry: SiteEntry, dtype: str, block: Array) -> list[Array | None]:
    """The fp32 bias [out] of each part that has one, as a view of one block of bytes (uint8)."""
    spans, _ = block_spans(entry.parts, entry.in_dim, dtype)
    return [_vector(block, span.bias, part) for part, span in zip(entry.parts, spans, strict=True)]


def part_colscales(entry: SiteEntry, dtype: str, block: Array) -> list[Array | None]:
    """The fp32 column scale [out] of each part that has one, as a view of one block of bytes (uint8)."""
    spans, _ = block_spans(entry.parts, entry.in_dim, dtype)
    return [_vector(block, span.colscale, part) for part, span in zip(entry.parts, spans, strict=True)]


def _vector(block: Array, at: int, part: PartEntry) -> Array | None:
    return None if at < 0 else block[at : at + part.out_dim * VECTOR_BYTES].view(np.float32)


# The header --------------------------------------------------------------------------------------


def _header(manifest: Manifest) -> bytes:
    """Length and JSON header of the packed file, padded so that the data section is aligned."""
    table: dict[str, Any] = {"__metadata__": {_METADATA_KEY: encode_manifest(manifest).decode()}}
    for entry in manifest.sites:
        table |= _dense_tensors(entry, manifest.dtype) if not entry.num_experts else _moe_tensor(entry)
    body = msgspec.json.encode(table)
    body += b" " * (-(LENGTH_BYTES + len(body)) % BLOCK_ALIGN)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def _dense_tensors(entry: SiteEntry, dtype: str) -> dict[str, Any]:
    spans, block_bytes = block_spans(entry.parts, entry.in_dim, dtype)
    name = f"{entry.layer}.{entry.site.label}"
    table = {}

    def add(tensor: str, begin: int, kind: str, shape: tuple[int, ...], num_bytes: int) -> None:
        start = entry.offset + begin
        table[f"{name}.{tensor}"] = {
            "dtype": kind,
            "shape": shape,
            "data_offsets": (start, start + num_bytes),
        }

    width, end = NUMPY_DTYPES[dtype].itemsize, 0
    for part, span in zip(entry.parts, spans, strict=True):
        a_bytes, bt_bytes = part.rank * entry.in_dim * width, part.rank * part.out_dim * width
        add(f"{part.name}.a", span.a, dtype, (part.rank, entry.in_dim), a_bytes)
        add(f"{part.name}.bt", span.bt, dtype, (part.rank, part.out_dim), bt_bytes)
        end = span.bt + bt_bytes
    # safetensors allows no holes: padding is a tensor too, before vectors and at the end of a block.
    for part, span in zip(entry.parts, spans, strict=True):
        for vector, at, pad in (("bias", span.bias, "pad"), ("colscale", span.colscale, "colscale.pad")):
            if at >= 0:
                if end < at:
                    add(f"{part.name}.{pad}", end, "U8", (at - end,), at - end)
                add(f"{part.name}.{vector}", at, "F32", (part.out_dim,), part.out_dim * VECTOR_BYTES)
                end = at + part.out_dim * VECTOR_BYTES
    if end < block_bytes:
        add("pad", end, "U8", (block_bytes - end,), block_bytes - end)
    return table


def _moe_tensor(entry: SiteEntry) -> dict[str, Any]:
    end = entry.offset + entry.num_bytes
    return {
        f"{entry.layer}.{entry.site.label}": {
            "dtype": "U8",
            "shape": (entry.num_bytes,),
            "data_offsets": (entry.offset, end),
        }
    }


@dataclass(frozen=True, slots=True)
class PackedHeader:
    """What the head of a packed file says: the manifest, its digest, and where the data section starts."""

    manifest: Manifest
    digest: Digest
    data_start: int

    @staticmethod
    def num_bytes(first: bytes) -> int:
        """How many bytes from the start of the file `parse` needs, told from the first eight."""
        length = int.from_bytes(first[:LENGTH_BYTES], "little")
        if len(first) < LENGTH_BYTES or length > MAX_HEADER_BYTES:
            raise AdapterFailed(
                f"packed file: header length: found {first[:LENGTH_BYTES].hex() or 'nothing'}; "
                f"wanted 8 bytes, at most {MAX_HEADER_BYTES}"
            )
        return LENGTH_BYTES + length

    @classmethod
    def parse(cls, data: bytes) -> "PackedHeader":
        """Read a header from at least its `num_bytes` bytes. The caller compares `digest` with the one it wants."""
        needed = cls.num_bytes(data)
        if len(data) < needed:
            raise AdapterFailed(f"packed file: header: found {len(data)} bytes; wanted {needed}")
        try:
            table = msgspec.json.decode(data[LENGTH_BYTES:needed], type=_Table)
            text = table.metadata[_METADATA_KEY].encode()
            manifest = decode_manifest(text)
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
            raise AdapterFailed(f"packed file: header: found {error}; wanted an infinilora manifest") from error
        if manifest.pack_version not in READABLE_PACKS:
            wanted = " or ".join(map(str, sorted(READABLE_PACKS)))
            raise AdapterFailed(f"packed file: pack_version: found {manifest.pack_version}; wanted {wanted}")
        return cls(manifest=manifest, digest=digest_of(text), data_start=needed)

    @property
    def file_bytes(self) -> int:
        return self.data_start + self.manifest.data_bytes


class _Table(msgspec.Struct):
    """The one entry of a packed file's header that readers need."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__")


def read_header(file: BinaryIO) -> PackedHeader:
    """Read the header of a packed file that is open at its start."""
    first = file.read(LENGTH_BYTES)
    return PackedHeader.parse(first + file.read(PackedHeader.num_bytes(first) - LENGTH_BYTES))


def packed_ranges(header: PackedHeader, layer: int) -> list[tuple[SiteEntry, int, int]]:
    """(site, offset in the file, bytes) of each adapted site of a layer. Neighbours in the list are in the file."""
    return [
        (entry, header.data_start + entry.offset, entry.num_bytes)
        for entry in header.manifest.sites
        if entry.layer == layer
    ]


def verify(entry: SiteEntry, block: int, data: bytes | bytearray | memoryview) -> None:
    """Raise AdapterFailed unless `data` is what was written as this block (expert) of this site."""
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256[block]:
        raise AdapterFailed(
            f"packed file: layer {entry.layer} site {entry.site.label} block {block}: "
            f"found sha256 {found}; wanted {entry.sha256[block]}"
        )
