"""All that is proved, measured and compiled ahead of time: a line for each op's folder."""

from .attention.spec import SPECS as ATTENTION
from .attention.spec import forms as attention_forms
from .bias_act.spec import SPECS as BIAS_ACT
from .cross_entropy.spec import forms as cross_entropy_forms
from .decode_attention.spec import SPECS as DECODE_ATTENTION
from .decode_attention.spec import forms as decode_attention_forms
from .norm.spec import forms as norm_forms
from .rotary.spec import forms as rotary_forms
from .spec import Spec

SPECS: dict[str, Spec] = {spec.name: spec for spec in (*ATTENTION, *DECODE_ATTENTION, *BIAS_ACT)}
FORMS = (
    attention_forms,
    norm_forms,
    cross_entropy_forms,
    BIAS_ACT[0].forms,
    rotary_forms,
    decode_attention_forms,
)
