#!/bin/bash
# Starts a run over ssh: the store on the first host, and a member on each. Keys and the folder are there already.
#
#   examples/launch/ssh/start.sh FOLDER HOST...       # FOLDER: where gossamer and its .venv are, on every host
set -eu
folder=$1
shift
port=${MASTER_PORT:-29500}
store=$1
# nohup and a session of its own: what is started here goes on when the connection ends
away() { ${SSH:-ssh} "$1" "cd $folder && PATH=$folder/.venv/bin:\$PATH nohup setsid $2 >>$3 2>&1 </dev/null &"; }

away "$store" "python examples/launch/store.py $port" store.log
rank=0
for host; do
    away "$host" "env MASTER_ADDR=$store MASTER_PORT=$port WORLD_SIZE=$# RANK=$rank examples/launch/ssh/member.sh runs/ssh" \
        "member$rank.log"
    rank=$((rank + 1))
done
