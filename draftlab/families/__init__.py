"""The package's families of draft heads, one file for each.

`docs/guide/add_a_family.md` explains how to add one, in this folder or outside of the package.
"""

from draftlab.families.dflash import Dflash
from draftlab.families.dflash2 import Dflash2
from draftlab.families.dspark import Dspark
from draftlab.families.eagle import Eagle
from draftlab.families.eagle3 import Eagle3
from draftlab.families.eagle_llama4 import EagleLlama4
from draftlab.families.mtp import Mtp
from draftlab.families.peagle import Peagle
from draftlab.heads.family import Family, register

__all__ = [
    "Dflash",
    "Dflash2",
    "Dspark",
    "Eagle",
    "Eagle3",
    "EagleLlama4",
    "Family",
    "Mtp",
    "Peagle",
    "register",
]

for _family in (Eagle3(), Peagle(), Dspark(), Dflash(), Dflash2(), Eagle(), EagleLlama4(), Mtp()):
    register(_family)
