#!/bin/sh
# Run a command; its status 2, a mistake that starting again does not mend, is 0 here, as containers start again after others.
child= told=
trap 'told=1; [ -n "$child" ] && kill -TERM "$child" 2>/dev/null' TERM INT # before the command can say that it is there
"$@" &
child=$!
[ -n "$told" ] && kill -TERM "$child" 2>/dev/null
wait "$child"
status=$?
while kill -0 "$child" 2>/dev/null; do # it was told to end, and does so
    wait "$child"
    status=$?
done
[ "$status" -eq 2 ] && status=0
exit "$status"
