"""`load_model`: a saved model with its preprocessing, for predictions on new records."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from shoal import __version__, release
from shoal.checked import short
from shoal.config import Config
from shoal.data import Dataset
from shoal.data.arrays import new_records, read_arrays
from shoal.data.columns import Tally
from shoal.data.features import features
from shoal.data.large_tables import encoded_pieces, is_large
from shoal.data.schema import Schema
from shoal.data.schema_encoding import encode_by_schema, read_by_schema
from shoal.data.table_files import column_names, other_type, read_table
from shoal.data.tables import Encoded, encode_again
from shoal.errors import ConfigError, DataError, RunError, listed
from shoal.extras import optional
from shoal.inputs import Inputs, count, shape_of, take
from shoal.models.bundle import (
    Bundle,
    Type,
    put_personal,
    read_bundle,
    read_personal,
    read_weights,
    rebuild,
    resolved,
)
from shoal.prepare import as_numbers
from shoal.tasks import NextToken, Regression, Task
from shoal.tasks.saved import of_mapping, own_code, to_mapping
from shoal.training.evaluation import finite, in_parts, outputs_of, rows_at_once
from shoal.training.trainer import Trainer

if TYPE_CHECKING:
    import pyarrow as pa

TABLES, ARRAYS = (".csv", ".parquet"), (".npz", ".npy")


def load_model(
    run: str | Path,
    *,
    model: nn.Module | type[nn.Module] | str | None = None,
    client: str | None = None,
    trust_code: bool = False,
) -> Model:
    """The model of a run, ready for predictions.

    Args:
        run: The run's folder, or any folder with its `model.safetensors` and `model.json`.
        model: The network, where it was passed in Python: a module, whose weights do not matter, or its class.
        client: The client whose personal layers it gets, where the run kept them; else they are the initial ones.
        trust_code: Import the code that `model.json` names, `package.module:NAME`, from the current folder or the
            environment: a network, a task, a loss, figures. Whoever sent the files chooses what runs.

    Returns:
        The model with its preprocessing, on the CPU.

    Raises:
        RunError: A file is missing, damaged or was changed, or holds no layers of that client.
        ModelError: The network cannot be built, or is another one.
    """
    folder = Path(run)
    bundle = read_bundle(folder)
    if not trust_code:
        _refuse_code(folder, bundle, built=model is None and not bundle.passed_in_python)
    weights = read_weights(folder, bundle)
    try:
        task = of_mapping(bundle.task)
        schema = None if bundle.schema is None else replace(Schema.of(bundle.schema), unconfirmed=())
    except ConfigError as error:
        raise RunError(f"{folder / 'model.json'} is damaged: {error}; copy it again from the run") from None
    module = rebuild(bundle, weights, task.outputs, model)
    if client is not None:
        put_personal(module, read_personal(folder, client))
        note = f"personal layers are those of client '{client}', which are not for release"
        bundle = replace(bundle, note=note, release=release.PERSONAL)
    return Model(module, bundle, task, schema, trust_code)


def _refuse_code(folder: Path, bundle: Bundle, *, built: bool) -> None:
    """Raise a RunError where the network (if it is `built` by its name) or the task would be imported."""
    named = [bundle.model] if built else []
    if code := [name for name in (*named, str(bundle.task.get("kind"))) if ":" in name]:
        raise RunError(
            f"{folder / 'model.json'} names code that would run here, {short(code[0])}; if you trust whoever sent "
            f"it: --trust-code (in Python: trust_code=True)"
        )


@dataclass(frozen=True)
class Records:
    """Records as a model takes them.

    Attributes:
        x: The inputs.
        targets: What they should be predicted as, where that is known.
        notes: What was changed on the way, such as values outside their ranges.
    """

    x: Inputs
    targets: Tensor | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Predictions:
    """What a model says of records, in their order.

    Attributes:
        columns: By name: the class and the probability of each, the number, or the labels.
        notes: What a reader should know.
        figures: How good they are, where the targets are known; None for one that is not finite.
        trivial: The same of the best constant prediction.
    """

    columns: dict[str, np.ndarray]
    notes: tuple[str, ...] = ()
    figures: dict[str, float | None] = field(default_factory=dict)
    trivial: dict[str, float | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


Found = TypeVar("Found", Records, Predictions)


@dataclass(frozen=True, eq=False)
class Model:
    """A saved model.

    Attributes:
        module: The network with its weights, in eval mode.
        bundle: What `model.json` says.
        task: What it was trained for.
        schema: The schema of its table, where it was trained on one.
        trust_code: Whether the loss and the figures that `model.json` names may be imported.
    """

    module: nn.Module
    bundle: Bundle
    task: Task
    schema: Schema | None = None
    trust_code: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of classes, labels or tokens."""
        return self.bundle.classes

    @property
    def claims(self) -> tuple[dict[str, Any], ...]:
        """What is proven of the model."""
        return self.bundle.claims

    def predict(self, data: Any) -> Predictions:
        """Predictions for new records.

        Args:
            data: A .csv, .parquet, .npz or .npy file, an Arrow table, a data frame, a mapping of columns, an array
                of records or several by name, or a `Dataset`, of which the test rows are taken.

        Raises:
            DataError: The records are not such as the model was trained on.
        """
        if self.schema is None or not _is_file(data) or not _is_table(data) or not is_large(Path(data), self.schema):
            return self._answered([self.prepared(data)])
        return self._with_labels(
            column_names(Path(data)), lambda targets: self._answered(self._pieces(Path(data), targets))
        )

    def _answered(self, pieces: Iterable[Records]) -> Predictions:
        """The predictions of all pieces; the notes are those of the last one."""
        answers, scores, known, bad, records = [], [], [], 0, Records(torch.empty(0))
        for records in map(self._scorable, pieces):
            task = self.task if records.targets is None else self._scoring
            with torch.inference_mode():
                first = outputs_of(self.module, take(records.x, slice(1)))
                for rows in in_parts(count(records.x), rows_at_once(first.numel())):
                    x = take(records.x, rows)
                    outputs = outputs_of(self.module, x)
                    bad += int((~outputs.isfinite()).flatten(1).any(1).sum())
                    answers.append(task.answers(self._at_the_end(outputs, x), self.classes))
                    if records.targets is not None:
                        scores.append(task.predictions(outputs, records.targets[rows]))
                        known.append(records.targets[rows])
        columns = {name: np.concatenate([part[name] for part in answers]) for name in answers[0]}
        notes = (*filter(None, [self.bundle.note]), *records.notes, *_diverged(bad))
        return self._scored(Predictions(columns, notes), known, scores)

    def _scorable(self, records: Records) -> Records:
        """Without their targets where code of others would be imported to score them."""
        if records.targets is None or self.trust_code or not (code := own_code(self.bundle.task)):
            return records
        why = f"no figures: {short(code)} would be imported; --trust-code (in Python: trust_code=True) allows it"
        return replace(records, targets=None, notes=(*records.notes, why))

    def _pieces(self, path: Path, targets: bool) -> Iterator[Records]:
        """The rows of a table that does not fit memory."""
        assert self.schema is not None
        tally = Tally.new()
        for x, y in encoded_pieces(path, self.schema, tally, targets=targets):
            known = None if y is None else torch.from_numpy(np.ascontiguousarray(y))
            yield Records(self._fitting(torch.from_numpy(np.ascontiguousarray(x))), known, tally.notes())

    def prepared(self, data: Any) -> Records:
        """Records as the model takes them: encoded, scaled, with their features."""
        if isinstance(data, Dataset):
            found = self._of_dataset(data)
        elif isinstance(data, Mapping) and isinstance(self.bundle.input_shape, dict):
            found = self._of_arrays(data)
        elif _is_table(data):
            found = self._of_table(data)
        else:
            found = self._of_arrays(data)
        return replace(found, x=self._fitting(found.x))

    @cached_property
    def _scoring(self) -> Task:
        """The task with the user's own figures, which are only imported where there is something to score."""
        return of_mapping(self.bundle.task, own=True)

    def _scored(self, found: Predictions, targets: list[Tensor], scores: list[Tensor]) -> Predictions:
        if not targets:
            return found
        predictions, known = torch.cat(scores).numpy(), torch.cat(targets).numpy()
        figures, trivial = self._scoring.all_figures(predictions, known), self._scoring.trivial_figures(known)
        return replace(found, figures=finite(figures), trivial=finite(trivial))

    def _at_the_end(self, outputs: Tensor, x: Inputs) -> Tensor:
        """For next-token prediction the outputs up to the end of each text, which may be followed by padding."""
        if not isinstance(self.task, NextToken) or self.schema is None or not isinstance(x, Tensor):
            return outputs
        last = (x != 0).sum(1).clamp(min=1) - 1
        return outputs[torch.arange(len(x)), last][:, None]

    def _of_dataset(self, dataset: Dataset) -> Records:
        if isinstance(self.task, Regression) and dataset.test_y.dtype == torch.int64:
            dataset = as_numbers(dataset)
        if dataset.classes != self.classes:
            raise DataError(
                f"data '{dataset.name}' has {len(dataset.classes)} classes ({listed(dataset.classes, 5)}), the model "
                f"{len(self.classes)} ({listed(self.classes, 5)})"
            )
        self.task.check_targets(dataset.test_y, f"data '{dataset.name}', test")
        return Records(dataset.test_x, dataset.test_y)

    def _of_table(self, data: Any) -> Records:
        where = str(data) if isinstance(data, str | Path) else "the table"
        if self.schema is not None:
            return self._by_schema(data, where)
        if not self.bundle.columns:
            raise DataError(
                f"{where}: the model was trained on arrays of shape {self.bundle.input_shape}, not on a table with "
                f"columns; give a .npz or .npy file or an array"
            )
        table = read_table(Path(data)) if isinstance(data, str | Path) else _arrow(data)
        found = encode_again(table, where, self.bundle.columns, self.bundle.label, self.bundle.ranges)
        return self._labelled(found, where)

    def _by_schema(self, data: Any, where: str) -> Records:
        there = column_names(Path(data)) if _is_file(data) else (data := _arrow(data)).column_names
        return self._with_labels(there, lambda targets: _encoded(self._encode(data, where, targets=targets)))

    def _with_labels(self, there: Sequence[str], read: Callable[[bool], Found]) -> Found:
        """What is found in the columns of the schema; with the label, where it is there and can be read."""
        assert self.schema is not None
        problem: tuple[str, ...] = ()
        if set(self.schema.labels) <= set(there):
            try:
                return read(True)
            except DataError as error:
                problem = (f"no figures: {error}",)
        found = read(False)  # raises where the problem is not the label's
        return replace(found, notes=found.notes + problem)

    def _encode(self, data: Any, where: str, *, targets: bool) -> Encoded:
        assert self.schema is not None
        if _is_file(data):
            data = read_by_schema(self.schema, Path(data), targets=targets, owners=False)
        return encode_by_schema(self.schema, data, where, targets=targets, owners=False)

    def _labelled(self, table: Encoded, where: str) -> Records:
        try:
            return self._records(table.inputs, table.targets, where, table.notes)
        except DataError as error:
            found = self._records(table.inputs, None, where, table.notes)
            return replace(found, notes=(*found.notes, f"no figures: {error}"))

    def _of_arrays(self, data: Any) -> Records:
        where = str(data) if isinstance(data, str | Path) else "the arrays"
        x, y = read_arrays(Path(data)) if isinstance(data, str | Path) else (data, None)
        return self._records(x, y, where, ())

    def _records(self, x: Any, y: Any, where: str, notes: tuple[str, ...]) -> Records:
        bundle = self.bundle
        found, targets = new_records(
            x, y, where, shape=bundle.input_shape, scale=bundle.scale, name=bundle.data, classes=self.classes,
            task=self.task,
        )  # fmt: skip
        return Records(found, targets, notes)

    def _fitting(self, x: Inputs) -> Inputs:
        """With features, and of the model's type; DataError where the shape is another."""
        bundle = self.bundle
        if isinstance(x, Tensor):
            x = features(bundle.features, x)
        if shape_of(x) != bundle.input_shape:
            raise DataError(f"records have shape {shape_of(x)}, the model takes {bundle.input_shape}")
        if isinstance(x, Tensor):
            return _of_type(x, str(bundle.input_type))
        assert isinstance(bundle.input_type, dict)
        return {name: _of_type(part, bundle.input_type[name]) for name, part in x.items()}


