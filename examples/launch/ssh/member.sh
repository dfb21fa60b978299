#!/bin/bash
# Starts one member again until it ends well. On each machine, in tmux or behind nohup:
#
#   MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 WORLD_SIZE=4 RANK=2 examples/launch/ssh/member.sh runs/7
#
# SIGTERM or SIGUSR1 to this shell lets the member save and leave, and ends the loop: the machine is given away.

away=
until (: <"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; do sleep 2; done  # else rank 0 would start a store of its own

while true; do
    "${PYTHON:-python}" "${MEMBER:-examples/launch/member.py}" "$@" &
    member=$!
    trap 'away=1; kill -TERM $member' TERM USR1
    wait $member
    code=$?
    while kill -0 $member 2>/dev/null; do  # a signal ended the wait, not the member
        wait $member
        code=$?
    done
    if [ $code = 0 ] || [ "$away" ]; then
        exit $code
    fi
    sleep 5
    if [ "$away" ]; then exit 75; fi  # told to while no member was there
done
