"""One suite that every engine passes: what a Sampler and a Learner promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from conftest import make_batch, make_learner, make_policy
from teamtr.batches import AgentBatch
from teamtr.engines.local import LocalEngine
from teamtr.engines.sampling import TokenSampler
from teamtr.ports import Learner, Sampler
from teamtr.randomness import uniforms
from teamtr.theory.objective import Objective

TOLERANCE = {"tabular": 1e-12, "full": 2e-5, "lora": 2e-5}
"""Stated tolerance of a log-probability under another padding or batch composition: float64, float32."""


def all_rows(batch: AgentBatch) -> np.ndarray:
    return np.arange(len(batch))


def first_token_logp(policy, prompt: np.ndarray) -> np.ndarray:
    """log p of every first token, by scoring each one-token message."""
    vocabulary = policy.head()(policy.features([prompt], [np.array([0], dtype=np.int32)])).shape[-1]
    with torch.no_grad():
        logits = policy.head()(policy.features([prompt], [np.array([0], dtype=np.int32)]))
    return torch.log_softmax(logits[0].double(), -1).numpy()[:vocabulary]


def test_ports(kind):
    learner = make_learner(kind)
    assert isinstance(learner, Learner)
    assert isinstance(LocalEngine({"agent": learner}), Sampler)


def chi_square_p(tokens: list[int], probabilities: np.ndarray, buckets: int | None = None) -> float:
    """p-value of drawn tokens against their probabilities; rare tokens are pooled, or all into buckets."""
    label = np.arange(len(probabilities)) % (buckets or len(probabilities))
    expected = np.bincount(label, weights=probabilities) * len(tokens)
    observed = np.bincount(label[tokens], minlength=len(expected)).astype(float)
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
    assert len(expected) > 2, "too few samples to compare anything"
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


def test_sampling_agrees_with_the_probabilities(kind):
    policy = make_policy(kind)
    prompt = np.array([3, 4, 5], dtype=np.int32)
    drawn = policy.sample([prompt] * 4000, uniforms(7, len([prompt] * 4000), 1))
    probabilities = np.exp(first_token_logp(policy, prompt))
    assert chi_square_p([int(s.token_ids[0]) for s in drawn], probabilities) > 1e-4
    assert chi_square_p([int(s.token_ids[0]) for s in drawn], np.roll(probabilities, 1)) < 1e-4, "the test is blind"


@pytest.mark.long
def test_second_tokens_agree_as_well(kind):
    """Given the first token, the second follows the scored conditional: decoding with a cache is decoding."""
    policy = make_policy(kind)
    prompt = np.array([5, 2], dtype=np.int32)
    drawn = policy.sample([prompt] * 12000, uniforms(3, len([prompt] * 12000), 2))
    firsts = [int(s.token_ids[0]) for s in drawn if len(s.token_ids) == 2]
    common = max(set(firsts), key=firsts.count)
    with torch.no_grad():
        message = np.array([common, 0], dtype=np.int32)
        probabilities = torch.softmax(policy.head()(policy.features([prompt], [message]))[1].double(), -1).numpy()
    seconds = [int(s.token_ids[1]) for s in drawn if len(s.token_ids) == 2 and s.token_ids[0] == common]
    assert chi_square_p(seconds, probabilities, buckets=6) > 1e-4


def test_scoring_agrees_with_sampling(kind):
    learner = make_learner(kind)
    batch = make_batch(learner, problems=8)
    learner.begin(batch)
    for scored, sampled in zip(learner.token_logprobs(), batch.sampler_logprobs, strict=True):
        np.testing.assert_allclose(scored, sampled, atol=1e-4)


@pytest.mark.long
def test_temperature_is_part_of_the_policy(kind):
    """At temperature 0.5 log-ratios double: log p(a) - log p(b) = (l_a - l_b) / 0.5."""
    prompt = np.array([3, 2, 4], dtype=np.int32)
    plain = first_token_logp(make_policy(kind), prompt)
    sharp = first_token_logp(make_policy(kind, temperature=0.5), prompt)
    np.testing.assert_allclose(sharp[2] - sharp[3], 2 * (plain[2] - plain[3]), atol=1e-4)
    learner = make_learner(kind, temperature=0.5)
    batch = make_batch(learner, problems=6)
    learner.begin(batch)
    for scored, sampled in zip(learner.token_logprobs(), batch.sampler_logprobs, strict=True):
        np.testing.assert_allclose(scored, sampled, atol=1e-4)


def test_greedy_takes_the_most_likely(kind):
    policy = make_policy(kind)
    prompt = np.array([2, 3], dtype=np.int32)
    (sample,) = policy.sample([prompt], uniforms(0, len([prompt]), 1), TokenSampler(0.0, 1.0))
    assert sample.token_ids[0] == first_token_logp(policy, prompt).argmax()


def test_top_p_reports_the_distribution_sampled_from(kind):
    """With top_p the reported log-probability is that of the renormalised nucleus."""
    policy = make_policy(kind)
    prompt = np.array([2, 3, 3], dtype=np.int32)
    probabilities = np.exp(first_token_logp(policy, prompt))
    order = np.argsort(-probabilities)
    cumulative = np.cumsum(probabilities[order])
    nucleus = order[: int((cumulative - probabilities[order] < 0.5).sum())]
    for sample in policy.sample([prompt] * 50, uniforms(1, len([prompt] * 50), 1), TokenSampler(top_p=0.5)):
        token = int(sample.token_ids[0])
        assert token in nucleus
        assert sample.logprobs[0] == pytest.approx(
            np.log(probabilities[token] / probabilities[nucleus].sum()), abs=1e-4
        )


def test_same_seed_same_tokens(kind):
    policy = make_policy(kind)
    prompts = [np.array([2, 3, k], dtype=np.int32) for k in (2, 3, 4, 2)]
    draw = lambda seed: [  # noqa: E731
        s.token_ids.tolist() for s in policy.sample(prompts, uniforms(seed, len(prompts), 6))
    ]
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.long
def test_every_end_token_stops_and_is_trained(kind):
    """Both declared ends stop a message, stand in it as its last token, and get a gradient."""
    policy = make_policy(kind)
    policy.end_ids = frozenset({0, 1})
    prompt = np.array([4, 2], dtype=np.int32)
    samples = policy.sample([prompt] * 800, uniforms(5, len([prompt] * 800), 8))
    ends = {int(s.token_ids[-1]) for s in samples if s.finish == "stop"}
    assert ends == {0, 1}
    for s in samples:
        body = s.token_ids[:-1] if s.finish == "stop" else s.token_ids
        assert not set(body.tolist()) & {0, 1}, "a message went on after its end"
        assert len(s.token_ids) == len(s.logprobs)
        assert s.finish == "stop" or len(s.token_ids) == 8
    learner = make_learner(kind)
    for end in (0, 1):
        message = np.array([end], dtype=np.int32)
        batch = AgentBatch("agent", (prompt,), (message,), (np.zeros(1, np.float32),), *(np.zeros(1, np.int64),) * 3)
        before = learner.begin(batch)[0]
        learner.step(np.array([0]), np.array([1.0]), Objective(), beta=0.0, learning_rate=1e-2)
        assert learner.measure().log_ratio_M[0] > 0, "the end token was not trained"
        learner.end()
        assert learner.begin(batch)[0] > before
        learner.end()


def test_unchanged_weights_have_exactly_zero_kl(kind):
    learner = make_learner(kind, micro_batch=3)
    learner.begin(make_batch(learner))
    divergence = learner.measure()
    assert not divergence.full_M.any()
    assert not divergence.log_ratio_M.any()
    assert not divergence.k3_M.any()


def test_restore_undoes_a_step_bit_for_bit(kind):
    learner = make_learner(kind)
    batch = make_batch(learner)
    advantages = np.linspace(-1, 1, len(batch))
    learner.begin(batch)
    learner.step(all_rows(batch), advantages, Objective(), beta=0.1, learning_rate=1e-2)
    before, version, fingerprint = learner.snapshot(), learner.version(), learner.fingerprint()
    learner.step(all_rows(batch), advantages, Objective(), beta=0.1, learning_rate=1e-2)
    assert learner.version() != version
    learner.restore(before)
    assert learner.version() == version
    assert learner.fingerprint() == fingerprint, "optimizer moments were not restored"


def test_move_interpolates_and_kl_falls_with_the_square(kind):
    learner = make_learner(kind)
    batch = make_batch(learner, problems=8)
    learner.begin(batch)
    start = learner.snapshot()
    learner.step(all_rows(batch), np.linspace(-1, 1, len(batch)), Objective(), beta=0.0, learning_rate=1e-3)
    end = learner.snapshot()
    whole = learner.measure().full_M.mean()
    learner.move(start, end, 0.5)
    assert learner.measure().full_M.mean() == pytest.approx(whole / 4, rel=0.1)
    learner.move(start, end, 0.0)
    assert learner.version() == make_learner(kind).version()


@pytest.mark.long
@pytest.mark.parametrize("ratio", ["message", "token", "length_normalized"])
@pytest.mark.parametrize("average_over", ["messages", "tokens"])
def test_micro_batch_1x8_equals_8x1(kind, ratio, average_over):
    """Gradient accumulation is exact: eight messages one at a time or all at once give the same weights."""
    objective = Objective(ratio=ratio, average_over=average_over, reference_kl=0.5)
    weights = []
    for micro_batch in (1, 8):
        learner = make_learner(kind, micro_batch=micro_batch, keep_initial=True)
        batch = make_batch(make_learner(kind), problems=4)
        learner.begin(batch, reference=True)
        learner.perturb(0.1, seed=4)  # at the frozen weights themselves the KL has no gradient
        advantages = np.array([1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.1, -0.1])
        gradients = _gradient(learner, batch, advantages, objective, beta=2.0)
        weights.append(gradients)
    for name, value in weights[0].items():
        scale = weights[1][name].abs().max() + 1e-12
        assert float((value - weights[1][name]).abs().max() / scale) < 2e-4, name


def _gradient(learner, batch, advantages, objective, beta=0.3) -> dict[str, torch.Tensor]:
    """The gradient of one step, read off Adam's first moment: first = (1 - b1) g."""
    learner.max_grad_norm = 1e9
    learner.step(all_rows(batch), advantages, objective, beta=beta, learning_rate=0.0)
    return {k: v for k, v in learner.snapshot().moments.items() if k.startswith("first.")}


