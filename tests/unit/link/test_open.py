import importlib.util
import os
import resource
import socket
from pathlib import Path

import pytest
import torch

from infinilora.link import tcp
from infinilora.link.errors import LinkClosed, LinkTimeout
from infinilora.link.listener import TcpListener
from infinilora.link.open import LinkSettings, Offers, Opener, Opening, attach, checked, fabric_of
from infinilora.protocol.errors import InvalidRequest
from support.ipv6 import needs_ipv6
from support.links import Answering, random_rows, rule
from support.procs import wait_until
from support.waiting import eventually


def _settings(directory: Path | None, **changes: object) -> LinkSettings:
    return LinkSettings(directory=directory, num_buffers=4, buffer_bytes=8192, **changes)  # type: ignore[arg-type]


def _works(opening: Opening, engine: LinkSettings) -> None:
    end = attach(opening.chosen, opening.secret, engine)
    serving = Answering(opening.wait(5))
    x, out = random_rows(3, 8), torch.zeros(3, 8)
    end.send_plan(1, [])
    end.wait(end.submit(1, 0, 0, x, 8), out, deadline_s=10, add=True)
    torch.testing.assert_close(out, rule(0, 0, x, 8, None, None))
    end.close()
    serving.join()


def test_a_shared_directory_is_proved_and_then_left_empty(tmp_path: Path) -> None:
    offers, opener = Offers(_settings(tmp_path)), Opener(_settings(tmp_path))
    assert [o["backend"] for o in offers.wire] == ["shm", "tcp"]
    opening = opener.choose(offers.wire)
    offers.close()
    assert opening.chosen["backend"] == "shm"
    _works(opening, _settings(tmp_path))
    assert not list(tmp_path.iterdir())


def test_another_directory_of_the_same_kind_means_tcp(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    offers, opener = Offers(_settings(tmp_path / "a")), Opener(_settings(tmp_path / "b"))
    opening = opener.choose(offers.wire)
    offers.close()
    assert opening.chosen["backend"] == "tcp"
    _works(opening, _settings(tmp_path / "a"))
    opener.close()


def test_a_nonce_of_other_content_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    offers = Offers(_settings(tmp_path / "a"))
    (tmp_path / "b" / offers.wire[0]["nonce"]).write_bytes(b"something else")
    opener = Opener(_settings(tmp_path / "b"))
    assert opener.choose(offers.wire).chosen["backend"] == "tcp"
    opener.close()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", "ring", "nonce-" + "0" * 31 + "/"])
def test_a_name_that_is_not_a_nonces_is_never_opened(name: str, tmp_path: Path) -> None:
    opener = Opener(_settings(tmp_path, tcp_host=None))
    with pytest.raises(InvalidRequest, match="none of the offered links"):
        opener.choose([{"backend": "shm", "nonce": name, "sha256": "0"}])


@pytest.mark.parametrize("name", ["../ring", "nonce", "", "ring-zz"])
def test_an_engine_opens_only_a_ring_file_of_its_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="link file"):
        attach({"backend": "shm", "file": name}, bytes(32), _settings(tmp_path))


