#!/bin/bash
# Runs a command as rank 0 and rank 1 of 2, on two hosts that are joined by a slow cable, `slow`, and by a fast one, `fast`.
#
#   unshare --user --map-root-user --net --uts two_cards.sh COMMAND...        # only rank 0's output is shown
set -eu
hostname left
ip link set lo up
unshare --net --uts sleep 1000 &
right=$!
trap 'kill $right' EXIT
inside() { nsenter --target $right --net --uts "$@"; }
until [ "$(readlink /proc/$right/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
inside hostname right
inside ip link set lo up

number=1
for card in slow fast; do
    ip link add $card type veth peer name $card netns $right
    ip addr add 10.9.$number.1/24 dev $card
    inside ip addr add 10.9.$number.2/24 dev $card
    ip link set $card up
    inside ip link set $card up
    number=$((number + 1))
done
tc qdisc add dev slow root tbf rate 40mbit burst 9k latency 400ms
inside tc qdisc add dev slow root tbf rate 40mbit burst 9k latency 400ms

export WORLD_SIZE=2 MASTER_ADDR=10.9.2.1 MASTER_PORT=29500
RANK=1 inside "$@" >/dev/null 2>&1 &
RANK=0 "$@"
