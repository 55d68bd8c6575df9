"""Noise for many clients at once: normal, independent, and each client's own whoever is computed beside it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from scipy import stats

from shoal import kernels
from shoal.kernels import compiled
from shoal.random import normals as module
from shoal.random.noise_source import Product
from shoal.random.normals import add_normals, by_operations, loop_in_c, normals
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Keystream, Streams

STREAMS = Streams(11)

in_c = pytest.mark.skipif(loop_in_c() is None, reason="needs a C compiler")


def drawn(clients, size, *, steps=1, numbers=(0, 0), scales=None, purpose="step noise", kernels=True):
    into = torch.zeros(len(clients), size)
    source = normals(STREAMS, purpose, numbers, clients, into, kernels=kernels)
    wanted = torch.ones(len(clients)) if scales is None else torch.tensor(scales)
    out = []
    for _ in range(steps):
        into.zero_()
        source.add(into, wanted)
        out.append(into.clone())
    return torch.stack(out)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.statistical(false_alarm=4e-7)
def test_numbers_are_normal(kernels):
    """Kolmogorov and Smirnov on a million numbers, variance, least and greatest maximum, 1e-7 each at most; a
    variance 1% off fails every time."""
    numbers = drawn([0], 1_000_001, kernels=kernels).flatten().double()
    assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-7
    assert abs(float(numbers.square().mean()) - 1) < 5.33 * (2 / 1e6) ** 0.5
    assert 4.3 < float(numbers.abs().max()) < 7.5


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_client_gets_its_own_numbers_whoever_is_beside_it(size):
    together, alone = drawn([3, 5, 9], size, steps=2), drawn([5], size, steps=2)
    assert torch.equal(together[:, 1:2], alone)


@pytest.mark.statistical(false_alarm=4.2e-8)
def test_clients_steps_rounds_attempts_and_purposes_share_nothing():
    """21 correlations of 20,000 numbers; |r| < 6/sqrt(n) fails by chance with 2e-9 a pair."""
    size = 20_000
    rows = [*drawn([0, 1], size, steps=2).flatten(0, 1), *drawn([0], size, numbers=(1, 0))[0]]
    rows += [*drawn([0], size, numbers=(0, 1))[0], *drawn([0], size, purpose="step count")[0]]
    table = torch.corrcoef(torch.stack(rows))
    assert float((table - torch.eye(len(rows))).abs().max()) < 6 / size**0.5


@pytest.mark.statistical(false_alarm=1.2e-8)
def test_pieces_of_a_long_vector_share_nothing(monkeypatch):
    """Six correlations, 2e-9 each."""
    monkeypatch.setattr(module, "PIECE", 5_000)
    pieces = drawn([0], 20_000)[0, 0].view(4, 5_000)
    assert float((torch.corrcoef(pieces) - torch.eye(4)).abs().max()) < 6 / 5_000**0.5
    assert torch.equal(drawn([7, 0], 20_000)[0, 1], pieces.flatten())


@pytest.mark.statistical(false_alarm=1e-8)
def test_the_halves_of_a_vector_are_independent():
    """Both come from the same radii: their squares too must not be correlated. 2e-9, and 5e-9 for squares' tails."""
    halves = drawn([0], 200_000)[0, 0].view(2, -1)
    for pair in (halves, halves.square()):
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 6 / 100_000**0.5


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("scale", [1e-25, 1e-30, 1e30])
@pytest.mark.statistical(false_alarm=1e-15)
def test_a_scale_may_be_small_or_great(scale, kernels):
    """Its square would be 0, or infinite, in float32. 2% of 100,000 numbers are 9 standard deviations."""
    found = drawn([0], 100_000, scales=[scale], kernels=kernels).double() / scale
    assert float(found.std()) == pytest.approx(1.0, rel=0.02)


@pytest.mark.slow
def test_scales_are_each_clients_own_and_zero_draws_nothing():
    first = drawn([0, 1, 2], 1001, steps=2, scales=[2.0, 0.0, 0.5])
    plain = drawn([0, 1, 2], 1001, steps=2)
    torch.testing.assert_close(first[:, 0], 2 * plain[:, 0])
    torch.testing.assert_close(first[:, 2], 0.5 * plain[:, 2])
    assert not first[:, 1].any()


@in_c
@pytest.mark.parametrize("size", [0, 1, 2, 7, 1001, 600_001])
def test_the_loop_in_c_gives_the_same_numbers(size):
    scales = [2.0, 0.0, 0.5, -1.0]
    with_it, without = (
        drawn([3, 5, 9, 11], size, steps=2, scales=scales, kernels=kernels) for kernels in (True, False)
    )
    torch.testing.assert_close(with_it, without, rtol=1e-5, atol=3e-6)


