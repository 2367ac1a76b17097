#!/usr/bin/env bash
# Ends what `slurm_up.sh DIR` started, by the process ids it wrote down, and removes DIR. Safe to call again.
set -u
DIR=$1
end() {  # FILE WORD SIGNAL: the process of a pid file, if its command line has WORD (a number may have been given anew)
  local pid
  pid=$(cat "$1" 2> /dev/null) || return 0
  rm -f "$1"
  tr '\0' ' ' < "/proc/$pid/cmdline" 2> /dev/null | grep -q "$2" || return 0
  kill "-$3" "$pid"
  for _ in $(seq 50); do [ -s "/proc/$pid/cmdline" ] || return 0; sleep 0.1; done
  kill -KILL "$pid"
}
for node in node1 node2; do end "$DIR/run/$node.pid" node_main KILL; done
end "$DIR/run/slurmctld.pid" slurmctld TERM
end "$DIR/run/munged.pid" munged TERM
for node in node1 node2; do ip netns del "tonnage-$node" 2> /dev/null; done
for link in tonnage-v1 tonnage-v2 tonnage0; do ip link del "$link" 2> /dev/null; done
[ ! -f "$DIR/etc/slurm.conf" ] || rm -rf "$DIR"
