"""The built console as it is served: every file in memory, with its compressed form and its tag.

Only files that were there when they were read are served, so that no address leads anywhere else.
"""

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

FILES_MAX = 500
BYTES_MAX = 32 * 1024 * 1024
_COMPRESSED = ("text/", "application/json", "image/svg", "application/manifest")
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".json": "application/json",
          ".html": "text/html; charset=utf-8", ".webmanifest": "application/manifest+json", ".woff2": "font/woff2",
          ".png": "image/png", ".ico": "image/x-icon"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AppFile:
    """One file. `zipped`: None where that would not be smaller. `forever`: its name changes with its content."""

    content: bytes
    zipped: bytes | None
    media_type: str
    tag: str
    forever: bool


class AppFiles:
    """The files of a build. A new build is read with the first request after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: tuple[int, int] | None = None
        self._files: dict[str, AppFile] = {}

    def index(self) -> AppFile | None:
        """The page that every address of the console begins with; None if there is no build."""
        return self.find("index.html")

    def find(self, name: str) -> AppFile | None:
        """By its path below the folder."""
        built = _built(self._folder / "index.html")
        if built != self._built:
            self._files = {} if built is None else _read(self._folder)
            self._built = built
        return self._files.get(name)


def _built(index: Path) -> tuple[int, int] | None:
    try:
        stat = index.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def _read(folder: Path) -> dict[str, AppFile]:
    found, total = {}, 0
    for path in sorted(folder.rglob("*"))[:FILES_MAX]:
        if not path.is_file() or path.is_symlink() or path.suffix == ".map":
            continue
        content = path.read_bytes()
        total += len(content)
        if total > BYTES_MAX:
            break
        name = path.relative_to(folder).as_posix()
        media_type = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        zipped = gzip.compress(content, mtime=0) if media_type.startswith(_COMPRESSED) else None
        found[name] = AppFile(
            content=content,
            zipped=zipped if zipped is not None and len(zipped) < len(content) else None,
            media_type=media_type,
            tag=hashlib.sha256(content).hexdigest()[:32],
            forever=name.startswith("assets/"),
        )
    return found