def drifted(kind, **options):
    """A learner that has left the policy it began with, and messages that the new policy wrote."""
    learner = make_learner(kind, keep_initial=True, **options)
    learner.perturb(0.2, seed=11)
    return learner, make_batch(learner, problems=8)


REFERENCE = Objective(ratio="token", reference_kl=0.04)


@pytest.mark.long
@pytest.mark.parametrize("average_over", ["messages", "tokens"])
def test_the_kl_to_the_initial_policy_is_what_a_fresh_learner_says(kind, average_over):
    """By hand, from token log-probabilities of the drifted learner and of one that never moved."""
    learner, batch = drifted(kind)
    learner.begin(batch, reference=True)
    new = learner.token_logprobs()
    fresh = make_learner(kind)
    fresh.begin(batch)
    tokens = [np.exp(r - n) - (r - n) - 1 for r, n in zip(fresh.token_logprobs(), new, strict=True)]
    expected = np.mean([t.mean() for t in tokens]) if average_over == "messages" else np.concatenate(tokens).mean()
    objective = Objective(ratio="token", average_over=average_over, reference_kl=0.04)
    stats = learner.step(all_rows(batch), np.zeros(len(batch)), objective, beta=0.0, learning_rate=0.0)
    assert expected > 1e-3
    assert stats.kl_reference == pytest.approx(expected, rel=1e-3 if kind != "tabular" else 1e-9)
    np.testing.assert_allclose(learner.measure().reference_M, [t.sum() for t in tokens], rtol=2e-3, atol=1e-5)


