"""Counts as a cluster's API is told them, over HTTP on loopback."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from infinilora.coordinator.kubernetes import Cluster, KubernetesScaler, parse_targets
from infinilora.coordinator.settings import Settings
from infinilora.protocol.errors import InfiniLoraError, Internal, InvalidRequest, Unavailable
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.protocol.scale import Desired
from support.kube_api import NAMESPACE, TOKEN, KubeApi, a_kube_api

TARGETS = parse_targets("engines=statefulsets/engines,groups=statefulsets/groups")


def desired(engines: int, groups: int, *, shards: int = 1, model: str = "m") -> Desired:
    base = Fingerprint(digest_of(b"base"))
    return Desired(base=base, model=model, epoch=1, engines=engines, groups=groups, group_shards=shards)


def leads() -> bool:
    """Nobody has led since."""
    return True


def scaler(api: KubeApi, tmp_path: Path, *, token: str = TOKEN, targets: str = "") -> KubernetesScaler:
    (tmp_path / "token").write_text(token + "\n")
    return KubernetesScaler(
        Cluster(api.url, NAMESPACE, tmp_path / "token", None), parse_targets(targets) if targets else TARGETS
    )


async def test_replicas_are_set_and_left_alone_once_they_are_so(tmp_path: Path) -> None:
    with a_kube_api(engines=1, groups=1) as api:
        one = scaler(api, tmp_path)
        await one.apply(desired(3, 1), leads)
        await one.apply(desired(3, 1), leads)
    assert api.replicas == {"statefulsets/engines": 3, "statefulsets/groups": 1}
    assert [method for method, _ in api.asked].count("PATCH") == 1


async def test_what_somebody_else_has_set_is_set_right(tmp_path: Path) -> None:
    with a_kube_api(engines=2, groups=1) as api:
        one = scaler(api, tmp_path)
        await one.apply(desired(2, 1), leads)
        api.replicas["statefulsets/engines"] = 7
        await one.apply(desired(2, 1), leads)
        assert api.replicas["statefulsets/engines"] == 2


async def test_what_another_leader_sets_in_between_is_not_overwritten(tmp_path: Path) -> None:
    """One that was stopped after it had read, and does not know yet that it leads no more."""
    with a_kube_api(engines=3, groups=1) as api:
        api.after_read = lambda: api.write("statefulsets/engines", 4)
        with pytest.raises(Unavailable, match="answers PATCH statefulsets/engines with 409"):
            await scaler(api, tmp_path).apply(desired(2, 1), leads)
        assert api.replicas["statefulsets/engines"] == 4


async def test_whoever_leads_no_more_writes_nothing(tmp_path: Path) -> None:
    with a_kube_api(engines=3, groups=1) as api:
        one = scaler(api, tmp_path)
        await one.apply(desired(3, 1), lambda: False)
        with pytest.raises(Unavailable, match="left to whoever leads now"):
            await one.apply(desired(2, 1), lambda: False)
        assert api.replicas["statefulsets/engines"] == 3


async def test_to_zero_and_back(tmp_path: Path) -> None:
    """The API leaves a count of 0 out of its answer."""
    with a_kube_api(engines=1, groups=0) as api:
        one = scaler(api, tmp_path)
        await one.apply(desired(0, 0), leads)
        assert api.replicas == {"statefulsets/engines": 0, "statefulsets/groups": 0}
        await one.apply(desired(1, 0), leads)
        assert api.replicas["statefulsets/engines"] == 1


async def test_a_group_is_as_many_replicas_as_it_has_shards(tmp_path: Path) -> None:
    with a_kube_api(engines=1, groups=4) as api:
        one = scaler(api, tmp_path)
        assert await one.present(desired(0, 0, shards=4)) == {"engines": 1, "groups": 1}
        await one.apply(desired(1, 2, shards=4), leads)
        assert api.replicas["statefulsets/groups"] == 8


SEVERAL = "model=a/b,engines=statefulsets/a-engine,groups=statefulsets/a-lora; model=c,engines=statefulsets/c-engine"


async def test_each_base_has_its_own_workloads(tmp_path: Path) -> None:
    with a_kube_api(**{"a-engine": 1, "a-lora": 1, "c-engine": 1}) as api:
        one = scaler(api, tmp_path, targets=SEVERAL)
        await one.apply(desired(3, 2, model="a/b"), leads)
        await one.apply(desired(4, 5, model="c"), leads)
        assert await one.present(desired(0, 0, model="c")) == {"engines": 4}
    assert list(api.replicas.values()) == [3, 2, 4]


async def test_a_base_without_workloads_is_left_alone(tmp_path: Path) -> None:
    with a_kube_api(**{"a-engine": 1, "a-lora": 1, "c-engine": 1}) as api:
        one = scaler(api, tmp_path, targets=SEVERAL)
        await one.apply(desired(5, 5, model="other"), leads)
        assert await one.present(desired(5, 5, model="other")) == {}
    assert not api.asked


async def test_a_token_that_was_changed_is_read_anew(tmp_path: Path) -> None:
    with a_kube_api(engines=1, groups=1) as api:
        one = scaler(api, tmp_path, token="old")
        with pytest.raises(Internal, match="refuses GET statefulsets/engines/scale with 401"):
            await one.apply(desired(2, 1), leads)
        (tmp_path / "token").write_text(TOKEN)
        await one.apply(desired(2, 1), leads)
        assert api.replicas["statefulsets/engines"] == 2


async def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with a_kube_api(engines=1) as api:
        one = scaler(api, tmp_path)
        with pytest.raises(Internal, match="groups/scale with 404"):
            await one.apply(desired(1, 1), leads)
        api.is_broken = True
        with pytest.raises(Unavailable, match="answers GET statefulsets/engines with 503"):
            await one.apply(desired(1, 1), leads)


async def test_a_cluster_that_is_away_is_said_to_be(tmp_path: Path) -> None:
    with a_kube_api(engines=1) as api:
        one = scaler(api, tmp_path)
    with pytest.raises(Unavailable, match="does not answer"):
        await one.apply(desired(1, 1), leads)


async def test_an_answer_that_is_no_scale_is_refused(tmp_path: Path) -> None:
    with a_kube_api(engines=1, groups=1) as api:
        api.replicas["statefulsets/engines"] = "many"  # type: ignore[assignment]
        with pytest.raises(InfiniLoraError, match="no Scale"):
            await scaler(api, tmp_path).apply(desired(1, 1), leads)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no scale target"),
        ("engines=engine", "wanted TIER=KIND/NAME"),
        ("engines=pods/engine", "statefulsets, deployments"),
        ("engines=statefulsets/a/b", "wanted TIER=KIND/NAME"),
        ("routers=deployments/a", "tier is 'routers'; wanted one of engines, groups"),
        ("model=a", "no scale target is named for model 'a'"),
        ("model=a,engines=statefulsets/a;model=a,groups=statefulsets/b", "two scale targets are of model 'a'"),
        ("engines=statefulsets/a;model=b,engines=statefulsets/b", "wanted model=NAME in each"),
    ],
)
def test_targets_that_cannot_be_read_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_targets(text)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"scaler": "kubernetes"}, "no scale target is named"),
        ({"scaler": "kubernetes", "kube_targets": "engines"}, "wanted TIER=KIND/NAME"),
        ({"min_engines": 3, "max_engines": 2}, "min_engines is 3 and max_engines is 2"),
        ({"min_groups": 9}, "min_groups is 9 and max_groups is 8"),
    ],
)
def test_settings_that_cannot_be_carried_out_are_refused_at_start(more: dict[str, object], words: str) -> None:
    where = {"nats_url": "nats://h:1", "redis_url": "redis://h:1", "store_url": "file:///s"}
    with pytest.raises(ValidationError, match=words):
        Settings.model_validate(where | more)
