#!/bin/bash
# Tries both jobs of this folder on a Slurm of one node: they are preempted, requeued, and end.
#
#   examples/launch/slurm/try.sh members FOLDER       # one job for each of three members; one is preempted, the others go on
#   examples/launch/slurm/try.sh torchrun FOLDER      # one job of all; it saves, is requeued, and goes on from there
#
# Debian or Ubuntu, as root. PYTHON names the interpreter that has torch and gossamer.
set -eu
what=$1 here=$(dirname "$(realpath "$0")")
mkdir -p "$2"
folder=$(realpath "$2")
export PYTHON=${PYTHON:-python} LAUNCH=$here/.. SCRIPT=$here/../../resumable.py
export GLOO_SOCKET_IFNAME=lo MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29519}
. "$here/one_node.sh" "$folder/slurm"
trap 'set +e; scancel --quiet --user=root 2>/dev/null; [ -z "${store:-}" ] || kill $store; stop_slurm' EXIT

await() { # SECONDS COMMAND...: until the command succeeds
    local until=$((SECONDS + $1))
    shift
    until "$@"; do
        if [ $SECONDS -ge $until ]; then
            echo "gave up waiting for: $*"
            squeue --all --long
            tail -n 40 "$folder"/*.out "$folder"/slurm/log/slurmctld
            exit 1
        fi
        sleep 0.5
    done
}
state_is() { scontrol show job "$1" --oneliner 2>/dev/null | grep -q "JobState=$2 "; }
says() { grep -qs "$2" "$folder/$1"; }
starts_now() { # Slurm lets a requeued job wait two minutes; not here
    scontrol show job "$1" --oneliner | grep -q "Restarts=[1-9]" && scontrol update JobId="$1" StartTime=now
}
is_up() { [ "$(sinfo --noheader --partition=low --format=%T 2>/dev/null)" = idle ]; }
await 30 is_up

if [ "$what" = members ]; then
    "$PYTHON" "$here/../store.py" "$MASTER_PORT" &
    store=$!
    job=$(sbatch --parsable --partition=low --array=0-2 --output="$folder/member%a.out" \
        "$here/member.sbatch" "$folder/run" --steps "${STEPS:-3000}" --every 20 --pause 0.02)
    for rank in 0 1 2; do await 90 says "member$rank.out" "trains from step"; done
    rival=$(sbatch --parsable --partition=high --cpus-per-task=2 --output=/dev/null --wrap="sleep 3")
    await 120 state_is "$rival" COMPLETED
    for rank in 0 1 2; do
        if state_is "${job}_$rank" PENDING; then await 30 starts_now "${job}_$rank"; fi
    done
    for rank in 0 1 2; do await 300 says "member$rank.out" "ended at step\|has ended at step"; done
    for rank in 0 1 2; do await 30 state_is "${job}_$rank" COMPLETED; done
    restarts=$(for rank in 0 1 2; do scontrol show job "${job}_$rank" --oneliner; done | grep -o "Restarts=[0-9]*" | tr '\n' ' ')
else
    job=$(sbatch --parsable --partition=low --nodes=1 --cpus-per-task=4 --output="$folder/torchrun.out" \
        --export=ALL,RANKS_PER_NODE=2 "$here/torchrun.sbatch" "$folder/run" --steps "${STEPS:-3000}" --every 50)
    await 90 test -e "$folder/run/step50"
    rival=$(sbatch --parsable --partition=high --cpus-per-task=4 --output=/dev/null --wrap="sleep 3")
    await 120 state_is "$rival" COMPLETED
    await 30 starts_now "$job"
    await 300 state_is "$job" COMPLETED
    restarts=$(scontrol show job "$job" --oneliner | grep -o "Restarts=[0-9]*")
fi
cat "$folder"/*.out
echo "$restarts"
