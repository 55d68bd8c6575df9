"""What leaks: attacks on gradients, by honest and by malicious servers, and membership inference, on any method."""

from shoal.attacks.attack_recipes import RECIPES, Recipe, recipe
from shoal.attacks.leakage import Aim, Outcome, attack
from shoal.attacks.observe import Seen, Victims, observe

__all__ = ["RECIPES", "Aim", "Outcome", "Recipe", "Seen", "Victims", "attack", "observe", "recipe"]
