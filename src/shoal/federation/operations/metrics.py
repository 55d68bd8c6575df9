"""The federation's status as Prometheus text.

Nothing here depends on who was sampled for a round, where sampling is secret: no number of answers, no bytes, no
figure of a round, and none of the usual metrics of the process, whose processor time grows with each answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from shoal.accounting.rounding import plain
from shoal.federation.operations.monitor import Monitor
from shoal.federation.operations.status import STATES, Status


def metrics_text(monitor: Monitor) -> bytes:
    """The metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Federation(monitor))
    return generate_latest(registry)


class _Federation(Collector):
    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def collect(self) -> Iterator[Metric]:
        monitor, status = self._monitor, self._monitor.status
        yield GaugeMetricFamily("shoal_up", "1 once the run has begun.", float(status is not None))
        yield GaugeMetricFamily(
            "shoal_seen_timestamp_seconds", "When the coordinator last looked after its sites.", monitor.seen
        )
        events = CounterMetricFamily("shoal_events", "Joins, refusals, strikes and so on.", labels=["kind"])
        for kind, count in sorted(monitor.events()[0].items()):
            events.add_metric([kind], count)
        yield events
        epsilon = GaugeMetricFamily(
            "shoal_epsilon", "The epsilon proven so far, by RDP.", labels=["unit", "observer", "delta"]
        )
        for claim in monitor.proven:
            epsilon.add_metric([claim["unit"], claim["observer"], plain(claim["delta"])], claim["epsilon"])
        yield epsilon
        if monitor.answered is not None:
            about = "Sites that answered the last round; only where all are asked."
            yield GaugeMetricFamily("shoal_sites_answered", about, monitor.answered)
        if status is not None:
            yield from _of_run(status)


def _of_run(status: Status) -> Iterator[Metric]:
    run = GaugeMetricFamily("shoal_run_info", "The run.", labels=["run", "algorithm"])
    run.add_metric([status.run, status.algorithm], 1)
    yield run
    yield GaugeMetricFamily("shoal_rounds_done", "Rounds that are done.", status.done)
    yield GaugeMetricFamily("shoal_rounds_planned", "Rounds that are planned.", status.rounds)
    if status.budget is not None:
        budget = GaugeMetricFamily("shoal_epsilon_budget", "The most epsilon to spend.", labels=["unit", "observer"])
        budget.add_metric([status.unit, status.observer], status.budget)
        yield budget
    yield GaugeMetricFamily("shoal_sites_planned", "Sites that the federation has (data.clients).", status.places)
    sites = GaugeMetricFamily("shoal_sites", "Sites in each state.", labels=["state"])
    for state in STATES:
        sites.add_metric([state], status.count(state))
    yield sites
    connected = GaugeMetricFamily("shoal_site_connected", "1 while a site takes part.", labels=["site"])
    strikes = GaugeMetricFamily("shoal_site_strikes", "Bad answers of a site.", labels=["site"])
    names = [site.name for site in status.sites]
    for site in status.sites:
        label = site.name if names.count(site.name) == 1 else f"{site.name} ({site.key})"
        connected.add_metric([label], site.state == "connected")
        strikes.add_metric([label], site.strikes)
    yield from (connected, strikes)
