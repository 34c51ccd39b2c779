"""A command under a Linux kernel of its own, whose only hierarchy of control groups is cgroup v2.

The kernel is a program (user-mode Linux, Debian's package user-mode-linux): it needs no rights, and
its processes see the files of this machine, read only, with folders in memory where they write. It
is for what this machine's own kernel does not show, because its control groups are of version 1, or
because the part of the tree that a test would divide is not ours.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "linux.uml"
ROOT = Path(__file__).parents[1]
_ENDED = "ended with exit code"

_MOUNTS = """#!/bin/bash
export PATH={path} HOME=/tmp TERM=dumb LANG=C.UTF-8
export HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis
mount -t proc proc /proc; mount -t sysfs sys /sys
for place in /run /tmp /var/tmp /var/log /var/lib/systemd; do mount -t tmpfs tmp $place; done
mkdir -p /dev/pts /dev/shm; mount -t devpts pts /dev/pts; mount -t tmpfs shm /dev/shm
ln -sf /proc/self/fd /dev/fd
chmod 1777 /tmp /var/tmp /dev/shm; chmod 666 /dev/null /dev/zero /dev/urandom /dev/tty
# Where the Python of root lies in root's own folder, other users could not start it.
if [[ {python} == /root/* ]]; then
    place=$(cut -d/ -f-3 <<< {python}); mkdir /run/kept; mount --bind "$place" /run/kept
    mount -t tmpfs -o mode=755 tmp /root; mkdir "$place"; mount --bind /run/kept "$place"
fi
"""

# A group is handed to the user as systemd does it: the folder and three of its files are his. The
# shell goes into it alone, and becomes the command.
_GIVEN = """
mount -t cgroup2 none /sys/fs/cgroup
ip link set lo up
echo +memory > /sys/fs/cgroup/cgroup.subtree_control
given=/sys/fs/cgroup/given
mkdir $given
chown {uid} $given $given/cgroup.procs $given/cgroup.subtree_control $given/cgroup.threads
cd {root}
(echo $BASHPID > $given/cgroup.procs
 exec setpriv --reuid {uid} --regid {uid} --clear-groups {command}) < /dev/null
code=$?
echo; echo {ended} $code
echo o > /proc/sysrq-trigger
sleep 60
"""

# The systemd of this machine, with nothing but what a user's own systemd needs, and a user with
# lingering for whom the command is run.
_SYSTEMD = """
cp /etc/passwd /run/passwd; echo "muster:*:{uid}:{uid}::/run/home:/bin/bash" >> /run/passwd
mount --bind /run/passwd /etc/passwd
mkdir -p /run/systemd/system /run/home; chown {uid} /run/home
cat > /run/systemd/system/muster.target <<'UNIT'
[Unit]
Requires=dbus.socket systemd-logind.service muster.service
UNIT
cat > /run/systemd/system/muster.service <<'UNIT'
[Unit]
After=dbus.socket systemd-logind.service
DefaultDependencies=no
[Service]
Type=oneshot
ExecStart=/bin/bash /run/do.sh
StandardOutput=tty
StandardError=tty
TTYPath=/dev/tty0
TimeoutStartSec=900
UNIT
cat > /run/do.sh <<'SCRIPT'
ip link set lo up
loginctl enable-linger muster
systemctl start user@{uid}.service
export XDG_RUNTIME_DIR=/run/user/{uid} DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/{uid}/bus
export HOME=/run/home PATH={path} LANG=C.UTF-8
cd $HOME
setpriv --reuid {uid} --regid {uid} --clear-groups {command}
code=$?
find /sys/fs/cgroup -name 'muster-*'
echo; echo {ended} $code
echo o > /proc/sysrq-trigger
SCRIPT
exec /lib/systemd/systemd --unit=muster.target --show-status=no --log-target=null
"""


def has_kernel() -> bool:
    return shutil.which(PROGRAM) is not None


def run(
    words: Sequence[str], *, uid: int, memory_mib: int = 3072, with_systemd: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run it as that user, in a control group that is his to divide, or with a systemd of his own.
    The exit code is the command's."""
    (ROOT / "build").mkdir(exist_ok=True)  # not in /tmp, which it has for itself
    with tempfile.TemporaryDirectory(prefix="muster-kernel-", dir=ROOT / "build") as place:
        init = Path(place) / "init"
        init.write_text(
            (_MOUNTS + (_SYSTEMD if with_systemd else _GIVEN)).format(
                path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", uid=uid,
                root=shlex.quote(str(ROOT)), command=shlex.join(words), ended=_ENDED,
                python=shlex.quote(str(Path(sys.executable).resolve())),
            )
        )  # fmt: skip
        init.chmod(0o755)
        done = subprocess.run(
            [PROGRAM, f"mem={memory_mib}M", "quiet", "rootfstype=hostfs", "rootflags=/", "ro",
             f"init={init}", "con=null", "con0=null,fd:1", f"umid={Path(place).name}"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=900, check=False,
        )  # fmt: skip
    said, _, code = done.stdout.rpartition(_ENDED)
    assert code, f"the kernel has ended too soon: {done.stdout}{done.stderr}"
    return subprocess.CompletedProcess(words, int(code.split()[0]), said, done.stderr)