@in_c
@pytest.mark.parametrize("like", [torch.zeros(2, 40)[:, :33], torch.zeros(33, 2).t(), torch.zeros(2, 33).double()])
def test_vectors_that_lie_otherwise_in_memory(like):
    keystreams = [[Keystream(bytes([k] * 16)) for k in (1, 2)] for _ in range(2)]
    found, plain = like, torch.zeros(2, 33)
    add_normals(found, torch.tensor([1.0, 2.0]), keystreams[0], None, loop_in_c())
    add_normals(plain, torch.tensor([1.0, 2.0]), keystreams[1])
    torch.testing.assert_close(found.float(), plain, rtol=1e-5, atol=3e-6)


@pytest.mark.slow
@in_c
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("-2 * logarithm", "-1.99f * logarithm"),
        ("quarters & 2 ?", "quarters & 1 ?"),
        ("e == 0 ? -left", "e == 1 ? -left"),
        ("(double)number + low", "(double)number + 0.5"),
        ("*first += sum + x", "*first += x"),
        ("*restrict second = first + half", "*restrict second = first"),
        ("q = scale * radius_of(numbers[l])", "q = scale * radius_of(numbers[j])"),
        ("r = scale * radius_of(numbers[j])", "r = scale * radius_of(numbers[j] | INT32_MIN)"),
        ("other[l], q, angles[l]", "other[l], q, angles[l] & INT32_MAX"),
    ],
)
def test_a_loop_that_gives_other_numbers_is_not_used(right, wrong, tmp_path, monkeypatch):
    """As a compiler might that was told to be careless."""
    source = Path(module.__file__).with_suffix(".c").read_text()
    assert source.count(right) == 1
    (tmp_path / "normals.c").write_text(source.replace(right, wrong))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nobody else shall ever load it
    broken = compiled(tmp_path / "normals.c")
    assert broken is not None
    monkeypatch.setattr(module, "compiled", lambda source: broken)
    assert loop_in_c.__wrapped__() is None


