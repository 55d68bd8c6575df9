"""Selective release: a step is tried, tested on other records, and kept only where the noisy test is passed.

Fu et al. (2023), Algorithm 2, charge the steps that are kept, and none that is thrown away. That is refuted (Xie &
Huang (2026)): which steps are kept depends on the data. Here every step that may be tried is charged, with its test:
given the noisy gradient and the noisy change of the loss, all that follows is post-processing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shoal.accounting.events import Compose, Event, TwoLevel, Unbounded
from shoal.accounting.theorems import Observer, Unit
from shoal.errors import ConfigError
from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.mechanism import NO_NOISE, Round, refuse_unheld_noise
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.schedules import Schedule, require_scale
from shoal.mechanisms.step_test import StepTest
from shoal.random.secure_streams import STEPS, charged

TAIL = 2.0  # standard deviations of the test's noise, in an audit of the paper's claim
UNCOUNTED = Unbounded("it is not public how many steps are tried: set local.steps")


@dataclass(frozen=True)
class SelectiveRelease(StepNoise):
    """Boundary `per_step`: noise in every step, and a noisy test of it, which undoes the steps that fail.

    With C = `test_clip`, the change of the mean loss on another Poisson batch is clipped to [-C, C], and
    N(0, (2 C test_noise_multiplier)^2) is added. A step is kept where the result is below `threshold` x C.

    Attributes:
        test_batch: Records in a batch of the test, expected: each enters with probability test_batch/n.
        test_clip: The largest change of the loss that counts, up or down.
        test_noise_multiplier: The noise of the test, in units of 2 C, by which one record can move it.
        threshold: A step is kept where the noisy change of the loss is below this x C.
        updates: After this many steps that were kept, a client tries no more in this round; local.steps is how many
            it tries at most, and what is charged.
    """

    test_batch: int = 256
    test_clip: float = 0.001
    test_noise_multiplier: float = 1.0
    threshold: float = -1.0
    updates: int | None = None
    alike: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_scale("per_step.test_clip", self.test_clip)
        for name, least in (("test_batch", 1), ("test_noise_multiplier", 0), ("updates", 1)):
            if (value := getattr(self, name)) is not None and not value >= least:
                raise ConfigError(f"per_step.{name} must be >= {least}, got {value}")
        if self.threshold != self.threshold:
            raise ConfigError("per_step.threshold must be a number, got nan")

    @property
    def test(self) -> StepTest:
        """The test that a step must pass."""
        return StepTest(self.test_batch, self.test_clip, self.test_noise_multiplier, self.threshold, self.updates)

    def with_noise(self, noise: Schedule) -> Self:
        """The same with other noise, that of the test in proportion; without any, all steps are kept."""
        largest, before = (max(each.values(100)) for each in (noise, self.noise_schedule()))
        if largest == 0:
            return replace(super().with_noise(noise), test_noise_multiplier=0.0, threshold=float("inf"))
        scale = largest / before if before else 1.0
        return replace(super().with_noise(noise), test_noise_multiplier=scale * self.test_noise_multiplier)

    def refuse_unfit(self, t: int, total: int) -> None:
        """Raise a ConfigError where the noise of the test cannot be represented."""
        refuse_unheld_noise("2 x per_step.test_clip x per_step.test_noise_multiplier", self.test.scale, t, total)

    def event(self, round: Round, unit: Unit, observer: Observer) -> Event:
        """Every step that may be tried, and its test; client sampling, which both share, amplifies neither."""
        if (tried := round.steps) is None:
            return UNCOUNTED
        round = replace(round, clients=round.clients if round.clients.separated else Clients("all"))
        # a client's own noise is all that counts for it: what others add depends on which of their steps are kept
        steps = super().event(round, unit, "server" if unit == "client" else observer)
        if isinstance(steps, Unbounded):
            return steps
        noise = self.test_noise_multiplier
        if noise == 0:
            return NO_NOISE
        if round.setting.secure:
            noise = charged(noise, STEPS)
        if unit == "client":  # whatever it holds
            return Compose((steps, TwoLevel(1.0, 1.0, tried, noise, local="none")))
        other = Records("poisson", self.test_batch, max_per_user=round.records.max_per_user)
        tests = self._of_records(replace(round, records=other), unit, 1.0, noise)
        return tests if isinstance(tests, Unbounded) else Compose((steps, tests))

    def limits(self, rounds: int) -> str:
        """The noise on gradients, and on the test."""
        return f"{super().limits(rounds)}; {self.test_noise_multiplier:g} x on the test of each step"

    def audited(self) -> Self:
        """The same as an audit runs it: every step passes its test, which has so much noise that it costs little."""
        largest = max(self.noise_schedule().values(100))
        return replace(self, threshold=float("inf"), test_noise_multiplier=4 * largest)

    def until_kept(self, batch: int) -> Self:
        """The same where of steps that lower the loss 1 in 44 is kept, and the first that is ends the round."""
        noise = max(self.noise_schedule().values(100)) / 4  # so that the claim is mostly about the test
        low = -1 - 2 * TAIL * noise
        return replace(self, test_batch=batch, test_clip=1e-5, test_noise_multiplier=noise, threshold=low, updates=1)
