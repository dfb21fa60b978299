"""Run a script as one rank of a comparison: `gossamer.bench.compare.script_rank PLAN`, in JSON.

The script is not changed: this module runs it as `python` would, and observes its training through `attach` or
`ddp.register`.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from torch.distributed import DistBackendError, DistNetworkError
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gossamer.bench.compare.events import RankEvent, ScriptDied, ScriptRefused, tell
from gossamer.bench.compare.script_observer import ScriptObserver, ScriptPlan
from gossamer.bench.compare.stall_watchdog import StallWatchdog
from gossamer.bench.compare.torch_patches import patched_torch
from gossamer.core import plugins
from gossamer.core.errors import PeerError
from gossamer.core.process_exit import exit_in_order, exit_now
from gossamer.integrations.run_observer import VARIABLE, ObserverSlot

REFUSED = 2  # the exit code


def run(plan: ScriptPlan) -> int:
    """Run the script under the plan's one recipe, in the threads that its launcher gave it; return the exit code."""
    (os.environ[VARIABLE],) = plan.contenders.values()
    if plan.folder:
        os.makedirs(plan.folder, exist_ok=True)
        os.chdir(plan.folder)
    for each in plan.imports:
        plugins.import_named(each)
    observer = ScriptObserver(plan)
    ObserverSlot.observer = observer
    looks = register_optimizer_step_pre_hook(observer.before_step)
    watchdog = StallWatchdog(observer, __file__)
    watchdog.start()
    try:
        with patched_torch(observer.note_backward, observer.name, plan.began):
            run_as_main(plan.script, plan.arguments)
        observer.finish()
    except BaseException as error:
        return _account_for(error, observer)
    finally:
        watchdog.over.set()
        looks.remove()
        ObserverSlot.observer = None
    return 0


def run_as_main(script: str, arguments: list[str]) -> None:
    """Run a script as `python` would; an exit with code 0 ends it."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _account_for(error: BaseException, observer: ScriptObserver) -> int:
    if observer.refused:
        tell(RankEvent(ScriptRefused(observer.refused)))
        return REFUSED
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != observer.plan.script:
        trace = trace.tb_next
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        told = f"the script called sys.exit({error.code!r})"
    else:
        traceback.print_exception(error.with_traceback(trace or error.__traceback__))
    sys.stderr.flush()
    missed = isinstance(error, PeerError | DistBackendError | DistNetworkError) or "gloo" in str(error)
    place = f" (line {trace.tb_lineno} of {observer.name})" if trace else ""
    tell(RankEvent(ScriptDied(" ".join(told.split())[:1000] + place, missed)))
    return 1


def main(text: str) -> NoReturn:
    """Run as a separate process, and exit even if the script left threads or process groups."""
    code = run(ScriptPlan(**json.loads(text)))
    if code:
        exit_now(code)  # exit handlers may wait for ranks that have ended
    exit_in_order(code)


if __name__ == "__main__":
    main(sys.argv[1])
