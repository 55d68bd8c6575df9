"""The plots on the page of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.report.run_reader import Run
from shoal.report.scores import Scores, name_of, number, title_of
from shoal.report.series import MOST_POINTS, Plot, Series, build, column, figure, in_bytes

UNITS = {"client": "a client", "record": "a record", "user": "a user"}
OBSERVERS = {
    "release": "released models",
    "server": "server",
    "client-process": "client process",  # sees every noisy local step, but not which records each one sampled
}


def whose(claim: Mapping[str, Any]) -> str:
    """The unit of a claim and its adjacency: `a simulated client (zero-out)`."""
    unit, adjacency = str(claim.get("unit")), claim.get("adjacency")
    words = "a simulated client" if claim.get("simulated") else UNITS.get(unit, unit)
    return f"{words} ({adjacency})" if adjacency else words


PLAIN = "no clip, no noise"

_KNOWN = {"round", "loss", "clip", "noise", "clipped", "snr", "v_c", "u_s", "bytes_sent", "clients"}
_KNOWN |= {"expected_clients", "bad_updates", "seconds", "proven", "clipped_records", "record_clip", "step_noise"}
_MOST_OTHERS = 8
SAME_AS_LOSS = ("loss", "mean_loss")
MOST_NAMED = 20
"""The worst clients, of which every one is in the plot."""


def plots_of(run: Run) -> list[Plot]:
    """The plots of a run in the order of the page; a plot without data is left out."""
    lines = run.metrics
    drawn = [
        _headline(run),
        _epsilon(run),
        _loss(run),
        _clip_and_noise(run),
        build(
            "clipped",
            "Updates clipped",
            [("share clipped", column(lines, "clipped"), 1, False)],
            note="The share of updates whose norm was above the clip norm.",
            format="share",
        ),
        build(
            "snr",
            "Signal to noise",
            [("signal / noise", column(lines, "snr"), 1, False)],
            note="The norm of the sum of clipped updates, divided by the norm of the noise.",
            may_log=True,
            lines=[{"y": 1, "label": "as much noise as signal"}],
        ),
        build(
            "clipped-records",
            "Records clipped",
            [("share clipped", column(lines, "clipped_records"), 1, False)],
            note="The share of records whose gradient norm was above the clip norm.",
            format="share",
        ),
        build(
            "steps",
            "Clip norm and noise of a local step",
            [("clip norm", column(lines, "record_clip"), 1, False), ("noise", column(lines, "step_noise"), 2, False)],
            note="The clip norm of a record's gradient, and the standard deviation of the noise on a batch's sum.",
            may_log=True,
        ),
        build(
            "scale",
            "Variance between clients and scale of updates",
            [("V_c", column(lines, "v_c"), 1, False), ("U_s", column(lines, "u_s"), 2, False)],
            note="V_c is the variance between clients' updates, U_s the squared mean update; means over parameters.",
            may_log=True,
        ),
        _communication(run),
        _clients(run),
        *_others(run),
    ]
    return [plot for plot in drawn if plot is not None]


def _headline(run: Run) -> Plot | None:
    """The headline figure by round, and where the constant answer stands."""
    scores, trivial = run.scores, run.scores.trivial_score
    level = [] if trivial is None else [{"y": trivial, "label": scores.trivial_answer}]
    return build(
        scores.headline,
        f"{title_of(scores.headline)} on held-out data",
        _held_out(run, scores.headline),
        note="" if scores.higher_is_better else "Lower is better.",
        format=scores.format,
        lines=level,
    )


def _loss(run: Run) -> Plot | None:
    if run.scores.headline in SAME_AS_LOSS:
        return None
    return build("loss", "Loss on held-out data", _held_out(run, "loss"), may_log=True)


def _held_out(run: Run, name: str) -> list[tuple[str, dict[int, float], int, bool]]:
    own = "this run" if run.baseline else name_of(name)
    return [(own, column(run.metrics, name), 1, False), (PLAIN, column(run.baseline, name), 0, True)]


def spread_of(scores: Scores) -> Plot | None:
    """The headline figure of every client, the worst first; of many clients the worst and evenly chosen others."""
    clients = scores.clients
    if not clients:
        return None
    count = len(clients)
    step = max(1, (count - MOST_NAMED) // MOST_POINTS + 1)
    kept = sorted({*range(min(count, MOST_NAMED)), *range(MOST_NAMED, count, step), count - 1})
    worst = ", ".join(f"{client.name} {scores.shown(client.score)} ({client.records:,})" for client in scores.worst)
    best = scores.shown(clients[-1].score)
    return Plot(
        id="spread",
        title=f"{title_of(scores.headline)} by client",
        note=f"Median of {count:,} clients: {scores.shown(scores.median)}. The worst, with their records: {worst}.",
        about=f"{scores.name} of {count:,} clients, the best at {best}, the worst, with their records: {worst}.",
        format=scores.format,
        x=[place + 1 for place in kept],
        series=[Series(scores.name, [clients[place].score for place in kept])],
        lines=[] if scores.score is None else [{"y": scores.score, "label": "all records"}],
        of=count,
        names=[clients[place].name for place in kept],
        records=[clients[place].records for place in kept],
    )


def _epsilon(run: Run) -> Plot | None:
    """Epsilon by round for each unit and observer, with the budget and the published figure.

    Not of a run that a private selection chose: it would be that of the run alone.
    """
    lines = {} if run.selected else _spent(run)
    columns = [
        (f"{unit_in_words(unit, run)}, {observers_in_words(observers)}", dict(values), tone, False)
        for tone, ((unit, values), observers) in enumerate(lines.items(), start=1)
    ]
    tones = {
        (unit, observer): tone
        for tone, ((unit, _), observers) in enumerate(lines.items(), start=1)
        for observer in observers
    }
    budget = number(run.budget.get("epsilon"))
    return build(
        "epsilon",
        "Epsilon spent",
        columns,
        note="By RDP during the run; the full dot at the end is the reported figure, by PLD.",
        format="epsilon",
        may_log=True,
        lines=[] if budget is None else [{"y": budget, "label": f"budget {budget:g}"}],
        marks=[*_proven_marks(run, tones), *(_published_marks(run) if columns else [])],
    )


def _proven_marks(run: Run, tones: dict[tuple[str, str], int]) -> list[dict[str, Any]]:
    """The reported epsilon at the end of each line."""
    marks = {}
    for claim in run.proven if run.result is not None else []:
        tone = tones.get((str(claim.get("unit")), str(claim.get("observer"))))
        value = number(claim.get("epsilon"))
        if value is not None and tone is not None:
            label = {"text": figure(value), "label": f"proven for {whose(claim)}", "hollow": False}
            marks[tone] = {"x": run.done, "y": value, "tone": tone} | label
    return list(marks.values())


def _published_marks(run: Run) -> list[dict[str, Any]]:
    return [
        {"x": run.done, "y": value, "text": f"{value:.3g}", "tone": 0, "hollow": True}
        | {"label": f"published for {UNITS.get(str(claim.get('unit')), '')}, not proven"}
        for claim in run.published
        if (value := number(claim.get("epsilon"))) is not None
    ]


def unit_in_words(unit: str, *runs: Run | None) -> str:
    """`a simulated client`, where any of the runs has such clients, or `a client`."""
    return whose(
        {"unit": unit, "simulated": unit == "client" and any(run is not None and run.simulated for run in runs)}
    )


def _spent(run: Run) -> dict[tuple[str, tuple[tuple[int, float], ...]], list[str]]:
    """Epsilon by round for each unit, and the observers for whom it is the same."""
    spent: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for line in run.metrics:
        for claim in line.get("proven", []):
            value = number(claim.get("epsilon"))
            if value is not None:
                spent.setdefault((str(claim.get("unit")), str(claim.get("observer"))), []).append(
                    (line["round"], value)
                )
    grouped: dict[tuple[str, tuple[tuple[int, float], ...]], list[str]] = {}
    for (unit, observer), values in spent.items():
        grouped.setdefault((unit, tuple(values)), []).append(observer)
    return grouped


def observers_in_words(observers: Sequence[str]) -> str:
    """The observers of one claim: `all`, or `released models, server`."""
    if set(observers) == set(OBSERVERS):
        return "all"
    return ", ".join(OBSERVERS.get(each, each) for each in observers)


def _clip_and_noise(run: Run) -> Plot | None:
    clip, noise = column(run.metrics, "clip"), column(run.metrics, "noise")
    drawn_on_sum = any(noise.values())
    on_updates = run.flat_config().get("per_update.noise_multiplier")
    note = "The clip norm of an update"
    if drawn_on_sum:
        note += ", and the standard deviation of the noise on their sum"
    elif on_updates is not None:
        note += f"; each update gets noise of {on_updates} times that"
    return build(
        "clip",
        "Clip norm and noise" if drawn_on_sum else "Clip norm",
        [("clip norm", clip, 1, False), ("noise on the sum", noise if drawn_on_sum else {}, 2, False)],
        note=f"{note}.",
        may_log=True,
    )


def _communication(run: Run) -> Plot | None:
    sent = column(run.metrics, "bytes_sent")
    return build(
        "bytes",
        "Communication",
        [("sent by clients", sent, 1, False)],
        note=f"Bytes that clients send to the server in a round; {in_bytes(sum(sent.values()))} in total.",
        format="bytes",
    )


def _clients(run: Run) -> Plot | None:
    bad = column(run.metrics, "bad_updates")
    equal = run.flat_config().get("aggregate.weights") == "equal"
    return build(
        "clients",
        "Clients in a round",
        [
            ("took part", column(run.metrics, "clients"), 1, False),
            ("expected", column(run.metrics, "expected_clients"), 0, True),
            ("updates refused", bad if any(bad.values()) else {}, 2, False),
        ],
        note="Sums are divided by the expected number, which is public, not by the actual one." if equal else "",
    )


def _others(run: Run) -> list[Plot | None]:
    """A plot for each further metric of a method."""
    names: dict[str, Any] = {}
    for line in run.metrics:
        names |= {name: None for name, value in line.items() if number(value) is not None}
    others = [name for name in names if name not in _KNOWN | {run.scores.headline}][:_MOST_OTHERS]
    return [
        build(f"other-{place}", name.replace("_", " "), [(name, column(run.metrics, name), 1, False)], may_log=True)
        for place, name in enumerate(others)
    ]
