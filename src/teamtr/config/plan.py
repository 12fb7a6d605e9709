"""The section ``plan``: a preset and the keys that change it; also converts a ``Plan`` to such keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Strict

from teamtr.config.texts import Preset
from teamtr.presets import (
    PRESETS,
    Allocation,
    Credit,
    MatchBy,
    Order,
    OrderKind,
    Plan,
    Resample,
)
from teamtr.settings.refusals import Refusal
from teamtr.settings.section import Section, key, unset
from teamtr.settings.values import Above0, Count, Flag, From0, Positive, UpTo1
from teamtr.theory.estimators import AdvantageEstimator, CriticAdvantage, GroupAdvantage
from teamtr.theory.objective import AverageOver, Ratio


class PlanConfig(Section):
    """The algorithm: a preset, and the keys that differ from it. Keys that are left out come from the preset."""

    unset_means: ClassVar[str] = "the preset's"

    preset: Preset = key("teamtr", "The algorithm to start from; see teamtr.presets.")
    stages: Positive = key(40, "Stages; in each, every agent is updated once.")
    problems: Positive = key(32, "Problems in a batch.")
    group_size: Annotated[int, Strict(), Ge(2)] = key(16, "Episodes per problem.")
    radius_nats_per_message: Above0 | None = unset("Largest KL of one update, in nats per message.")
    radius_nats_per_token: Above0 | None = unset("The same, in nats per token instead of per message.")
    gamma: Annotated[float, Strict(), Gt(0), Le(1)] = key(1.0, "Discount per turn.")
    normalize: Flag | None = unset(
        "Divide advantages by the standard deviation of their group; with a critic, by that of the batch's tokens, "
        "after subtracting their mean."
    )
    a_clip: Above0 | None = unset("Advantages are clipped to this size; .inf for no clipping.", allow_inf_nan=True)
    critic: Flag | None = unset(
        "Take advantages per token from a critic (a value head per agent) instead of from the group, as in PPO; needs "
        "plan.ratio: token."
    )
    gae_lambda: UpTo1 | None = unset(
        "With a critic: 1 is the return less the value, 0 the one-step error (generalized advantage estimation)."
    )
    value_clip: Above0 | None = unset(
        "With a critic: a value that has moved this far in one update is drawn no further, in units of reward; .inf "
        "for no clipping.",
        allow_inf_nan=True,
    )
    clip: Above0 | None = unset("Clip range of the likelihood ratio: 1 - clip to 1 + clip.")
    clip_high: Above0 | None = unset("The upper clip range, if it differs from clip.")
    ratio: Ratio | None = unset("What the likelihood ratio is taken over.")
    average_over: AverageOver | None = unset("What the objective averages over.")
    reference_kl: From0 | None = unset(
        "Weight of the KL per token from the new policy to the run's initial policy, as in GRPO; 0 for none."
    )
    order: OrderKind | None = unset("Order of the updates in a stage; fixed is the order in which agents are listed.")
    resample_every: Count | None = unset(
        "Collect fresh rollouts before every n-th update; 0: only at the start of a stage."
    )
    reweight: Flag | None = unset(
        "Reweight reused episodes to the present team by their likelihood ratio, instead of taking them as they are."
    )
    min_effective_share: UpTo1 | None = unset(
        "With reweight: sample anew when reused episodes are worth less than this share of as many fresh ones."
    )
    sampling_cost: Literal["measured"] | Above0 | None = unset(
        "With reweight: cost of sampling one token, as a multiple of training on one; sample anew also when that is "
        "the better buy. measured: in the run's first stage, so that two runs may decide differently."
    )
    resample_partially: Flag | None = unset(
        "With reweight: of episodes that are worth too little, keep what the present team might have said itself."
    )
    reuse_across_stages: Flag | None = unset(
        "With reweight: learn once more from the last stage's episodes where a problem is drawn again, if they are "
        "still worth min_effective_share."
    )
    control_share: UpTo1 | None = unset(
        "With resample_partially: share of problems that are also sampled wholly anew, to measure the bias."
    )
    gate: Flag | None = unset("Accept an update only if its upper KL bound is within the radius.")
    beta: From0 | None = unset("Initial weight of the KL penalty.")
    adapt_beta: Flag | None = unset("Adapt beta so that the KL approaches the radius.")
    allocate: Allocation | None = unset(
        "How a stage's KL budget is split among agents: equally, by each agent's last gain, or for the best certified "
        "bound."
    )
    adapt_radius: Flag | None = unset("Move each agent's radius towards the KL that it actually uses.")
    overlong_filter: Flag | None = unset("Exclude messages truncated at max_tokens from the loss, as in DAPO.")
    overlong_cache: UpTo1 | None = unset(
        "Share of max_tokens, at its end, over which a message lowers its episode's reward by up to 1; a truncated "
        "message lowers it by 1, as in DAPO. The worst message counts; 0: no punishment."
    )
    dynamic_sampling: Flag | None = unset(
        "Replace groups with equal rewards by new problems, until every group has a signal or all problems were "
        "tried, as in DAPO."
    )
    credit: Credit | None = unset(
        "What an agent is trained on. team: the team's reward. own: its own, of rewards that are given to agents or "
        "turns. difference: the team's reward less what it would have been had the agent said nothing; every episode "
        "is then graded once more for each agent. crossed: the team's reward, for agents that neither read the others "
        "nor are read by them averaged over what the others said in all episodes of the problem; up to group_size "
        "times as many episodes are then graded for each of them, and none is sampled.",
    )
    dynamic_sampling_limit: Count = key(0, "Most rounds of dynamic sampling for one batch; 0: no limit.")
    match: Literal["off", MatchBy] = key(
        "off",
        "Spend what the preset teamtr would spend at these stages, problems and group_size. rollouts: changes the "
        "problems of a batch, so that as many episodes are sampled. tokens: the same, by episodes times messages per "
        "episode. updates: changes the stages.",
    )
    match_agents: Count = key(0, "With match: how many agents the team to be matched trains; 0: as many as this one.")
    match_turns: Count = key(
        0, "With match: tokens, how many messages its episodes have; 0: as many as this team's episodes."
    )

    def _settle(self) -> None:
        """Fill in the preset's radius if none is given."""
        if self.radius_nats_per_message is None and self.radius_nats_per_token is None:
            radii = PRESETS[self.preset].radii
            unit = "radius_nats_per_token" if radii.per_token else "radius_nats_per_message"
            object.__setattr__(self, unit, radii.nats)

    def _refusals(self) -> Iterator[Refusal]:
        if self.radius_nats_per_message is not None and self.radius_nats_per_token is not None:
            message = "plan.radius_nats_per_message and plan.radius_nats_per_token exclude each other; give one"
            yield Refusal(("plan", "radius_nats_per_token"), message, at_key=True)
        if self.dynamic_sampling_limit and not self.plan().dynamic_sampling.on:
            message = "plan.dynamic_sampling_limit limits nothing: set plan.dynamic_sampling: true, or leave it out"
            yield Refusal(("plan", "dynamic_sampling_limit"), message, at_key=True)
        if self.allocate not in (None, "equal") and self.plan().reuses_rollouts:
            message = (
                f"plan.allocate: {self.allocate} goes by certificates, and a plan that reuses rollouts has none for "
                "its later updates; use plan.allocate: equal, or collect fresh rollouts before every update"
            )
            yield Refusal(("plan", "allocate"), message)
        elif self.allocate not in (None, "equal") and self.plan().dynamic_sampling.on:
            message = (
                f"plan.allocate: {self.allocate} goes by certificates, and dynamic sampling, which chooses groups by "
                "their rewards, leaves none; use plan.allocate: equal, or set plan.dynamic_sampling: false"
            )
            yield Refusal(("plan", "allocate"), message, idle=True)
        elif self.allocate not in (None, "equal") and self.plan().credit not in ("team", "crossed"):
            message = (
                f"plan.allocate: {self.allocate} compares what agents gain for the team, and with plan.credit: "
                f"{self.plan().credit} each is trained on another return; use plan.allocate: equal or plan.credit: team"
            )
            yield Refusal(("plan", "allocate"), message)
        radii = self.plan().radii
        if radii.allocation != "equal" and radii.adapt:
            message = (
                f"plan.adapt_radius changes nothing with plan.allocate: {radii.allocation}, which sets every radius "
                "anew at each stage; leave one of them out"
            )
            name = "adapt_radius" if self.adapt_radius else "allocate"
            yield Refusal(("plan", name), message, at_key=True, idle=True)
        if self.match == "off" and (self.match_agents or self.match_turns):
            name = "match_agents" if self.match_agents else "match_turns"
            message = f"plan.{name} needs plan.match: rollouts, tokens or updates"
            yield Refusal(("plan", name), message, at_key=True)
        elif self.match_turns and self.match != "tokens":
            message = f"plan.match_turns changes nothing with plan.match: {self.match}; leave it out"
            yield Refusal(("plan", "match_turns"), message, at_key=True)
        if self.match in ("rollouts", "tokens") and self.plan().batches(1) is None:
            message = (
                f"plan.match: {self.match} settles the sizes before the run, and this plan decides as it goes how much "
                "it samples: use plan.match: updates, or set plan.dynamic_sampling: false (and for plans that "
                "reweight plan.min_effective_share: 0)"
            )
            yield Refusal(("plan", "match"), message)
        yield from self._critic_refusals(self.plan())
        yield from self._idle_keys(self.plan().resample)

    def _critic_refusals(self, plan: Plan) -> Iterator[Refusal]:
        """Refuses what cannot be combined with a critic, and a critic's keys without one."""
        if plan.critic is None:
            for name in ("gae_lambda", "value_clip"):
                if getattr(self, name) is not None:
                    message = f"plan.{name} needs a critic: set plan.critic: true, or plan.preset: ppo"
                    yield Refusal(("plan", name), message, at_key=True)
            return
        if plan.objective.ratio != "token":
            message = f"a critic gives advantages per token: set plan.ratio: token, not {plan.objective.ratio}"
            yield Refusal(("plan", "ratio" if self.ratio else "critic"), message)
        if plan.resample.reweight:
            message = "a critic learns from episodes as they are: plan.reweight and plan.critic exclude each other"
            yield Refusal(("plan", "reweight" if self.reweight else "critic"), message)

    def _idle_keys(self, resample: Resample) -> Iterator[Refusal]:
        """Refuses keys about reused rollouts in plans that do not use them."""
        needs = {
            "min_effective_share": resample.reweight,
            "sampling_cost": resample.reweight,
            "resample_partially": resample.reweight,
            "reuse_across_stages": resample.reweight,
            "control_share": resample.partial,
        }
        for name, used in needs.items():
            if getattr(self, name) and not used:
                wanted = "resample_partially" if name == "control_share" else "reweight"
                yield Refusal(("plan", name), f"plan.{name} needs plan.{wanted}: true", at_key=True)
        if resample.reweight and resample.every == 1:
            message = "plan.reweight needs rollouts that are reused: set plan.resample_every: 0, or leave it out"
            yield Refusal(("plan", "reweight" if self.reweight else "resample_every"), message, at_key=True)
        if resample.partial and resample.reweight and not resample.min_effective_share and not resample.sampling_cost:
            message = (
                "plan.resample_partially redraws episodes that are worth too little: set plan.min_effective_share or "
                "plan.sampling_cost, which say how much is enough"
            )
            name = "resample_partially" if self.resample_partially else "min_effective_share"
            yield Refusal(("plan", name), message, at_key=True, idle=True)
        within_stage = resample.min_effective_share > 0.0 and not resample.across_stages
        decides = within_stage or resample.partial or resample.sampling_cost is not None
        if decides and self.plan().order.kind == "together":
            message = (
                "plan.order: together updates all agents from the batch that the stage begins with, whatever it is "
                "worth by then; min_effective_share, sampling_cost and resample_partially need another order"
            )
            yield Refusal(("plan", "order"), message, idle=True)
        if resample.partial and resample.across_stages:
            message = (
                "plan.reuse_across_stages and plan.resample_partially exclude each other: what is kept of a message is "
                "known for one update of its agent only; leave one of them out"
            )
            yield Refusal(("plan", "resample_partially"), message, at_key=True)

    def plan(self) -> Plan:
        """The preset with the changes of this section."""
        preset = PRESETS[self.preset]
        per_token = self.radius_nats_per_token is not None
        nats = self.radius_nats_per_token if per_token else self.radius_nats_per_message
        clip_high = self.clip if self.clip_high is None else self.clip_high
        return _changed(
            preset,
            stages=self.stages,
            problems=self.problems,
            group_size=self.group_size,
            gamma=self.gamma,
            advantage=self._advantage(preset),
            radii=_changed(
                preset.radii, nats=nats, per_token=per_token, adapt=self.adapt_radius, allocation=self.allocate
            ),
            resample=_changed(
                preset.resample,
                every=self.resample_every,
                reweight=self.reweight,
                min_effective_share=self.min_effective_share,
                sampling_cost=self.sampling_cost,
                partial=self.resample_partially,
                control=self.control_share,
                across_stages=self.reuse_across_stages,
            ),
            region=_changed(preset.region, gate=self.gate, beta=self.beta, adapt_beta=self.adapt_beta),
            objective=_changed(
                preset.objective,
                ratio=self.ratio,
                clip_low=self.clip,
                clip_high=clip_high,
                average_over=self.average_over,
                reference_kl=self.reference_kl,
            ),
            order=Order(self.order) if self.order else None,
            credit=self.credit,
            overlong=_changed(preset.overlong, filter=self.overlong_filter, cache=self.overlong_cache),
            dynamic_sampling=_changed(
                preset.dynamic_sampling, on=self.dynamic_sampling, limit=self.dynamic_sampling_limit
            ),
        )

    def _advantage(self, preset: Plan) -> AdvantageEstimator:
        """The preset's estimator with the changes of this section, or one of the other kind (group or critic)."""
        critic = preset.critic is not None if self.critic is None else self.critic
        changes = {"normalize": self.normalize, "clip": self.a_clip}
        if not critic:
            return _changed(GroupAdvantage() if preset.critic else preset.advantage, **changes)
        own = {"gae_lambda": self.gae_lambda, "value_clip": self.value_clip}
        return _changed(preset.critic or CriticAdvantage(), **changes, **own)


