"""The sections of a BERT's run that no other has: data, weights and adapters."""

import dataclasses
import re

from sfpo_jax._validate import check_at_least, check_range


@dataclasses.dataclass(frozen=True)
class BertData:
    """The text of a run."""

    source: str = "stdlib"
    """stdlib, whose modules are text, and whose packages are classes of passages; or in
    pretraining a file or folder of text or of Parquet, or an .npy file of token ids; to
    classify a .tsv, .csv or .parquet file with a column of labels."""
    text_column: str = "text"
    """Column of the text, where there are columns."""
    label_column: str = "label"
    """Column of the labels, in classification."""
    vocabulary: str = "auto"
    """A tokenizer.json, a vocab.txt or a folder of one; auto: that of
    pretrained.folder, else 1,024 pieces of Python's standard library."""
    test_share: float = 0.1
    """Share held out for the test: of the files, the text or each class."""
    test_rows: int = 1024
    """Rows that are tested at most, spread evenly."""
    batch_size: int = 64
    """Rows of a step, over all devices."""
    hidden: float = 0.15
    """Share of the tokens to be guessed in pretraining."""

    def __post_init__(self) -> None:
        for name in ("test_share", "hidden"):
            check_range(
                f"data.{name}",
                getattr(self, name),
                0.0,
                1.0,
                "a share",
                open_low=True,
                open_high=True,
            )
        for name in ("test_rows", "batch_size"):
            check_at_least(f"data.{name}", getattr(self, name), 1, "a row count")


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """What a run begins with instead of random numbers."""

    folder: str = "none"
    """Folder with a model.safetensors in the Hugging Face layout and its vocabulary."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """Adapters of low rank beside pretrained weights, which then stay as they are."""

    rank: int = 0
    """Columns of an adapter's first matrix; 0: no adapters, all weights are trained."""
    match: str = "blocks"
    """Regular expression of the linear layers that get one, by their paths."""
    also: str = "head|pooler"
    """Regular expression of the parameters that are trained besides."""

    def __post_init__(self) -> None:
        check_at_least("lora.rank", self.rank, 0, "a number of columns, or none")
        for name in ("match", "also"):
            value = getattr(self, name)
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(
                    f"`lora.{name}` must be a regular expression, got '{value}': "
                    f"{error}."
                ) from None
