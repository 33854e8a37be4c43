"""All that is proved, measured and compiled ahead of time: a line for each op's folder."""

from .attention.spec import forms as attention_forms
from .bias_act.spec import SPECS as BIAS_ACT
from .cross_entropy.spec import SPECS as LOSSES
from .cross_entropy.spec import forms as cross_entropy_forms
from .decode_attention.spec import forms as decode_attention_forms
from .dropout.spec import SPECS as DROPOUT
from .norm.spec import SPECS as NORM
from .norm.spec import forms as norm_forms
from .rotary.spec import SPECS as ROTARY
from .rotary.spec import forms as rotary_forms
from .spec import Spec

SPECS: dict[str, Spec] = {
    spec.name: spec for spec in (*NORM, *LOSSES, *BIAS_ACT, *ROTARY, *DROPOUT)
}
FORMS = (
    attention_forms,
    norm_forms,
    cross_entropy_forms,
    BIAS_ACT[0].forms,
    rotary_forms,
    decode_attention_forms,
)
