"""Warnings about likely mistakes in a training loop, each given once."""

import warnings

from gossamer.runtime import Worker

MANY = 64  # backward passes without a step, under local recipes
IN_A_ROW = 10  # consecutive averages that one rank made non-finite


class LoopWarnings:
    """Gives each warning once, with its remedy."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._said = set[str]()
        self._unstepped, self.passed = 0, 0  # backward passes at one step, and which, under local recipes

    def never_stepped(self, thrown_away: bool) -> None:
        """Warn that a backward pass began with no step after the last one, though its gradients were finite."""
        if thrown_away:
            waste = "they were sent for nothing (memories are as if they had not been sent)"
            if "lags" in self._worker.recipe.schedule.traits:
                waste = "so was the mean of the step before, and where that happens to each mean the model never trains"
            self._say(
                "thrown away",
                f"gradients were averaged and then thrown away, without an optimizer.step(): {waste}. If this backward() computes gradients "
                "for another model, as in a GAN, run it under comm.no_sync(); if you leave out a step on purpose, call comm.skip()",
            )
            return
        self._say(
            "no_sync",
            "several backward() passes before one optimizer.step(), and each of them sends its gradients: run all but the "
            "last one under comm.no_sync() (with a DDP hook, ddp_model.no_sync()). Trainers that call model.no_sync() need one line: "
            "model.no_sync = comm.no_sync. If you leave out a step on purpose, call comm.skip()",
        )

    def some_optimizers_rest(self, stepped: int, attached: int) -> None:
        """Warn that a step ended before all optimizers had stepped."""
        self._say(
            "rest",
            f"{stepped} of the {attached} optimizers given to attach stepped before the next step began: this counts as one "
            "step. For optimizers that take turns, call attach once for each, with its part of the model",
        )

    def backward_is_over(self) -> None:
        """Warn under a local recipe if many backward passes had no step: then nothing is ever averaged."""
        self._unstepped = self._unstepped + 1 if self._worker.step == self.passed else 1
        self.passed = self._worker.step
        if self._unstepped == MANY:
            self._say(
                "no step",
                f"{MANY} backward() passes without a step() of the optimizer that was given to attach: under "
                f"{self._worker.recipe} models are averaged after its steps, so nothing was averaged. Attach the optimizer that "
                "changes the parameters, and call its step()",
            )

    def look_for_spoilers(self) -> None:
        """Warn if one rank makes average after average non-finite, which stops all ranks from learning."""
        for rank, count in self._worker.record.row.items():
            if count >= IN_A_ROW:
                self._say(
                    f"spoiler {rank}",
                    f"the last {count} averages were not finite because of rank {rank}, and were dropped on all ranks: check "
                    "the data, learning rate and loss scale of that rank",
                )

        for rank, step in self._worker.record.models.first.items():
            whose = "this rank's model" if rank == self._worker.ranks.number else f"the model of rank {rank}"
            self._say(
                f"not finite {rank}",
                f"{whose} was not finite at step {step}, and was left out where models met; that rank takes what the others "
                "hold. Look at its data, its learning rate and its loss scale",
            )

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(f"rank {self._worker.rank}, step {self._worker.step}: {text}", stacklevel=2)
