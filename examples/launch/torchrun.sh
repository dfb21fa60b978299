#!/bin/bash
# torchrun with a notice that reaches its ranks: SIGTERM or SIGUSR1 to this shell becomes SIGUSR1 to each of them.
#
#   examples/launch/torchrun.sh --standalone --nproc-per-node 2 examples/resumable.py runs/7
#
# torchrun itself ends on SIGUSR1, and on SIGTERM it kills its ranks 30 seconds later; here they have all of the notice.

(
    trap '' USR1 # inherited: torchrun and ranks that are not yet in leaving_at() ignore it
    # a session of its own: a scheduler that signals the group of processes does not reach torchrun, which would signal again
    exec setsid "${PYTHON:-python}" -m torch.distributed.run "$@"
) &
torchrun=$!
trap 'kill -USR1 $(cat /proc/$torchrun/task/*/children)' TERM USR1
wait $torchrun
code=$?
while kill -0 $torchrun 2>/dev/null; do # a signal ended the wait, not torchrun
    wait $torchrun
    code=$?
done
exit $code