def test_scoring_the_initial_policy_leaves_no_trace(kind):
    learner, batch = drifted(kind)
    learner.begin(batch)
    learner.step(all_rows(batch), np.linspace(-1, 1, len(batch)), Objective(), beta=0.1, learning_rate=1e-2)
    learner.end()
    before, version, fingerprint = learner.snapshot(), learner.version(), learner.fingerprint()
    plain = learner.begin(batch)
    with_reference = learner.begin(batch, reference=True)
    np.testing.assert_array_equal(plain, with_reference)
    learner._touched()
    assert (learner.version(), learner.fingerprint()) == (version, fingerprint)
    for name, value in learner.snapshot().parameters.items():
        assert torch.equal(value, before.parameters[name])
    learner.end()
    learner.begin(batch)
    assert learner.measure().reference_M is None, "the next batch has no reference unless it asks for one"


def test_an_unmoved_policy_has_no_kl_to_its_beginning(kind):
    learner = make_learner(kind, keep_initial=True)
    batch = make_batch(learner)
    learner.begin(batch, reference=True)
    assert not learner.measure().reference_M.any()


@pytest.mark.long
def test_the_kl_to_the_initial_policy_pulls_a_drifted_policy_back(kind):
    """Without any advantage, steps go home; without the penalty they go nowhere."""
    learner, batch = drifted(kind)
    learner.begin(batch, reference=True)
    away = learner.measure().reference_M.sum()
    still = Objective(ratio="token")
    version = learner.version()
    learner.step(all_rows(batch), np.zeros(len(batch)), still, beta=0.0, learning_rate=1e-3)
    assert learner.version() == version
    for _ in range(10):
        learner.step(all_rows(batch), np.zeros(len(batch)), REFERENCE, beta=0.0, learning_rate=3e-3)
    assert learner.measure().reference_M.sum() < 0.8 * away