def plan_keys(plan: Plan) -> dict[str, Any]:
    """The keys of the section ``plan`` that give this plan. A user-defined advantage estimator has no keys."""
    nats = "radius_nats_per_token" if plan.radii.per_token else "radius_nats_per_message"
    keys = {
        "preset": _preset_of(plan),
        "stages": plan.stages,
        "problems": plan.problems,
        "group_size": plan.group_size,
        nats: plan.radii.nats,
        "gamma": plan.gamma,
        "clip": plan.objective.clip_low,
        "clip_high": plan.objective.clip_high,
        "ratio": plan.objective.ratio,
        "average_over": plan.objective.average_over,
        "reference_kl": plan.objective.reference_kl,
        "order": plan.order.kind,
        "resample_every": plan.resample.every,
        "reweight": plan.resample.reweight,
        "min_effective_share": plan.resample.min_effective_share,
        "sampling_cost": plan.resample.sampling_cost,
        "resample_partially": plan.resample.partial,
        "control_share": plan.resample.control,
        "reuse_across_stages": plan.resample.across_stages,
        "gate": plan.region.gate,
        "beta": plan.region.beta,
        "adapt_beta": plan.region.adapt_beta,
        "allocate": plan.radii.allocation,
        "adapt_radius": plan.radii.adapt,
        "overlong_filter": plan.overlong.filter,
        "overlong_cache": plan.overlong.cache,
        "dynamic_sampling": plan.dynamic_sampling.on,
        "dynamic_sampling_limit": plan.dynamic_sampling.limit,
        "credit": plan.credit,
    }
    advantage = plan.advantage
    if type(advantage) is GroupAdvantage or type(advantage) is CriticAdvantage:
        keys |= {"normalize": advantage.normalize, "a_clip": advantage.clip}
    keys["critic"] = plan.critic is not None
    if plan.critic is not None:
        keys |= {"gae_lambda": plan.critic.gae_lambda, "value_clip": plan.critic.value_clip}
    return keys


def _preset_of(plan: Plan) -> str:
    """The preset that equals this plan except for sizes, discount and radius; the first preset if none does."""
    sizes: dict[str, Any] = {
        "stages": plan.stages,
        "problems": plan.problems,
        "group_size": plan.group_size,
        "gamma": plan.gamma,
    }
    for name, preset in PRESETS.items():
        if replace(preset, **sizes, radii=replace(preset.radii, nats=plan.radii.nats)) == plan:
            return name
    return next(iter(PRESETS))


def _changed(record: Any, **values: Any) -> Any:
    """The record with those values replaced that are not None."""
    return replace(record, **{name: value for name, value in values.items() if value is not None})
