"""What the check refuses, and the fix for BatchNorm."""

import pytest
import torch
from torch import nn

from shoal.errors import ModelError
from shoal.gradients import network
from shoal.models import check, count, mixing_layers, replace_batchnorm
from shoal.tasks import Own

SHAPE = (3, 8, 8)


def with_norm(norm):
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.Sequential(norm, nn.ReLU()), nn.Flatten(), nn.Linear(384, 4)
    )


class Wrapped(nn.Module):
    """Code of one's own around a linear layer."""

    def __init__(self, act, zero=False):
        super().__init__()
        self.layer, self.act = nn.Linear(5, 4), act
        if zero:
            nn.init.zeros_(self.layer.weight)

    def forward(self, x):
        return self.layer(self.act(x))


class Gives(Wrapped):
    """Gives its output in some other form."""

    def __init__(self, form):
        super().__init__(nn.Identity())
        self.form = form

    def forward(self, x):
        return self.form(super().forward(x))


class Counter(nn.Module):
    """Keeps a running mean of what it sees, and gives nothing of it away in its output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x):
        self.seen += x.mean(0)
        return self.layer(x)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(6), nn.SyncBatchNorm(6), nn.InstanceNorm2d(6, track_running_stats=True)]
)
def test_a_layer_that_mixes_examples_is_refused_with_its_place_and_the_fix(norm):
    with pytest.raises(ModelError, match=rf"layer '1.0' is {type(norm).__name__}.*nn.GroupNorm"):
        check(with_norm(norm), SHAPE, 4, record_level=True)


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 6), nn.InstanceNorm2d(6), nn.LayerNorm([6, 8, 8]), nn.Dropout(0.5)])
def test_a_layer_that_keeps_examples_apart_passes(norm):
    check(with_norm(norm), SHAPE, 4, record_level=True)


def test_batchnorm_passes_where_no_example_level_privacy_is_asked_for_and_is_left_as_it_was():
    model = with_norm(nn.BatchNorm2d(6)).eval()
    check(model, SHAPE, 4, record_level=False)
    assert model[1][0].num_batches_tracked == 0
    assert not model.training


def test_replacing_batchnorm_is_the_fix():
    model = with_norm(nn.BatchNorm2d(6))
    nn.init.constant_(model[1][0].weight, 2.0)
    mended = replace_batchnorm(model)
    check(mended, SHAPE, 4, record_level=True)
    assert mixing_layers(model) == ["1.0"]
    assert mixing_layers(mended) == []
    assert count(mended) == count(model)
    assert torch.equal(mended[1][0].weight, torch.full((6,), 2.0))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(7), nn.BatchNorm1d(64), nn.BatchNorm1d(48, affine=False)])
def test_the_mend_lets_flat_features_through(norm):
    group_norm = replace_batchnorm(norm)
    x = torch.linspace(-1, 1, 2 * norm.num_features).view(2, -1)
    assert isinstance(group_norm, nn.GroupNorm)
    assert group_norm(x).abs().mean() > 0.5


def test_a_batchnorm_that_is_used_twice_is_replaced_in_both_places():
    norm = nn.BatchNorm2d(6)
    mended = replace_batchnorm(nn.Sequential(norm, nn.ReLU(), norm))
    assert mixing_layers(mended) == []
    assert mended[0].weight is mended[2].weight


def test_instance_norm_loses_only_its_statistics():
    mended = replace_batchnorm(with_norm(nn.InstanceNorm2d(6, affine=True, track_running_stats=True)))
    assert isinstance(mended[1][0], nn.InstanceNorm2d)
    check(mended, SHAPE, 4, record_level=True)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    "mix",
    [lambda x: x - x.mean(0), lambda x: x.cumsum(0), lambda x: x.softmax(0), lambda x: x / x.norm()],
)
def test_code_that_mixes_examples_is_found_also_before_a_layer_that_starts_at_zero(mix, zero):
    with pytest.raises(ModelError, match="mixes the records of a batch"):
        check(Wrapped(mix, zero), (5,), 4, record_level=True)
    check(Wrapped(mix, zero), (5,), 4, record_level=False)


class Remembers(nn.Module):
    """Does something with what it holds each time it is run, after it has computed its output."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.slow = nn.Linear(5, 4), nn.Linear(5, 4).requires_grad_(False)
        self.slow.load_state_dict(self.layer.state_dict())
        self.register_buffer("seen", torch.zeros(()))
        self.write, self.last = write, 0.0

    def forward(self, x):
        output = self.layer(x) + self.last
        with torch.no_grad():
            self.write(self, x)
        return output


def count_records(model, x):
    model.seen += len(x)


def count_in_eval(model, x):
    model.seen += 0 if model.training else 1


def follow_the_weights(model, x):
    model.slow.weight.lerp_(model.layer.weight, 0.1)


def keep_outside_buffers(model, x):
    model.last = model.last + float(x.sum())


