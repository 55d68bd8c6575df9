"""Results, data sets, claims and certificates in a few words, and as tables in a notebook."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

import shoal
from shoal.accounting.claims import Proven, Published
from shoal.errors import ConfigError
from shoal.report.certificate import certificate
from support.pages import HOSTILE
from support.tiny import PRIVATE, dataset, play, unbalanced

CLAIM = Proven("client", "release", 7.891, 1e-5, "pld", "K is public", "zero-out", simulated=True)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return play(tmp_path_factory.mktemp("runs"), PRIVATE)


def test_a_claim_is_short_and_says_of_simulated_clients():
    assert repr(CLAIM) == "Proven(simulated client, release: epsilon 7.891 at delta 1e-5)"
    assert repr(Proven("record", "server", None, None, None, "no noise")) == "Proven(record, server: none)"
    assert "not proven" in repr(Published("client", 8.0, 1e-5, "a recipe"))
    assert "simulated clients" in CLAIM._repr_html_()


def test_a_result_and_its_claims_are_short_and_name_what_is_proven(result):
    least = next(c for c in result.proven if (c["unit"], c["observer"]) == ("client", "release"))
    said = repr(result)
    assert len(said) < 300
    assert f"accuracy {result.accuracy:.4g}" in said
    assert Proven(**least).brief() in said
    assert repr(result.proven).count("epsilon") == sum(claim["epsilon"] is not None for claim in result.proven)
    shown = result._repr_html_()
    assert "released models" in shown
    assert "report.html" in shown


@pytest.mark.slow
def test_a_result_without_a_claim_says_so(result, tmp_path):
    plain = play(tmp_path, {key: value for key, value in PRIVATE.items() if "." not in key} | {"algorithm": "fedavg"})
    assert "nothing is proven" in repr(plain)


def test_a_data_set_names_its_rows_shape_and_owners():
    said = repr(dataset())
    assert said == "Dataset('clients', train 54, held out 18, shape (4,), classes 2, owners 12 clients)"
    assert "<td" in unbalanced()._repr_html_()


@pytest.mark.slow
def test_words_of_users_are_escaped(result):
    data = shoal.from_arrays([[0.0], [1.0]] * 4, [0, 1] * 4, name=HOSTILE)
    assert "<script" not in data._repr_html_()


def test_a_certificate_says_whether_it_is_signed(result):
    held = certificate(result.run)
    assert repr(held).endswith("UNSIGNED)")
    assert held["digest"] in held._repr_html_()


class Handle:
    def __init__(self, seen):
        self.seen = seen

    def update(self, html):
        self.seen.append(html)


def notebook(monkeypatch, seen):
    """IPython as a notebook's kernel has it."""
    shown, shell = ModuleType("IPython.display"), ModuleType("IPython")
    shown.HTML = str
    shown.display = lambda html, display_id: seen.append(html) or Handle(seen)
    shell.get_ipython = lambda: SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)


@pytest.mark.slow
def test_in_a_notebook_a_bar_follows_the_rounds_beside_the_users_callbacks(tmp_path, monkeypatch):
    seen, lines = [], []
    notebook(monkeypatch, seen)
    play(tmp_path, PRIVATE, on_round=lines.append)
    assert 'value="0" max="6"' in seen[0]
    assert "round 6 of 6, accuracy" in seen[-1]
    assert "for a client (zero-out)" in seen[-1]
    assert len(lines) == 6
    seen.clear()
    play(tmp_path, PRIVATE, progress=False)
    assert seen == []


def test_elsewhere_a_bar_that_is_asked_for_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="notebooks alone"):
        play(tmp_path, PRIVATE, progress=True)
