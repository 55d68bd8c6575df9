"""`shoal account epsilon|delta|noise|rounds`: a privacy calculator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from shoal.cli.options import Json, print_json
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.accounting.accountants import Answer
    from shoal.accounting.events import Event

app = typer.Typer(help="A privacy calculator: epsilon, delta, noise or rounds.", no_args_is_help=True)


Sampling: TypeAlias = Literal["poisson", "fixed-size", "shuffled", "random-allocation", "none"]
Adjacency: TypeAlias = Literal["add-or-remove", "zero-out", "replace-one"]
Orders: TypeAlias = Literal["tf72", "2-32", "2-33"]
Participation: TypeAlias = Literal["hidden", "visible"]
Shown: TypeAlias = "tuple[Answer, dict[str, Any]]"
"""What a command computes: the answer, and what else to show with it."""


def _share(text: str | float) -> float:
    """A number from 0 to 1, which may be written as a fraction."""
    above, line, below = str(text).partition("/")
    try:
        found = float(above) / (float(below) if line else 1.0)
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(
            f"{text!r} is neither a number such as 0.05 nor a fraction such as 50/1000"
        ) from None
    if not 0 <= found <= 1:
        raise typer.BadParameter(f"{text} is not between 0 and 1")
    return found


Epsilon = Annotated[float, typer.Option(help="The budget's epsilon.")]
Delta = Annotated[
    float, typer.Option(help="Any test for one unit has TPR <= e^epsilon FPR + delta. Choose it below 1/units.")
]
Noise = Annotated[str, typer.Option(help="Noise multiplier, or a schedule such as linear:15:4.85.")]
Steps = Annotated[
    int,
    typer.Option(
        "--steps", "--rounds", min=1, help="Noisy steps; rounds, if units are clients or --client-rate is given."
    ),
]
Rate = Annotated[
    float,
    typer.Option(
        parser=_share,
        metavar="SHARE",
        help="Sampling rate of units, or of a client's records, in a step: 0.05 or 50/1000.",
    ),
]
ClientRate = Annotated[
    float | None,
    typer.Option(parser=_share, metavar="SHARE", help="Two levels: sampling rate of clients in a round."),
]
Planned = Annotated[int | None, typer.Option(min=1, help="Planned rounds, over which a noise schedule is spread.")]
LocalSteps = Annotated[int, typer.Option(min=1, help="Two levels: a client's local steps in a round.")]
RecordsPerUser = Annotated[
    int, typer.Option(min=1, help="The unit is a user with at most this many records, each Poisson sampled.")
]
AccountantOption = Annotated[
    str, typer.Option(help="The accountant: pld, rdp, rdp-classic, zcdp, advanced, basic, or a plugin's.")
]
SamplingOption = Annotated[Sampling, typer.Option(help="How units, or a client's records, are sampled.")]
AdjacencyOption = Annotated[
    Adjacency, typer.Option(help="Adjacency: add-or-remove one unit, zero-out (it contributes nothing), replace-one.")
]
UnitsOption = Annotated[
    int | None, typer.Option(min=1, help="The number of clients or records; warns of a delta above 1/UNITS.")
]
OrdersOption = Annotated[Orders, typer.Option(help="The orders of rdp-classic.")]
ParticipationOption = Annotated[
    Participation, typer.Option(help="Two levels: whether the observer sees which clients take part.")
]


@dataclass(frozen=True)
class Setting:
    """How a step or round samples, and the accountant: the options that all commands have."""

    sampling_rate: Rate = 1.0
    client_rate: ClientRate = None
    local_steps: LocalSteps = 1
    records_per_user: RecordsPerUser = 1
    sampling: SamplingOption = "poisson"
    adjacency: AdjacencyOption = "add-or-remove"
    participation: ParticipationOption = "visible"
    accountant: AccountantOption = "pld"
    orders: OrdersOption = "tf72"
    units: UnitsOption = None

    def steps(self, noise: float, count: int) -> Event:
        """The event of `count` steps, or rounds, with the same noise."""
        from shoal.accounting.events import Gaussian, Repeat, Sampled, SampledUser, TwoLevel

        rate, several = 1.0 if self.sampling == "none" else self.sampling_rate, self.records_per_user
        if several > 1 and self.sampling != "poisson":
            raise ConfigError(f"--records-per-user {several} needs --sampling poisson, got {self.sampling}")
        if self.client_rate is None:
            if self.local_steps != 1:
                raise ConfigError(f"--local-steps {self.local_steps} needs --client-rate: it counts steps in a round")
            one = Sampled(self.sampling, rate, Gaussian(noise))
            return Repeat(SampledUser(several, rate, noise) if several > 1 else one, count)
        seen = self.participation
        done = TwoLevel(self.client_rate, rate, self.local_steps, noise, self.sampling, seen, records=several)
        return Repeat(done, count)

    def scheduled(self, noise: str, count: int, planned: int) -> Event:
        """The event of the first `count` of `planned` steps under a noise schedule."""
        from shoal.accounting.events import Compose
        from shoal.accounting.leaves import block_length, blocks
        from shoal.mechanisms.schedules import parse

        schedule = parse(noise)
        if _constant(noise) is not None:
            return self.steps(schedule.value(0, planned), count)
        if self.sampling == "shuffled" and self.client_rate is None:
            raise ConfigError("--sampling shuffled needs a constant --noise: the step that uses a unit is not known")
        if self.sampling == "random-allocation" and self.client_rate is None:
            noises = [schedule.value(t, planned) for t in range(count)]
            return blocks(noises, block_length(self.sampling_rate))
        return Compose(tuple(self.steps(schedule.value(t, planned), 1) for t in range(count)))

    def epsilon(self, event: Event, delta: float) -> Shown:
        """Epsilon, and a lower bound on it where the accountant has one."""
        from shoal.accounting import accountants

        answer = accountants.epsilon(event, delta, self.accountant, self.adjacency, self.orders)
        least = accountants.at_least(event, delta, self.adjacency) if self.accountant == "pld" else None
        return answer, {} if least is None else {"at_least": least}


def _command(compute: Callable[..., Shown]) -> Callable[..., Shown]:
    """Adds a command that shows what `compute` finds, with its options, those of the setting and `--json`."""

    @wraps(compute)
    def command(as_json: bool, **options: Any) -> None:
        setting = Setting(**{field.name: options.pop(field.name) for field in fields(Setting)})
        _show(*compute(setting, **options), setting, as_json)

    own = list(signature(compute, eval_str=True).parameters.values())[1:]
    common = signature(Setting, eval_str=True).parameters.values()
    as_json = Parameter("as_json", Parameter.POSITIONAL_OR_KEYWORD, default=False, annotation=Json)
    options = [*own, *common, as_json]
    command.__signature__ = Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in options}
    app.command(compute.__name__)(command)
    return compute


@_command
def epsilon(setting: Setting, noise: Noise, delta: Delta, steps: Steps = 1) -> Shown:
    """The epsilon of a number of noisy steps at a delta."""
    answer, more = setting.epsilon(setting.scheduled(noise, steps, steps), delta)
    if setting.client_rate is not None and setting.participation == "hidden":
        shown = replace(setting, participation="visible")
        seen, _ = shown.epsilon(shown.scheduled(noise, steps, steps), delta)
        more["epsilon_if_participation_shows"] = seen.epsilon
    return answer, {"noise": _number(noise), "steps": steps, **more}


@_command
def delta(setting: Setting, noise: Noise, epsilon: Epsilon, steps: Steps = 1) -> Shown:
    """The delta of a number of noisy steps at an epsilon."""
    from shoal.accounting import accountants

    event = setting.scheduled(noise, steps, steps)
    answer = accountants.delta(event, epsilon, setting.accountant, setting.adjacency, setting.orders)
    return answer, {"noise": _number(noise), "steps": steps}


@_command
def noise(setting: Setting, epsilon: Epsilon, delta: Delta, steps: Steps = 1) -> Shown:
    """The least noise multiplier for which a number of steps keeps a budget."""
    from shoal.accounting import calibration

    budget = calibration.Budget(epsilon, delta, setting.accountant, setting.adjacency, setting.orders)
    found = calibration.noise(lambda value: setting.steps(value, steps), budget)
    return found.answer, {"noise": found.value, "steps": steps}


@_command
def rounds(setting: Setting, noise: Noise, epsilon: Epsilon, delta: Delta, planned: Planned = None) -> Shown:
    """The most steps, or rounds, that keep a budget with a given noise."""
    from shoal.accounting import calibration

    if _constant(noise) is None and planned is None:
        raise ConfigError(
            f"the schedule {noise} is spread over the rounds planned; add --planned, e.g. --planned 100"
        )
    budget = calibration.Budget(epsilon, delta, setting.accountant, setting.adjacency, setting.orders)
    event_at: Callable[[int], Event] = lambda count: setting.scheduled(noise, count, planned or count)  # noqa: E731
    found = calibration.rounds(event_at, budget, planned or 10**9)
    count = int(found.value)
    return found.answer, {"noise": _number(noise), "steps": count, "rounds": count}


def _constant(noise: str) -> float | None:
    """The noise as a number; None for a schedule."""
    from shoal.mechanisms.schedules import parse

    schedule = parse(noise)
    return None if ":" in noise else float(schedule.value(0, 1))


def _number(noise: str) -> float | str:
    constant = _constant(noise)
    return noise if constant is None else constant


def _show(answer: Answer, more: dict[str, Any], setting: Setting, as_json: bool) -> None:
    from shoal.accounting.claims import large_delta

    large = setting.units and answer.delta and large_delta("unit", answer.delta, setting.units)
    warnings = [large] if large else []
    rate = {} if setting.sampling == "none" else {"sampling_rate": setting.sampling_rate}
    asked = {"sampling": setting.sampling, **rate, "client_rate": setting.client_rate, "adjacency": setting.adjacency}
    written = {**answer.to_json(), **asked, "warnings": warnings, **more}
    if as_json:
        print_json(written)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    keys = ("epsilon", "at_least", "epsilon_if_participation_shows", "delta", "noise", "steps", "accountant", *asked)
    for key in keys:
        if key in written and not (key == "client_rate" and written[key] is None):
            label = "lower bound" if key == "at_least" else key.replace("_", " ")
            table.add_row(label, _text(key, written[key]))
    console = Console()
    console.print(table)
    if answer.because:
        label = "Note" if answer.valid else "Not a bound"
        console.print(f"{label}: {answer.because}.", markup=False, highlight=False)
    for warning in warnings:
        console.print(f"Warning: {warning}.", markup=False, highlight=False)


def _text(key: str, value: object) -> str:
    from shoal.accounting.rounding import down, up

    if isinstance(value, float):
        return (down if key == "at_least" else up)(value, 6)
    return "none" if value is None else str(value)
