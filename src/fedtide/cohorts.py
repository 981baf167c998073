"""Who is asked in a round: a method's `cohort`, and its `select`.

>>> import fedtide as ft
>>> ft.cohorts.Arrivals(10).size
10
"""

from fedtide.parts.cohort import Arrivals, Cohort, Everyone, Uniform
from fedtide.parts.select import AtRandom, BySize, Nearest, Oort, Select

__all__ = ["Arrivals", "AtRandom", "BySize", "Cohort", "Everyone", "Nearest", "Oort", "Select", "Uniform"]
