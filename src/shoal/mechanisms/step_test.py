"""The test of a local step: whether the loss on another batch, less what it was before, is low enough, with noise."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepTest:
    """What a step must pass to be kept.

    Attributes:
        batch: Records in a Poisson batch of the test, expected; sums of losses are divided by it.
        clip: The largest change of the mean loss that counts, up or down.
        noise_multiplier: The noise, in units of 2 x clip.
        threshold: A step is kept where the noisy change is below threshold x clip.
        updates: The most steps of a round that are kept; None: all that pass.
    """

    batch: int
    clip: float
    noise_multiplier: float
    threshold: float
    updates: int | None

    @property
    def scale(self) -> float:
        """The standard deviation of the noise."""
        return 2 * self.clip * self.noise_multiplier

    def clipped(self, changes: Tensor) -> Tensor:
        """Changes of the loss, each from -clip to clip; one that is no number counts as the worst."""
        return changes.nan_to_num(nan=self.clip).clamp(-self.clip, self.clip)

    def passed(self, noisy: Tensor) -> Tensor:
        """Which of these noisy changes are low enough."""
        return noisy < self.threshold * self.clip
