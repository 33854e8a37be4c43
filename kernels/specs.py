"""List of the `Spec`s of all ops and of the kernel variants that ship."""

from .attention.spec import SPECS as ATTENTION
from .bias_act.spec import SPECS as BIAS_ACT
from .cross_entropy.spec import SPECS as LOSSES
from .decode_attention.spec import SPECS as DECODE_ATTENTION
from .dropout.spec import SPECS as DROPOUT
from .linear.spec import SPECS as LINEAR
from .norm.spec import SPECS as NORM
from .rotary.spec import SPECS as ROTARY
from .spec import Spec

SPECS: dict[str, Spec] = {
    spec.name: spec
    for specs in (ATTENTION, NORM, LOSSES, BIAS_ACT, ROTARY, DECODE_ATTENTION, DROPOUT, LINEAR)
    for spec in specs
}
VARIANTS = tuple(dict.fromkeys(spec.variants for spec in SPECS.values()))
"""Functions that yield the kernel variants that ship; see `Spec.variants`."""
