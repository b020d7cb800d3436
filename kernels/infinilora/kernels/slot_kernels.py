"""The weights that a pool has resident, and the deltas of a batch over them.

    sites[slot][layer][site] -> descriptor (addresses, ranks, scales) -> the pool's memory

On a CPU the table is one array of addresses that the native library reads, so a call from Python is one call
of C, whatever the number of adapters. Knows no adapter and no lease: who binds a slot answers for it.
"""

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infinilora.kernels import cpu_ops, native, reference
from infinilora.kernels.abi import WHOLE, Launch, SiteDescriptor, describe
from infinilora.kernels.batch import EMBED, MOE_DOWN, MOE_GATE_UP, NUM_SITES, SiteWeights, check_parts
from infinilora.kernels.step import NativeStep

if TYPE_CHECKING:
    from infinilora.kernels.device_sites import DeviceSites

_BAD_SEGMENT = 1


class SlotKernels:
    """One for a pool. A site is bound whole, in one store: a call sees it bound or not, never half.

    Thread-safe as the pool uses it: calls may run beside `bind` and beside one another; `clear` needs that no
    call with a segment of that slot is running.
    """

    def __init__(
        self, *, num_slots: int, num_layers: int, device: torch.device | str = "cpu", threads: int = 1
    ) -> None:
        """`num_layers` counts the layer of lm_head too. `threads` sets the width of the process's native pool."""
        if num_slots < 1 or num_layers < 1:
            raise ValueError(f"at least one slot and one layer are needed; found {num_slots} and {num_layers}")
        self.num_slots = num_slots
        self.num_layers = num_layers
        self.device = torch.empty(0, device=device).device  # "cuda" is a wish; tensors are on "cuda:0"
        self._library = native.load() if self.device.type == "cpu" else None
        if self._library is not None:
            cpu_ops.set_threads(threads)
        self._bound: list[dict[int, SiteWeights]] = [{} for _ in range(num_layers * NUM_SITES)]
        self._biased: dict[int, dict[int, SiteWeights]] = {}
        """place -> slot -> parts, of the sites that have a bias: a GPU's kernels leave it to `_add_biases`."""
        self._descriptors: dict[tuple[int, int], SiteDescriptor] = {}
        self._slot_stride = num_layers * NUM_SITES
        self._table = (ctypes.c_uint64 * (num_slots * self._slot_stride))()
        self._table_address = ctypes.addressof(self._table)
        self._left_to_python = bytearray(self._slot_stride)
        """place -> 1 where `leave_to_python` said so."""
        self._device_sites = _device_sites(num_slots, num_layers, self.device)

    def native_step(self) -> NativeStep | None:
        """Room for the plans of one link; None where there is no native library to compute by them."""
        if self._library is None:
            return None
        return NativeStep(self._library, self._table, self._left_to_python, self.num_slots)

    def leave_to_python(self, layer: int, site: int) -> None:
        """Native steps decline calls of this site: whoever serves a link has something to say about them."""
        self._left_to_python[self._place(layer, site)] = 1

    def bind(self, slot: int, layer: int, site: int, parts: SiteWeights, in_dim: int, out_dim: int) -> None:
        """From now on rows of `slot` get these parts' delta at (layer, site). Keeps the tensors until `clear`."""
        place = self._place(layer, site)
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} is not one of {self.num_slots}")
        check_parts(parts, in_dim=in_dim, out_dim=out_dim)
        if (parts[0].num_experts > 0) != (site in (MOE_GATE_UP, MOE_DOWN)):
            raise ValueError(f"site {site} with parts of {parts[0].num_experts} experts")
        if parts[0].a.device != self.device:
            raise ValueError(f"parts are on {parts[0].a.device}; this pool computes on {self.device}")
        descriptor = describe(parts, in_dim=in_dim, out_dim=out_dim)
        if self._device_sites is not None:
            self._device_sites.bind(slot, layer, site, parts, in_dim, out_dim)
            if any(part.bias is not None for part in parts):
                self._biased.setdefault(place, {})[slot] = parts
        self._bound[place][slot] = parts
        self._descriptors[slot, place] = descriptor
        self._table[slot * self._slot_stride + place] = ctypes.addressof(descriptor)

    def clear(self, slot: int) -> None:
        """Forget all of the slot's sites and let their tensors go."""
        start = slot * self._slot_stride
        if self._device_sites is not None:
            self._device_sites.clear(slot)
        for place, bound in enumerate(self._bound):
            if bound.pop(slot, None) is not None:
                self._table[start + place] = 0
                del self._descriptors[slot, place]
        for slots in list(self._biased.values()):
            slots.pop(slot, None)

    def dense(self, layer: int, site: int, segments: Tensor, x: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """out[t] (+)= delta of x[t] at (layer, site) under the slot of t's segment.

        segments int32 [n, 3] (row_start, rows, slot), in order of rows; x [T, in]; out [T, out_dim] fp32 or x's
        dtype. Rows of both may be strided. Rows in no segment and slots not bound here get nothing (zeros unless
        `accumulate`).
        """
        place = self._place(layer, site)
        if self._device_sites is not None:
            self._device_sites.dense(layer, site, segments, x, out, accumulate=accumulate)
            self._add_biases(place, segments, out)
            return
        library = self._library
        if library is None:
            reference.dense(self._bound[place], segments, x, out, accumulate=accumulate)
            return
        self._native_dense(library, place, segments, x, out, accumulate=accumulate, first=WHOLE)

    def dense_columns(
        self,
        layer: int,
        site: int,
        segments: Tensor,
        x: Tensor,
        out: Tensor,
        *,
        first: int,
        first_in: int | None = None,
        accumulate: bool = False,
    ) -> None:
        """out[t, j] (+)= column `first + j` of the site's delta: of a row too wide to be sent, or what a shard has.

        x [T, in], or with `first_in` those of its columns that begin there, for their part of the sum; out [T,
        columns]. Reads only those columns of A and Bt. Plain torch on a GPU.
        """
        place = self._place(layer, site)
        if min(first, first_in or 0) < 0:
            raise ValueError(f"a slice of columns from {min(first, first_in or 0)} on")
        if self._library is not None:
            args = self._library, place, segments, x, out
            self._native_dense(*args, accumulate=accumulate, first=first, first_in=first_in)
            return
        end, width = first + out.shape[1], x.shape[1]
        begin_in, end_in = first_in or 0, (first_in or 0) + width
        bound = self._bound_in(
            place,
            segments,
            lambda site: (
                first < end <= site.out_dim
                and (width == site.in_dim if first_in is None else 0 <= begin_in < end_in <= site.in_dim)
            ),
            found=f"{width if first_in is None else f'columns {begin_in}..{end_in}'} -> columns {first}..{end}",
        )
        reference.dense_columns(bound, segments, x, out, first=first, first_in=first_in, accumulate=accumulate)

    def embed(self, layer: int, segments: Tensor, ids: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """out[t] (+)= the delta of token ids[t] under the slot of t's segment: a column of A, expanded.

        ids int32 [T]; out [T, h]. Plain torch on a GPU.
        """
        place, width = self._place(layer, EMBED), out.shape[1]
        if self._library is not None:
            ids, wide = ids.to(torch.int32).contiguous(), _fp32_out(out)
            launch = self._launch(place, segments, len(ids), 1, 0, out, accumulate=accumulate)
            status = self._library.il_lora_embed(ctypes.byref(launch), ids.data_ptr(), wide.data_ptr(), wide.stride(0))
            self._finish(status, place, segments, launch, wide, out, found=_token_range(ids, width) if status else "")
            return
        low, high = _least_and_most(ids)
        bound = self._bound_in(
            place,
            segments,
            lambda site: site.out_dim == width and low >= 0 and high < site.in_dim,
            found=_token_range(ids, width),
        )
        reference.embed(bound, segments, ids, out, accumulate=accumulate)

    def moe_gate_up(
        self, layer: int, segments: Tensor, x: Tensor, topk_ids: Tensor, out: Tensor, *, accumulate: bool
    ) -> None:
        """out[t, j] (+)= delta of x[t] through expert topk_ids[t, j] of the slot of t's segment.

        x [T, h]; topk_ids int32 [T, k]; out [T, k, 2f]. An id that the adapter has no expert for adds nothing.
        """
        place = self._place(layer, MOE_GATE_UP)
        if self._device_sites is not None:
            self._device_sites.moe_gate_up(layer, segments, x, topk_ids, out, accumulate=accumulate)
            return
        library = self._library
        if library is None:
            reference.moe_gate_up(self._bound[place], segments, x, topk_ids, out, accumulate=accumulate)
            return
        x, wide, ids = _fp32_rows(x), _fp32_out(out), _ids(topk_ids, x.shape[0])
        launch = self._launch(place, segments, x.shape[0], ids.shape[1], x.shape[1], out, accumulate=accumulate)
        status = library.il_lora_moe_gate_up(
            ctypes.byref(launch), x.data_ptr(), x.stride(0), ids.data_ptr(), wide.data_ptr(), wide.stride(0)
        )
        self._finish(status, place, segments, launch, wide, out)

    def moe_down(
        self,
        layer: int,
        segments: Tensor,
        act: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor,
        *,
        accumulate: bool,
    ) -> None:
        """out[t] (+)= sum over j of topk_weights[t, j] * delta of act[t, j] through expert topk_ids[t, j].

        act [T, k, f]; topk_ids int32 and topk_weights fp32 [T, k]; out [T, h].
        """
        place = self._place(layer, MOE_DOWN)
        if self._device_sites is not None:
            self._device_sites.moe_down(layer, segments, act, topk_ids, topk_weights, out, accumulate=accumulate)
            return
        library = self._library
        if library is None:
            reference.moe_down(self._bound[place], segments, act, topk_ids, topk_weights, out, accumulate=accumulate)
            return
        act, wide, ids = _fp32_rows(act), _fp32_out(out), _ids(topk_ids, act.shape[0])
        weights = topk_weights.float().contiguous()
        if weights.shape != ids.shape or act.shape[1] != ids.shape[1]:
            raise ValueError(f"act {list(act.shape)}, ids {list(ids.shape)}, weights {list(weights.shape)} disagree")
        launch = self._launch(place, segments, act.shape[0], ids.shape[1], act.shape[2], out, accumulate=accumulate)
        status = library.il_lora_moe_down(
            ctypes.byref(launch),
            act.data_ptr(),
            act.stride(0),
            ids.data_ptr(),
            weights.data_ptr(),
            wide.data_ptr(),
            wide.stride(0),
        )
        self._finish(status, place, segments, launch, wide, out)

    def _native_dense(
        self,
        library: ctypes.CDLL,
        place: int,
        segments: Tensor,
        x: Tensor,
        out: Tensor,
        *,
        accumulate: bool,
        first: int,
        first_in: int | None = None,
    ) -> None:
        x, wide = _fp32_rows(x), _fp32_out(out)
        launch = self._launch(place, segments, x.shape[0], 1, x.shape[1], out, accumulate=accumulate, first=first)
        launch.first_input = WHOLE if first_in is None else first_in
        status = library.il_lora_dense(ctypes.byref(launch), x.data_ptr(), x.stride(0), wide.data_ptr(), wide.stride(0))
        self._finish(status, place, segments, launch, wide, out)

    def _add_biases(self, place: int, segments: Tensor, out: Tensor) -> None:
        if biased := self._biased.get(place):
            reference.add_biases(biased, segments, out)

    def _bound_in(
        self, place: int, segments: Tensor, fits: Callable[[SiteDescriptor], bool], *, found: str
    ) -> dict[int, SiteWeights]:
        """The parts that these segments use at a place. ValueError where the call does not fit one."""
        bound = {}
        for slot in set(segments[:, 2].tolist()):
            if parts := self._bound[place].get(slot):
                site = self._descriptors[slot, place]
                if not fits(site):
                    raise ValueError(f"slot {slot}: found {found}; the site is {site.in_dim} -> {site.out_dim}")
                bound[slot] = parts
        return bound

    def _place(self, layer: int, site: int) -> int:
        if not (0 <= layer < self.num_layers and 0 <= site < NUM_SITES):
            raise ValueError(f"layer {layer}, site {site}: there are {self.num_layers} layers, {NUM_SITES} sites")
        return layer * NUM_SITES + site

    def _launch(
        self,
        place: int,
        segments: Tensor,
        rows: int,
        topk: int,
        in_dim: int,
        out: Tensor,
        *,
        accumulate: bool,
        first: int = WHOLE,
    ) -> Launch:
        if segments.dtype is not torch.int32 or not segments.is_contiguous() or segments.numel() % 3:
            raise ValueError(f"segments are contiguous int32 [n, 3]; found {segments.dtype} {list(segments.shape)}")
        if out.shape[0] != rows:
            raise ValueError(f"out has {out.shape[0]} rows; wanted {rows}")
        return Launch(
            self._table_address + 8 * place,
            self._slot_stride,
            segments.data_ptr(),
            segments.numel() // 3,
            self.num_slots,
            rows,
            topk,
            in_dim,
            out.shape[-1],
            accumulate,
            first,
            WHOLE,
        )

    def _finish(
        self, status: int, place: int, segments: Tensor, launch: Launch, wide: Tensor, out: Tensor, *, found: str = ""
    ) -> None:
        """Bring the result to where it was wanted; or say what is wrong with the launch, which came with `found`."""
        if status:
            number, what = divmod(status, 4)
            segment = tuple(segments.view(-1, 3)[number].tolist())
            if what == _BAD_SEGMENT:
                raise ValueError(
                    f"segment {number} {segment} overlaps, or lies outside of {launch.rows} rows and the slots"
                )
            site = self._descriptors[segment[2], place]
            raise ValueError(
                f"slot {segment[2]}: found {found or _columns(launch)}; the site is {site.in_dim} -> {site.out_dim}"
            )
        if wide is not out:
            out.copy_(wide)


def _device_sites(num_slots: int, num_layers: int, device: torch.device) -> "DeviceSites | None":
    """The Triton half, for a GPU. Imported only there: a CPU needs no Triton."""
    if device.type != "cuda":
        return None
    from infinilora.kernels.device_sites import DeviceSites

    return DeviceSites(num_slots=num_slots, num_layers=num_layers, device=device)


def _columns(launch: Launch) -> str:
    inputs, outputs = launch.first_input, launch.first_column
    taken = str(launch.in_dim) if inputs == WHOLE else _run(inputs, launch.in_dim)
    wanted = f"{launch.out_dim} columns" if outputs == WHOLE else _run(outputs, launch.out_dim)
    return f"{taken} -> {wanted}"


def _run(first: int, count: int) -> str:
    return f"columns {first}..{first + count}"


def _least_and_most(ids: Tensor) -> tuple[int, int]:
    return (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)


def _token_range(ids: Tensor, width: int) -> str:
    low, high = _least_and_most(ids)
    return f"token ids {low}..{high} -> {width}"


def _fp32_rows(x: Tensor) -> Tensor:
    """Return x as fp32, contiguous within its rows; x itself where it is so."""
    if x.dtype is not torch.float32:
        x = x.float()
    return x if _is_contiguous_in_rows(x) else x.contiguous()


def _fp32_out(out: Tensor) -> Tensor:
    """Where to write: out itself, or an fp32 copy of it."""
    if out.dtype is torch.float32 and _is_contiguous_in_rows(out):
        return out
    return out.float().contiguous()


def _is_contiguous_in_rows(x: Tensor) -> bool:
    return x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])


def _ids(topk_ids: Tensor, rows: int) -> Tensor:
    if topk_ids.dim() != 2 or topk_ids.shape[0] != rows:
        raise ValueError(f"topk_ids is [{rows}, k]; found {list(topk_ids.shape)}")
    return topk_ids.to(torch.int32).contiguous()
