#!/bin/bash
# What one host of a lab runs, to try member.sh: host 1 is taken away without notice, then given back; host 2 with notice.
#
#   gossamer lab --hosts 4 --rate 200mbit -- examples/launch/ssh/host_away.sh FOLDER --steps 2500 --pause 0.02
#
# Host 0 holds the store and trains nothing: the others are members 0, 1 and 2 of 3. What follows FOLDER is for
# member.py: a run as long as this goes on when the two are back.
set -u
here=$(dirname "$(realpath "$0")")
folder=$1
shift
export WORLD_SIZE=3 MEMBER=$here/../member.py PYTHON=${PYTHON:-python}
if [ "$RANK" = 0 ]; then
    "$PYTHON" "$here/../store.py" "$MASTER_PORT" &
    store=$!
    for member in 0 1 2; do until [ -e "$folder/ended$member" ]; do sleep 0.5; done; done
    kill $store
    exit 0
fi
export RANK=$((RANK - 1))
mkdir -p "$folder"

trains() { grep -q "trains from step" "$folder/member$1.log"; }
start() {
    setsid "$here/member.sh" "$folder/run" "$@" >>"$folder/member$RANK.log" 2>&1 &
    loop=$!
}
start "$@"
if [ "$RANK" != 0 ]; then
    for member in 0 1 2; do until trains $member 2>/dev/null; do sleep 0.5; done; done
    sleep $((3 * RANK))
    if [ "$RANK" = 1 ]; then
        kill -KILL -- -$loop  # all that runs there, at once
    else
        kill -TERM $loop  # the notice
    fi
    wait $loop
    echo "host of member $RANK is away: exit code $?"
    sleep 6
    start "$@"
    echo "host of member $RANK is back"
fi
wait $loop
code=$?
cat "$folder/member$RANK.log"
touch "$folder/ended$RANK"
exit $code
