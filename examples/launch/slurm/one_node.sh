#!/bin/bash
# Starts a Slurm of one node on this machine, to try the jobs of this folder: no cluster, no cgroups, two partitions.
#
#   . examples/launch/slurm/one_node.sh FOLDER        # sets SLURM_CONF; stop_slurm ends it
#
# Jobs in partition `high` preempt those in `low`, which have 20 seconds to end and are requeued. Debian or Ubuntu, as root.

if ! command -v slurmctld slurmd munged >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurmctld slurmd slurm-client munge >/dev/null
fi
one_node=$(realpath "$1")
mkdir -p "$one_node"/{state,spool,log}
export SLURM_CONF=$one_node/slurm.conf
node=$(hostname -s)

cat >"$SLURM_CONF" <<CONF
ClusterName=tried
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=${SLURM_PORT:-16817}
SlurmdPort=${SLURMD_PORT:-16818}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$one_node/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation=$one_node/state
SlurmdSpoolDir=$one_node/spool
SlurmctldPidFile=$one_node/slurmctld.pid
SlurmdPidFile=$one_node/slurmd.pid
SlurmctldLogFile=$one_node/log/slurmctld
SlurmdLogFile=$one_node/log/slurmd
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=bf_interval=2,sched_min_interval=500000,batch_sched_delay=0
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
MinJobAge=600
NodeName=$node NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=low Nodes=$node Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 State=UP
PartitionName=high Nodes=$node PriorityTier=2 PreemptMode=OFF State=UP
CONF

head -c 1024 /dev/urandom >"$one_node/munge.key"
chmod 400 "$one_node/munge.key"
munged --force --key-file="$one_node/munge.key" --socket="$one_node/munge.socket" --pid-file="$one_node/munged.pid" \
    --log-file="$one_node/log/munged" --seed-file="$one_node/munge.seed"
slurmctld -c
slurmd

stop_slurm() {
    for daemon in slurmctld slurmd munged; do
        [ -e "$one_node/$daemon.pid" ] && kill "$(cat "$one_node/$daemon.pid")" 2>/dev/null
    done
    true
}
