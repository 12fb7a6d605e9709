"""An alignment by itself: what it minimises, what it stores, where it stops. No team, no run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from teamtr.answers import Divergence
from teamtr.batches import AgentBatch
from teamtr.engines.distillation import PolicyDistiller, fitted_head
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.store import Checkpoints, checkpoint
from teamtr.swap.align import Student, align
from teamtr.swap.feasibility import achieved, surrogate
from teamtr.swap.probes import Probes
from teamtr.swap.steering import Alignment, ProbeCheck, Progress
from teamtr.theory.kl import kl_cur_to_new


def learner_of(seed: int, width: int = 16) -> PolicyLearner:
    model, tokenizer = tiny_model(TinyShape(layers=1, width=width, heads=2), seed=seed)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(15.0)
    return PolicyLearner("agent", TransformerPolicy(model, tokenizer), micro_batch=3)


def drawn_batch(count: int) -> AgentBatch:
    """Messages at random; a longer batch begins like a shorter one."""
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(6, 90, size=n).astype(np.int32)  # noqa: E731
    texts = [(draw(3 + m % 2), draw(2 + m % 3)) for m in range(count)]
    index = np.arange(count)
    return AgentBatch(
        "agent",
        tuple(prompt for prompt, _ in texts),
        tuple(message for _, message in texts),
        tuple(np.zeros(2 + m % 3, np.float32) for m in range(count)),
        index,
        index,
        np.zeros(count, dtype=np.int64),
    )


def made_probes(exact: bool) -> Probes:
    batch, index = drawn_batch(6), np.arange(6)
    return Probes(batch, batch, exact, index[:4], index[4:], np.ones(6, dtype=np.int64), 6)


def pupil_of(exact: bool, width: int = 16) -> tuple[Student, Probes]:
    probes = made_probes(exact)
    student = Student(PolicyDistiller(learner_of(1, width=width), learner_of(0)), lambda _: probes)
    student.use_probes(0)
    return student, probes


@pytest.mark.long
def test_a_pupil_is_measured_from_its_teacher():
    """The KL and the ratio of two different models, against the two heads side by side."""
    student, probes = pupil_of(exact=True, width=24)
    found = student.learner.measure()
    for m in range(len(probes.new)):
        with torch.no_grad():
            logits = [
                learner.policy.head()(learner.policy.features([probes.old.prompts[m]], [probes.old.messages[m]]))
                for learner in (student.learner.teacher, student.learner)
            ]
        assert found.full_M[m] == pytest.approx(float(kl_cur_to_new(*logits).sum()), rel=1e-4)
    before = student.charged(probes.train, per_token=False).mean()
    for _ in range(20):
        student.step(probes.train, learning_rate=1e-2)
    assert student.charged(probes.train, per_token=False).mean() < 0.3 * before
    assert student.learner.teacher.version() == learner_of(0).version(), "the teacher learns nothing"


HARD = Alignment(
    rates=(3e-3, 3e-2), radius=1e-3, batch=4, check_every=2, max_steps=20, trial_looks=1, patience=1, doublings=1
)


def pupil_with_more() -> Student:
    """Six probes, and as many more with every doubling; two of the first are held out."""
    first = made_probes(exact=True)

    def after(doubled: int) -> Probes:
        rows = np.arange(6 * 2**doubled)
        batch = drawn_batch(len(rows))
        return Probes(batch, batch, True, np.setdiff1d(rows, first.held_out), first.held_out, np.ones(len(rows)), 6)

    return Student(PolicyDistiller(learner_of(1), learner_of(0)), after)


def looked(folder: Path, looks: int | None = None, settings: Alignment = HARD) -> tuple[list[ProbeCheck], str]:
    """Looks of an alignment until it ends or is dropped, and the weights."""
    student = pupil_with_more()
    folder.mkdir(exist_ok=True)
    found = list(itertools.islice(align(student, settings, Checkpoints(folder)), looks))
    return found, student.learner.version()


@pytest.mark.long
@pytest.mark.slow
def test_an_alignment_that_is_dropped_at_every_look_ends_with_the_same_bits(tmp_path):
    """Over both trials, and with more probes."""
    whole, weights = looked(tmp_path / "whole")
    assert {look.trial for look in whole} == {0, 1}
    assert {look.doubled for look in whole} == {0, 1}
    assert len(whole) == 11
    pieces: list[ProbeCheck] = []
    while len(pieces) < len(whole):
        pieces += looked(tmp_path / "dropped", 1)[0]
    assert pieces == whole
    nothing_left, again = looked(tmp_path / "dropped")
    assert nothing_left == []
    assert again == weights


@pytest.mark.long
def test_what_is_told_is_of_the_look_that_is_installed(tmp_path):
    """The best look comes before the doubling here: its probes are told, and the curve ends with it."""
    student, store, settings = pupil_with_more(), Checkpoints(tmp_path), replace(HARD, seed=1)
    looks = list(align(student, settings, store))
    best = min(looks, key=lambda look: look.mean)
    assert (best.doubled, looks[-1].doubled) == (0, 1), "nothing to confuse"
    found = achieved(student, Progress.of(store.latest().progress), settings)
    assert (found["steps"], found["doubled"], found["probes"]) == (best.step, 0, 6)
    assert [look["step"] for look in found["curve"]] == list(range(0, best.step + 1, 2))
    assert found["curve"][-1]["upper"] == found["kl_upper"] == best.upper
    assert len(found["curve"]) + len(found["trials"]) == len(looks), "no look is lost, none told twice"


@pytest.mark.long
@pytest.mark.parametrize(("most", "steps"), [(1, [0, 1]), (3, [0, 2, 1]), (4, [0, 2, 2])])
def test_no_more_steps_than_asked_for(tmp_path, most, steps):
    """Looks come every two steps, and the second trial starts anew."""
    looks, _ = looked(tmp_path, settings=replace(HARD, max_steps=most))
    assert [look.step for look in looks] == steps


@pytest.mark.long
def test_what_was_stored_is_not_read_at_every_look(tmp_path, monkeypatch):
    """Only an alignment that goes on with another's reads weights back to prove them whole, and only once each."""
    verified: list[Path] = []
    verify = checkpoint.verify_folder
    monkeypatch.setattr(checkpoint, "verify_folder", lambda folder: (verified.append(folder), verify(folder))[1])
    looked(tmp_path, 4)
    assert verified == []
    looked(tmp_path)
    assert len(verified) == len(set(verified)) == 5, "the commit and its four roles"


def test_without_shared_ids_the_loss_is_the_cross_entropy():
    student, probes = pupil_of(exact=False)
    found = student.learner.measure()
    logp_M = learner_of(1).begin(probes.new)
    np.testing.assert_allclose(found.full_M, -logp_M, rtol=1e-5)
    np.testing.assert_allclose(found.log_ratio_M, logp_M, rtol=1e-5)


@pytest.mark.parametrize("size", [3, 5])
def test_output_layers_of_other_sizes(size):
    """A teacher with fewer rows never says the missing ones; with more, the rest is as if they were not there."""
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0]])
    fitted = fitted_head(lambda x: x, size)(logits)
    assert fitted.shape == (1, size)
    wanted = torch.softmax(logits[:, : min(size, 4)], -1)
    torch.testing.assert_close(torch.softmax(fitted, -1)[:, : min(size, 4)], wanted)


def test_the_surrogate_by_hand():
    zero = np.zeros(2)
    divergence = Divergence(zero, zero, zero, log_ratio_M=np.log([2.0, 0.5]))
    assert surrogate(divergence, np.array([1.0, -1.0])) == pytest.approx(0.75)
