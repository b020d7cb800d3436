"""What the pages say of files, settings and metrics is so."""

import re
from pathlib import Path

import pytest

from infinilora.runtime.settings import Common, misspelt
from support import metrics_page
from support.settings_page import PAGE, TABLES, own_fields, page, variable

REPO = Path(__file__).parents[2]
PAGES = [REPO / "README.md", REPO / "examples" / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
SOURCES = [p for room in ("libs", "kernels", "services", "tools") for p in (REPO / room).rglob("*.py")]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_SETTING = re.compile(r"INFINILORA_[A-Z0-9_]*[A-Z0-9]")


def settings_of(text: str) -> set[str]:
    return set(_SETTING.findall(text))


@pytest.mark.parametrize("service", TABLES)
def test_every_setting_says_what_it_is(service: str) -> None:
    assert [name for name, _, words in own_fields(TABLES[service]) if not words] == []


def test_the_page_of_settings_has_them_as_they_are_in_the_code() -> None:
    text = PAGE.read_text()
    assert text == page(text), "run `make docs`"


def test_the_page_of_settings_has_every_variable_that_code_reads() -> None:
    """Besides those of the services: the native library's, and defaults of the command's options."""
    read = set.union(*(settings_of(path.read_text()) for path in SOURCES))
    assert read <= settings_of(PAGE.read_text())


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(REPO)))
def test_no_page_names_a_setting_that_is_not_there(path: Path) -> None:
    fields = {variable(name) for settings in TABLES.values() for name in settings.model_fields}
    in_code = set.union(*(settings_of(source.read_text()) for source in SOURCES))
    assert settings_of(path.read_text()) <= fields | in_code


def test_the_page_of_metrics_has_them_as_they_are_in_the_code() -> None:
    text = metrics_page.PAGE.read_text()
    assert text == metrics_page.page(text), "run `make docs`"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(REPO)))
def test_no_page_names_a_metric_that_is_not_there(path: Path) -> None:
    named = set(re.findall(r"`[^`]*?((?:infinilora|gen_ai)_[a-z_]*[a-z])", path.read_text()))
    known = {one.name for group in metrics_page.GROUPS.values() for one in metrics_page.shown(group)}
    assert named <= known


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(REPO)))
def test_every_link_within_the_repository_leads_somewhere(path: Path) -> None:
    for link in _LINK.findall(path.read_text()):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in {slug(heading) for heading in _HEADING.findall(target.read_text())}, link


def test_no_setting_of_one_service_passes_for_a_misspelt_one_of_another() -> None:
    """But the two that are mistaken for one another: the keys that are asked for, and the key that is shown."""
    everything = set.union(*(settings_of(source.read_text()) for source in SOURCES))
    everything |= {variable(name) for settings in TABLES.values() for name in settings.model_fields}
    told = set.union(*(set(misspelt(settings, everything)) for settings in TABLES.values() if settings is not Common))
    assert told == {"INFINILORA_API_KEY", "INFINILORA_ADMIN_KEY"}


def slug(heading: str) -> str:
    """The anchor that forges make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