def test_a_server_says_that_it_takes_runs_of_columns_and_an_older_one_does_not(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    offers, opener = Offers(settings), Opener(settings)
    for forgets, takes_runs in ((), True), (("runs",), False):
        opening = opener.choose(offers.wire)
        said = {key: value for key, value in opening.chosen.items() if key not in forgets}
        end = attach(said, opening.secret, settings)
        assert end.takes_runs is takes_runs
        end.close()
    offers.close()
    opener.close()


def test_a_full_directory_falls_back_to_tcp(tmp_path: Path) -> None:
    engine = _settings(tmp_path)
    huge = LinkSettings(directory=tmp_path, num_buffers=1 << 20, buffer_bytes=1 << 36)
    offers, opener = Offers(engine), Opener(huge)
    assert opener.choose(offers.wire).chosen["backend"] == "tcp"
    offers.close()
    assert not list(tmp_path.iterdir())
    opener.close()


def test_a_cancelled_opening_leaves_no_file_and_no_secret(tmp_path: Path) -> None:
    offers, opener = Offers(_settings(tmp_path)), Opener(_settings(tmp_path))
    opener.choose(offers.wire).cancel()
    assert [p.name for p in tmp_path.iterdir()] == [offers.wire[0]["nonce"]]
    opening = opener.choose([{"backend": "tcp"}])
    opening.cancel()
    end = attach(opening.chosen, opening.secret, _settings(None))
    with pytest.raises(LinkClosed):
        end.wait(end.submit(1, 0, 0, random_rows(1, 1), 1), torch.zeros(1, 1), deadline_s=5, add=True)
    opener.close()
    offers.close()


def test_a_stranger_without_the_secret_gets_no_link() -> None:
    listener = TcpListener("127.0.0.1", 0, opening_timeout_s=0.2)
    listener.expect(b"a" * 32)
    with (
        socket.create_connection((listener.host, listener.port)) as silent,
        socket.create_connection((listener.host, listener.port)) as stranger,
    ):
        stranger.sendall(b"b" * 32)
        stranger.settimeout(5)
        silent.settimeout(5)
        assert stranger.recv(1) == b""
        assert silent.recv(1) == b"", "a connection that says nothing is closed too"
    with pytest.raises(LinkTimeout):
        listener.take(b"a" * 32, 0.05)
    listener.close()


def test_a_secret_opens_one_link_only() -> None:
    listener = TcpListener("127.0.0.1", 0)
    listener.expect(b"a" * 32)
    first = tcp.connect(listener.host, listener.port, b"a" * 32, timeout_s=5)
    taken = listener.take(b"a" * 32, 5)
    second = tcp.connect(listener.host, listener.port, b"a" * 32, timeout_s=5)
    second.settimeout(5)
    assert second.recv(1) == b""
    for sock in (first, taken, second):
        sock.close()
    listener.close()


def test_a_connection_that_nobody_took_ends_with_the_listener() -> None:
    """An engine that found out that it cannot use the link was gone before the server came for it."""
    listener, secret = TcpListener("127.0.0.1", 0), b"a" * 32
    listener.expect(secret)
    with tcp.connect(listener.host, listener.port, secret, timeout_s=5) as engine:
        wait_until(lambda: listener._expected[secret] is not None, "the secret to be shown")
        listener.close()
        assert not engine.recv(1)


async def test_a_listener_outlives_a_lack_of_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    secret = b"a" * 32
    listener = TcpListener("127.0.0.1", 0)
    listener.expect(secret)
    client = socket.socket()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hoard: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 64, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            hoard.extend(iter(lambda: os.dup(client.fileno()), -1))
        client.connect((listener.host, listener.port))
        client.sendall(secret)
        await eventually(lambda: "link not accepted" in caplog.text, "the refusal is logged")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in hoard:
            os.close(descriptor)
    listener.take(secret, 5).close()
    client.close()
    listener.close()


def test_a_server_that_is_not_there_is_a_closed_link() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    chosen = {"backend": "tcp", "host": "127.0.0.1", "port": str(port), "num_buffers": "2", "buffer_bytes": "64"}
    with pytest.raises(LinkClosed, match="no LoRA server listens"):
        attach(chosen, bytes(32), _settings(None))


def test_files_that_a_kill_left_behind_are_swept_and_young_ones_are_not(tmp_path: Path) -> None:
    old, young, other = (tmp_path / name for name in ("ring-" + "0" * 32, "nonce-" + "1" * 32, "their-file"))
    for path in (old, young, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (1.0, 1.0))
    Opener(_settings(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted([young, other])


def test_rdma_is_offered_where_it_is_asked_for_and_its_library_is_there(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cpu")
    assert fabric_of(("shm", "tcp"), device) is None
    assert not caplog.records
    has_library = importlib.util.find_spec("nixl") is not None
    assert (fabric_of(("rdma", "tcp"), device) is not None) == has_library
    reasons = [getattr(record, "reason", "") for record in caplog.records]
    assert has_library or ["package nixl cannot be used" in reason for reason in reasons] == [True]


def test_why_an_offer_was_not_taken_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    opener = Opener(_settings(tmp_path))
    lost = {"backend": "shm", "nonce": "nonce-" + "0" * 32, "sha256": "0"}
    far = [{"backend": "cuda", "boot": "of another host"}, lost, {"backend": "rdma"}, {"backend": "new"}]
    assert opener.choose([*far, {"backend": "tcp"}]).chosen["backend"] == "tcp"
    said = {vars(record)["backend"]: vars(record)["reason"] for record in caplog.records}
    assert said == {
        "cuda": "no cuda link: this process lends no device memory, or binds no address for its headers",
        "shm": "no shm link: the engine's nonce is not in a directory of this process",
        "rdma": "no rdma link: this process has no fabric",
        "new": "this server knows no link 'new'",
    }
    opener.close()


def test_a_process_that_could_open_no_link_at_all_is_told_at_its_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"INFINILORA_LINK_BACKENDS names no link.*wanted one or more of tcp, shm"):
        checked(LinkSettings(directory=None, tcp_host=None))
    for works in (LinkSettings(directory=None), LinkSettings(directory=tmp_path, tcp_host=None)):
        assert checked(works) is works


def test_a_link_directory_that_is_not_there_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(InvalidRequest, match=f"INFINILORA_LINK_DIR is .*{name}; wanted a directory"):
            checked(_settings(tmp_path / name))


def test_an_address_that_cannot_be_bound_is_told_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match=f"bound to 127.0.0.1, port {port}: .*INFINILORA_LINK_PORT"):
            Opener(_settings(None, tcp_port=port))
    with pytest.raises(InvalidRequest, match=r"bound to 192\.0\.2\.1, .*INFINILORA_LINK_HOST"):
        Opener(_settings(None, tcp_host="192.0.2.1"))


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_server_with_an_ipv6_address_is_reached_there(host: str) -> None:
    settings = _settings(None, tcp_host=host, tcp_reach="::1")
    opener = Opener(settings)
    opening = opener.choose([{"backend": "tcp"}])
    assert opening.chosen["host"] == "::1"
    _works(opening, settings)
    opener.close()


def test_a_server_that_binds_everything_tells_what_others_are_told_of_it() -> None:
    told = {}
    for reach in ("lora-0.lora", ""):
        opener = Opener(_settings(None, tcp_host="0.0.0.0", tcp_reach=reach))
        opening = opener.choose([{"backend": "tcp"}])
        told[reach] = opening.chosen["host"]
        opening.cancel()
        opener.close()
    assert told == {"lora-0.lora": "lora-0.lora", "": socket.gethostname()}
    opener = Opener(_settings(None, tcp_reach="elsewhere"))
    opening = opener.choose([{"backend": "tcp"}])
    assert opening.chosen["host"] == "127.0.0.1", "an address that is bound is where it is"
    opening.cancel()
    opener.close()
