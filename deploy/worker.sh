#!/bin/sh
# A worker of docker-compose.yml: ends when it is told to, not when its run is over. Compose stops everything when one
# container ends, and the master still has its report to write. Signals are left to the master: it drains first.
stop=
trap 'stop=1' INT TERM
locust -f /app/locustfiles/chat.py --worker "$@" &
worker=$!
while kill -0 "$worker" 2>/dev/null; do wait "$worker"; done
[ -n "$stop" ] || exec sleep infinity
