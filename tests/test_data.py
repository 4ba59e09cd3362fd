"""Data sets that need no files, how they are dealt out, and in which batches they are walked."""

import numpy as np
import pytest
import torch
from conf_option import conf_option, task_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ashl.data.augment import crop_flip, draw_crops
from ashl.data.batches import Batches
from ashl.data.partition import apportion_with_minimum, make_shards
from ashl.data.quadratic import optimum
from ashl.data.rng import Purpose, permutation, stream, torch_seed
from ashl.errors import UsageError
from ashl.learn.learner import Learner

DIGITS = conf_option("dataset", "digits").load()
TOTAL = len(DIGITS.train)


def deal(partition, num_workers, *, shares=None, alpha=None, seed=0, batch=1):
    return make_shards(
        DIGITS, partition, shares or [1] * num_workers, alpha, seed, [batch] * num_workers
    )


# --- batches
# --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 40), data=st.data(), shuffle=st.booleans())
def test_every_sample_once_an_epoch_and_every_batch_full(size, data, shuffle):
    batch = data.draw(st.integers(1, size))
    shard = np.arange(100, 100 + size)
    walk = Batches(shard, batch, seed=3, worker=1, shuffle=shuffle)
    batches = [
        walk.indices(step) for step in range(3 * size)
    ]  # 3 · batch epochs, to the last sample
    assert all(len(indices) == batch for indices in batches)
    epochs = np.concatenate(batches).reshape(-1, size)
    assert all(np.array_equal(np.sort(epoch), shard) for epoch in epochs)
    if not shuffle:
        assert all(np.array_equal(epoch, shard) for epoch in epochs)


def test_a_batch_is_a_function_of_seed_worker_and_step():
    walk = Batches(np.arange(50), 8, seed=1, worker=2)
    forward = [walk.indices(step).tolist() for step in range(30)]
    assert [
        Batches(np.arange(50), 8, seed=1, worker=2).indices(step).tolist() for step in range(30)
    ] == forward
    assert [walk.indices(step).tolist() for step in reversed(range(30))] == forward[::-1]
    assert Batches(np.arange(50), 8, seed=2, worker=2).indices(0).tolist() != forward[0]
    assert Batches(np.arange(50), 8, seed=1, worker=3).indices(0).tolist() != forward[0]
    orders = {tuple(np.concatenate(forward)[epoch * 50 : (epoch + 1) * 50]) for epoch in range(4)}
    assert len(orders) == 4


def test_streams_do_not_depend_on_each_other_nor_on_numpy_s_version():
    assert permutation(8, 1, Purpose.ORDER, 2, 3).tolist() == [5, 3, 6, 7, 1, 0, 4, 2]
    assert torch_seed(0, Purpose.INIT) == torch_seed(0, Purpose.INIT) < 2**63
    keys = [
        (0, Purpose.ORDER),
        (0, Purpose.MODEL),
        (1, Purpose.ORDER),
        (0, Purpose.ORDER, 1),
        (0, Purpose.ORDER, 0, 1),
    ]
    assert len({torch_seed(*key) for key in keys}) == len(keys)


# --- partition
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partition", "alpha"),
    [("iid", None), ("plan", None), ("dirichlet", 0.3), ("interleaved", None)],
)
@pytest.mark.parametrize("num_workers", [1, 3, 7])
def test_shards_are_disjoint_cover_everything_and_follow_the_seed(partition, alpha, num_workers):
    shares = list(range(1, num_workers + 1))
    parts = deal(partition, num_workers, shares=shares, alpha=alpha)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(TOTAL))
    again = deal(partition, num_workers, shares=shares, alpha=alpha)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    if num_workers > 1 and partition != "interleaved":
        assert not np.array_equal(
            parts[0], deal(partition, num_workers, shares=shares, alpha=alpha, seed=1)[0]
        )


def test_iid_is_equal_and_plan_is_in_proportion():
    assert sorted(len(part) for part in deal("iid", 4)) == [359, 359, 359, 360]
    shares = [0.5, 0.25, 0.2, 0.05]
    sizes = [len(part) for part in deal("plan", 4, shares=shares)]
    assert sum(sizes) == TOTAL
    assert all(abs(size - share * TOTAL) < 1 for size, share in zip(sizes, shares, strict=True))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-6, 1), st.integers(1, 300)), min_size=1, max_size=8))
def test_the_least_planned_share_is_a_batch(rows):
    """A worker with a planned share below a batch gets one batch; the others share the rest in
    proportion.
    """
    shares, batch = zip(*rows, strict=True)
    total = max(TOTAL, sum(batch))
    sizes = apportion_with_minimum(total, shares, batch)
    assert sizes.sum() == total
    assert (sizes >= batch).all()
    free = [i for i, size in enumerate(sizes) if size > batch[i]]
    rate = sum(sizes[i] for i in free) / sum(shares[i] for i in free) if free else 0
    assert all(abs(sizes[i] - rate * shares[i]) < 2 for i in free)
    assert np.array_equal(apportion_with_minimum(total, sizes / total, batch), sizes), (
        "what is dealt out is dealt out alike again"
    )


