"""Runs of BERT, in pretraining or as a classifier: configuration and set-up."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from experiments.bert_sections import BertData, Lora, Pretrained
from experiments.bert_task import bert_shapes, make_adapter_task, make_bert_task
from experiments.config import RunConfig, check_plain
from experiments.data.corpus import open_corpus
from experiments.data.hidden_words import pretraining_batches
from experiments.data.labelled_text import classification_batches, load_labelled
from experiments.data.passages import load_passages
from experiments.data.vocabulary import STDLIB, Vocabulary, read_vocabulary
from experiments.devices import make_operator, make_run_mesh, show_cpu_devices
from experiments.models.bert import BERTConfig
from experiments.models.bert_weights import load_bert
from experiments.run import Run, make_contenders, settle_run
from experiments.task import Task
from sfpo_jax.training import DataIterator, Optimizer, Parallel, Train, check_groups

# The same network as BERT-large, as narrow as two CPU cores train in minutes.
SMALL_BERT = BERTConfig(
    task="classify",
    vocabulary=1024,
    length=64,
    classes=10,
    width=64,
    depth=2,
    heads=4,
    mlp_width=256,
    init=0.08,
)


@dataclasses.dataclass(frozen=True)
class BertConfig(RunConfig):
    """Everything a run depends on."""

    model: BERTConfig = SMALL_BERT
    data: BertData = dataclasses.field(default_factory=BertData)
    optimizer: Optimizer = dataclasses.field(
        default_factory=lambda: Optimizer(learning_rate=0.003)
    )
    parallel: Parallel = dataclasses.field(
        default_factory=lambda: Parallel(cpu_devices=4)
    )
    train: Train = dataclasses.field(
        default_factory=lambda: Train("bert_stdlib", steps=400)
    )
    pretrained: Pretrained = dataclasses.field(default_factory=Pretrained)
    lora: Lora = dataclasses.field(default_factory=Lora)


class _Source(NamedTuple):
    vocabulary: Vocabulary
    classes: int
    description: str
    stream: Callable[[], DataIterator]
    tests: Callable[[], Sequence[Any]]


def prepare_bert(config: BertConfig) -> Run:
    """Builds all that a run needs.

    Raises:
      ValueError: values that do not go together, in one line with the remedy.
    """
    show_cpu_devices(config.parallel.cpu_devices)
    model = config.model
    source = _labelled(config) if model.task == "classify" else _corpus(config)
    _check_sizes(config, source)
    mesh = make_run_mesh(config.parallel, config.data.batch_size)
    task = _make_task(config, mesh)
    check_groups(config.optimizer.groups, task.shapes)
    config, notes = settle_run(config, mesh, task)
    return Run(
        config,
        source.description,
        task,
        mesh,
        make_contenders(config, mesh),
        stream=source.stream,
        tests=source.tests,
        notes=notes,
    )


def _make_task(config: BertConfig, mesh: Mesh) -> Task:
    model, parallel = config.model, config.parallel
    recompute, folder = parallel.time.recompute == "full", config.pretrained.folder
    begin = None
    if folder != "none":
        # Read here, where what does not fit is said before anything is compiled.
        begin = load_bert(folder, model, bert_shapes(model)).into
    if not config.lora.rank:
        operator = make_operator(parallel, mesh, model)
        return make_bert_task(
            model, recompute=recompute, operator=operator, begin=begin
        )
    if begin is None or model.task != "classify":
        raise ValueError(
            "`lora.rank` must be 0 without `pretrained.folder` and `model.task` "
            f"classify, got {config.lora.rank}: adapters go beside trained weights."
        )
    check_plain(config, "BERT with adapters")
    return make_adapter_task(model, config.lora, recompute=recompute, begin=begin)


def _vocabulary(config: BertConfig) -> Vocabulary:
    place, folder = config.data.vocabulary, config.pretrained.folder
    if place == "auto":
        place = STDLIB if folder == "none" else folder
    return read_vocabulary(place)


def _corpus(config: BertConfig) -> _Source:
    data, length = config.data, config.model.length
    words = _vocabulary(config)
    corpus = open_corpus(data, words)

    def batches(tokens: Any, **how: Any) -> Any:
        return pretraining_batches(
            tokens, words, length=length, hidden=data.hidden, **how
        )

    return _Source(
        words,
        2,
        f"{len(corpus.train):,} training and {len(corpus.test):,} test tokens of "
        f"{corpus.name}, in rows of {length}, {data.hidden:.0%} of them hidden",
        lambda: batches(
            corpus.train, batch_size=data.batch_size, seed=config.train.seed
        ),
        # Without gradients, four times the batch still takes less memory than training.
        lambda: list(
            batches(
                corpus.test,
                batch_size=4 * data.batch_size,
                epochs=1,
                limit=data.test_rows,
            )
        ),
    )


def _labelled(config: BertConfig) -> _Source:
    data, length, words = config.data, config.model.length, _vocabulary(config)
    if data.source == "stdlib":
        dataset = load_passages(data.test_share)
    else:
        dataset = load_labelled(data)

    def batches(examples: Any, **how: Any) -> Any:
        return classification_batches(examples, words, length=length, **how)

    return _Source(
        words,
        len(dataset.classes),
        f"{len(dataset.train.texts):,} training and {len(dataset.test.texts):,} test "
        f"texts of {dataset.name}, cut to {length} tokens, classes "
        f"{', '.join(dataset.classes[:10])}",
        lambda: batches(
            dataset.train, batch_size=data.batch_size, seed=config.train.seed
        ),
        lambda: list(
            batches(
                dataset.test, batch_size=4 * data.batch_size, shuffle=False, epochs=1
            )
        ),
    )


def _check_sizes(config: BertConfig, source: _Source) -> None:
    """Raises ValueError where a model is too small for what it is to learn."""
    if source.vocabulary.size > config.model.vocabulary:
        raise ValueError(
            f"`model.vocabulary` must be at least {source.vocabulary.size}, the tokens "
            f"of `data.vocabulary`, got {config.model.vocabulary}."
        )
    if source.classes > config.model.classes:
        raise ValueError(
            f"`model.classes` must be at least {source.classes}, the classes of "
            f"`data.source`, got {config.model.classes}."
        )
