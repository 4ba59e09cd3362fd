"""Learn on one flat vector; only this file differentiates.

A model is one flat float32 vector: the module's trainable parameters in their order, each
flattened. One resident module per computing thread serves every worker of a process
(`ashl.learn.replica`), so that N workers cost N vectors instead of N models.

Workers exchange parameters and gradients, and no buffers. A BatchNorm that the model trains
normalises with the statistics of the batch (Ioffe and Szegedy, 2015). An evaluation first estimates
the statistics that belong to its vector, from a fixed set of training samples, in the same way for
every method. Running averages that such a norm gathers in training are never read.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from ashl.config.faults import Guard, hint_for, is_out_of_memory
from ashl.data.augment import crop_flip, draw_crops
from ashl.data.dataset import Data, Split
from ashl.data.rng import Purpose, permutation, stream, torch_seed
from ashl.device import HOST, allow_tf32, read_scalars, seed_generators, to_device, to_host
from ashl.errors import OwnFaultError, UsageError
from ashl.learn.allocator import keep_pages
from ashl.learn.fingerprint import fingerprint, fingerprint_of_data
from ashl.learn.making import make_module
from ashl.learn.module_state import (
    Carrier,
    Key,
    State,
    copy_value,
    find_changed,
    named_tensors,
    set_values,
    state_of,
)
from ashl.learn.pieces import Arriving, Pieces
from ashl.learn.replica import Replica
from ashl.model.plain import PlainModel
from ashl.optimizer.absent import flatten_gradients
from ashl.task.contract import ACCURACY, Task

EVALUATED = 2000  # most training samples for train_loss
# Batches, and samples in each, from which BatchNorm's statistics are estimated.
CALIBRATION = (8, 128)
RESIDENT = 2**32  # most bytes of samples that are kept on the device
REENTRANT = "CheckpointFunctionBackward"  # torch's node of a checkpoint with use_reentrant=True
EVALUATING, TRYING = "in an evaluation", "as it was tried out"
CHUNK = 2**21  # most elements of inputs or outputs in an evaluation batch; it bounds the memory


class ModelOption(Protocol):
    """An option of group model, from `conf/model/*.yaml`."""

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module: ...


class Learner:
    """One resident module and a data set; every result is a pure function of the arguments and the
    seed.

    If it is `threadsafe`, several threads may compute gradients at once.

    Raises: UsageError if the model does not fit the data.
    """

    def __init__(
        self,
        model_option: ModelOption,
        data: Data,
        task: Task,
        *,
        seed: int,
        device: str = HOST,
        precision: str = "fp32",
        graphs: bool = False,
        start: str | None = None,
    ) -> None:
        keep_pages()
        if device != HOST:
            allow_tf32(precision == "tf32")
        self._halved = precision == "bf16"
        self._option, self._data, self._task, self._seed, self.device = (
            model_option,
            data,
            task,
            seed,
            device,
        )
        self.start = start
        made = model_option.make if isinstance(model_option, PlainModel) else type(model_option)
        self._name = made.__name__
        source = ("dataset", data.source)
        model, judge = ("model", dotted_name(made)), ("task", dotted_name(type(task)))
        self._of_data, self._of_forward = (source,), (model, source)
        self._of_loss, self._of_backward = (judge, model, source), (model, judge, source)
        self._here = Replica(self._build, device, graphs)  # for the try-out
        self._train, self._test = move_split(data.train, device), move_split(data.test, device)
        # Convolutions on a CPU are a tenth to a fifth faster on channels-last batches, with equal
        # results.
        self._channels_last = any(
            isinstance(module, nn.Conv2d) for module in self._here.module.modules()
        )
        self._train = self._train.channels_last(RESIDENT) if self._channels_last else self._train
        self._counts = (
            count_targets(task, data.train, "train"),
            count_targets(task, data.test, "test"),
        )
        self.counts = None if self._counts[0] is None else self._counts[0].numpy()
        first = copy_parameters(self._here.module)
        drew, self._width, carried = self._try_out()
        self.writes = find_written(first, copy_parameters(self._here.module))
        copies = bool(self.writes)
        # The first replica has changed its state during the try-out.
        self._here = Replica(self._build, device, graphs, copies)
        own = not made.__module__.startswith("ashl.")
        self.carrier = Carrier(carried, self._build, self._here.apart) if own else None
        # The reporter's thread requests a copy of the worker's state. The next step makes it.
        self.copy_requested, self.copied_state = False, None
        self._captures = graphs and not drew and not carried and self.counts is None
        # A user's own code may draw in some steps only, which one try does not show.
        self._draws = drew or not all(
            part.__module__.startswith("ashl.") for part in (made, type(task))
        )
        # True if a later step may begin to write into its parameters.
        self._looks = not copies and not made.__module__.startswith("ashl.")
        self._versions = 0
        # True if each gradient computed here had an element for each parameter; None before the
        # first one.
        self.complete: bool | None = None
        order = permutation(len(data.train), 0, Purpose.SUBSET)
        self._subset = (order if self.counts is None else order[self.counts[order] > 0])[:EVALUATED]
        self.epoch_samples, self.num_params = len(data.train), self._here.num_params
        # First index of each tensor in a vector of parameters.
        self.starts = np.array([0, *accumulate(p.numel() for p in self._here.parameters)][:-1])
        self.layers = tuple(
            (name, tuple(p.shape))
            for name, p in self._here.module.named_parameters()
            if p.requires_grad
        )

    @property
    def threadsafe(self) -> bool:
        """True if neither the model nor the reading of samples may draw from a generator of the
        process.
        """
        return self.carrier is None and not self._draws and isinstance(self._train.inputs, Tensor)

    def replicate(self) -> None:
        """Make the module of this thread; must be called before it computes, while no other
        thread does.
        """
        self._here.train()

    def init(self) -> Tensor:
        """Return the first parameters, float32 [d]: a function of the seed, or those of the
        initial weights.
        """
        return self._flatten_parameters(self._build())

    def init_untrained(self) -> Tensor:
        """Return the parameters of the untrained model, float32 [d]: a pure function of the
        seed.
        """
        return self._flatten_parameters(self._build(untrained=True))

    def _flatten_parameters(self, module: nn.Module) -> Tensor:
        parameters = [p.detach() for p in module.parameters() if p.requires_grad]
        return to_device(_flatten_dense_tensors(parameters), self.device)

    def fingerprint(self) -> dict[str, list[Any]]:
        """Return the fingerprints of the module's first state and of the data; they must agree
        in all processes.
        """
        state = named_tensors(self._build())
        found = {f"the model's {name}": fingerprint(value) for name, value in state.items()}
        return found | fingerprint_of_data(self._data)

    def worker_state(self, worker: int) -> State | None:
        """Return the part of the module's state that this worker's forward passes have changed;
        None = nothing.
        """
        return (
            None
            if self.carrier is None
            else self.carrier.state_of_worker(self._here.module, worker)
        )

    def set_worker_state(self, worker: int, state: State | None) -> None:
        """Set the module state of a worker; None is the first one."""
        if self.carrier is not None:
            self.carrier.set_state(worker, state)

    @property
    def carries(self) -> bool:
        """True if forward passes change the module besides its parameters."""
        return self.carrier is not None and bool(self.carrier.names)

    def mean_state(self) -> State:
        """Return the mean over the workers of the state that forward passes have changed."""
        if self.carrier is None:
            return {}
        self.carrier.save_worker(self._here.module)
        return self.carrier.mean()

    def constants(self) -> State:
        """Return frozen parameters and buffers that no forward pass has changed, for a
        checkpoint.
        """
        return {} if self.carrier is None else self.carrier.constants(self._here.module)

    def set_constants(self, state: State) -> None:
        """Set the frozen parameters and buffers from a checkpoint."""
        with torch.no_grad():
            set_values(self._here.module, state)

    @contextmanager
    def _evaluation_mode(self, params: Tensor, state: State | None = None) -> Generator[None]:
        """Set the module to these parameters, with the mean state of the workers or with `state`.

        Changes of the module inside are not kept.
        """
        here = self._here
        here.set_parameters(params)
        if self.carrier is not None:
            self.carrier.load_mean(here.module)
            set_values(here.module, state or {})
        with self._seeded_context(Purpose.EVALUATION):
            self._calibrate()
            here.eval()
            yield
        if self.carrier is not None:
            self.carrier.find_new_keys(here.module)

    def _leave(self, worker: int) -> None:
        """Note what the module has changed in a step of this worker, and copy its state if another
        thread has requested that.
        """
        if self.carrier is not None:
            self.carrier.find_new_keys(self._here.module)
            if self.copy_requested:
                self.copied_state, self.copy_requested = self.worker_state(worker), False

    def gradient(
        self, params: Tensor, indices: np.ndarray, worker: int, step: int, share: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss over the samples, a scalar, and its gradient at `params`, a new
        float32 [d].

        Both are on the device and multiplied by `share`. The gradient is −0.0 in parameters without
        one, see `ashl.optimizer.absent`. Augmentation and dropout are drawn from (seed, worker,
        step) alone. `params` is only read.

        Raises: UsageError if a batch is too small for BatchNorm; OwnFaultError.
        """
        return self.gradient_found(params, indices, worker, step, share)[:2]

    def gradient_found(
        self,
        params: Tensor,
        indices: np.ndarray,
        worker: int,
        step: int,
        share: float = 1.0,
        marked: bool = True,
    ) -> tuple[Tensor, Tensor, bool]:
        """Return loss and gradient, as `gradient` does, and True if some parameter has none.

        Without `marked`, −0.0 may occur in a complete gradient, too.
        """
        place, batch = place_of(worker, step), self._training_batch(indices, worker, step)
        with self._seeded_context(Purpose.MODEL, worker, step):
            if not self._captures:
                loss = self._batch_loss(params, batch, worker, step, self._share(indices, share))
                found = self._differentiate(loss, place, marked)
                self._leave(worker)
                return found
            self._enter(params, worker)

            def differentiate_batch(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
                return self._differentiate(
                    self._loss(self._forward, inputs, targets, place), place
                )[:2]

            return *self._here.graphs.run(differentiate_batch, *batch), not self.complete

    def _share(self, indices: np.ndarray, share: float) -> float:
        """Return the share of a batch; 0 if no target of it counts."""
        return share if self.counts is None or self.counts[indices].any() else 0.0

    def _seeded_context(
        self, purpose: Purpose, worker: int = 0, step: int = 0
    ) -> AbstractContextManager:
        """Seed the generators from (seed, purpose, worker, step) inside, if the model may draw."""
        return (
            seed_generators(torch_seed(self._seed, purpose, worker, step), self.device)
            if self._draws
            else nullcontext()
        )

    def _differentiate(
        self, loss: Tensor, place: str, marked: bool = True
    ) -> tuple[Tensor, Tensor, bool]:
        with Guard(self._of_backward, place):
            gradients = torch.autograd.grad(loss, self._here.parameters, allow_unused=True)
        self._check_writes(place)
        return loss.detach(), *self._vector(gradients, self._here.parameters, marked)

    def _check_writes(self, place: str) -> None:
        """Raise UsageError if this step wrote into parameters and none did in the try-out."""
        if self._looks and self._versions != count_writes(self._here.parameters):
            raise UsageError(
                f"{place}: model {self._name} wrote into its own parameters, and did not when it"
                " was tried out; let each forward pass write, or none"
            )

    def stepped_from(self, params: Tensor) -> Tensor:
        """Return the parameters from which the optimizer steps after a gradient at `params`.

        They are `params`, or a new vector if the forward pass wrote into them.
        """
        return self._here.copy_parameters() if self.writes else params

    def _vector(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], marked: bool = True
    ) -> tuple[Tensor, bool]:
        """Return these gradients as one vector and True if any parameter has none; note the
        latter.
        """
        vector, lacks = flatten_gradients(gradients, parameters, marked)
        self.complete = not lacks and self.complete is not False
        return vector, lacks

    def gradient_in_parts(
        self,
        params: Tensor | Pieces,
        indices: np.ndarray,
        worker: int,
        step: int,
        parts: Sequence[tuple[int, int]],
        hand_out: Callable[[int, Tensor], None],
        halfway: Callable[[], None] = lambda: None,
        share: float = 1.0,
    ) -> float:
        """Compute the gradient part by part during the backward pass, and return the loss.

        `hand_out(k, slice)` is called from the thread of the backward pass once all tensors in the
        elements [start, stop) = parts[k] have their gradient. Parts consist of whole tensors. If
        the parameters come in pieces, the forward pass waits for each piece at its first use.
        """
        parameters = self._here.parameters
        bounds = [0, *accumulate(p.numel() for p in parameters)]
        holds = [range(bounds.index(start), bounds.index(stop)) for start, stop in parts]
        part_of = {i: k for k, tensors in enumerate(holds) for i in tensors}
        found: dict[int, Tensor] = {}
        left = [len(tensors) for tensors in holds]

        def hand_out_part(k: int, gradients: Mapping[int, Tensor | None]) -> None:
            own = [gradients[i] for i in holds[k]]
            hand_out(k, self._vector(own, [parameters[i] for i in holds[k]])[0])

        def collect_gradient(i: int, gradient: Tensor) -> None:
            k = part_of[i]
            found[i], left[k] = gradient, left[k] - 1
            if not left[k]:
                hand_out_part(k, {j: found.pop(j) for j in holds[k]})

        place, batch = place_of(worker, step), self._training_batch(indices, worker, step)
        with self._seeded_context(Purpose.MODEL, worker, step):
            loss = self._batch_loss(params, batch, worker, step, self._share(indices, share))
            halfway()
            hooks = [
                p.register_hook(partial(collect_gradient, i)) for i, p in enumerate(parameters)
            ]
            try:
                with Guard(self._of_backward, place):
                    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            finally:
                for hook in hooks:
                    hook.remove()
        self._check_writes(place)
        for k in range(len(holds)):
            if left[k]:  # some of its tensors take no part in the loss
                hand_out_part(k, dict(enumerate(gradients)))
        value = read_scalars([loss.detach()])[0]
        self._leave(worker)
        return value

    def passes_in_parts(
        self,
        params: Tensor,
        indices: np.ndarray,
        worker: int,
        step: int,
        parts: Sequence[tuple[int, int]],
        hand_out: Callable[[int, Tensor], None],
    ) -> float:
        """Compute a gradient with marks for timing, and return the loss.

        There are L parts. `hand_out(k, empty)` is called once forward has finished the k-th part,
        the first layers first. Then `hand_out(L + k, gradient)` is called for the k-th part, the
        last layers first. The reading of a batch counts for the first part. A layer without
        parameters counts for the part before it.
        """
        count, starts = len(parts), [start for start, _ in reversed(parts)]
        came, nothing = 0, torch.empty(0)

        def hand_out_until(group: int) -> None:
            nonlocal came
            if came < group and self.device != HOST:
                torch.cuda.synchronize()
            for k in range(came, group):
                hand_out(k, nothing)
            came = max(came, group)

        bounds = [0, *accumulate(p.numel() for p in self._here.parameters)]
        group_of = {
            id(p): bisect_right(starts, bounds[i]) - 1 for i, p in enumerate(self._here.parameters)
        }
        hooks = []
        for module in self._here.module.modules():
            if own := [
                group_of[id(p)] for p in module.parameters(recurse=False) if id(p) in group_of
            ]:
                first = min(own)
                hooks.append(
                    module.register_forward_pre_hook(lambda *_, first=first: hand_out_until(first))
                )
        try:
            args = (params, indices, worker, step, parts)
            return self.gradient_in_parts(
                *args, lambda k, x: hand_out(count + k, x), lambda: hand_out_until(count)
            )
        finally:
            for hook in hooks:
                hook.remove()

    def work(self) -> tuple[int, ...]:
        """Return the operations of a forward pass by parameter tensor, as torch counts them.

        The operations of a module are attributed to the largest of its own tensors.
        """
        places = {id(p): i for i, p in enumerate(self._here.parameters)}
        work = [0] * len(places)
        if self.carrier is not None:
            self.carrier.save_worker(self._here.module)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self._forward(self._batch(self._train, np.zeros(2, np.int64))[0])
        counted = {name: sum(by.values()) for name, by in counter.get_flop_counts().items()}
        root = type(self._here.module).__name__
        for name, module in self._here.module.named_modules(prefix=root):
            own = [p for p in module.parameters(recurse=False) if id(p) in places]
            if own:
                inside = sum(
                    counted.get(f"{name}.{child}", 0) for child, _ in module.named_children()
                )
                work[places[id(max(own, key=Tensor.numel))]] += counted.get(name, 0) - inside
        return tuple(work)

    def _batch_loss(
        self,
        params: Tensor | Pieces,
        batch: tuple[Tensor, Tensor],
        worker: int,
        step: int,
        share: float,
    ) -> Tensor:
        """Return the mean loss over a batch at `params` times `share`, ready to be
        differentiated.
        """
        self._enter(params, worker)
        forward = (
            self._forward
            if isinstance(params, Tensor)
            else partial(self._forward_as_pieces_arrive, params, worker, step)
        )
        loss = self._loss(forward, *batch, place_of(worker, step), counted=share != 0)
        return loss if share in (0, 1) else loss * share

    def _training_batch(self, indices: np.ndarray, worker: int, step: int) -> tuple[Tensor, Tensor]:
        """Return a batch for training, augmented."""
        inputs, targets = self._batch(self._train, indices, worker, step, place_of(worker, step))
        if self._data.augment == "crop_flip":
            moves = draw_crops(len(indices), stream(self._seed, Purpose.AUGMENT, worker, step))
            inputs = crop_flip(inputs, to_device(moves, self.device))
        return inputs, targets

    def _enter(self, params: Tensor | Pieces, worker: int) -> None:
        """Set the module to these parameters, in training mode, with the module state of this
        worker.
        """
        if self.carrier is not None:
            with torch.no_grad():
                self.carrier.load_worker(self._here.module, worker)
        if isinstance(params, Tensor):
            self._here.set_parameters(params)
        if not self._here.trains:
            self._here.train()
        if self._looks:
            self._versions = count_writes(self._here.parameters)

    def _loss(
        self,
        forward: Callable[[Tensor], Tensor],
        inputs: Tensor,
        targets: Tensor,
        place: str,
        counted: bool = True,
    ) -> Tensor:
        """Return the mean loss of a batch; 0 without a gradient if no target of it counts."""
        try:
            with Guard(self._of_forward, place):
                outputs = forward(inputs)
        except (ValueError, OwnFaultError) as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise UsageError(
                f"Model {self._name} normalises over the batch, and the batch of {len(inputs)} of"
                f" {place} is too small for that; take dataset.batch_size=2 or more."
            ) from error
        if not counted:
            return outputs.new_zeros((), requires_grad=True)  # no parameter takes part in it
        with Guard(self._of_loss, place):
            return self._task.loss(outputs, targets)

    def samples(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return inputs [features, samples] and targets [values, samples], float32; classes as 0
        and 1.
        """
        inputs, targets = self._batch(self._train, indices)
        if self._data.train.has_classes:
            classes = torch.arange(self._data.num_classes, device=self.device)
            targets = targets[..., None] == classes
        return inputs.flatten(1).T.float(), targets.flatten(1).T.float()

    @torch.no_grad()
    def evaluate(self, params: Tensor) -> dict[str, float | None]:
        """Return `train_loss` over a fixed subset of the training set, and loss and metric over the
        test set.

        `test_metric` is None if the task has none, `test_accuracy` if its metric is another one.
        """
        with self._evaluation_mode(params):
            train_loss, _ = self._score(self._train, self._subset)
            test_loss, metric = self._score(self._test, np.arange(len(self._test)), judged=True)
        return {
            "train_loss": train_loss,
            "test_loss": test_loss,
            "test_accuracy": metric if self._task.metric == ACCURACY else None,
            "test_metric": metric,
        }

    @torch.no_grad()
    def train_loss(self, params: Tensor, shift: int = 0) -> float:
        """Return `train_loss` as `evaluate` does; with a `shift`, each sample has the target of
        another one.
        """
        with self._evaluation_mode(params):
            return self._score(self._train, self._subset, shift=shift)[0]

    @torch.no_grad()
    def state_dict(self, params: Tensor, own: State | None = None) -> dict[str, Tensor]:
        """Return the whole state of the module at these parameters, by its own names, on the CPU.

        BatchNorm's statistics are those that an evaluation estimates. State that forward passes
        change is the workers' mean, or `own`.
        """
        with self._evaluation_mode(params, own):
            state = self._here.module.state_dict()
            return {
                name: to_host(value).clone()
                for name, value in state.items()
                if isinstance(value, Tensor)
            }

    def _batch(
        self,
        split: Split,
        indices: np.ndarray,
        worker: int = 0,
        step: int = 0,
        place: str = EVALUATING,
    ) -> tuple[Tensor, Tensor]:
        """Return a batch; reading samples draws from (seed, worker, step) alone."""
        if not isinstance(split.inputs, Tensor):
            guard = Guard(self._of_data, place)
            with (
                guard,
                seed_generators(torch_seed(self._seed, Purpose.AUGMENT, worker, step), HOST),
            ):
                inputs, targets = split.batch(indices)
        elif self.device == HOST:
            return split.batch(indices)
        else:
            inputs, targets = split.batch(
                to_device(torch.from_numpy(indices), str(split.targets.device))
            )
        return to_device(inputs, self.device), to_device(targets, self.device)

    def _build(self, *, untrained: bool = False) -> nn.Module:
        start = None if untrained else self.start
        with Guard(self._of_forward[:1]):
            module = make_module(
                self._option, self._data.sample_shape, self._data.num_classes, self._seed, start
            )
        if any(parameter.is_meta for parameter in module.parameters()):
            raise UsageError(
                f"Model {self._name} has parameters without values, on torch's device meta; make"
                " them on the CPU."
            )
        if any(is_lazy(parameter) for parameter in module.parameters()):
            raise UsageError(
                f"Model {self._name} has lazy layers without sizes; give them their sizes, for"
                " example nn.Linear(16, 4) in place of nn.LazyLinear(4)."
            )
        return module

    def _try_out(self) -> tuple[bool, int, frozenset[Key]]:
        """Compute a gradient and an evaluation of two samples, to check that module, data and task
        fit.

        Returns: True if the module draws random numbers in training; the number of outputs per
        sample; the keys of the state that the module changes besides its parameters.
        """
        name, shape = self._name, "x".join(map(str, self._data.sample_shape))
        if not self._here.parameters or any(
            p.dtype != torch.float32 for p in self._here.parameters
        ):
            raise UsageError(f"Model {name} must have trainable parameters, all of them float32.")
        inputs, targets = self._batch(self._train, np.zeros(2, np.int64))
        first = {
            key: copy_value(value)
            for key, value in state_of(self._here.module, self._here.apart).items()
        }
        expected = self._task.output_shape(targets, self._data.num_classes)
        with seed_generators(0, self.device) as generator:
            before = generator.get_state()
            output = self._run_forward(inputs)
            if not isinstance(output, Tensor) or (
                expected is not None and output.shape != expected
            ):
                raise UsageError(
                    f"Model {name} returns {shape_of(output)} for two samples of shape {shape}, and"
                    f" should return {expected or 'a tensor'}."
                )
            draws = not torch.equal(before, generator.get_state())
            with Guard(self._of_loss, TRYING):
                loss = self._task.loss(output, targets)
        if not isinstance(loss, Tensor) or loss.shape != ():
            raise UsageError(
                f"Task {type(self._task).__name__} returns {shape_of(loss)} as loss, and should"
                " return one number."
            )
        if has_node(loss, REENTRANT):
            raise UsageError(
                f"Model {name} has a reentrant checkpoint: its parameters would get no gradient"
                " here; pass use_reentrant=False to torch.utils.checkpoint."
            )
        with Guard(self._of_backward, TRYING):
            torch.autograd.grad(loss, self._here.parameters, allow_unused=True)
        self._here.eval()
        with torch.no_grad(), seed_generators(0, self.device):
            evaluated = self._run_forward(inputs)
        self._here.train()
        if shape_of(evaluated) != shape_of(output):
            raise UsageError(
                f"Model {name} returns {shape_of(evaluated)} in evaluation mode and"
                f" {shape_of(output)} in training; let its forward return the same in both."
            )
        return (
            draws,
            output[0].numel(),
            find_changed(first, state_of(self._here.module, self._here.apart)),
        )

    def _run_forward(self, inputs: Tensor) -> Any:
        """Return the module's output for these samples. Raises UsageError if it cannot read
        them.
        """
        with Guard(self._of_forward, TRYING):
            try:
                return self._forward(inputs)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                if is_out_of_memory(error):
                    raise
                shape, said = "x".join(map(str, self._data.sample_shape)), str(error).split("\n")[0]
                raise UsageError(
                    f"Model {self._name} cannot take samples of shape {shape} ({said}); "
                    f"{hint_for(error) or 'take another'}."
                ) from error

    def _forward(self, inputs: Tensor) -> Tensor:
        if self._channels_last and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if not self._halved:
            return self._here.module(inputs)
        with torch.autocast(self.device.partition(":")[0], torch.bfloat16):
            return self._here.module(inputs).float()

    def _forward_as_pieces_arrive(
        self, pieces: Pieces, worker: int, step: int, inputs: Tensor
    ) -> Tensor:
        """Run a forward pass on parameters that arrive meanwhile.

        They are placed in memory as in one vector, because the start of a matrix decides for some
        kernels in which order they add.
        """
        if self._here.resident is None:
            self._here.set_parameters(torch.empty(self.num_params, device=self.device))
        before = self.worker_state(worker)
        arriving = Arriving(pieces, self._here.parameters)
        arriving.await_all(self._here.hidden)
        with arriving:
            outputs = self._forward(inputs)
        arriving.await_all(map(id, self._here.parameters))
        if arriving.unseen <= self._here.hidden:
            return outputs
        self.set_worker_state(worker, before)  # the first pass has changed something
        self._enter(pieces, worker)
        self._here.hidden |= arriving.unseen
        with self._seeded_context(Purpose.MODEL, worker, step):
            return self._forward(inputs)

    def _calibrate(self) -> None:
        """Estimate BatchNorm's statistics at these parameters, as plain averages over equal
        batches.
        """
        if not self._here.norms:
            return
        self._here.eval()
        momenta = [norm.momentum for norm in self._here.norms]
        for norm in self._here.norms:
            norm.train()
            norm.reset_running_stats()
            norm.momentum = None  # the plain average, in torch's terms
        batches, size = CALIBRATION
        size = min(size, self._chunk(), len(self._subset))
        for part in np.split(
            self._subset[: len(self._subset) // size * size], len(self._subset) // size
        )[:batches]:
            with Guard(self._of_forward, EVALUATING):
                self._forward(self._batch(self._train, part)[0])
        for norm, momentum in zip(self._here.norms, momenta, strict=True):
            norm.momentum = momentum

    def _chunk(self) -> int:
        return max(2, min(500, CHUNK // max(math.prod(self._data.sample_shape), self._width)))

    def _score(
        self, split: Split, indices: np.ndarray, *, judged: bool = False, shift: int = 0
    ) -> tuple[float, float | None]:
        """Return the mean loss over the targets that count and, if `judged`, the task's metric.

        With a `shift`, each sample has the target of the sample that is `shift` places before it.
        """
        losses, total, judged = 0.0, 0.0, judged and self._task.metric != ""
        counts = self._counts[split is self._test]
        sums: Tensor | float = 0.0
        for part in split_indices(indices, self._chunk()):
            inputs, targets = self._batch(split, part)
            with Guard(self._of_forward, EVALUATING):
                outputs = self._forward(inputs)
            targets = targets.roll(shift, 0) if shift else targets
            count = len(targets) if counts is None else float(counts[torch.from_numpy(part)].sum())
            if count:
                with Guard(self._of_loss, EVALUATING):
                    losses += read_scalars([self._task.loss(outputs, targets)])[0] * count
            total += count
            if judged:
                with Guard(self._of_loss, EVALUATING):
                    sums += (
                        self._task.scores(outputs, targets)
                        .double()
                        .reshape(len(targets), -1)
                        .sum(0)
                    )
        if not isinstance(sums, Tensor):
            return losses / total, None
        with Guard(self._of_loss, EVALUATING):
            return losses / total, float(self._task.value(to_host(sums) / len(indices)))


def place_of(worker: int, step: int) -> str:
    """Return the place of an exception, for its message."""
    return f"worker {worker}, step {step}"


def has_node(output: Tensor, name: str) -> bool:
    """Return True if the graph behind a tensor has a node of this name."""
    left, seen = [output.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node.name() == name:
            return True
        seen.add(node)
        left += [before for before, _ in node.next_functions]
    return False


def shape_of(value: Any) -> Any:
    """Return the shape of a tensor, and the type name of any other value."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def dotted_name(made: Any) -> str:
    """Return the dotted name of a class or a function."""
    return f"{made.__module__}.{made.__qualname__}"


def count_targets(task: Task, split: Split, half: str) -> Tensor | None:
    """Return how many targets of each sample count, float64 [n]; None if all samples count equally.

    Raises: UsageError if no target of the half counts.
    """
    counts = task.counts(split.targets)
    if counts is None:
        return None
    counts = to_host(counts).double()
    if not counts.any():
        raise UsageError(
            f"dataset: no target of its {half} half counts, all are"
            f" task.ignore_index={task.ignore_index}; give it some"
        )
    return None if bool((counts == counts[0]).all()) else counts


def split_indices(indices: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Divide indices into parts of `most`, of which the last may be shorter.

    No part has one sample, unless there is only one in all, because a norm over the batch refuses
    that. The part before it is then larger by one.
    """
    start = 0
    while start < len(indices):
        stop = len(indices) if len(indices) - start <= most + 1 else start + most
        yield indices[start:stop]
        start = stop


def count_writes(parameters: Sequence[nn.Parameter]) -> int:
    """Return how often these parameters have been written to, as torch counts."""
    return sum(p._version for p in parameters)


def copy_parameters(module: nn.Module) -> dict[str, tuple[int, Tensor]]:
    """Return for each trainable parameter how often it has been written to, and a copy."""
    learned = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return {name: (p._version, p.detach().clone()) for name, p in learned}


def find_written(
    before: dict[str, tuple[int, Tensor]], after: dict[str, tuple[int, Tensor]]
) -> tuple[str, ...]:
    """Return the names of parameters written to between two calls of `copy_parameters`."""
    pairs = ((name, before[name], after[name]) for name in before if name in after)
    return tuple(
        name
        for name, old, new in pairs
        if old[0] != new[0] or not torch.allclose(old[1], new[1], 0, 0, equal_nan=True)
    )


def move_split(split: Split, device: str) -> Split:
    """Return the split with its samples on the device, if they have at most `RESIDENT` bytes."""
    if device == HOST or not isinstance(split.inputs, Tensor) or split.inputs.nbytes > RESIDENT:
        return split
    return replace(
        split, inputs=to_device(split.inputs, device), targets=to_device(split.targets, device)
    )
