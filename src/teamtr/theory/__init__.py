"""The paper as pure functions: arrays and numbers in, numbers and records out.

What training uses:

advantages     returns to group-normalized, clipped advantages (eq:group_adv)
surrogate      likelihood ratios and the clipped surrogate (eq:ppo_obj)
kl             from the policy before an update to the one after: exact, sampled, discounted
intervals      how sure a mean over problems is; the upper bound of a KL
control        penalty weight, back-off, step scale and radius
zeta           the proxy for the estimation error (app:exp:zeta)
weights        trajectory importance weights
certificates   what a step is worth at least: the paper's bounds and ours

The rest of the paper: occupancy, concentration, information, geometry, allocation; and tabular, teams small enough to
solve exactly. Functions are imported from their module: torch, which takes seconds to load, then weighs only on those
that compute with it.
"""
