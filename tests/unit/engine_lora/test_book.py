from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinilora.engine.lora.book import LeaseBook
from infinilora.engine.lora.interface import Lease, LeaseStatus
from infinilora.protocol.errors import AdapterFailed, AdapterInvalid, AdapterNotFound, Overloaded
from infinilora.protocol.ids import Digest

D = Digest("sha256:d")
SITES = (3, 3, 3)


def lease(group: str = "g", slot: int = 0, generation: int = 1, digest: Digest = D) -> Lease:
    return Lease(digest, group, slot, generation, SITES)


def asked(book: LeaseBook, group: str = "g") -> None:
    assert book.want(D)
    book.ask(D, group)


def ready(book: LeaseBook, count: int, generation: int = 1, group: str = "g") -> None:
    book.layers_ready(group, D, slot=0, slot_generation=generation, count=count)


def test_a_lease_goes_from_waiting_to_resident_layer_by_layer() -> None:
    book = LeaseBook()
    asked(book)
    seen = [book.view(D)]
    book.grant(lease())
    seen.append(book.view(D))
    for count in (1, 2, 3):
        ready(book, count)
        seen.append(book.view(D))
    assert [v.status for v in seen] == [
        LeaseStatus.WAITING,
        LeaseStatus.WAITING,
        LeaseStatus.ADMISSIBLE,
        LeaseStatus.ADMISSIBLE,
        LeaseStatus.RESIDENT,
    ]
    assert [v.lease for v in seen] == [None, *[lease()] * 4]


def test_news_of_an_older_tenancy_changes_nothing() -> None:
    book = LeaseBook()
    asked(book)
    book.grant(lease(generation=2))
    ready(book, 3, generation=1)
    assert book.view(D).status is LeaseStatus.WAITING


def test_news_of_a_group_that_was_not_asked_changes_nothing() -> None:
    book = LeaseBook()
    asked(book, "g")
    book.grant(lease("other"))
    book.refuse("other", D, AdapterFailed("no"), is_final=True)
    assert book.view(D).status is LeaseStatus.WAITING
    assert book.view(D).lease is None


def test_dropped_and_wanted_in_one_breath_keeps_the_lease() -> None:
    book = LeaseBook()
    asked(book)
    book.grant(lease())
    ready(book, 3)
    assert book.drop(D)
    assert not book.want(D), "nobody has to be asked again"
    assert book.view(D).status is LeaseStatus.RESIDENT
    assert book.take_unwanted() == []


def test_the_last_drop_tells_the_group_once() -> None:
    book = LeaseBook()
    asked(book)
    book.want(D)
    assert not book.drop(D)
    assert book.drop(D)
    assert book.take_unwanted() == [(D, "g")]
    assert book.take_unwanted() == []
    assert book.view(D).lease is None


def test_leases_die_with_their_group_and_are_asked_for_again() -> None:
    book = LeaseBook()
    asked(book)
    book.grant(lease())
    ready(book, 3)
    book.group_lost("other")
    assert book.view(D).status is LeaseStatus.RESIDENT
    book.group_lost("g")
    assert book.view(D).status is LeaseStatus.WAITING
    assert book.view(D).lease is None
    assert book.unasked() == [(D, frozenset())]


def test_a_refusal_is_tried_elsewhere_until_it_is_final() -> None:
    book = LeaseBook()
    asked(book)
    book.refuse("g", D, AdapterFailed("broken disk"), is_final=False)
    assert book.unasked() == [(D, frozenset({"g"}))]
    book.ask(D, "h")
    book.refuse("h", D, AdapterInvalid("bad tensor"), is_final=True)
    view = book.view(D)
    assert view.status is LeaseStatus.FAILED
    assert isinstance(view.error, AdapterInvalid)
    assert book.unasked() == []


def test_a_failed_adapter_is_asked_for_anew_by_the_next_that_wants_it() -> None:
    book = LeaseBook()
    asked(book)
    book.refuse("g", D, AdapterNotFound("gone"), is_final=True)
    book.drop(D)
    assert book.want(D)
    assert book.unasked() == [(D, frozenset())]


def test_a_group_that_comes_back_may_be_asked_again() -> None:
    book = LeaseBook()
    asked(book)
    book.refuse("g", D, AdapterFailed("no"), is_final=False)
    book.group_lost("g")
    assert book.refused_by(D) == frozenset()


def test_who_refused_for_the_moment_is_asked_again_once_the_other_group_is_lost() -> None:
    book = LeaseBook()
    asked(book, "g")
    book.refuse("g", D, Overloaded("full"), is_final=False)
    book.ask(D, "h")
    book.group_lost("h")
    assert book.unasked() == [(D, frozenset())]


class Books(RuleBasedStateMachine):
    """Against a model of who holds what, whatever order the two threads' calls come in."""

    digests = st.sampled_from([Digest("a"), Digest("b")])
    groups = st.sampled_from(["g", "h"])

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook()
        self.holders = {Digest("a"): 0, Digest("b"): 0}
        self.generation = 0

    @rule(digest=digests)
    def want(self, digest: Digest) -> None:
        self.book.want(digest)
        self.holders[digest] += 1

    @precondition(lambda self: any(self.holders.values()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from([d for d, n in self.holders.items() if n]))
        self.holders[digest] -= 1
        assert self.book.drop(digest) == (self.holders[digest] == 0)

    @rule(group=groups)
    def reconcile(self, group: str) -> None:
        self.book.take_unwanted()
        for digest, refused_by in self.book.unasked():
            if group not in refused_by:
                self.book.ask(digest, group)

    @rule(digest=digests, group=groups, count=st.integers(0, 3))
    def news(self, digest: Digest, group: str, count: int) -> None:
        self.generation += 1
        self.book.grant(lease(group, 0, self.generation, digest))
        self.book.layers_ready(group, digest, slot=0, slot_generation=self.generation, count=count)

    @rule(digest=digests, group=groups, is_final=st.booleans())
    def refuse(self, digest: Digest, group: str, is_final: bool) -> None:
        self.book.refuse(group, digest, AdapterFailed("no"), is_final=is_final)

    @rule(group=groups)
    def lose(self, group: str) -> None:
        self.book.group_lost(group)
        for digest in self.holders:
            held = self.book.view(digest).lease
            assert held is None or held.group != group, "no lease outlives its group's link"

    @invariant()
    def views_say_what_their_status_means(self) -> None:
        assert self.book.num_holders() == sum(self.holders.values())
        for digest in self.holders:
            view = self.book.view(digest)
            if view.status in (LeaseStatus.ADMISSIBLE, LeaseStatus.RESIDENT):
                assert view.lease is not None
            assert (view.error is not None) == (view.status is LeaseStatus.FAILED)
            assert view.lease is None or view.lease.digest == digest


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=30)