def describe(
    config: Config, trainer: Trainer[Any], claims: list[dict[str, Any]], weights: str, passed: bool
) -> Bundle:
    """The description of a run's model.

    Args:
        config: The run's configuration.
        trainer: Its trainer.
        claims: What is proven.
        weights: The SHA-256 of the file of weights.
        passed: Whether the model was passed in Python.
    """
    dataset = trainer.evaluation.dataset
    schema = config.schema or dataset.schema
    from_table = schema is None and bool(dataset.features)
    return Bundle(
        release=release.of_description(claims, trainer.cohort.streams.mode, dataset.read_columns),
        model=config.model if passed else resolved(config.model, dataset.input_shape),
        passed_in_python=passed,
        note=_about_personal(trainer.evaluation.layout.personal_layers),
        input_shape=dataset.input_shape,
        input_type=_type(dataset.test_x),
        task=to_mapping(dataset.task),
        classes=dataset.classes,
        data=dataset.name,
        scale=config.data.scale,
        features=config.data.features,
        columns=dataset.features,
        ranges=dict(dataset.ranges),
        label=config.data.label if from_table else None,
        schema=None if schema is None else schema.to_mapping(),
        claims=tuple(claims),
        versions={"shoal": __version__, "torch": torch.__version__, "python": platform.python_version()},
        weights=weights,
    )


