"""Memory that runs out, what stays on a card, and logits that are never whole: the same numbers at any size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_lean_learner import OBJECTIVE, advantages_for, assert_close, gradients, scaled

from conftest import make_batch, make_learner
from teamtr.batches import AgentBatch
from teamtr.engines import passes
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.torch.head import OutputLayer
from teamtr.errors import UserError


@pytest.mark.long
@pytest.mark.parametrize(
    "injected",
    [
        torch.OutOfMemoryError("injected"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=["allocator", "library", "library at start", "driver"],
)
@pytest.mark.parametrize("kind", ["tabular", "full", "lora"])
def test_running_out_of_memory_halves_the_micro_batch_and_gives_the_same_gradient(kind, injected, monkeypatch):
    learner = make_learner(kind, micro_batch=8)
    batch = make_batch(learner)
    advantages = advantages_for(batch)
    expected = gradients(learner, batch, advantages)
    trained = []
    enough = learner.policy.features

    def limited(prompts, messages):
        if len(messages) > 2:
            raise injected
        if torch.is_grad_enabled():
            trained.append(sum(map(len, [*prompts, *messages])))
        return enough(prompts, messages)

    monkeypatch.setattr(learner.policy, "features", limited)
    assert_close(expected, gradients(learner, batch, advantages))
    assert learner.passes.micro_batch == 2
    assert len(trained) == len(batch) / 2
    assert trained == sorted(trained, reverse=True), "what needs most is tried first"
    assert trained[0] > trained[-1]


def out_of_memory_at(learner: PolicyLearner, monkeypatch, place: str, times: set[int]) -> list[int]:
    """Memory runs out at these of all forward or backward passes of training; returns a list that grows with each."""
    passes: list[int] = []

    def count() -> None:
        passes.append(learner.passes.micro_batch)
        if len(passes) in times:
            raise torch.OutOfMemoryError("injected")

    if place == "backward":  # when the gradient of some parameter has arrived already
        next(iter(learner.policy.parameters().values())).register_post_accumulate_grad_hook(lambda _: count())
        return passes
    enough = learner.policy.features

    def limited(prompts, messages):
        if torch.is_grad_enabled():
            count()
        return enough(prompts, messages)

    monkeypatch.setattr(learner.policy, "features", limited)
    return passes


@pytest.mark.long
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("scaling", [False, True], ids=["fp32", "as fp16"])
@pytest.mark.parametrize("kind", ["tabular", "full", "lora"])
def test_running_out_of_memory_in_the_middle_of_a_step_leaves_nothing_of_what_was_added_up(
    kind, scaling, place, monkeypatch
):
    expected_learner, learner = make_learner(kind), make_learner(kind, micro_batch=4)
    if scaling:
        scaled(learner, monkeypatch)
    batch = make_batch(learner)
    advantages = advantages_for(batch)
    expected = gradients(expected_learner, batch, advantages)
    # the second of two parts, then the third of three; four go through
    passes = out_of_memory_at(learner, monkeypatch, place, {2, 5})
    assert_close(expected, gradients(learner, batch, advantages))
    assert passes == [4, 4, 3, 3, 3, *[2] * 4]


def test_a_micro_batch_is_lowered_by_a_quarter_down_to_one_message():
    tried = [32]
    while tried[-1] > 1:
        tried.append(passes.lowered(tried[-1]))
    assert tried == [32, 24, 18, 13, 9, 6, 4, 3, 2, 1]
    assert passes.lowered(1) == 1


@pytest.mark.parametrize("kind", ["tabular", "full"])
def test_a_step_broken_off_leaves_nothing_to_the_next(kind, monkeypatch):
    learner = make_learner(kind, micro_batch=4)
    batch = make_batch(learner)
    advantages = advantages_for(batch)
    expected = gradients(learner, batch, advantages)
    rows = np.arange(len(batch))
    learner.begin(batch)
    enough, passes = learner.policy.features, []

    def interrupted(prompts, messages):
        passes.append(1)
        if len(passes) == 2:
            raise KeyboardInterrupt
        return enough(prompts, messages)

    with monkeypatch.context() as patched:
        patched.setattr(learner.policy, "features", interrupted)
        with pytest.raises(KeyboardInterrupt):
            learner.step(rows, advantages, OBJECTIVE, beta=0.5, learning_rate=1e-3)
    assert_close(expected, gradients(learner, batch, advantages))
    # and one that never fits keeps nothing of what did
    learner.passes.micro_batch = 1
    monkeypatch.setattr(learner.policy, "recompute_activations", lambda: False)
    out_of_memory_at(learner, monkeypatch, "forward", {3})
    learner.begin(batch)
    with pytest.raises(UserError, match="does not fit"):
        learner.step(rows, advantages, OBJECTIVE, beta=0.5, learning_rate=1e-3)
    assert all(p.grad is None for p in learner.policy.parameters().values())


def test_other_errors_of_the_card_do_not_pass_for_a_lack_of_memory(monkeypatch):
    learner = make_learner("full", micro_batch=8)

    def broken(prompts, messages):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    batch = make_batch(learner)
    monkeypatch.setattr(learner.policy, "features", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        learner.begin(batch)
    assert learner.passes.micro_batch == 8


def test_a_single_message_that_does_not_fit_is_an_error_with_a_remedy(monkeypatch):
    learner = make_learner("full")
    recomputed = []
    monkeypatch.setattr(learner.policy, "recompute_activations", lambda: not recomputed and not recomputed.append(1))

    def never(prompts, messages):
        raise torch.OutOfMemoryError("injected")

    batch = make_batch(learner)
    monkeypatch.setattr(learner.policy, "features", never)
    with pytest.raises(UserError, match=r"does not fit .*max_tokens"):
        learner.begin(batch)
    assert recomputed, "activations are recomputed before giving up"


@pytest.mark.parametrize(("kind", "precision"), [("full", "fp32"), ("lora", "fp32"), ("lora", "bf16")])
def test_recomputed_activations_give_the_same_gradient_to_the_bit(kind, precision):
    learner = make_learner(kind)
    learner.policy.precision = precision
    batch = make_batch(learner)
    advantages = advantages_for(batch)
    expected = gradients(learner, batch, advantages)
    assert learner.policy.recompute_activations()
    assert learner.policy.recomputes
    assert not learner.policy.recompute_activations(), "only once"
    found = gradients(learner, batch, advantages)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_activations_are_never_recomputed_where_that_is_forbidden(monkeypatch):
    learner = make_learner("full", micro_batch=2)
    learner.passes.recompute = "never"
    batch = make_batch(learner)

    def never(prompts, messages):
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(learner.policy, "features", never)
    with pytest.raises(UserError, match=r"does not fit .*learner\.recompute to auto"):
        learner.begin(batch)
    assert not learner.policy.recomputes


def test_a_policy_that_must_recompute_does_so_from_the_start_or_is_refused():
    policy = make_learner("lora").policy
    again = [PolicyLearner("agent", policy, recompute="always") for _ in range(2)]
    assert all(learner.policy.recomputes for learner in again), "also where it does so already"
    with pytest.raises(UserError, match=r"learner\.recompute: always"):
        PolicyLearner("agent", make_learner("tabular").policy, recompute="always")


class Card:
    """Stands in for a device that is not the CPU: tensors sent there stay where they are, with a mark."""

    type = "card"


def put_on_a_card(learner: PolicyLearner, monkeypatch) -> None:
    plainly_to = torch.Tensor.to

    def to(tensor, *args, **options):
        if not (args and isinstance(args[0], Card)):
            return plainly_to(tensor, *args, **options)
        sent = tensor.clone()
        sent.on_card = True
        return sent

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor.clone())  # which has no mark
    monkeypatch.setattr(learner.policy, "device", Card())


def away_from_the_card(learner: PolicyLearner) -> bool:
    assert learner.optimizer.moments, "nothing to look at"
    return not any(hasattr(moment, "on_card") for moment in learner.optimizer.moments.values())


def test_only_the_agent_being_updated_has_its_moments_on_the_card(monkeypatch):
    learner = make_learner("tabular")
    batch = make_batch(learner)
    rows, advantages = np.arange(len(batch)), advantages_for(batch)
    put_on_a_card(learner, monkeypatch)
    for _ in range(2):
        learner.begin(batch)
        learner.step(rows, advantages, OBJECTIVE, beta=0.5, learning_rate=1e-3)
        kept = learner.snapshot()
        learner.restore(kept)
        assert all(hasattr(moment, "on_card") for moment in learner.optimizer.moments.values())
        fingerprint = learner.fingerprint()
        learner.end()
        assert away_from_the_card(learner)
        assert learner.fingerprint() == fingerprint, "moments changed on the way"
    learner.begin(batch)
    assert all(hasattr(moment, "on_card") for moment in learner.optimizer.moments.values())


# -- chunks of the head ---------------------------------------------------------------------------------------


def vocabulary_of(learner: PolicyLearner, batch: AgentBatch) -> int:
    with torch.no_grad():
        features = learner.policy.features(batch.prompts[:1], batch.messages[:1])
        return int(learner.policy.head()(features).shape[-1])


def all_numbers(learner: PolicyLearner, batch: AgentBatch) -> list[np.ndarray]:
    """Everything that a learner computes from logits, but the gradient."""
    before = learner.snapshot()
    found = [learner.begin(batch), *learner.token_logprobs()]
    learner.perturb(0.1, seed=4)
    measured, shift = learner.measure(), learner.token_shift()
    found += [measured.full_M, measured.k1_M, measured.k3_M, measured.log_ratio_M, *learner.token_kls()]
    found += [shift.before_R, shift.after_R, shift.moved_R, np.array([shift.flipped, shift.positions])]
    learner.restore(before)
    learner.end()
    return found


@pytest.mark.parametrize("kind", ["tabular", "full", "lora"])
def test_the_head_in_chunks_gives_the_same_numbers_and_never_more_logits_than_a_chunk(kind, monkeypatch):
    learner = make_learner(kind)
    batch = make_batch(learner)
    advantages = advantages_for(batch)
    whole = all_numbers(learner, batch), gradients(learner, batch, advantages)
    chunk, positions = 3, int(batch.lengths_M.sum())
    vocabulary = vocabulary_of(learner, batch)
    monkeypatch.setattr("teamtr.engines.passes.HEAD_CHUNK_ELEMENTS", chunk * vocabulary + vocabulary - 1)
    made: list[int] = []

    def watched(make):
        def make_head():
            head = make()

            def watch(features):
                logits = head(features)
                made.append(len(logits))
                return logits

            return watch

        return make_head

    for name in ("head", "frozen_head"):
        monkeypatch.setattr(learner.policy, name, watched(getattr(learner.policy, name)))
    for a, b in zip(whole[0], all_numbers(learner, batch), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6)
    assert max(made) == chunk < positions / 3
    made.clear()
    assert_close(whole[1], gradients(learner, batch, advantages))
    assert max(made) == chunk


def test_chunks_are_larger_only_where_output_layer_and_score_are_one(monkeypatch):
    """There 10 bytes of the 16 that are planned for a logit are held; elsewhere all of them are."""
    learner = make_learner("lora")
    batch = make_batch(learner)
    vocabulary, in_one, elsewhere = vocabulary_of(learner, batch), [], []
    monkeypatch.setattr(passes, "HEAD_CHUNK_ELEMENTS", 5 * vocabulary)
    monkeypatch.setattr(passes, "scores_in_half", lambda head: True)
    score, plain = passes.score_features, OutputLayer.__call__

    def in_halves(*given, **named):
        in_one.append(len(given[2]))
        with monkeypatch.context() as unseen:
            unseen.setattr(OutputLayer, "__call__", plain)
            return score(*given, **named)

    def seen(head, features):
        elsewhere.append(len(features))
        return plain(head, features)

    monkeypatch.setattr(passes, "score_features", in_halves)
    monkeypatch.setattr(OutputLayer, "__call__", seen)
    all_numbers(learner, batch)
    assert (max(in_one), max(elsewhere)) == (8, 5)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_logits_of_several_chunks_are_not_kept_for_the_gradient(kind, monkeypatch):
    learner = make_learner(kind)
    batch = make_batch(learner)
    learner.begin(batch)
    vocabulary, positions = vocabulary_of(learner, batch), int(batch.lengths_M.sum())
    kept: list[int] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 2 and tensor.shape[-1] == vocabulary:
            kept.append(len(tensor))
        return tensor

    def score() -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(see, lambda t: t), learner.policy.computing():
            learner.passes.score(learner._require(), np.arange(len(batch)))
        return kept.count(positions) + kept.count(3)

    assert score(), "one chunk is kept, so that nothing is computed twice"
    monkeypatch.setattr("teamtr.engines.passes.HEAD_CHUNK_ELEMENTS", 3 * vocabulary)
    assert not score()
