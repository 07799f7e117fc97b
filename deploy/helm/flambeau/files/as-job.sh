# Runs a daemon, the arguments, in a pod of a Job. A daemon that is told to end before its job has exits with 0, which
# the Job would take for success. This exits with 143 then, and the pod is replaced.
told= daemon=
trap 'told=yes; [ -z "$daemon" ] || kill -TERM "$daemon"' TERM
"$@" &
daemon=$!
# It may have been told before the daemon had a number.
[ -z "$told" ] || kill -TERM "$daemon"
wait "$daemon"
code=$?
if [ -n "$told" ]; then
    wait "$daemon"
    code=$?
    [ "$code" -ne 0 ] || code=143
fi
exit "$code"
