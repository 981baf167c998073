"""Ways for a client to personalize the models that it receives, and `by_own_weights`.

>>> import fedtide as ft
>>> ft.personal.Choice().kind
'choice'
"""

from fedtide.multi.mixture import Mixture
from fedtide.multi.personal import Alone, Choice, Ensemble, FineTuned, Personal, by_own_weights
from fedtide.multi.stacking import Stacking

__all__ = ["Alone", "Choice", "Ensemble", "FineTuned", "Mixture", "Personal", "Stacking", "by_own_weights"]
