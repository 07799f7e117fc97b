# Runs a daemon, the arguments, in a pod of a Job. A daemon that is told to end before its job has exits with 0, which
# the Job would take for success. This exits with 143 then, and the pod is replaced.
told= daemon= sent=
# Once: a second signal would end the daemon without its last checkpoint.
tell() {
    [ -z "$daemon" ] || [ -n "$sent" ] || { sent=yes; kill -TERM "$daemon"; }
}
trap 'told=yes; tell' TERM
"$@" &
daemon=$!
# The signal may have come before the shell knew the daemon's process id.
[ -z "$told" ] || tell
wait "$daemon"
code=$?
if [ -n "$told" ]; then
    wait "$daemon"
    code=$?
    [ "$code" -ne 0 ] || code=143
fi
exit "$code"
