"""What an engine keeps of column scales: by tenancy, complete before a layer counts, applied to the right rows."""

import pytest
import torch

from infinilora.engine.lora.book import LeaseBook
from infinilora.engine.lora.interface import AdapterRows, Lease, LeaseStatus
from infinilora.engine.lora.layout import Layout
from infinilora.engine.lora.scales import ColumnScales, column_scales, read_scale, scale_rows
from infinilora.pool.scales import SiteScale
from infinilora.protocol import lora_pb2
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import Internal
from infinilora.protocol.ids import Digest
from support.cards import make_card

D = Digest("sha256:d")
SITES = (1 << Site.QKV, 1 << Site.QKV | 1 << Site.O, 0)
CARD = make_card("llama")


def scale(layer: int, site: Site, value: float, columns: int = 4) -> SiteScale:
    return SiteScale(layer, site, torch.full((columns,), value))


def lease(scales: ColumnScales | None, slot: int = 0) -> Lease:
    return Lease(D, "g", slot, 1, SITES, scales)


def test_a_layer_is_known_with_all_its_scales() -> None:
    scales = ColumnScales(SITES)
    known = [scales.layers_known]
    for each in (scale(1, Site.O, 1.0), scale(0, Site.QKV, 1.0), scale(1, Site.QKV, 1.0)):
        scales.put(each)
        known.append(scales.layers_known)
    assert known == [0, 0, 1, 3]


def test_a_scale_where_the_lease_names_none_is_no_news_but_a_fault() -> None:
    with pytest.raises(Internal, match="o of layer 0"):
        ColumnScales(SITES).put(scale(0, Site.O, 1.0))
    with pytest.raises(Internal, match="scaled_sites"):
        column_scales((1, 0, 0), SITES)
    with pytest.raises(Internal, match="scaled_sites"):
        column_scales((1, 3), SITES)
    assert column_scales(SITES, ()) is None


def test_a_lease_counts_layers_only_with_their_scales() -> None:
    book = LeaseBook()
    book.want(D)
    book.ask(D, "g")
    book.grant(lease(ColumnScales(SITES)))

    def told(count: int) -> LeaseStatus:
        book.layers_ready("g", D, slot=0, slot_generation=1, count=count)
        return book.view(D).status

    def put(each: SiteScale, generation: int = 1) -> None:
        book.put_scale("g", D, each, slot=0, slot_generation=generation)

    assert told(3) is LeaseStatus.WAITING
    put(scale(0, Site.QKV, 1.0), generation=2)
    assert told(3) is LeaseStatus.WAITING, "a scale of another tenancy is none of this"
    put(scale(0, Site.QKV, 1.0))
    assert told(3) is LeaseStatus.ADMISSIBLE
    put(scale(1, Site.QKV, 1.0))
    put(scale(1, Site.O, 1.0))
    assert told(2) is LeaseStatus.ADMISSIBLE
    assert told(3) is LeaseStatus.RESIDENT


def test_a_scale_for_a_lease_that_names_none_is_a_fault() -> None:
    book = LeaseBook()
    book.want(D)
    book.ask(D, "g")
    book.put_scale("g", D, scale(0, Site.QKV, 1.0), slot=0, slot_generation=1)  # before any grant: old news
    book.grant(lease(None))
    with pytest.raises(Internal, match="names none"):
        book.put_scale("g", D, scale(0, Site.QKV, 1.0), slot=0, slot_generation=1)


def test_leases_of_one_tenancy_are_equal_only_with_the_same_scales() -> None:
    """A layout is kept for as long as its leases are equal; its scales must be those of the lease."""
    first = ColumnScales(SITES)
    assert lease(first) == lease(first)
    assert lease(first) != lease(ColumnScales(SITES))
    assert lease(None) == lease(None)


def test_rows_are_scaled_by_their_own_adapter_and_others_not_at_all() -> None:
    twos, threes = ColumnScales(SITES), ColumnScales(SITES)
    for scales, value in ((twos, 2.0), (threes, 3.0)):
        scales.put(scale(1, Site.O, value))
    rows = (AdapterRows(0, 2, lease(twos)), AdapterRows(2, 1, lease(None, 1)), AdapterRows(3, 2, lease(threes, 2)))
    layout = Layout(rows)
    y = torch.ones(6, 4)
    scale_rows(layout.scaled(1, Site.O), 1, Site.O, y)
    assert y[:, 0].tolist() == [2.0, 2.0, 1.0, 3.0, 3.0, 1.0]
    assert layout.scaled(0, Site.O) == ()
    assert Layout(rows[1:2]).scaled(1, Site.O) == ()


def test_each_column_has_its_own_factor_in_any_dtype() -> None:
    scales = ColumnScales(SITES)
    scales.put(SiteScale(1, Site.O, torch.tensor([0.5, -1.0, 0.0, 3.0])))
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        y = torch.full((2, 4), 2.0, dtype=kind)
        scale_rows(Layout((AdapterRows(0, 1, lease(scales)),)).scaled(1, Site.O), 1, Site.O, y)
        assert y.tolist() == [[1.0, -2.0, 0.0, 6.0], [2.0] * 4]


def test_a_scale_that_is_not_there_or_does_not_fit_is_never_left_out() -> None:
    scales = ColumnScales(SITES)
    scaled = Layout((AdapterRows(0, 1, lease(scales)),)).scaled(1, Site.O)
    with pytest.raises(Internal, match="found none"):
        scale_rows(scaled, 1, Site.O, torch.ones(1, 4))
    scales.put(scale(1, Site.O, 2.0, columns=3))
    with pytest.raises(Internal, match=r"found \[3\]; wanted \[4\]"):
        scale_rows(scaled, 1, Site.O, torch.ones(1, 4))


def test_a_scale_on_the_wire_is_held_against_the_base() -> None:
    def news(**changes: object) -> lora_pb2.ColumnScale:
        plain = {"layer": 1, "site": Site.O, "factors": torch.arange(32.0).numpy().tobytes()} | changes
        return lora_pb2.ColumnScale(digest=D, slot=0, slot_generation=1, **plain)  # type: ignore[arg-type]

    read = read_scale(news(), CARD.geometry())
    assert (read.layer, read.site, read.factors.tolist()) == (1, Site.O, list(range(32)))
    for wrong in ({"factors": bytes(4 * 31)}, {"layer": 9}, {"site": 99}):
        with pytest.raises(Internal, match="column scale of site"):
            read_scale(news(**wrong), CARD.geometry())
