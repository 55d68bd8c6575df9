"""`serve`: a run like any other (`shoal.run`), played with sites over a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.api import Result, run
from shoal.config import Config
from shoal.deploy.coordinator import Coordinator
from shoal.deploy.mail import Grid, Mail
from shoal.deploy.secure_coordinator import SecureCoordinator
from shoal.deploy.secure_plan import refuse_unfit
from shoal.deploy.terms import Elsewhere, refuse_turns
from shoal.errors import ConfigError
from shoal.prepare import prepare

OnStart = Callable[[Config, Any, Path], None]


def serve(
    grid: Grid,
    config: str | Path | dict[str, Any] | None = None,
    *,
    names: dict[str, str] | None = None,
    tell: Callable[[str], None] = lambda _words: None,
    overrides: Sequence[str] = (),
    resume: str | Path | None = None,
    runs: str | Path = "runs",
    no_guarantee: bool = False,
    on_start: OnStart | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    data: Any = None,
    model: Any = None,
) -> Result:
    """Coordinate a run over a Flower grid. `names`: what sites are called, by the hash of their keys."""

    def preparing(config: Config, data: Any, model: Any) -> tuple[Config, Coordinator]:
        section = config.federation
        refuse_turns(config.algorithm)
        if config.baseline:
            raise ConfigError(
                "baseline=true trains without privacy on everyone's data, which is not here; leave it out"
            )
        if not isinstance(config.model, str) or (model is not None and not isinstance(model, str)):
            raise ConfigError("sites build the model themselves: give its name, or package.module:Class")
        sizes = sorted({section.fewest_records, section.most_records} - {None})
        parts = Elsewhere(config.data.clients, tuple(sizes))
        if not section.seeded and config.noise_seed is None:
            config = replace(config, random="secure")
        make = SecureCoordinator if section.aggregation == "secure" else Coordinator
        config, made = prepare(config, data, model, parts=parts, make=make)
        assert isinstance(made, Coordinator)
        refuse_unfit(config.algorithm, section, made.setting, made.state.model.numel())
        made.connect(config, partial(Mail, grid), names or {}, tell)
        return config, made

    return run(
        config,
        data=data,
        model=model,
        overrides=overrides,
        resume=resume,
        runs=runs,
        no_guarantee=no_guarantee,
        on_start=on_start,
        on_round=on_round,
        preparing=preparing,
    )
