"""Backward: autograd hooks that send gradients during backward; `backward()` returns with averaged gradients."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.core.errors import AttachError
from gossamer.core.schedule import together
from gossamer.core.stream_events import copied_to
from gossamer.core.verbs import MembersChanged, Program, all_reduce, join
from gossamer.integrations.checks import introspection
from gossamer.integrations.checks.wrappers import LOOKS, refuse_capture, refuse_ran_wrapper
from gossamer.integrations.grad_buckets import GradBuckets
from gossamer.integrations.grad_scaler import KnownScale
from gossamer.integrations.held_model import HeldModel
from gossamer.integrations.steps import StepLoop
from gossamer.kernels.finite import all_finite, all_peaks_finite, peak


class Backward:
    """Detects the start and end of a backward pass, passes gradients to `GradBuckets`, and writes the averages back."""

    def __init__(self, steps: StepLoop, looped: nn.Module, held: HeldModel, *, find_unused: bool) -> None:
        self.looped, self.held = looped, held  # what the training loop calls: the model, or DDP around it
        self.steps, self.worker, self.fabric = steps, steps.worker, steps.fabric
        self._scale: KnownScale | None = None
        self.find_unused = find_unused
        self.syncing = True  # False while micro-batches only accumulate
        self._inside = False
        self._task: int | None = None  # autograd's number of the backward pass under way
        self._passes = 0
        self._buckets: GradBuckets | None = None  # collects the gradients that are averaged at this step
        self._own_peaks = list[Tensor]()  # largest magnitudes of this rank's gradients, once the means overwrite them
        self._arrived = set[str]()  # parameters with a gradient of this pass
        self._handles = dict[str, Any]()

    def install(self) -> list[Any]:
        """Register the hooks and return their handles; with one rank there are none."""
        if self.fabric.size == 1:
            return []
        averages = self.steps.averages_gradients or self.worker.recipe.may_average
        if self.steps.scaler is not None and averages:  # differences of parameters know no scale
            self._scale = KnownScale(self.steps.scaler)
        self.worker.averaging.hand_over = self.worker.update_step.put
        self.steps.on_new_buckets, self.steps.average_late = self.rebuild, self._average_late
        self.steps.refuse_to_add = self.held.refuse_to_add
        self.rebuild()
        return [self]

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        if self._scale is not None:
            self._scale.remove()

    def rebuild(self) -> None:
        """Make new `GradBuckets` for new buckets: at attach, after a controller's change, after loading."""
        if self.fabric.size == 1:
            return
        self._buckets = GradBuckets(self.worker, self._launch) if self.steps.averages_gradients else None
        for name, param in self.worker.params.items():
            if name not in self._handles and param.trains:
                self._handles[name] = param.parameter.register_post_accumulate_grad_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:  # once for each parameter and step: every call in here counts
            if not (self.syncing and self.held.syncs(parameter)):
                self.steps.only_adds(parameter)
                return
            task = introspection.pass_under_way()
            if task != self._task or not self._inside:
                self._enter(parameter, task)
            param = self.worker.params[name]
            if (gradient := param.gradient) is None:
                return
            self.held.scale(parameter, gradient)
            self._arrived.add(name)
            if self._buckets is None:
                return
            self._buckets.take(name, gradient)
            if parameter.is_cuda and param.takes(view := self._buckets.view(name)):
                param.hand(view)  # frees the memory of its own gradient; on a CPU that would cost more than it saves

        return hook

    def _enter(self, parameter: Tensor, task: int) -> None:
        """Start a new step if this gradient belongs to a new backward pass."""
        if self._inside and introspection.is_nested():
            return
        if introspection.is_nested():
            raise AttachError(
                "a backward pass inside another one (reentrant checkpointing) would send its gradients before the outer "
                "pass is done: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if self._inside and self._buckets is not None and self._buckets.next:
            raise AttachError(
                "the last backward() raised an exception after some of its gradients were sent, so the ranks are no longer "
                "at the same step: on all ranks, detach, load a checkpoint and attach again"
            )
        self._task = task
        self._begin(parameter)
        introspection.at_end(self._end)

    def _begin(self, parameter: Tensor | None) -> None:
        """Prepare for the gradients of a step; `parameter` has the first one."""
        refuse_capture(self.worker.device)
        if self._passes + 1 in LOOKS:
            refuse_ran_wrapper(self.steps.model, self.looped)
        self._inside = True
        self._passes += 1
        self.steps.settle_skipped(parameter)
        if self._scale is not None:
            self.worker.scale = self._scale.now() if self.steps.averages_gradients else 1.0
        self.worker.averaging.means = []
        self._arrived.clear()
        if not self.steps.averages_gradients:
            self._buckets = None  # gradients are no longer averaged: free its memory
            again = self.held.scales and self.steps.doubts.passed == self.worker.step
            if again and not self.steps.gradients_are_gone(parameter):
                self.held.refuse_to_add()
        if self._buckets is not None:
            self.steps.follow()
            self._own_peaks.clear()
            self._buckets.reset()
            self.steps.ask_for_buffers()

    def _average_late(self) -> None:
        """Average gradients that no hook has seen."""
        self._begin(None)
        self._end()

    def _launch(self, index: int, flat: Tensor) -> None:
        if flat.is_cuda:  # `flat` is the only copy of the gradients, and the means will overwrite it
            self._own_peaks.append(peak(flat))
        self.fabric.run(self.worker.ready(index, flat))

    def _end(self) -> None:
        self._inside = False
        for param in (self.worker.params[name] for name in self.worker.params.keys() - self._arrived):
            if param.trains and (gradient := param.gradient) is not None:  # of earlier micro-batches alone
                self.held.scale(param.parameter, gradient)
        if self._buckets is None:
            self.steps.settle_skipped()
            self.steps.doubts.backward_is_over()
            return
        unused, update = self._buckets.finish(), self.worker.recipe.update
        if sends := update is not None and update.sends_momentum:  # earlier micro-batches may have used some
            unused = [name for name in unused if self.worker.params[name].parameter.grad is None]
        if self.find_unused:
            self._ask_who_used(unused)
        if not self.steps.begin():
            return
        if not self.worker.averaging.finite and "waits for few" in self.worker.recipe.schedule.traits:
            self._forget([*self.worker.params])  # as on late ranks, which never apply such an update
            return
        if not self.worker.averaging.finite:
            own = [g for param in self.worker.params.values() if (g := param.gradient) is not None]
            fine = all_peaks_finite(self._own_peaks) if self._own_peaks else all_finite(own)
            ranks = together(self.worker.recipe.schedule, self.worker.rank, self.worker.size)
            with suppress(MembersChanged):
                naming = self.worker.jointly(self.worker.averaging.name_spoilers(fine, ranks))
                self.fabric.run(naming, "backward", self.worker.step)
            if self.steps.scaler is not None and len(self.steps.optimizers) > 1:  # all skip, as memories do
                for mean in self.worker.averaging.means:
                    mean.fill_(float("nan"))
        self.worker.update_step.put()
        if self.find_unused:
            self._forget_unused(unused, sends)

    def _ask_who_used(self, unused: list[str]) -> None:
        """Count the ranks that used each parameter, and check which means of unused parameters are not zero.

        The host reads both from the device together with the finite check of the means: one synchronization a step.
        """
        used = torch.tensor([n not in unused for n in self.worker.params], dtype=torch.int32)
        handle = self.fabric.start(_summed(used, self.worker.device), "who used what", self.worker.step)

        def besides(means: list[Tensor]) -> Program[list[Tensor]]:
            counts, named = (yield from join(handle)), self.worker.by_name(means)
            return [counts, *(named[name].any() for name in unused)]

        self.worker.averaging.besides = besides

    def _forget_unused(self, unused: list[str], sends_momentum: bool) -> None:
        """Drop the gradient of parameters that no rank used, so that weight decay does not move them.

        A parameter keeps a mean that is not zero: a memory has sent its residual, or an update its momentum, which makes no step.
        """
        counts = dict(zip(self.worker.params, self.worker.averaging.besides_values))
        arrived = self.worker.replica.total(self.worker.averaging.besides_values[len(counts) :])
        rest = {name: nonzero for name, nonzero in zip(unused, arrived, strict=True) if not counts[name]}
        self._forget([name for name, nonzero in rest.items() if not nonzero])
        self.worker.update_step.unused = {*rest} if sends_momentum else set()

    def _forget(self, names: list[str]) -> None:
        for name in names:
            self.worker.params[name].forget_gradient()


def _summed(flags: Tensor, device: torch.device) -> Program[Tensor]:
    """Sum flags over all ranks; they are copied where the program runs, on the comm thread's stream."""
    return (yield from all_reduce(copied_to(flags, device)))
