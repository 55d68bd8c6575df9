"""What a model is trained for: the loss of a record, its target, and the figures that say how well it is done."""

from shoal.tasks.choose import TASKS, choose
from shoal.tasks.classification import Classification
from shoal.tasks.multi_label import MultiLabel
from shoal.tasks.next_token import NextToken
from shoal.tasks.own import Own
from shoal.tasks.regression import Regression
from shoal.tasks.settings import TaskSettings
from shoal.tasks.task import Figures, Task

__all__ = [
    "TASKS",
    "Classification",
    "Figures",
    "MultiLabel",
    "NextToken",
    "Own",
    "Regression",
    "Task",
    "TaskSettings",
    "choose",
]