@pytest.mark.long
def test_the_slope_of_a_step_is_that_of_the_kl_to_the_initial_policy(kind):
    """Along the line from the beginning to the drifted weights, by differences."""
    learner = make_learner(kind, micro_batch=3, keep_initial=True)
    start = learner.snapshot()
    learner.perturb(0.2, seed=11)
    end = learner.snapshot()
    batch = make_batch(learner, problems=8)
    learner.begin(batch, reference=True)
    first = _gradient(learner, batch, np.zeros(len(batch)), REFERENCE, beta=0.0)
    along = [(first[f"first.{k}"] * (p - start.parameters[k])).sum() for k, p in end.parameters.items()]
    slope = float(sum(along)) / 0.1
    kl = []
    for fraction in (0.98, 1.02):
        learner.move(start, end, fraction)
        kl.append((learner.measure().reference_M / batch.lengths_M).mean())
    assert slope == pytest.approx(REFERENCE.reference_kl * (kl[1] - kl[0]) / (1.02 - 0.98), rel=2e-2)


def test_a_reference_that_nobody_kept_is_an_error(kind):
    learner = make_learner(kind)
    batch = make_batch(learner)
    with pytest.raises(RuntimeError, match="keep_initial"):
        learner.begin(batch, reference=True)
    learner.begin(batch)
    with pytest.raises(RuntimeError, match="reference=True"):
        learner.step(all_rows(batch), np.zeros(len(batch)), REFERENCE, beta=0.0, learning_rate=0.0)


def test_the_penalty_is_beta_times_the_mean_kl_of_a_message(kind):
    """Without advantages, the slope of a step's loss along a line is that of the measured KL, by differences."""
    learner = make_learner(kind, micro_batch=3)
    batch = make_batch(learner)
    learner.begin(batch)
    start = learner.snapshot()
    learner.perturb(0.1, seed=4)
    end = learner.snapshot()
    slopes = []
    for beta in (0.5, 2.0):
        learner.restore(end)
        first = _gradient(learner, batch, np.zeros(len(batch)), Objective(), beta=beta)
        along = [(first[f"first.{k}"] * (p - start.parameters[k])).sum() for k, p in end.parameters.items()]
        slopes.append(float(sum(along)) / 0.1)
    kl = []
    for fraction in (0.98, 1.02):
        learner.move(start, end, fraction)
        kl.append(learner.measure().full_M.mean())
    assert kl[1] > kl[0]
    np.testing.assert_allclose(slopes, np.array([0.5, 2.0]) * (kl[1] - kl[0]) / 0.04, rtol=5e-3)


def test_padding_and_company_do_not_change_log_probabilities(kind):
    """A message scores the same alone, beside longer ones, and in another order."""
    learner = make_learner(kind, micro_batch=16)
    batch = make_batch(learner, problems=6, max_tokens=6)
    together = learner.begin(batch)
    reverse = learner.begin(batch.rows(all_rows(batch)[::-1].copy()))[::-1]
    alone = np.array([learner.begin(batch.rows([i]))[0] for i in range(len(batch))])
    np.testing.assert_allclose(together, alone, atol=TOLERANCE[kind])
    np.testing.assert_allclose(together, reverse, atol=TOLERANCE[kind])


def test_left_padding_does_not_change_sampling(kind):
    """Greedy decoding of a prompt gives the same tokens alone and beside longer prompts."""
    policy = make_policy(kind)
    prompts = [np.array([2, 3], dtype=np.int32), np.array([4, 5, 2, 3, 3, 2, 4], dtype=np.int32)]
    together = policy.sample(prompts, uniforms(0, len(prompts), 5), TokenSampler(0.0, 1.0))
    for prompt, sample in zip(prompts, together, strict=True):
        (alone,) = policy.sample([prompt], uniforms(0, len([prompt]), 5), TokenSampler(0.0, 1.0))
        assert alone.token_ids.tolist() == sample.token_ids.tolist()


@pytest.mark.long
def test_repeated_messages_count_each_time(kind):
    """Identical messages are computed once but weigh as often as they occur."""
    learner = make_learner(kind)
    batch = make_batch(learner, problems=2, group=1)
    doubled = batch.rows([0, 0, 0, 1])
    learner.begin(doubled)
    many = _gradient(learner, doubled, np.array([1.0, 1.0, 1.0, -1.0]), Objective())
    learner = make_learner(kind)
    learner.begin(batch)
    few = _gradient(learner, batch, np.array([1.5, -0.5]), Objective())
    for name, value in many.items():
        scale = few[name].abs().max() + 1e-12
        assert float((value - few[name]).abs().max() / scale) < 2e-4


