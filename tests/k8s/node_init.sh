#!/usr/bin/env bash
# The beginning of a node's first process, in new namespaces: gives the node its view of the machine
# and becomes `pause`. Its mounts and settings are invisible outside.
#   node_init.sh DIR NAME     DIR: the node's folder, created by node.py
set -euo pipefail
dir=$1 name=$2

mount --make-rprivate /
umount -Rl /sys
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
for controller in cpu cpuacct cpuset memory devices freezer blkio pids; do
  mkdir "/sys/fs/cgroup/$controller"
  mount -t cgroup -o "$controller" cgroup "/sys/fs/cgroup/$controller"
  mkdir -p "/sys/fs/cgroup/$controller/$name"
done
mkdir /sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
mkdir -p "/sys/fs/cgroup/systemd/$name"
# A new cpuset is empty, and nothing can run in it.
for file in cpuset.cpus cpuset.mems; do
  cat "/sys/fs/cgroup/cpuset/$file" >"/sys/fs/cgroup/cpuset/$name/$file"
done

mount -t tmpfs -o mode=755 run /run
mkdir /run/lock
for part in kubelet containerd cni; do
  mkdir -p "/var/lib/$part" "$dir/var/$part"
  mount --bind "$dir/var/$part" "/var/lib/$part"
done
mkdir -p /var/log/pods /var/log/containers /etc/cni "$dir/log/pods" "$dir/log/containers" "$dir/etc/cni/net.d"
mount --bind "$dir/log/pods" /var/log/pods
mount --bind "$dir/log/containers" /var/log/containers
mount --bind "$dir/etc/cni" /etc/cni
mount --bind "$dir/etc/resolv.conf" /etc/resolv.conf
mount --bind "$dir/etc/hosts" /etc/hosts
# The kubelet sets these of the whole machine: plain files in their place keep the machine's as they are.
mkdir -p "$dir/sysctl"
for setting in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
  kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
  copy=$dir/sysctl/${setting//\//_}
  cat "/proc/sys/$setting" >"$copy"
  mount --bind "$copy" "/proc/sys/$setting"
done
mount --make-rshared /

hostname "$name"
ip link set lo up
exec "$dir/../bin/pause"
