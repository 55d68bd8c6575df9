"""What leaks: attacks on gradients (DLG, iDLG, CPL, GradInv, imprint, trap weights) and membership inference, on any method."""

from shoal.attacks.attack_recipes import RECIPES, Recipe, recipe
from shoal.attacks.leakage import Aim, Outcome, attack
from shoal.attacks.observe import Seen, Victims, observe

__all__ = ["RECIPES", "Aim", "Outcome", "Recipe", "Seen", "Victims", "attack", "observe", "recipe"]