@pytest.mark.parametrize("level", [{"record_level": True}, {"record_level": False, "noisy_updates": True}])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Counter(), "writes to 'seen'"),
        (Remembers(count_records), "writes to 'seen'"),
        (Remembers(count_in_eval), "writes to 'seen'"),
        (Remembers(follow_the_weights), "writes to 'slow.weight'"),
        (Remembers(keep_outside_buffers), "remembers earlier batches"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)), "writes to 'parametrizations.weight.0._u'"),
    ],
)
def test_a_model_that_keeps_something_of_a_batch_or_of_its_weights_is_refused(model, words, level):
    with pytest.raises(ModelError, match=words):
        check(model, (5,), 4, **level)
    check(model, (5,), 4, record_level=False)


def test_a_model_that_looks_up_words_gets_whole_numbers():
    model = nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(24, 3))
    check(model, (6,), 3, record_level=True)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(5, 3), r"outputs of shape \(3, 3\) .* classification needs \(3, 4\)"),
        (nn.Linear(6, 4), r"cannot take records of shape \(5,\): RuntimeError"),
        (Wrapped(lambda x: x / 0), "NaN or infinite"),
        (nn.ReLU(), "no parameters to train"),
        (nn.Linear(5, 4).double(), r"parameters of torch.float64; .* give model.float\(\)"),
        (nn.LazyLinear(4), "lazy layers"),
        (Gives(lambda y: {"a": y, "b": y}), "gives a dict of a, b; it must give a tensor"),
        (Gives(lambda y: None), "gives a NoneType; it must give a tensor"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(model, words):
    with pytest.raises(ModelError, match=words):
        check(model, (5,), 4, record_level=False)


def test_the_check_leaves_weights_and_random_state_alone():
    model = Wrapped(nn.Dropout(0.5))
    weights, state = model.layer.weight.clone(), torch.get_rng_state()
    check(model, (5,), 4, record_level=True)
    assert torch.equal(model.layer.weight, weights)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_callers_autocast_is_no_memory_of_the_model():
    """It keeps shortened weights between two passes."""
    with torch.autocast("cpu", torch.bfloat16):
        check(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), (1, 8, 8), 10, record_level=True)


def test_batchnorm_is_refused_where_noise_would_spoil_its_statistics():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    check(model, (1, 8, 8), 10, record_level=False)
    with pytest.raises(ModelError, match=r"layer '2' is BatchNorm1d, which keeps running statistics.*GroupNorm"):
        check(model, (1, 8, 8), 10, record_level=False, noisy_updates=True)


def of_batch_mean(outputs, targets):
    losses = (outputs[:, 0] - targets).square()
    return losses - losses.mean()


def of_target_rate(outputs, targets):
    return (outputs[:, 0] - targets).square() * (1 + targets.mean())


def of_pairs(outputs, targets):
    """Each record against those with a lower target, as rankings are learnt."""
    above = (targets[:, None] > targets).to(outputs.dtype)
    return (nn.functional.softplus(outputs[:, 0] - outputs[:, :1]) * above).sum(1)


MIXING_LOSSES = pytest.mark.parametrize("loss", [of_batch_mean, of_target_rate, of_pairs])


@MIXING_LOSSES
def test_a_loss_that_mixes_records_is_refused_at_record_level(loss):
    model, task = nn.Linear(4, 1), Own(own_loss=loss)
    targets = torch.zeros(1)
    check(model, (4,), task, record_level=False, noisy_updates=True, targets=targets)
    with pytest.raises(ModelError, match=r"task\.loss mixes the records"):
        check(model, (4,), task, record_level=True, targets=targets)


@MIXING_LOSSES
def test_a_loss_that_mixes_records_never_mixes_clients(loss):
    targets = Own(own_loss=loss).example_targets(3, torch.zeros(1))
    assert not network(nn.Linear(4, 1), torch.randn(3, 4), targets, losses=loss).batched


def test_a_loss_that_fails_is_named_before_training():
    for loss in (lambda outputs, targets: outputs @ targets, lambda outputs, targets: 0.5):
        with pytest.raises(ModelError, match=r"task\.loss cannot take outputs of shape \(3, 2\)"):
            check(nn.Linear(4, 2), (4,), Own(own_loss=loss), record_level=False)


class Typed(nn.Module):
    """Words with a type, of which there is one, as in RoBERTa; their mean over the batch is taken away."""

    def __init__(self):
        super().__init__()
        self.words, self.types, self.layer = nn.Embedding(6, 4), nn.Embedding(1, 4), nn.Linear(4, 2)

    def forward(self, x):
        words = (self.words(x) + self.types(torch.zeros_like(x))).mean(1)
        return self.layer(words - words.mean(0))


def test_an_embedding_of_one_word_does_not_hide_that_records_mix():
    with pytest.raises(ModelError, match="mixes the records"):
        check(Typed(), (5,), 2, record_level=True, tokens=True)
