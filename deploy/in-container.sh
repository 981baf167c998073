#!/bin/sh
# Run a command; its status 2, a mistake that starting again does not mend, is 0 here, as containers start again after others.
"$@" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM INT
wait "$child"
status=$?
while kill -0 "$child" 2>/dev/null; do # it was told to end, and does so
    wait "$child"
    status=$?
done
[ "$status" -eq 2 ] && status=0
exit "$status"
