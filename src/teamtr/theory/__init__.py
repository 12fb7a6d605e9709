"""The paper as pure functions: arrays and numbers in, numbers and records out.

advantages   returns to group-normalised, clipped advantages (eq:group_adv)
surrogate    likelihood ratios and the clipped surrogate (eq:ppo_obj)
kl           from the policy before an update to the one after: exact, sampled, discounted
intervals    how sure a mean over problems is; the upper bound of a KL
control      penalty weight, back-off, step scale and radius
zeta         the proxy for the estimation error (app:exp:zeta)
"""

from teamtr.theory.advantages import Advantages, discounted_return, group_advantages
from teamtr.theory.control import adapt_beta, adapt_radius, adapt_step_scale, backoff_fraction
from teamtr.theory.intervals import bootstrap_upper
from teamtr.theory.kl import (
    discounted_kl,
    kl_cur_to_new,
    kl_k1,
    kl_k3,
    per_message_sum,
    per_token,
    radius_per_message,
)
from teamtr.theory.surrogate import (
    LOG_RATIO_BOUND,
    Surrogate,
    bound_log_ratio,
    clipped_surrogate,
    message_log_ratio,
    surrogate_denominator,
    surrogate_gain,
)
from teamtr.theory.zeta import true_zeta_of_binary_rewards, zeta_clip, zeta_norm, zeta_ratio

__all__ = [
    "LOG_RATIO_BOUND",
    "Advantages",
    "Surrogate",
    "adapt_beta",
    "adapt_radius",
    "adapt_step_scale",
    "backoff_fraction",
    "bootstrap_upper",
    "bound_log_ratio",
    "clipped_surrogate",
    "discounted_kl",
    "discounted_return",
    "group_advantages",
    "kl_cur_to_new",
    "kl_k1",
    "kl_k3",
    "message_log_ratio",
    "per_message_sum",
    "per_token",
    "radius_per_message",
    "surrogate_denominator",
    "surrogate_gain",
    "true_zeta_of_binary_rewards",
    "zeta_clip",
    "zeta_norm",
    "zeta_ratio",
]