def test_a_non_finite_gradient_never_reaches_the_weights(kind):
    learner = make_learner(kind)
    batch = make_batch(learner)
    learner.begin(batch)
    version, fingerprint = learner.version(), learner.fingerprint()
    advantages = np.ones(len(batch))
    advantages[0] = np.inf
    stats_ = learner.step(all_rows(batch), advantages, Objective(), beta=0.1, learning_rate=1e-2)
    assert not stats_.applied
    assert learner.version() == version
    assert learner.fingerprint() == fingerprint


def test_save_and_load_give_the_same_bits(kind, tmp_path):
    learner = make_learner(kind)
    batch = make_batch(learner)
    learner.begin(batch)
    learner.step(all_rows(batch), np.linspace(-1, 1, len(batch)), Objective(), beta=0.1, learning_rate=1e-2)
    learner.end()
    learner.save(tmp_path)
    other = make_learner(kind, seed=3)
    assert other.version() != learner.version()
    other.load(tmp_path)
    assert other.version() == learner.version()
    assert other.fingerprint() == learner.fingerprint()
    files = {f.suffix for f in tmp_path.rglob("*") if f.is_file()}
    assert files <= {".safetensors", ".json", ".jinja"}, files


def test_measuring_before_begin_is_an_error(kind):
    with pytest.raises(RuntimeError, match="begin"):
        make_learner(kind).measure()


def test_an_adapter_is_told_from_modules_and_other_adapters():
    from teamtr.engines.torch.policy_files import belongs_to

    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.{}.weight"
    assert belongs_to(name.format("agent1"), "agent1")
    for other in ("agent11", "model", "layers", "mlp", "lora_A", "weight"):
        assert not belongs_to(name.format("agent1"), other), other


def test_adapters_on_embeddings_are_refused():
    from types import SimpleNamespace

    from teamtr.engines.torch.loading import TinyShape, share_base, tiny_model
    from teamtr.engines.torch.model_files import ModelError

    model, _ = tiny_model(TinyShape(layers=1, width=16, heads=2), seed=0)
    targets = SimpleNamespace(rank=2, alpha=4.0, targets=["embed_tokens", "q_proj"])
    with pytest.raises(ModelError, match="only linear layers"):
        share_base(model, {"agent0": targets}, seed=0)


def test_a_prompt_longer_than_the_model_is_refused():
    from teamtr.errors import UserError

    with pytest.raises(UserError, match="positions"):
        make_policy("full").sample(
            [np.full(4095, 3, dtype=np.int32)],
            uniforms(0, len([np.full(4095, 3, dtype=np.int32)]), 8),
        )


def test_fp16_keeps_small_gradients():
    """Loss scaling: with advantages of 1e-4 the fp16 gradient is still the float32 one within a few percent."""
    batch = make_batch(make_learner("full"), problems=4)
    found = {}
    for precision in ("fp32", "fp16"):
        learner = make_learner("full")
        learner.policy.precision = precision
        learner.begin(batch)
        learner.max_grad_norm = 1e9
        advantages = 1e-4 * np.linspace(-1, 1, len(batch))
        learner.step(all_rows(batch), advantages, Objective(), beta=0.0, learning_rate=0.0)
        moments = learner.snapshot().moments
        found[precision] = torch.cat([v.flatten() for k, v in moments.items() if k.startswith("first.")])
    error = (found["fp16"] - found["fp32"]).norm() / found["fp32"].norm()
    assert float(error) < 0.05


def test_adapters_of_one_base_do_not_touch_each_other():
    from teamtr.engines.learner import PolicyLearner
    from teamtr.engines.torch.policy import TransformerPolicy

    policy = make_policy("lora")
    other = TransformerPolicy(policy.model, policy.tokenizer, adapter="other")
    learners = [PolicyLearner(p.adapter, p) for p in (policy, other)]
    batch = make_batch(learners[0])
    before = [x.version() for x in learners]
    base_before = {k: p.clone() for k, p in policy.model.named_parameters() if "lora_" not in k}
    learners[0].begin(batch)
    learners[0].step(all_rows(batch), np.linspace(-1, 1, len(batch)), Objective(), beta=0.0, learning_rate=1e-2)
    assert learners[0].version() != before[0]
    assert learners[1].version() == before[1]
    for name, value in base_before.items():
        assert torch.equal(value, dict(policy.model.named_parameters())[name]), name
    shared = {p.data_ptr() for p in policy.model.parameters()} & {p.data_ptr() for p in other.model.parameters()}
    assert shared, "the base is not shared"
