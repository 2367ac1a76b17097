#!/usr/bin/env bash
# What the container runs: a command; before it, if asked for, sshd (TONNAGE_SSH=1) and JupyterLab (TONNAGE_JUPYTER=1).
set -euo pipefail

if [[ "${TONNAGE_SSH:-0}" == 1 ]]; then
    if [[ ! -s /root/.ssh/authorized_keys ]]; then
        echo "TONNAGE_SSH=1: mount your public key at /root/.ssh/authorized_keys; there are no passwords" >&2
        exit 2
    fi
    ssh-keygen -A
    mkdir -p /run/sshd
    /usr/sbin/sshd -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no -o PermitRootLogin=prohibit-password
fi

if [[ "${TONNAGE_JUPYTER:-0}" == 1 ]]; then
    if [[ -z "${JUPYTER_TOKEN:-}" ]]; then
        echo "TONNAGE_JUPYTER=1: set JUPYTER_TOKEN, which the browser is asked for" >&2
        exit 2
    fi
    jupyter lab --allow-root --ip=0.0.0.0 --port=8888 --no-browser --notebook-dir=/opt/tonnage &
fi

exec "$@"