def restated(bundle: Bundle, claims: list[dict[str, Any]]) -> Bundle:
    """The description of a model of which this is proven, and no longer what its run alone would prove."""
    bounded = any(claim["epsilon"] is not None for claim in claims)
    return replace(bundle, claims=tuple(claims), release=bundle.release if bounded else release.UNPROVEN)


def _about_personal(layers: Sequence[str]) -> str:
    if not layers:
        return ""
    return (
        f"personal layers ({', '.join(layers)}) hold their initial values here, since each client keeps its own: "
        f"these predictions are poor. --client NAME takes those of a client that a simulation kept"
    )


def _type(x: Inputs) -> Type | dict[str, Type]:
    if isinstance(x, Tensor):
        return "int64" if x.dtype == torch.int64 else "float32"
    return {name: "int64" if part.dtype == torch.int64 else "float32" for name, part in x.items()}


def _of_type(x: Tensor, wanted: str) -> Tensor:
    if x.dtype != torch.int64 and wanted == "int64":
        raise DataError("records are fractions, the model takes tokens, which are whole numbers (int64)")
    return x if wanted == "int64" else x.float()


def _encoded(table: Encoded) -> Records:
    targets = None if table.targets is None else torch.from_numpy(np.ascontiguousarray(table.targets))
    return Records(torch.from_numpy(np.ascontiguousarray(table.inputs)), targets, table.notes)


def _is_file(data: Any) -> TypeGuard[str | Path]:
    return isinstance(data, str | Path)


def _is_table(data: Any) -> bool:
    """A file of a table, an Arrow table, a data frame, or a mapping of columns."""
    if isinstance(data, str | Path):
        suffix = Path(data).suffix
        if suffix not in TABLES + ARRAYS:
            raise DataError(
                f"{data}: records are read from {', '.join(TABLES + ARRAYS)} files{other_type(Path(data))}"
            )
        if not Path(data).is_file():
            raise DataError(f"there is no file {data}")
        return suffix in TABLES
    return isinstance(data, Mapping) or hasattr(data, "columns") or hasattr(data, "column_names")


def _arrow(data: Any) -> pa.Table:
    pa = optional("pyarrow", "a table")
    try:
        return data if isinstance(data, pa.Table) else pa.table(data)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"the table cannot be read: {error}") from None


def _diverged(bad: int) -> tuple[str, ...]:
    return (f"{bad:,} outputs are not finite: the model has diverged",) if bad else ()
