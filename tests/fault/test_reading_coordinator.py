"""A coordinator that means to read a site's records, over TLS, from a real `shoal join`: it gets nothing.

With one record a step and a model of zeros the gradient of a linear model is (p - y) x: it shows features and label.
A clip hides them only if it clips. Where clip and learning rate are so small that an update's squares underflow in
float32, its norm is 0, nothing is clipped, and noise of the clip's size hides nothing.
"""

import time

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.accounting.privacy_ledger import Ledger
from shoal.config import configure, to_toml
from shoal.data import load
from shoal.federation.flower.superlink import SuperLink, Tls
from shoal.federation.flower.transport import Transport
from shoal.federation.key_files import read_sites
from shoal.federation.key_making import make_authority, make_site
from shoal.federation.messages import Payload
from shoal.federation.site_records import reader
from shoal.federation.terms import END, ROUND, TERMS, Terms
from shoal.federation.validation import Request
from shoal.mechanisms.setting import Setting
from shoal.training.round_index import RoundIndex
from support.deploy_children import start

PATIENCE = 240.0  # seconds for an answer; a quiet machine needs a hundredth
ATTACK = {
    "algorithm": "fed-sdp",
    "model": "linear",
    "rounds": 1,
    "random": "secure",
    "data.name": "digits",
    "data.clients": 2,
    "clients.sampling": "all",
    "records.batch": 1,
    "local.steps": 1,
    "local.lr": 1e-24,
    "per_update.clip_norm": 1e-30,
    "per_update.noise_multiplier": 6.0,
    "per_update.at": "client",
    "engine.threads": 1,
    "engine.device": "cpu",
}
OPEN = {key: value for key, value in ATTACK.items() if not key.startswith("per_update")} | {"algorithm": "fedavg"}
STRICT = ["--require-epsilon", "8", "--require-noise", "1", "--unit", "record", "--against", "server"]


def written(given):
    """Terms as a hostile coordinator writes them: its configuration need not pass its own checks."""
    numbers = {key: given[key] for key in ("local.lr", "per_update.clip_norm") if key in given}
    digits = load("digits")
    text = to_toml(configure(given | dict.fromkeys(numbers, 0.1234)))
    for key, value in numbers.items():
        name = key.split(".")[1]
        assert f"\n{name} = 0.1234\n" in text
        text = text.replace(f"\n{name} = 0.1234\n", f"\n{name} = {value!r}\n")
    return Terms("run", text, Setting(2, 1, 1, 1, (), False), digits.classes, digits.input_shape, 650, None)


class Coordinator:
    """Speaks to one real site, process and all, over TLS."""

    def __init__(self, folder, *requirements):
        make_authority(folder / "keys", ["127.0.0.1"], 5)
        _, public = make_site(folder, "site")
        public.rename(folder / "keys" / "sites" / public.name)
        tls = Tls(folder / "keys" / "server.pem", folder / "keys" / "server.key")
        self._link = SuperLink("127.0.0.1", 0, tls, list(read_sites(folder / "keys").values()))
        self._transport = Transport(self._link, 2**20)
        words = ["join", f"127.0.0.1:{self._link.port}", "--data", "digits", "--part", "0"]
        words += ["--key", "site.key", "--ca", "keys/ca.pem", "--folder", "own", *requirements]
        self.site = start(folder, "join.log", words)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.site.away()
        self._link.close()

    def ask(self, kind, values, vectors=None):
        (node,) = self._until(lambda: self._transport.connected())
        self._transport.send({node: Payload(values, vectors or {})}, kind, PATIENCE)
        (answer,) = self._until(self._transport.replies)
        assert answer.payload is not None, answer.problem
        return answer.payload

    def _until(self, fact):
        end = time.monotonic() + PATIENCE
        while not (found := fact()):
            assert time.monotonic() < end, self.site.said
            time.sleep(0.02)
        return found

    def ends(self):
        return self.site.ended(time.monotonic() + PATIENCE)


def attacked(folder, given, *requirements):
    """What the coordinator gets of such a round: words of refusal, or an update; and what the site was charged."""
    terms = written(given)
    with Coordinator(folder, *requirements) as coordinator:
        answer = coordinator.ask(TERMS, {"terms": terms.text, "round": 0})
        if "agreed" in answer.values:
            names = Request("run", terms.digest, 0, RoundIndex(0, 1)).names
            answer = coordinator.ask(ROUND, names, {"model": torch.zeros(650)})
            coordinator.ask(END, {"run": "run", "terms": terms.digest, "why": "rounds", "round": 1})
        code = coordinator.ends()
    with Ledger(folder / "own" / "ledger.jsonl") as ledger:
        return answer.values.get("refused"), answer.vectors.get("update"), len(ledger.charged), code


def record_read(update, given):
    """The site's record that the update shows, and its label, if it shows any."""
    weights, biases = update[:640].double().view(10, 64), update[640:].double()
    label = int(biases.argmax())
    features = weights[label] / biases[label]
    own = reader("digits", part=0)(written(given))
    away = (own.train_x.flatten(1) - features).abs().amax(1)
    nearest = int(away.argmin())
    return (nearest, label) if away[nearest] < 1e-3 and own.train_y[nearest] == label else None


@pytest.mark.slow
def test_what_the_attack_reads_where_nothing_is_clipped(tmp_path):
    """Without clip and noise, for which a site that insists on nothing may be asked, one round shows one record."""
    refused, update, charged, code = attacked(tmp_path, OPEN | {"local.lr": 0.1}, "--no-guarantee")
    assert (refused, charged, code) == (None, 1, 0)
    assert record_read(update, OPEN | {"local.lr": 0.1}) is not None


@pytest.mark.slow
def test_unless_its_owner_says_so_a_site_does_not_take_part_in_that(tmp_path):
    refused, update, charged, code = attacked(tmp_path, OPEN | {"local.lr": 0.1})
    assert refused.startswith("nothing is proven for a client against the server: no noise is added (the default")
    assert (update, charged, code) == (None, 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiny",
    [{"per_update.clip_norm": 1e-30, "local.lr": 1e-24}, {"per_update.clip_norm": 1e-12, "local.lr": 1e-10}],
    ids=["beyond float32", "at the edge"],
)
def test_a_clip_too_small_to_clip_is_refused_before_anything_is_charged(tmp_path, tiny):
    given = ATTACK | tiny
    refused, update, charged, code = attacked(tmp_path, given, *STRICT)
    assert update is None, f"the coordinator has read record {record_read(update, given)}"
    assert refused.startswith("per_update.clip_norm is") or "cannot use this configuration" in refused
    assert "clip" in refused or "local.lr" in refused
    assert charged == 0
    assert code == 2
