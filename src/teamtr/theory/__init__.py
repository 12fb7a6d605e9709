"""The paper as pure functions: arrays and numbers in, numbers and records out.

What training uses:

advantages     returns to group-normalized, clipped advantages (eq:group_adv)
surrogate      likelihood ratios and the clipped surrogate (eq:ppo_obj)
kl             from the policy before an update to the one after: exact, sampled, discounted
intervals      confidence intervals of means over problems; the upper bound of a KL
control        penalty weight, backtracking, step scale and radius
zeta           the proxy for the estimation error (app:exp:zeta)
weights        trajectory importance weights
certificates   lower bounds on the gain of a step: the paper's and ours

The rest of the paper: occupancy, concentration, information, geometry, allocation; and tabular, teams small enough to
solve exactly. Import functions from their modules, so that torch, which takes seconds to load, is loaded only by code
that uses it.
"""
