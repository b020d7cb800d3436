"""Pages with tables that are made of the code: between two marks, with words around them that are written by hand."""

from collections.abc import Mapping


def filled(text: str, tables: Mapping[str, str]) -> str:
    """The page with each table between `<!-- TITLE -->` and `<!-- end of TITLE -->`; ValueError without these."""
    for title, table in tables.items():
        begin, end = f"<!-- {title} -->\n", f"<!-- end of {title} -->\n"
        if begin not in text or end not in text:
            raise ValueError(f"the page has no {begin.strip()} and {end.strip()}")
        before, _, rest = text.partition(begin)
        text = before + begin + table + end + rest.partition(end)[2]
    return text