def test_interleaved_workers_make_up_one_worker_s_batches():
    parts = deal("interleaved", 3, batch=4)
    together = Batches(np.arange(TOTAL), 12, 0, 0, shuffle=False)
    apart = [Batches(part, 4, 0, worker, shuffle=False) for worker, part in enumerate(parts)]
    for step in range(3 * TOTAL // 12):  # 1437 is a multiple of 3, so also over the wrap
        union = np.concatenate([walk.indices(step) for walk in apart])
        assert sorted(union) == sorted(together.indices(step))


def test_dirichlet_is_the_more_skewed_the_smaller_alpha():
    def largest_class_share(alpha):
        counts = [
            np.bincount(DIGITS.train.labels[part], minlength=10)
            for part in deal("dirichlet", 4, alpha=alpha)
        ]
        return np.mean([count.max() / count.sum() for count in counts])

    assert largest_class_share(0.05) > 0.3 > largest_class_share(1000) > 0.1


def test_a_batch_larger_than_its_shard_is_refused_by_name():
    with pytest.raises(
        UsageError, match=r"Worker 1's shard holds 359 .* batch of 400; .*batch_size=359"
    ):
        deal("iid", 4, batch=400)
    with pytest.raises(UsageError, match=r"Worker"):  # after so many draws there is no fair one
        deal("dirichlet", 4, alpha=0.01, batch=350)


@pytest.mark.parametrize("fields", [{"partition": "dirichlet"}, {"alpha": 0.5}])
def test_alpha_belongs_to_dirichlet(fields):
    with pytest.raises(UsageError, match=r"dataset\.alpha"):
        conf_option("dataset", "digits", **fields)


def test_dirichlet_needs_classes():
    data = conf_option("dataset", "quadratic").load()
    assert not data.train.labels.any()
    with pytest.raises(UsageError, match=r"class labels"):
        make_shards(data, "dirichlet", [1, 1], 0.5, 0, [1, 1])


# --- data sets
# --------------------------------------------------------------------------------------------------


def test_digits_are_split_once_and_for_all():
    assert (len(DIGITS.train), len(DIGITS.test), DIGITS.sample_shape, DIGITS.num_classes) == (
        1437,
        360,
        (1, 8, 8),
        10,
    )
    inputs, targets = DIGITS.train.batch(np.arange(TOTAL))
    assert (inputs.dtype, inputs.shape, targets.dtype) == (
        torch.float32,
        (TOTAL, 1, 8, 8),
        torch.int64,
    )
    assert abs(float(inputs.mean())) < 0.01
    assert abs(float(inputs.std()) - 1) < 0.01
    assert DIGITS.train.labels.tolist() == targets.tolist()
    assert np.bincount(DIGITS.test.labels).min() > 20
    assert DIGITS.test.labels[:8].tolist() == [4, 0, 2, 8, 7, 1, 0, 5]


def test_quadratic_s_closed_form_is_where_the_gradient_vanishes():
    data = conf_option("dataset", "quadratic", num_samples=100, noise=0.5).load()
    learner = Learner(conf_option("model", "linear"), data, task_of(data), seed=0)
    best, lowest = optimum(data)
    loss, grad = learner.gradient(best, np.arange(100), 0, 0)
    assert float(grad.abs().max()) < 1e-6
    assert loss == pytest.approx(lowest, rel=1e-5)
    assert learner.evaluate(best)["train_loss"] == pytest.approx(lowest, rel=1e-5)
    for _ in range(5):
        assert learner.gradient(best + 0.1 * torch.randn(17), np.arange(100), 0, 0)[0] > lowest
    assert 0.05 < lowest < 0.5 * 0.5**2  # a little below half of the noise's variance


@pytest.mark.parametrize("shape", [[12], [3, 9, 7]])
def test_synthetic_is_a_function_of_its_fields_and_can_be_learned(shape):
    option = conf_option(
        "dataset", "synthetic", shape=shape, num_classes=4, num_train=400, num_test=200
    )
    data = option.load()
    assert data.sample_shape == tuple(shape)
    learner = Learner(conf_option("model", "linear"), data, task_of(data), seed=0)
    params = learner.init()
    for step in range(100):
        params = params - 0.05 * learner.gradient(params, np.arange(400), 0, step)[1]
    assert learner.evaluate(params)["test_accuracy"] > 0.95
    again = option.load()
    assert torch.equal(again.train.inputs, data.train.inputs)
    assert not torch.equal(
        conf_option("dataset", "synthetic", shape=shape, seed=1).load().train.inputs[0],
        data.train.inputs[0],
    )


def test_synthetic_shape_is_a_vector_or_an_image():
    with pytest.raises(UsageError, match=r"dataset\.shape"):
        conf_option("dataset", "synthetic", shape=[8, 8]).load()


# --- augmentation
# --------------------------------------------------------------------------------------------------


def test_crop_flip_shifts_and_mirrors():
    images = torch.arange(1.0, 1 + 64 * 2 * 5 * 6).reshape(64, 2, 5, 6)
    moved = crop_flip(images, draw_crops(64, stream(0, Purpose.AUGMENT)))
    assert moved.shape == images.shape
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    kinds = set()
    for image, source in zip(moved, padded, strict=True):
        places = [
            (row, column, mirrored)
            for mirrored in (False, True)
            for row in range(9)
            for column in range(9)
            if torch.equal(
                image,
                source.flip(2)[:, row : row + 5, 8 - column : 14 - column]
                if mirrored
                else source[:, row : row + 5, column : column + 6],
            )
        ]
        assert places
        kinds.add(places[0])
    assert len(kinds) > 30
    assert torch.equal(moved, crop_flip(images, draw_crops(64, stream(0, Purpose.AUGMENT))))
