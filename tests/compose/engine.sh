#!/usr/bin/env bash
# Starts a Docker engine from Debian's packages where none answers, and stops it again.
#
#   tests/compose/engine.sh start    nothing happens if an engine answers; else installs what is missing
#                                    (docker.io, docker-compose, iptables, debootstrap) and starts dockerd
#   tests/compose/engine.sh stop     stops the dockerd that `start` has started, and no other
#
# It changes the machine, so only .ci/containers calls it; the tests never do. It says on each line what it does,
# and exits with 0 only if an engine answers (start) or the one it started has gone (stop).
set -euo pipefail

state=${FLAMBEAU_ENGINE_STATE:-/run/flambeau-engine} # process id and log of what was started
packages=(docker.io docker-compose iptables debootstrap)

say() { printf 'engine: %s\n' "$*"; }
fail() { printf 'engine: %s\n' "$*" >&2; exit 1; }
answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }
# Whether a process of this id is (still) the dockerd that was started.
is_ours() { [[ $(cat "/proc/$1/comm" 2>/dev/null) == dockerd ]]; }

install_packages() {
    local missing=() package
    for package in "${packages[@]}"; do
        [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null) == ii* ]] || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends "${missing[@]}"; } \
        >"$state/apt.log" 2>&1 || { tail -n 20 "$state/apt.log" >&2; fail "apt-get failed"; }
}

# What packets may weigh on the way out: containers must not make larger ones.
mtu() {
    local interface
    interface=$(awk '$2 == "00000000" { print $1; exit }' /proc/net/route)
    cat "/sys/class/net/$interface/mtu" 2>/dev/null || echo 1500
}

start() {
    if answers; then
        say "an engine answers already: $(docker version --format '{{.Server.Version}}')"
        return
    fi
    ((EUID == 0)) || fail "no engine answers, and only root can start one"
    command -v apt-get >/dev/null || fail "no engine answers, and this is no Debian; start one by hand"
    mkdir -p "$state"
    install_packages
    if answers; then
        say "the engine that Debian's package starts answers"
        return
    fi
    say "starting dockerd; its log is $state/dockerd.log"
    setsid /usr/sbin/dockerd --mtu "$(mtu)" >"$state/dockerd.log" 2>&1 </dev/null &
    local pid=$!
    echo "$pid" >"$state/dockerd.pid"
    for _ in $(seq 120); do
        if answers; then
            say "dockerd $(docker version --format '{{.Server.Version}}') answers, process $pid"
            return
        fi
        is_ours "$pid" || kill -0 "$pid" 2>/dev/null || break
        sleep 0.5
    done
    tail -n 20 "$state/dockerd.log" >&2
    stop
    fail "dockerd does not answer"
}

stop() {
    local pid
    if ! pid=$(cat "$state/dockerd.pid" 2>/dev/null); then
        say "nothing was started here"
        return
    fi
    if is_ours "$pid"; then
        say "stopping dockerd, process $pid"
        kill "$pid"
        for _ in $(seq 120); do
            is_ours "$pid" || break
            sleep 0.5
        done
        if is_ours "$pid"; then fail "dockerd, process $pid, does not stop"; fi
    fi
    rm -f "$state/dockerd.pid"
}

case ${1:-} in
    start | stop) "$1" ;;
    *) fail "usage: $0 start|stop" ;;
esac