@pytest.mark.parametrize("compiler", [None, "false", "no-such-compiler"])
def test_without_a_compiler_there_is_no_loop(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "COMPILER", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels._compiled.cache_clear()
    try:
        assert loop_in_c.__wrapped__() is None
    finally:
        kernels._compiled.cache_clear()
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.statistical(false_alarm=2e-7)
def test_on_cuda_too():
    """1e-7 a client, and a correlation at 2e-9."""
    into = torch.zeros(3, 1_000_001, device="cuda")
    source = normals(STREAMS, "step noise", (0, 0), [4, 5, 6], into)
    source.add(into, torch.tensor([1.0, 0.0, 2.0], device="cuda"))
    first = into.cpu().double()
    assert stats.kstest(first[0].numpy(), "norm").pvalue > 1e-7
    assert stats.kstest(first[2].numpy() / 2, "norm").pvalue > 1e-7
    assert not first[1].any()
    source.add(into.zero_(), torch.ones(3, device="cuda"))
    assert abs(float(torch.corrcoef(torch.stack([first[0], into.cpu().double()[0]]))[0, 1])) < 6e-3


def philox(key, counter, third):
    """Ten rounds of Philox 4x32 (Salmon et al. 2011) at step 0, in whole numbers of 64 bits."""
    low, keys = 2**32 - 1, (key & (2**32 - 1), key >> 32 & (2**32 - 1))
    words = [counter, torch.zeros_like(counter), torch.full_like(counter, third), torch.zeros_like(counter)]
    for turn in range(10):
        k, m = (keys[0] + turn * 0x9E3779B9) & low, (keys[1] + turn * 0xBB67AE85) & low
        one, other = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [other >> 32 & low ^ words[1] ^ k, other & low, one >> 32 & low ^ words[3] ^ m, one & low]
    return words


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_a_radius_is_that_of_its_bits():
    """32, six more that the angle lends, and 128 in their place where the first 18 are zero: here in float64."""
    from shoal.random.philox import LENT, RARE

    into = torch.zeros(1, 2**25, device="cuda")
    normals(STREAMS, "x", (), [0], into).add(into, torch.ones(1, device="cuda"))
    found = into.double().view(-1, 2, 2).square().sum(2).sqrt()
    key, counter = STREAMS.key("x", 0), torch.arange(2**23, device="cuda")
    words, shortest = philox(key, counter, 0), 2**32
    for pair in range(2):
        number, angle = words[2 * pair : 2 * pair + 2]
        rare = number < RARE
        low = ((angle & LENT).double() + 0.5) / 64
        more = torch.full_like(low[rare], 0.5)
        for word in reversed(philox(key, counter[rare], pair + 1)):
            more = (word + more) * 2.0**-32
        low[rare] = more
        left = (2**32 - 1 - number + low) * 2.0**-32
        radius = torch.where(number < 2**31, ((number + low) * 2.0**-32).log(), torch.log1p(-left)).mul(-2).sqrt()
        torch.testing.assert_close(found[:, pair], radius, rtol=1e-5, atol=0)
        shortest = min(shortest, int(number.min()))
    assert shortest < 2**10, "where too few bits would show"


def test_a_thread_may_begin_with_nothing_to_draw():
    """As where no parameter of an update was selected."""
    nothing = torch.zeros(2, 0)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(add_normals, nothing, torch.ones(2), [Keystream(bytes(16)), Keystream(bytes(16))]).result()
    assert nothing.shape == (2, 0)


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("start", "out", "width"), [(840, 50, 36), (0, 33, 36), (100, 1, 4004)])
def test_a_product_that_is_added_with_the_noise_is_the_product_and_the_same_noise(
    start, out, width, device, monkeypatch
):
    monkeypatch.setattr(module, "WORTH_IT", 1)
    monkeypatch.setattr(module, "BLOCK", 200)
    into = torch.zeros(3, 5000, device=device)
    sums = torch.linspace(-1, 1, 15_000).view(3, 5000).to(device)
    sums[:, start : start + width * out] = 0
    rows, grads = (torch.linspace(-1, 2, 15 * size).view(3, 5, size).to(device) for size in (width, out))
    scales = torch.tensor([1.0, 0.0, 2.0], device=device)
    product, none = Product(start, rows, grads, -0.3), Product(start, 0 * rows, 0 * grads, -0.3)
    found = []
    for given, beside in ((product, sums.clone()), (none, torch.zeros_like(sums))):
        source = normals(STREAMS, "step noise", (0, 0), [1, 2, 3], into, fused=True)
        assert source.takes(given)
        found.append(torch.zeros_like(into))
        source.add(found[-1], scales, beside, [given])
        assert not beside.any(), "taken"
    fused, noise = found
    made = sums.clone()
    made[:, start : start + width * out] = (-0.3 * grads.transpose(1, 2) @ rows).flatten(1)
    torch.testing.assert_close(fused, noise + made, rtol=1e-4, atol=1e-5)
    assert not noise[1].any()
    assert 0.9 < float(noise[0].std()) < 1.1
    assert len(set(noise[0].tolist())) > 4_990, "no stream comes twice"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("streams", [STREAMS, SecureStreams()], ids=["research", "secure"])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_sum_and_its_noise_meet_a_great_number_as_one(streams, device, kernels):
    """At 2^20 a float32 has steps of 1/8: a sum of 0.06 alone would be lost there, or counted double."""
    if device == "cuda" and (streams.mode == "secure" or not kernels):
        pytest.skip("secure mode draws on a CPU")
    size = 100_000
    noise, great = torch.zeros(1, size, device=device), torch.full((1, size), 2.0**20, device=device)
    for into in (noise, great):
        sums = torch.full_like(into, 0.06)
        normals(streams, "x", (), [0], into, kernels=kernels).add(into, into.new_full((1,), 0.05), sums)
        assert not sums.any(), "taken"
    exact, clear = 2.0**20 + noise.double(), noise * 32 % 1 != 0  # else halfway after rounding: it may go either way
    assert torch.equal(great[clear], exact[clear].float())
    assert 0.2 < float((great > 2.0**20).float().mean()) < 0.8, "noise decides where it goes"


@pytest.mark.parametrize("device", DEVICES)
def test_a_client_without_noise_gets_its_sum_all_the_same(device):
    into, sums = torch.ones(2, 9, device=device), torch.full((2, 9), 2.0, device=device)
    normals(STREAMS, "x", (), [0, 1], into).add(into, torch.tensor([0.0, 1.0], device=device), sums)
    assert torch.equal(into[0].cpu(), torch.full((9,), 3.0))
    assert not torch.equal(into[1].cpu(), torch.full((9,), 3.0))


@pytest.mark.parametrize("kernels", [True, False])
def test_too_few_words_to_extend_with_are_noticed(kernels):
    """It happens with a chance below 1e-24; noise with few bits is not drawn even then."""
    if kernels and loop_in_c() is None:
        pytest.skip("needs a C compiler")
    loop = loop_in_c() if kernels else by_operations
    assert not loop(torch.zeros(1, 200), torch.ones(1), torch.zeros(1, 204, dtype=torch.int32))
    assert not loop(torch.zeros(1, 4), torch.ones(1), torch.zeros(1, 10, dtype=torch.int32)), "two of eight too few"
    assert loop(torch.zeros(1, 2), torch.ones(1), torch.zeros(1, 6, dtype=torch.int32))
