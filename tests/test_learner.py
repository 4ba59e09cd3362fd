"""The learner: gradients as autograd gives them, everything a pure function of its arguments."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conf_option import conf_option, task_of
from torch import nn
from torch.nn import functional

from ashl.errors import UsageError
from ashl.learn.learner import Learner

DIGITS = conf_option("dataset", "digits").load()
SOME = np.arange(16)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made_up(shape, num_classes=10, count=64):
    """A data set of a given shape; what the model sees matters more here than what it learns."""
    fields = {"shape": list(shape), "num_classes": num_classes, "num_train": count, "num_test": 32}
    return conf_option("dataset", "synthetic", **fields).load()


class Made:
    """A model option for tests: layers in sequence, each from a function that makes it."""

    def __init__(self, *layers):
        self.layers = layers

    def build(self, sample_shape, num_classes):
        return nn.Sequential(*[make() for make in self.layers])


def with_parameters(module, params):
    nn.utils.vector_to_parameters(params.clone(), module.parameters())
    return module


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("mlp", DIGITS),
        ("cnn", DIGITS),
        ("resnet8", made_up((3, 16, 16))),
        ("linear", conf_option("dataset", "quadratic").load()),
    ],
)
def test_gradient_is_autograd_s(model, data):
    option = conf_option("model", model)
    learner = Learner(option, data, task_of(data), seed=0)
    params = learner.init() * 1.5
    loss, grad = learner.gradient(params, SOME, worker=0, step=0)
    module = with_parameters(option.build(data.sample_shape, data.num_classes), params)
    inputs, targets = data.train.batch(SOME)
    outputs = module(inputs)
    plain = (
        functional.cross_entropy(outputs, targets)
        if data.train.has_classes
        else (outputs - targets).square().mean() / 2
    )
    plain.backward()
    assert loss == pytest.approx(plain.item(), rel=1e-5)
    expected = torch.cat([p.grad.flatten() for p in module.parameters()])
    assert float((grad - expected).norm() / expected.norm()) < 1e-5
    assert (grad.dtype, grad.shape) == (torch.float32, (learner.num_params,))


def test_init_follows_the_seed_and_leaves_the_global_generator_alone():
    option = conf_option("model", "mlp")
    before = torch.get_rng_state()
    learner = Learner(option, DIGITS, task_of(DIGITS), seed=5)
    first = learner.init()
    learner.gradient(first + 1, SOME, 0, 0)
    assert torch.equal(learner.init(), first)
    assert torch.equal(Learner(option, DIGITS, task_of(DIGITS), seed=5).init(), first)
    assert not torch.equal(Learner(option, DIGITS, task_of(DIGITS), seed=6).init(), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_arguments_stay_and_gradients_are_fresh():
    learner = Learner(
        conf_option("model", "resnet8"), made_up((3, 8, 8)), task_of(made_up((3, 8, 8))), seed=0
    )
    params = learner.init()
    before = params.clone()
    _, first = learner.gradient(params, SOME, 0, 0)
    kept = first.clone()
    learner.evaluate(params)
    _, second = learner.gradient(params + 1, SOME, 1, 1)
    assert torch.equal(params, before)
    assert torch.equal(first, kept)
    assert len({tensor.data_ptr() for tensor in (params, first, second)}) == 3


def test_a_gradient_does_not_depend_on_what_was_computed_before():
    learner = Learner(
        conf_option("model", "resnet8"), made_up((3, 8, 8)), task_of(made_up((3, 8, 8))), seed=0
    )
    params = learner.init()
    loss, grad = learner.gradient(params, SOME, 0, 0)
    learner.gradient(params * 2, SOME + 3, 1, 1)
    learner.evaluate(params * 3)
    again_loss, again = learner.gradient(params, SOME, 0, 0)
    assert again_loss == loss
    assert torch.equal(again, grad)


def test_augmentation_follows_worker_and_step():
    images = replace(made_up((3, 8, 8)), augment="crop_flip")
    option = Made(nn.Flatten, lambda: nn.Linear(3 * 8 * 8, 10))
    learner = Learner(option, images, task_of(images), seed=0)
    params = learner.init()
    keys = ((0, 0), (0, 1), (1, 0))
    grads = [learner.gradient(params, SOME, *key)[1] for key in keys]
    assert all(map(torch.equal, grads, [learner.gradient(params, SOME, *key)[1] for key in keys]))
    other = Learner(option, images, task_of(images), seed=1)
    grads.append(other.gradient(params, SOME, 0, 0)[1])
    assert len({grad.numpy().tobytes() for grad in grads}) == len(grads)


def test_evaluation_is_plain_and_repeatable():
    learner = Learner(conf_option("model", "mlp"), DIGITS, task_of(DIGITS), seed=0)
    params = learner.init()
    result = learner.evaluate(params)
    module = with_parameters(conf_option("model", "mlp").build((1, 8, 8), 10), params).eval()
    with torch.no_grad():
        for split, loss in ((DIGITS.train, "train_loss"), (DIGITS.test, "test_loss")):
            inputs, targets = split.batch(np.arange(len(split)))
            outputs = module(inputs)
            assert result[loss] == pytest.approx(
                functional.cross_entropy(outputs, targets).item(), rel=1e-5
            )
    assert result["test_accuracy"] == pytest.approx(
        (outputs.argmax(1) == targets).float().mean().item()
    )
    learner.gradient(params + 1, SOME, 0, 0)
    assert learner.evaluate(params) == result


def test_batch_norm_s_statistics_are_those_of_the_parameters_at_hand():
    data = made_up((6,), num_classes=3, count=100)
    option = Made(lambda: nn.Linear(6, 5), lambda: nn.BatchNorm1d(5), lambda: nn.Linear(5, 3))
    learner = Learner(option, data, task_of(data), seed=0)
    params = learner.init() * 3
    result = learner.evaluate(params)
    module = with_parameters(option.build((6,), 3), params)
    module[1].momentum = None
    with torch.no_grad():
        module(data.train.batch(np.arange(100))[0])  # all of it is one batch, in any order
        inputs, targets = data.test.batch(np.arange(len(data.test)))
        expected = functional.cross_entropy(module.eval()(inputs), targets).item()
    assert result["test_loss"] == pytest.approx(expected, rel=1e-4)
    for step in range(3):
        learner.gradient(params * 5, SOME, 0, step)  # no state of training is read
    assert learner.evaluate(params) == result


def test_not_a_number_is_reported_as_such():
    learner = Learner(conf_option("model", "linear"), DIGITS, task_of(DIGITS), seed=0)
    params = torch.full((learner.num_params,), float("nan"))
    assert torch.isnan(learner.gradient(params, SOME, 0, 0)[0])
    assert np.isnan(learner.evaluate(params)["test_loss"])


FITTING = [
    ("linear", (7,)),
    ("linear", (3, 8, 8)),
    ("mlp", (7,)),
    ("cnn", (1, 8, 8)),
    ("cnn", (3, 33, 20)),
    ("lenet", (1, 28, 28)),
    ("lenet", (3, 40, 56)),
    ("resnet8", (3, 32, 32)),
    ("resnet20", (3, 32, 32)),
    ("resnet18", (3, 32, 32)),
    pytest.param("resnet50", (3, 32, 32), marks=pytest.mark.slow),
    ("mobilenet_v2", (3, 32, 32)),
    pytest.param("vgg11_bn", (3, 32, 32), marks=pytest.mark.slow),
    pytest.param("vgg16_bn", (3, 32, 32), marks=pytest.mark.slow),
    pytest.param("vgg11_bn", (3, 64, 64), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "shape"), FITTING)
def test_every_model_learns_from_a_fitting_shape(model, shape):
    data = made_up(shape, num_classes=5, count=16)
    learner = Learner(conf_option("model", model), data, task_of(data), seed=0)
    params = learner.init()
    loss, grad = learner.gradient(params, np.arange(4), 0, 0)
    assert 0 < loss < 20
    assert torch.isfinite(grad).all()
    assert learner.gradient(params - 1e-2 * grad / grad.norm(), np.arange(4), 0, 0)[0] != loss


@pytest.mark.parametrize(
    ("model", "shape", "words"),
    [
        ("cnn", (7,), r"cnn needs images .* shape 7; take model=mlp or model=linear, or model=gpt"),
        ("cnn", (1, 3, 9), r"at least 4x4"),
        ("lenet", (1, 8, 8), r"lenet needs images of at least 28x28"),
        ("resnet8", (7,), r"resnet8 needs images"),
        ("resnet18", (1, 8, 8), r"resnet18 needs images of at least 32x32"),
        ("resnet18", (1, 32, 32), r"resnet18 needs images of 3 channels"),
    ],
)
def test_a_model_that_does_not_fit_says_what_does(model, shape, words):
    with pytest.raises(UsageError, match=words):
        conf_option("model", model).build(shape, 10)


def test_models_that_do_not_exist():
    with pytest.raises(UsageError, match=r"did you mean resnet18\?"):
        conf_option("model", "resnet18", name="resnet81").build((3, 32, 32), 10)
    with pytest.raises(UsageError, match=r"6n \+ 2"):
        conf_option("model", "resnet8", depth=9).build((3, 32, 32), 10)


def test_known_sizes():
    def count(model, shape):
        return sum(p.numel() for p in conf_option("model", model).build(shape, 10).parameters())

    assert count("lenet", (1, 28, 28)) == 61_706
    assert count("resnet8", (3, 32, 32)) == 75_290
    assert count("resnet20", (3, 32, 32)) == 269_722
    assert count("resnet18", (3, 32, 32)) == 11_181_642


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((nn.Flatten, lambda: nn.Linear(9, 10)), r"cannot take samples of shape 1x8x8"),
        ((nn.Flatten, lambda: nn.Linear(64, 3)), r"should return \(2, 10\)"),
        ((nn.Flatten,), r"trainable parameters"),
        ((nn.Flatten, lambda: nn.Linear(64, 10).double()), r"float32"),
    ],
)
def test_a_user_s_own_model_is_tried_out(layers, words):
    with pytest.raises(UsageError, match=words):
        Learner(Made(*layers), DIGITS, task_of(DIGITS), seed=0)


def test_a_batch_of_one_cannot_be_normalised_over():
    option = Made(nn.Flatten, lambda: nn.Linear(64, 10), lambda: nn.BatchNorm1d(10))
    learner = Learner(option, DIGITS, task_of(DIGITS), seed=0)
    with pytest.raises(UsageError, match=r"batch_size=2"):
        learner.gradient(learner.init(), np.arange(1), 0, 0)
