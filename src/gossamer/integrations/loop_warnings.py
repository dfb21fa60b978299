"""Doubts: what may be wrong in a training loop, said once each."""

import warnings

from gossamer.runtime import Worker

MANY = 64  # backward passes without a step, under local recipes
IN_A_ROW = 10  # averages that one rank has spoilt


class LoopWarnings:
    """Warnings that name the remedy; none is said twice."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._said = set[str]()
        self._unstepped, self._step = 0, 0

    def never_stepped(self, thrown_away: bool) -> None:
        """A backward pass has begun, and no step has followed the last one, though its gradients were finite."""
        if thrown_away:
            self._say(
                "thrown away",
                "gradients were averaged and then thrown away, without an optimizer.step(): they crossed the network for "
                "nothing (memories are as if they had not). If this backward() is for another model's sake, as in a GAN, run "
                "it under comm.no_sync(); if you leave out a step on purpose, say comm.skip()",
            )
            return
        self._say(
            "no_sync",
            "several backward() passes before one optimizer.step(), and each of them sends its gradients: run all but the "
            "last one under comm.no_sync(). Trainers that ask the model for it need one line: model.no_sync = comm.no_sync. "
            "If you leave out a step on purpose, say comm.skip()",
        )

    def some_optimizers_rest(self, stepped: int, attached: int) -> None:
        self._say(
            "rest",
            f"{stepped} of the {attached} optimizers given to attach stepped, and then the next step began: it counts as one "
            "step. Optimizers that take turns want an attach each, with the part of the model that is theirs",
        )

    def backward_is_over(self) -> None:
        """Under local recipes: steps are what counts, and if none ever comes, nothing is ever averaged."""
        self._unstepped = self._unstepped + 1 if self._worker.step == self._step else 1
        self._step = self._worker.step
        if self._unstepped == MANY:
            self._say(
                "no step",
                f"{MANY} backward() passes, and no step() of the optimizer that was given to attach: under "
                f"{self._worker.recipe} models are averaged after its steps, so nothing has been. Does another optimizer, or "
                "another method than step(), move the parameters?",
            )

    def look_for_spoilers(self) -> None:
        """One rank that spoils average after average stops all others from learning."""
        for rank, count in self._worker.row.items():
            if count >= IN_A_ROW:
                self._say(
                    f"spoiler {rank}",
                    f"the last {count} averages were not finite because of rank {rank}, and were dropped on all ranks: look "
                    "at its data, its learning rate and its loss scale",
                )

        for rank, step in self._worker.reports.first.items():
            whose = "this rank's model" if rank == self._worker.number else f"the model of rank {rank}"
            self._say(
                f"not finite {rank}",
                f"{whose} was not finite at step {step}, and was left out where models met; that rank takes what the others "
                "hold. Look at its data, its learning rate and its loss scale",
            )

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(f"rank {self._worker.rank}, step {self._worker.step}: {text}", stacklevel=2)
