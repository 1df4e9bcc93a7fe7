#!/bin/sh
# Boots this machine's systemd in namespaces of its own, over a copy-on-write view of /: nothing outside changes.
# usage, as root in a mount namespace: boot.sh FOLDER CGROUP [PATH...]
#   FOLDER is empty; CGROUP is a new control group's name; each PATH is a folder that the view of / does not show, being
#   on another mount or in one of the folders that are EMPTY inside, and is shown as well.
set -eu

EMPTY="/run /tmp /var/tmp /dev"

if [ "$1" != inside ]; then
    mount --make-rprivate /
    mkdir "$1/cgroup" "$1/tmpfs"
    mount -t cgroup2 cgroup2 "$1/cgroup"
    # A control group of its own: systemd takes over whatever is the root of the hierarchy that it sees.
    mkdir "$1/cgroup/$2"
    echo $$ >"$1/cgroup/$2/cgroup.procs"
    exec unshare --pid --fork --kill-child --mount --uts --ipc --cgroup "$0" inside "$@"
fi

shift
folder=$1
shift 2
mount -t tmpfs tmpfs "$folder/tmpfs"
mkdir "$folder/tmpfs/upper" "$folder/tmpfs/work" "$folder/tmpfs/root"
root=$folder/tmpfs/root
# Without the overlay, systemd-tmpfiles would empty the machine's own /tmp.
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/tmpfs/upper,workdir=$folder/tmpfs/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for place in $EMPTY; do
    mount -t tmpfs -o mode=755 tmpfs "$root$place"
done
chmod 1777 "$root/tmp" "$root/var/tmp"
for device in null zero full random urandom tty; do
    : >"$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts"
ln -s /proc/self/fd "$root/dev/fd"
ln -s pts/ptmx "$root/dev/ptmx"
for path in "$@"; do
    changes=$(mktemp -d "$folder/tmpfs/XXXXXX")
    mkdir -p "$changes/upper" "$changes/work" "$root$path"
    mount -t overlay overlay -o "lowerdir=$path,upperdir=$changes/upper,workdir=$changes/work" "$root$path"
done
hostname pagedd-test
# `container` has systemd leave the kernel, its devices and its clock alone.
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    chroot "$root" /lib/systemd/systemd --system --unit=basic.target
