#!/usr/bin/env bash
# A SLURM of two nodes on one machine, as root, without containers: `slurm_up.sh DIR`, then `. DIR/env.sh`.
# A node is a network, UTS, PID and mount namespace with a slurmd and an sshd in it: it has a name, an address and a process
# tree of its own, so torchrun, ports and a lost node are as on two machines. The controller runs in the machine's own
# namespaces. `DIR/node_run node1 COMMAND` is at home on a node, without SLURM; from there ssh reaches the other one, with
# keys and an /etc/ssh that only the nodes have.
# Partitions: ci; low, which gives way to high. DIR must be short (sockets) and is removed by `slurm_down.sh DIR`.
set -euo pipefail
DIR=$1 HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NET=10.78.0 NODES="1 2" CPUS=4 MIB=8000
[ "$(id -u)" = 0 ] || { echo "SLURM's nodes are namespaces: only root can make them" >&2; exit 1; }

# ---- packages
missing=()
for pair in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge ip:iproute2 \
  sshd:openssh-server ssh:openssh-client pdsh:pdsh; do
  command -v "${pair%%:*}" > /dev/null || [ -x "/usr/sbin/${pair%%:*}" ] || missing+=("${pair##*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
  command -v apt-get > /dev/null || { echo "missing, and no apt-get here: ${missing[*]}" >&2; exit 1; }
  echo "apt-get install ${missing[*]}" >&2
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq > /dev/null
  policy=/usr/sbin/policy-rc.d  # packages start no daemons: an sshd of this machine itself is nobody's wish
  [ -e $policy ] || { trap 'rm -f "$policy"' EXIT; printf '#!/bin/sh\nexit 101\n' > $policy; chmod +x $policy; }
  apt-get install -y -qq --no-install-recommends "${missing[@]}" < /dev/null > /dev/null
fi
export PATH=$PATH:/usr/sbin
bash "$HERE/slurm_down.sh" "$DIR"

# ---- files
mkdir -p "$DIR"/{etc/ssh,run,log,state,spool}
chmod 755 "$DIR"  # munge wants its socket to be in everybody's reach
trap 'tail -n 20 "$DIR"/log/* >&2' ERR
head -c 1024 /dev/urandom > "$DIR/etc/munge.key"
chmod 400 "$DIR/etc/munge.key"
printf '127.0.0.1 localhost\n%s.1 %s\n%s.11 node1\n%s.12 node2\n' $NET "$(hostname -s)" $NET $NET > "$DIR/etc/hosts"
# names come from that file alone: look-ups by DNS would wait until they time out
{ grep -v '^hosts:' /etc/nsswitch.conf; echo 'hosts: files'; } > "$DIR/etc/nsswitch.conf"
# cred_expire: how long a requeued job waits (120 s else); MinJobAge: for how long a test may ask for a job that has ended;
# config_overrides: more cores than there are
cat > "$DIR/etc/slurm.conf" << END
ClusterName=tonnage
SlurmctldHost=$(hostname -s)($NET.1)
SlurmctldPort=17020
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$DIR/run/munge.socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd-%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=$((MIB / CPUS))
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
PriorityType=priority/basic
JobRequeue=1
KillWait=10
MinJobAge=86400
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
$(for i in $NODES; do echo "NodeName=node$i NodeAddr=$NET.1$i Port=17021 CPUs=$CPUS RealMemory=$MIB"; done)
PartitionName=ci   Nodes=ALL Default=YES PriorityTier=5 PreemptMode=OFF State=UP
PartitionName=low  Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=30 State=UP
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF State=UP
END
echo "export SLURM_CONF=$DIR/etc/slurm.conf" > "$DIR/env.sh"
. "$DIR/env.sh"

# ssh: everything of it in one folder, which is /etc/ssh on the nodes
ssh-keygen -q -t ed25519 -N '' -f "$DIR/etc/ssh/key"
cp "$DIR/etc/ssh/key.pub" "$DIR/etc/ssh/authorized_keys"
cat > "$DIR/etc/ssh/sshd_config" << 'END'
HostKey /etc/ssh/key
AuthorizedKeysFile /etc/ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
PidFile none
END
cat > "$DIR/etc/ssh/ssh_config" << 'END'
Host *
  IdentityFile /etc/ssh/key
  UserKnownHostsFile /etc/ssh/known_hosts
  BatchMode yes
END
for i in $NODES; do echo "node$i,$NET.1$i $(cut -d ' ' -f 1,2 "$DIR/etc/ssh/key.pub")"; done > "$DIR/etc/ssh/known_hosts"

cat > "$DIR/node_main" << 'END'  # process 1 of a node: with it everything in the node ends
hostname "$2"
mount --bind "$1/etc/hosts" /etc/hosts
mount --bind "$1/etc/nsswitch.conf" /etc/nsswitch.conf
mount --bind "$1/etc/ssh" /etc/ssh
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
/usr/sbin/sshd -D -E "$1/log/sshd-$2.log" &
slurmd -D -N "$2" &
while :; do wait; sleep 1000 & done
END
cat > "$DIR/node_start" << 'END'  # node_start node1
#!/bin/bash
set -eu
DIR=$(dirname "$(readlink -f "$0")")
mkdir -p "$DIR/spool/$1"
SLURM_CONF=$DIR/etc/slurm.conf PATH=$PATH:/usr/sbin setsid nsenter --net="/run/netns/tonnage-$1" \
  unshare --uts --pid --fork --kill-child --mount --mount-proc bash "$DIR/node_main" "$DIR" "$1" \
  < /dev/null >> "$DIR/log/$1.out" 2>&1 &
echo $! > "$DIR/run/$1.pid"
END
cat > "$DIR/node_kill" << 'END'  # power off: node_kill node1; SLURM is told, it would find out after SlurmdTimeout
#!/bin/bash
set -eu
DIR=$(dirname "$(readlink -f "$0")")
kill -KILL "$(cat "$DIR/run/$1.pid")"
SLURM_CONF=$DIR/etc/slurm.conf scontrol update nodename="$1" state=down reason=killed
END
cat > "$DIR/node_run" << 'END'  # node_run node1 COMMAND
#!/bin/bash
set -eu
holder=$(cat "$(dirname "$(readlink -f "$0")")/run/$1.pid")
exec nsenter --target "$(tr -d ' ' < "/proc/$holder/task/$holder/children")" --net --uts --pid --mount \
  --wd="$PWD" "${@:2}"
END
chmod +x "$DIR"/node_{start,kill,run}

# ---- network: a bridge and a cable to each node, no way out
ip link add tonnage0 type bridge
ip addr add $NET.1/24 dev tonnage0
ip link set tonnage0 up
for i in $NODES; do
  ip netns add tonnage-node$i
  ip link add tonnage-v$i type veth peer name eth0 netns tonnage-node$i
  ip link set tonnage-v$i master tonnage0 up
  ip -n tonnage-node$i addr add $NET.1$i/24 dev eth0
  ip -n tonnage-node$i link set eth0 up
  ip -n tonnage-node$i link set lo up
done

# ---- daemons; nothing that stays may hold our output, or a pipe behind it would never end
munged --key-file="$DIR/etc/munge.key" --socket="$DIR/run/munge.socket" --pid-file="$DIR/run/munged.pid" \
  --log-file="$DIR/log/munged.log" --seed-file="$DIR/run/munged.seed" < /dev/null >> "$DIR/log/munged.out" 2>&1
slurmctld < /dev/null >> "$DIR/log/slurmctld.out" 2>&1
for i in $NODES; do "$DIR/node_start" node$i; done
for _ in $(seq 300); do
  [ "$(sinfo -h -N -p ci -o %t 2> /dev/null | grep -c '^idle$')" = 2 ] && exit 0
  sleep 0.2
done
echo "no two idle nodes after 60 s:" >&2
sinfo -N -l >&2
false
