#!/bin/sh
# The federation of compose.yaml as plain processes on this machine: sh local.sh [FOLDER] [PORT].
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-deploy-trial}
port=${2:-8000}
mkdir -p "$folder"
cd "$folder"
sh "$here/make-keys.sh" 127.0.0.1 localhost
sh "$here/coordinator.sh" "$here/federation.toml" --port "$port" --keys keys &
coordinator=$!
sites=
part=0
for site in north south east; do
    shoal join "localhost:$port" --data digits --part "$part" --policy "$here/site-policy.toml" \
        --key "$site/$site.key" --ca "$site/ca.pem" --folder "$site/state" --patience 60 &
    sites="$sites $!"
    part=$((part + 1))
done
trap 'kill -INT $coordinator $sites 2>/dev/null || true' INT TERM
failed=0
for process in $sites; do
    wait "$process" || failed=$?
done
[ "$failed" -eq 0 ] || kill -INT "$coordinator"
wait "$coordinator"
exit "$failed"
