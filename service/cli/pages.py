"""Where the pages are that help texts name: in the tree, or in an installation beside the service."""

from pathlib import Path

_PLACES = tuple(folder / "docs" for folder in Path(__file__).resolve().parents[1:3])


def page(name: str) -> str:
    """The path of a page of docs/."""
    return str(next((place for place in _PLACES if place.is_dir()), Path("docs")) / name)
